"""A lower bound of the time of a step: its compute alone, and its transfer alone.

**Compute alone** is forward and backward of the plain module, with its parameters in the dtype of
compute so that nothing is cast, and the optimizer step on this rank's share: fp32 tensors of the
first 1/N of each parameter's rows, rounded up, whose gradients always exist.

**Transfer alone** sends the bytes that sharding by block needs: a gather of every group in forward,
a gather of every block again in backward, and a reduction of every gradient, all in the dtype of
compute. (The sums are fp32, but no rank has to send them.) For each, a rank sends 1/N of the group
to each of the N - 1 other ranks, by isend and irecv, in pieces of 4 MiB with 4 pieces in flight.
Sends and receives reuse a few buffers. Of the ways that were tried on gloo, this is the fastest,
and it is faster than sending from new memory.

The limit is the larger of the two times, as if compute and transfer overlapped fully. If the same
cores compute and send, as on the CPU, no step reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from contestants import OPTIMIZERS, Contestant, Gpt, Spec, build_contestant, build_floor
from torch import nn

LIMITS = {"compute": "compute alone", "transfer": "transfer alone"}
REDUCE_DTYPE = torch.float32
PIECE_NBYTES = 4 << 20
NUM_IN_FLIGHT = 4


class Steps(Protocol):
    """What can be timed."""

    def step(self, step: int) -> object: ...


def build(name: str, spec: Spec) -> Steps:
    """Build a contestant or one side of the limit on this rank."""
    if name == "compute":
        return build_compute(spec)
    return Transfer(spec) if name == "transfer" else build_contestant(name, spec)


class Compute(Contestant):
    """The plain module, with an optimizer that steps only a share of the parameters."""

    def update(self) -> None:
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)


def build_compute(spec: Spec) -> Compute:
    floor = build_floor(spec)
    shards = []
    for param in floor.model.parameters():
        num_rows = -(-param.shape[0] // dist.get_world_size())
        shard = nn.Parameter(param.detach()[:num_rows].float().clone())
        shard.grad = torch.full_like(shard, 1e-3)
        shards.append(shard)
    return Compute(floor.model, OPTIMIZERS[spec.optimizer](shards), spec, autocast=False)


@dataclass(frozen=True)
class Group:
    """The parameters that one `fully_shard` call manages."""

    numel: int
    is_root: bool

    def nbytes(self, dtype: torch.dtype) -> int:
        return self.numel * dtype.itemsize


def groups_of(spec: Spec) -> list[Group]:
    """Return the groups in the order in which they are gathered: the root, then the blocks."""
    with torch.device("meta"):
        model = Gpt(spec)
    blocks = [sum(param.numel() for param in block.parameters()) for block in model.blocks]
    root = sum(param.numel() for param in model.parameters()) - sum(blocks)
    return [Group(root, True), *(Group(numel, False) for numel in blocks)]


def bytes_to_each_peer(spec: Spec, num_ranks: int) -> list[int]:
    """Return the bytes that a rank sends to each peer in a step, collective by collective."""
    groups = groups_of(spec)
    blocks = [group for group in reversed(groups) if not group.is_root]
    gathers = [group.nbytes(spec.compute_dtype) for group in [*groups, *blocks]]
    reductions = [group.nbytes(spec.compute_dtype) for group in [*blocks, groups[0]]]
    return [nbytes // num_ranks for nbytes in [*gathers, *reductions]]


class Transfer:
    """Sends and receives as many bytes as a step does, and does nothing else."""

    def __init__(self, spec: Spec) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._peers = [(rank + step) % num_ranks for step in range(1, num_ranks)]
        self._collectives = bytes_to_each_peer(spec, num_ranks)
        largest = min(PIECE_NBYTES, max(self._collectives))
        shape = (NUM_IN_FLIGHT, len(self._peers), largest)
        self._outgoing = torch.ones(shape, dtype=torch.uint8)
        self._arriving = torch.ones(shape, dtype=torch.uint8)

    def step(self, step: int) -> None:
        in_flight: list[list[dist.Work | None]] = []
        for number, nbytes in enumerate(self._pieces()):
            if len(in_flight) == NUM_IN_FLIGHT:
                wait_for(in_flight.pop(0))
            slot = number % NUM_IN_FLIGHT
            arriving, outgoing = self._arriving[slot, :, :nbytes], self._outgoing[slot, :, :nbytes]
            pairs = list(enumerate(self._peers))
            works = [dist.irecv(arriving[place], peer) for place, peer in pairs]
            works += [dist.isend(outgoing[place], peer) for place, peer in pairs]
            in_flight.append(works)
        for works in in_flight:
            wait_for(works)

    def _pieces(self) -> Iterator[int]:
        for nbytes in self._collectives:
            yield from [PIECE_NBYTES] * (nbytes // PIECE_NBYTES)
            if nbytes % PIECE_NBYTES:
                yield nbytes % PIECE_NBYTES


def wait_for(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None  # None would be a message of a rank to itself
        work.wait()
