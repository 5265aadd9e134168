"""Point-to-point all-gather and reduce-scatter on the CPU: faster than those of gloo.

Ranks of one host read the messages of the others from shared memory (``exchange.py``), or map large
shards into the gathered parameters, without a copy. Between hosts, every rank sends its shard to
every other rank, which receives it straight into place.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.transport.collectives import (
    AllGatherLaunch,
    ReduceScatterLaunch,
    Tensors,
    WaitThenCall,
    sum_dtype,
)
from composable_shard.core.transport.failures import missing_rank, raise_if_lost
from composable_shard.core.transport.gloo.exchange import (
    Exchange,
    Memories,
    MessageSpec,
    copy_bytes,
)
from composable_shard.core.transport.gloo.mailbox import local_ranks
from composable_shard.core.transport.pending import Waitable

CHUNK_NUMEL = 1 << 17  # elements to sum at once, so that the sum fits into a cache
_SUM, _AVERAGE = dist.ReduceOp.SUM, dist.ReduceOp.AVG


class DirectAllGather(AllGatherLaunch):
    """Every rank, or one rank, receives the shards of all others, straight into place."""

    def launch(
        self,
        outputs: Tensors,
        inputs: Tensors,
        group: dist.ProcessGroup,
        tag: int,
        to: int | None = None,
    ) -> list[Waitable]:
        """Launch the all-gather, or a gather on rank ``to``, where other ranks pass no outputs."""
        local, remote = _peers_of(group)
        rank, shards = group.rank(), _as_gloo_dtypes(inputs)
        sizes = [shard.nbytes for shard in shards]
        receives = to is None or to == rank
        works: list[Waitable] = []
        if remote:
            messages = _Messages(group, tag)
            if receives:
                messages.receive_shards(outputs, remote)
            for peer in remote if to is None else {*remote} & {to}:
                for shard in shards:
                    messages.send(shard, peer)
            works.append(messages)
        if receives and (not local or to == rank):  # otherwise `_read_shards` places them
            for shard, address in zip(shards, _addresses(outputs, sizes, rank), strict=True):
                copy_bytes(address, shard.data_ptr(), shard.nbytes)
        if not local:
            return works
        # All local ranks take part, even with nothing to send: each counts the collectives of a
        # tag, and finds a message by this count. If `to` is remote, no local rank reads the shards
        # of this rank. Rank `to` publishes an entry without data: no rank reads its shards.
        posted = [] if to in remote else shards
        # With `to`, the other ranks have no outputs, so they do not know how to align messages.
        memories = [None if to is not None else _torch.mappable_memory(out) for out in outputs]
        for memory in filter(None, {*memories}):
            memory.unmap()
        page_offsets = [
            -1 if memory is None else out.data_ptr() % mmap.PAGESIZE
            for out, memory in zip(outputs, memories, strict=True)
        ]
        spec = MessageSpec.of(posted, page_offsets=page_offsets)
        exchange = Exchange(group, tag, local, spec, None if to == rank else posted)
        if not receives:
            exchange.finish()  # this rank needs none of the published shards
            return works
        sources = local if to == rank else [rank, *local]
        read = partial(_read_shards, exchange, sources, outputs, memories)
        return [*works, WaitThenCall(None, read)]


def _addresses(outputs: Tensors, nbytes: Sequence[int], rank: int) -> list[int]:
    """Return the address of each shard of a rank in the outputs, given the sizes in bytes."""
    return [out.data_ptr() + rank * size for out, size in zip(outputs, nbytes, strict=True)]


class _Messages:
    """Messages to and from ranks of other hosts, and the wait for all of them.

    A launch that fails does not raise; :meth:`wait` raises its error. So all live ranks still
    get the messages of this rank, and the errors on those ranks name the failed rank.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group = group
        self._tag = tag
        self._works: list[tuple[dist.Work, int]] = []
        self._failures: list[tuple[int, RuntimeError]] = []

    def receive(self, into: torch.Tensor, peer: int) -> None:
        self._launch(self._group.recv, into, peer)

    def receive_shards(self, outputs: Tensors, peers: list[int]) -> None:
        """Receive the shards of several ranks, each straight into its place."""
        gathered = [out.view(self._group.size(), -1) for out in _as_gloo_dtypes(outputs)]
        for peer in peers:
            for parts in gathered:
                self.receive(parts[peer], peer)

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._launch(self._group.send, tensor, peer)  # the work keeps the tensor

    def _launch(self, launch: Callable[..., dist.Work], tensor: torch.Tensor, peer: int) -> None:
        try:
            self._works.append((launch([tensor], peer, self._tag), peer))
        except RuntimeError as error:
            self._failures.append((peer, error))

    def wait(self) -> bool:
        """Wait for all messages, even if one fails, since the others still arrive.

        Hazard: a message arrives after its time-out, and gloo writes it to freed memory. Guard: no
        work is kept, and gloo drops the message of a deleted work. Test:
        ``test_what_writes_a_late_message_is_not_kept``.
        """
        works, self._works = self._works[::-1], []
        while works:
            work, peer = works.pop()
            try:
                work.wait()
            except RuntimeError as error:
                self._failures.append((peer, error))
            del work
        for peer, cause in self._failures:  # raise the first one
            raise missing_rank(self._group, peer, f"the error '{cause}'") from cause
        return True


def _read_shards(
    exchange: Exchange, sources: list[int], outputs: Tensors, memories: Memories
) -> None:
    """Place the published shards of ranks of this host."""
    for rank in sources:
        exchange.place(rank, _addresses(outputs, exchange.spec.sizes, rank), memories)
    exchange.finish()


