"""``set_model_state_dict`` and its kin: what comes back is what was saved, on any option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.common_state_dict import FusionEmbeddingWithModifier

from checkpoint.models import (
    Model,
    State,
    assert_equal,
    is_exact,
    same_on_all_ranks,
    shard,
    structure,
    train,
)
from checkpoint.optimizers import INEXACT, OPTIMIZERS
from composable_shard import fully_shard
from composable_shard.testing import run_ranks
from dist.models import full

FULL = {"full_state_dict": True}
FROM_RANK_0 = {**FULL, "broadcast_from_rank0": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "full": FULL,
    "rank-0": FROM_RANK_0,
    "rank-0-cpu": {**FROM_RANK_0, "cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "full-flat": {**FULL, "flatten_optimizer_state_dict": True},
    "rank-0-flat": {**FROM_RANK_0, "flatten_optimizer_state_dict": True},
}
SHARDERS: dict[str, Callable[..., Any]] = {"ours": fully_shard, "torch": torch_fully_shard}

all_ranks = pytest.mark.parametrize("num_ranks", [1, 2, 3])


def source(sharder: Callable[..., Any] | None, make: str, columns: int = 6) -> Any:
    """Return a model that was trained for two steps, and its optimizers."""
    torch.manual_seed(1)
    model = Model(columns)
    model.epochs = 4
    if sharder is not None:
        shard(model, sharder)
    optimizers = OPTIMIZERS[make](model)
    train(model, optimizers, 0, 2)
    return model, optimizers


def other(sharder: Callable[..., Any], make: str, columns: int = 6) -> Any:
    """Return a model of other values, and optimizers that have not stepped."""
    torch.manual_seed(2)
    model = shard(Model(columns), sharder)
    return model, OPTIMIZERS[make](model)


def heard(state: Any, options: dict[str, Any]) -> Any:
    """Return what this rank has read of the checkpoint."""
    return {} if options.get("broadcast_from_rank0") and dist.get_rank() else state


def restore(sharder: Callable[..., Any], make: str, options: dict[str, Any], columns: int) -> Any:
    """Take the state of one model to another, in one call and in two; return both models' parts."""
    for at_once in (True, False):
        if at_once and options.get("broadcast_from_rank0"):
            continue  # torch: rank 1, whose model state is empty, leaves the model out
        states = get_state_dict(
            *source(sharder, make, columns),
            options=StateDictOptions(
                full_state_dict=options.get("full_state_dict", False),
                flatten_optimizer_state_dict=options.get("flatten_optimizer_state_dict", False),
            ),
        )
        model_state, optimizer_state = (heard(state, options) for state in states)
        model, optimizers = other(sharder, make, columns)
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


def restored(sharder: str, make: str, options: dict[str, Any], columns: int) -> None:
    exact = is_exact() and make not in INEXACT
    plain, plain_optimizers = source(None, make, columns)
    expected = get_state_dict(plain, plain_optimizers)
    for model, optimizers in restore(SHARDERS[sharder], make, options, columns):
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


@all_ranks
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_options(num_ranks: int, options: dict[str, Any]) -> None:
    run_ranks(restored, num_ranks, "ours", "adam-foreach", options, 6)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers(num_ranks: int, make: str) -> None:
    if make == "sgd-without-state":  # torch: nothing to distribute, of which it asks the device
        options = ["sharded"]
    else:
        options = ["sharded", "full", "rank-0", "rank-0-flat"]
    for option in options:
        run_ranks(restored, num_ranks, "ours", make, OPTIONS[option], 6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_uneven_columns(num_ranks: int) -> None:
    for options in OPTIONS.values():
        run_ranks(restored, num_ranks, "ours", "groups", options, 7)
