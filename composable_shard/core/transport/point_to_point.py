"""All-gather and reduce-scatter from rank to rank on the CPU, for gloo, whose own are slow.

Ranks on the same host read what the others publish in shared memory (``exchange.py``). Others send:
every rank its shard to every other, straight into place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
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
from composable_shard.core.transport.common_gather import CommonGather, have_common_memory
from composable_shard.core.transport.exchange import Exchange, Form, Published
from composable_shard.core.transport.failures import lost, refuse_lost
from composable_shard.core.transport.mailbox import near_ranks
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
        near, far = _peers_of(group)
        shards = _sendable(inputs)
        sizes = [own.nbytes for own in shards]
        own_places = _places(outputs, sizes, group.rank())
        works: list[Waitable] = []
        if far:
            messages = _Messages(group, tag)
            messages.receive_shards(outputs, far)
            for peer in far:
                for own in shards:
                    messages.send(own, peer)
            works.append(messages)
        if near:

            def fill(addresses: list[int]) -> None:
                _copy_shards(shards, addresses, own_places)

            exchange = Exchange(group, tag, near, Form.of(shards), fill)
            reading = _Reading(exchange, near, outputs, sizes)
            works.append(reading)
            if exchange.is_there():  # the sooner it is read, the less memory is shared
                reading.wait()
        else:
            _copy_shards(shards, own_places)
        return works

    def gives_memory(self, group: dist.ProcessGroup) -> bool:
        _, far = _peers_of(group)
        return not far and have_common_memory(group)

    def launch_into(
        self,
        buffers: Tensors,
        outputs: Tensors,
        inputs: Tensors,
        group: dist.ProcessGroup,
        tag: int,
    ) -> list[Waitable]:
        refuse_lost(group)
        gather = CommonGather(group, tag, buffers, outputs, inputs)
        if gather.is_there():  # the sooner others are told, the sooner they go on
            gather.wait()
        return [gather]


class DirectGather(GatherLaunch):
    """One rank gets the shard of every other, straight into place; the others get nothing."""

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, tag: int, to: int
    ) -> list[Waitable]:
        rank, shards = group.rank(), _sendable(inputs)
        near, far = _peers_of(group)
        sizes = [own.nbytes for own in shards]
        messages = _Messages(group, tag)
        if rank == to:
            _copy_shards(shards, _places(outputs, sizes, rank))
            messages.receive_shards(outputs, far)
        if to in far:
            for own in shards:
                messages.send(own, to)
        works: list[Waitable] = [messages]
        if near:  # all of them take part, so that they count alike
            published = [] if to in far else shards

            def fill(addresses: list[int]) -> None:
                if rank != to:
                    _copy_shards(published, addresses)

            exchange = Exchange(group, tag, near, Form.of(published), fill)
            if rank == to:
                works.append(_Reading(exchange, near, outputs, sizes))
            else:
                exchange.finish()  # what the others publish is not for this one
        return works


def _places(outputs: Tensors, nbytes: Sequence[int], rank: int) -> list[int]:
    """Return the addresses at which the shards of a rank belong, of so many bytes each."""
    return [out.data_ptr() + rank * size for out, size in zip(outputs, nbytes, strict=True)]


def _copy_shards(shards: Tensors, *into: list[int]) -> None:
    """Copy each shard to its address in every list of them."""
    for own, *places in zip(shards, *into, strict=True):
        copy_bytes(own.data_ptr(), own.nbytes, *places)


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

    def receive_shards(self, outputs: Tensors, peers: list[int]) -> None:
        """Receive those of several ranks, each straight into its place."""
        gathered = [out.view(self._group.size(), -1) for out in _sendable(outputs)]
        for peer in peers:
            for parts in gathered:
                self.receive(parts[peer], peer)

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
    """Copies the shards that ranks of this host have published into their places.

    Args:
        exchange: In which they are published.
        near: Those ranks.
        outputs: What to write.
        sizes: How many bytes each shard has.
    """

    def __init__(
        self, exchange: Exchange, near: list[int], outputs: Tensors, sizes: list[int]
    ) -> None:
        self._exchange = exchange
        self._near = near
        self._outputs = outputs
        self._sizes = sizes

    def wait(self) -> bool:
        near, self._near = self._near, []
        outputs, self._outputs = self._outputs, []
        for peer in near:
            self._exchange.copy_to(peer, _places(outputs, self._sizes, peer))
        if near:
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
        sums = [_RankOrderSum(out, rank, divisor) for out in outputs]
        works: list[Waitable] = []
        if far:
            messages = _Messages(group, tag)
            for peer in far:
                for total, out in zip(sums, outputs, strict=True):
                    total.parts[peer] = _torch.empty_like(out)
                    messages.receive(total.parts[peer], peer)
            for peer in far:
                for full, out in zip(inputs, outputs, strict=True):
                    messages.send(full.view(num_ranks, -1)[peer].to(out.dtype), peer)
            works.append(messages)
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
        for full, out in zip(inputs, outputs, strict=True):
            if full.dtype == out.dtype:  # a fifth of the time of what torch needs to copy a part
                copy_bytes(full.data_ptr() + rank * out.nbytes, out.nbytes, out.data_ptr())
            else:
                out.copy_(full.view(num_ranks, -1)[rank])
        summing = _Summing(sums, exchange, near, rank)
        if exchange is not None and not far and exchange.is_there():
            summing.wait()
        return [*works, summing]


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
        scratch = _Scratch(max((total.out.numel() for total in sums), default=0))
        for total in sums:
            total.take(scratch)
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

    def take(self, scratch: _Scratch) -> None:
        """Take the sum."""
        out, published, parts = self.out, self.published, self.parts
        self.parts, self.published = {}, {}
        others = sorted({*parts, *published})
        earlier = [rank for rank in others if rank < self._rank]
        wide = sum_dtype(out.dtype)
        needs_chunks = published or wide != out.dtype or len(others) > 1
        chunks = out.split(CHUNK_NUMEL) if needs_chunks and out.numel() > CHUNK_NUMEL else (out,)
        start = 0

        def part(rank: int, into: torch.Tensor | None = None) -> torch.Tensor:
            """Return a part of a rank, in ``into`` if it is read there without a conversion."""
            one = published.get(rank)
            if one is None:
                return parts[rank][start : start + numel]
            if into is None or into.dtype != one.dtype:
                into = scratch("part", one.dtype, numel)
            one.copy_to(into.data_ptr(), into.nbytes, start * one.dtype.itemsize)
            return into

        for chunk in chunks:
            numel = chunk.numel()
            own = chunk if wide == out.dtype else scratch("sum", wide, numel).copy_(chunk)
            added = others
            if len(earlier) > 1:
                before = scratch("sum of those before", wide, numel)
                first = part(earlier[0], before)
                if first is not before:
                    before.copy_(first)
                for rank in earlier[1:]:
                    before.add_(part(rank))
                own.add_(before)
                added = others[len(earlier) :]
            for rank in added:
                own.add_(part(rank))
            if self._divisor != 1:
                own.div_(_as_tensor(self._divisor, wide))
            if own is not chunk:
                chunk.copy_(own)
            start += numel


@lru_cache(maxsize=64)
def _as_tensor(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor; torch would make one, and cast it, for every chunk."""
    return torch.tensor(number, dtype=dtype, device="cpu")


class _Scratch:
    """Memory for chunks, one piece for each use and dtype.

    Args:
        numel: How many elements the longest tensor has that is summed.
    """

    def __init__(self, numel: int) -> None:
        self._numel = min(numel, CHUNK_NUMEL)
        self._tensors: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def __call__(self, use: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return a tensor of that dtype and length."""
        found = self._tensors.get((use, dtype))
        if found is None:
            self._tensors[use, dtype] = found = _torch.empty(self._numel, dtype=dtype, device="cpu")
        return found if numel == self._numel else found[:numel]


def _peers_of(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Sort the other ranks into those to read from and those to exchange messages with.

    Both begin with the next rank, so that no rank is everybody's first.
    """
    refuse_lost(group)
    rank, num_ranks, near = group.rank(), group.size(), near_ranks(group)
    others = [*range(rank + 1, num_ranks), *range(rank)]
    if len(near) == len(others):
        return others, []
    return [peer for peer in others if peer in near], [peer for peer in others if peer not in near]


def _sendable(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Gloo knows no 8-bit floats: send their bytes."""
    return [
        tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        for tensor in tensors
    ]
