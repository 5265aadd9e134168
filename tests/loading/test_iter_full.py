"""Full tensors one after another: what comes, in which order, by how many collectives."""

from __future__ import annotations

import contextlib
import copy
import importlib
import operator
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

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
from torch.utils._python_dispatch import TorchDispatchMode
from two_tensors import two_tensor_mlp

from composable_shard import CPUOffloadPolicy, explain, fully_shard, iter_full, save_full, unsharded
from composable_shard._torch import leaves, poisoned_memory
from composable_shard.compat.fsdp1 import FullyShardedDataParallel
from composable_shard.core.transport.channel import Channel
from composable_shard.testing import fake_ranks, run_ranks, run_threads
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights import boxes, gathering
from composable_shard.train.weights.boxes import Parts
from composable_shard.train.weights.costs import PassCosts, costs_of
from composable_shard.train.weights.stream import Asked
from loading.comparing import differences
from loading.counting import Counted, counted
from loading.kinds import Kinds, Tied, in_turns, kinds, shard

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


@pytest.mark.brief(4)
@pytest.mark.parametrize("hidden", [10, 8])
@pytest.mark.parametrize("name", CASES)
def test_every_placement(name: str, hidden: int) -> None:
    run_ranks(over_placements, CASES[name].num_ranks, name, hidden)


def over_placements(name: str, hidden: int) -> None:
    torch.manual_seed(1)
    model = CASES[name](Net(hidden))
    wanted = whole_by_torch(model)
    of_first = wanted if dist.get_rank() == 0 else {}
    for direct_nbytes in (0, 1 << 16):
        with mock.patch.object(gathering, "MIN_DIRECT_NBYTES", direct_nbytes):
            for nbytes in (1, 600, EVERYTHING):
                assert unlike(dict(iter_full(model, bucket_bytes=nbytes)), wanted) == []
                first = dict(iter_full(model, bucket_bytes=nbytes, rank0_only=True))
                assert unlike(first, of_first) == []


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
    dist.all_gather_object(counts, len(list(Parts().boxes(model.runs))))
    assert max(counts) > 1


@on_ranks(4)
def test_all_ranks_know_what_each_holds() -> None:
    parts = Parts()
    for param in in_turns((2, 2)).parameters():
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
            assert torch.equal(said, held)


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


@pytest.mark.parametrize("name", ["nf4_weight", "int8_weight_only"])
@on_ranks(2)
def test_quantized_weights_of_torchao_are_made_plain(name: str) -> None:
    torchao_layers = importlib.import_module("subclasses.torchao_layers")
    torch.manual_seed(1)
    layer = getattr(torchao_layers, name)(nn.Linear(128, 64, bias=False))
    by_hand: Any = "get_original_weight" if name == "nf4_weight" else "dequantize"
    wanted = getattr(layer.weight.detach(), by_hand)()
    make = operator.methodcaller(by_hand) if name == "nf4_weight" else "plain"
    model = fully_shard(layer)
    made = dict(iter_full(model, subclasses=make, dtype=torch.bfloat16))["weight"]
    assert type(made) is torch.Tensor and torch.equal(made, wanted.bfloat16())


@on_ranks(4)
def test_two_models_at_the_same_time(tmp_path: Path) -> None:
    stage = dist.get_rank() // 2
    group, _ = dist.new_subgroups(2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    torch.manual_seed(stage)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2 + stage)))
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in model:
        fully_shard(layer, mesh=mesh)
    assert unlike(dict(iter_full(model, bucket_bytes=100, process_group=group)), wanted) == []
    first = dict(iter_full(model, rank0_only=True, process_group=group))
    assert unlike(first, wanted if dist.get_rank() % 2 == 0 else {}) == []
    place = tmp_path / str(stage)
    save_full(model, place, max_shard_size=150, process_group=group)
    assert differences(saved_in(place), wanted) == []
    assert len(list(place.iterdir())) == 2 * len(model) + 1


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


