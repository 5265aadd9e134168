"""Tensors that near ranks read out of this one's memory, and those that this one reads.

An offer is an exchange of addresses with every near rank of a process group. Each rank reads when
it needs the bytes, and then sets a flag in the memory of the owner. Until it is set, the owner must
neither free nor change what it offered. It does not wait for that with every offer, since a rank
that is a little ahead would lose its lead each time, but when a pass ends (:func:`settle`).
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.comms.near_memory import near_ranks, read, write
from composable_shard.core.comms.streams import Waitable
from composable_shard.errors import ShardError

_DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]  # by the number that says which it is
_NAP = 2e-5  # seconds between two looks at the flags
_SET = torch.ones(1, dtype=torch.uint8)

_offers: list[Offer] = []  # those that some near rank may still read


class Place(NamedTuple):
    """Where a tensor is in the memory of its owner, and what it is made of."""

    address: int
    dtype: torch.dtype


class Offer:
    """One exchange of addresses.

    Hazard: a rank reads tensors, or sets a flag, in memory that their owner has freed. Guard: an
    offer lives until it was read, whatever becomes of the model. Test:
    ``test_an_offer_outlives_its_model``.

    Args:
        group: The process group.
        tag: A number on which the ranks have agreed.
        tensors: What each near rank may read. All ranks offer tensors of the same numels.
    """

    def __init__(
        self, group: dist.ProcessGroup, tag: int, tensors: Mapping[int, list[torch.Tensor]]
    ) -> None:
        self.tag = tag
        self.is_finished = False
        self._group = group
        self._processes = near_ranks(group)
        self._tensors = tensors
        self._flags = torch.zeros(len(tensors), dtype=torch.uint8)
        self._said: list[tuple[torch.Tensor, Waitable]] = []
        self._heard: dict[int, tuple[torch.Tensor, Waitable]] = {}
        for slot, (peer, members) in enumerate(tensors.items()):
            addresses = [tensor.data_ptr() for tensor in [self._flags[slot:], *members]]
            dtypes = [_DTYPES.index(tensor.dtype) for tensor in members]
            said = torch.tensor(addresses + dtypes)
            heard = torch.empty_like(said)
            self._heard[peer] = heard, group.recv([heard], peer, tag)
            self._said.append((said, group.send([said], peer, tag)))
        _offers.append(self)

    def places(self, peer: int) -> list[Place]:
        """Wait until a near rank has offered its tensors; return where they are."""
        heard, work = self._heard[peer]
        work.wait()
        _, *said = heard.tolist()
        half = len(said) // 2
        return [
            Place(address, _DTYPES[number])
            for address, number in zip(said[:half], said[half:], strict=True)
        ]

    def read(self, peer: int, address: int, into: torch.Tensor) -> None:
        """Fill a contiguous tensor from the memory of a near rank."""
        read(self._processes[peer], address, into)

    def finish(self) -> None:
        """Tell the near ranks that this one has read; let go of what they have read."""
        for peer, (heard, _) in self._heard.items():
            write(self._processes[peer], int(heard[0]), _SET)
        for _, work in self._said:
            work.wait()
        self.is_finished = True
        _offers[:] = [offer for offer in _offers if not (offer.is_finished and offer.was_read)]

    @property
    def was_read(self) -> bool:
        """Whether all near ranks have read."""
        return bool(self._flags.all())

    def wait_until_read(self) -> None:
        """Wait until all near ranks have read.

        Raises:
            ShardError: If one of them does not within the time-out of the process group.
        """
        limit = _torch.timeout_of(self._group)
        deadline = time.monotonic() + limit
        while not self.was_read:
            if time.monotonic() > deadline:
                late = [
                    peer for peer, flag in zip(self._heard, self._flags, strict=True) if not flag
                ]
                raise ShardError(
                    f"Expected ranks {late} of the process group to read what this rank has "
                    f"offered within its time-out of {limit:.0f} s, got no sign of it; they have "
                    "ended, or wait elsewhere"
                )
            time.sleep(_NAP)


def settle(tags: Container[int]) -> None:
    """Wait until near ranks have read what this rank has offered under any of ``tags``.

    Only finished exchanges count, and those of others are left alone: a rank that drops a model
    may never read what others have offered for it.

    Hazard: an optimizer changes shards that another rank is reading. Guard: every pass ends with
    this, before code of the user's runs. Test: ``test_nothing_is_read_when_a_pass_has_ended``.
    """
    for offer in [offer for offer in _offers if offer.is_finished and offer.tag in tags]:
        offer.wait_until_read()
        _offers.remove(offer)
