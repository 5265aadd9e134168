"""What is raised when a collective fails: which rank is missing, at what, seen from which rank.

A process group in which a collective has failed is lost. Its ranks are no longer in step, and what
one of them sent for the failed collective would be taken for a part of the next. Gloo closes its
connections for that reason; ranks that read each other's memory refuse to go on likewise.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from composable_shard.errors import CommunicationError, RankMismatchError, ShardError

_losses: weakref.WeakKeyDictionary[dist.ProcessGroup, str]
_losses = weakref.WeakKeyDictionary()


def lost(group: dist.ProcessGroup, peer: int, got: object) -> ShardError:
    """Give ``group`` up; return the error that says so.

    Args:
        group: The process group.
        peer: The rank within it that was waited for.
        got: What came instead.
    """
    rank = dist.get_process_group_ranks(group)[peer]
    error = ShardError(f"Expected rank {rank} to take part in a collective, got {got}")
    _losses.setdefault(group, str(error))
    return error


def mismatch(group: dist.ProcessGroup, peer: int, own: str, got: str) -> RankMismatchError:
    """Give ``group`` up, in which a rank sends other tensors than this one; return the error."""
    rank = dist.get_process_group_ranks(group)[peer]
    error = RankMismatchError(
        f"Expected {own} from rank {rank} as on this one, got {got}; has a parameter been replaced "
        "or converted on one of them alone?"
    )
    _losses.setdefault(group, str(error))
    return error


def is_lost(group: dist.ProcessGroup) -> bool:
    """Tell whether a collective of ``group`` has failed."""
    return group in _losses


def refuse_lost(group: dist.ProcessGroup) -> None:
    """Raise ``ShardError`` if a collective of ``group`` has failed; see the top of this page."""
    if _losses and group in _losses:
        raise ShardError(
            "Expected a process group without failures, got one that had failed before: "
            f"{_losses[group]}"
        )


def named(error: RuntimeError, act: str) -> RuntimeError:
    """Return an error that says on which rank and at what a collective failed.

    Args:
        error: What was raised, by a backend or by a collective of ours; returned as it is if it
            says all that already.
        act: What the rank was doing, such as "gathering group 'blocks.3'".
    """
    if isinstance(error, CommunicationError):
        return error
    kind = RankMismatchError if isinstance(error, RankMismatchError) else CommunicationError
    return kind(f"Rank {dist.get_rank()} failed while {act}: {error}")


def own_failure(act: str) -> str:
    """Return a note for an error of this rank's own before a collective, such as one of memory."""
    return (
        f"Rank {dist.get_rank()} failed while {act}; ranks that did not fail likewise wait for it "
        "until its process ends, or until their time-out"
    )