def empty_for_gather(numel: int, *, dtype: torch.dtype, group: dist.ProcessGroup) -> torch.Tensor:
    """Make an uninitialized tensor for the outputs of a :class:`DirectAllGather`.

    Collective: see ``mailbox_of``.
    """
    if len(local_ranks(group)) + 1 < group.size():
        return _torch.empty(numel, dtype=dtype, device="cpu")
    return _torch.empty_mappable(numel, dtype)


class DirectReduceScatter(ReduceScatterLaunch):
    """Every rank receives what the others contribute to its part, and adds the contributions.

    They are added in rank order, so that a sum does not depend on the rank that adds, and in at
    least float32, so that half precision is rounded once, after the division. Parts from this
    host are widened during the addition; parts for other hosts are cast to the dtype of the
    output before they are sent.
    """

    widens = True
    divides = True
    keeps_inputs = True
    allocates_late = True

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        return True

    def launch(
        self, outputs: Any, inputs: Tensors, group: dist.ProcessGroup, op: Any, tag: int, dtype: Any
    ) -> list[Waitable]:
        rank, num_ranks = group.rank(), group.size()
        divisor = op if isinstance(op, float) else {_SUM: 1, _AVERAGE: num_ranks}[op]
        local, remote = _peers_of(group)
        rows = [full.detach().view(num_ranks, -1) for full in inputs]
        parts: list[dict[int, torch.Tensor]] = [{} for _ in inputs]  # of each input, by rank
        works: list[Waitable] = []
        if remote:
            messages = _Messages(group, tag)
            for peer in remote:
                for own, received in zip(rows, parts, strict=True):
                    received[peer] = _torch.empty(own.shape[1], dtype=dtype, device="cpu")
                    messages.receive(received[peer], peer)
            for peer in remote:
                for own in rows:
                    messages.send(own[peer].to(dtype), peer)
            works.append(messages)
        exchange = None
        if local:
            exchange = Exchange(group, tag, local, MessageSpec.of(inputs, num_ranks), inputs)
        else:
            for own, received in zip(rows, parts, strict=True):
                received[rank] = own[rank].clone()
        sum_up = partial(_compute_sums, outputs, parts, divisor, dtype, exchange, [rank, *local])
        return [*works, WaitThenCall(None, sum_up)]


def _compute_sums(
    outputs: Iterable[torch.Tensor],
    parts: list[dict[int, torch.Tensor]],
    divisor: float,
    dtype: torch.dtype,
    exchange: Exchange | None,
    local: list[int],
) -> None:
    """Compute the sums, after the wait for the messages of other hosts.

    Args:
        outputs: The tensors to write.
        parts: For each of them, the parts that other hosts have sent, by rank.
        divisor: The divisor of the sums.
        dtype: The dtype of the outputs.
        exchange: The messages of this host; ``None`` if there are none.
        local: The ranks that exchange them; this rank is the first.
    """
    if exchange is not None:
        for peer in local:
            for received, part in zip(parts, exchange.read(peer, local[0]), strict=True):
                received[peer] = part
    longest = max((part.numel() for received in parts for part in received.values()), default=0)
    scratch = _torch.empty(min(CHUNK_NUMEL, longest), dtype=sum_dtype(dtype), device="cpu")
    for out, received in zip(outputs, parts, strict=True):
        _sum_in_rank_order(out, [received.pop(r) for r in sorted(received)], divisor, scratch)
        if exchange is not None and out.numel() > CHUNK_NUMEL:
            exchange.forget_pages()  # so that only the pages of one tensor are resident
    if exchange is not None:
        exchange.finish()


def _sum_in_rank_order(out: torch.Tensor, parts: Tensors, divisor: float, scratch: Any) -> None:
    """Sum the parts of all ranks, chunk by chunk, and divide the sum.

    The sum of a chunk is computed in ``scratch``, a buffer that stays in the cache until the sum is
    rounded.
    """
    is_wide = {part.dtype for part in parts} == {scratch.dtype}
    chunks = [part.split(CHUNK_NUMEL) for part in (out, *parts)]
    for chunk, first, second, *rest in zip(*chunks, strict=True):
        total = scratch[: chunk.numel()]
        if is_wide:
            torch.add(first, second, out=total)
        else:
            total.copy_(first).add_(second)
        for part in rest:
            total.add_(part)
        if divisor == 1:
            chunk.copy_(total)
        else:
            torch.div(total, _as_tensor(divisor, scratch.dtype), out=chunk)


@lru_cache(maxsize=64)
def _as_tensor(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a number as a tensor; otherwise torch would make and cast one for every chunk."""
    return torch.tensor(number, dtype=dtype, device="cpu")


def _peers_of(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Return the local ranks, which share memory with this one, and the remote ranks, which do not.

    Both lists begin with the next rank, so that the ranks do not all begin with the same peer.
    """
    raise_if_lost(group)
    rank, num_ranks, local = group.rank(), group.size(), local_ranks(group)
    others = [*range(rank + 1, num_ranks), *range(rank)]
    if len(local) == len(others):
        return others, []
    return [p for p in others if p in local], [p for p in others if p not in local]


def _as_gloo_dtypes(tensors: Sequence[torch.Tensor]) -> Tensors:
    """View 8-bit floats, which gloo does not support, as bytes."""
    return [
        tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        for tensor in tensors
    ]
