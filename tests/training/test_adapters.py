"""Frozen bases with adapters, frozen at the first forward and trained later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nets import assert_same, average_gradients, own_input
from on_ranks import on_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Adapted(nn.Module):
    """A frozen layer and a correction of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        for block in self.blocks:
            x = block(x)
        return x


class Rounding(nn.Module):
    """The oracle under mixed precision: parameters and inputs are rounded by hand."""

    def __init__(self, model: Model, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype or torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lent = {name: param.to(self.dtype) for name, param in self.model.named_parameters()}
        return torch.func.functional_call(self.model, lent, (x.to(self.dtype),))


def train(policy: MixedPrecisionPolicy, apart: bool, reshard: bool | None) -> list[list[str]]:
    torch.manual_seed(0)
    model = Model()
    oracle = Rounding(copy.deepcopy(model), policy.param_dtype)
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard}
    fully_shard(model.frozen, **options)
    for block in model.blocks:
        if apart:
            fully_shard(block.base, **options)
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, oracle)]
    reduced = []
    for step in range(4):
        if step == 2:
            model.reshard()
            for one in (model, oracle.model):
                one.blocks[0].base.requires_grad_(True)
                one.frozen.weight.requires_grad_(True)
                one.blocks[1].up.requires_grad_(False)
        with record_events(model, "reduce_scatter") as recorded:
            loss = model(own_input(step)).float().square().sum()
            loss.backward()
        expected = oracle(own_input(step)).float().square().sum()
        expected.backward()
        assert_same(loss, expected.detach())
        average_gradients(oracle.parameters())
        for (name, param), wanted in zip(
            model.named_parameters(), oracle.model.parameters(), strict=True
        ):
            assert (param.grad is None) == (wanted.grad is None), name
            if param.grad is not None:
                assert param.grad.dtype == torch.float32
                assert_same(param.grad, wanted.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        reduced.append([name for _, name in recorded])
    return reduced


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), LOW], ids=["fp32", "bf16"])
def test_lora_then_unfrozen_parameters(
    policy: MixedPrecisionPolicy, apart: bool, reshard: bool | None
) -> None:
    """A group without a trainable parameter sends no gradients; a thawed one does at once."""
    adapters = ["blocks.1", "blocks.0"]
    later = ["blocks.1", "blocks.0.base", "blocks.0", "frozen"] if apart else [*adapters, "frozen"]
    wanted = [adapters, adapters, later, later]
    assert run_ranks(train, 2, policy, apart, reshard) == [wanted] * 2


class Wrapped(nn.Module):
    """Adapters that were put around a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@on_ranks(2)
def test_new_adapters_of_a_sharded_base_are_sharded_alone() -> None:
    """What else one may try says so; the gradients are those of the unsharded model."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    model = fully_shard(copy.deepcopy(reference))
    model(own_input())
    for one in (reference, model):
        torch.manual_seed(1)
        one[0], one[1] = Wrapped(one[0]), Wrapped(one[1])
    for wrapper, hint in (
        (model[0], "where a sharded base was wrapped shard the new adapters alone"),
        (model, "shard what was added to it, such as new adapters, alone"),
    ):
        with pytest.raises(ValueError) as caught:
            fully_shard(wrapper)
        assert str(caught.value).endswith(f" {hint}")
    around = fully_shard(nn.Sequential(model))
    with pytest.warns(UserWarning, match="shard new adapters of a sharded base alone"):
        around(own_input())
    for layer in model:
        fully_shard([layer.down, layer.up])
    for step in range(3):
        for one in (around, reference):
            one(own_input(step)).square().sum().backward()
        average_gradients(reference.parameters())
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        for param, expected in pairs:
            if expected.requires_grad:
                assert_same(param.grad, expected.grad, "gradient")
                with torch.no_grad():
                    param.sub_(param.grad, alpha=0.1)
                    expected.sub_(expected.grad, alpha=0.1)
                param.grad = expected.grad = None
