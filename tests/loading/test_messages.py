"""What is refused, in words that are the same on all ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial
from two_tensors import TwoTensor

from composable_shard import (
    CommunicationError,
    RankMismatchError,
    ShardError,
    fully_shard,
    iter_full,
    load_sharded,
    save_full,
    unsharded,
)
from composable_shard.testing import run_threads
from composable_shard.train.weights import files, save
from composable_shard.train.weights.writing import FileWriter

NUM_RANKS = 2


def linear(rows: int = 4) -> nn.Linear:
    return fully_shard(nn.Linear(2, rows))


def said(call: Callable[[], object]) -> tuple[str, str]:
    """Return the type and the text of the error that a call ends in."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    return "none", ""


def all_say(call: Callable[..., object], *args: object, kind: type[Exception] = ShardError) -> str:
    """Return the text of the error that a call ends in on all ranks alike."""
    heard = run_threads(lambda: said(lambda: call(*args)), NUM_RANKS)
    assert len(set(heard)) == 1, heard
    assert heard[0][0] == kind.__name__, heard
    return heard[0][1]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    save_file({"weight": torch.ones(4, 2), "bias": torch.ones(4)}, tmp_path / "whole.safetensors")
    return tmp_path / "whole.safetensors"


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / "x.safetensors")
    return folder / "x.safetensors"


# Names and values ------------------------------------------------------------------------------


def test_names_that_one_side_has(tmp_path: Path) -> None:
    file = write(tmp_path, weight=torch.ones(4, 2), b=torch.ones(4), c=torch.ones(1))
    assert all_say(lambda: load_sharded(linear(), file)) == (
        f"Expected the names of the model in '{file}', got missing: bias; unexpected: b, c; pass "
        "rename to map names, or strict=False to load what there is"
    )


def test_a_long_list_of_names_is_counted(tmp_path: Path) -> None:
    tensors = {f"w{number:02d}": torch.ones(1) for number in range(23)}
    file = write(tmp_path, weight=torch.ones(4, 2), bias=torch.ones(4), **tensors)
    text = all_say(lambda: load_sharded(linear(), file))
    assert f"got unexpected: {', '.join(list(tensors)[:20])} and 3 more; pass rename" in text


def test_shapes_and_dtypes_that_do_not_fit(tmp_path: Path) -> None:
    file = write(tmp_path, weight=torch.ones(2, 4), bias=torch.ones(4, dtype=torch.complex64))
    assert all_say(lambda: load_sharded(linear(), file, strict=False)) == (
        f"Expected tensors in '{file}' that fit the model, got 'weight' of shape [2, 4] for "
        "[4, 2], 'bias' of torch.complex64 for torch.float32"
    )


class Expanded(nn.Module):
    """Buffers that are views: repeated, conjugate, negative."""

    def __init__(self, value: float) -> None:
        super().__init__()
        waves = torch.full((3,), complex(value, value + 1))
        self.register_buffer("table", torch.full((1, 2), value).expand(3, 2))
        self.register_buffer("conjugate", waves.conj())
        self.register_buffer("negative", waves.clone().conj().imag)
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("sends", [False, True])
def test_buffers_that_are_views(tmp_path: Path, sends: bool) -> None:
    def there_and_back() -> None:
        first, second = fully_shard(Expanded(2.0)), fully_shard(Expanded(5.0))
        save_full(first, tmp_path / "x.safetensors")
        load_sharded(second, tmp_path / "x.safetensors", broadcast_from_rank0=sends)
        assert second.table.stride() == (0, 1) and second.conjugate.is_conj()
        for loaded, saved in zip(second.buffers(), first.buffers(), strict=True):
            assert torch.equal(loaded, saved)

    run_threads(there_and_back, NUM_RANKS)
    state = {name: tensor.clone() for name, tensor in load_file(tmp_path / "x.safetensors").items()}
    state["table"][1] = 7
    file = write(tmp_path, **state)
    text = all_say(
        lambda: load_sharded(fully_shard(Expanded(1.0)), file, broadcast_from_rank0=sends)
    )
    assert text == (
        f"Expected to load '{file}', got on rank 0: ValueError: Expected all parts of 'table' "
        "along [0], which are one in the model, to hold the same, got different values; the model "
        "is partly loaded, load it again"
    )


