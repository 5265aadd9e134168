"""What ``explain`` says of a pass of ``iter_full`` is what the pass launches, moves and holds."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint.meshes import CASES, Net
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from two_tensors import two_tensor_mlp

from composable_shard import CPUOffloadPolicy, explain, fully_shard, iter_full
from composable_shard._torch import leaves, poisoned_memory
from composable_shard.core.transport.channel import Channel
from composable_shard.testing import fake_ranks, run_ranks
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights import boxes, gathering
from composable_shard.train.weights.costs import PassCosts, costs_of
from composable_shard.train.weights.stream import Asked
from loading.counting import Counted, counted
from loading.kinds import Tied, kinds, shard


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


def differences(costs: PassCosts, seen: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return what differs: what was said, and what was seen."""
    said = {name: getattr(costs, name) for name in ("num_buckets", "launches", "held_nbytes")}
    return {name: (said[name], seen[name]) for name in said if said[name] != seen[name]}


def compare(model: nn.Module, nbytes: int) -> None:
    """Compare a pass with what was said of it: what this rank sends goes to all others."""
    costs = explain(model, bucket_bytes=nbytes).weights_out
    assert costs is not None
    with counted() as launched:
        seen = observed(model, launched, bucket_bytes=nbytes)
    assert differences(costs, seen) == {}
    # in a gather to all both are the same
    assert seen["outputs"] - seen["inputs"] == costs.received_nbytes == costs.sent_nbytes


def on_mesh(name: str) -> None:
    torch.manual_seed(1)
    model = CASES[name](Net(10))
    for direct_nbytes in (0, 1 << 16):
        with mock.patch.object(gathering, "MIN_DIRECT_NBYTES", direct_nbytes):
            for nbytes in (1, 600, 1 << 30):
                compare(model, nbytes)


@pytest.mark.brief(4)
@pytest.mark.parametrize("name", CASES)
def test_every_placement(name: str) -> None:
    """Uneven, on inner dims, hybrid, tensor-parallel, on meshes of their own."""
    run_ranks(on_mesh, CASES[name].num_ranks, name)


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
    return differences(costs, seen), (costs.sent_nbytes, costs.received_nbytes)


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
    assert differences(costs, {**seen, "held_nbytes": costs.held_nbytes}) == {}


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
