"""State dicts of parameters that are tensor subclasses."""

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
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import two_tensor_hooks

from checkpoint.models import State, all_ranks, assert_equal, three_ranks
from composable_shard import fully_shard

ROWS = (5, 2)
DIMS = (1, 0)


def plain_model(seed: int) -> nn.Sequential:
    """Two layers of five and of two rows, whose weights are pairs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, ROWS[0], bias=False), nn.Linear(ROWS[0], ROWS[1]))
    for layer in model:
        layer.weight = nn.Parameter(
            TwoTensor(layer.weight.detach(), torch.randn_like(layer.weight))
        )
    return model


def sharded_model(seed: int) -> nn.Sequential:
    model = plain_model(seed)
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
def test_plain_state_dicts(assign: bool) -> None:
    with two_tensor_hooks():
        source, plain = sharded_model(0), plain_model(0)
        assert_rows(source.state_dict(), plain.state_dict())
        x = torch.ones(2, 3)
        for state in (copied(plain), source.state_dict(), copy.deepcopy(source.state_dict())):
            target = sharded_model(1)
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
def test_pickling() -> None:
    with two_tensor_hooks():
        source, plain = sharded_model(0), plain_model(0)
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        for weights_only in (False, True):
            file.seek(0)
            with torch.serialization.safe_globals([TwoTensor]):
                state = torch.load(file, weights_only=weights_only)
            target = sharded_model(1)
            target.load_state_dict(state)
            assert_rows(target.state_dict(), plain.state_dict())


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
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
def test_distributed_checkpoints(tmp_path: Path) -> None:
    with two_tensor_hooks():
        source = sharded_model(0)
        optimizer = adam(source)
        train(source, optimizer, 2)
        states = get_state_dict(source, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=tmp_path)
        target = sharded_model(1)
        target_optimizer = adam(target)
        model_state, optimizer_state = get_state_dict(target, target_optimizer)
        with torch.serialization.safe_globals([TwoTensor]):
            dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
        set_state_dict(
            target,
            target_optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
        )
        for steps in (0, 2):
            train(source, optimizer, steps)
            train(target, target_optimizer, steps)
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
def test_full_states() -> None:
    """Full states hold whole subclasses; torch's setter can spread them on one rank alone."""
    with two_tensor_hooks():
        source, plain = sharded_model(0), plain_model(0)
        full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
        expected = plain.state_dict()
        assert list(full) == list(expected)
        for name, tensor in full.items():
            assert type(tensor) is type(expected[name])
            for kind in ("a", "b") if isinstance(tensor, TwoTensor) else ("data",):
                assert torch.equal(getattr(tensor, kind), getattr(expected[name], kind))
        target = sharded_model(1)
        if dist.get_world_size() == 1:
            chosen = StateDictOptions(full_state_dict=True)
            set_model_state_dict(target, dict(full), options=chosen)
        else:
            target.load_state_dict(full)
        assert_rows(target.state_dict(), expected)
