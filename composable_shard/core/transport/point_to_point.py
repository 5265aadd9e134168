"""All-gather and reduce-scatter from rank to rank on the CPU, for gloo, whose own are slow.

Ranks on the same host read what the others publish in shared memory (``mailbox.py``). Others send:
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
    GatherLaunch,
    ReduceScatterLaunch,
    Tensors,
    sum_dtype,
)
from composable_shard.core.transport.failures import lost, refuse_lost
from composable_shard.core.transport.mailbox import Exchange, Form, Published, near_ranks
from composable_shard.core.transport.pending import Waitable
from composable_shard.errors import ShardError

CHUNK_NUMEL = 1 << 16  # elements summed at once: a few of them fit into a cache
CHUNK_NBYTES = 1 << 18  # copied at once to several places
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

            def fill(addresses: list[int]) -> None:
                for address, place, own in zip(addresses, places, shards, strict=True):
                    copy_bytes(own.data_ptr(), own.nbytes, address, place[rank].data_ptr())

            exchange = Exchange(group, tag, near, Form.of(shards), fill)
            reading = _Reading(exchange, {peer: [place[peer] for place in places] for peer in near})
            works.append(reading)
            if exchange.is_there():  # the sooner it is read, the less memory is shared
                reading.wait()
        else:
            for place, own in zip(places, shards, strict=True):
                copy_bytes(own.data_ptr(), own.nbytes, place[rank].data_ptr())
        return works


class DirectGather(GatherLaunch):
    """One rank gets the shard of every other, straight into place; the others get nothing."""

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, tag: int, to: int
    ) -> list[Waitable]:
        rank, num_ranks = group.rank(), group.size()
        shards = _sendable(inputs)
        near, far = _peers_of(group)
        messages = _Messages(group, tag)
        places = [out.view(num_ranks, -1) for out in _sendable(outputs)] if rank == to else []
        for place, own in zip(places, shards if places else [], strict=True):
            copy_bytes(own.data_ptr(), own.nbytes, place[rank].data_ptr())
        for peer in far if rank == to else []:
            for place in places:
                messages.receive(place[peer], peer)
        if to in far:
            for own in shards:
                messages.send(own, to)
        works: list[Waitable] = [messages]
        if near:  # all of them take part, so that they count alike
            published = [] if to in far else shards

            def fill(addresses: list[int]) -> None:
                if rank != to:
                    for address, own in zip(addresses, published, strict=True):
                        copy_bytes(own.data_ptr(), own.nbytes, address)

            exchange = Exchange(group, tag, near, Form.of(published), fill)
            if rank == to:
                members = {peer: [place[peer] for place in places] for peer in near}
                works.append(_Reading(exchange, members))
            else:
                exchange.finish()  # what the others publish is not for this one
        return works


def copy_bytes(source: int, nbytes: int, *into: int) -> None:
    """Copy from an address of this process to others, by pieces that a cache holds meanwhile."""
    piece = CHUNK_NBYTES if len(into) > 1 else max(nbytes, 1)
    for start in range(0, nbytes, piece):
        count = min(piece, nbytes - start)
        for address in into:
            ctypes.memmove(address + start, source + start, count)


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


class _Reading:
    """Copies what ranks of this host have published into its places."""

    def __init__(self, exchange: Exchange, places: dict[int, Tensors]) -> None:
        self._exchange = exchange
        self._places = places

    def wait(self) -> bool:
        places, self._places = self._places, {}
        for peer, members in places.items():
            dtypes = [own.dtype for own in members]
            for theirs, own in zip(self._exchange.read(peer, dtypes=dtypes), members, strict=True):
                theirs.copy_to(own)
        if places:
            self._exchange.finish()
        return True


class DirectReduceScatter(ReduceScatterLaunch):
    """Every rank gets its part from every other and sums.

    The sum is taken in rank order, so that every shard of a gradient is rounded alike, and in
    float32 at least: one of half precision is rounded once, when it has been divided. Ranks of this
    host are read as they are, and widened as they are added; what is sent is cast before.
    """

    widens = True
    divides = True
    keeps_inputs = True

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        return True

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, op: Any, tag: int
    ) -> list[Waitable]:
        rank, num_ranks = group.rank(), group.size()
        divisor = op if isinstance(op, float) else {_SUM: 1, _AVERAGE: num_ranks}[op]
        near, far = _peers_of(group)
        parts = [full.view(num_ranks, -1) for full in inputs]
        sums = [_RankOrderSum(out, rank, divisor) for out in outputs]
        messages = _Messages(group, tag)
        for peer in far:
            for total, out in zip(sums, outputs, strict=True):
                total.parts[peer] = _torch.empty_like(out)
                messages.receive(total.parts[peer], peer)
        for peer in far:
            for part, out in zip(parts, outputs, strict=True):
                messages.send(part[peer].to(out.dtype), peer)
        exchange = None
        if near:
            form = Form(
                tuple(out.numel() for out in outputs),
                tuple(full.dtype for full in inputs),
                num_ranks - 1,
            )

            def fill(addresses: list[int]) -> None:
                for address, full in zip(addresses, inputs, strict=True):
                    nbytes = full.nbytes // num_ranks
                    begin, end = rank * nbytes, (rank + 1) * nbytes
                    copy_bytes(full.data_ptr(), begin, address)
                    copy_bytes(full.data_ptr() + end, full.nbytes - end, address + begin)

            exchange = Exchange(group, tag, near, form, fill)
        for part, out in zip(parts, outputs, strict=True):
            out.copy_(part[rank])
        summing = _Summing(sums, exchange, near, rank)
        if exchange is not None and not far and exchange.is_there():
            summing.wait()
        return [messages, summing]


class _Summing:
    """Takes the sums, after the messages before it."""

    def __init__(
        self, sums: list[_RankOrderSum], exchange: Exchange | None, near: list[int], rank: int
    ) -> None:
        self._sums = sums
        self._exchange = exchange
        self._near = near
        self._rank = rank

    def wait(self) -> bool:
        sums, self._sums = self._sums, []
        near, self._near = self._near, []
        exchange = self._exchange
        if exchange is not None:
            for peer in near:
                place = self._rank - (self._rank > peer)  # they leave their own part out
                for total, part in zip(sums, exchange.read(peer, place), strict=True):
                    total.published[peer] = part
        for total in sums:
            total.take()
        if exchange is not None and near:
            exchange.finish()
        return True


class _RankOrderSum:
    """Sums the parts of all ranks in their order, chunk by chunk.

    A chunk that another rank has published is read into a scratch that stays in the cache until it
    is added. So does the sum of a chunk that is to be rounded.

    Args:
        out: See below.
        rank: This one.
        divisor: What to divide by.

    Attributes:
        out: The part of this rank, and in the end the sum, or the average.
        parts: Those of other ranks that have been received.
        published: Those that others have published.
    """

    def __init__(self, out: torch.Tensor, rank: int, divisor: float) -> None:
        self.out = out
        self.parts: dict[int, torch.Tensor] = {}
        self.published: dict[int, Published] = {}
        self._rank = rank
        self._divisor = divisor

    def take(self) -> None:
        """Take the sum."""
        out, numel = self.out, self.out.numel()
        parts, published = self.parts, self.published
        self.parts, self.published = {}, {}
        others = sorted({*parts, *published})
        earlier = [rank for rank in others if rank < self._rank]
        wide = sum_dtype(out.dtype)
        rounds = wide != out.dtype
        chunk_numel = min(CHUNK_NUMEL if published or rounds or others[1:] else numel, numel)

        def scratch(dtype: torch.dtype) -> torch.Tensor:
            return _torch.empty(chunk_numel, dtype=dtype, device=out.device)

        read = {dtype: scratch(dtype) for dtype in {one.dtype for one in published.values()}}
        total = scratch(wide) if rounds else None
        before = scratch(wide) if len(earlier) > 1 else None
        for start in range(0, numel, max(chunk_numel, 1)):
            count = min(chunk_numel, numel - start)

            def part(rank: int, start: int = start, count: int = count) -> torch.Tensor:
                if rank in parts:
                    return parts[rank][start : start + count]
                into = read[published[rank].dtype][:count]
                published[rank].copy_to(into, start)
                return into

            own = chunk = out[start : start + count]
            if total is not None:
                own = total[:count].copy_(chunk)
            if before is not None:
                first = before[:count].copy_(part(earlier[0]))
                for rank in earlier[1:]:
                    first.add_(part(rank))
                own.add_(first)
            for rank in others if before is None else others[len(earlier) :]:
                own.add_(part(rank))
            if self._divisor != 1:
                own.div_(self._divisor)
            if own is not chunk:
                chunk.copy_(own)


def _peers_of(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Sort the other ranks into those to read from and those to exchange messages with.

    Both begin with the next rank, so that no rank is everybody's first.
    """
    refuse_lost(group)
    rank, num_ranks, near = group.rank(), group.size(), near_ranks(group)
    others = [(rank + step) % num_ranks for step in range(1, num_ranks)]
    return [peer for peer in others if peer in near], [peer for peer in others if peer not in near]


def _sendable(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Gloo knows no 8-bit floats: send their bytes."""
    return [
        tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        for tensor in tensors
    ]
