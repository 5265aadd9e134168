"""The collectives of one parameter group over one mesh, and their implementations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.transport.collectives import (
    AllGather,
    AllGatherLaunch,
    BackendMemory,
    CoalescedAllGather,
    CoalescedReduceScatter,
    CustomAllGather,
    CustomReduceScatter,
    InBackendMemory,
    ReduceScatter,
    ReduceScatterLaunch,
    Tensors,
    UncoalescedAllGather,
    WaitThenCall,
    gather_on_rank,
    sum_dtype,
)
from composable_shard.core.transport.failures import (
    announce,
    announced,
    count_launch,
    status_of,
    watched,
    withdraw_failures,
)
from composable_shard.core.transport.gloo.point_to_point import (
    DirectAllGather,
    DirectReduceScatter,
    empty_for_gather,
)
from composable_shard.core.transport.pending import Waitable
from composable_shard.core.transport.process_groups import subgroup, subgroups_of
from composable_shard.errors import ShardError
from composable_shard.mesh import ShardMesh


class Channel:
    """The collectives of one group over one mesh.

    Attributes:
        mesh: The ranks.
        all_gather: The implementation of the all-gather of shards.
        reduce_scatter: The implementation of the reduce-scatter of gradients.
        gathering: The name of a gather in error messages.
        reducing: The name of a reduction in error messages.
        tags: The message tags of gathers and of reductions.
        allocate: Makes an uninitialized tensor for the outputs of gathers, given the number of
            elements and the ``dtype``. Collective on gloo: see ``mailbox_of``.
    """

    def __init__(self, mesh: ShardMesh) -> None:
        self.mesh = mesh
        self.all_gather: AllGatherLaunch
        self.reduce_scatter: ReduceScatterLaunch
        self._gather_to: Callable[..., list[Waitable]]
        self.allocate: Callable[..., torch.Tensor] = partial(_torch.empty, device=mesh.device)
        self._use_fastest()
        # Without a sharding axis, both are None, and no collective over the shards is called.
        self._shard_group = self._reduce_group = cast(dist.ProcessGroup, mesh.shard_group)
        self.tags = 0, 1
        self._is_custom = False
        self.set_label("a group")

    def set_label(self, label: str) -> None:
        """Name the group in error messages."""
        self.gathering = f"gathering {label}"
        self.reducing = f"reducing the gradients of {label}"

    def set_tag(self, tag: int) -> None:
        """Derive both tags from a number that the ranks have agreed on."""
        self.tags = 2 * tag, 2 * tag + 1

    # Implementations ------------------------------------------------------------------------

    def _use_fastest(self) -> None:
        group, device = self.mesh.shard_group, self.mesh.device
        backend = None if group is None else _torch.backend_name(group, device)
        if group is not None and backend == "gloo" and not _torch.has_streams(device):
            self.all_gather, self.reduce_scatter = DirectAllGather(), DirectReduceScatter()
            self._gather_to = DirectAllGather().launch
            self.allocate = partial(empty_for_gather, group=group)
        else:
            self._gather_to = gather_on_rank
            self.all_gather = UncoalescedAllGather() if backend == "gloo" else CoalescedAllGather()
            self.reduce_scatter = CoalescedReduceScatter()

    def use_all_gather(self, comm: AllGather) -> None:
        """Use a custom all-gather from now on."""
        self.all_gather, self._is_custom = CustomAllGather(comm), True

    def use_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Use a custom reduce-scatter from now on."""
        self.reduce_scatter, self._is_custom = CustomReduceScatter(comm), True

    def check_built_in(self) -> None:
        """Raise ``ShardError`` if custom collectives are set, since they allocate their memory."""
        if self._is_custom:
            raise ShardError(
                "Expected built-in collectives, got custom ones, which allocate their own memory; "
                "choose the memory in their allocate method"
            )

    def use_memory(self, memory: BackendMemory | None) -> None:
        """Run collectives in memory of the backend; ``None`` restores the built-in collectives."""
        if memory is None:
            self._use_fastest()
        else:
            self.all_gather = CustomAllGather(InBackendMemory(memory, _torch.all_gather_single))
            reduce_scatter = InBackendMemory(memory, _torch.reduce_scatter_single)
            self.reduce_scatter = CustomReduceScatter(reduce_scatter)

    def separate_reductions(self, enable: bool) -> None:
        """Set whether reductions use a separate process group.

        Collective: makes the process group at the first call.
        """
        group = self.mesh.shard_group
        if group is not None:
            self._reduce_group = subgroup(group, group.size()) if enable else group

    def saved(self) -> tuple[dict[str, Any], bool]:
        """Return the settings to pickle, without the memory of a backend."""
        names = ("all_gather", "reduce_scatter", "_is_custom") if self._is_custom else ()
        custom = {name: getattr(self, name) for name in names}
        return custom, self._reduce_group is not self.mesh.shard_group

    def restore(self, custom: dict[str, Any], is_separate: bool) -> None:
        """Restore the settings of :meth:`saved`.

        Collective: see :meth:`separate_reductions`.
        """
        self.__dict__.update(custom)
        self.separate_reductions(is_separate)

    # Collectives ----------------------------------------------------------------------------

    def gather(
        self, outputs: Tensors, inputs: Tensors, num_neighbors: int | None = None
    ) -> list[Waitable]:
        """Gather every input [n] over the shards into its output [num_shards * n].

        Args:
            outputs: The tensors to write.
            inputs: The tensors to send.
            num_neighbors: Gather over this many neighbouring ranks instead of all shards.
        """
        group, launch, tag = self._shard_group, self.all_gather.launch, self.tags[0]
        if num_neighbors is not None:
            group = subgroup(group, num_neighbors)
        return self._launch(partial(launch, outputs, inputs, group, tag), group, self.gathering)

    def gather_to(self, to: int, outputs: Tensors, inputs: Tensors) -> list[Waitable]:
        """Gather every input on one rank of the shards.

        Args:
            to: The rank, within the shard group.
            outputs: The tensors to write; empty on the other ranks.
            inputs: The tensors to send.
        """
        group = self._shard_group
        launch = partial(self._gather_to, outputs, inputs, group, self.tags[0], to)
        return self._launch(launch, group, self.gathering)

    def prepare_regather(self, num_ranks: int) -> None:
        """Make the process group of ``num_ranks`` neighbours now, while all ranks can take part.

        Collective: makes the process group at the first call.
        """
        if self.mesh.shard_group is not None:
            subgroup(self.mesh.shard_group, num_ranks)

    def can_average(self) -> bool:
        """Return whether the reduce-scatter itself can average."""
        group = self.mesh.shard_group
        return group is not None and self.reduce_scatter.averages(group, self.mesh.device)

    def reduce(
        self, outputs: Any, inputs: Tensors, dtype: torch.dtype, divisor: float | None
    ) -> list[Waitable]:
        """Reduce every input [num_shards * n] over the shards, and scatter it into its output [n].

        Args:
            outputs: The tensors to write; see `ReduceScatterLaunch`.
            inputs: The tensors to reduce.
            dtype: The dtype of the outputs.
            divisor: The divisor of the sum; ``None`` keeps the sum. If the reduce-scatter does not
                ``divide`` by any number, pass the number of ranks of the group, and only if
                :meth:`can_average` is true.
        """
        group = self._reduce_group
        op: Any = dist.ReduceOp.SUM if divisor is None else dist.ReduceOp.AVG
        if divisor is not None and self.reduce_scatter.divides:
            op = divisor
        args = outputs, inputs, group, op, self.tags[1], dtype
        return self._launch(partial(self.reduce_scatter.launch, *args), group, self.reducing)

    def exchange(self, output: torch.Tensor, source: torch.Tensor) -> list[Waitable]:
        """Send row r of ``source`` to rank r of the shards: an all-to-all.

        Args:
            output: The tensor to write, [num_shards, n]: row r comes from rank r.
            source: The tensor to send, [num_shards, n].
        """
        group = self._reduce_group

        def launch() -> list[Waitable]:
            work = dist.all_to_all_single(output, source, group=group, async_op=True)
            return [] if work is None else [work]

        return self._launch(launch, group, self.reducing)

    def divides_over_replicas(self, dtype: torch.dtype) -> bool:
        """Return whether :meth:`all_reduce` divides the sum itself; otherwise the backend averages.

        Gloo rounds after each addition. So narrow dtypes are summed in a wider one and rounded
        once.
        """
        group = self.mesh.replica_group
        is_gloo = group is not None and _torch.message_backend(group, self.mesh.device) == "gloo"
        return is_gloo and sum_dtype(dtype) != dtype

    def all_reduce(self, tensor: torch.Tensor) -> list[Waitable]:
        """Average a tensor over the replicas, in place."""
        group = self.mesh.replica_group
        assert group is not None
        divides = self.divides_over_replicas(tensor.dtype)
        summed = tensor.to(sum_dtype(tensor.dtype)) if divides else tensor
        op = dist.ReduceOp.SUM if divides else dist.ReduceOp.AVG

        def launch() -> list[Waitable]:
            work = dist.all_reduce(summed, op, group=group, async_op=True)
            if work is None or not divides:
                return [] if work is None else [work]
            return [WaitThenCall(work, lambda: tensor.copy_(summed.div_(group.size())))]

        return self._launch(launch, group, self.reducing)

    # Failures -------------------------------------------------------------------------------

    @property
    def process_groups(self) -> list[dist.ProcessGroup | None]:
        """The process groups in which other ranks may wait for this rank."""
        shards = self.mesh.shard_group
        return [shards, self.mesh.replica_group, self._reduce_group, *subgroups_of(shards)]

    def _launch(
        self, launch: Callable[[], list[Waitable]], group: dist.ProcessGroup, op: str
    ) -> list[Waitable]:
        """Launch collectives; if that fails, name the operation and announce the failure."""
        if announced:  # this rank goes on after a failure that it has published
            withdraw_failures()
        is_watched = status_of(group) is not None
        # To find deadlocks, ranks compare keys. Replicas may have different tags, so a reduction
        # over the replicas has no key.
        has_key = is_watched and group is not self.mesh.replica_group
        key = f"{self.tags[0]} {op}" if has_key else ""
        number = count_launch(group, key) if key else 0
        try:
            works = launch()
        except Exception as error:
            explained: Exception = error
            if isinstance(error, RuntimeError):
                explained = watched(group, op).explain(error)
            announce(self.process_groups, op, error)
            if explained is error:
                raise
            raise explained from error
        if not works or not is_watched:
            return works
        return [_Launched(works, partial(watched, group, op, key, number))]


class _Launched:
    """The collectives of one launch. A thread of `background.py` watches the wait."""

    def __init__(self, works: list[Waitable], watch: Callable[[], watched]) -> None:
        self._works = works[::-1]
        self._watch = watch

    def wait(self) -> None:
        with self._watch():
            while self._works:
                self._works.pop().wait()
