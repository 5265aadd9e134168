"""The ``grad_dtype`` of a parameter stays when that is converted, made real, loaded or copied."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import full
from on_ranks import on_ranks
from torch import nn

from composable_shard import fully_shard
from composable_shard.testing import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
VALUES = torch.arange(16.0).view(4, 4) / 7


def make(asked: torch.dtype = BF16) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].weight.grad_dtype = asked
    return model


def fill(model: nn.Sequential) -> nn.Sequential:
    model.load_state_dict({"0.weight": VALUES})
    return model


def assigned(model: nn.Sequential) -> nn.Sequential:
    model.load_state_dict({"0.weight": VALUES.clone()}, assign=True)
    return model


def swapped(change: Callable[[nn.Sequential], nn.Sequential]) -> Any:
    def changed(model: nn.Sequential) -> nn.Sequential:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return change(model)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return changed


def part(model: nn.Sequential) -> nn.Sequential:
    """Convert a module whose parameters belong to the group of the one around it."""
    model[0].double()
    return model


def twice(model: nn.Sequential) -> nn.Sequential:
    return model.double().float()


CHANGES: dict[str, Callable[[nn.Sequential], nn.Sequential]] = {
    "double": nn.Module.double,
    "double, swapped": swapped(nn.Module.double),
    "double, a part": part,
    "double and back": twice,
    "to_empty": lambda model: fill(model.to_empty(device="cpu")),
    "load": fill,
    "load, swapped": swapped(fill),
    "assign": assigned,
    "deepcopy": copy.deepcopy,
    "deepcopy and double": lambda model: copy.deepcopy(model).double(),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle and double": lambda model: pickle.loads(pickle.dumps(model)).double(),
}


def gradient(model: nn.Sequential) -> tuple[torch.dtype | None, torch.dtype, list[float]]:
    """Return what is asked, the dtype of the gradient and its first row, which bf16 rounds."""
    x = torch.full((1, 4), 1 / 3, dtype=model[0].weight.dtype)
    model(x).sum().backward()
    model.reshard()
    weight = model[0].weight
    assert weight.grad is not None
    return weight.grad_dtype, weight.grad.dtype, full(weight.grad)[0].double().tolist()


def change(name: str, when: str) -> object:
    model = make(FP32 if when == "asked later" else BF16)
    fill(fully_shard(model))
    if when == "after a step":
        gradient(model)
        model.zero_grad()
    elif when == "asked later":
        model[0].weight.grad_dtype = BF16
    model = CHANGES[name](model)
    first = gradient(model)
    model.zero_grad()
    assert gradient(model) == first
    return first


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("when", ["before a step", "after a step", "asked later"])
@pytest.mark.parametrize("num_ranks", [2, 1])
def test_what_was_asked_is_kept(name: str, when: str, num_ranks: int) -> None:
    if (name, when) != ("double, a part", "asked later"):
        third = float(torch.tensor(1 / 3).to(BF16))
        found = run_ranks(change, num_ranks, name, when)
        assert found == [(BF16, BF16, [third] * 4)] * num_ranks


# Gradients that are there when a model is converted -----------------------------------------------

CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cpu": lambda model: model.cpu(),
    "to": lambda model: model.to("cpu", BF16),
    "double": nn.Module.double,
    "half": nn.Module.half,
    "own": lambda model: model._apply(lambda tensor: tensor.clone()),
}


def two_layers(asked: torch.dtype | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False)).to(BF16)
    for param in model.parameters():
        param.grad_dtype = asked
    return model


def sharded_layers(asked: torch.dtype | None, *, syncs: bool) -> Any:
    model = two_layers(asked)
    for module in (model[0], model):
        fully_shard(module)  # type: ignore[arg-type]
    model.set_requires_gradient_sync(syncs)  # type: ignore[operator]
    return model


def backward(model: nn.Sequential, value: float) -> None:
    model(torch.full((1, 4), value, dtype=model[0].weight.dtype)).sum().backward()


def state_of(model: nn.Sequential) -> list[Any]:
    state = []
    for param in model.parameters():
        grad = None if param.grad is None else full(param.grad)
        state.append((param.dtype, param.grad_dtype, full(param).detach().clone(), grad))
    return state


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("syncs", [True, False])
@on_ranks(2)
def test_a_conversion_keeps_gradients_and_their_dtype(name: str, syncs: bool) -> None:
    for asked in (FP32, None):
        model, plain = sharded_layers(asked, syncs=syncs), two_layers(asked)
        for one in (model, plain):
            backward(one, 1 / 3)
        kept = [param.grad.float().clone() for param in plain.parameters()]
        for one in (model, plain):
            CONVERSIONS[name](one)
        grads = [full(param.grad) for param in model.parameters()]
        torch.testing.assert_close([grad.float() for grad in grads], kept, rtol=0.0, atol=0.0)
        assert [p.grad_dtype for p in model.parameters()] == [
            p.grad_dtype for p in plain.parameters()
        ]
        model.set_requires_gradient_sync(True)
        for one in (model, plain):
            backward(one, 1.0)
        model.reshard()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.dtype == other.dtype and param.grad.dtype == (asked or param.grad.dtype)
            torch.testing.assert_close(
                full(param.grad), other.grad, check_dtype=False, rtol=1e-2, atol=1e-2
            )


@pytest.mark.parametrize("fails", ["function", "exchange"])
@on_ranks(2)
def test_a_conversion_that_fails_changes_nothing(fails: str) -> None:
    model, count = sharded_layers(FP32, syncs=True), 0
    backward(model, 1 / 3)
    model.reshard()
    before = state_of(model)
    last = weakref.ref(model[1].weight) if fails == "exchange" else None  # torch refuses it

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        if fails == "function" and count == 2:
            raise RuntimeError("Couldn't swap")
        return tensor.double()

    with pytest.raises(RuntimeError, match="Couldn't swap"):
        model._apply(convert)
    after = state_of(model)
    for old, new in zip(before, after, strict=True):
        assert old[:2] == new[:2]
        assert torch.equal(old[2], new[2]) and torch.equal(old[3], new[3])
    del last
    backward(model.double(), 1 / 3)
