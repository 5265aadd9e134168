"""Checkpoints of models on meshes of several axes, and from one mesh to another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launches import counted
from nets import full
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from checkpoint.meshes import CASES, WIDTH, Case, Net
from checkpoint.models import State, assert_equal, structure
from composable_shard.testing import run_ranks

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
HIDDEN = 10
"""Hidden units: two tensor-parallel ranks hold 5 each, which two data-parallel ones cut."""

FEW = {"hybrid-inner", "own-mesh", "tp", "hybrid-tp"}
"""Of these meshes each axis and placement is one."""

places = pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.matrix) for name in CASES],
)

ROUTES = {
    "1-d": ("hybrid", "tp"),
    "hybrid-inner": ("own-mesh", "hybrid-tp"),
    "hybrid-tp": ("1-d", "tp-alone"),
}
"""On what a checkpoint is written, and on what it is read."""


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(HIDDEN)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def adam(model: nn.Module, min_dims: int = 0) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.ndim >= min_dims]
    return torch.optim.Adam(params, lr=0.01, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        model(batch(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def copied(state: State) -> State:
    return {name: t.detach().clone() for name, t in state.items()}


def assert_is_after(
    steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, min_dims: int = 0
) -> None:
    """Assert that both states are those of the unsharded model after so many steps."""
    plain = net(0)
    plain_optimizer = adam(plain, min_dims)
    train(plain, plain_optimizer, 0, steps)
    states, expected = get_state_dict(model, optimizer), get_state_dict(plain, plain_optimizer)
    assert_equal(states, expected, exact=False)


def loaded(case: Case) -> None:
    """Full tensors in, full tensors out, plainly; nothing is communicated on the way in."""
    expected = net(0).state_dict()
    for assign in (False, True):
        model = case(net(1))
        with counted() as launched:
            model.load_state_dict(copied(expected), assign=assign)
        assert launched == []
        with counted() as launched:
            state = model.state_dict()
        assert launched == []
        assert all(isinstance(tensor, DTensor) for tensor in state.values())
        assert_equal(state, expected)
        assert torch.allclose(full(model(batch(0))), net(0)(batch(0)))
        model.reshard()
        assert_equal(model.state_dict(), expected)
        other = case(net(2))
        other.load_state_dict(model.state_dict(), assign=assign)
        assert_equal(other.state_dict(), expected)
        assert structure(other.state_dict()) == structure(state)


@places
def test_load_state_dict(name: str) -> None:
    run_ranks(loaded, CASES[name].num_ranks, CASES[name])


def gathered(case: Case) -> None:
    """Take model and optimizer to another model, in full, from all ranks and from the first."""
    model = case(net(0))
    optimizer = adam(model, min_dims=1)  # torch loads scalar state as plain tensors
    train(model, optimizer, 0, 2)
    states = get_state_dict(model, optimizer, options=FULL)
    assert_is_after(2, model, optimizer, min_dims=1)
    # torch cannot cut a full tensor over uneven shards of tensor-parallel parts, and says so.
    refused = "tp" in case.names and case.extents == (2, 2)
    for options in (FULL, FROM_RANK_0):
        with torch.device("meta" if options is FROM_RANK_0 else "cpu"):
            target = case(net(1))
        heard = states if options is FULL or dist.get_rank() == 0 else ({}, {})
        heard = copy.deepcopy(heard)  # the optimizer takes the step counts as they are
        if refused and options is FULL:
            with pytest.raises(AssertionError):
                set_model_state_dict(target, heard[0], options=options)
            target.load_state_dict(heard[0])
            assert_equal(target.state_dict(), states[0])
            continue
        set_model_state_dict(target, heard[0], options=options)
        assert_equal(target.state_dict(), states[0])
        target_optimizer = adam(target, min_dims=1)
        set_optimizer_state_dict(target, target_optimizer, heard[1], options=options)
        assert_equal(get_optimizer_state_dict(target, target_optimizer, options=FULL), states[1])
        train(target, target_optimizer, 2, 4)
        assert_is_after(4, target, target_optimizer, min_dims=1)


@pytest.mark.brief(2)
@places
def test_full_states(name: str) -> None:
    run_ranks(gathered, CASES[name].num_ranks, CASES[name])


def write(case: Case, folder: Path) -> None:
    model = case(net(0))
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)


def read(case: Case | None, folder: Path) -> None:
    model = net(1) if case is None else case(net(1))
    optimizer = adam(model)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_is_after(2, model, optimizer)
    train(model, optimizer, 2, 4)
    assert_is_after(4, model, optimizer)


@pytest.mark.brief(1)
@pytest.mark.parametrize("name", ROUTES)
def test_from_mesh_to_mesh(tmp_path: Path, name: str) -> None:
    run_ranks(write, CASES[name].num_ranks, CASES[name], tmp_path)
    for other in ROUTES[name]:
        run_ranks(read, CASES[other].num_ranks, CASES[other], tmp_path)
    run_ranks(read, 1, None, tmp_path)
