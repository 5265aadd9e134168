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
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
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
from composable_shard.train.weights.files import FileWriter

NUM_RANKS = 2


def linear(rows: int = 4, bias: bool = True) -> nn.Linear:
    return fully_shard(nn.Linear(2, rows, bias=bias))


def said(call: Callable[[], object]) -> tuple[str, str]:
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
    save_file(STATES["whole"], tmp_path / "whole.safetensors")
    return tmp_path / "whole.safetensors"


# Names and values ------------------------------------------------------------------------------


def pending() -> nn.Module:
    layer, mesh = nn.Linear(2, 4), init_device_mesh("cpu", (NUM_RANKS,))
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, [Partial()]))
    return layer


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return linear()


def two_tensors() -> nn.Module:
    layer = nn.Linear(2, 4)
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()))
    return fully_shard(layer)


def tied() -> nn.Module:
    layer = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    layer[1].weight = layer[0].weight
    return fully_shard(layer)


def same(name: str) -> str:
    return "weight"


WEIGHT, BIAS_OF_4, MANY = torch.ones(4, 2), torch.ones(4), [f"w{n:02d}" for n in range(23)]
TIES = "Expected tied '0.weight' and '1.weight' to be equal, got unequal values"
FIT = "Expected tensors in '{}' that fit the model, got "
OWN = "Expected tensors with values and names of their own for save_full(), got "
STATES: dict[str, dict[str, torch.Tensor]] = {
    "whole": {"weight": WEIGHT, "bias": BIAS_OF_4},
    "names": {"weight": WEIGHT, "b": BIAS_OF_4, "c": torch.ones(1)},
    "many": {"weight": WEIGHT, "bias": BIAS_OF_4, **{name: torch.ones(1) for name in MANY}},
    "shapes": {"weight": WEIGHT.T.contiguous(), "bias": BIAS_OF_4.to(torch.complex64)},
    "tied": {"0.weight": torch.zeros(2, 2), "1.weight": torch.tensor([[0.0, 0.0], [0.0, 1.0]])},
}
NOT_LOADED: list[tuple[Callable[[], nn.Module], str, dict[str, Any], str]] = [
    (linear, "names", {}, "Expected the names of the model in '{}', got missing: bias; unexpected: "
     "b, c; pass rename or strict=False"),
    (linear, "many", {}, "Expected the names of the model in '{}', got unexpected: "
     f"{', '.join(MANY[:20])} and 3 more; pass rename or strict=False"),
    (linear, "whole", {"rename": same}, "Expected distinct names from rename, got 'weight' for "
     "both 'bias' and 'weight' in '{}'"),
    (linear, "shapes", {"strict": False}, f"{FIT}'weight' of shape [2, 4] for [4, 2], 'bias' of "
     "torch.complex64 for torch.float32"),
    (pending, "whole", {}, f"{FIT}'weight' for (Partial(sum),), which are no parts of a full "
     "tensor"),
    (two_tensors, "whole", {}, f"{FIT}'weight' for a TwoTensor, which only the code of its "
     "class can make from a plain tensor"),
    # The first rank has rows that are the same.
    (tied, "tied", {}, f"Expected no failure while loading '{{}}', got on rank 1: ValueError: "
     f"{TIES}; the model is partly loaded, load it again"),
]  # fmt: skip
NOT_SAVED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (on_meta, {"rename": same}, f"{OWN}'weight' on the meta device, 'weight' for both 'weight' and "
     "'bias', 'bias' on the meta device"),
    (two_tensors, {}, f"{OWN}'weight', a TwoTensor of several tensors"),
]  # fmt: skip


def test_what_does_not_fit(tmp_path: Path) -> None:
    for make, state, kwargs, text in NOT_LOADED:
        file = tmp_path / f"{state}.safetensors"
        save_file(STATES[state], file)
        assert all_say(lambda m=make, k=kwargs, f=file: load_sharded(m(), f, **k)) == text.format(
            file
        )
    place = tmp_path / "new"
    for make, kwargs, text in NOT_SAVED:
        assert all_say(lambda m=make, k=kwargs: save_full(m(), place, **k)) == text


