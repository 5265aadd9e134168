"""The files and folders that weights are in: what they are called, and when they are there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from composable_shard import CommunicationError, ShardError, fully_shard, load_sharded, save_full
from composable_shard.testing import RankError, run_ranks, run_threads
from composable_shard.train.weights import save
from composable_shard.train.weights.files import FileWriter
from composable_shard.train.weights.save import num_bytes

INDEX = "model.safetensors.index.json"


def layers(value: float, num_layers: int = 3) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(num_layers)))
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def values_at(place: Path, num_layers: int = 3) -> set[float]:
    model = layers(0, num_layers)
    load_sharded(model, place)
    return {value for param in model.parameters() for value in param.flatten().tolist()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_a_folder_of_several_files_has_the_index_of_hugging_face(tmp_path: Path) -> None:
    save_full(layers(1), tmp_path, max_shard_size=100)  # each weight has 64 bytes
    assert names_in(tmp_path) == [*SHARDS, INDEX]
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 192},
        "weight_map": {f"{n}.weight": file for n, file in enumerate(SHARDS)},
    }
    for file in SHARDS:
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    for place in (tmp_path, tmp_path / INDEX):
        assert values_at(place) == {1.0}


def test_as_much_as_fits_goes_into_a_file(tmp_path: Path) -> None:
    sizes = ("1KB", "1.5MiB", "2 GB", "1TiB", 12)
    assert [num_bytes(size) for size in sizes] == [1000, 1572864, 2 * 10**9, 2**40, 12]
    save_full(layers(1), tmp_path, max_shard_size="128KB")
    assert names_in(tmp_path) == ["model.safetensors"]
    save_full(layers(1, 5), tmp_path / "two", max_shard_size=128)
    heads = [sorted(load_file(path)) for path in sorted((tmp_path / "two").glob("*.safetensors"))]
    assert heads == [["0.weight", "1.weight"], ["2.weight", "3.weight"], ["4.weight"]]
    save_full(layers(1), tmp_path / "each", max_shard_size=1)
    assert names_in(tmp_path / "each") == [*SHARDS, INDEX]


def test_the_one_file_of_a_folder_and_other_names(tmp_path: Path) -> None:
    save_file(layers(2).state_dict(), tmp_path / "diffusion_pytorch_model.safetensors")
    assert values_at(tmp_path) == {2.0}
    weight_map = {f"{n}.weight": "a.safetensors" for n in range(3)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    save_file(layers(3).state_dict(), tmp_path / "a.safetensors")
    assert values_at(tmp_path) == {3.0}
    save_file(layers(4).state_dict(), tmp_path / "model.safetensors")
    assert values_at(tmp_path) == {4.0}


@pytest.mark.parametrize(("old", "new"), [(60, 100), (100, 1000), (1000, 100)])
def test_whatever_dies_there_is_the_old_or_the_new_or_none(
    tmp_path: Path, old: int, new: int
) -> None:
    """Stop after each step of giving files their names, and read what is there."""
    outcomes = []
    for last in range(20):
        folder = tmp_path / str(last)
        save_full(layers(1), folder, max_shard_size=old)
        (folder / "config.json").write_text("{}")
        with stopped_after(last) as num_left:
            try:
                save_full(layers(2), folder, max_shard_size=new, overwrite=True)
            except ShardError as error:
                assert "power is off" in str(error)
        try:
            outcomes.append(values_at(folder))
        except ShardError as error:
            assert "FileNotFoundError: Expected model.safetensors or" in str(error)
            outcomes.append(set())
        if num_left:
            break
    weights = [*SHARDS, INDEX] if new == 100 else ["model.safetensors"]
    assert names_in(folder) == sorted(["config.json", *weights])
    assert outcomes[0] == {1.0} and outcomes[-1] == {2.0}
    assert all(outcome in ({1.0}, {2.0}, set()) for outcome in outcomes), outcomes
    if new == 1000 or old == 1000:  # a single file is found first
        assert set() not in outcomes


@contextlib.contextmanager
def stopped_after(number: int) -> Iterator[list[None]]:
    """Let some files be renamed or removed, and no more; tell how many could have been."""
    left = [None] * number

    def counted(call: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            if not (str(args[0]).endswith(".part") and call.__name__ == "unlink"):
                if not left:
                    raise OSError("power is off")
                left.pop()
            return call(*args, **kwargs)

        return act

    with (
        mock.patch.object(save.os, "replace", counted(save.os.replace)),
        mock.patch.object(Path, "unlink", counted(Path.unlink)),
    ):
        yield left


def test_nobody_sees_a_file_before_it_is_complete(tmp_path: Path) -> None:
    seen = []
    write = FileWriter.write

    def look(*args: object) -> None:
        seen.append(names_in(tmp_path))
        write(*args)

    with mock.patch.object(FileWriter, "write", look):
        run_threads(lambda: save_full(fully_shard(layers(1)), tmp_path, max_shard_size=100), 2)
    assert len(seen) == 3
    assert {name for names in seen for name in names} == {f".{name}.part" for name in SHARDS}
    assert names_in(tmp_path) == [*SHARDS, INDEX]


def saved_by(folder: Path, limit: int) -> list[str]:
    begun, begin = [], FileWriter.__init__

    def note(self: FileWriter, place: Path, tensors: object) -> None:
        begun.append(place.name)
        begin(self, place, tensors)

    with mock.patch.object(FileWriter, "__init__", note):
        save_full(fully_shard(layers(dist.get_rank() + 1)), folder, max_shard_size=limit)
    return begun


def test_every_rank_writes_files_of_its_own(tmp_path: Path) -> None:
    hidden = [f".{name}.part" for name in SHARDS]
    assert run_ranks(saved_by, 2, tmp_path / "a", 100) == [[hidden[0], hidden[2]], [hidden[1]]]
    assert names_in(tmp_path / "a") == [*SHARDS, INDEX]
    assert values_at(tmp_path / "a") == {1.0, 2.0}  # rows of both ranks
    assert run_ranks(saved_by, 2, tmp_path / "b", 1000) == [[".model.safetensors.part"], []]


def killed(folder: str, rank: int) -> None:
    write = FileWriter.write

    def die(*args: object) -> None:
        write(*args)
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with mock.patch.object(FileWriter, "write", die):
            save_full(fully_shard(layers(1, 8)), folder, max_shard_size=64)
    except CommunicationError as error:
        (Path(folder).parent / f"told {dist.get_rank()}").write_text(str(error))
        raise


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_leaves_no_weights(tmp_path: Path, rank: int) -> None:
    folder = tmp_path / "weights"
    with pytest.raises(RankError):
        run_ranks(killed, 3, str(folder), rank, timeout=60)
    assert names_in(folder) == []
    for other in {0, 1, 2} - {rank}:
        text = (tmp_path / f"told {other}").read_text()
        assert text.startswith(f"Rank {other} failed while saving '{folder}': ")


def test_the_bar_counts_bytes_on_the_first_rank_alone(tmp_path: Path) -> None:
    def go() -> None:
        model = fully_shard(layers(1))
        save_full(model, tmp_path / "x.safetensors", progress=True)
        load_sharded(model, tmp_path / "x.safetensors", progress=True)

    with redirect_stderr(io.StringIO()) as told:
        run_threads(go, 2)
    shown = told.getvalue().replace("\r", "\n").splitlines()
    for title in ("saving", "loading"):
        *_, last = (line for line in shown if line.startswith(f"{title} x.safetensors: "))
        assert last.startswith(f"{title} x.safetensors: 100%") and "192/192 [" in last