def test_two_names_become_one(whole: Path) -> None:
    assert all_say(lambda: load_sharded(linear(), whole, rename=lambda name: "weight")) == (
        "Expected names that rename keeps apart, got 'weight' for both 'bias' and 'weight' in "
        f"'{whole}'"
    )


def two_tensors() -> nn.Module:
    layer = nn.Linear(2, 4)
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()))
    return fully_shard(layer)


def test_a_subclass_of_several_tensors(whole: Path) -> None:
    kind = "TwoTensor"
    assert all_say(lambda: load_sharded(two_tensors(), whole)) == (
        f"Expected tensors in '{whole}' that fit the model, got 'weight' for a {kind}, which only "
        "its own code makes from a plain tensor"
    )
    target = whole.parent / "new.safetensors"
    assert all_say(lambda: save_full(two_tensors(), target)) == (
        f"Expected plain tensors with values and names of their own for '{target}', got "
        "'weight', a TwoTensor of several tensors"
    )


def partial() -> nn.Module:
    layer = nn.Linear(2, 4)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    layer.weight = nn.Parameter(
        torch.distributed.tensor.DTensor.from_local(layer.weight.detach(), mesh, [Partial()])
    )
    return layer


def test_a_sum_that_is_pending(whole: Path) -> None:
    assert all_say(lambda: load_sharded(partial(), whole)) == (
        f"Expected tensors in '{whole}' that fit the model, got 'weight' for (Partial(sum),), "
        "which are no parts of a full tensor"
    )


def tied(folder: Path) -> None:
    layer = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    layer[1].weight = layer[0].weight
    load_sharded(fully_shard(layer), folder / "tied.safetensors")


def test_tied_names_with_different_values(tmp_path: Path) -> None:
    tensors = {"0.weight": torch.zeros(2, 2), "1.weight": torch.tensor([[0.0, 0.0], [0.0, 1.0]])}
    save_file(tensors, tmp_path / "tied.safetensors")
    differ = (
        "Expected '0.weight' and '1.weight', which the model ties, to hold the same, got different "
        "values"
    )
    assert all_say(tied, tmp_path) == (  # the first rank has rows that are the same
        f"Expected to load '{tmp_path / 'tied.safetensors'}', got on rank 1: ValueError: {differ}; "
        "the model is partly loaded, load it again"
    )


def test_non_persistent_buffers_on_meta(whole: Path) -> None:
    def load() -> list[str]:
        with torch.device("meta"):
            layer = nn.Linear(2, 4)
            layer.register_buffer("table", torch.ones(2), persistent=False)
        fully_shard(layer)
        if dist.get_rank() == 1:
            return load_sharded(layer, whole).left_on_meta
        with pytest.warns(UserWarning) as caught:
            told = load_sharded(layer, whole)
        assert [str(warning.message) for warning in caught] == [
            "No checkpoint has the non-persistent buffers table, which are still on the meta "
            "device; compute them as the constructor of their module does"
        ]
        return told.left_on_meta

    assert run_threads(load, NUM_RANKS) == [["table"]] * NUM_RANKS


# Arguments and moments --------------------------------------------------------------------------


def test_arguments(whole: Path) -> None:
    assert said(lambda: load_sharded("model", whole)) == (  # type: ignore[arg-type]
        "TypeError",
        "Expected model to be an nn.Module, got str: 'model'",
    )
    for size in ("5 apples", "GB", 0, "0MB", None, True, float("inf"), float("nan"), "²GB"):
        assert said(lambda size=size: save_full(nn.Linear(1, 1), whole, max_shard_size=size)) == (
            "ValueError",
            "Expected max_shard_size to be a positive number of bytes or a text such as '5GB', "
            f"got {size!r}",
        )


def test_in_a_forward_and_within_unsharded(whole: Path) -> None:
    def in_forward() -> None:
        layer = nn.Sequential(nn.Linear(2, 4))
        layer[0].register_forward_hook(lambda *_: load_sharded(layer, whole))
        fully_shard(layer)(torch.ones(1, 2))

    def in_context() -> None:
        layer = linear()
        with unsharded(layer):
            save_full(layer, whole)

    assert all_say(in_forward) == (
        "Expected load_sharded() outside of forward and backward, got it within one of the root "
        "group; call it between iterations"
    )
    assert all_say(in_context) == (
        "Expected save_full() outside of unsharded(), got it within one of the root group; call "
        "it before or after"
    )