# What it costs, as explain() says it --------------------------------------------------------------


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of all storages that operations have made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.is_counting = True
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in plain_tensors([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        if self.is_counting:
            for tensor in plain_tensors(result):
                storage = tensor.untyped_storage()
                if id(storage) not in before:
                    self._made.setdefault(storage._cdata, weakref.ref(storage))
            alive = {
                s._cdata: s.nbytes() for one in self._made.values() if (s := one()) is not None
            }
            self._made = {key: one for key, one in self._made.items() if one() is not None}
            self.most = max(self.most, sum(alive.values()))
        return result


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from leaves(value)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from plain_tensors(inner)
    elif isinstance(value, dict):
        yield from plain_tensors(list(value.values()))


@contextlib.contextmanager
def watched() -> Iterator[LiveStorages]:
    """Count what lives, but for words, numbers of rows, and what a transport needs in a call."""
    mode = LiveStorages()

    def uncounted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            was, mode.is_counting = mode.is_counting, False
            try:
                return real(*args, **kwargs)
            finally:
                mode.is_counting = was

        return call

    with contextlib.ExitStack() as until:
        for owner, name in (
            (Ranks, "say"),
            (Ranks, "gather"),
            (Channel, "gather"),
            (Channel, "gather_to"),
            (boxes, "_runs"),
        ):
            until.enter_context(mock.patch.object(owner, name, uncounted(getattr(owner, name))))
        until.enter_context(mode)
        yield mode


def observed(model: nn.Module, launched: Counted, **asked: Any) -> dict[str, int]:
    """Make a pass, and return what it takes."""
    with poisoned_memory(False), watched() as mode:
        for _, full in iter_full(model, **asked):
            del full
    return {
        "num_buckets": len(launched.words) - 1,
        "launches": len(launched.gathers),
        "held_nbytes": mode.most,
        "inputs": sum(sent for sent, _ in launched.gathers),
        "outputs": sum(received for _, received in launched.gathers),
    }


def unlike_said(costs: PassCosts, seen: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return what differs: what was said, and what was seen."""
    said = {name: getattr(costs, name) for name in ("num_buckets", "launches", "held_nbytes")}
    return {name: (said[name], seen[name]) for name in said if said[name] != seen[name]}


def compare(model: nn.Module, nbytes: int) -> None:
    """Compare a pass with what was said of it: what this rank sends goes to all others."""
    costs = explain(model, bucket_bytes=nbytes).weights_out
    assert costs is not None
    with counted() as launched:
        seen = observed(model, launched, bucket_bytes=nbytes)
    assert unlike_said(costs, seen) == {}
    # in a gather to all both are the same
    assert seen["outputs"] - seen["inputs"] == costs.received_nbytes == costs.sent_nbytes


def compare_on_mesh(name: str) -> None:
    torch.manual_seed(1)
    model = CASES[name](Net(10))
    for direct_nbytes in (0, 1 << 16):
        with mock.patch.object(gathering, "MIN_DIRECT_NBYTES", direct_nbytes):
            for nbytes in (1, 600, 1 << 30):
                compare(model, nbytes)


@pytest.mark.brief(4)
@pytest.mark.parametrize("name", CASES)
def test_what_every_placement_costs(name: str) -> None:
    """Uneven, on inner dims, hybrid, tensor-parallel, on meshes of their own."""
    run_ranks(compare_on_mesh, CASES[name].num_ranks, name)


@on_ranks(4)
def test_experts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    fully_shard(model[0], mesh=mesh["data"])
    compare(fully_shard(model, mesh=init_device_mesh("cpu", (4,))), 100)


@on_ranks(2)
def test_kinds_ties_and_offloading() -> None:
    compare(shard(kinds(1)), 60)
    tied, offloaded = Tied(), nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    fully_shard(tied.block)
    compare(fully_shard(tied), 50)
    compare(fully_shard(offloaded, offload_policy=CPUOffloadPolicy(pin_memory=False)), 80)


def with_arguments(asked: dict[str, Any]) -> tuple[dict[str, tuple[int, int]], tuple[int, int]]:
    """Return what differs, and what this rank sends and receives."""
    model = fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)))
    to = 0 if asked.pop("rank0_only", False) else None
    costs = costs_of(model, Asked(**asked), 200, to)
    with counted() as launched:
        seen = observed(model, launched, bucket_bytes=200, rank0_only=to == 0, **asked)
    return unlike_said(costs, seen), (costs.sent_nbytes, costs.received_nbytes)


def test_one_rank_gets_them() -> None:
    first, second = run_ranks(with_arguments, 2, {"rank0_only": True})
    half = (6 * 8 + 8 + 8 * 6 + 6) * 4 // 2
    padding = 4  # each shard takes a multiple of 16 bytes, and the last one has 12
    assert first == ({}, (0, half + padding))
    assert second == ({}, (half + padding, 0))


@pytest.mark.parametrize("direct_nbytes", [0, 1 << 16])
def test_cast_shards(direct_nbytes: int) -> None:
    with mock.patch.object(gathering, "MIN_DIRECT_NBYTES", direct_nbytes):
        found = run_ranks(with_arguments, 2, {"dtype": torch.bfloat16})
    assert [differing for differing, _ in found] == [{}, {}]


@on_ranks(2)
def test_subclasses_in_their_own_form_and_plain() -> None:
    """What a class needs to make itself plain is its own: the rest is counted."""
    model = fully_shard(two_tensor_mlp())
    names = tuple(f"{i}.{side}_proj.weight" for i in range(3) for side in ("in", "out"))
    assert costs_of(model, Asked(), 1).by_class == names
    costs = costs_of(model, Asked(subclasses=added), 1)
    with counted() as launched:
        seen = observed(model, launched, bucket_bytes=1, subclasses=added)
    assert unlike_said(costs, {**seen, "held_nbytes": costs.held_nbytes}) == {}


def added(shard: Any) -> torch.Tensor:
    return shard.a + shard.b


def test_what_is_told() -> None:
    with fake_ranks(2):
        model = fully_shard(nn.Linear(64, 64, bias=False))
        assert str(explain(model, bucket_bytes=1 << 20)).splitlines()[-4:] == [
            "Weights out",
            "  - iter_full() in buckets of 1 MiB: 1 of them, 1 gathers of 1 messages in all",
            "  - this rank sends 8 KiB and receives 8 KiB",
            "  - beside the model at most 40 KiB live at a time, if each tensor is let go of",
        ]
