"""``torch.distributed.checkpoint``: its functions for states, on any option; training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch_versions import needs_newer_torch

from checkpoint.meshes import CASES, WIDTH, Case, Net
from checkpoint.models import (
    OPTIMIZERS,
    Model,
    State,
    all_ranks,
    assert_equal,
    is_exact,
    plain_values,
    shard,
    structure,
    three_models,
    three_ranks,
    train,
)
from composable_shard import fully_shard
from composable_shard.testing import run_ranks

FULL, FLAT = {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}
FROM_RANK_0 = {**FULL, "broadcast_from_rank0": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "full": FULL,
    "rank-0": FROM_RANK_0,
    "rank-0-cpu": {**FROM_RANK_0, "cpu_offload": True},
    "full-flat": {**FULL, **FLAT},
    "rank-0-flat": {**FROM_RANK_0, **FLAT},
}


def made(seed: int, make: str = "groups", columns: int = 6, sharder: Any = fully_shard) -> Any:
    """Return a model, whole if there is no sharder, and optimizers that have not stepped."""
    torch.manual_seed(seed)
    model = Model(columns)
    if sharder is not None:
        shard(model, sharder)
    return model, OPTIMIZERS[make](model)


def source(sharder: Callable[..., Any] | None, make: str, columns: int = 6) -> Any:
    """Return a model that was trained for two steps, and its optimizers."""
    model, optimizers = made(1, make, columns, sharder)
    model.epochs = 4
    train(model, optimizers, 0, 2)
    return model, optimizers


def heard(state: Any, options: dict[str, Any]) -> Any:
    """Return what this rank has read of the checkpoint."""
    return {} if options.get("broadcast_from_rank0") and dist.get_rank() else state


def restore(make: str, options: dict[str, Any], columns: int) -> Any:
    """Take the state of one model to another, in one call and in two; return both models' parts."""
    for at_once in (True, False):
        if at_once and options.get("broadcast_from_rank0"):
            continue  # torch: rank 1, whose model state is empty, leaves the model out
        states = get_state_dict(
            *source(fully_shard, make, columns),
            options=StateDictOptions(
                full_state_dict=options.get("full_state_dict", False),
                flatten_optimizer_state_dict=options.get("flatten_optimizer_state_dict", False),
            ),
        )
        model_state, optimizer_state = (heard(state, options) for state in states)
        model, optimizers = made(2, make, columns)
        # torch cannot load a flat full state when it is told that it is flat; it sees that itself
        told = {key: on for key, on in options.items() if "flat" not in key}
        chosen = StateDictOptions(**told)
        if at_once:
            set_state_dict(
                model,
                optimizers,
                model_state_dict=model_state,
                optim_state_dict=optimizer_state,
                options=chosen,
            )
        else:
            set_model_state_dict(model, model_state, options=chosen)
            set_optimizer_state_dict(model, optimizers, optimizer_state, options=chosen)
        yield model, optimizers


def restored(make: str, options: dict[str, Any], columns: int) -> None:
    exact = is_exact()
    plain, plain_optimizers = source(None, make, columns)
    expected = get_state_dict(plain, plain_optimizers)
    for model, optimizers in restore(make, options, columns):
        got = get_state_dict(model, optimizers)
        assert_equal(got, expected, exact=exact)
        assert model.epochs == 4
        for param in model.parameters():
            for optimizer in optimizers:
                for value in optimizer.state.get(param, {}).values():
                    is_moment = isinstance(value, torch.Tensor) and value.ndim > 0
                    assert not is_moment or value.placements == param.placements
        train(model, optimizers, 2, 4)
    train(plain, plain_optimizers, 2, 4)
    trained = get_state_dict(plain, plain_optimizers)
    assert_equal(get_state_dict(model, optimizers), trained, exact=exact)


# torch cannot spread the full state of an optimizer without state: it has no device
TAKEN = [
    *((option, "adam", 6) for option in OPTIONS),
    *(("rank-0-flat", "groups", 6), ("full", "several", 6), ("sharded", "sgd", 6)),
    *(("sharded", "groups", 7), ("full", "groups", 7)),
    pytest.param(
        *("rank-0", "groups", 7),
        marks=needs_newer_torch("a gathered tensor of uneven columns has other strides"),
    ),
]


@pytest.mark.brief(7)
@all_ranks
@pytest.mark.parametrize(("option", "make", "columns"), TAKEN)
def test_what_is_set_is_what_was_saved(
    num_ranks: int, option: str, make: str, columns: int
) -> None:
    run_ranks(restored, num_ranks, make, OPTIONS[option], columns)


FROZEN = "outer.inner.up.weight"


