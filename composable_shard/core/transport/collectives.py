"""Collectives of many tensors in one call of ``launch``, built-in or custom.

``launch`` returns at once; ``Pending`` (`pending.py`) waits.

Built-in collectives read and write the given tensors directly. A custom collective, or one in
memory of the backend, reads one flat tensor and writes another, which takes a copy-in and a
copy-out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.transport.pending import Waitable
from composable_shard.errors import ShardError
from composable_shard.mesh import ShardMesh

# All-gather and reduce-scatter of many tensors in one launch --------------------------------------

Tensors = list[torch.Tensor]


class AllGatherLaunch(Protocol):
    """Gathers many tensors at once."""

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, tag: int
    ) -> list[Waitable]:
        """Launch the all-gather of each input [n] into its output [N * n].

        Args:
            outputs: The tensors to write.
            inputs: The tensors to send.
            group: The ranks.
            tag: The tag of these messages, which the ranks have agreed on.
        """


class ReduceScatterLaunch(Protocol):
    """Reduces many tensors at once.

    Attributes:
        widens: Whether inputs may have narrower dtypes than the outputs, even different ones on
            different ranks. The sum has the dtype of the outputs.
        divides: Whether it can divide a sum by any number before it rounds the sum.
        keeps_inputs: Whether the launched work keeps the inputs as long as it needs them. If not,
            the caller must keep them until the wait.
        allocates_late: Whether the outputs may be an iterator that allocates them, each at the wait
            when it is written.
    """

    widens: bool = False
    divides: bool = False
    keeps_inputs: bool = False
    allocates_late: bool = False

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Return whether :meth:`launch` accepts ``ReduceOp.AVG``."""
        return _torch.average_is_supported(_torch.backend_name(group, device))

    def launch(
        self, outputs: Any, inputs: Tensors, group: dist.ProcessGroup, op: Any, tag: int, dtype: Any
    ) -> list[Waitable]:
        """Launch the reduce-scatter of each input [N * n] into its output [n].

        Args:
            outputs: The tensors to write; see ``allocates_late``.
            inputs: The tensors to send.
            group: The ranks.
            op: A ``ReduceOp``, or a divisor of the sum, if the reduce-scatter ``divides``.
            tag: The tag of these messages, which the ranks have agreed on.
            dtype: The dtype of the outputs.
        """


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to sum tensors of ``dtype``, so that the sum is rounded once."""
    is_half = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if is_half else dtype


class UncoalescedAllGather(AllGatherLaunch):
    """One c10d launch for each tensor.

    Hazard: gloo writes to wrong memory if two coalesced all-gathers are in flight in a group.
    Guard: `Channel` uses this class for gloo on devices.
    Test: ``test_gloo_launches_no_coalesced_all_gather``.
    """

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, tag: int
    ) -> list[Waitable]:
        return list(map(partial(_torch.all_gather_single, group=group), outputs, inputs))


_dtype = attrgetter("dtype")


class CoalescedAllGather(AllGatherLaunch):
    """One c10d launch for all tensors."""

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, tag: int
    ) -> list[Waitable]:
        if len(set(map(_dtype, inputs))) > 1:
            outputs, inputs = _as_bytes(outputs), _as_bytes(inputs)
        # If no parameter has elements, there are no messages.
        return [_torch.all_gather_flat(outputs, inputs, group)] if inputs else []


def gather_on_rank(
    outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, _: int, to: int
) -> list[Waitable]:
    """Launch the gather of each input [n] into its output [N * n] on rank ``to`` of ``group``.

    On the other ranks, ``outputs`` is empty.
    """
    works: list[Waitable] = []
    for index, shard in enumerate(inputs):
        rows = list(outputs[index].view(group.size(), -1)) if outputs else None
        work = dist.gather(shard, rows, group=group, group_dst=to, async_op=True)
        works += [] if work is None else [work]
    return works


class CoalescedReduceScatter(ReduceScatterLaunch):
    """One c10d launch for all tensors."""

    def launch(
        self, outputs: Any, inputs: Tensors, group: dist.ProcessGroup, op: Any, *_: Any
    ) -> list[Waitable]:
        return [_torch.reduce_scatter_flat(outputs, inputs, group, op)]


def _as_bytes(tensors: Sequence[torch.Tensor]) -> Tensors:
    return [tensor.view(torch.uint8) for tensor in tensors]


# Custom collectives, and memory of a backend ------------------------------------------------------


class _Allocates(ABC):
    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a contiguous buffer for the collective to read or write.

        Args:
            size: The shape of the buffer.
            dtype: Its dtype.
            device: Its device.
        """