# Places -----------------------------------------------------------------------------------------


def loads(source: Path, **kwargs: Any) -> str:
    return all_say(lambda: load_sharded(linear(), source, **kwargs))


def saves(target: Path, **kwargs: Any) -> str:
    return all_say(lambda: save_full(linear(), target, **kwargs))


def not_loaded(source: Path, kind: str, why: str) -> str:
    return f"Expected a checkpoint at '{source}', got on rank 0: {kind}: {why}"


def not_saved(target: Path, kind: str, why: str) -> str:
    return f"Expected to save '{target}', got on rank 0: {kind}: {why}"


def test_nothing_to_read(tmp_path: Path) -> None:
    gone = tmp_path / "gone.safetensors"
    none = f"Expected a file at '{gone}', got none"
    assert loads(gone) == not_loaded(gone, "FileNotFoundError", none)
    neither = (
        f"Expected model.safetensors or model.safetensors.index.json in '{tmp_path}', got neither"
    )
    text = loads(tmp_path, broadcast_from_rank0=True)
    assert text == not_loaded(tmp_path, "FileNotFoundError", neither)


def test_a_folder_with_several_files(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / name)
    several = (
        f"Expected one checkpoint in '{tmp_path}', got a.safetensors, b.safetensors; pass the path "
        "of one of them"
    )
    assert loads(tmp_path) == not_loaded(tmp_path, "ValueError", several)


def test_an_index_that_is_wrong(whole: Path) -> None:
    index = whole.parent / "model.safetensors.index.json"
    index.write_text("{}")
    no_map = f"Expected an index with a weight_map in '{index}', got KeyError: 'weight_map'"
    assert loads(index) == not_loaded(index, "ValueError", no_map)
    index.write_text(json.dumps({"weight_map": {"weight": whole.name, "w": whole.name}}))
    not_there = (
        "Expected 'w' in whole.safetensors, as model.safetensors.index.json says, got none; copy "
        "the whole checkpoint anew"
    )
    assert loads(index) == not_loaded(index, "ValueError", not_there)


def test_a_library_that_is_missing(whole: Path) -> None:
    for name in ("safetensors", "tqdm"):
        why = f"import of {name} halted; None in sys.modules"
        missing = (
            f"Expected {name} to be installed, got: {why}; pip install 'composable_shard[weights]'"
        )
        new = whole.parent / "new"
        with mock.patch.dict(sys.modules, {name: None}):
            assert loads(whole, progress=True) == not_loaded(whole, "ImportError", missing)
            assert saves(new, progress=True) == not_saved(new, "ImportError", missing)


def test_weights_that_are_there(whole: Path) -> None:
    there = f"'{whole}' is there already; choose another place, or set overwrite=True"
    assert saves(whole) == not_saved(whole, "FileExistsError", there)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    def on_meta() -> None:
        with torch.device("meta"):
            layer = linear()
        save_full(layer, tmp_path / "x", rename=lambda name: "same")

    assert all_say(on_meta) == (
        f"Expected plain tensors with values and names of their own for '{tmp_path / 'x'}', got "
        "'weight' on the meta device, 'same' for both 'weight' and 'bias'"
    )


# One rank alone ---------------------------------------------------------------------------------


def test_a_checkpoint_that_one_rank_lacks_or_has_another_of(whole: Path) -> None:
    other = whole.parent / "other"
    other.mkdir()
    (other / whole.name).write_bytes(whole.read_bytes()[:-1])

    def load(second: Path) -> None:
        load_sharded(linear(), whole if dist.get_rank() == 0 else second)

    gone = whole.parent / "gone"
    heard = run_threads(lambda: said(lambda: load(gone)), NUM_RANKS)
    why = f"Expected a file at '{gone}', got none"
    text = f"Expected a checkpoint at '{gone}', got on rank 1: FileNotFoundError: {why}"
    assert heard == [("ShardError", text)] * NUM_RANKS
    cut = other / whole.name
    heard = run_threads(lambda: said(lambda: load(cut)), NUM_RANKS)
    whole_file = f"Expected a whole safetensors file at '{cut}', got: "
    for kind, text in heard:
        start = f"Expected a checkpoint at '{cut}', got on rank 1: ValueError: {whole_file}"
        assert kind == "ShardError" and text.startswith(start)
    save_file({"weight": torch.ones(4, 2), "bias": torch.ones(3)}, cut)
    assert (
        run_threads(lambda: said(lambda: load(cut)), NUM_RANKS)
        == [
            (
                "RankMismatchError",
                "Expected the same model, checkpoint and arguments of load_sharded() on all ranks, "
                "got on rank 0: 'bias' in whole.safetensors of shape [4], torch.float32; on rank "
                "1: 'bias' in whole.safetensors of shape [3], torch.float32",
            )
        ]
        * NUM_RANKS
    )


