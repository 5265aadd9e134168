"""A checkpoint is whole or not there: ranks that die while it is written, files that are cut."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from composable_shard import ShardError, fully_shard
from composable_shard.testing import run_ranks
from composable_shard.train.checkpoint import complete_checkpoints, is_complete, save_checkpoint
from faults.breaking import BAD, failures, kill_this_rank

OLD, NEW = "step-1", "step-2"
THERE = "'{}' already exists; choose another name, or remove it"
SAVING = "Rank {} failed while saving checkpoint '{}': "


def model_of(value: float) -> nn.Module:
    model = nn.Linear(8, 8, bias=False)
    nn.init.constant_(model.weight, value)
    return fully_shard(model)


def save(folder: Path, name: str, value: float) -> None:
    save_checkpoint({"model": get_model_state_dict(model_of(value))}, folder / name)


def load(folder: Path) -> float:
    """Read the newest complete checkpoint; return the one value that all its elements have."""
    model = model_of(-1.0)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=complete_checkpoints(folder)[-1])
    values = model.weight.full_tensor().unique().tolist()  # type: ignore[operator, union-attr]
    assert len(values) == 1
    return float(values[0])


def names(folder: Path) -> list[str]:
    return [path.name for path in complete_checkpoints(folder)]


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(count, marks=pytest.mark.matrix) for count in (1, 2))]
)
def test_what_was_saved_is_read_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    run_ranks(save, ranks, tmp_path, OLD, 1.0)
    run_ranks(save, ranks, tmp_path, NEW, 2.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [OLD, NEW]
    assert names(tmp_path) == [OLD, NEW]
    for others in (1, 2, 3):
        assert run_ranks(load, others, tmp_path) == [2.0] * others


def dies_before_it_writes(*_: Any, **__: Any) -> None:
    kill_this_rank()


def dies_half_written(stream: Any) -> Any:
    """Stands in for ``os.fsync``: cuts the file that was to be put on the disk, and dies."""
    os.ftruncate(stream, os.fstat(stream).st_size // 2)
    kill_this_rank()


FLUSH = ("os.fsync", dies_half_written)
PUBLISH = ("pathlib.Path.rename", dies_before_it_writes)
BEGIN = ("torch.distributed.broadcast_object_list", dies_before_it_writes)


def killed_while_saving(folder: Path, rank: int, where: str, act: Callable[..., Any]) -> None:
    state = {"model": get_model_state_dict(model_of(2.0))}
    if dist.get_rank() != rank:
        save_checkpoint(state, folder / NEW)
        return
    if where == "pathlib.Path.rename":  # torch renames its metadata by the same call
        original = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if self.name.endswith(".part"):
                kill_this_rank()
            return original(self, target)

        act = rename
    with mock.patch(where, act):
        save_checkpoint(state, folder / NEW)


@pytest.mark.parametrize(
    ("rank", "fault"),
    [
        pytest.param(BAD, FLUSH, id="flush 1"),
        pytest.param(0, PUBLISH, id="publish 0"),
        pytest.param(BAD, BEGIN, id="begin 1"),
    ],
)
def test_a_rank_killed_while_saving_leaves_the_previous_checkpoint(
    tmp_path: Path, rank: int, fault: tuple[str, Callable[..., Any]]
) -> None:
    run_ranks(save, 2, tmp_path, OLD, 1.0)
    said = failures(killed_while_saving, 2, tmp_path, rank, *fault, apart=False)
    assert said.pop(rank) == "RuntimeError: The process ended during the call, exit code -9"
    other = 1 - rank
    assert list(said) == [other]
    assert said[other].startswith(f"CommunicationError: {SAVING.format(other, tmp_path / NEW)}")
    assert not (tmp_path / NEW).exists()
    assert names(tmp_path) == [OLD]
    assert run_ranks(load, 2, tmp_path) == [1.0] * 2
    run_ranks(save, 2, tmp_path, NEW, 2.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [OLD, NEW]
    assert run_ranks(load, 2, tmp_path) == [2.0] * 2


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def refused(folder: Path, place: str = "json.dump", rank: int | None = None) -> str:
    state = {"model": get_model_state_dict(model_of(2.0))}
    broken = mock.patch(place, full_disk) if dist.get_rank() == rank else nullcontext()
    with broken, pytest.raises(ShardError) as caught:
        save_checkpoint(state, folder / OLD)
    return f"{type(caught.value).__name__}: {caught.value}"


FIRST = "ShardError: Expected no failure while saving checkpoint '{}', got on rank 0: "


def test_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, OLD, 1.0)
    place = tmp_path / OLD
    text = f"{FIRST.format(place)}FileExistsError: {THERE.format(place)}"
    assert run_ranks(refused, 2, tmp_path) == [text] * 2
    assert run_ranks(load, 2, tmp_path) == [1.0] * 2


@pytest.mark.parametrize(
    ("place", "rank", "text"),
    [
        (
            *("torch.distributed.checkpoint.FileSystemWriter.write_data", BAD),
            "ShardError: Expected all ranks to write their parts of checkpoint '{}', got rank 1: ",
        ),
        ("json.dump", 0, f"{FIRST}OSError: "),
    ],
    ids=["write", "publish"],
)
def test_no_space_on_one_rank_is_an_error_on_all(
    place: str, rank: int, text: str, tmp_path: Path
) -> None:
    said = text.format(tmp_path / OLD) + "[Errno 28] No space left on device"
    assert run_ranks(refused, 2, tmp_path, place, rank) == [said] * 2
    assert names(tmp_path) == []


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "files.json"])
@pytest.mark.parametrize("keeps", [0, 10, None])
def test_a_checkpoint_with_a_cut_or_missing_file_is_not_complete(
    tmp_path: Path, file: str, keeps: int | None
) -> None:
    run_ranks(save, 2, tmp_path, OLD, 1.0)
    run_ranks(save, 2, tmp_path, NEW, 2.0)
    cut = tmp_path / NEW / file
    if keeps is None:
        cut.unlink()
    else:
        os.truncate(cut, keeps)
    assert not is_complete(tmp_path / NEW)
    assert run_ranks(load, 2, tmp_path) == [1.0] * 2


def test_the_newest_is_the_one_with_the_greatest_number(tmp_path: Path) -> None:
    """A loop that names its checkpoints without leading zeros resumes from the last one too."""
    for name in ("step-9", "step-100", "step-10", "step-1b", "last"):
        save_checkpoint({"step": 1}, tmp_path / name)
    assert names(tmp_path) == ["last", "step-1b", "step-9", "step-10", "step-100"]


def test_what_is_no_checkpoint_is_not_complete(tmp_path: Path) -> None:
    for name, text in (("a", "[]"), ("b", '{"x": 3}'), ("c", "3"), ("e", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "files.json").write_text(text)
    (tmp_path / "d").write_text("a file")
    assert complete_checkpoints(tmp_path) == []
    shutil.rmtree(tmp_path)
    assert complete_checkpoints(tmp_path) == []
