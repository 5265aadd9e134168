"""Process groups that the library makes: the default one, those of parts of it, and their end."""

from __future__ import annotations

import atexit
import os
import sys
import weakref

import torch.distributed as dist

from composable_shard import _torch, mesh

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]
_made = weakref.WeakKeyDictionary()
_makers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_LONGEST_EXIT = 1.0  # seconds until the interpreter ends all the same


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
        _makers[made[num_ranks]] = os.getpid()
    return made[num_ranks]


def subgroups_of(group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """Return the process groups that were made of ``group``, and have this rank."""
    return [] if group is None else list(_made.get(group, {}).values())


def end_process_groups() -> None:
    """Destroy the process groups that the library has made in this process.

    Runs when the interpreter ends, so that a script need not call ``destroy_process_group``. A
    default group that the user started stays, and only what was made of it goes. After an uncaught
    error nothing is destroyed: collectives may be under way, and destroying could wait for them.

    Collective: none.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    _torch.wait_for_idle_threads(_LONGEST_EXIT)
    if getattr(sys, "last_value", None) is not None:
        return
    if mesh.started_process_group() is dist.group.WORLD:
        dist.destroy_process_group()
        return
    for part, process in list(_makers.items()):
        if process == os.getpid() and _torch.is_in_use(part):  # a forked child has other threads
            dist.destroy_process_group(part)


atexit.register(end_process_groups)
