"""State dicts in the middle of compute, and users' own ways to save and to load."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from launches import counted
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from checkpoint.models import (
    State,
    all_ranks,
    assert_equal,
    plain_model,
    same_on_all_ranks,
    sharded_model,
    three_ranks,
)
from checkpoint.optimizers import OPTIMIZERS
from composable_shard import fully_shard
from composable_shard.insight.events import record_events


@pytest.mark.brief(1)
@all_ranks
@on_ranks("num_ranks")
def test_within_compute() -> None:
    """Take the state in every hook of a step: it is sharded, and the step goes on as it was."""
    plain, model, quiet = plain_model(0), sharded_model(0), sharded_model(0)
    values = plain.state_dict()
    seen: list[tuple[str, State]] = []
    launched: list[str] = []

    def look(where: str) -> Any:
        def hook(*_: object) -> None:
            with counted() as here:
                registered = {id(param) for param in model.parameters()}
                seen.append((where, model.state_dict()))
                seen.append((where, model.outer.inner.state_dict(prefix="outer.inner.")))
                assert registered == {id(param) for param in model.parameters()}
            launched.extend(here)

        return hook

    for where in ("outer", "outer.inner", "outer.inner.up", "wide", "head"):
        model.get_submodule(where).register_forward_pre_hook(look(f"before {where}"))
        model.get_submodule(where).register_forward_hook(look(f"after {where}"))
        model.get_submodule(where).register_full_backward_hook(look(f"backward of {where}"))
    # A look takes what it finds: what is gathered, freed and reduced is what it would be without.
    recorded = []
    for one in (quiet, model):
        with record_events(one) as events:
            for step in range(3):
                one(same_on_all_ranks(step)).square().sum().backward()
        recorded.append(events)
    assert recorded[0] == recorded[1]
    assert launched == []
    assert len(seen) == 2 * 3 * 15
    for where, state in seen:
        for name, tensor in state.items():
            if name in dict(plain.named_parameters(remove_duplicate=False)):
                assert isinstance(tensor, DTensor) and tensor.to_local().is_contiguous(), where
                assert_equal(tensor, values[name], f"{where}: {name}")
    for one in (quiet, model):
        OPTIMIZERS["adam-foreach"](one)[0].step()
    assert_equal(model.state_dict(), quiet.state_dict())


class Described(nn.Module):
    """Saves itself as its own class says, with a name of its own for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(4, 3))
        self.bias = nn.Parameter(torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "kernel"] = destination.pop(prefix + "weight") * 2
        destination[prefix + "kind"] = "described"

    def _load_from_state_dict(self, state: State, prefix: str, *args: Any) -> None:
        state = dict(state)
        assert state.pop(prefix + "kind", "described") == "described"
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel") / 2
        super()._load_from_state_dict(state, prefix, *args)

    def state_dict(self, *args: Any, **kwargs: Any) -> State:
        state = super().state_dict(*args, **kwargs)
        state["of"] = "its own"
        return state

    def load_state_dict(self, state: State, *args: Any, **kwargs: Any) -> Any:
        state = dict(state)
        state.pop("of", None)
        return super().load_state_dict(state, *args, strict=False)


@three_ranks
@pytest.mark.parametrize("kept_unsharded", [False, True])
@on_ranks("num_ranks")
def test_modules_that_save_themselves(kept_unsharded: bool) -> None:
    model, other = (nn.Sequential(Described(), Described()) for _ in range(2))
    expected = model.state_dict()
    for one in (model, other):
        fully_shard(one[0], reshard_after_forward=not kept_unsharded)
        fully_shard(one, reshard_after_forward=not kept_unsharded)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
        model[0](torch.ones(2, 3))
    state = model.state_dict()
    for name, value in state.items():
        assert isinstance(value, DTensor) == name.endswith(("kernel", "bias")), name
    assert_equal(state, expected)
    own = {k[2:]: v for k, v in state.items() if k.startswith("0.")}
    for given in (own, Described().state_dict()):  # shards, and full tensors
        other[0].load_state_dict(given)
        assert_equal(other[0].state_dict(), model[0].state_dict())
    assert torch.equal(full(other[0].weight).detach(), torch.arange(12.0).view(4, 3))


