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
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint.meshes import CASES, WIDTH, Case, Net
from checkpoint.models import State, assert_equal, structure
from composable_shard.testing import run_ranks

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
EVEN, UNEVEN = 8, 10
"""Hidden units, of which two tensor-parallel ranks hold 4 or 5 each; 2 data-parallel ones cut
these."""

FEW = {"hybrid-inner", "own-mesh", "tp", "hybrid-tp"}
"""Of these meshes each axis and placement is one."""


def place(name: str, hidden: int = UNEVEN, few: set[str] = FEW) -> Any:
    marks = () if name in few and hidden == UNEVEN else pytest.mark.matrix
    return pytest.param(name, hidden, marks=marks)


EVEN_PLACES = [place("tp", EVEN), place("tp-alone", EVEN)]
places = pytest.mark.parametrize(("name", "hidden"), [*map(place, CASES), *EVEN_PLACES])

ROUTES = {
    "1-d": ("hybrid", "tp"),
    "hybrid-inner": ("1-d", "hybrid-tp"),
    "own-mesh": ("hybrid-inner", "own-mesh"),
    "tp": ("1-d", "tp", "hybrid-tp"),
    "hybrid-tp": ("own-mesh", "tp-alone"),
}
"""On what a checkpoint is written, and on what it is read."""


def net(hidden: int, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(hidden)


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
    steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, hidden: int, min_dims: int = 0
) -> None:
    """Assert that both states are those of the unsharded model after so many steps."""
    plain = net(hidden, 0)
    plain_optimizer = adam(plain, min_dims)
    train(plain, plain_optimizer, 0, steps)
    states, expected = get_state_dict(model, optimizer), get_state_dict(plain, plain_optimizer)
    assert_equal(states, expected, exact=False)


def loaded(case: Case, hidden: int) -> None:
    """Full tensors in, full tensors out, plainly; nothing is communicated on the way in."""
    expected = net(hidden, 0).state_dict()
    for assign in (False, True):
        model = case(net(hidden, 1))
        with counted() as launched:
            model.load_state_dict(copied(expected), assign=assign)
        assert launched == []
        with counted() as launched:
            state = model.state_dict()
        assert launched == []
        assert all(isinstance(tensor, DTensor) for tensor in state.values())
        assert_equal(state, expected)
        assert torch.allclose(full(model(batch(0))), net(hidden, 0)(batch(0)))
        model.reshard()
        assert_equal(model.state_dict(), expected)
        other = case(net(hidden, 2))
        other.load_state_dict(model.state_dict(), assign=assign)
        assert_equal(other.state_dict(), expected)
        assert structure(other.state_dict()) == structure(state)


@places
def test_load_state_dict(name: str, hidden: int) -> None:
    run_ranks(loaded, CASES[name].num_ranks, CASES[name], hidden)


def gathered(case: Case, hidden: int) -> None:
    """Take model and optimizer to another model, in full, from all ranks and from the first."""
    model = case(net(hidden, 0))
    optimizer = adam(model, min_dims=1)  # torch loads scalar state as plain tensors
    train(model, optimizer, 0, 2)
    states = get_state_dict(model, optimizer, options=FULL)
    assert_is_after(2, model, optimizer, hidden, min_dims=1)
    # torch cannot cut a full tensor over uneven shards of tensor-parallel parts, and says so.
    refused = "tp" in case.names and hidden == UNEVEN and case.extents == (2, 2)
    for options in (FULL, FROM_RANK_0):
        with torch.device("meta" if options is FROM_RANK_0 else "cpu"):
            target = case(net(hidden, 1))
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
        assert_is_after(4, target, target_optimizer, hidden, min_dims=1)


@pytest.mark.brief(2)
@places
def test_full_states(name: str, hidden: int) -> None:
    run_ranks(gathered, CASES[name].num_ranks, CASES[name], hidden)


@pytest.mark.parametrize("hidden", [EVEN, UNEVEN])
@on_ranks(4)
def test_states_of_tensor_parallel_models(hidden: int) -> None:
    """A state from before ``fully_shard``, of DTensors on the tensor-parallel axis alone."""
    case = CASES["tp"]
    mesh = init_device_mesh("cpu", case.extents, mesh_dim_names=case.names)
    for assign in (False, True):
        source = net(hidden, 0)
        expected = copied(source.state_dict())
        for block in source.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        model = case.build(net(hidden, 1), mesh)
        with counted() as launched:
            model.load_state_dict(source.state_dict(), assign=assign)
        assert launched == []
        assert_equal(model.state_dict(), expected)


def write(case: Case, hidden: int, folder: Path) -> None:
    model = case(net(hidden, 0))
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)


def read(case: Case | None, hidden: int, folder: Path) -> None:
    model = net(hidden, 1) if case is None else case(net(hidden, 1))
    optimizer = adam(model)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_is_after(2, model, optimizer, hidden)
    train(model, optimizer, 2, 4)
    assert_is_after(4, model, optimizer, hidden)


@pytest.mark.brief(1)
@pytest.mark.parametrize(
    ("name", "hidden"),
    [*(place(name, few={"hybrid-inner", "hybrid-tp"}) for name in ROUTES), place("tp", EVEN)],
)
def test_from_mesh_to_mesh(tmp_path: Path, name: str, hidden: int) -> None:
    run_ranks(write, CASES[name].num_ranks, CASES[name], hidden, tmp_path)
    for other in ROUTES[name]:
        run_ranks(read, CASES[other].num_ranks, CASES[other], hidden, tmp_path)
    run_ranks(read, 1, None, hidden, tmp_path)
