"""From a file into shards on any mesh and back, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint.meshes import CASES, WIDTH, Net
from on_ranks import on_ranks
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


def go_round(name: str, hidden: int, folder: Path) -> None:
    """Load into a model of its own values, one on the meta device and one that is sent to; save."""
    case, whole = CASES[name], net(hidden, seed=1)
    wanted = case(net(hidden, seed=2))
    wanted.load_state_dict(whole.state_dict())  # cuts full tensors without communication
    shards, x = locals_of(wanted), torch.ones(2, WIDTH, dtype=torch.float64)
    for kind in ("real", "meta", "sent"):
        with torch.device("meta" if kind == "meta" else "cpu"):
            model = case(net(hidden, seed=2))
        told = load_sharded(
            model, folder / "whole.safetensors", broadcast_from_rank0=kind == "sent"
        )
        assert told[:3] == ([], [], []), told
        assert differences(locals_of(model), shards) == [], kind
        assert torch.equal(model(x), wanted(x))
    save_full(model, folder / "parts", max_shard_size=400)
    dist.barrier()
    files = list((folder / "parts").glob("*.safetensors"))
    assert len(files) > 3
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert differences(saved, whole.state_dict()) == []
    again = case(net(hidden, seed=3))
    load_sharded(again, folder / "parts")
    assert differences(locals_of(again), shards) == []


@pytest.mark.brief(2)
@pytest.mark.parametrize(("name", "hidden"), PLACES)
def test_from_a_file_into_shards_and_back(tmp_path: Path, name: str, hidden: int) -> None:
    save_file(net(hidden, seed=1).state_dict(), tmp_path / "whole.safetensors")
    run_ranks(go_round, CASES[name].num_ranks, name, hidden, tmp_path)


@on_ranks(3)
def test_what_is_read_and_written_is_what_torch_and_safetensors_do(tmp_path: Path) -> None:
    """Compare with what torch's own checkpoints do, both ways, and with the file, byte by byte."""
    case, source, theirs_file = CASES["1-d"], tmp_path / "hf", tmp_path / "theirs.safetensors"
    if dist.get_rank() == 0:
        save_full(net(UNEVEN, seed=1), source, max_shard_size=1000, process_group=alone())
        save_file(net(UNEVEN, seed=1).state_dict(), theirs_file, metadata={"format": "pt"})
    else:
        alone()
    dist.barrier()
    theirs, ours = case(net(UNEVEN, seed=2)), case(net(UNEVEN, seed=3))
    state = get_model_state_dict(theirs)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(source)))
    set_model_state_dict(theirs, state)
    load_sharded(ours, source)
    assert differences(locals_of(ours), locals_of(theirs)) == []
    # A checkpoint of DTensors, read by torch into a model that our file was read into.
    dcp.save(get_model_state_dict(ours), checkpoint_id=tmp_path / "dcp")
    resumed = case(net(UNEVEN, seed=4))
    state = get_model_state_dict(resumed)
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_model_state_dict(resumed, state)
    assert differences(locals_of(resumed), locals_of(ours)) == []
    save_full(ours, tmp_path / "ours.safetensors")
    dist.barrier()
    assert (tmp_path / "ours.safetensors").read_bytes() == theirs_file.read_bytes()


def alone() -> dist.ProcessGroup:
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
