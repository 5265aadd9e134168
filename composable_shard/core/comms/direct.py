"""All-gather and reduce-scatter from rank to rank, for gloo, whose own are slow.

Ranks on the same host read each other's memory where they may (``near_memory.py``). Others send:
every rank its shard to every other, straight into place. Small tensors are always sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from composable_shard.core.comms.collectives import AllGatherLaunch, ReduceScatterLaunch, Tensors
from composable_shard.core.comms.near_memory import near_ranks
from composable_shard.core.comms.offers import Offer
from composable_shard.core.comms.streams import Waitable

WORTH_READING = 1 << 15  # bytes for each rank; fewer are sent as fast as their address
CHUNK_NUMEL = 1 << 16  # elements summed at once: a few of them fit into a cache


class DirectAllGather(AllGatherLaunch):
    """Every rank gets the shard of every other, straight into place."""

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, tag: int
    ) -> list[Waitable]:
        rank, num_ranks = group.rank(), group.size()
        places = [out.view(num_ranks, -1) for out in _sendable(outputs)]
        shards = _sendable(inputs)
        near, far = _routes(group, shards)
        works: list[Waitable] = []
        for peer in far:
            works += [group.recv([place[peer]], peer, tag) for place in places]
        for peer in far:
            works += [group.send([own], peer, tag) for own in shards]
        if near:
            offer = Offer(group, tag, dict.fromkeys(near, shards))
            works.append(
                _Reading(offer, {peer: [place[peer] for place in places] for peer in near})
            )
        for place, own in zip(places, shards, strict=True):
            place[rank].copy_(own)
        return works


class _Reading:
    """Reads what near ranks offer into its places when it is waited for."""

    def __init__(self, offer: Offer, places: dict[int, Tensors]) -> None:
        self._offer = offer
        self._places = places

    def wait(self) -> bool:
        places, self._places = self._places, {}
        for peer, members in places.items():
            for address, place in zip(self._offer.addresses(peer), members, strict=True):
                self._offer.read(peer, address, place)
        if places:
            self._offer.finish()
        return True


class DirectReduceScatter(ReduceScatterLaunch):
    """Every rank gets its part from every other and sums.

    The sum is taken in rank order, so that every shard of a gradient is rounded alike.
    """

    def averages(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        return True

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup, op: Any, tag: int
    ) -> list[Waitable]:
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        rank, num_ranks = group.rank(), group.size()
        parts = [full.view(num_ranks, -1) for full in inputs]
        near, far = _routes(group, outputs)
        arrived = [
            dict(zip(far, part.new_empty(len(far), part.shape[1]), strict=True)) for part in parts
        ]
        works: list[Waitable] = []
        for peer in far:
            works += [group.recv([places[peer]], peer, tag) for places in arrived]
        for peer in far:
            works += [group.send([part[peer]], peer, tag) for part in parts]
        for part, places in zip(parts, arrived, strict=True):
            places[rank] = part[rank]
        offered = {peer: [part[peer] for part in parts] for peer in near}
        offer = Offer(group, tag, offered) if near else None
        divisor = num_ranks if op == dist.ReduceOp.AVG else 1
        return [_RankOrderSum(works, outputs, arrived, offer, near, divisor)]


class _RankOrderSum:
    """Sums the parts of all ranks when it is waited for, chunk by chunk.

    A chunk of a near rank is read into a scratch that stays in the cache until it is added.
    """

    def __init__(
        self,
        works: list[Waitable],
        outputs: Tensors,
        arrived: list[dict[int, torch.Tensor]],
        offer: Offer | None,
        near: Sequence[int],
        divisor: int,
    ) -> None:
        self._works = works
        self._pairs = list(zip(outputs, arrived, strict=True))
        self._offer = offer
        self._near = near
        self._divisor = divisor

    def wait(self) -> bool:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        offer, self._offer = self._offer, None
        pairs, self._pairs = self._pairs, []
        addresses = {peer: offer.addresses(peer) for peer in self._near} if offer else {}
        for index, (out, arrived) in enumerate(pairs):
            self._sum(out, arrived, offer, {peer: to[index] for peer, to in addresses.items()})
        if offer is not None:
            offer.finish()
        return True

    def _sum(
        self,
        out: torch.Tensor,
        arrived: dict[int, torch.Tensor],
        offer: Offer | None,
        addresses: dict[int, int],
    ) -> None:
        chunk_numel = CHUNK_NUMEL if addresses else max(out.numel(), 1)
        scratch = out.new_empty(len(addresses), min(chunk_numel, out.numel()))
        slots = dict(zip(addresses, scratch, strict=True))
        ranks = sorted([*arrived, *addresses])
        for start in range(0, out.numel(), chunk_numel):
            total = out[start : start + chunk_numel]
            numel = total.numel()
            for peer, address in addresses.items():
                assert offer is not None
                offer.read(peer, address + start * out.itemsize, slots[peer][:numel])
            parts = [
                slots[rank][:numel] if rank in slots else arrived[rank][start : start + numel]
                for rank in ranks
            ]
            torch.add(parts[0], parts[1], out=total)
            for part in parts[2:]:
                total.add_(part)
            if self._divisor != 1:
                total.div_(self._divisor)


def _routes(
    group: dist.ProcessGroup, shards: Sequence[torch.Tensor]
) -> tuple[list[int], list[int]]:
    """Sort the other ranks into those to read from and those to exchange messages with.

    Both begin with the next rank, so that no rank is everybody's first.
    """
    rank, num_ranks = group.rank(), group.size()
    others = [(rank + step) % num_ranks for step in range(1, num_ranks)]
    readable = all(shard.device.type == "cpu" for shard in shards)
    if not readable or sum(shard.nbytes for shard in shards) < WORTH_READING:
        return [], others
    near = near_ranks(group)
    return [peer for peer in others if peer in near], [peer for peer in others if peer not in near]


def _sendable(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Gloo knows no 8-bit floats: send their bytes."""
    return [
        tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
        for tensor in tensors
    ]