# Arguments and moments --------------------------------------------------------------------------


def test_arguments(whole: Path) -> None:
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

    def within(on_all: bool) -> None:
        model = linear()
        with unsharded(model):
            if on_all:
                save_full(model, whole)
            list(iter_full(model if dist.get_rank() else linear()))

    assert all_say(in_forward) == (
        "Expected load_sharded() for the root group outside of forward and backward, got a call "
        "inside of one; use it between iterations"
    )
    outside = (
        "Expected {}() outside of unsharded(), got a call inside of unsharded() of the root group; "
        "leave that context first"
    )
    assert all_say(within, True) == outside.format("save_full")
    assert all_say(within, False) == (
        "Expected no failure while gathering full weights, got on rank 1: ShardError: "
        + outside.format("iter_full")
    )


# Places -----------------------------------------------------------------------------------------


def test_places(whole: Path) -> None:
    folder, index = whole.parent, whole.parent / "model.safetensors.index.json"
    gone, two = folder / "gone.safetensors", folder / "two"

    def refused(source: Path, why: str, **kwargs: Any) -> None:
        text = all_say(lambda: load_sharded(linear(), source, **kwargs))
        assert text == f"Expected no failure while loading '{source}', got on rank 0: {why}"

    refused(gone, f"FileNotFoundError: Expected a file at '{gone}', got none")
    two.mkdir()
    one, many = "model.safetensors", "model.safetensors.index.json"
    text = f"Expected {one} or {many} in '{two}', got {{}}; pass the path of a file"
    refused(two, f"FileNotFoundError: {text.format('none')}", broadcast_from_rank0=True)
    save_file({"x": torch.ones(1)}, two / "b.safetensors")
    save_file({"x": torch.ones(1)}, two / "a.safetensors")
    refused(two, f"FileNotFoundError: {text.format('a.safetensors, b.safetensors')}")
    index.write_text("{}")
    no_map = f"Expected an index with a weight_map in '{index}', got KeyError: 'weight_map'"
    refused(index, f"ValueError: {no_map}")
    index.write_text(json.dumps({"weight_map": {"weight": whole.name, "w": whole.name}}))
    absent = (
        "Expected 'w' in whole.safetensors, as model.safetensors.index.json says, got none; copy "
        "all files anew"
    )
    refused(index, f"ValueError: {absent}")
    there = f"'{whole}' exists; choose another place, or set overwrite=True"
    assert all_say(lambda: save_full(linear(), whole)) == (
        f"Expected no failure while saving '{whole}', got on rank 0: FileExistsError: {there}"
    )
    for name in ("safetensors", "tqdm"):
        missing = (
            f"ImportError: Expected {name} to be installed, got: import of {name} halted; None in "
            "sys.modules; pip install 'composable_shard[weights]'"
        )
        new = folder / "new"
        with mock.patch.dict(sys.modules, {name: None}):
            refused(whole, missing, progress=True)
            assert all_say(lambda new=new: save_full(linear(), new, progress=True)) == (
                f"Expected no failure while saving '{new}', got on rank 0: {missing}"
            )


# One rank alone ---------------------------------------------------------------------------------