@on_ranks(2)
def test_hooks_run_in_their_order() -> None:
    calls: list[tuple[str, str]] = []
    linear = nn.Linear(3, 4)

    def saw(what: str, value: object) -> None:
        calls.append((what, type(value).__name__))

    def register(module: nn.Module, when: str) -> None:
        module.register_state_dict_pre_hook(lambda m, *_: saw(f"save {when}", m.weight))
        module.register_state_dict_post_hook(
            lambda m, state, prefix, _: saw(f"saved {when}", state[prefix + "weight"])
        )
        module.register_load_state_dict_pre_hook(
            lambda m, state, prefix, *_: saw(f"load {when}", state[prefix + "weight"])
        )
        module.register_load_state_dict_post_hook(lambda m, _: saw(f"loaded {when}", m.weight))

    register(linear, "before")
    model = fully_shard(nn.Sequential(linear))
    register(linear, "after")
    model.unshard()
    assert type(linear.weight) is nn.Parameter
    state = model.state_dict()
    plain = {name: full(tensor) for name, tensor in state.items()}
    model.unshard()
    model.load_state_dict(plain)
    sharded = "DTensor"
    whats = ("save", "saved", "load", "loaded")
    expected = [(f"{what} {when}", sharded) for what in whats for when in ("before", "after")]
    expected[4] = ("load before", "Tensor")
    assert calls == expected


@on_ranks(2)
def test_hooks_that_make_full_tensors() -> None:
    """A load hook that makes full tensors of what an older checkpoint holds."""

    def from_old(m: nn.Module, state: State, prefix: str, *_: Any) -> None:
        old = state.pop(f"{prefix}old", None)
        if old is not None:
            state[f"{prefix}weight"], state[f"{prefix}bias"] = old[:, :3], old[:, 3]

    before, after, old = nn.Linear(3, 4), nn.Linear(3, 4), torch.arange(16.0).view(4, 4)
    before.register_load_state_dict_pre_hook(from_old)
    for module in (before, after):
        fully_shard(module)
    after.register_load_state_dict_pre_hook(from_old)
    before.load_state_dict({"old": old})
    assert torch.equal(full(before.weight).detach(), old[:, :3])
    assert torch.equal(full(before.bias).detach(), old[:, 3])
    with pytest.raises(RuntimeError) as caught:
        after.load_state_dict({"old": old})
    assert "got mixed torch.Tensor and DTensor" in str(caught.value)
    assert 'While copying the parameter named "weight"' in str(caught.value)


@on_ranks(2)
def test_parametrizations() -> None:
    from torch.nn.utils.parametrizations import weight_norm

    models = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(weight_norm(nn.Linear(3, 5)), nn.Linear(5, 2))
        if sharded:
            fully_shard(model[0])
            fully_shard(model)
        models.append(model)
    plain, model = models
    state = {name: t.clone() + 1 for name, t in plain.state_dict().items()}
    for one in models:
        one.load_state_dict(state)
    assert_equal(model.state_dict(), plain.state_dict())
    assert_equal(get_model_state_dict(model), get_model_state_dict(plain))
    set_model_state_dict(model, get_model_state_dict(model))
    x = torch.ones(2, 3)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_tied_parameters_that_were_given_back() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    plain[1][0].weight = plain[0].weight
    model = copy.deepcopy(plain)
    fully_shard(model[1])
    fully_shard(model)
    states = []
    model[1][1].register_forward_hook(lambda *_: states.append(model.state_dict()))
    x, state = torch.ones(2, 3), {name: t + 1 for name, t in plain.state_dict().items()}
    for one in (plain, model):
        one.load_state_dict(state)
    for _ in range(2):
        assert torch.equal(model(x), plain(x))
        for state in states:
            assert_equal(state, plain.state_dict())
    assert_equal(model.state_dict(), plain.state_dict())
