"""Blocks on their way to their owners and back: one all-to-all each way for many tensors.

What a rank keeps for itself is copied, not sent, and where no rank sends anything nothing is
launched. Tensors travel as bytes, so those of several dtypes share a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from composable_shard.core.transport.failures import watched
from composable_shard.optim.blocks import Box, Route


@dataclass(frozen=True)
class Ranks:
    """The ranks over which a parameter lies.

    Attributes:
        group: Their process group; ``None`` for one rank alone.
        rank: This rank's place among them.
        count: How many there are.
        device: Where messages are.
    """

    group: dist.ProcessGroup | None
    rank: int
    count: int
    device: torch.device


@dataclass(frozen=True)
class Move:
    """A tensor that travels: a block's values, or its gradient, or a state of it.

    Attributes:
        route: The block, and what this rank does with it.
        local: The local shard of the parameter's, or gradient's, that this rank holds.
        whole: The block as a whole; its owner alone has it.
    """

    route: Route
    local: torch.Tensor
    whole: torch.Tensor | None


_MOVING = "moving blocks of parameters between their owners and shards"


class Pending:
    """An exchange that has been launched.

    Args:
        ranks: Between whom.
        out: For each rank, what to send.
        into: For each rank, where to write what it sends.
        doing: What this is for, for messages.

    Attributes:
        nbytes: How many bytes this rank sends.
    """

    def __init__(
        self,
        ranks: Ranks,
        out: list[list[torch.Tensor]],
        into: list[list[torch.Tensor]],
        doing: str = _MOVING,
    ) -> None:
        assert ranks.group is not None
        self._group, self._into, self._doing = ranks.group, into, doing
        counts = [sum(tensor.nbytes for tensor in tensors) for tensors in out]
        self._counts = [sum(tensor.nbytes for tensor in tensors) for tensors in into]
        self.nbytes = sum(counts)
        sent = [_as_bytes(tensor, ranks.device) for tensors in out for tensor in tensors]
        empty = torch.empty(0, dtype=torch.uint8, device=ranks.device)
        self._sent = torch.cat(sent) if sent else empty
        self._received = empty.new_empty(sum(self._counts))
        with watched(self._group, self._doing):
            self._work = dist.all_to_all_single(
                self._received, self._sent, self._counts, counts, ranks.group, async_op=True
            )

    def wait(self) -> None:
        """Write what has arrived where it belongs."""
        with watched(self._group, self._doing):
            if self._work is not None:
                self._work.wait()
        targets = [tensor for tensors in self._into for tensor in tensors]
        parts = self._received.split([tensor.nbytes for tensor in targets])
        for target, part in zip(targets, parts, strict=True):
            aligned = part if part.storage_offset() % target.itemsize == 0 else part.clone()
            target.copy_(aligned.view(target.dtype).view(target.shape))
        self._into = []
        self._sent = self._received = self._received.new_empty(0)


def launch_to_owners(ranks: Ranks, moves: Sequence[Move]) -> Pending | None:
    """Begin to make blocks whole at their owners.

    Collective: one all-to-all over the ranks, if anything is to be sent by any of them.
    """
    out, into = _for_each_rank(ranks), _for_each_rank(ranks)
    for move in moves:
        route = move.route
        if route.held is not None and route.held_locally is not None and route.is_source:
            own = part_of(move.local, route.held_locally)
            if move.whole is None:
                out[route.block.owner].append(own)
            else:
                _copy_unless_same(_part_of_block(move, route.held), own)
        for peer, part in route.sources:
            into[peer].append(_part_of_block(move, part))
    is_needed = any(move.route.is_gathered for move in moves)
    return Pending(ranks, out, into) if is_needed else None


def launch_to_shards(ranks: Ranks, moves: Sequence[Move]) -> Pending | None:
    """Begin to give every rank its part of blocks from their owners.

    Collective: one all-to-all over the ranks, if anything is to be sent by any of them.
    """
    out, into = _for_each_rank(ranks), _for_each_rank(ranks)
    for move in moves:
        route = move.route
        if route.held is not None and route.held_locally is not None:
            own = part_of(move.local, route.held_locally)
            if move.whole is None:
                into[route.block.owner].append(own)
            else:
                _copy_unless_same(own, _part_of_block(move, route.held))
        for peer, part in route.holders:
            out[peer].append(_part_of_block(move, part))
    is_needed = any(move.route.is_returned for move in moves)
    return Pending(ranks, out, into) if is_needed else None


def _for_each_rank(ranks: Ranks) -> list[list[torch.Tensor]]:
    return [[] for _ in range(ranks.count)]


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """View what of a tensor a box contains."""
    for dim, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _part_of_block(move: Move, box: Box) -> torch.Tensor:
    assert move.whole is not None
    stack = len(box.sizes) - move.whole.ndim
    return part_of(move.whole[(None,) * stack], box)


def _copy_unless_same(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _as_bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device).contiguous().view(-1).view(torch.uint8)
