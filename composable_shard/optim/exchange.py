"""All-to-alls that move blocks to their owners and back, one each way for many tensors.

A rank copies its own parts instead of sending them. If no rank sends anything, nothing is
launched. Tensors travel as bytes, so tensors of several dtypes share a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.transport.failures import watched
from composable_shard.core.transport.process_groups import subgroup
from composable_shard.optim.blocks import Block, Box, are_sent, messages, padded


@dataclass(frozen=True)
class Ranks:
    """The ranks over which a parameter lies.

    Attributes:
        group: Their process group; ``None`` for one rank alone.
        rank: This rank's place among them.
        places: The place of each rank of the process group; a mesh may have another order.
        device: The device of the messages.
    """

    group: dist.ProcessGroup | None
    rank: int
    places: tuple[int, ...]
    device: torch.device

    @cached_property
    def group_of_exchanges(self) -> dist.ProcessGroup:
        """The process group of exchanges; on gloo a separate group, since two run at a time.

        See the hazard of ``_torch.gloo_of_one_worker``. Collective: creates the group at its first
        use.
        """
        assert self.group is not None
        is_gloo = _torch.backend_name(self.group, self.device) == "gloo"
        return subgroup(self.group, self.group.size()) if is_gloo else self.group


class Exchange:
    """An all-to-all that has been launched.

    Args:
        ranks: The ranks that take part.
        out: The tensors that this rank sends to each rank, by place.
        nbytes: The bytes that this rank receives from each rank, by place, with padding.
        doing: The purpose, for error messages.
    """

    def __init__(
        self, ranks: Ranks, out: list[list[torch.Tensor]], nbytes: Sequence[int], doing: str
    ) -> None:
        self._group, self._places, self._doing = ranks.group_of_exchanges, ranks.places, doing
        sent = [tensor for place in ranks.places for tensor in out[place]]
        counts = [sum(padded(tensor.nbytes) for tensor in out[place]) for place in ranks.places]
        self._sent = torch.empty(sum(counts), dtype=torch.uint8, device=ranks.device)
        _torch.copy_all_(_parts(self._sent, sent), sent)
        received = [nbytes[place] for place in ranks.places]
        self._received = self._sent.new_empty(sum(nbytes))
        with watched(self._group, self._doing):
            self._work = dist.all_to_all_single(
                self._received, self._sent, received, counts, self._group, async_op=True
            )

    def wait(self) -> None:
        """Wait for the all-to-all, and free the message that was sent."""
        with watched(self._group, self._doing):
            if self._work is not None:
                self._work.wait()
        self._work, self._sent = None, self._sent.new_empty(0)

    def write(self, into: list[list[torch.Tensor]]) -> None:
        """Wait for the all-to-all, and copy the received tensors from each rank to ``into``."""
        self.wait()
        tensors = [tensor for place in self._places for tensor in into[place]]
        _torch.copy_all_(tensors, _parts(self._received, tensors))
        self._received = self._received.new_empty(0)


def _parts(message: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View a message of bytes as tensors like ``tensors``, one behind the other."""
    parts = message.split([padded(tensor.nbytes) for tensor in tensors])
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


@dataclass(frozen=True)
class Move:
    """The values, the gradient or a state of a block in transit.

    Attributes:
        block: The block.
        local: This rank's shard of the parameter, gradient or state.
        whole: The whole block, on the owner; ``None`` before there is memory for it.
    """

    block: Block
    local: torch.Tensor
    whole: torch.Tensor | None = None

    def in_shard(self, part: Box, rank: int) -> torch.Tensor:
        """View a part of the block in the shard of this rank."""
        return part_of(self.local, part.within(self.block.spread.boxes[rank]))

    def in_block(self, part: Box) -> torch.Tensor:
        """View a part of the block in the whole block."""
        assert self.whole is not None
        stack = (None,) * (len(part.sizes) - self.whole.ndim)
        return part_of(self.whole[stack], part.within(self.block.box))

    def keep_own(self, rank: int, *, to_owner: bool) -> None:
        """Copy the owner's own part between its block and its shard, unless they share memory."""
        if rank == self.block.owner and rank in self.block.parts:
            part = self.block.parts[rank]
            ends = self.in_shard(part, rank), self.in_block(part)
            if ends[0].data_ptr() != ends[1].data_ptr():
                ends[to_owner].copy_(ends[not to_owner])


_DOING = "moving blocks of parameters between their owners and shards"


def launch(ranks: Ranks, moves: Sequence[Move], *, to_owner: bool) -> Exchange | None:
    """Send the parts of blocks to their owners, or back from them.

    On the way back, the blocks may be freed once this returns.

    Collective: one all-to-all over the ranks, if any of them sends anything.
    """
    blocks = [move.block for move in moves]
    if not to_owner:
        for move in moves:
            move.keep_own(ranks.rank, to_owner=False)
    if not are_sent(blocks, to_owner=to_owner):
        return None
    nbytes = [0] * len(ranks.places)
    for peer, parts in messages(blocks, ranks.rank, to_owner=to_owner, sends=False).items():
        nbytes[peer] = sum(padded(part.numel * moves[i].local.itemsize) for i, part in parts)
    return Exchange(ranks, _views(ranks, moves, to_owner=to_owner, sends=True), nbytes, _DOING)


def arrive(
    ranks: Ranks, exchange: Exchange | None, moves: Sequence[Move], *, to_owner: bool
) -> None:
    """Copy received parts to the whole blocks, or on the way back to the local shards."""
    if to_owner:
        for move in moves:
            move.keep_own(ranks.rank, to_owner=True)
    if exchange is not None:
        exchange.write(_views(ranks, moves, to_owner=to_owner, sends=False))


def _views(
    ranks: Ranks, moves: Sequence[Move], *, to_owner: bool, sends: bool
) -> list[list[torch.Tensor]]:
    """View the parts that this rank sends to, or receives from, each rank, by place."""
    blocks = [move.block for move in moves]
    views: list[list[torch.Tensor]] = [[] for _ in ranks.places]
    for peer, parts in messages(blocks, ranks.rank, to_owner=to_owner, sends=sends).items():
        for index, part in parts:
            move = moves[index]
            is_owner = move.block.owner == ranks.rank
            view = move.in_block(part) if is_owner else move.in_shard(part, ranks.rank)
            views[peer].append(view)
    return views


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """View the part of a tensor in a box."""
    for dim, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
