"""Sharded modules under ``torch.func``: other parameters for a call, and its transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from nets import (
    Net,
    assert_parity,
    assert_same,
    assert_trains_alike,
    average_gradients,
    own_input,
    shard_net,
)
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vjp, vmap

from composable_shard import ShardError
from composable_shard.insight.events import record_events


def pair(reshard: bool | None, warm: bool) -> tuple[Net, Net]:
    """Return an unsharded and a sharded model; the order of the latter is known if it is warm."""
    torch.manual_seed(0)
    reference = Net(2)
    model = shard_net(copy.deepcopy(reference), reshard_after_forward=reshard)
    if warm:
        model(own_input()).sum().backward()
        model.zero_grad()
    return reference, model


# functional_call ----------------------------------------------------------------------------------


def loss_of(model: nn.Module, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return functional_call(model, params, (x,)).square().sum()


def doubled(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() * 2 for name, param in model.named_parameters()}


def per_sample(model: nn.Module, params: dict[str, torch.Tensor]) -> Any:
    return vmap(grad(partial(loss_of, model)), in_dims=(None, 0))(params, own_input())


def through_autograd(model: nn.Module, params: dict[str, torch.Tensor]) -> Any:
    leaves = {name: param.clone().requires_grad_() for name, param in params.items()}
    loss = loss_of(model, leaves, own_input())
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def one_step_ahead(model: nn.Module, params: dict[str, torch.Tensor]) -> Any:
    def after_a_step(params: dict[str, torch.Tensor]) -> torch.Tensor:
        grads = grad(partial(loss_of, model))(params, own_input(0))
        ahead = {name: param - 0.01 * grads[name] for name, param in params.items()}
        return loss_of(model, ahead, own_input(1))

    return grad(after_a_step)(params)


FULL: list[Callable[[nn.Module, dict[str, torch.Tensor]], Any]] = [
    lambda model, params: {"loss": loss_of(model, params, own_input())},
    lambda model, params: grad(partial(loss_of, model))(params, own_input()),
    per_sample,
    through_autograd,
    one_step_ahead,
]


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(2)
def test_functional_call_with_full_tensors(reshard: bool | None, warm: bool) -> None:
    """Computes with what it is given; nothing is gathered."""
    for call in FULL:
        reference, model = pair(reshard, warm)
        params = doubled(reference)
        with record_events(model) as recorded:
            got = call(model, params)
        assert recorded == []
        for name, wanted in call(reference, params).items():
            torch.testing.assert_close(got[name], wanted)
        assert all(isinstance(p, DTensor) for p in model.parameters()) or reshard is not True
        assert_trains_alike(model, reference, 1)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks("ranks")
def test_functional_call_with_sharded_tensors(reshard: bool | None, warm: bool) -> None:
    """Evaluate with other sharded parameters, such as an average of the model's own."""
    reference, model = pair(reshard, warm)
    for _ in range(2):
        with torch.no_grad():
            got = functional_call(model, doubled(model), (own_input(),))
            wanted = functional_call(reference, doubled(reference), (own_input(),))
        assert_same(got, wanted)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_trains_alike(model, reference, 1)


PARTLY = (
    "Expected torch.func.functional_call to replace all parameters of {} by full tensors, or "
    "none, got {}; call reshard() before you pass sharded ones"
)
FOREIGN = (
    "Expected the parameters of {} as fully_shard made them, got a plain tensor for {}; change "
    "values by load_state_dict or in place"
)
TEXTS = {
    "partly": PARTLY.format("group 'blocks.0'", ["up.weight"]),
    "sharded": PARTLY.format("group 'blocks.0'", ["up.weight", "up.bias"]),
    "foreign": FOREIGN.format("group 'blocks.0'", "'up.weight'"),
}


@pytest.mark.parametrize("kind", TEXTS)
@on_ranks(2)
def test_parameters_of_somebody_else_are_refused(kind: str) -> None:
    reference, model = pair(None, True)
    block, own = model.blocks[0], model.blocks[0].up.weight
    with pytest.raises(ShardError) as caught:
        if kind == "partly":
            functional_call(model, {"blocks.0.up.weight": torch.ones(13, 6)}, (own_input(),))
        elif kind == "sharded":
            params = {f"blocks.0.{n}": p for n, p in doubled(block).items() if n.startswith("up")}
            block.unshard()
            functional_call(model, params, (own_input(),))
        else:
            block.up.weight = nn.Parameter(torch.ones(13, 6))
            model(own_input())
    if kind == "foreign":
        block.up.weight = own
    model.reset_iter_state()
    assert_trains_alike(model, reference, 1)
    assert str(caught.value) == TEXTS[kind]


# Transforms ---------------------------------------------------------------------------------------


def row(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


TRANSFORMS: list[Callable[[nn.Module], Any]] = [
    lambda model: grad(partial(row, model))(own_input()),
    lambda model: grad_and_value(partial(row, model))(own_input())[1],
    lambda model: vmap(grad(partial(row, model)))(own_input()),
    lambda model: vjp(model, own_input())[1](torch.ones(3, 3))[0],
    lambda model: jacrev(partial(row, model))(own_input()),
    lambda model: vmap(model)(own_input().unsqueeze(1)).detach(),
    lambda model: grad(lambda x: grad(partial(row, model))(x).square().sum())(own_input()),
]


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(2)
def test_transforms_of_sharded_modules(reshard: bool | None, warm: bool) -> None:
    for transform in TRANSFORMS:
        reference, model = pair(reshard, warm)
        torch.testing.assert_close(transform(model), transform(reference))
        assert_trains_alike(model, reference, 1)


def tangent(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return jvp(function, (x,), (torch.ones_like(x),))[1].square().sum()


FROM_OUTSIDE: list[Callable[[nn.Module, torch.Tensor], torch.Tensor]] = [
    tangent,
    lambda model, x: tangent(lambda t: model(x) * t, torch.ones(3, 3)),
    lambda model, x: tangent(lambda t: tangent(lambda u: model(x) * t * u, t), torch.ones(3, 3)),
    lambda model, x: grad(lambda t: (model(x) * t).sum())(torch.ones(3, 3)).square().sum(),
]


@pytest.mark.parametrize("reshard", [False, None])
@on_ranks(2)
def test_an_input_from_outside_of_a_transform_may_need_a_gradient(reshard: bool | None) -> None:
    for run in FROM_OUTSIDE:
        reference, model = pair(reshard, warm=True)
        grads = []
        for one in (model, reference):
            x = own_input().requires_grad_()
            run(one, x * 2).backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads)
        average_gradients(reference.parameters())
        model.reshard()
        assert_parity(model, reference)
