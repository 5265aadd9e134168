"""Parameters of classes that lie in memory as any tensor does, and change what functions do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import assert_same, average_gradients, full, own_input
from on_ranks import on_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard

WIDTH = 130


class Scaled(torch.Tensor):
    """Multiplies what a linear layer returns by an attribute, which no function can do without."""

    factor: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is not nn.functional.linear:
            return result
        return result.as_subclass(torch.Tensor) * args[1].factor


class Squared(nn.Parameter):
    """Has a method."""

    def squared(self) -> torch.Tensor:
        return self * self


class Layer(nn.Linear):
    def __init__(self, factor: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight = nn.Parameter(self.weight.detach().as_subclass(Scaled))
        self.weight.factor = factor
        self.bias = Squared(self.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias.squared()).tanh()


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, WIDTH), *[Layer(0.5 + number) for number in range(3)])

    def shard(self, **options: Any) -> Model:
        for layer in self:
            fully_shard(layer, **options)
        fully_shard(self, **options)
        return self


def stay(model: nn.Module) -> nn.Module:
    return model


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def loaded(model: nn.Module) -> nn.Module:
    values = {name: full(value).clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    return model


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("change", [stay, copy.deepcopy, pickled, loaded])
@on_ranks("num_ranks")
def test_the_unsharded_parameter_is_of_the_class(
    reshard: bool, change: Callable[[nn.Module], nn.Module]
) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model())
    reference, model = models[0], models[1].shard(reshard_after_forward=reshard)
    for step in range(4):
        if step == 2:
            model = change(model)
        for either in (model, reference):
            either(own_input(step)).square().sum().backward()
        average_gradients(reference.parameters())
        pairs = list(zip(model.named_parameters(), reference.parameters(), strict=True))
        with torch.no_grad():
            for (name, param), expected in pairs:
                assert_same(param.grad, expected.grad, f"gradient of {name}")
                for one in (param, expected):
                    one.add_(one.grad, alpha=-0.01)
                    one.grad = None
    for (name, param), expected in pairs:
        assert_same(param, expected, name)


class Packed(nn.Parameter):
    """Holds four bits for each weight in the bits of a floating-point dtype, as bitsandbytes."""


def packed(policy: MixedPrecisionPolicy) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Linear(4, 4)
    codes = torch.arange(32, dtype=torch.uint8).view(4, 8).view(torch.float16)
    model.weight = Packed(codes, requires_grad=False)
    return fully_shard(model, mp_policy=policy), codes


@on_ranks(2)
def test_codes_in_a_floating_point_dtype_are_not_cast() -> None:
    low = torch.bfloat16
    for override in (None, lambda param: None):
        policy = MixedPrecisionPolicy(param_dtype=low, param_dtype_override_fn=override)
        with pytest.raises(ValueError) as caught:
            packed(policy)
        assert str(caught.value) == (
            "Expected frozen parameter 'weight' of class Packed in torch.float16, "
            "got param_dtype torch.bfloat16, and a cast would corrupt packed values; "
            "store it in that dtype, or return its dtype from param_dtype_override_fn"
        )
    model, codes = packed(
        MixedPrecisionPolicy(param_dtype=low, param_dtype_override_fn=lambda param: param.dtype)
    )
    model.unshard()  # type: ignore[operator]
    assert torch.equal(model.weight.view(torch.uint8), codes.view(torch.uint8))
