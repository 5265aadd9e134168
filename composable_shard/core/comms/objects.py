"""Small objects that ranks tell each other once, such as what tensor types send."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from composable_shard.core.comms.failures import named


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
    try:
        dist.all_gather_object(heard, said, group=group)
    except RuntimeError as error:
        raise named(error, act) from error
    return heard
