"""Checkpoints that are complete or absent, even if a rank fails while it writes.

``torch.distributed.checkpoint`` writes a file for each rank into a folder, and a reader cannot be
sure that all of them have reached the disk. Here the files go to a temporary folder, are flushed to
the disk and are listed with their sizes. Then the folder is renamed, which is atomic.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from composable_shard.errors import ShardError
from composable_shard.train.ranks import Ranks, naming_failures

LIST = "files.json"  # marks a complete checkpoint: the names and bytes of all other files


def save_checkpoint(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a sharded checkpoint that is invisible until it is complete.

    ``torch.distributed.checkpoint.load`` reads it, on any number of ranks.

    Args:
        state: As for ``torch.distributed.checkpoint.save``.
        folder: The folder to create, on a file system that all ranks see. It must not exist yet: an
            overwritten checkpoint would be lost if the new write failed.
        process_group: The ranks that take part; all if absent, or this process alone if there is
            no process group.

    Raises:
        ShardError: On all ranks, if a rank cannot write its part, or ``folder`` exists.
        CommunicationError: If a rank has ended or does not answer within the time-out. The folder
            does not exist then. A folder ``.<name>.part`` may remain, which the next attempt
            replaces.

    Collective: those of ``torch.distributed.checkpoint.save`` and three of a few bytes.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "step-1"
        >>> save_checkpoint({"step": 1}, place)
        >>> is_complete(place)
        True
    """
    target = Path(folder)
    part = target.with_name(f".{target.name}.part")
    ranks = Ranks(process_group, f"saving checkpoint '{target}'")
    with naming_failures(ranks.doing):
        ranks.on_first(partial(_make_room, target, part))
        _write(state, part, target, process_group)
        ranks.on_first(partial(_publish, part, target))


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a checkpoint with all its files at their full length.

    Args:
        folder: The folder that was passed to :func:`save_checkpoint`.

    Example:
        >>> is_complete("no such folder")
        False
    """
    place = Path(folder)
    try:
        listed = json.loads((place / LIST).read_text()).items()
        return bool(listed) and all((place / name).stat().st_size == size for name, size in listed)
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in a folder, sorted by name, numbers in it by value.

    Args:
        folder: The folder that contains the folders of the checkpoints.

    Example:
        >>> complete_checkpoints("no such folder")
        []
    """
    named = [path for path in Path(folder).glob("*") if not path.name.startswith(".")]
    return sorted(filter(is_complete, named), key=_by_number)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sort ``step-10`` after ``step-9``, so that the newest checkpoint is the last."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part) if part.isdecimal() else -1, part) for part in parts]


def _make_room(target: Path, part: Path) -> None:
    if target.exists():
        raise FileExistsError(f"'{target}' already exists; choose another name, or remove it")
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)


def _write(
    state: dict[str, Any], part: Path, target: Path, process_group: dist.ProcessGroup | None
) -> None:
    import torch.distributed.checkpoint as dcp  # takes a while, and few programs need it

    writer = dcp.FileSystemWriter(part, sync_files=True)
    try:
        alone = not dist.is_initialized()
        dcp.save(state, storage_writer=writer, process_group=process_group, no_dist=alone)
    except dcp.CheckpointException as error:  # on all ranks, with the errors of all
        errors = "; ".join(f"rank {rank}: {what}" for rank, (what, _) in error.failures.items())
        raise ShardError(
            f"Expected all ranks to write their parts of checkpoint '{target}', got {errors}"
        ) from error


def _publish(part: Path, target: Path) -> None:
    files = [path for path in sorted(part.rglob("*")) if path.is_file()]
    sizes = {str(path.relative_to(part)): path.stat().st_size for path in files}
    write_json(part / LIST, sizes)
    sync_folder(part)
    part.rename(target)
    sync_folder(target.parent)


def write_json(path: Path, content: object) -> None:
    """Write a file and flush it to the disk, so that it has its content before it gets its name."""
    with path.open("w") as file:
        json.dump(content, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the folder to the disk: flushing a new file does not flush its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
