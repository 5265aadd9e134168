"""All-gather and reduce-scatter from rank to rank on the CPU, for gloo, whose own are slow.

Ranks on the same host read what the others publish in shared memory (``exchange.py``). Others send:
every rank its shard to every other, straight into place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
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
from composable_shard.core.transport.gloo.exchange import Exchange, Form
from composable_shard.core.transport.gloo.mailbox import near_ranks
from composable_shard.core.transport.pending import Waitable
from composable_shard.errors import ShardError

CHUNK_NUMEL = 1 << 17  # elements summed at once: their sum fits into a cache
CHUNK_NBYTES = 1 << 18  # copied at once to several places
_SUM, _AVERAGE = dist.ReduceOp.SUM, dist.ReduceOp.AVG


class DirectAllGather(AllGatherLaunch):
    """Every rank, or one, gets the shard of every other, straight into place."""

    def launch(
        self,
        outputs: Tensors,
        inputs: Tensors,
        group: dist.ProcessGroup,
        tag: int,
        to: int | None = None,
    ) -> list[Waitable]:
        """Launch the all-gather, or the gather on rank ``to``: the others have no outputs then."""
        near, far = _peers_of(group)
        rank, shards = group.rank(), _sendable(inputs)
        sizes = [own.nbytes for own in shards]
        receives = to is None or to == rank
        own_places = [_places(outputs, sizes, rank)] if receives else []
        works: list[Waitable] = []
        if far:
            messages = _Messages(group, tag)
            if receives:
                messages.receive_shards(outputs, far)
            for peer in far if to is None else {*far} & {to}:
                for own in shards:
                    messages.send(own, peer)
            works.append(messages)
        if not near or to == rank:
            _copy_shards(shards, *own_places)
        if not near:
            return works
        # All that share memory take part, so that they count alike.
        published = [] if to in far else shards

        def fill(addresses: list[int]) -> None:
            _copy_shards(published, addresses, *own_places)

        exchange = Exchange(group, tag, near, Form.of(published), None if to == rank else fill)
        if not receives:
            exchange.finish()  # what the others publish is not for this one
            return works
        reading = _Reading(exchange, near, outputs, sizes)
        if exchange.is_there():  # the sooner it is read, the less memory is shared
            reading.wait()
        return [*works, reading]


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
        sums = [_RankOrderSum(out, divisor) for out in outputs]
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
        is_there = exchange is not None and not far and exchange.is_there()
        for total, full, out in zip(sums, inputs, outputs, strict=True):
            own = full.detach().view(num_ranks, -1)[rank]
            total.parts[rank] = own if is_there else _kept(own, out)
        summing = _Summing(sums, exchange, near, rank)
        if is_there:
            summing.wait()
        return [*works, summing]


def _kept(own: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Keep a part until the others are there, where the sum will be."""
    if own.dtype != out.dtype:
        return out.copy_(own)
    copy_bytes(own.data_ptr(), own.nbytes, out.data_ptr())  # in a fifth of torch's time
    return out


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
                    total.parts[peer] = part
        longest = min(CHUNK_NUMEL, max((total.out.numel() for total in sums), default=0))
        scratch = {
            dtype: _torch.empty(longest, dtype=dtype, device="cpu")
            for dtype in {sum_dtype(total.out.dtype) for total in sums}
        }
        for total in sums:
            total.take(scratch)
            if exchange is not None and total.out.numel() > CHUNK_NUMEL:
                exchange.forget_pages()  # so that no more than one tensor's count twice
        if exchange is not None and near:
            exchange.finish()
        return True


class _RankOrderSum:
    """Sums the parts of all ranks in their order, chunk by chunk.

    The sum of a chunk is taken in a scratch that stays in the cache until it is rounded.

    Args:
        out: Where the sum goes, or the average.
        divisor: What to divide by.

    Attributes:
        out: See above.
        parts: Those of all ranks, by rank. That of this one may be ``out``.
    """

    def __init__(self, out: torch.Tensor, divisor: float) -> None:
        self.out = out
        self.parts: dict[int, torch.Tensor] = {}
        self._divisor = divisor

    def take(self, scratch: Mapping[torch.dtype, torch.Tensor]) -> None:
        """Take the sum, in a scratch of each dtype."""
        parts = [self.parts.pop(rank) for rank in sorted(self.parts)]
        wide = sum_dtype(self.out.dtype)
        is_wide = {part.dtype for part in parts} == {wide}
        chunks = [part.split(CHUNK_NUMEL) for part in (self.out, *parts)]
        for chunk, first, second, *rest in zip(*chunks, strict=True):
            total = scratch[wide][: chunk.numel()]
            if is_wide:
                torch.add(first, second, out=total)
            else:
                total.copy_(first).add_(second)
            for part in rest:
                total.add_(part)
            if self._divisor == 1:
                chunk.copy_(total)
            else:
                torch.div(total, _as_tensor(self._divisor, wide), out=chunk)


@lru_cache(maxsize=64)
def _as_tensor(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor; torch would make one, and cast it, for every chunk."""
    return torch.tensor(number, dtype=dtype, device="cpu")


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
