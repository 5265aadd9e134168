"""Parameters and buffers of every kind, on the meta device and not, under one name or several."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint.meshes import CASES, WIDTH, Net
from on_ranks import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from composable_shard import CPUOffloadPolicy, fully_shard, load_sharded, save_full
from composable_shard.compat.fsdp1 import FullyShardedDataParallel
from composable_shard.testing import run_ranks, run_threads
from loading.kinds import Kinds, Tied, differences, kinds, locals_of, shard

NUM_RANKS = 3


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize(("is_meta", "offloads"), [(False, False), (True, False), (True, True)])
def test_parameters_of_every_kind(
    tmp_path: Path, is_meta: bool, offloads: bool, sends: bool
) -> None:
    whole, others = kinds(1), [kinds(2) for _ in range(NUM_RANKS)]
    state = {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}
    save_file(state, tmp_path / "x.safetensors")
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloads else {}

    def check() -> list[str]:
        wanted = shard(copy.deepcopy(whole), **options)
        model = others[dist.get_rank()]
        model = shard(model.to("meta") if is_meta else model, **options)
        if is_meta:
            model.register_buffer("table", torch.arange(3.0), persistent=False)
        params = list(model.parameters())
        told = load_sharded(model, tmp_path / "x.safetensors", broadcast_from_rank0=sends)
        assert told[:3] == ([], [], [])
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        found = differences(locals_of(model), locals_of(wanted))
        strides = [p.stride() for p in model.parameters()]
        assert strides == [p.stride() for p in wanted.parameters()]
        save_full(model, tmp_path / "y.safetensors")
        return found

    assert run_threads(check, NUM_RANKS) == [[]] * NUM_RANKS
    assert differences(load_file(tmp_path / "y.safetensors"), state) == []


def test_what_is_unsharded_is_gathered_anew_and_what_is_ignored_is_read_whole(
    tmp_path: Path,
) -> None:
    """Also where the group belongs to a module around the one that is loaded."""
    whole, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    save_full(whole[0], tmp_path / "0.safetensors")
    save_full(whole, tmp_path / "whole.safetensors")

    def check() -> None:
        model = fully_shard(copy.deepcopy(whole), reshard_after_forward=False)
        with torch.no_grad():
            model[0].weight.zero_()
            model(x)  # leaves the parameters gathered
        load_sharded(model[0], tmp_path / "0.safetensors")
        assert torch.equal(model(x), whole(x))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(model, ignored_params={model[0].bias})
        load_sharded(model, tmp_path / "whole.safetensors")
        assert torch.equal(model[0].bias, whole[0].bias)
        assert not isinstance(model[0].bias, DTensor)
        assert torch.equal(model(x), whole(x))

    run_threads(check, 2)


def test_dtypes_of_the_model_and_of_the_file(tmp_path: Path) -> None:
    layer = nn.Linear(3, 4)
    save_file(layer.state_dict(), tmp_path / "x.safetensors")

    def check() -> None:
        model = fully_shard(nn.Linear(3, 4, dtype=torch.bfloat16))
        load_sharded(model, tmp_path / "x.safetensors")
        assert model.weight.dtype is torch.bfloat16
        assert torch.equal(model.weight.full_tensor(), layer.weight.bfloat16())
        save_full(model, tmp_path / "y.safetensors", dtype=torch.float64)

    run_threads(check, 2)
    saved = load_file(tmp_path / "y.safetensors")
    assert torch.equal(saved["weight"], layer.weight.detach().bfloat16().double())


@pytest.mark.parametrize("under", ["first", "last", "all"])
@pytest.mark.parametrize("is_meta", [False, True])
def test_tied_weights_under_one_name_or_all(tmp_path: Path, is_meta: bool, under: str) -> None:
    torch.manual_seed(1)
    whole = Tied()
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    tied = ["embed.weight", "block.weight", "block.bias", "scale"]
    ties = ["head.weight", "again.weight", "again.bias", "alias"]
    for name in {"first": ties, "last": tied, "all": []}[under]:
        del state[name]
    save_file(state, tmp_path / "x.safetensors")
    x = torch.tensor([0, 3, 4])

    def check() -> torch.Tensor:
        with torch.device("meta" if is_meta else "cpu"):
            model = Tied()
        for layer in (model.embed, model.block, model.head):
            fully_shard(layer)
        fully_shard(model)
        assert load_sharded(model, tmp_path / "x.safetensors")[:3] == ([], [], [])
        assert model.head.weight is model.embed.weight and model.alias is model.scale
        save_full(model, tmp_path / "y.safetensors")
        return model(x)

    for got in run_threads(check, 2):
        assert torch.equal(got, whole(x))
    saved = load_file(tmp_path / "y.safetensors")
    assert sorted(saved) == sorted(tied)
    for name in tied:
        assert torch.equal(saved[name], whole.state_dict()[name])


def test_without_strict_the_last_of_tied_names_counts(tmp_path: Path) -> None:
    state = {"0.weight": torch.zeros(2, 2), "1.weight": torch.ones(2, 2), "more": torch.ones(1)}
    save_file(state, tmp_path / "x.safetensors")

    def check() -> torch.Tensor:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        nn.init.constant_(model[2].weight, 7)
        fully_shard(model)
        told = load_sharded(model, tmp_path / "x.safetensors", strict=False)
        assert told.missing_keys == ["1.bias", "2.weight", "2.bias"]
        assert told.unexpected_keys == ["more"]
        said = "<loaded 1 tensor, missing: 1.bias, 2.weight, 2.bias, unexpected: more>"
        assert str(told) == said
        assert torch.equal(model[2].weight.full_tensor(), torch.full((2, 2), 7.0))
        return model[0].weight.full_tensor()

    for got in run_threads(check, 2):
        assert torch.equal(got, torch.ones(2, 2))


def test_a_model_without_ranks_and_without_shards(tmp_path: Path) -> None:
    whole, model = kinds(1), kinds(2)
    save_full(whole, tmp_path / "x.safetensors")
    told = load_sharded(model, tmp_path / "x.safetensors")
    assert told[:3] == ([], [], [])
    count = len(whole.state_dict())
    assert str(told) == f"<loaded {count} tensors, nothing missing, nothing unexpected>"
    assert differences(model.state_dict(), whole.state_dict()) == []
    with torch.device("meta"):
        model = Kinds()
    with pytest.warns(UserWarning) as caught:
        told = load_sharded(model, tmp_path / "x.safetensors")
    assert [str(warning.message) for warning in caught] == [
        "The non-persistent buffers table are still on the meta device; compute them, as no "
        "checkpoint has them"
    ]
    assert told.left_on_meta == ["table"]
    assert str(told).endswith(", nothing unexpected, still on the meta device: table>")
    assert differences(model.state_dict(), whole.state_dict()) == []


def test_wrappers_do_not_appear_in_names(tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    save_full(whole, tmp_path / "x.safetensors")

    def check() -> None:
        model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 3)), nn.Linear(3, 2))
        model[1] = FullyShardedDataParallel(model[1], device_id="cpu")
        model = torch.compile(FullyShardedDataParallel(model, device_id="cpu"), backend="eager")
        assert load_sharded(model, tmp_path / "x.safetensors")[:3] == ([], [], [])
        save_full(model, tmp_path / "y.safetensors")

    run_threads(check, 2)
    assert differences(load_file(tmp_path / "y.safetensors"), whole.state_dict()) == []


def test_names_that_are_mapped(tmp_path: Path) -> None:
    """Two stages read what is theirs from one file, each with ranks of its own, and write it."""
    whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    save_full(whole, tmp_path / "x.safetensors", rename=lambda name: f"model.layers.{name}")

    def check() -> None:
        stage = dist.get_rank() // 2
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mesh = dist.device_mesh.DeviceMesh.from_group(groups[stage], "cpu")
        model = fully_shard(nn.Linear(2, 3) if stage == 0 else nn.Linear(3, 2), mesh=mesh)
        prefix = f"model.layers.{stage}."

        def own(name: str) -> str | None:
            return name.removeprefix(prefix) if name.startswith(prefix) else None

        group = groups[stage]
        load_sharded(model, tmp_path / "x.safetensors", rename=own, process_group=group)
        save_full(
            model, tmp_path / f"{stage}", rename=lambda name: f"{stage}.{name}", process_group=group
        )

    run_threads(check, 4)
    saved = {
        name: tensor
        for stage in (0, 1)
        for name, tensor in load_file(tmp_path / f"{stage}" / "model.safetensors").items()
    }
    assert differences(saved, whole.state_dict()) == []


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(10)


def go_round(name: str, folder: Path) -> None:
    """Load into a model of its own values, one on the meta device and one that is sent to; save."""
    case, whole = CASES[name], net(seed=1)
    wanted = case(net(seed=2))
    wanted.load_state_dict(whole.state_dict())  # cuts full tensors without communication
    shards, x = locals_of(wanted), torch.ones(2, WIDTH, dtype=torch.float64)
    for kind in ("real", "meta", "sent"):
        with torch.device("meta" if kind == "meta" else "cpu"):
            model = case(net(seed=2))
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
    again = case(net(seed=3))
    load_sharded(again, folder / "parts")
    assert differences(locals_of(again), shards) == []


@pytest.mark.brief(2)
@pytest.mark.parametrize("name", ["hybrid-inner", "own-mesh", "tp", "hybrid-tp"])
def test_from_a_file_into_shards_and_back(tmp_path: Path, name: str) -> None:
    save_file(net(seed=1).state_dict(), tmp_path / "whole.safetensors")
    run_ranks(go_round, CASES[name].num_ranks, name, tmp_path)


@on_ranks(3)
def test_what_is_read_and_written_is_what_torch_and_safetensors_do(tmp_path: Path) -> None:
    """Compare with what torch's own checkpoints do, both ways, and with the file, byte by byte."""
    case, source, theirs_file = CASES["1-d"], tmp_path / "hf", tmp_path / "theirs.safetensors"
    if dist.get_rank() == 0:
        save_full(net(seed=1), source, max_shard_size=1000, process_group=alone())
        save_file(net(seed=1).state_dict(), theirs_file, metadata={"format": "pt"})
    else:
        alone()
    dist.barrier()
    theirs, ours = case(net(seed=2)), case(net(seed=3))
    state = get_model_state_dict(theirs)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(source)))
    set_model_state_dict(theirs, state)
    load_sharded(ours, source)
    assert differences(locals_of(ours), locals_of(theirs)) == []
    # A checkpoint of DTensors, read by torch into a model that our file was read into.
    dcp.save(get_model_state_dict(ours), checkpoint_id=tmp_path / "dcp")
    resumed = case(net(seed=4))
    state = get_model_state_dict(resumed)
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_model_state_dict(resumed, state)
    assert differences(locals_of(resumed), locals_of(ours)) == []
    save_full(ours, tmp_path / "ours.safetensors")
    dist.barrier()
    assert (tmp_path / "ours.safetensors").read_bytes() == theirs_file.read_bytes()


def alone() -> dist.ProcessGroup:
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
