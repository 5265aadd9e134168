"""All-gather and reduce-scatter from rank to rank on the CPU, for gloo, whose own are slow.

Ranks on the same host read each other's memory where they may (``same_host.py``). Others send:
every rank its shard to every other, straight into place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.transport.collectives import (
    AllGatherLaunch,
    ReduceScatterLaunch,
    Tensors,
    sum_dtype,
)
from composable_shard.core.transport.failures import lost, refuse_lost
from composable_shard.core.transport.pending import Waitable
from composable_shard.core.transport.same_host import Offer, Place, neighbours
from composable_shard.errors import ShardError

CHUNK_NUMEL = 1 << 16  # elements summed at once: a few of them fit into a cache
_SUM, _AVERAGE = dist.ReduceOp.SUM, dist.ReduceOp.AVG


class DirectAllGather(AllGatherLaunch):
    """Every rank gets the shard of every other, straight into place."""

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, tag: int
    ) -> list[Waitable]:
        rank, num_ranks = group.rank(), group.size()
        places = [out.view(num_ranks, -1) for out in _sendable(outputs)]
        shards = _sendable(inputs)
        near, far = _peers_of(group)
        messages = _Messages(group, tag)
        for peer in far:
            for place in places:
                messages.receive(place[peer], peer)
        for peer in far:
            for own in shards:
                messages.send(own, peer)
        works: list[Waitable] = [messages]
        if near:
            offer = Offer(group, tag, dict.fromkeys(near, shards))
            works.append(
                _Reading(offer, {peer: [place[peer] for place in places] for peer in near})
            )
        for place, own in zip(places, shards, strict=True):
            put_own(own, place[rank])
        return works


def put_own(shard: torch.Tensor, place: torch.Tensor) -> None:
    """Put the own part of a gather into its place, as every all-gather does within itself."""
    ctypes.memmove(place.data_ptr(), shard.data_ptr(), shard.nbytes)


class _Messages:
    """Messages to and from ranks that cannot be read, waited for together.

    A failure is raised by :meth:`wait`, when nothing is left to launch: who is there gets what it
    waits for, and blames the right rank.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group = group
        self._tag = tag
        self._works: list[tuple[dist.Work, int]] = []
        self._failures: list[tuple[ShardError, RuntimeError]] = []

    def receive(self, into: torch.Tensor, peer: int) -> None:
        self._launch(self._group.recv, into, peer)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._launch(self._group.send, tensor, peer)  # keeps the tensor

    def _launch(self, how: Callable[..., dist.Work], tensor: torch.Tensor, peer: int) -> None:
        try:
            self._works.append((how([tensor], peer, self._tag), peer))
        except RuntimeError as error:
            self._note(error, peer)

    def _note(self, error: RuntimeError, peer: int) -> None:
        self._failures.append((lost(self._group, peer, f"the error '{error}'"), error))

    def wait(self) -> bool:
        """Wait for all, also if one fails: the others are still written to.

        Hazard: a message that comes after its time-out is written into memory that was freed
        meanwhile. Guard: no work is kept, and gloo writes for none that is gone. Test:
        ``test_what_writes_a_late_message_is_not_kept``.
        """
        works, self._works = self._works[::-1], []
        while works:
            work, peer = works.pop()
            try:
                work.wait()
            except RuntimeError as error:
                self._note(error, peer)
            del work
        for failure, cause in self._failures:
            raise failure from cause
        return True


class _Reader:
    """Reads what neighbours offer when it is waited for; if it dies before, nobody will."""

    def __init__(self, offer: Offer | None) -> None:
        self._offer = offer

    def __del__(self) -> None:
        if self._offer is not None:
            self._offer.abandon()


class _Reading(_Reader):
    """Reads what neighbours offer into its places."""

    def __init__(self, offer: Offer, places: dict[int, Tensors]) -> None:
        super().__init__(offer)
        self._offer: Offer = offer
        self._places = places

    def wait(self) -> bool:
        places, self._places = self._places, {}
        for peer, members in places.items():
            for theirs, own in zip(self._offer.places(peer, members), members, strict=True):
                self._offer.read(peer, theirs.address, own)
        if places:
            self._offer.finish()
        return True


