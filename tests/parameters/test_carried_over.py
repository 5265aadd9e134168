"""What users hung on a parameter is there on the sharded one, and acts on its gradient."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes.compare import Oracle, gradient_differences, value_differences
from on_ranks import on_ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import two_tensor_hooks

from composable_shard import ShardError, fully_shard, unsharded
from composable_shard.testing import fake_ranks

WIDTH = 5


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3))


def shard_layers(model: nn.Sequential, **options: object) -> nn.Sequential:
    fully_shard(model[0], **options)
    fully_shard(model[2], **options)
    return fully_shard(model, **options)


def batch(step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


class Tagging(nn.Module):
    """Reads the attributes of its weight in forward, and sets one there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.seen: list[dict[str, object]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = ("before", "between", "inside", "in_backward", "later", "changed")
        self.seen.append({n: getattr(self.weight, n) for n in names if hasattr(self.weight, n)})
        self.weight.inside = len(self.seen)
        self.weight.changed = "inside"
        weight = self.weight

        def note(grad: torch.Tensor) -> torch.Tensor:
            weight.in_backward = True
            return grad

        y = x @ self.weight
        y.register_hook(note)
        return y


def make_tagging(kind: str) -> nn.Sequential:
    """Return two layers whose parameters are plain, or of one class or another."""
    model = nn.Sequential(Tagging(), Tagging())
    for layer in model:
        if kind != "plain":
            layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()))
    return model


@pytest.mark.parametrize("where", ["inner", "root"])
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("kind", ["plain", "two tensors", "two tensors with hooks"])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_an_attribute_of_a_parameter_is_on_both_forms(
    kind: str, reshard: bool | None, where: str
) -> None:
    """Whichever form it is set on, and whenever; the last value counts."""
    with two_tensor_hooks() if kind == "two tensors with hooks" else nullcontext():
        follow_attributes(kind, reshard, where)


def follow_attributes(kind: str, reshard: bool | None, where: str) -> None:
    model = make_tagging(kind)
    own: Any = model[0].weight
    own.before = tags = ["a", "list"]
    own.changed = "before"
    for layer in model if where == "inner" else ():
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    sharded: Any = model[0].weight
    assert sharded.before is tags and sharded.changed == "before"
    sharded.between = 1
    x = torch.randn(2, WIDTH)
    loss = model(x).sum()
    if kind != "plain":  # which are copied when the forms change places
        for module in (model[0], model) if where == "inner" else (model,):
            module.reshard()
    assert (sharded.inside, sharded.changed) == (1, "inside")
    assert not hasattr(sharded, "in_backward")
    loss.backward()
    model.reshard()
    assert sharded.in_backward and model[0].weight is sharded
    sharded.later, sharded.changed = 2, "later"
    with unsharded(model):
        assert model[0].weight.later == 2 and model[0].weight.before is tags
        model[0].weight.opened = True
    assert sharded.opened
    model(x).sum().backward()
    model.reshard()
    del sharded.before
    (model[0] if where == "inner" else model).unshard()
    if kind == "plain":
        assert not hasattr(model[0].weight, "before")
    first = {"before": tags, "between": 1, "changed": "before"}
    second = {"inside": 1, "in_backward": True, "later": 2, "changed": "later"}
    assert model[0].seen == [first, {**first, **second}]


# Hooks on gradients --------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks("ranks")
def test_a_hook_on_a_sharded_parameter_sees_the_reduced_gradient(when: str) -> None:
    """Double one gradient and clip another by hooks, on the model and on its oracle."""
    model = make()
    oracle = Oracle(model)

    def register() -> None:
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[2].bias.register_hook(lambda grad: grad.clamp(-0.1, 0.1))

    if when == "before":
        register()
    shard_layers(model)
    if when == "after":
        register()
    for either in (model, oracle.model):
        either(batch()).square().sum().backward()
    oracle.take()
    oracle.reduce()
    oracle.reduced["0.weight"] *= 2
    oracle.reduced["2.bias"].clamp_(-0.1, 0.1)
    model.reshard()
    assert gradient_differences(dict(model.named_parameters()), oracle) == []


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@on_ranks("ranks")
def test_an_optimizer_in_backward_trains_as_the_oracle(when: str, accumulate: bool) -> None:
    model = make()
    oracle = Oracle(model)
    optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def step(param: nn.Parameter) -> None:
        if param not in optimizers:
            optimizers[param] = torch.optim.SGD([param], lr=0.1, momentum=0.9)
        optimizers[param].step()
        param.grad = None

    if when == "after":
        shard_layers(model)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    if when == "before":
        shard_layers(model)
    optimizer = torch.optim.SGD(oracle.model.parameters(), lr=0.1, momentum=0.9)
    for iteration in range(3):
        for microbatch in range(2 if accumulate else 1):
            model.set_requires_gradient_sync(not accumulate or microbatch == 1)
            for either in (model, oracle.model):
                either(batch(2 * iteration + microbatch)).square().sum().backward()
            oracle.take()
        oracle.reduce()
        oracle.step(optimizer)
        model.reshard()
        assert all(param.grad is None for param in model.parameters())
        assert value_differences(model.named_parameters(), oracle) == []


# Optimizers that were built before -----------------------------------------------------------


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_built_before_is_refused_at_its_next_step(make_optimizer: Any) -> None:
    """One of another model is not."""
    with fake_ranks(2):
        model, other = make(), make()
        optimizers = [make_optimizer(one.parameters(), lr=0.1) for one in (model, other)]
        shard_layers(model)
        before = other[0].weight.clone()
        for one in (model, other):
            one(torch.ones(2, WIDTH)).sum().backward()
        with pytest.raises(ShardError) as caught:
            optimizers[0].step()
        assert str(caught.value) == (
            f"Expected {make_optimizer.__name__} to have sharded parameters, got 4 full ones; "
            "build it after fully_shard, outside unsharded(), not between a forward and its "
            "backward"
        )
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        optimizers[1].step()
        assert not torch.equal(before, other[0].weight)
