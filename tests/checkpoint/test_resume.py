"""``torch.distributed.checkpoint``: saved on some ranks, loaded on others, training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
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

from checkpoint.models import (
    OPTIMIZERS,
    Model,
    State,
    assert_equal,
    plain_values,
    shard,
    three_ranks,
    train,
)
from composable_shard import fully_shard
from composable_shard.testing import run_ranks

SAVE_AFTER, STOP_AFTER = 2, 4


def new(seed: int, columns: int, sharded: bool = True) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Model(columns)
    if sharded:
        shard(model)
    return model, OPTIMIZERS["groups"](model)


def states(model: nn.Module, optimizers: list[Optimizer]) -> State:
    """Return what is saved, in a form whose optimizer part has no lists to be cut in files."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizers),
        "step": SAVE_AFTER,
    }


def save(folder: Path, columns: int) -> State:
    """Train, save, and return what was saved and what training came to."""
    model, optimizers = new(0, columns)
    train(model, optimizers, 0, SAVE_AFTER)
    saved = states(model, optimizers)
    assert all(isinstance(t, DTensor) for n, t in model.named_parameters())
    dcp.save(saved, checkpoint_id=folder)
    return plain_values(saved)


def uninterrupted(columns: int) -> tuple[State, State]:
    """States of the unsharded model: when it is saved, and at the end."""
    model, optimizers = new(0, columns, sharded=False)
    train(model, optimizers, 0, SAVE_AFTER)
    saved = plain_values(states(model, optimizers))
    train(model, optimizers, SAVE_AFTER, STOP_AFTER)
    return saved, plain_values(states(model, optimizers))


def resume(folder: Path, columns: int) -> tuple[State, State]:
    """Return the state as loaded, and as trained on."""
    model, optimizers = new(9, columns)
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
        made = []
        for seed, sharder in enumerate((writer, reader)):
            torch.manual_seed(seed)
            model = shard(Model(), sharder)
            made.append((model, OPTIMIZERS["groups"](model)))
        train(*made[0], 0, SAVE_AFTER)
        dcp.save(states(*made[0]), checkpoint_id=place)
        read = states(*made[1])
        dcp.load(read, checkpoint_id=place)
        set_model_state_dict(made[1][0], read["model"])
        set_optimizer_state_dict(*made[1], read["optimizer"])
        plain = shard(Model(), reader)
        plain.load_state_dict(made[0][0].state_dict())  # shards are the same, so they fit
        assert_equal(plain.state_dict(), made[0][0].state_dict())
        train(*made[1], SAVE_AFTER, STOP_AFTER)
        assert_equal(plain_values(states(*made[1])), expected)


def saved_beside_training(folder: Path, stager: str) -> State:
    model, optimizers = new(0, 7)
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
