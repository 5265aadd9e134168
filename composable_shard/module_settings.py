"""What users may change about a sharded module at any time, before or after its first forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import deprecated

from composable_shard.core.custom import AllGather, ReduceScatter, backend_memory, symmetric_memory
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.settings import check_reshard


class ModuleSettings:
    """The setters of :class:`FSDPModule`.

    All act from the next forward or backward on. Those that take ``recurse`` act on all sharded
    modules below too, which is the default; the others on this module's own group.
    """

    # What is freed, what is gathered ahead --------------------------------------------------

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Set whether unsharded parameters are freed after forward.

        Args:
            reshard_after_forward: The choice, as for :func:`fully_shard`; also for a root, which
                has no say of its own then.
            recurse: Whether to set it for all sharded modules below.

        Raises:
            ValueError: If it is neither a bool nor a number that divides that of the shards.
        """
        groups = self._groups(recurse)
        checked = [check_reshard(reshard_after_forward, group.channels) for group in groups]
        for group, choice in zip(groups, checked, strict=True):
            group.settings.reshard_after_forward = choice

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether unsharded parameters are freed after backward.

        ``False`` saves the gather of the next microbatch; after an optimizer step the parameters
        are gathered again all the same.

        Args:
            reshard_after_backward: The choice.
            recurse: Whether to set it for all sharded modules below.
        """
        _checked_bool("reshard_after_backward", reshard_after_backward)
        for group in self._groups(recurse):
            group.settings.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's own group.

        ``False`` is for parameters whose values backward does not read, such as an embedding's.

        Args:
            unshard_in_backward: The choice.
        """
        _checked_bool("unshard_in_backward", unshard_in_backward)
        self._group().settings.unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these modules' groups when this one runs forward, instead of the recorded next.

        Args:
            modules: Sharded modules, in the order to gather them; empty for the recorded order.

        Raises:
            ValueError: If one of them is not sharded.
        """
        self._group().settings.forward_prefetch = groups_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these modules' groups when this one runs backward, instead of the recorded next.

        Args:
            modules: Sharded modules, in the order to gather them; empty for the recorded order.

        Raises:
            ValueError: If one of them is not sharded.
        """
        self._group().settings.backward_prefetch = groups_of(modules)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next gather wait for ``event``, such as the end of an optimizer step.

        Needed for an optimizer that steps on a stream of its own.

        Args:
            event: Recorded after the optimizer step; used once. On the CPU nothing waits.

        Raises:
            TypeError: If it is no event.
        """
        if not isinstance(event, torch.Event):
            raise TypeError(f"Expected event to be a torch.Event, got {type(event).__name__}")
        self._group().context.post_optim_event = event

    # When gradients are reduced -------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the end of a backward waits for its reductions.

        ``False`` lets the last reductions of a microbatch overlap with the next one; gradients
        are complete after a backward for which it is ``True``. Acts on the whole tree.

        Args:
            is_last_backward: The choice.
        """
        self._group().context.backward.is_last = _checked_bool("is_last_backward", is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients over the ranks.

        Without, gradients are accumulated unsharded, visible as ``Partial`` DTensors in ``.grad``,
        and reduced by the next backward with it.

        Args:
            requires_gradient_sync: The choice.
            recurse: Whether to set it for all sharded modules below.
        """
        _checked_bool("requires_gradient_sync", requires_gradient_sync)
        for group in self._groups(recurse):
            group.settings.requires_gradient_sync = requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication within this context.

        Nests, and restores what was set before. Acts on this module and all below.
        """
        groups = self._groups(recurse=True)
        before = [group.settings.requires_gradient_sync for group in groups]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, value in zip(groups, before, strict=True):
                group.settings.requires_gradient_sync = value

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward goes on to reduce gradients over the replicas of a hybrid mesh.

        Without, gradients are reduced over the shards alone, visible as ``(Partial, Shard)``
        DTensors in ``.grad``, and over the replicas by the next backward with it.

        Args:
            requires_all_reduce: The choice; without effect on other meshes.
            recurse: Whether to set it for all sharded modules below.
        """
        _checked_bool("requires_all_reduce", requires_all_reduce)
        for group in self._groups(recurse):
            group.settings.reduction.all_reduces = requires_all_reduce

    # How gradients are reduced --------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what the sum of gradients over all ranks is divided by, instead of their number.

        Args:
            factor: A positive number. Gradients that are accumulated meanwhile are scaled by it.

        Raises:
            ValueError: If it is not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"Expected factor to be a positive number, got {factor!r}")
        self._group().settings.reduction.divisor = float(factor)

    @deprecated("Use set_gradient_divide_factor")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`, as it was named before."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only ever sum, and averages are taken beside them.

        Args:
            enable: The choice. Some backends sum faster than they average.
        """
        self._group().settings.reduction.sums_only = _checked_bool("enable", enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Do nothing: ranks may use different parameters, whatever is set.

        Args:
            reduce_scatter_unused_params: Accepted for those who come from FSDP2.
            recurse: The same.
        """
        _checked_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)

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
        """
        _checked_bool("enable", enable)
        group = self._group()
        for channel in group.channels.values():
            channel.use_memory(backend_memory(channel.mesh, group.label) if enable else None)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Let collectives use symmetric memory.

        Args:
            backend: Whose; only ``"NCCL"``.

        Raises:
            ValueError: For another backend.
            ShardError: If the process group is not one of NCCL, or custom communication was set.
        """
        if backend != "NCCL":
            raise ValueError(f"Expected the symmetric memory of 'NCCL', got {backend!r}")
        group = self._group()
        for channel in group.channels.values():
            channel.use_memory(symmetric_memory(channel.mesh, group.label))

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether reductions run in a process group of their own, beside the gathers.

        Args:
            enable: The choice.
            recurse: Whether to set it for all sharded modules below.

        Collective: makes one process group for each set of ranks, once.
        """
        _checked_bool("enable", enable)
        for group in self._groups(recurse):
            for channel in group.channels.values():
                channel.separate_reductions(enable)

    # Whose settings -------------------------------------------------------------------------

    def _group(self) -> ParamGroup:
        group = group_of(cast(nn.Module, self))
        assert group is not None
        return group

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        if not recurse:
            return [self._group()]
        modules = cast(nn.Module, self).modules()
        return list(dict.fromkeys(g for m in modules if (g := group_of(m)) is not None))


def groups_of(modules: Sequence[nn.Module]) -> list[ParamGroup]:
    """Return the group of each sharded module; raise ``ValueError`` if one is not sharded."""
    groups = []
    for module in modules:
        group = group_of(module) if isinstance(module, nn.Module) else None
        if group is None:
            raise ValueError(
                f"Expected sharded modules, got {type(module).__name__}; apply fully_shard to it"
            )
        groups.append(group)
    return groups


def _checked_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"Expected {name} to be a bool, got {type(value).__name__}: {value!r}")
    return value


def _check_comm(what: str, comm: Any) -> None:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"Expected a custom {what} with allocate and __call__, got {type(comm).__name__}"
        )