def test_a_checkpoint_that_one_rank_lacks_or_has_another_of(whole: Path) -> None:
    gone, cut = whole.parent / "gone", whole.parent / "other" / whole.name
    cut.parent.mkdir()

    def load(second: Path, kind: type[Exception] = ShardError) -> str:
        places = (whole, second)
        return all_say(lambda: load_sharded(linear(), places[dist.get_rank()]), kind=kind)

    start = "Expected no failure while loading '{}', got on rank 1: {}"
    none = f"FileNotFoundError: Expected a file at '{gone}', got none"
    assert load(gone) == start.format(gone, none)
    cut.write_bytes(whole.read_bytes()[:-1])
    broken = f"ValueError: Expected a whole safetensors file at '{cut}', got: "
    assert load(cut).startswith(start.format(cut, broken))
    save_file({"weight": torch.ones(4, 2), "bias": torch.ones(3)}, cut)
    bias = "'bias' in whole.safetensors of shape [{}], torch.float32"
    assert load(cut, RankMismatchError) == (
        "Expected the same model, checkpoint and arguments of load_sharded() on all ranks, got on "
        f"rank 0: {bias.format(4)}; on rank 1: {bias.format(3)}"
    )


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
    doing = f"{'saving' if calls is save_full else 'loading'} '{place}'"
    assert all_say(renamed_by, rename, calls, whole) in {
        f"Expected no failure while {doing}, got on rank {rank}: KeyError: '{name}'"
        for name in ("weight", "bias")
    }


@CALLS
def test_ranks_that_rename_differently(whole: Path, calls: Any) -> None:
    def rename(name: str) -> str | None:
        return name if name == "weight" or dist.get_rank() == 0 else None

    text = all_say(renamed_by, rename, calls, whole, kind=RankMismatchError)
    if calls is save_full:
        assert text.endswith(f"got on rank 0: {BIAS}; on rank 1: {IN_MODEL}, called nothing")
    else:
        assert text.endswith("got on rank 0: 'bias' of 'bias'; on rank 1: None of 'bias'")


ITER = "bucket_bytes 67108864, rank0_only False, dtype {}, tied first, subclasses own"
SAVE = "a {}rename, dtype None"
LOAD = "strict True, {}rename, broadcast_from_rank0 {}"
IN_MODEL = "'bias' of shape [4], torch.float32, (Shard(dim=0),)"
BIAS = f"{IN_MODEL}, called 'bias'"
STORED = "'bias' in whole.safetensors of shape [4], torch.float32"
FOLDER = "folder, max_shard_size 5000000000, "
DIFFERENT: dict[tuple[str, str, str], Callable[[int, Path], object]] = {
    ("iter_full", ITER.format("None"), ITER.format("torch.bfloat16")): (
        lambda rank, _: list(iter_full(linear(), dtype=(None, torch.bfloat16)[rank]))
    ),
    ("save_full", SAVE.format(f"{FOLDER}no "), SAVE.format("file, no ")): (
        lambda rank, whole: save_full(linear(), whole.parent / ("x", "x.safetensors")[rank])
    ),
    ("save_full", BIAS, "nothing more"): (
        lambda rank, whole: save_full(linear(bias=rank == 0), whole.parent / "x")
    ),
    ("load_sharded", LOAD.format("no ", False), LOAD.format("", False)): (
        lambda rank, whole: load_sharded(linear(), whole, rename=(None, str)[rank])
    ),
    ("load_sharded", LOAD.format("no ", True), LOAD.format("no ", False)): (
        lambda rank, whole: load_sharded(linear(), whole, broadcast_from_rank0=rank == 0)
    ),
    ("load_sharded", IN_MODEL, STORED): (
        lambda rank, whole: load_sharded(linear(bias=rank == 0), whole)
    ),
}


@pytest.mark.parametrize(("name", "first", "second"), DIFFERENT)
def test_ranks_that_ask_for_different_things(
    whole: Path, name: str, first: str, second: str
) -> None:
    call = DIFFERENT[name, first, second]
    text = all_say(lambda: call(dist.get_rank(), whole), kind=RankMismatchError)
    what = "model, checkpoint" if name == "load_sharded" else "model"
    assert text == (
        f"Expected the same {what} and arguments of {name}() on all ranks, got on rank 0: {first}; "
        f"on rank 1: {second}"
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
            f"Expected no failure while loading '{whole}', got on rank {rank}: OSError: "
            "[Errno 5] Input/output error; the model is partly loaded, load it again"
        )


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_disk_that_fails_while_it_is_written(tmp_path: Path, rank: int) -> None:
    write, place = FileWriter.write, tmp_path / "new"

    def refuse(*args: Any, **_: object) -> None:
        if dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        write(*args)

    broken = {(FileWriter, "write"): refuse}
    if rank == 0:
        broken[save, "write_json"] = refuse
    for (owner, name), act in broken.items():
        with mock.patch.object(owner, name, act):
            text = all_say(lambda: save_full(linear(), place, max_shard_size=20))
        full = "OSError: [Errno 28] No space left on device"
        assert text == f"Expected no failure while saving '{place}', got on rank {rank}: {full}"
        assert list(place.iterdir()) == []


