"""A run that stops and goes on has the bits of one that does not, whatever states it has."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from composable_shard import ShardError, fully_shard
from composable_shard.optim import Owned, Sharded, flat, with_layout
from composable_shard.testing import run_ranks
from optim.whole import Params, Spec, drawn, laid_out, local


class Coded(torch.optim.Optimizer):
    """Has a momentum in float32 and a code in uint8 of each element, whatever the parameter's."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def begin(self, param: torch.Tensor) -> dict[str, Any]:
        return {
            "step": torch.tensor(0.0),
            "momentum": torch.zeros_like(param, dtype=torch.float32),
            "code": torch.zeros_like(param, dtype=torch.uint8),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(self.begin(param))
                grad = param.grad.float()
                state["step"] += 1
                state["momentum"].lerp_(grad, 0.1)
                state["code"].copy_((state["code"].int() + 300 + grad.sign().int()) % 251)
                scale = 1 + state["code"].float() / 256 + state.get("table", torch.zeros(1))[-1]
                param.sub_((state["momentum"] * scale).to(param.dtype), alpha=group["lr"])


class Wrapped(Coded):
    """Has a table besides, and hides all in a dict when it is saved, as bitsandbytes does."""

    def begin(self, param: torch.Tensor) -> dict[str, Any]:
        return {**super().begin(param), "step": 0, "table": torch.linspace(0, 1 / 3, 256)}

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        hidden = {key: {"step": own["step"], "hidden": own} for key, own in saved["state"].items()}
        return {**saved, "state": hidden}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        self.state.clear()
        for key, own in state_dict["state"].items():
            hidden = {name: value for name, value in own["hidden"].items() if name != "step"}
            self.state[params[key]] = {"step": own["step"], **hidden}
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in given.items() if k != "params"})


WAYS: dict[str, Callable[[nn.Module, Any], torch.optim.Optimizer]] = {
    "owned": lambda model, make: with_layout(model, {"*": Owned(make)}),
    "sharded": lambda model, make: with_layout(model, {"*": Sharded(make, is_elementwise=True)}),
    "flat": lambda model, make: flat(make(model.parameters()), elementwise=True),
}


class Torchao:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, params: Any) -> torch.optim.Optimizer:
        return getattr(importlib.import_module("torchao.optim"), self.name)(params, lr=0.01)


# Dtypes and classes -------------------------------------------------------------------------------

SPECS = [Spec((64, 80)), Spec((6, 5)), Spec((4, 64, 32)), Spec((5,))]


