"""State dicts as things: pickled, copied, mapped into memory; their shards; subclasses in them."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
from nets import both
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import two_tensor_hooks

from checkpoint.models import (
    OPTIMIZERS,
    State,
    all_ranks,
    assert_equal,
    evaluate,
    plain_model,
    sharded_model,
    tensors,
    three_ranks,
    train,
)
from composable_shard import fully_shard

WAYS: dict[str, dict[str, Any]] = {
    "anything": {"weights_only": False},
    "weights-only": {"weights_only": True},
    "mapped": {"weights_only": True, "mmap": True},
}


@all_ranks
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@on_ranks("num_ranks")
def test_shards_are_pickled(tmp_path: Path, way: dict[str, Any]) -> None:
    model = sharded_model(0)
    optimizers = OPTIMIZERS["groups"](model)
    train(model, optimizers, 0, 2)
    evaluate(model)
    file = tmp_path / f"{dist.get_rank()}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizers[0].state_dict()}, file)
    for assign in (False, True):
        target = sharded_model(5)
        target_optimizers = OPTIMIZERS["groups"](target)
        state = torch.load(file, **way)
        assert all(isinstance(state["model"][n], DTensor) for n, _ in target.named_parameters())
        target.load_state_dict(state["model"], assign=assign)
        assert_equal(target.state_dict(), model.state_dict())
        if assign:
            target_optimizers = OPTIMIZERS["groups"](target)
        target_optimizers[0].load_state_dict(state["optimizer"])
        assert_equal(target_optimizers[0].state_dict(), optimizers[0].state_dict())
        pairs = ((model, optimizers), (target, target_optimizers)) if assign else ()
        for one, its_optimizers in pairs:
            train(one.train(), its_optimizers, 2, 3)
        assert_equal(target.state_dict(), model.state_dict())


def size_of(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer().nbytes


@on_ranks(2)
def test_shards_of_one_group_are_written_without_their_neighbours() -> None:
    state = {n: t for n, t in sharded_model(0).state_dict().items() if isinstance(t, DTensor)}
    one = {"wide.weight": state["wide.weight"]}
    assert size_of(one) == size_of({"wide.weight": one["wide.weight"].clone()})
    assert size_of(one) < size_of(state) < 1.1 * size_of({n: t.clone() for n, t in state.items()})


@three_ranks
@on_ranks("num_ranks")
def test_shards_are_contiguous_rows() -> None:
    """What writes local tensors itself (safetensors) finds this rank's rows, contiguous."""
    expected = tensors(plain_model(0).state_dict())
    for name, tensor in tensors(sharded_model(0).state_dict()).items():
        local, own = both(tensor, expected[name])
        assert torch.equal(local, own), name
        if isinstance(tensor, DTensor):
            assert local.is_contiguous() and type(local) is torch.Tensor
            assert tensor.storage_offset() == 0  # of the DTensor, which has no memory of its own
            written = bytes(local.view(torch.uint8).flatten().tolist())
            assert written == bytes(own.contiguous().view(torch.uint8).flatten().tolist())


ROWS = (5, 2)
DIMS = (1, 0)


def plain_pairs(seed: int) -> nn.Sequential:
    """Two layers of five and of two rows, whose weights are pairs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, ROWS[0], bias=False), nn.Linear(ROWS[0], ROWS[1]))
    for layer in model:
        layer.weight = nn.Parameter(
            TwoTensor(layer.weight.detach(), torch.randn_like(layer.weight))
        )
    return model


def sharded_pairs(seed: int) -> nn.Sequential:
    model = plain_pairs(seed)
    for layer, dim in zip(model, DIMS, strict=True):
        fully_shard(layer, shard_placement_fn=lambda p, dim=dim: Shard(dim if p.ndim > 1 else 0))
    return fully_shard(model)


def assert_rows(state: Mapping[str, Any], plain: Mapping[str, torch.Tensor]) -> None:
    """Assert that a sharded state holds this rank's part of both inner tensors."""
    assert list(state) == list(plain)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor)
        (placement,), local = tensor.placements, tensor.to_local()
        assert placement == Shard(DIMS[int(name[0])] if name.endswith("weight") else 0)
        kinds = ("a", "b") if name.endswith("weight") else ("data",)
        assert type(local) is (TwoTensor if len(kinds) == 2 else torch.Tensor)
        for kind in kinds:
            whole = getattr(plain[name].detach(), kind)
            chunks = whole.chunk(num_ranks, placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            assert torch.equal(getattr(local, kind), chunks[rank] if rank < len(chunks) else empty)


def copied(plain: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in plain.state_dict().items()}


@all_ranks
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@on_ranks("num_ranks")
def test_state_dicts_of_pairs(assign: bool) -> None:
    with two_tensor_hooks():
        source, plain = sharded_pairs(0), plain_pairs(0)
        assert_rows(source.state_dict(), plain.state_dict())
        x = torch.ones(2, 3)
        for state in (copied(plain), source.state_dict(), copy.deepcopy(source.state_dict())):
            target = sharded_pairs(1)
            if not assign:
                target(x)
            target.load_state_dict(state, assign=assign)
            assert_rows(target.state_dict(), plain.state_dict())
            out, expected = target(x), plain(x)
            torch.testing.assert_close(out.a, expected.a)
            torch.testing.assert_close(out.b, expected.b)
            assert_rows(target.state_dict(), plain.state_dict())


@all_ranks
@on_ranks("num_ranks")
def test_distributed_checkpoints_of_pairs(tmp_path: Path) -> None:
    def train_pairs(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        one(torch.arange(6.0).view(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def values(one: nn.Module, optimizer: torch.optim.Optimizer) -> list[State]:
        """Return the inner tensors of all that this rank holds, by name."""
        model_state, optimizer_state = get_state_dict(one, optimizer)
        found: list[State] = []
        for state in (model_state, *optimizer_state["state"].values()):
            held = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in state.items()}
            found += [{n: getattr(t, kind, t) for n, t in held.items()} for kind in ("a", "b")]
        return found

    with two_tensor_hooks(), torch.serialization.safe_globals([TwoTensor]):
        made = []
        for seed in (0, 1):
            model = sharded_pairs(seed)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
            made.append((model, optimizer))
        source, target = made
        train_pairs(*source)
        saved, read = (get_state_dict(*one) for one in made)
        dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=tmp_path)
        dcp.load({"model": read[0], "optimizer": read[1]}, checkpoint_id=tmp_path)
        set_state_dict(*target, model_state_dict=read[0], optim_state_dict=read[1])
        for _ in range(2):
            assert_equal(values(*target), values(*source))
            for one in made:
                train_pairs(*one)
        assert_equal(values(*target), values(*source))