@pytest.mark.parametrize("broken", ["all_gather_object", "broadcast_object_list", "broadcast"])
def test_a_collective_that_fails(whole: Path, broken: str) -> None:
    def load() -> tuple[str, str]:
        return said(lambda: load_sharded(linear(), whole, broadcast_from_rank0=True))

    failing = mock.Mock(side_effect=RuntimeError("Connection closed by peer"))
    with mock.patch.object(dist, broken, failing):
        heard = run_threads(load, NUM_RANKS)
    text = f"failed while loading '{whole}': Connection closed by peer"
    name = CommunicationError.__name__
    assert heard == [(name, f"Rank {rank} {text}") for rank in range(NUM_RANKS)]


# Full weights one after another -------------------------------------------------------------------


def test_a_device_that_iter_full_does_not_know() -> None:
    kind, got = said(lambda: next(iter_full(nn.Linear(1, 1), device="gpu")))
    assert kind == "ValueError" and got.startswith("Expected device to be a device, got 'gpu': ")


WRONG: dict[str, Callable[[Any, Path], object]] = {
    "saving '{}/new'": lambda model, place: save_full(model, place / "new"),
    "loading '{}/whole.safetensors'": (
        lambda model, place: load_sharded(model, place / "whole.safetensors")
    ),
    "loading '{}/whole.safetensors' by the first": lambda model, place: load_sharded(
        model, place / "whole.safetensors", broadcast_from_rank0=True
    ),
    "gathering full weights": lambda model, _: list(iter_full(model)),
}


@pytest.mark.parametrize("doing", WRONG)
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_one_rank_without_the_model(whole: Path, doing: str, rank: int) -> None:
    do, doing = WRONG[doing], doing.removesuffix(" by the first").format(whole.parent)
    text = all_say(lambda: do(None if dist.get_rank() == rank else linear(), whole.parent))
    wrong = "Expected model to be an nn.Module, got NoneType: None"
    assert text == f"Expected no failure while {doing}, got on rank {rank}: TypeError: {wrong}"
    assert all_say(lambda: do(None, whole.parent), kind=TypeError) == wrong


def test_what_iter_full_cannot_give() -> None:
    one_name = "Expected tensors with values and names of their own for iter_full(), got "
    assert (
        all_say(lambda: list(iter_full(linear(), rename=lambda _: "x")))
        == f"{one_name}'x' for both 'weight' and 'bias'"
    )
    with torch.device("meta"):
        layer = nn.Linear(1, 1, bias=False)
    assert all_say(lambda: list(iter_full(layer))) == f"{one_name}'weight' on the meta device"
    plain = all_say(lambda: list(iter_full(two_tensors(), subclasses="plain")))
    assert plain == f"{one_name}'weight', a TwoTensor of several tensors"

    text = all_say(lambda: list(iter_full(two_tensors(), subclasses=lambda shard: shard + 1)))
    got = "Expected a plain tensor of shape [2, 2] for 'weight', got TwoTensor of shape [2, 2]"
    going = "Expected no failure while gathering full weights"
    assert text == f"{going}, got on rank 0: TypeError: {got}"

    def fail(name: str) -> str:
        if dist.get_rank() == 1:
            raise KeyError(name)
        return name

    assert all_say(lambda: list(iter_full(linear(), rename=fail))) == (
        "Expected no failure while gathering full weights, got on rank 1: KeyError: 'weight'"
    )
