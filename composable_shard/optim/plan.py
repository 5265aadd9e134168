"""PURE: in which order a step moves its buckets, and what that sends and occupies.

At most two buckets are under way. While one is computed the next is on its way to the owners; the
one before is back in the shards by then::

    to owners    | 0 |     | 1 |     | 2 |
    compute            | 0 |     | 1 |     | 2 |
    to shards                | 0 |     | 1 |     | 2 |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from composable_shard.optim.blocks import Route

Action = Literal["launch", "arrive", "compute", "finish"]


def schedule(num_buckets: int) -> Iterator[tuple[Action, int]]:
    """Yield what a step does, and to which bucket.

    >>> " ".join(f"{action}-{index}" for action, index in schedule(2))
    'launch-0 arrive-0 launch-1 compute-0 arrive-1 finish-0 compute-1 finish-1'
    """
    for index in range(num_buckets):
        if index == 0:
            yield "launch", index
        yield "arrive", index
        if index > 0:
            yield "finish", index - 1
        if index + 1 < num_buckets:
            yield "launch", index + 1
        yield "compute", index
        if index + 1 == num_buckets:
            yield "finish", index


@dataclass(frozen=True)
class Sent:
    """What one all-to-all carries for this rank.

    Attributes:
        is_launched: Whether any rank sends anything.
        to: Bytes to each rank to which there are any.
        received: Bytes that arrive.
    """

    is_launched: bool
    to: Mapping[int, int]
    received: int

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends."""
        return sum(self.to.values())

    @property
    def buffers(self) -> int:
        """Bytes of the messages that leave and arrive."""
        return self.nbytes + self.received


@dataclass(frozen=True)
class Parcel:
    """A block that travels, in numbers.

    Attributes:
        route: The block, and what this rank does with it.
        value_itemsize: Bytes of an element of its values.
        grad_itemsize: Bytes of an element of its gradient.
        is_away: Whether its shards are on another device than compute.
    """

    route: Route
    value_itemsize: int
    grad_itemsize: int
    is_away: bool = False

    @property
    def whole_numel(self) -> int:
        """Elements that this rank allocates to have it whole: none where it lies so already."""
        is_in_place = self.route.is_whole and not self.is_away
        return self.route.block.box.numel if self.route.is_owner and not is_in_place else 0


@dataclass(frozen=True)
class BucketPlan:
    """What a step does with one bucket, if all of its parameters have a gradient.

    Attributes:
        parcels: Its blocks.
    """

    parcels: tuple[Parcel, ...]

    @property
    def to_owners(self) -> Sent:
        """Values and gradients on their way to the owners."""
        to: Counter[int] = Counter()
        received = 0
        for parcel in self.parcels:
            route, itemsize = parcel.route, parcel.value_itemsize + parcel.grad_itemsize
            if route.sends_to_owner and route.held is not None:
                to[route.block.owner] += route.held.numel * itemsize
            received += sum(part.numel for _, part in route.sources) * itemsize
        return Sent(any(one.route.is_gathered for one in self.parcels), to, received)

    @property
    def to_shards(self) -> Sent:
        """Updated values on their way back."""
        to: Counter[int] = Counter()
        received = 0
        for parcel in self.parcels:
            route = parcel.route
            for peer, part in route.holders:
                to[peer] += part.numel * parcel.value_itemsize
            if route.held is not None and not route.is_owner:
                received += route.held.numel * parcel.value_itemsize
        return Sent(any(one.route.is_returned for one in self.parcels), to, received)

    @property
    def sent(self) -> list[Sent]:
        """What is launched in a step."""
        return [one for one in (self.to_owners, self.to_shards) if one.is_launched]

    def held(self) -> dict[Action, tuple[int, int]]:
        """Return the bytes that it occupies, at most during each action and behind it.

        Without what the stock optimizer needs besides.
        """
        there, back = self.to_owners, self.to_shards
        values = sum(one.whole_numel * one.value_itemsize for one in self.parcels)
        both = values + sum(one.whole_numel * one.grad_itemsize for one in self.parcels)
        return {
            "launch": (there.buffers, there.buffers),
            "arrive": (max(there.buffers, there.received + both), both),
            "compute": (max(both, values + back.buffers), back.buffers),
            "finish": (back.buffers, 0),
        }


def most_held(buckets: Sequence[BucketPlan]) -> int:
    """Return the most bytes that the buckets of a step occupy at any time."""
    each = [bucket.held() for bucket in buckets]
    now, most = [0] * len(buckets), 0
    for action, index in schedule(len(buckets)):
        during, after = each[index][action]
        most = max(most, sum(now) - now[index] + during)
        now[index] = after
    return most


@dataclass(frozen=True)
class GroupSteps:
    """What a step does with one parameter group, on one rank.

    Attributes:
        layout: How its parameters are stepped.
        num_params: How many of them are trained.
        numel: Their elements.
        num_tensors: How many tensors the stock optimizer steps on this rank.
        buckets: What travels.
    """

    layout: str
    num_params: int
    numel: int
    num_tensors: int
    buckets: tuple[BucketPlan, ...] = ()


@dataclass(frozen=True)
class LayoutSteps:
    """What a step of whole matrices and shards does, on one rank.

    Attributes:
        groups: By parameter group.
        loads: For each mesh, what the matrices of each of its ranks cost.
    """

    groups: tuple[GroupSteps, ...]
    loads: tuple[tuple[int, ...], ...]

    @property
    def most_held(self) -> int:
        """The most bytes that buckets occupy at any time."""
        return most_held([bucket for group in self.groups for bucket in group.buckets])

    @property
    def imbalance(self) -> float:
        """What the rank with most to do has to do, by the mean; 1 is best."""
        return max(
            (max(load) * len(load) / sum(load) for load in self.loads if any(load)), default=1.0
        )
