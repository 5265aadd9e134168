"""Full tensors one after another: what comes, in which order, by how many collectives."""

from __future__ import annotations

import copy
import importlib
import operator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint.meshes import CASES, Net
from near import Apart
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import CPUOffloadPolicy, fully_shard, iter_full, save_full, unsharded
from composable_shard.compat.fsdp1 import FullyShardedDataParallel
from composable_shard.testing import run_ranks, run_threads
from composable_shard.train.weights import gathering
from composable_shard.train.weights.boxes import Parts
from loading.comparing import differences
from loading.counting import Counted, counted
from loading.kinds import Kinds, Tied, in_turns, shard

EVERYTHING = 1 << 30


def whole_by_torch(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


def unlike(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Tell what differs: bits, or the order."""
    assert list(got) == list(wanted)
    return differences(got, wanted)


# Placements -------------------------------------------------------------------------------------


def over_placements(name: str, hidden: int, direct_nbytes: int) -> list[list[str]]:
    torch.manual_seed(1)
    model = CASES[name](Net(hidden))
    wanted = whole_by_torch(model)
    is_first = dist.get_rank() == 0
    found = []
    with mock.patch.object(gathering, "MIN_DIRECT_NBYTES", direct_nbytes):
        for nbytes in (1, 600, EVERYTHING):
            found.append(unlike(dict(iter_full(model, bucket_bytes=nbytes)), wanted))
            first = dict(iter_full(model, bucket_bytes=nbytes, rank0_only=True))
            found.append(unlike(first, wanted if is_first else {}))
    return found


@pytest.mark.parametrize("direct_nbytes", [0, 1 << 16])
@pytest.mark.parametrize("hidden", [8, 10])
@pytest.mark.parametrize("name", CASES)
def test_every_placement(name: str, hidden: int, direct_nbytes: int) -> None:
    num_ranks = CASES[name].num_ranks
    found = run_ranks(over_placements, num_ranks, name, hidden, direct_nbytes)
    assert found == [[[]] * 6] * num_ranks


def to_each_in_turn(folder: str) -> list[str]:
    """Gather on every rank, on all, and train: what ranks count is still the same."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    wanted = whole_by_torch(model)
    save_full(model, folder, max_shard_size=70000)
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        saved |= load_file(file)
    found = differences(saved, wanted) + unlike(dict(iter_full(model)), wanted)
    model(torch.ones(1, 128)).sum().backward()
    first = dict(iter_full(model, rank0_only=True, bucket_bytes=1))
    return found + unlike(first, wanted if dist.get_rank() == 0 else {})


@pytest.mark.parametrize("steps", [None, 2])
def test_ranks_that_cannot_read_each_other_send(tmp_path: Path, steps: int | None) -> None:
    """Nobody shares memory; or each rank does with its neighbours only."""
    assert run_ranks(Apart(to_each_in_turn, steps), 4, str(tmp_path)) == [[]] * 4


def several_boxes() -> tuple[list[str], list[int]]:
    torch.manual_seed(1)
    wanted = {name: torch.randn(13, 7) for name in ("runs", "both", "nested")}
    model = in_turns((2, 2))
    boxes = [len(list(Parts().boxes(param))) for param in model.parameters()]
    return unlike(dict(iter_full(model)), wanted), boxes


def test_what_ranks_hold_in_several_boxes() -> None:
    """DTensor itself does not put "runs" together again, so the tensors before are the oracle."""
    found = run_ranks(several_boxes, 4)
    assert [differing for differing, _ in found] == [[]] * 4
    assert max(boxes[0] for _, boxes in found) > 1


def parts_of_all() -> list[bool]:
    """Compare what every rank is said to hold with what each has."""
    model, parts, same = in_turns((2, 2)), Parts(), []
    for param in model.parameters():
        mesh, numbers = param.device_mesh, torch.arange(13 * 7).view(13, 7)
        own = distribute_tensor(numbers, mesh, param.placements, src_data_rank=None).to_local()
        every = [torch.empty(0)] * 4
        dist.all_gather_object(every, own)
        for rank, held in enumerate(every):
            coordinate = divmod(rank, 2)
            pairs = zip(parts.shape(param, coordinate), parts.shape(param, (0, 0)), strict=True)
            assert all(length <= most for length, most in pairs)
            said = torch.full(parts.shape(param, coordinate), -1)
            for box, within in parts.boxes(param, coordinate):
                said[within] = numbers[box]
            same.append(torch.equal(said, held))
    return same


def test_all_ranks_know_what_each_holds() -> None:
    assert run_ranks(parts_of_all, 4) == [[True] * 12] * 4


# Kinds of tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("rank0_only", [False, True])
def test_parameters_and_buffers_of_every_kind(offloads: bool, rank0_only: bool) -> None:
    torch.manual_seed(1)
    whole = Kinds()
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloads else {}

    def check() -> list[str]:
        model = shard(copy.deepcopy(whole), **options)
        got = dict(iter_full(model, bucket_bytes=100, rank0_only=rank0_only))
        if rank0_only and dist.get_rank():
            assert got == {}
            return []
        assert all(full.is_contiguous() for full in got.values())
        found = unlike(got, dict(whole.state_dict()))
        for full in got.values():  # the consumer's own, whatever becomes of the model
            full.zero_()
        again = dict(iter_full(model)) if not rank0_only else dict(whole.state_dict())
        return found + unlike(again, dict(whole.state_dict()))

    assert run_threads(check, 3) == [[]] * 3


@pytest.mark.parametrize("tied", ["first", "all"])
def test_tied_names(tied: str) -> None:
    torch.manual_seed(1)
    whole = Tied()
    once = ["embed.weight", "block.weight", "block.bias", "scale"]
    every = ["scale", "alias", "embed.weight", "head.weight"]
    every += ["block.weight", "again.weight", "block.bias", "again.bias"]

    def check() -> list[str]:
        model = copy.deepcopy(whole)
        for layer in (model.embed, model.block, model.head):
            fully_shard(layer)
        fully_shard(model)
        got = list(iter_full(model, tied=tied))
        names = [name for name, _ in got]
        assert sorted(names) == sorted(once if tied == "first" else every)
        tensors = dict(got)
        if tied == "all":
            assert names == every
            assert tensors["head.weight"] is tensors["embed.weight"]
        return [name for name in names if not torch.equal(tensors[name], whole.state_dict()[name])]

    assert run_threads(check, 2) == [[], []]


def test_names_are_mapped_and_left_out() -> None:
    whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))

    def rename(name: str) -> str | None:
        return None if name.endswith("bias") else f"model.{name}"

    def check() -> dict[str, torch.Tensor]:
        return dict(iter_full(fully_shard(copy.deepcopy(whole)), rename=rename))

    for got in run_threads(check, 2):
        assert list(got) == ["model.0.weight", "model.1.weight"]
        assert torch.equal(got["model.1.weight"], whole[1].weight)