class AllGather(_Allocates):
    """Subclass this to bring your own all-gather; see ``FSDPModule.set_custom_all_gather``.

    The interface is that of ``torch.distributed.fsdp`` ``AllGather``.

    Example:
        >>> class Counted(AllGather):
        ...     calls = 0
        ...     def allocate(self, size, *, dtype, device):
        ...         return torch.empty(size, dtype=dtype, device=device)
        ...     def __call__(self, output_tensor, input_tensor, group, async_op=False):
        ...         self.calls += 1
        ...         return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Waitable | None:
        """Gather ``input_tensor`` [numel] of all ranks into ``output_tensor`` [N * numel].

        Args:
            output_tensor: Made by :meth:`allocate`.
            input_tensor: Made by :meth:`allocate`.
            group: The N ranks.
            async_op: Whether to return a work to wait for. ``None`` is allowed in any case; it
                means that the gather is done.
        """


class ReduceScatter(_Allocates):
    """Subclass this to bring your own reduce-scatter; see ``set_custom_reduce_scatter``.

    The interface is that of ``torch.distributed.fsdp`` ``ReduceScatter``.

    Example:
        >>> class Logged(ReduceScatter):
        ...     def allocate(self, size, *, dtype, device):
        ...         return torch.empty(size, dtype=dtype, device=device)
        ...     def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        ...         return dist.reduce_scatter_tensor(
        ...             output_tensor, input_tensor, op, group, async_op)
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Waitable | None:
        """Reduce ``input_tensor`` [N * numel] by ``op`` and scatter it to ``output_tensor``."""


class WaitThenCall:
    """Waits for a collective, if there is one, then calls a function, once.

    It keeps the sent tensor until the wait: a custom collective may run on a separate stream, and
    only the wait orders that stream before the next use of the memory.
    """

    def __init__(
        self, work: Waitable | None, call: Callable[[], object], sent: torch.Tensor | None = None
    ) -> None:
        self._work, self._sent = work, sent
        self._call: Callable[[], object] | None = call

    def wait(self) -> bool:
        if self._work is not None:
            self._work.wait()
        call, self._call, self._sent = self._call, None, None
        if call is not None:
            call()
        return True


class CustomAllGather(AllGatherLaunch):
    """Calls a custom all-gather once for each dtype."""

    def __init__(self, comm: AllGather | InBackendMemory) -> None:
        self.comm = comm

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, tag: int
    ) -> list[Waitable]:
        return _launch_custom(self.comm, (outputs, group.size()), (inputs, 1), group)


class CustomReduceScatter(ReduceScatterLaunch):
    """Calls a custom reduce-scatter once for each dtype."""

    def __init__(self, comm: ReduceScatter | InBackendMemory) -> None:
        self.comm = comm

    def launch(
        self, outputs: Any, inputs: Tensors, group: dist.ProcessGroup, op: Any, *_: Any
    ) -> list[Waitable]:
        return _launch_custom(self.comm, (outputs, 1), (inputs, group.size()), group, op)


