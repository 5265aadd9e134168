"""``get_model_state_dict`` and its kin: as torch's own sharded model and the unsharded one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.tensor import DTensor

from checkpoint.models import (
    all_ranks,
    assert_equal,
    is_exact,
    structure,
    three_models,
    three_ranks,
    train,
)
from checkpoint.optimizers import OPTIMIZERS
from composable_shard.testing import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "cpu": {"cpu_offload": True},
    "full-cpu": {"full_state_dict": True, "cpu_offload": True},
    "without-frozen": {"ignore_frozen_params": True},
    "full-without-frozen": {"full_state_dict": True, "ignore_frozen_params": True},
    "not-strict": {"strict": False},
    "flat": {"flatten_optimizer_state_dict": True},
    "full-flat": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "full-cpu-flat": {
        "full_state_dict": True,
        "cpu_offload": True,
        "flatten_optimizer_state_dict": True,
    },
}

FROZEN = "outer.inner.up.weight"


def dtensors(state: Any) -> list[DTensor]:
    if isinstance(state, dict):
        return [one for value in state.values() for one in dtensors(value)]
    return [state] if isinstance(state, DTensor) else []


@all_ranks
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@on_ranks("num_ranks")
def test_options(options: dict[str, Any]) -> None:
    """Get the three states of the three models after two steps of training."""
    states = []
    for model in three_models():
        optimizers = OPTIMIZERS["adam-foreach"](model)
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


def of_submodules(keep_prefixes: bool, full_state: bool) -> list[str]:
    states = []
    for model in three_models():
        options = StateDictOptions(
            keep_submodule_prefixes=keep_prefixes, full_state_dict=full_state
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Getting submodules only", FutureWarning)
            states.append(
                get_model_state_dict(model, submodules={model.outer.inner}, options=options)
            )
    plain, ours, theirs = states
    assert structure(ours) == structure(theirs)
    assert_equal(ours, plain)
    return list(ours)


@three_ranks
@pytest.mark.parametrize("full_state", [False, True])
def test_submodules(num_ranks: int, full_state: bool) -> None:
    names = ["up.weight", "up.bias", "down.weight", "down.bias", "gate.weight"]
    for keys in run_ranks(of_submodules, num_ranks, False, full_state):
        assert keys == names
    for keys in run_ranks(of_submodules, num_ranks, True, full_state):
        assert keys == [f"outer.inner.{name}" for name in names]
