"""Process groups of some of the ranks that share a parameter, made once for all who ask."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from composable_shard import _torch

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]
_made = weakref.WeakKeyDictionary()


def subgroup(group: dist.ProcessGroup, num_ranks: int) -> dist.ProcessGroup:
    """Return the process group of the ``num_ranks`` neighbours that this rank is one of.

    With ``num_ranks`` the size of ``group``, it has the same ranks and is another group still, so
    that its collectives run beside those of ``group``.

    Args:
        group: A process group.
        num_ranks: How many of its ranks; divides their number.

    Collective: makes the group at the first call for ``group`` and ``num_ranks``.
    """
    made = _made.setdefault(group, {})
    if num_ranks not in made:
        first = group.rank() // num_ranks * num_ranks
        ranks = dist.get_process_group_ranks(group)[first : first + num_ranks]
        name = f"{group.group_name}/{num_ranks} from {first}"
        made[num_ranks] = _torch.new_local_group(ranks, dist.get_backend(group), name)
    return made[num_ranks]