def _launch_custom(
    comm: Any,
    outputs: tuple[Tensors, int],
    inputs: tuple[Tensors, int],
    group: dist.ProcessGroup,
    *op: Any,
) -> list[Waitable]:
    """Launch a custom collective for the tensors of each dtype.

    Args:
        comm: The all-gather or reduce-scatter.
        outputs: The tensors to write, and their number of rows: N for an all-gather of N ranks, 1
            for a reduce-scatter.
        inputs: The tensors to send, and their number of rows: 1 for an all-gather, N for a
            reduce-scatter.
        group: The ranks.
        op: The reduce op of a reduce-scatter.
    """
    (targets, target_rows), (sources, source_rows) = outputs, inputs
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, source in enumerate(sources):
        by_dtype.setdefault(source.dtype, []).append(index)
    works: list[Waitable] = []
    for dtype, indices in by_dtype.items():
        rows = [sources[index].view(source_rows, -1) for index in indices]
        numels = [source.shape[1] for source in rows]
        allocate = partial(comm.allocate, dtype=dtype, device=rows[0].device)
        sent, received = (allocate((num * sum(numels),)) for num in (source_rows, target_rows))
        torch.cat(rows, dim=1, out=sent.view(source_rows, -1))
        work = comm(received, sent, group, *op, async_op=True)
        parts = received.view(target_rows, -1).split(numels, dim=1)
        into = [targets[index].view(target_rows, -1) for index in indices]
        works.append(WaitThenCall(work, partial(_copy_each, into, parts), sent))
    return works


def _copy_each(into: Tensors, parts: Sequence[torch.Tensor]) -> None:
    for target, part in zip(into, parts, strict=True):
        target.copy_(part)


@dataclass(frozen=True)
class BackendMemory:
    """Memory that a backend sends from directly; the library still copies in and out.

    Attributes:
        allocate: Called with shape, dtype and device; returns a buffer.
        register: Called with a buffer and the process group, before a collective uses the buffer.
    """

    allocate: Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]
    register: Callable[[torch.Tensor, dist.ProcessGroup], object] = lambda *_: None


class InBackendMemory(_Allocates):
    """A collective of c10d in memory that the backend allocates; it is always asynchronous.

    Args:
        memory: The memory.
        launch: Launches the collective. It is called with the output, the input, the process group
            and, for a reduction, the reduce op.
    """

    def __init__(self, memory: BackendMemory, launch: Callable[..., dist.Work]) -> None:
        self._memory, self._launch = memory, launch

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return _torch.poison_uninitialized(self._memory.allocate(size, dtype, device))

    def __call__(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        group: dist.ProcessGroup,
        *op: Any,
        async_op: bool,
    ) -> Waitable:
        """Register the buffers and launch the collective."""
        for buffer in (output, source):
            self._memory.register(buffer, group)
        return self._launch(output, source, group, *op)


def backend_memory(mesh: ShardMesh, label: str) -> BackendMemory:
    """Return the memory allocator of the backend of a mesh.

    Args:
        mesh: The mesh.
        label: The name of the parameter group, for the error.

    Raises:
        ShardError: If the backend cannot allocate memory.
    """
    group, device = mesh.shard_group, mesh.device
    allocate = None if group is None else _torch.backend_allocator(group, device)
    if allocate is None:
        name = "no process group" if group is None else _torch.backend_name(group, device)
        raise ShardError(
            f"Expected a backend that allocates memory for {label}, got {name}, which does not"
        )
    return BackendMemory(allocate)


def symmetric_memory(mesh: ShardMesh, label: str) -> BackendMemory:
    """Return the symmetric memory of NCCL; ``label`` is the group's name, for the error.

    Raises:
        ShardError: If the backend of the shards is not NCCL.
    """
    group, device = mesh.shard_group, mesh.device
    name = "no process group" if group is None else _torch.backend_name(group, device)
    if name != "nccl":
        raise ShardError(f"Expected {label} on NCCL, the backend with symmetric memory, got {name}")
    return BackendMemory(*_torch.symmetric_memory_of_nccl())
