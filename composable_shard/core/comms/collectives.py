"""All-gather and reduce-scatter of many tensors in one launch, chosen by backend.

The default is one coalesced c10d collective. On gloo, whose collectives are slow, ours go straight
from rank to rank: every rank sends its shard to every other and receives theirs in place. All of
them return at once; waiting is :class:`~composable_shard.core.comms.streams.Pending`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.comms.streams import Waitable

Tensors = list[torch.Tensor]


class AllGatherLaunch(Protocol):
    """Gathers many tensors at once."""

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, tag: int
    ) -> list[Waitable]:
        """Launch the all-gather of each input [n] into its output [N * n].

        Args:
            outputs: What to write.
            inputs: What to send.
            group: The ranks.
            tag: A number on which the ranks have agreed, to tell these messages from others.
        """


class ReduceScatterLaunch(Protocol):
    """Reduces many tensors at once."""

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Tell whether ``op`` may be ``ReduceOp.AVG``."""

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, op: Any, tag: int
    ) -> list[Waitable]:
        """Launch the reduce-scatter of each input [N * n] into its output [n]; see all-gather."""


class CoalescedAllGather(AllGatherLaunch):
    """One c10d launch for all tensors."""

    def launch(
        self,
        outputs: Tensors,
        inputs: Tensors,
        group: dist.ProcessGroup,
        tag: int,
    ) -> list[Waitable]:
        if len({tensor.dtype for tensor in inputs}) > 1:
            outputs, inputs = _as_bytes(outputs), _as_bytes(inputs)
        return [_torch.all_gather_flat(outputs, inputs, group)]


class CoalescedReduceScatter(ReduceScatterLaunch):
    """One c10d launch for all tensors."""

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        return _torch.average_is_supported(_torch.backend_name(group, device))

    def launch(
        self,
        outputs: Tensors,
        inputs: Tensors,
        group: dist.ProcessGroup,
        op: Any,
        tag: int,
    ) -> list[Waitable]:
        return [_torch.reduce_scatter_flat(outputs, inputs, group, op)]


class DirectAllGather(AllGatherLaunch):
    """Every rank sends its shard to every other, straight into place; for gloo."""

    def launch(
        self,
        outputs: Tensors,
        inputs: Tensors,
        group: dist.ProcessGroup,
        tag: int,
    ) -> list[Waitable]:
        rank, num_ranks = group.rank(), group.size()
        places = [out.view(num_ranks, -1) for out in _sendable(outputs)]
        shards = _sendable(inputs)
        works: list[Waitable] = []
        for peer in _other_ranks(rank, num_ranks):
            works += [group.recv([place[peer]], peer, tag) for place in places]
        for peer in _other_ranks(rank, num_ranks):
            works += [group.send([own], peer, tag) for own in shards]
        for place, own in zip(places, shards, strict=True):
            place[rank].copy_(own)
        return works


class DirectReduceScatter(ReduceScatterLaunch):
    """Every rank sends every other its part, then each sums what it received; for gloo.

    The sum is taken in rank order, so that every shard of a gradient is rounded alike.
    """

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        return False

    def launch(
        self,
        outputs: Tensors,
        inputs: Tensors,
        group: dist.ProcessGroup,
        op: Any,
        tag: int,
    ) -> list[Waitable]:
        assert op == dist.ReduceOp.SUM, op
        rank, num_ranks = group.rank(), group.size()
        parts = [full.view(num_ranks, -1) for full in inputs]
        arrived = [torch.empty_like(part[: num_ranks - 1]) for part in parts]
        works: list[Waitable] = []
        for slot, peer in enumerate(_other_ranks(rank, num_ranks)):
            works += [group.recv([place[slot]], peer, tag) for place in arrived]
        for peer in _other_ranks(rank, num_ranks):
            works += [group.send([part[peer]], peer, tag) for part in parts]
        own = [part[rank] for part in parts]
        return [_RankOrderSum(works, outputs, own, arrived, rank)]


class _RankOrderSum:
    """Sums the parts of all ranks when they have arrived."""

    def __init__(
        self,
        works: list[Waitable],
        outputs: Tensors,
        own: Tensors,
        arrived: Tensors,
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


def choose(
    group: dist.ProcessGroup | None, device: torch.device
) -> tuple[AllGatherLaunch, ReduceScatterLaunch]:
    """Return the fastest implementations for the backend of ``group``.

    Args:
        group: The process group that the collectives will run in, if there will be any.
        device: Where the tensors are.
    """
    # From rank to rank gloo sends memory of the host alone, and does not look whose it is.
    on_host = device.type == "cpu"
    if group is not None and on_host and _torch.backend_name(group, device) == "gloo":
        return DirectAllGather(), DirectReduceScatter()
    return CoalescedAllGather(), CoalescedReduceScatter()


def _other_ranks(rank: int, num_ranks: int) -> list[int]:
    """Ranks to talk to, beginning with the next one so that no rank is everybody's first."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def _as_bytes(tensors: Sequence[torch.Tensor]) -> Tensors:
    return [tensor.view(torch.uint8) for tensor in tensors]


def _sendable(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Gloo knows no 8-bit floats: send their bytes."""
    return [
        tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        for tensor in tensors
    ]