class Halves(TwoTensor):
    """A tensor that is the sum of two."""

    def dequantize(self) -> torch.Tensor:
        return self.a + self.b


def subclasses() -> list[list[str]]:
    torch.manual_seed(1)
    halves = Halves(torch.randn(5, 4), torch.randn(5, 4))
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    local = halves[:3] if dist.get_rank() == 0 else halves[3:]
    local = Halves(local.a, local.b)
    param = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=(5, 4), stride=(4, 1)
    )
    model.register_parameter("halves", nn.Parameter(param))
    fully_shard(inner := nn.Linear(4, 2), mesh=mesh)
    model.inner = inner
    ((name, own), *rest) = iter_full(model)
    found = [[name, *(name for name, _ in rest)]]
    found.append(differences({"a": own.a, "b": own.b}, {"a": halves.a, "b": halves.b}))
    plain = dict(iter_full(model, subclasses="plain", dtype=torch.float64))
    assert type(plain["halves"]) is torch.Tensor
    wanted = (halves.a + halves.b).double()
    found.append(differences({"halves": plain["halves"]}, {"halves": wanted}))
    made = dict(iter_full(model, subclasses=lambda shard: shard.a - shard.b))
    found.append(differences({"halves": made["halves"]}, {"halves": halves.a - halves.b}))
    return found


