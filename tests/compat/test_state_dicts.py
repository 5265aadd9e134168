"""State dicts of wrapped models and of their optimizers: names, values, kinds, who has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as checkpoint
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard.compat.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ModuleWrapPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    always_wrap_policy,
)
from composable_shard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from composable_shard.testing import fake_ranks, run_ranks

CPU = torch.device("cpu")


class Net(nn.Module):
    """Uneven rows, a scalar, a tied layer, buffers, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.body = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
        self.again = self.body
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(self.inp(x))) * self.scale + self.frozen


def trained(policy: Any = always_wrap_policy, **kwargs: Any) -> tuple[Any, Any, Net, Any]:
    """Return a wrapped model and a plain one after the same steps, with their optimizers."""
    torch.manual_seed(0)
    reference = Net()
    model = FSDP(copy.deepcopy(reference), auto_wrap_policy=policy, device_id=CPU, **kwargs)
    optimizers = []
    for either in (model, reference):
        groups = [
            {"params": [p for n, p in either.named_parameters() if "body" not in n], "lr": 0.1},
            {"params": [p for n, p in either.named_parameters() if "body" in n]},
        ]
        optimizers.append(torch.optim.Adam(groups, lr=0.01))
    for step in range(2):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        for either, optimizer in zip((model, reference), optimizers, strict=True):
            either(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers[0], reference, optimizers[1]


def named_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {n: optimizer.state[p] for n, p in model.named_parameters() if p in optimizer.state}


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert not isinstance(got, DTensor)
    torch.testing.assert_close(got, wanted.detach())


@pytest.mark.parametrize("strategy", ShardingStrategy)
@on_ranks(2)
def test_full_states_are_those_of_the_plain_model(strategy: ShardingStrategy) -> None:
    model, optimizer, reference, plain_optimizer = trained(sharding_strategy=strategy)
    states, wanted = model.state_dict(), reference.state_dict()
    assert list(states) == list(wanted)
    assert states._metadata == wanted._metadata
    for key, value in states.items():
        same(value, wanted[key])
    assert states["again.0.weight"] is states["body.0.weight"]  # saved once
    named = FSDP.optim_state_dict(model, optimizer)
    by_name = named_states(reference, plain_optimizer)
    assert list(named["state"]) == list(by_name)
    for name, values in by_name.items():
        for key, value in values.items():
            same(named["state"][name][key], value)
    loads = FSDP.optim_state_dict_to_load(model, optimizer, named, is_named_optimizer=True)
    assert list(loads["state"]) == list(by_name)
    assert [group["params"] for group in loads["param_groups"]] == [
        group["params"] for group in named["param_groups"]
    ]
    assert [group["lr"] for group in named["param_groups"]] == [0.1, 0.01]
    assert [group["params"] for group in named["param_groups"]] == [
        ["scale", "frozen", "inp.weight", "inp.bias", "norm.weight", "norm.bias"],
        ["body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"],
    ]


def there_and_back(
    kind: StateDictType, policies: tuple[Any, Any], loads: StateDictType | None = None
) -> None:
    """Save from one way of wrapping, load into another; local shards need the same one."""
    model, optimizer, _, _ = trained(policies[0])
    with FSDP.state_dict_type(model, kind):
        assert FSDP.get_state_dict_type(model).state_dict_type is kind
        states, named = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    settings = FSDP.get_state_dict_type(model)
    assert settings.state_dict_config == FullStateDictConfig()
    assert settings.optim_state_dict_config == FullOptimStateDictConfig()
    for name, param in model.named_parameters():
        value, moment = states[name], named["state"].get(name, {}).get("exp_avg")
        if kind is StateDictType.FULL_STATE_DICT:
            assert value.shape == param.shape and not isinstance(value, DTensor)
        elif kind is StateDictType.SHARDED_STATE_DICT:
            assert isinstance(value, DTensor) and value.placements == param.placements
        else:
            assert torch.equal(value, param.to_local()) and not isinstance(value, DTensor)
        if moment is not None:
            assert type(moment) is (DTensor if isinstance(value, DTensor) else torch.Tensor)
            assert moment.shape == value.shape
    other = FSDP(Net(), auto_wrap_policy=policies[1], device_id=CPU)
    own = dict(other.named_parameters())
    groups = [[own[name] for name in group["params"]] for group in named["param_groups"]]
    loaded = torch.optim.Adam([{"params": group} for group in groups])
    with FSDP.state_dict_type(other, loads or kind):
        result = other.load_state_dict(states)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        FSDP.optim_state_dict_to_load(other, loaded, named, load_directly=True)
    for name, param in model.named_parameters():
        assert torch.equal(own[name].full_tensor(), param.full_tensor())
        for key, value in optimizer.state.get(param, {}).items():
            got = loaded.state[own[name]][key]
            assert type(got) is type(value)
            if isinstance(value, DTensor):
                assert got.placements == value.placements
                got, value = got.full_tensor(), value.full_tensor()
            assert torch.equal(got, value)
    for buffer, wanted in zip(other.buffers(), model.buffers(), strict=True):
        assert torch.equal(buffer, wanted)
    assert [group["lr"] for group in loaded.param_groups] == [0.1, 0.01]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kind", StateDictType)
def test_what_is_saved_loads(kind: StateDictType, num_ranks: int) -> None:
    run_ranks(there_and_back, num_ranks, kind, (always_wrap_policy, None))
    if num_ranks == 2:
        run_ranks(there_and_back, 2, kind, (None, ModuleWrapPolicy({nn.Sequential})))
    if kind is StateDictType.FULL_STATE_DICT:  # full tensors are loaded whatever the type
        policies = (always_wrap_policy, always_wrap_policy)
        run_ranks(there_and_back, num_ranks, kind, policies, StateDictType.LOCAL_STATE_DICT)


@on_ranks(2)
def test_only_the_first_rank_has_full_states_if_asked() -> None:
    model, optimizer, reference, _ = trained()
    root = nn.Sequential(nn.Linear(4, 4), model)
    with FSDP.state_dict_type(
        root,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    ):
        states, named = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        around = list(root.state_dict())
    wanted, plain = reference.state_dict(), ["0.weight", "0.bias"]
    if dist.get_rank() == 0:
        assert list(named) == ["state", "param_groups"]
        assert around == plain + [f"1.{key}" for key in wanted]
        assert list(states) == list(wanted)
        for key, value in wanted.items():
            same(states[key], value)
    else:
        assert (states, named, around) == ({}, {}, plain)


@on_ranks(2)
def test_names_in_torch_distributed_checkpoint() -> None:
    model, optimizer, reference, plain_optimizer = trained()
    root, around = nn.Sequential(model), nn.Sequential(reference)
    for ours, theirs in ((model, reference), (root, around)):
        wanted = checkpoint.get_model_state_dict(theirs)
        for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
            with FSDP.state_dict_type(ours, kind):
                states = checkpoint.get_model_state_dict(ours)
                assert list(states) == list(wanted)
                checkpoint.set_model_state_dict(ours, states)
        mine = checkpoint.get_optimizer_state_dict(ours, optimizer)
        assert list(mine["state"]) == list(
            checkpoint.get_optimizer_state_dict(theirs, plain_optimizer)["state"]
        )
        checkpoint.set_optimizer_state_dict(ours, optimizer, mine)


def raised(call: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return str(caught.value)


def test_messages() -> None:
    full_state, only_first = (
        StateDictType.FULL_STATE_DICT,
        FullOptimStateDictConfig(rank0_only=True),
    )
    on_host = LocalStateDictConfig(offload_to_cpu=True)
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    with fake_ranks(2):
        one, two = (FSDP(nn.Linear(2, 2), device_id="cpu") for _ in range(2))
        model, own = nn.Sequential(one, two), torch.optim.SGD(two.parameters())
        FSDP.set_state_dict_type(one, StateDictType.LOCAL_STATE_DICT, on_host)

        def load(state: dict[str, Any], *groups: dict[str, Any]) -> Any:
            named = {"state": state, "param_groups": list(groups)}
            return lambda: FSDP.optim_state_dict_to_load(two, own, named)

        def load_on_first() -> None:
            FSDP.set_state_dict_type(two, full_state, optim_state_dict_config=only_first)
            load({})()

        cases: dict[str, Any] = {
            "Expected state_dict_type to be a StateDictType, got str: 'full'": lambda: (
                FSDP.set_state_dict_type(model, "full")
            ),
            "Expected the config for StateDictType.FULL_STATE_DICT to be a FullStateDictConfig, "
            "got ShardedStateDictConfig: ShardedStateDictConfig(offload_to_cpu=False)": (
                lambda: FSDP.set_state_dict_type(model, full_state, ShardedStateDictConfig())
            ),
            "Expected one kind of state dicts in all wrappers of Sequential, got 2 kinds: ": (
                lambda: FSDP.get_state_dict_type(model)
            ),
            "Expected one kind of state dicts in all wrappers of Linear, got no wrapper; call "
            "set_state_dict_type on a module with wrappers, and on all of it": (
                lambda: FSDP.get_state_dict_type(nn.Linear(1, 1))
            ),
            "Expected parameters of FullyShardedDataParallel in the optimizer, got others": (
                lambda: FSDP.optim_state_dict(two, other)
            ),
            "Expected states of the optimizer's parameters, got some of ['gain']": (
                load({"gain": {}, "weight": {}})
            ),
            "Expected a group in param_groups with ['weight'], as optim_state_dict returns them, "
            "got groups of []": load({}),
            "Expected a group in param_groups with ['weight'], as optim_state_dict returns them, "
            "got groups of [['other']]": load({}, {"params": ["other"]}),
            "Expected the optimizer's states on every rank, got rank0_only=True": load_on_first,
        }
        for text, call in cases.items():
            got = raised(call)
            assert got.startswith(text) if text.endswith(": ") else got == text


@on_ranks(2)
def test_shards_of_other_ranks_are_refused() -> None:
    model = FSDP(nn.Linear(3, 4, bias=False), device_id=CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = model.weight.to_local().clone()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        named, of_four = FSDP.optim_state_dict(model, optimizer), torch.ones(1, 3)
        named["state"]["weight"]["momentum_buffer"] = of_four
        with pytest.raises(RuntimeError) as of_model:
            model.load_state_dict({"weight": of_four})
        text = raised(lambda: FSDP.optim_state_dict_to_load(model, optimizer, named))
    assert torch.equal(model.weight.to_local(), before)
    assert str(of_model.value) == (
        "Error(s) in loading state_dict for FullyShardedDataParallel:\n\tsize mismatch for "
        "weight: copying a param with shape torch.Size([1, 3]) from checkpoint, the shape in "
        "current model is torch.Size([4, 3])."
    )
    assert text == (
        "Expected the shard of 'momentum_buffer' of 'weight' to have shape [2, 3], got [1, 3]; "
        "load local shards on as many ranks as saved them, or full or sharded states"
    )
