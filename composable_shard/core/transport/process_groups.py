"""Process groups that the library makes. Small objects and numbers that ranks exchange."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from composable_shard import _torch, mesh
from composable_shard.core.transport.failures import count_launch, watched
from composable_shard.mesh import ShardMesh

# Process groups that the library creates, and their destruction -----------------------------------

_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]]
_subgroups = weakref.WeakKeyDictionary()
_creator_pids: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_EXIT_TIMEOUT = 30.0  # maximum seconds to wait for gloo's threads at exit


def subgroup(group: dist.ProcessGroup, num_ranks: int) -> dist.ProcessGroup:
    """Return a process group of ``num_ranks`` neighbouring ranks, with this rank among them.

    If ``num_ranks`` is the size of ``group``, the result is a second process group of the same
    ranks. Its collectives run concurrently with those of ``group``.

    Args:
        group: A process group.
        num_ranks: The number of ranks, which divides the size of ``group``.

    Collective: makes the process group at the first call for ``group`` and ``num_ranks``.
    """
    existing = _subgroups.setdefault(group, {})
    if num_ranks not in existing:
        first = group.rank() // num_ranks * num_ranks
        ranks = dist.get_process_group_ranks(group)[first : first + num_ranks]
        name = f"{group.group_name}/{num_ranks} from {first}"
        is_gloo = _torch.backend_name(group, torch.device("cpu")) == "gloo"
        # Groups of other backends get torch's default time-out.
        timeout = _torch.timeout_of(group) if is_gloo else None
        existing[num_ranks] = _torch.new_local_group(ranks, dist.get_backend(group), name, timeout)
        _creator_pids[existing[num_ranks]] = os.getpid()
    return existing[num_ranks]


def subgroups_of(group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """Return the process groups of this rank that :func:`subgroup` has made from ``group``."""
    return [] if group is None else list(_subgroups.get(group, {}).values())


def end_process_groups() -> None:
    """Destroy the process groups that the library has made in this process.

    Runs when the interpreter ends, so that a script need not call ``destroy_process_group``. If the
    user started the default group, only the groups that the library has made from it are destroyed.
    After an uncaught error nothing is destroyed: collectives may be in flight, and the destruction
    could wait for them.

    Collective: none.
    """
    if not dist.is_available():
        return
    # Wait first, even if the user has destroyed all groups: the threads of a group run as long as
    # anything refers to the group.
    _torch.wait_for_workers(_EXIT_TIMEOUT)
    if not dist.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    if mesh.started_process_group() is dist.group.WORLD:
        dist.destroy_process_group()
        return
    for group, pid in list(_creator_pids.items()):
        if pid == os.getpid() and _torch.is_in_use(group):  # forks lack its threads
            dist.destroy_process_group(group)


atexit.register(end_process_groups)

# Small objects and numbers that ranks exchange ----------------------------------------------------


def gather_objects(local: object, group: dist.ProcessGroup, op: str) -> list[Any]:
    """Return the objects of all ranks of ``group``, in rank order.

    Args:
        local: The object of this rank, which is pickled.
        group: The ranks.
        op: The operation, such as "agreeing on what is sent", for error messages.

    Raises:
        CommunicationError: If a rank has ended, or does not answer within the time-out.

    Collective: an all-gather of the sizes of the objects, then one of the objects.
    """
    gathered: list[Any] = [None] * group.size()
    with watched(group, op):
        dist.all_gather_object(gathered, local, group=group)
    return gathered


def gather_by_rank(local: object, groups: Iterable[dist.ProcessGroup], op: str) -> dict[int, Any]:
    """Return the objects of all ranks of a mesh, by global rank: gather along one axis at a time.

    Args:
        local: The object of this rank, which is pickled.
        groups: The process groups of the axes of a mesh.
        op: See :func:`gather_objects`.

    Collective: an all-gather of the objects over each group.
    """
    objects = {dist.get_rank(): local}
    for group in groups:
        gathered = gather_objects(objects, group, op)
        for rank, theirs in zip(dist.get_process_group_ranks(group), gathered, strict=True):
            # On a fake group, `theirs` is this rank's dict, without an entry for `rank`; on a real
            # group, `theirs` overwrites the entry.
            objects |= {rank: local, **theirs}
    return dict(sorted(objects.items()))


class SmallAllReduce:
    """An all-reduce of a few numbers over all ranks of a mesh.

    The constructor launches it. If it runs over the shards and then over the replicas, ``wait``
    launches the second part.

    Args:
        numbers: The numbers of this rank, on the device of the mesh or on the host. If all process
            groups have gloo, numbers on the host stay there, so that no kernel delays them.
        reduce_op: The ``ReduceOp``.
        mesh: The ranks.
        op: What the library does, for error messages.

    Collective: an all-reduce over the default process group, or, if that has other ranks than the
        mesh, one over the shards and one over the replicas.
    """

    def __init__(
        self, numbers: torch.Tensor, reduce_op: dist.ReduceOp.RedOpType, mesh: ShardMesh, op: str
    ) -> None:
        world, cpu = dist.group.WORLD, torch.device("cpu")
        is_world = world is not None and 1 < world.size() == mesh.num_ranks
        self._groups = [world] if is_world and world is not None else mesh.process_groups
        are_gloo = all(_torch.backend_name(group, cpu) == "gloo" for group in self._groups)
        self._numbers = numbers if are_gloo else numbers.to(mesh.device)
        self._reduce_op, self._op = reduce_op, op
        self._work: dist.Work | None = None
        self._launch_number = 0
        self._launch()

    def wait(self) -> list[Any]:
        """Return the reduced numbers, without waiting for compute launched after the all-reduce."""
        device = self._numbers.device
        new_stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if _torch.has_streams(device):
            new_stream = _torch.on_stream(_torch.make_stream(device))
        with new_stream:
            while self._work is not None:
                with watched(self._groups[0], self._op, self._op, self._launch_number):
                    self._work.wait()
                self._groups = self._groups[1:]
                self._launch()
            return self._numbers.tolist()

    def _launch(self) -> None:
        """Launch the all-reduce over the next process group, if there is one left."""
        self._work = None
        if self._groups:
            self._launch_number = count_launch(self._groups[0], self._op)
            self._work = dist.all_reduce(
                self._numbers, self._reduce_op, group=self._groups[0], async_op=True
            )


def compare(
    text: str, group: dist.ProcessGroup, device: torch.device, *numbers: int
) -> tuple[bool, list[int]]:
    """Return whether all ranks have the same text, and the maximum of each number.

    Collective: one all-reduce of 16 bytes, and 8 for each number.
    """
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")  # fits int64
    extremes = torch.tensor([digest, -digest, *numbers], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, negated_smallest, *maxima = extremes.tolist()
    return largest == -negated_smallest, maxima


def first_difference(facts: Sequence[Sequence[str]], ranks: Sequence[int], subject: str) -> str:
    """Return a message that names the first difference between two ranks.

    Args:
        facts: For each rank, lines that describe the subject; they differ between some ranks.
        ranks: The rank numbers to show in the message.
        subject: What the lines describe, such as "model".
    """
    first = facts[0]
    other = next(index for index, theirs in enumerate(facts) if theirs != first)
    both = first, facts[other]
    index = next(
        (i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b),
        min(map(len, both)),
    )
    texts = [theirs[index] if index < len(theirs) else "nothing more" for theirs in both]
    return (
        f"Expected the same {subject} on all ranks, got on rank {ranks[0]}: {texts[0]}; on rank "
        f"{ranks[other]}: {texts[1]}"
    )