def test_tensor_subclasses_in_their_own_form_or_plain() -> None:
    names = ["halves", "inner.weight", "inner.bias"]
    assert run_ranks(subclasses, 2) == [[names, [], [], []]] * 2


# Collectives ------------------------------------------------------------------------------------


def launched(dtype: torch.dtype | None, rank0_only: bool) -> Counted:
    layers = [nn.Linear(16, 16, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(64, 1024, bias=False))
    for layer in model:
        fully_shard(layer)
    with counted() as found:
        for _ in iter_full(model, bucket_bytes=2048, dtype=dtype, rank0_only=rank0_only):
            pass
    return found


@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_collectives_and_bytes(dtype: torch.dtype | None, rank0_only: bool) -> None:
    """Matrices of 1024 bytes, two in a bucket, and one of 256 KiB alone; half of that as bf16."""
    shares = [1024, 1024, 131072] if dtype is None else [1024, 65536]
    for rank, found in enumerate(run_ranks(launched, 2, dtype, rank0_only)):
        gets = not rank0_only or rank == 0
        assert found.gathers == [(own, 2 * own * gets) for own in shares]
        assert found.words == [0] * (len(shares) + 1)


def quantized(name: str) -> list[bool]:
    torchao_layers = importlib.import_module("subclasses.torchao_layers")
    torch.manual_seed(1)
    layer = getattr(torchao_layers, name)(nn.Linear(128, 64, bias=False))
    weight = layer.weight.detach()
    by_hand: Any = "get_original_weight" if name == "nf4_weight" else "dequantize"
    wanted = getattr(weight, by_hand)()
    make = operator.methodcaller(by_hand) if name == "nf4_weight" else "plain"
    model = fully_shard(layer)
    made = dict(iter_full(model, subclasses=make, dtype=torch.bfloat16))["weight"]
    return [torch.equal(made, wanted.bfloat16()), type(made) is torch.Tensor]


@pytest.mark.parametrize("name", ["nf4_weight", "int8_weight_only"])
def test_quantized_weights_of_torchao_are_made_plain(name: str) -> None:
    assert run_ranks(quantized, 2, name) == [[True, True]] * 2


# Ranks ------------------------------------------------------------------------------------------


def in_stages(folder: str) -> list[list[str]]:
    """Stream and save two models at the same time, each over two ranks."""
    stage = dist.get_rank() // 2
    group, _ = dist.new_subgroups(2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    torch.manual_seed(stage)
    whole = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2 + stage)))
    model = copy.deepcopy(whole)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    wanted = dict(whole.state_dict())
    got = dict(iter_full(model, bucket_bytes=100, process_group=group))
    first = dict(iter_full(model, rank0_only=True, process_group=group))
    place = Path(folder) / str(stage)
    save_full(model, place, max_shard_size=150, process_group=group)
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(place.glob("*.safetensors")):
        saved |= load_file(file)
    is_first = dist.get_rank() % 2 == 0
    return [
        unlike(got, wanted),
        unlike(first, wanted if is_first else {}),
        differences(saved, wanted),
        [] if len(list(place.iterdir())) == 2 * len(model) + 1 else ["files"],
    ]


def test_two_models_at_the_same_time(tmp_path: Path) -> None:
    assert run_ranks(in_stages, 4, str(tmp_path)) == [[[], [], [], []]] * 4


def unsharded_and_state_dict() -> list[int]:
    torch.manual_seed(1)
    layers = [nn.Linear(8, 8) for _ in range(6)]
    model = nn.Sequential(*copy.deepcopy(layers))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    counts = []
    with counted() as found, unsharded(model):
        counts.append(len(found.gathers))
        assert unlike(dict(model.state_dict()), dict(nn.Sequential(*layers).state_dict())) == []
    wrapped = FullyShardedDataParallel(nn.Sequential(*layers), device_id=torch.device("cpu"))
    with counted() as found:
        wrapped.state_dict()
    return [*counts, len(found.gathers)]


def test_full_parameters_and_state_dicts_come_in_one_gather() -> None:
    assert run_ranks(unsharded_and_state_dict, 2) == [[1, 1]] * 2