def dtensors(state: Any) -> list[DTensor]:
    if isinstance(state, dict):
        return [one for value in state.values() for one in dtensors(value)]
    return [state] if isinstance(state, DTensor) else []


@all_ranks
@pytest.mark.parametrize(
    "options",
    [{}, {**FULL, "cpu_offload": True}, {**FULL, **FLAT}, {"ignore_frozen_params": True}],
    ids=["sharded", "full-cpu", "full-flat", "without-frozen"],
)
@on_ranks("num_ranks")
def test_options_of_getting(options: dict[str, Any]) -> None:
    states = []
    for model in three_models():
        optimizers = OPTIMIZERS["adam"](model)
        train(model, optimizers, 0, 2)
        chosen = StateDictOptions(**options)
        both = get_state_dict(model, optimizers, options=chosen)
        model_state = get_model_state_dict(model, options=chosen)
        optimizer_state = get_optimizer_state_dict(model, optimizers, options=chosen)
        assert_equal(both, (model_state, optimizer_state))
        states.append(both)
    plain, ours, theirs = states
    assert structure(ours) == structure(theirs)
    assert_equal(ours, theirs, exact=is_exact())
    assert_equal(ours, plain, exact=is_exact())
    is_full = options.get("full_state_dict", False)
    if is_full and options.get("cpu_offload") and dist.get_rank() > 0:
        assert ours == ({}, {})
        return
    assert bool(dtensors(ours[0])) == bool(dtensors(ours[1])) != is_full
    assert (FROZEN in ours[0]) != options.get("ignore_frozen_params", False)


# Saved on some ranks, loaded on others ------------------------------------------------------------


SAVE_AFTER, STOP_AFTER = 2, 4


def states(model: nn.Module, optimizers: list[Optimizer]) -> State:
    """Return what is saved, in a form whose optimizer part has no lists to be cut in files."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizers),
        "step": SAVE_AFTER,
    }


def save(folder: Path, columns: int) -> State:
    model, optimizers = made(0, columns=columns)
    train(model, optimizers, 0, SAVE_AFTER)
    saved = states(model, optimizers)
    assert all(isinstance(t, DTensor) for n, t in model.named_parameters())
    dcp.save(saved, checkpoint_id=folder)
    return plain_values(saved)


def uninterrupted(columns: int) -> tuple[State, State]:
    """States of the unsharded model: when it is saved, and at the end."""
    model, optimizers = made(0, columns=columns, sharder=None)
    train(model, optimizers, 0, SAVE_AFTER)
    saved = plain_values(states(model, optimizers))
    train(model, optimizers, SAVE_AFTER, STOP_AFTER)
    return saved, plain_values(states(model, optimizers))


def resume(folder: Path, columns: int) -> tuple[State, State]:
    """Return the state as loaded, and as trained on."""
    model, optimizers = made(9, columns=columns)
    model_state, optimizer_state = get_state_dict(model, optimizers)
    read = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(
        model, optimizers, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    assert read["step"] == SAVE_AFTER
    loaded = plain_values(states(model, optimizers))
    train(model, optimizers, SAVE_AFTER, STOP_AFTER)
    return loaded, plain_values(states(model, optimizers))


@pytest.mark.brief(2)
@pytest.mark.parametrize("columns", [6, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_checkpoint_goes_on_on_any_number_of_ranks(
    tmp_path: Path, num_ranks: int, columns: int
) -> None:
    saved, *others = run_ranks(save, num_ranks, tmp_path, columns)
    plain_saved, plain_trained = uninterrupted(columns)
    for other in others:
        assert_equal(other, saved)
    assert_equal(saved, plain_saved, exact=num_ranks <= 2)
    for num_others in (1, 2, 3):
        for loaded, trained in run_ranks(resume, num_others, tmp_path, columns):
            assert_equal(loaded, saved)
            assert_equal(trained, plain_trained, exact=num_ranks <= 2 and num_others <= 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_checkpoints_are_those_of_torch(tmp_path: Path) -> None:
    """Write a checkpoint of torch's own sharded model, go on with ours, and the other way."""
    _, expected = uninterrupted(6)
    for writer, reader in ((torch_fully_shard, fully_shard), (fully_shard, torch_fully_shard)):
        place = tmp_path / writer.__module__
        source_pair, pair = made(0, sharder=writer), made(1, sharder=reader)
        train(*source_pair, 0, SAVE_AFTER)
        dcp.save(states(*source_pair), checkpoint_id=place)
        read = states(*pair)
        dcp.load(read, checkpoint_id=place)
        set_model_state_dict(pair[0], read["model"])
        set_optimizer_state_dict(*pair, read["optimizer"])
        plain = shard(Model(), reader)
        plain.load_state_dict(source_pair[0].state_dict())  # shards are the same, so they fit
        assert_equal(plain.state_dict(), source_pair[0].state_dict())
        train(*pair, SAVE_AFTER, STOP_AFTER)
        assert_equal(plain_values(states(*pair)), expected)