def test_a_model_that_one_rank_has_another_of(whole: Path) -> None:
    def call(which: Callable[..., object]) -> None:
        layer = fully_shard(nn.Linear(2, 4, bias=dist.get_rank() == 0))
        which(layer, whole if which is load_sharded else whole.parent / "new")

    end = "got on rank 0: 'bias' of shape [4], torch.float32, (Shard(dim=0),); on rank 1: "
    assert all_say(call, load_sharded, kind=RankMismatchError) == (
        f"Expected the same model, checkpoint and arguments of load_sharded() on all ranks, {end}"
        "'bias' in whole.safetensors of shape [4], torch.float32"
    )
    assert all_say(call, save_full, kind=RankMismatchError) == (
        f"Expected the same model and arguments of save_full() on all ranks, {end}nothing more"
    )


def test_a_rename_that_one_rank_has_another_of(whole: Path) -> None:
    def rename(name: str) -> str | None:
        return name if name == "weight" or dist.get_rank() == 0 else None

    start = "Expected the same names after rename on all ranks, got on rank 0:"
    for sends in (False, True):
        assert all_say(
            lambda sends=sends: load_sharded(
                linear(), whole, rename=rename, broadcast_from_rank0=sends
            ),
            kind=RankMismatchError,
        ) == (f"{start} 'bias' of 'bias'; on rank 1: nothing of 'bias'")
    assert all_say(
        lambda: save_full(linear(), whole.parent / "new", rename=rename), kind=RankMismatchError
    ) == (f"{start} 'bias' of 'bias'; on rank 1: nothing of 'bias'")


CALLS = pytest.mark.parametrize("calls", [save_full, load_sharded])


def renamed_by(rename: Callable[[str], str | None] | None, calls: Any, whole: Path) -> None:
    calls(linear(), whole if calls is load_sharded else whole.parent / "new", rename=rename)


@CALLS
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rename_that_fails_on_one_rank(whole: Path, calls: Any, rank: int) -> None:
    def rename(name: str) -> str:
        if dist.get_rank() == rank:
            raise KeyError(name)
        return name

    place = whole if calls is load_sharded else whole.parent / "new"
    assert all_say(renamed_by, rename, calls, whole) in {
        f"Expected names from rename for '{place}', got on rank {rank}: KeyError: '{name}'"
        for name in ("weight", "bias")
    }


@CALLS
def test_a_rename_that_gives_two_tensors_one_name_on_one_rank(whole: Path, calls: Any) -> None:
    """That the names do not fit is known to this rank alone before the ranks compare them."""

    def rename(name: str) -> str | None:
        if name == "weight":
            return name
        return "weight" if dist.get_rank() == 1 else None

    assert all_say(renamed_by, rename, calls, whole, kind=RankMismatchError) == (
        "Expected the same names after rename on all ranks, got on rank 0: nothing of 'bias'; "
        "on rank 1: 'weight' of 'bias'"
    )


def test_a_rename_that_leaves_an_unknown_name_on_one_rank(tmp_path: Path) -> None:
    """What goes where is the same on all ranks; that something is left over is not."""
    file = write(tmp_path, weight=torch.ones(4, 2), bias=torch.ones(4), more=torch.ones(1))

    def rename(name: str) -> str | None:
        return name if name != "more" or dist.get_rank() == 1 else None

    assert all_say(lambda: load_sharded(linear(), file, rename=rename), kind=RankMismatchError) == (
        "Expected the same names after rename on all ranks, got on rank 0: nothing of 'more'; "
        "on rank 1: 'more' of 'more'"
    )


