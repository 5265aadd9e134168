"""Hooks that read torch's private state of a sharded module, as those of Transformer Engine do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from composable_shard import ShardError, fully_shard
from composable_shard.testing import fake_ranks, run_ranks

Moment = tuple[str, str, bool]
KEY = "_cached_parent_fsdp_state"


def state_seen_by(module: nn.Module) -> Any:
    """Find the state of a module or of the smallest one with a state around it, and keep it."""
    if hasattr(module, "_get_fsdp_state"):
        return module._get_fsdp_state()
    if KEY not in module.__dict__:
        around = [m for m in _module_state_mapping if module in m.modules()]
        nearest = min(around, key=lambda m: len(list(m.modules())))
        assert isinstance(nearest, TorchFSDPModule)
        module.__dict__[KEY] = nearest._get_fsdp_state()
    return module.__dict__[KEY]


def moment_of(module: nn.Module) -> Moment:
    """What hooks make of the state: which pass it is, and whether backward will gather anew."""
    group = state_seen_by(module)._fsdp_param_group
    training = group._training_state
    moments = [
        moment.name
        for moment in TrainingState
        if training == moment and moment == training and training in (moment,)
    ]
    assert len(moments) == 1
    return type(module).__name__, moments[0], group._reshard_after_forward


def watch(weight: nn.Parameter, seen: list[Moment]) -> None:
    """Give a sharded weight hooks that read the state of its module."""
    local = weight._local_tensor

    def pre(mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        seen.append(moment_of(module))
        return (local.detach(),), None

    def post(outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post


def moments_of_training(shard: Callable[..., Any]) -> list[list[Moment]]:
    """Train three blocks; the weight of the first belongs to a module that is not sharded."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 4))
    for block in model:
        shard(block)
    shard(model)
    seen: list[Moment] = []
    for weight in (model[0][0].weight, model[1].weight, model[2].weight):
        watch(weight, seen)
    iterations = []
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        iterations.append(list(seen))
        seen.clear()
    model[1].unshard()
    iterations.append(list(seen))
    return iterations


def test_the_moments_are_those_of_torch() -> None:
    """But that backward may use what forward gathered, so that a hook must send all of it."""
    ours, theirs = (
        run_ranks(moments_of_training, 2, shard)[0] for shard in (fully_shard, torch_fully_shard)
    )
    kinds = {(kind, reshards) for iteration in theirs for kind, _, reshards in iteration}
    assert kinds == {("Linear", True), ("FSDPLinear", True)}
    gathers = [[(kind, moment) for kind, moment, _ in iteration] for iteration in theirs]
    assert [[(kind, moment) for kind, moment, _ in iteration] for iteration in ours] == [
        gathers[0],
        # From the second iteration on the last block stays for backward.
        [*gathers[1][:3], *gathers[1][4:]],
        gathers[2],
    ]
    assert not any(reshards for iteration in ours for _, _, reshards in iteration)


def text(name: str) -> str:
    return (
        "Expected to read only _training_state, _fsdp_param_group, _fsdp_param_groups, _comm_ctx, "
        "_reshard_after_forward, is_unsharded of torch's private state of the root group, "
        f"got {name}; use the methods of composable_shard.FSDPModule"
    )


def test_the_state_is_for_reading_a_little_alone() -> None:
    with fake_ranks(2):
        state = fully_shard(nn.Linear(4, 4))._get_fsdp_state()
        (group,) = state._fsdp_param_groups
        assert state._training_state == TrainingState.IDLE
        assert hash(state._training_state) == hash(TrainingState.IDLE)
        assert not hasattr(state, "_mp_policy")
        with pytest.raises(ShardError) as caught:
            state._is_last_backward = True
        assert str(caught.value) == text("_is_last_backward")
        with pytest.raises(ShardError) as caught:
            _ = group.fsdp_params
        assert str(caught.value) == text("fsdp_params")