def saved_beside_training(folder: Path, stager: str) -> State:
    model, optimizers = made(0, columns=7)
    train(model, optimizers, 0, 1)
    state = {"model": model.state_dict(), "optimizer": get_state_dict(model, optimizers)[1]}
    before = plain_values(state)
    options: dict[str, Any] = {"async_checkpointer_type": AsyncCheckpointerType.THREAD}
    if stager == "async":
        options["async_stager"] = DefaultStager(StagingOptions(False, False, True, False))
    # The writing thread talks beside the training one: it needs a process group of its own.
    group = dist.new_group()
    response = dcp.async_save(state, checkpoint_id=folder, process_group=group, **options)
    if isinstance(response, AsyncSaveResponse):
        response.staging_completion.result()
        response = response.upload_completion
    train(model, optimizers, 1, 3)
    response.result()
    after = plain_values(state)
    assert not torch.equal(after["model"]["wide.weight"], before["model"]["wide.weight"])
    dcp.load(state, checkpoint_id=folder)
    assert_equal(state, before)
    if stager == "async":
        options["async_stager"].close()
    return before


@pytest.mark.brief(2)
@three_ranks
@pytest.mark.parametrize("stager", ["blocking", "async"])
def test_threads(tmp_path: Path, num_ranks: int, stager: str) -> None:
    first, *others = run_ranks(saved_beside_training, num_ranks, tmp_path, stager)
    for other in others:
        assert_equal(other, first)


# On meshes of several axes, and from one mesh to another ------------------------------------------


ALL_HAVE = StateDictOptions(full_state_dict=True)
FIRST_SENDS = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
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


def train_net(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
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
    train_net(plain, plain_optimizer, 0, steps)
    states, expected = get_state_dict(model, optimizer), get_state_dict(plain, plain_optimizer)
    assert_equal(states, expected, exact=False)


def load_plainly(case: Case) -> None:
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
    run_ranks(load_plainly, CASES[name].num_ranks, CASES[name])


def gathered(case: Case) -> None:
    """Take model and optimizer to another model, in full, from all ranks and from the first."""
    model = case(net(0))
    optimizer = adam(model, min_dims=1)  # torch loads scalar state as plain tensors
    train_net(model, optimizer, 0, 2)
    states = get_state_dict(model, optimizer, options=ALL_HAVE)
    assert_is_after(2, model, optimizer, min_dims=1)
    # torch cannot cut a full tensor over uneven shards of tensor-parallel parts, and says so.
    refused = "tp" in case.names and case.extents == (2, 2)
    for options in (ALL_HAVE, FIRST_SENDS):
        with torch.device("meta" if options is FIRST_SENDS else "cpu"):
            target = case(net(1))
        heard = states if options is ALL_HAVE or dist.get_rank() == 0 else ({}, {})
        heard = copy.deepcopy(heard)  # the optimizer takes the step counts as they are
        if refused and options is ALL_HAVE:
            with pytest.raises(AssertionError):
                set_model_state_dict(target, heard[0], options=options)
            target.load_state_dict(heard[0])
            assert_equal(target.state_dict(), states[0])
            continue
        set_model_state_dict(target, heard[0], options=options)
        assert_equal(target.state_dict(), states[0])
        target_optimizer = adam(target, min_dims=1)
        set_optimizer_state_dict(target, target_optimizer, heard[1], options=options)
        assert_equal(
            get_optimizer_state_dict(target, target_optimizer, options=ALL_HAVE), states[1]
        )
        train_net(target, target_optimizer, 2, 4)
        assert_is_after(4, target, target_optimizer, min_dims=1)


@pytest.mark.brief(2)
@places
def test_full_states(name: str) -> None:
    run_ranks(gathered, CASES[name].num_ranks, CASES[name])


def write(case: Case, folder: Path) -> None:
    model = case(net(0))
    optimizer = adam(model)
    train_net(model, optimizer, 0, 2)
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
    train_net(model, optimizer, 2, 4)
    assert_is_after(4, model, optimizer)


@pytest.mark.brief(1)
@pytest.mark.parametrize("name", ROUTES)
def test_from_mesh_to_mesh(tmp_path: Path, name: str) -> None:
    run_ranks(write, CASES[name].num_ranks, CASES[name], tmp_path)
    for other in ROUTES[name]:
        run_ranks(read, CASES[other].num_ranks, CASES[other], tmp_path)
    run_ranks(read, 1, None, tmp_path)