@CALLS
def test_a_rename_on_one_rank_alone(whole: Path, calls: Any) -> None:
    def call() -> None:
        renamed_by(str if dist.get_rank() == 1 else None, calls, whole)

    what, named = {
        save_full: ("model", "a folder, max_shard_size 5000000000, {}rename, dtype None"),
        load_sharded: (
            "model, checkpoint",
            "strict True, {}rename, broadcast_from_rank0 False",
        ),
    }[calls]
    assert all_say(call, kind=RankMismatchError) == (
        f"Expected the same {what} and arguments of {calls.__name__}() on all ranks, got on rank "
        f"0: {named.format('no ')}; on rank 1: {named.format('')}"
    )


def broken_on(rank: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, which fails on one rank for tensors named "weight"."""

    def read(reader: files.Reader, stored: files.Stored, *args: Any) -> Any:
        if dist.get_rank() == rank and stored.name == "weight":
            raise OSError(5, "Input/output error")
        return call(reader, stored, *args)

    return read


@pytest.mark.parametrize(("rank", "sends"), [(0, False), (1, False), (0, True)])
def test_a_disk_that_fails_on_one_rank_while_it_is_read(
    whole: Path, rank: int, sends: bool
) -> None:
    with mock.patch.object(files.Reader, "read", broken_on(rank, files.Reader.read)):
        text = all_say(lambda: load_sharded(linear(), whole, broadcast_from_rank0=sends))
        assert text == (
            f"Expected to load '{whole}', got on rank {rank}: OSError: [Errno 5] Input/output "
            "error; the model is partly loaded, load it again"
        )


def test_a_disk_that_fails_while_it_is_written(tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    place, full = tmp_path / "new", "OSError: [Errno 28] No space left on device"
    for name in ("_sync", "json"):
        broken = mock.Mock(side_effect=refuse, dumps=refuse)
        with mock.patch.object(save, name, broken):
            text = all_say(lambda: save_full(linear(), place, max_shard_size=20))
        assert text == f"Expected to save '{place}', got on rank 0: {full}"
        assert list(place.iterdir()) == []


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_disk_that_fails_on_one_of_the_ranks_that_write(tmp_path: Path, rank: int) -> None:
    write = FileWriter.write

    def refuse(*args: Any) -> None:
        if dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        write(*args)

    place = tmp_path / "new"
    with mock.patch.object(FileWriter, "write", refuse):
        text = all_say(lambda: save_full(linear(), place, max_shard_size=20))
    full = "OSError: [Errno 28] No space left on device"
    assert text == f"Expected to save '{place}', got on rank {rank}: {full}"
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("broken", ["all_gather_object", "broadcast_object_list", "broadcast"])
def test_a_collective_that_fails(whole: Path, broken: str) -> None:
    failing = mock.Mock(side_effect=RuntimeError("Connection closed by peer"))
    with mock.patch.object(dist, broken, failing):
        heard = run_threads(
            lambda: said(lambda: load_sharded(linear(), whole, broadcast_from_rank0=True)),
            NUM_RANKS,
        )
    name = CommunicationError.__name__
    assert heard == [
        (name, f"Rank {rank} failed while loading '{whole}': Connection closed by peer")
        for rank in range(NUM_RANKS)
    ]


def test_no_memory_is_no_failure_of_communication(whole: Path) -> None:
    failing = mock.Mock(side_effect=torch.OutOfMemoryError("no memory"))
    with mock.patch.object(dist, "broadcast", failing):
        assert all_say(
            lambda: load_sharded(linear(), whole, broadcast_from_rank0=True),
            kind=torch.OutOfMemoryError,
        ) == ("no memory")


# Full weights one after another -------------------------------------------------------------------


def streams(**kwargs: Any) -> str:
    return all_say(lambda: list(iter_full(linear(), **kwargs)))


def test_arguments_of_iter_full() -> None:
    def refused(**kwargs: Any) -> tuple[str, str]:
        return said(lambda: next(iter_full(**{"model": nn.Linear(1, 1), **kwargs})))

    assert refused(bucket_bytes=0) == (
        "ValueError",
        "Expected bucket_bytes of at least 1, got 0",
    )
    assert refused(tied="last") == (
        "ValueError",
        "Expected tied to be one of ('first', 'all'), got 'last'",
    )
    assert refused(subclasses=None) == (
        "ValueError",
        "Expected subclasses to be 'own', 'plain' or a function, got None",
    )
    kind, text = refused(device="gpu")
    assert kind == "ValueError" and text.startswith("Expected device to be a device, got 'gpu': ")


WRONG: dict[str, tuple[Callable[[Any, Path], object], str]] = {
    "save_full": (
        lambda model, place: save_full(model, place / "new"),
        "saving '{}/new'",
    ),
    "load_sharded": (
        lambda model, place: load_sharded(model, place / "whole.safetensors"),
        "loading '{}/whole.safetensors'",
    ),
    "load_sharded by the first": (
        lambda model, place: load_sharded(
            model, place / "whole.safetensors", broadcast_from_rank0=True
        ),
        "loading '{}/whole.safetensors'",
    ),
    "iter_full": (lambda model, _: list(iter_full(model)), "gathering full weights"),
}


@pytest.mark.parametrize("call", WRONG)
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_one_rank_without_the_model(whole: Path, call: str, rank: int) -> None:
    do, doing = WRONG[call]
    text = all_say(lambda: do(None if dist.get_rank() == rank else linear(), whole.parent))
    assert text == (
        f"Expected all ranks to begin {doing.format(whole.parent)}, got on rank {rank}: TypeError: "
        "Expected model to be an nn.Module, got NoneType: None"
    )
    assert all_say(lambda: do(None, whole.parent), kind=TypeError) == (
        "Expected model to be an nn.Module, got NoneType: None"
    )


def test_ranks_of_which_one_is_within_unsharded(whole: Path) -> None:
    def call() -> None:
        model = linear()
        with unsharded(model):
            list(iter_full(model if dist.get_rank() else linear()))

    assert all_say(call) == (
        "Expected all ranks to begin gathering full weights, got on rank 1: ShardError: Expected "
        "iter_full() outside of unsharded(), got it within one of the root group; call it before "
        "or after"
    )


def test_ranks_that_differ_in_who_reads(whole: Path) -> None:
    text = "strict True, no rename, broadcast_from_rank0 {}"
    assert all_say(
        lambda: load_sharded(linear(), whole, broadcast_from_rank0=dist.get_rank() == 0),
        kind=RankMismatchError,
    ) == (
        "Expected the same model, checkpoint and arguments of load_sharded() on all ranks, got on "
        f"rank 0: {text.format(True)}; on rank 1: {text.format(False)}"
    )


def test_ranks_that_differ_in_a_file_or_a_folder(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "a.safetensors"]
    assert all_say(
        lambda: save_full(linear(), places[dist.get_rank()]), kind=RankMismatchError
    ) == (
        "Expected the same model and arguments of save_full() on all ranks, got on rank 0: a "
        "folder, max_shard_size 5000000000, no rename, dtype None; on rank 1: a file, no rename, "
        "dtype None"
    )


def test_what_iter_full_cannot_give() -> None:
    one_name = "Expected tensors with values and names of their own for iter_full(), got "
    assert streams(rename=lambda _: "x") == f"{one_name}'x' for both 'weight' and 'bias'"
    with torch.device("meta"):
        layer = nn.Linear(1, 1, bias=False)
    assert said(lambda: list(iter_full(layer))) == (
        "ShardError",
        f"{one_name}'weight' on the meta device",
    )
    plain = all_say(lambda: list(iter_full(two_tensors(), subclasses="plain")))
    assert plain == f"{one_name}'weight', a TwoTensor without dequantize()"

    text = all_say(lambda: list(iter_full(two_tensors(), subclasses=lambda shard: shard + 1)))
    got = (
        "Expected a plain tensor of shape [2, 2] of the TwoTensor 'weight', got a TwoTensor of "
        "shape [2, 2]"
    )
    going = "Expected all ranks to go through iter_full() to its end"
    assert text == f"{going}, got on rank 0: TypeError: {got}"

    def fail(name: str) -> str:
        if dist.get_rank() == 1:
            raise KeyError(name)
        return name

    assert streams(rename=fail) == (
        "Expected names for iter_full(), got on rank 1: KeyError: 'weight'"
    )


def test_ranks_that_ask_iter_full_for_different_things() -> None:
    def differ() -> None:
        list(iter_full(linear(), dtype=(None, torch.bfloat16)[dist.get_rank()]))

    same = "bucket_bytes 67108864, rank0_only False, dtype"
    rest = "tied first, subclasses own"
    assert all_say(differ, kind=RankMismatchError) == (
        "Expected the same model and arguments of iter_full() on all ranks, got on rank 0: "
        f"{same} None, {rest}; on rank 1: {same} torch.bfloat16, {rest}"
    )