def read_again(model: nn.Module, optimizer: Any, make: Any, way: str) -> torch.optim.Optimizer:
    """Save a state dict, and return another optimizer that has loaded it."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    another = WAYS[way](model, make)
    another.load_state_dict(torch.load(file, weights_only=False))
    return another


def go_on(folder: Path, make: Any, way: str, dtype: torch.dtype, first: int) -> None:
    """Train from a checkpoint after ``first`` steps, stop once in between, and save another."""
    plain, model = Params(SPECS).to(dtype), fully_shard(Params(SPECS, seed=first).to(dtype))
    parts = [part for param in plain.parameters() for part in matrices(param.detach(), way)]
    stock, optimizer = make([{"params": parts}]), WAYS[way](model, make)
    if first:
        read = saved(model, optimizer)
        dcp.load(read, checkpoint_id=folder / str(first))
        set_model_state_dict(model, read["model"])
        set_optimizer_state_dict(model, optimizer, read["optimizer"])
    for step in range(first + 3):
        grads = [drawn(spec.shape, step + 1, i).to(dtype) for i, spec in enumerate(SPECS)]
        cut = [part for grad in grads for part in matrices(grad, way)]
        for part, grad in zip(parts, cut, strict=True):
            part.grad = grad
        stock.step()
        if step >= first:
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = laid_out(grad, param)
            optimizer.step()
        if step == first:
            optimizer = read_again(model, optimizer, make, way)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local(param), local(laid_out(expected.detach(), param)))
    ends = saved(model, optimizer)
    for own in ends["optimizer"]["state"].values():
        dtypes = {
            name.rpartition(".")[2]: getattr(state, "dtype", None) for name, state in own.items()
        }
        assert dtypes.get("code", torch.uint8) is torch.uint8
        assert dtypes.get("momentum", torch.float32) is torch.float32
    dcp.save(ends, checkpoint_id=folder / str(first + 3))


def matrices(tensor: torch.Tensor, way: str) -> list[torch.Tensor]:
    return list(tensor) if way == "owned" and tensor.ndim > 2 else [tensor]


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def go_on_uncompiled(*arguments: Any) -> None:
    with mock.patch.object(torch, "compile", lambda function, **_: function):
        go_on(*arguments)


BF16 = torch.bfloat16
KINDS = [
    *((Coded, way, dtype) for way in WAYS for dtype in (torch.float32, BF16)),
    (Wrapped, "owned", BF16),
    (Torchao("AdamW8bit"), "owned", BF16),
    (Torchao("AdamW4bit"), "owned", torch.float32),
    (Torchao("AdamWFp8"), "owned", torch.float32),
]


@pytest.mark.brief(6)
@pytest.mark.parametrize(("make", "way", "dtype"), sorted(KINDS, key=lambda kind: kind[2] != BF16))
def test_states_of_any_dtype_and_class(
    make: Any, way: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also through checkpoints that other numbers of ranks read."""
    if isinstance(make, Torchao):
        pytest.importorskip("torchao")
    for num_ranks, first in ((2, 0), (3, 3)):
        run_ranks(go_on_uncompiled, num_ranks, tmp_path, make, way, dtype, first)


# Parameters without states ------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, num_layers: int) -> torch.Tensor:
        return [self.first, nn.Sequential(self.first, self.second)][num_layers - 1](x)


def branches(way: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = fully_shard(Branches())
    return model, WAYS[way](model, partial(torch.optim.Adam, lr=0.1))


def train(model: Any, optimizer: torch.optim.Optimizer, num_layers: int) -> None:
    for step in range(2):
        model(torch.full((2, 8), 0.1 * step + num_layers), num_layers).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def read_from_a_file(source: Any, target: Any, folder: Path) -> None:
    dcp.save({"optimizer": get_optimizer_state_dict(*source)}, checkpoint_id=folder)
    read = {"optimizer": get_optimizer_state_dict(*target)}
    dcp.load(read, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(*target, read["optimizer"])


def read_in_full(source: Any, target: Any, folder: Path) -> None:
    full = StateDictOptions(full_state_dict=True, strict=False)
    states = get_optimizer_state_dict(*source, options=full)
    set_optimizer_state_dict(*target, states, options=full)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("read", [read_from_a_file, read_in_full])
@on_ranks(2)
def test_a_parameter_without_states_stays_without(
    read: Callable[..., None], way: str, tmp_path: Path
) -> None:
    source, target = branches(way), branches(way)
    train(*source, num_layers=1)
    read(source, target, tmp_path)
    target[0].load_state_dict(source[0].state_dict())
    for model, optimizer in (source, target):
        train(model, optimizer, num_layers=2)
        states = optimizer.state_dict()["state"].values()
        assert [state["step"] for state in states] == [4, 4, 2, 2]
    for param, other in zip(source[0].parameters(), target[0].parameters(), strict=True):
        assert torch.equal(local(param), local(other))


@on_ranks(2)
def test_a_flattened_state_dict_is_refused() -> None:
    model, optimizer = branches("owned")
    train(model, optimizer, num_layers=2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    with pytest.raises(ShardError) as caught:
        set_optimizer_state_dict(*branches("owned"), states, options=options)
    assert str(caught.value) == (
        "Expected states of parameters, got a state dict that has none; torch cannot read a "
        "flattened one (flatten_optimizer_state_dict=True) into an optimizer of with_layout, so "
        "save it without that option"
    )
