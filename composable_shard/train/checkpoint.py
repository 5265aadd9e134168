"""Checkpoints that are whole or not there, whatever happens while they are written.

``torch.distributed.checkpoint`` writes a file for each rank into a folder, and what reads it cannot
tell for sure whether all of them have reached the disk. Here they are written into a folder of
another name, put on the disk and listed with their sizes. Only then does the folder get its name,
which is one step for the file system.
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

LIST = "files.json"
"""The file that a complete checkpoint has: names and sizes in bytes of all others."""


def save_checkpoint(
    state: dict[str, Any],
    folder: str | os.PathLike[str],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a sharded checkpoint that nobody sees before it is complete.

    It is read by ``torch.distributed.checkpoint.load``, on any number of ranks.

    Args:
        state: As for ``torch.distributed.checkpoint.save``.
        folder: Where it shall be; on a file system that all ranks see. Nothing may be there yet: a
            checkpoint is not overwritten, since it would be lost if writing the other one failed.
        process_group: The ranks that take part; all if absent, or this process alone if there is
            no process group.

    Raises:
        ShardError: On all ranks, if one of them cannot write its part, or there is something at
            ``folder``.
        CommunicationError: If a rank has ended or does not answer within the time-out. No folder of
            that name is there then, but perhaps ``.<name>.part``, which the next attempt replaces.

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
    expected = f"to save checkpoint '{target}'"
    with naming_failures(ranks.doing):
        ranks.on_first(partial(_make_room, target, part), expected)
        _write(state, part, target, process_group)
        ranks.on_first(partial(_publish, part, target), expected)


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a folder holds a checkpoint with all its files at their full length.

    Args:
        folder: Where :func:`save_checkpoint` was told to write.

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
        folder: What the folders of the checkpoints are in.

    Example:
        >>> complete_checkpoints("no such folder")
        []
    """
    named = [path for path in Path(folder).glob("*") if not path.name.startswith(".")]
    return sorted(filter(is_complete, named), key=_by_number)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Let ``step-10`` come after ``step-9``; the newest one is not to be missed for its name."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part) if part.isdecimal() else -1, part) for part in parts]


def _make_room(target: Path, part: Path) -> None:
    if target.exists():
        raise FileExistsError(f"'{target}' is there already; choose another name, or remove it")
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
    except dcp.CheckpointException as error:  # on all ranks, with what each of them said
        said = "; ".join(f"rank {rank}: {what}" for rank, (what, _) in error.failures.items())
        raise ShardError(
            f"Expected all ranks to write their parts of checkpoint '{target}', got {said}"
        ) from error


def _publish(part: Path, target: Path) -> None:
    files = [path for path in sorted(part.rglob("*")) if path.is_file()]
    sizes = {str(path.relative_to(part)): path.stat().st_size for path in files}
    write_json(part / LIST, sizes)
    sync_folder(part)
    part.rename(target)
    sync_folder(target.parent)


def write_json(path: Path, content: object) -> None:
    """Write a file and put it on the disk, so that it has its content before it gets its name."""
    with path.open("w") as file:
        json.dump(content, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Put the names of the files on the disk, as those of new files are not with their content."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
