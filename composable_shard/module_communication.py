"""How gradients of a sharded module are reduced and tensors travel: what users may change."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from composable_shard.core.comms.custom import (
    AllGather,
    ReduceScatter,
    backend_memory,
    symmetric_memory,
)
from composable_shard.module_settings import HasGroup, checked_bool


class ModuleCommunication(HasGroup):
    """The setters of :class:`FSDPModule` for its communication.

    All act from the next forward or backward on. Those that take ``recurse`` act on all sharded
    modules below too, which is the default; the others on this module's own group.
    """

    # How gradients are reduced --------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what the sum of gradients over all ranks is divided by, instead of their number.

        Args:
            factor: A positive number. Gradients that are accumulated meanwhile are scaled by it.

        Raises:
            ValueError: If it is not a positive number.

        Example:
            >>> model[0].set_gradient_divide_factor(1.0)
            >>> model(x).sum().backward()
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"Expected factor to be a positive number, got {factor!r}")
        self._group().settings.reduction.divisor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`, as it was named before; deprecated."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated; call set_gradient_divide_factor",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only ever sum, and averages are taken beside them.

        Args:
            enable: The choice. Some backends sum faster than they average.

        Example:
            >>> model[0].set_force_sum_reduction_for_comms(True)
            >>> model(x).sum().backward()
        """
        self._group().settings.reduction.sums_only = checked_bool("enable", enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Do nothing: ranks may use different parameters, whatever is set.

        Args:
            reduce_scatter_unused_params: Accepted for those who come from FSDP2.
            recurse: The same.

        Example:
            >>> model.set_reduce_scatter_unused_params(True)
        """
        checked_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many reductions may be under way at once; the largest number of a tree counts.

        Each holds its unsharded gradients until it is done. More than the default, one, helps
        where reductions take longer than the backward beside them.

        Args:
            max_input_buffers: At least 1.
            recurse: Whether to set it for all sharded modules below.

        Raises:
            TypeError: If it is not an int.
            ValueError: If it is less than 1.

        Example:
            >>> model.set_reduce_scatter_max_input_buffers(2)
            >>> model(x).sum().backward()
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"Expected max_input_buffers to be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"Expected max_input_buffers of at least 1, got {max_input_buffers}")
        for group in self._groups(recurse):
            group.settings.max_reductions = max_input_buffers

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object], *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook`` with each flat buffer of reduced gradients before they are handed out.

        Args:
            hook: Gets a 1-D tensor, reduced over shards and replicas, to change in place.
            stream: Where to run it; not with replicas, whose reduction has its own place.

        Raises:
            TypeError: If ``hook`` cannot be called.
            ValueError: If ``stream`` is given for a hybrid mesh.

        Example:
            >>> sums = []
            >>> model[0].set_all_reduce_hook(lambda grads: sums.append(grads.shape))
            >>> model(x).sum().backward()
            >>> sums
            [torch.Size([10])]
        """
        if not callable(hook):
            raise TypeError(f"Expected hook to be callable, got {type(hook).__name__}")
        group = self._group()
        if stream is not None and any(mesh.num_replicas > 1 for mesh in group.channels):
            raise ValueError(
                f"Expected no stream for {group.label}, which has replicas: their all-reduce "
                "decides when the hook runs"
            )
        group.settings.reduction.hook = hook
        group.settings.reduction.hook_stream = stream

    # How tensors travel ---------------------------------------------------------------------

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's own group by a custom all-gather.

        Args:
            comm: Called with one flat tensor for each mesh and dtype; copied in and out.

        Raises:
            TypeError: If it has no ``allocate`` or cannot be called.

        Example:
            >>> from composable_shard import AllGather
            >>> class Plain(AllGather):
            ...     def allocate(self, size, *, dtype, device):
            ...         return torch.empty(size, dtype=dtype, device=device)
            ...     def __call__(self, output_tensor, input_tensor, group, async_op=False):
            ...         output_tensor.copy_(input_tensor.repeat(group.size()))
            >>> model[0].set_custom_all_gather(Plain())
            >>> output = model(x)
        """
        _check_comm("all-gather", comm)
        for channel in self._group().channels.values():
            channel.use_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce the gradients of this module's own group by a custom reduce-scatter.

        Args:
            comm: Called with one flat tensor for each mesh and dtype; copied in and out.

        Raises:
            TypeError: If it has no ``allocate`` or cannot be called.

        Example:
            >>> from composable_shard import ReduceScatter
            >>> class First(ReduceScatter):
            ...     def allocate(self, size, *, dtype, device):
            ...         return torch.empty(size, dtype=dtype, device=device)
            ...     def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            ...         output_tensor.copy_(input_tensor.chunk(group.size())[0])
            >>> model[0].set_custom_reduce_scatter(First())
            >>> model(x).sum().backward()
        """
        _check_comm("reduce-scatter", comm)
        for channel in self._group().channels.values():
            channel.use_reduce_scatter(comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether collectives use memory that their backend allocates.

        Args:
            enable: The choice; ``False`` returns to collectives in place.

        Raises:
            ShardError: If the backend allocates none, or custom communication was set.

        Example:
            >>> model[0].set_allocate_memory_from_process_group_for_comm(False)
        """
        checked_bool("enable", enable)
        group = self._group()
        for channel in group.channels.values():
            channel.check_built_in()
            channel.use_memory(backend_memory(channel.mesh, group.label) if enable else None)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Let collectives use symmetric memory.

        Args:
            backend: Whose; only ``"NCCL"``.

        Raises:
            ValueError: For another backend.
            ShardError: If the process group is not one of NCCL, or custom communication was set.

        Example:
            >>> model[0].set_symm_mem_for_comm("NCCL")
            Traceback (most recent call last):
            composable_shard.errors.ShardError: Expected group '0' on NCCL, ...
        """
        if backend != "NCCL":
            raise ValueError(f"Expected the symmetric memory of 'NCCL', got {backend!r}")
        group = self._group()
        for channel in group.channels.values():
            channel.check_built_in()
            channel.use_memory(symmetric_memory(channel.mesh, group.label))

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether reductions run in a process group of their own, beside the gathers.

        Args:
            enable: The choice.
            recurse: Whether to set it for all sharded modules below.

        Collective: makes one process group for each set of ranks, once.

        Example:
            >>> model.set_separate_reduce_scatter_group()
            >>> model(x).sum().backward()
        """
        checked_bool("enable", enable)
        for group in self._groups(recurse):
            for channel in group.channels.values():
                channel.separate_reductions(enable)


def _check_comm(what: str, comm: Any) -> None:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"Expected a custom {what} with allocate and __call__, got {type(comm).__name__}"
        )
