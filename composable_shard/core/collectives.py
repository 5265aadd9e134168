"""All-gather and reduce-scatter of many tensors in one launch, chosen by backend.

The default is one coalesced c10d collective. On gloo, whose collectives are slow, ours go straight
from rank to rank: every rank sends its shard to every other and receives theirs in place. All of
them return at once; waiting is :class:`~composable_shard.core.streams.Pending`'s business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.streams import Waitable


class Communication:
    """What a custom all-gather or reduce-scatter has in common.

    Attributes:
        tag: A number that the ranks have agreed on, different for each group of parameters, to
            tell the messages of one from those of another.
    """

    tag: int = 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer of ``size`` for the collective to read or write."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


class AllGather(Communication, ABC):
    """Interface of an all-gather; subclass it to bring your own.

    Source: ``torch.distributed.fsdp`` ``AllGather``; :meth:`launch` is new.
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Waitable | None:
        """Gather ``input_tensor`` [numel] of all ranks into ``output_tensor`` [N * numel]."""

    def launch(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> list[Waitable]:
        """Launch one all-gather for each pair; override to make it one message."""
        works = (
            self(out, own, group, async_op=True) for out, own in zip(outputs, inputs, strict=True)
        )
        return [work for work in works if work is not None]


class ReduceScatter(Communication, ABC):
    """Interface of a reduce-scatter; subclass it to bring your own.

    Source: ``torch.distributed.fsdp`` ``ReduceScatter``; :meth:`launch` and :meth:`averages`
    are new.
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
        """Reduce ``input_tensor`` [N * numel] and scatter it to ``output_tensor`` [numel]."""

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Tell whether ``op`` may be ``ReduceOp.AVG``."""
        return _torch.average_is_supported(_torch.backend_name(group, device))

    def launch(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        group: dist.ProcessGroup,
        op: Any,
    ) -> list[Waitable]:
        """Launch one reduce-scatter for each pair; override to make it one message."""
        works = (
            self(out, full, group, op, async_op=True)
            for out, full in zip(outputs, inputs, strict=True)
        )
        return [work for work in works if work is not None]


class CoalescedAllGather(AllGather):
    """One c10d launch for all tensors."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Waitable | None:
        return _finished_unless(async_op, self.launch([output_tensor], [input_tensor], group))

    def launch(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> list[Waitable]:
        if len({tensor.dtype for tensor in inputs}) > 1:
            outputs, inputs = _as_bytes(outputs), _as_bytes(inputs)
        return [_torch.all_gather_flat(outputs, inputs, group)]


class CoalescedReduceScatter(ReduceScatter):
    """One c10d launch for all tensors."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Waitable | None:
        return _finished_unless(async_op, self.launch([output_tensor], [input_tensor], group, op))

    def launch(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        group: dist.ProcessGroup,
        op: Any,
    ) -> list[Waitable]:
        return [_torch.reduce_scatter_flat(outputs, inputs, group, op)]


class DirectAllGather(AllGather):
    """Every rank sends its shard to every other, straight into place; for gloo."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Waitable | None:
        return _finished_unless(async_op, self.launch([output_tensor], [input_tensor], group))

    def launch(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> list[Waitable]:
        rank, num_ranks = group.rank(), group.size()
        places = [out.view(num_ranks, -1) for out in _sendable(outputs)]
        shards = _sendable(inputs)
        works: list[Waitable] = []
        for peer in _other_ranks(rank, num_ranks):
            works += [group.recv([place[peer]], peer, self.tag) for place in places]
        for peer in _other_ranks(rank, num_ranks):
            works += [group.send([own], peer, self.tag) for own in shards]
        for place, own in zip(places, shards, strict=True):
            place[rank].copy_(own)
        return works


class DirectReduceScatter(ReduceScatter):
    """Every rank sends every other its part, then each sums what it received; for gloo.

    The sum is taken in rank order, so that every shard of a gradient is rounded alike.
    """

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        return False

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Waitable | None:
        return _finished_unless(async_op, self.launch([output_tensor], [input_tensor], group, op))

    def launch(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        group: dist.ProcessGroup,
        op: Any,
    ) -> list[Waitable]:
        assert op == dist.ReduceOp.SUM, op
        rank, num_ranks = group.rank(), group.size()
        parts = [full.view(num_ranks, -1) for full in inputs]
        arrived = [torch.empty_like(part[: num_ranks - 1]) for part in parts]
        works: list[Waitable] = []
        for slot, peer in enumerate(_other_ranks(rank, num_ranks)):
            works += [group.recv([place[slot]], peer, self.tag) for place in arrived]
        for peer in _other_ranks(rank, num_ranks):
            works += [group.send([part[peer]], peer, self.tag) for part in parts]
        own = [part[rank] for part in parts]
        return [_RankOrderSum(works, outputs, own, arrived, rank)]


class _RankOrderSum:
    """Sums the parts of all ranks when they have arrived."""

    def __init__(
        self,
        works: list[Waitable],
        outputs: list[torch.Tensor],
        own: list[torch.Tensor],
        arrived: list[torch.Tensor],
        rank: int,
    ) -> None:
        self._works = works
        self._tensors = list(zip(outputs, own, arrived, strict=True))
        self._rank = rank

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        for out, own, arrived in self._tensors:
            # peers are received in the order rank + 1, ..., N - 1, 0, ..., rank - 1
            after = arrived.shape[0] - self._rank
            parts = [*arrived[after:], own, *arrived[:after]]
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)
        self._works, self._tensors = [], []
        return True


def choose_collectives(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[AllGather, ReduceScatter]:
    """Return the fastest implementations for the backend of ``group``.

    Args:
        group: The process group that the collectives will run in.
        device: Where the tensors are.
    """
    if _torch.backend_name(group, device) == "gloo":
        return DirectAllGather(), DirectReduceScatter()
    return CoalescedAllGather(), CoalescedReduceScatter()


def _other_ranks(rank: int, num_ranks: int) -> list[int]:
    """Ranks to talk to, beginning with the next one so that no rank is everybody's first."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def _as_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8) for tensor in tensors]


def _sendable(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Gloo knows no 8-bit floats: send their bytes."""
    return [
        tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        for tensor in tensors
    ]


def _finished_unless(async_op: bool, works: list[Waitable]) -> Waitable | None:
    if async_op:
        return _All(works)
    for work in works:
        work.wait()
    return None


class _All:
    """Several works as one."""

    def __init__(self, works: list[Waitable]) -> None:
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True
