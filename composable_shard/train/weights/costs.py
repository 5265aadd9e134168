"""What a pass over the full weights launches, moves and holds, before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from composable_shard.train.weights.entries import listed_in
from composable_shard.train.weights.gathering import Bucket, MessageCost, Routes, runs_within
from composable_shard.train.weights.stream import Asked


@dataclass(frozen=True)
class PassCosts:
    """What one pass of ``iter_full`` takes of this rank.

    Attributes:
        bucket_nbytes: Bytes of full tensors that are gathered together, or one larger tensor.
        num_buckets: How many buckets there are; before each, and after the last one, each rank
            sends all others a word of 8 bytes.
        launches: Gathers that are launched.
        messages: Tensors in all of them.
        sent_nbytes: Bytes that this rank sends.
        received_nbytes: Bytes that it receives.
        held_nbytes: The most bytes that live at a time beside the model, if the consumer lets each
            tensor go: those of a bucket, those in which the next one arrives, and messages.
        by_class: Tensors that only their class makes whole: what that launches is not counted.
    """

    bucket_nbytes: int
    num_buckets: int
    launches: int
    messages: int
    sent_nbytes: int
    received_nbytes: int
    held_nbytes: int
    by_class: tuple[str, ...]


def costs_of(
    model: nn.Module, asked: Asked, bucket_nbytes: int, to: int | None = None
) -> PassCosts:
    """Return what a pass takes of this rank.

    Args:
        model: The model, which stays as it is.
        asked: Which tensors, and in which form.
        bucket_nbytes: Bytes of a bucket.
        to: The rank of the job that gets them; all do if ``None``.

    Collective: none.
    """
    routes, planned = Routes(), asked.planned(listed_in(model).entries)
    buckets = [Bucket(run, routes, to) for run in runs_within(planned, bucket_nbytes)]
    costs = [bucket.costs() for bucket in buckets]
    gathers = [gather for each in costs for cost in each for gather in cost.gathers]
    return PassCosts(
        bucket_nbytes=bucket_nbytes,
        num_buckets=len(buckets),
        launches=len(gathers),
        messages=sum(len(gather.inputs) for gather in gathers),
        sent_nbytes=sum(gather.sent for gather in gathers),
        received_nbytes=sum(gather.received for gather in gathers),
        held_nbytes=_most_held(buckets, costs),
        by_class=tuple(name for bucket in buckets for name in bucket.names_by_class()),
    )


def _most_held(buckets: Sequence[Bucket], costs: Sequence[Sequence[MessageCost]]) -> int:
    """Return the most bytes that live at a time; see ``Stream.run``."""
    rooms, most, arrived = dict[object, int](), 0, 0
    for bucket, each in zip(buckets, costs, strict=True):
        for cost in each:
            rooms |= {key: max(n, rooms.get(key, 0)) for key, n in cost.rooms.items()}
        under_way = 0
        whole = 0
        if bucket.arrives:
            under_way = sum(cost.direct for cost in each)
            whole = sum(cost.packed for cost in each) + bucket.nbytes_of_others()
        copied = sum(cost.copied for cost in each if cost.gathers)
        most = max(most, sum(rooms.values()) + arrived + under_way + copied)
        arrived = under_way + whole
        most = max(most, sum(rooms.values()) + arrived)
    return most
