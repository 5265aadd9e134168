"""Small objects that ranks tell each other once, such as what tensor types send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from composable_shard.core.comms.failures import watched
from composable_shard.errors import RankMismatchError


def gather_objects(said: object, group: dist.ProcessGroup, act: str) -> list[Any]:
    """Return what the ranks of ``group`` say, in their order.

    Args:
        said: What this rank says; pickled.
        group: The ranks.
        act: What this is for, such as "agreeing on what is sent"; for messages.

    Raises:
        CommunicationError: If a rank has ended, or does not answer within the time-out.

    Collective: an all-gather of the objects, after one of their sizes.
    """
    heard: list[Any] = [None] * group.size()
    with watched(group, act):
        dist.all_gather_object(heard, said, group=group)
    return heard


def raise_first_difference(
    heard: Sequence[Sequence[str]], ranks: Sequence[int], what: str
) -> NoReturn:
    """Tell where a rank first says something else than the first one.

    Args:
        heard: What the ranks say, facts in order; not all the same.
        ranks: What messages call them.
        what: What should be the same, such as "model".

    Raises:
        RankMismatchError: Always.
    """
    first = heard[0]
    place = next(place for place, theirs in enumerate(heard) if theirs != first)
    theirs = heard[place]
    index = next(
        (i for i, (a, b) in enumerate(zip(first, theirs, strict=False)) if a != b),
        min(len(first), len(theirs)),
    )
    said = [facts[index] if index < len(facts) else "nothing more" for facts in (first, theirs)]
    raise RankMismatchError(
        f"Expected the same {what} on all ranks, got on rank {ranks[0]}: {said[0]}; on rank "
        f"{ranks[place]}: {said[1]}"
    )
