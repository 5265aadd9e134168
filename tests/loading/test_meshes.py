"""From a file into shards on any mesh and back, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint.meshes import CASES, WIDTH, Net
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from composable_shard import load_sharded, save_full
from composable_shard.testing import run_ranks
from loading.comparing import differences, locals_of

EVEN, UNEVEN = 8, 10
"""Hidden units, of which two tensor-parallel ranks hold 4 or 5 each; 2 others cut these."""

FEW = {"hybrid-inner", "own-mesh", "hybrid-tp"}
PLACES = [
    pytest.param(name, UNEVEN, marks=() if name in FEW else pytest.mark.matrix) for name in CASES
] + [pytest.param("tp", EVEN, marks=pytest.mark.matrix)]


def net(hidden: int, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(hidden)


def go_round(name: str, hidden: int, folder: Path) -> dict[str, list[str]]:
    """Load into a model of its own values, one on the meta device and one that is sent to; save."""
    case, found = CASES[name], {}
    whole = net(hidden, seed=1)
    wanted = case(net(hidden, seed=2))
    wanted.load_state_dict(whole.state_dict())  # cuts full tensors without communication
    shards = locals_of(wanted)

    for kind in ("real", "meta", "sent"):
        with torch.device("meta" if kind == "meta" else "cpu"):
            model = case(net(hidden, seed=2))
        told = load_sharded(
            model, folder / "whole.safetensors", broadcast_from_rank0=kind == "sent"
        )
        assert told[:3] == ([], [], []), told
        found[kind] = differences(locals_of(model), shards)
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        assert torch.equal(model(x), wanted(x))

    save_full(model, folder / "parts", max_shard_size=400)
    dist.barrier()
    saved: dict[str, torch.Tensor] = {}
    for file in (folder / "parts").glob("*.safetensors"):
        saved |= load_file(file)
    found["saved"] = differences(saved, whole.state_dict())
    again = case(net(hidden, seed=3))
    load_sharded(again, folder / "parts")
    found["again"] = differences(locals_of(again), shards)
    return found


@pytest.mark.brief(2)
@pytest.mark.parametrize(("name", "hidden"), PLACES)
def test_from_a_file_into_shards_and_back(tmp_path: Path, name: str, hidden: int) -> None:
    save_file(net(hidden, seed=1).state_dict(), tmp_path / "whole.safetensors")
    nothing: dict[str, list[str]] = {
        kind: [] for kind in ("real", "meta", "sent", "saved", "again")
    }
    num_ranks = CASES[name].num_ranks
    assert run_ranks(go_round, num_ranks, name, hidden, tmp_path) == [nothing] * num_ranks
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 3


def beside_torch(folder: Path) -> list[list[str]]:
    """Compare with what torch's own checkpoints do, both ways."""
    case, source = CASES["1-d"], folder / "hf"
    theirs, ours = case(net(UNEVEN, seed=2)), case(net(UNEVEN, seed=3))
    state = get_model_state_dict(theirs)
    reader = dcp.HuggingFaceStorageReader(str(source))
    dcp.load(state, storage_reader=reader)
    set_model_state_dict(theirs, state)
    load_sharded(ours, source)
    loaded = differences(locals_of(ours), locals_of(theirs))

    # A checkpoint of DTensors, read by torch into a model that our file was read into.
    dcp.save(get_model_state_dict(ours), checkpoint_id=folder / "dcp")
    resumed = case(net(UNEVEN, seed=4))
    state = get_model_state_dict(resumed)
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_model_state_dict(resumed, state)
    return [loaded, differences(locals_of(resumed), locals_of(ours))]


def test_what_is_read_is_what_torch_reads(tmp_path: Path) -> None:
    save_full(net(UNEVEN, seed=1), tmp_path / "hf", max_shard_size=1000)
    assert run_ranks(beside_torch, 3, tmp_path) == [[[], []]] * 3


def test_a_file_is_byte_for_byte_what_safetensors_writes_of_the_unsharded_model(
    tmp_path: Path,
) -> None:
    state = net(UNEVEN, seed=1).state_dict()
    save_file(state, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    run_ranks(load_and_save, 3, tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors")
    assert (tmp_path / "ours.safetensors").read_bytes() == (
        tmp_path / "theirs.safetensors"
    ).read_bytes()


def load_and_save(source: Path, target: Path) -> None:
    model = CASES["1-d"](net(UNEVEN, seed=2))
    load_sharded(model, source)
    save_full(model, target)
