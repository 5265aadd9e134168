"""Full tensors one after another: what comes, in which order, by how many collectives."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint.meshes import CASES, Net
from near import Apart
from on_ranks import on_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import CPUOffloadPolicy, fully_shard, iter_full, save_full, unsharded
from composable_shard._torch import poisoned_memory
from composable_shard.compat.fsdp1 import FullyShardedDataParallel
from composable_shard.testing import run_ranks, run_threads
from composable_shard.train.full import boxes_of, shape_of
from loading.counting import counted, held
from loading.kinds import Kinds, Tied, differences, in_turns, shard


def whole_by_torch(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


def unlike(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert list(got) == list(wanted)
    return differences(got, wanted)


def over_placements(name: str) -> None:
    torch.manual_seed(1)
    model = CASES[name](Net(10))
    wanted = whole_by_torch(model)
    of_first = wanted if dist.get_rank() == 0 else {}
    for nbytes in (1, 600, 1 << 30):
        assert unlike(dict(iter_full(model, bucket_bytes=nbytes)), wanted) == []
        first = dict(iter_full(model, bucket_bytes=nbytes, rank0_only=True))
        assert unlike(first, of_first) == []


HARDEST = ("own-mesh", "hybrid-inner")


@pytest.mark.brief(2)
@pytest.mark.parametrize("name", sorted(CASES, key=HARDEST.__contains__, reverse=True))
def test_every_placement(name: str) -> None:
    """Uneven, on inner dims, hybrid, tensor-parallel, on meshes of their own."""
    run_ranks(over_placements, CASES[name].num_ranks, name)


def saved_in(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def to_each_in_turn(folder: Path) -> None:
    """Gather on every rank, on all, and train: what ranks count is still the same."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    wanted = whole_by_torch(model)
    save_full(model, folder, max_shard_size=70000)
    assert differences(saved_in(folder), wanted) == unlike(dict(iter_full(model)), wanted) == []
    model(torch.ones(1, 128)).sum().backward()
    first = dict(iter_full(model, rank0_only=True, bucket_bytes=1))
    assert unlike(first, wanted if dist.get_rank() == 0 else {}) == []


@pytest.mark.parametrize("steps", [None, 2])
def test_ranks_that_cannot_read_each_other_send(tmp_path: Path, steps: int | None) -> None:
    """Nobody shares memory; or each rank does with its neighbours only."""
    run_ranks(Apart(to_each_in_turn, steps), 4, tmp_path)


@on_ranks(4)
def test_what_ranks_hold_in_several_boxes() -> None:
    """DTensor itself does not put "runs" together again, so the tensors before are the oracle."""
    model = in_turns((2, 2))
    torch.manual_seed(1)
    wanted = {name: torch.randn(13, 7) for name in ("runs", "both", "nested")}
    assert unlike(dict(iter_full(model)), wanted) == []
    counts = [0] * 4
    dist.all_gather_object(counts, len(list(boxes_of(model.runs))))
    assert max(counts) > 1


@on_ranks(4)
def test_all_ranks_know_what_each_holds() -> None:
    for param in in_turns((2, 2)).parameters():
        mesh, numbers = param.device_mesh, torch.arange(13 * 7).view(13, 7)
        own = distribute_tensor(numbers, mesh, param.placements, src_data_rank=None).to_local()
        every = [torch.empty(0)] * 4
        dist.all_gather_object(every, own)
        for rank, local in enumerate(every):
            coordinate = divmod(rank, 2)
            pairs = zip(shape_of(param, coordinate), shape_of(param, (0, 0)), strict=True)
            assert all(length <= most for length, most in pairs)
            said = torch.full(shape_of(param, coordinate), -1)
            for box, within in boxes_of(param, coordinate):
                said[within] = numbers[box]
            assert torch.equal(said, local)


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


class Halves(TwoTensor):
    """A tensor that is the sum of two."""

    def dequantize(self) -> torch.Tensor:
        return self.a + self.b


@on_ranks(2)
def test_tensor_subclasses_in_their_own_form_or_plain() -> None:
    torch.manual_seed(1)
    halves = Halves(torch.randn(5, 4), torch.randn(5, 4))
    mesh, model = init_device_mesh("cpu", (2,)), nn.Module()
    rows = slice(3) if dist.get_rank() == 0 else slice(3, 5)
    local = Halves(halves.a[rows], halves.b[rows])
    param = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=(5, 4), stride=(4, 1)
    )
    model.register_parameter("halves", nn.Parameter(param))
    model.inner = fully_shard(nn.Linear(4, 2), mesh=mesh)
    own = dict(iter_full(model))
    assert list(own) == ["halves", "inner.weight", "inner.bias"]
    assert torch.equal(own["halves"].a, halves.a) and torch.equal(own["halves"].b, halves.b)
    plain = dict(iter_full(model, subclasses="plain", dtype=torch.float64))["halves"]
    assert type(plain) is torch.Tensor and torch.equal(plain, (halves.a + halves.b).double())
    made = dict(iter_full(model, subclasses=lambda shard: shard.a - shard.b))["halves"]
    assert torch.equal(made, halves.a - halves.b)


@on_ranks(2)
def test_full_parameters_and_state_dicts_come_in_one_gather() -> None:
    torch.manual_seed(1)
    whole = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model = copy.deepcopy(whole)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with counted() as found, unsharded(model):
        assert len(found.gathers) == 1
        assert unlike(dict(model.state_dict()), dict(whole.state_dict())) == []
    wrapped = FullyShardedDataParallel(whole, device_id=torch.device("cpu"))
    with counted() as found:
        wrapped.state_dict()
    assert len(found.gathers) == 1


@on_ranks(2)
def test_a_pass_holds_two_buckets_and_this_ranks_part_of_one() -> None:
    model = fully_shard(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8))))
    with poisoned_memory(False), counted() as launched, held() as most:
        for _, full in iter_full(model, bucket_bytes=8192):
            del full
    assert len(launched.gathers) == 4 and len(launched.words) == 5
    assert most[0] <= 2 * 8192 + 4096
