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
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import two_tensor_hooks

from checkpoint.models import (
    Model,
    State,
    all_ranks,
    assert_equal,
    evaluate,
    is_exact,
    plain_model,
    shard,
    sharded_model,
    tensors,
    three_ranks,
    train,
)
from checkpoint.optimizers import OPTIMIZERS
from composable_shard import fully_shard
from composable_shard.testing import run_ranks

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
        both = ((model, optimizers), (target, target_optimizers)) if assign else ()
        for one, its_optimizers in both:
            train(one.train(), its_optimizers, 2, 3)
        assert_equal(target.state_dict(), model.state_dict())


def size_of(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer().nbytes


def sizes() -> list[int]:
    """Shards of one group share memory, but what is written of each is its own rows alone."""
    model = sharded_model(0)
    theirs = shard(plain_model(0, columns=6), torch_fully_shard)
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, DTensor)}
    name = "wide.weight"
    return [
        size_of({n: t for n, t in theirs.state_dict().items() if isinstance(t, DTensor)}),
        size_of(state),
        size_of({name: state[name]}),
        size_of({name: state[name].clone()}),
    ]


def test_sizes() -> None:
    for theirs, whole, one, cloned in run_ranks(sizes, 2):
        assert whole < theirs * 1.1  # shards are not written several times
        assert cloned == one < whole


@three_ranks
@on_ranks("num_ranks")
def test_deep_copies() -> None:
    plain, model = plain_model(0), sharded_model(0)
    states = []
    for one in (plain, model):
        optimizers = OPTIMIZERS["adam-foreach"](one)
        train(one, optimizers, 0, 1)
        state = copy.deepcopy(one.state_dict())
        optimizer_state = copy.deepcopy(optimizers[0].state_dict())
        train(one, optimizers, 1, 3)
        assert not torch.equal(full(state["wide.weight"]), full(one.wide.weight).detach())
        states.append(state)
        one.load_state_dict(state)
        optimizers[0].load_state_dict(optimizer_state)
        train(one, optimizers, 1, 2)
    assert_equal(states[1], states[0], exact=is_exact())
    assert_equal(model.state_dict(), plain.state_dict(), exact=is_exact())


@three_ranks
@on_ranks("num_ranks")
def test_deep_copies_of_parameters() -> None:
    """Copies of the parameters themselves, as an average of weights makes them, are their own."""
    plain, model = plain_model(0), sharded_model(0)
    kept = model.state_dict(keep_vars=True).values()
    originals = list(
        {id(tensor): tensor for tensor in kept if isinstance(tensor, DTensor)}.values()
    )
    copies = copy.deepcopy(originals), copy.deepcopy([tensor.detach() for tensor in originals])
    for each in copies:
        for one, original in zip(each, originals, strict=True):
            assert isinstance(one, DTensor) and one.placements == original.placements
            assert_equal(one, original)
            with torch.no_grad():
                one.zero_()
    assert all(isinstance(one, torch.nn.Parameter) for one in copies[0])
    assert_equal(model.state_dict(), plain.state_dict())


@three_ranks
@on_ranks("num_ranks")
def test_shards_are_contiguous_rows() -> None:
    """What writes local tensors itself (safetensors) finds this rank's rows, contiguous."""
    torch.manual_seed(0)
    plain, model = Model(7), sharded_model(0)
    expected = tensors(plain.state_dict())
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for name, tensor in tensors(model.state_dict()).items():
        if not isinstance(tensor, DTensor):
            assert torch.equal(tensor, expected[name])
            continue
        local, (placement,) = tensor.to_local(), tensor.placements
        assert local.is_contiguous() and type(local) is torch.Tensor
        chunks = expected[name].chunk(num_ranks, placement.dim)
        own = chunks[rank] if rank < len(chunks) else expected[name].narrow(placement.dim, 0, 0)
        assert torch.equal(local, own), name
        assert tensor.storage_offset() == 0  # of the DTensor, which has no memory of its own
        written = bytes(local.view(torch.uint8).flatten().tolist())
        assert written == bytes(own.contiguous().view(torch.uint8).flatten().tolist())
        begin, end = local.storage_offset(), local.storage_offset() + local.numel()
        assert end * local.itemsize <= local.untyped_storage().nbytes(), (begin, end)


@all_ranks
@on_ranks("num_ranks")
def test_full_tensors() -> None:
    """Full tensors that are kept do not follow the model, on more ranks than one."""
    model = sharded_model(0)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    before = {name: tensor.clone() for name, tensor in tensors(state).items()}
    train(model, OPTIMIZERS["adam-foreach"](model), 0, 1)
    params = dict(model.named_parameters())
    follows = [not torch.equal(state[name], before[name]) for name in params if name != FROZEN]
    # On one rank torch gathers nothing and copies nothing: the full tensor is the shard.
    assert all(follows) if dist.get_world_size() == 1 else not any(follows)


FROZEN = "outer.inner.up.weight"


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


@three_ranks
@on_ranks("num_ranks")
def test_pairs_are_pickled() -> None:
    with two_tensor_hooks():
        source, plain = sharded_pairs(0), plain_pairs(0)
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        for weights_only in (False, True):
            file.seek(0)
            with torch.serialization.safe_globals([TwoTensor]):
                state = torch.load(file, weights_only=weights_only)
            target = sharded_pairs(1)
            target.load_state_dict(state)
            assert_rows(target.state_dict(), plain.state_dict())


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)


def train_pairs(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.arange(6.0).view(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def of_state(state: State, kind: str) -> State:
    return {
        name: getattr(t.to_local(), kind, t.to_local()) if isinstance(t, DTensor) else t
        for name, t in state.items()
    }


@all_ranks
@on_ranks("num_ranks")
def test_distributed_checkpoints_of_pairs(tmp_path: Path) -> None:
    with two_tensor_hooks():
        source = sharded_pairs(0)
        optimizer = adam(source)
        train_pairs(source, optimizer, 2)
        states = get_state_dict(source, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=tmp_path)
        target = sharded_pairs(1)
        target_optimizer = adam(target)
        model_state, optimizer_state = get_state_dict(target, target_optimizer)
        with torch.serialization.safe_globals([TwoTensor]):
            dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
        set_state_dict(
            target, target_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )
        for steps in (0, 2):
            train_pairs(source, optimizer, steps)
            train_pairs(target, target_optimizer, steps)
            for kind in ("a", "b"):
                got, expected = target.state_dict(), source.state_dict()
                assert_equal(of_state(got, kind), of_state(expected, kind))
                got, expected = (
                    get_optimizer_state_dict(m, o)["state"]
                    for m, o in ((target, target_optimizer), (source, optimizer))
                )
                for name in expected:
                    assert_equal(of_state(got[name], kind), of_state(expected[name], kind))


@three_ranks
@on_ranks("num_ranks")
def test_full_states_of_pairs() -> None:
    """Full states hold whole subclasses; torch's setter can spread them on one rank alone."""
    with two_tensor_hooks():
        source, plain = sharded_pairs(0), plain_pairs(0)
        full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
        expected = plain.state_dict()
        assert list(full) == list(expected)
        for name, tensor in full.items():
            assert type(tensor) is type(expected[name])
            for kind in ("a", "b") if isinstance(tensor, TwoTensor) else ("data",):
                assert torch.equal(getattr(tensor, kind), getattr(expected[name], kind))
        target = sharded_pairs(1)
        if dist.get_world_size() == 1:
            chosen = StateDictOptions(full_state_dict=True)
            set_model_state_dict(target, dict(full), options=chosen)
        else:
            target.load_state_dict(full)
        assert_rows(target.state_dict(), expected)