class DirectReduceScatter(ReduceScatterLaunch):
    """Every rank gets its part from every other and sums.

    The sum is taken in rank order, so that every shard of a gradient is rounded alike, and in
    float32 at least: one of half precision is rounded once, when it has been divided. Neighbours
    are read as they are, and widened as they are added; what is sent is cast before.
    """

    widens = True
    divides = True

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        return True

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, op: Any, tag: int
    ) -> list[Waitable]:
        rank, num_ranks = group.rank(), group.size()
        divisor = op if isinstance(op, float) else {_SUM: 1, _AVERAGE: num_ranks}[op]
        near, far = _peers_of(group)
        parts = [full.view(num_ranks, -1) for full in inputs]
        sums = [
            _RankOrderSum(out, {rank: part[rank]}, divisor)
            for out, part in zip(outputs, parts, strict=True)
        ]
        messages = _Messages(group, tag)
        for peer in far:
            for total, out in zip(sums, outputs, strict=True):
                total.parts[peer] = _torch.empty_like(out)
                messages.receive(total.parts[peer], peer)
        for peer in far:
            for part, out in zip(parts, outputs, strict=True):
                messages.send(part[peer].to(out.dtype), peer)
        offer = None
        if near:
            offer = Offer(group, tag, {peer: [part[peer] for part in parts] for peer in near})
        return [messages, _Summing(sums, offer, near)]


class _Summing(_Reader):
    """Takes the sums, after the messages before it."""

    def __init__(self, sums: list[_RankOrderSum], offer: Offer | None, near: list[int]) -> None:
        super().__init__(offer)
        self._sums = sums
        self._near = near

    def wait(self) -> bool:
        sums, self._sums = self._sums, []
        near, self._near = self._near, []
        offer = self._offer
        places = {peer: offer.places(peer) for peer in near} if offer else {}
        for index, total in enumerate(sums):
            total.take(offer, {peer: members[index] for peer, members in places.items()})
        if offer is not None and near:
            offer.finish()
        return True


class _RankOrderSum:
    """Sums the parts of all ranks, chunk by chunk.

    A chunk of a neighbour is read into a scratch that stays in the cache until it is added. So does
    the sum of a chunk that is to be rounded.

    Attributes:
        out: The sum, or the average.
        parts: Those that are in the memory of this rank, by the rank that each is of.
        divisor: What to divide by.
    """

    def __init__(self, out: torch.Tensor, parts: dict[int, torch.Tensor], divisor: float) -> None:
        self.out = out
        self.parts = parts
        self.divisor = divisor
        self._sum_dtype = sum_dtype(out.dtype)

    def take(self, offer: Offer | None, places: dict[int, Place]) -> None:
        """Take the sum of ``parts`` and of those that neighbours offer."""
        numel = self.out.numel()
        rounds = self._sum_dtype != self.out.dtype
        chunk_numel = CHUNK_NUMEL if places or rounds else max(numel, 1)
        wide = _torch.empty(
            min(chunk_numel, numel) if rounds else 0, dtype=self._sum_dtype, device=self.out.device
        )
        scratch = {
            peer: _torch.empty(min(chunk_numel, numel), dtype=place.dtype, device=self.out.device)
            for peer, place in places.items()
        }
        for start in range(0, numel, chunk_numel):
            total = self.out[start : start + chunk_numel]
            parts = {rank: part[start : start + chunk_numel] for rank, part in self.parts.items()}
            for peer, place in places.items():
                assert offer is not None
                parts[peer] = scratch[peer][: total.numel()]
                offer.read(peer, place.address + start * place.dtype.itemsize, parts[peer])
            in_order = [parts[rank] for rank in sorted(parts)]
            if rounds:
                self._add(in_order, wide[: total.numel()])
                total.copy_(wide[: total.numel()])
            else:
                self._add(in_order, total)

    def _add(self, parts: Tensors, total: torch.Tensor) -> None:
        first, second, *others = parts
        if total.dtype in (first.dtype, second.dtype):
            torch.add(first, second, out=total)
        else:  # two narrow ones would be added in their own dtype
            total.copy_(first).add_(second)
        for part in others:
            total.add_(part)
        if self.divisor != 1:
            total.div_(self.divisor)


def _peers_of(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Sort the other ranks into those to read from and those to exchange messages with.

    Both begin with the next rank, so that no rank is everybody's first.
    """
    refuse_lost(group)
    rank, num_ranks, near = group.rank(), group.size(), neighbours(group)
    others = [(rank + step) % num_ranks for step in range(1, num_ranks)]
    return [peer for peer in others if peer in near], [peer for peer in others if peer not in near]


def _sendable(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Gloo knows no 8-bit floats: send their bytes."""
    return [
        tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        for tensor in tensors
    ]
