"""Which modules a policy wraps, compared with what torch's own policies choose."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed.fsdp.wrap as theirs
from torch import nn

import composable_shard.compat.fsdp1 as ours
from composable_shard.compat.fsdp1 import construction
from composable_shard.testing import fake_ranks


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(self.attention(x, x, x)[0]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([Layer(8), Layer(8), Layer(4)])
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Sequential(nn.Linear(8, 2))})

    def forward(self, x: Any) -> Any:
        x = self.embed(x)
        for layer in self.layers[:2]:
            x = layer(x)
        return self.heads["a"](x), self.heads["b"](x)


def theirs_choose(model: nn.Module, policy: Any) -> list[str]:
    """Return the names of the modules that torch wraps, inner ones first."""
    names = {module: name for name, module in model.named_modules()}
    wrapped: list[str] = []

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module, **_: Any) -> None:
            super().__init__()
            wrapped.append(names[module])
            self.inner = module

    if isinstance(policy, theirs._Policy):
        chosen = policy._run_policy(model, set(), {})
        make = theirs._construct_wrap_fn(model, chosen, Wrapper)
        theirs._post_order_apply(model, make)
    else:
        theirs._recursive_wrap(model, policy, Wrapper, set(), set(), only_wrap_children=True)
    return wrapped


def ours_choose(model: nn.Module, policy: Any) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    scope = construction.scope_of(model, None, None)
    below = construction.chosen_below(model, scope, policy, {"mixed_precision": None})
    return [names[module] for module, _ in below]


def is_small(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features < 10


def sized(**kwargs: Any) -> Any:
    return lambda of: partial(of.size_based_auto_wrap_policy, **kwargs)


POLICIES: dict[str, Any] = {
    "always": lambda of: of.always_wrap_policy,
    "classes": lambda of: of.ModuleWrapPolicy({Layer, nn.Embedding}),
    "nested_classes": lambda of: of.ModuleWrapPolicy([Layer, nn.Linear]),
    "custom": lambda of: of.CustomPolicy(is_small),
    "lambda": lambda of: partial(of.lambda_auto_wrap_policy, lambda_fn=is_small),
    "transformer": lambda of: partial(
        of.transformer_auto_wrap_policy, transformer_layer_cls={Layer}
    ),
    "size": sized(min_num_params=100),
    "size_default": sized(),
    "size_leaves": sized(min_num_params=50, force_leaf_modules={Layer}),
    "size_excluded": sized(min_num_params=50, exclude_wrap_modules={nn.Linear}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_choose_what_those_of_torch_choose(name: str) -> None:
    containers = {"layers", "heads"}  # without a forward: never wrapped by ours
    wanted = [n for n in theirs_choose(Model(), POLICIES[name](theirs)) if n not in containers]
    assert ours_choose(Model(), POLICIES[name](ours)) == wanted
    assert name != "always" or len(wanted) == len(list(Model().modules())) - 3


def test_arguments_of_a_custom_policy_replace_those_of_the_root() -> None:
    own = {"sharding_strategy": ours.ShardingStrategy.SHARD_GRAD_OP}
    policy = ours.CustomPolicy(
        lambda module: own if isinstance(module, nn.Embedding) else isinstance(module, Layer)
    )
    with fake_ranks(2):
        model = ours.FullyShardedDataParallel(Model(), auto_wrap_policy=policy, device_id="cpu")
    found = [wrapper.sharding_strategy.name for wrapper in model.fsdp_modules(model)]
    assert found == ["FULL_SHARD", "SHARD_GRAD_OP", *["FULL_SHARD"] * 3]


def test_a_module_at_several_places_is_wrapped_once_and_what_is_ignored_or_wrapped_is_not() -> None:
    wrap = partial(ours.FullyShardedDataParallel, device_id="cpu")
    with fake_ranks(2):
        plain = Model()
        plain.heads["c"] = plain.heads["b"][0]
        plain.layers[1] = wrap(plain.layers[1])
        model = wrap(
            plain,
            auto_wrap_policy=ours.ModuleWrapPolicy({nn.Linear}),
            ignored_modules=[plain.layers[0]],
        )
    assert plain.heads["c"] is plain.heads["b"][0]
    wrappers = set(model.fsdp_modules(model))
    found = [name for name, module in model.named_modules() if module in wrappers]
    inner = ("attention.out_proj", "up", "down")
    assert found == [
        *("", "layers.1", *(f"layers.2.{name}" for name in inner), "heads.a", "heads.b.0")
    ]


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        (
            {nn.Linear},
            TypeError,
            "Expected auto_wrap_policy to be a function, a ModuleWrapPolicy or a CustomPolicy, got "
            "set: {<class 'torch.nn.modules.linear.Linear'>}",
        ),
        (
            ours.CustomPolicy(lambda module: None),  # type: ignore[arg-type, return-value]
            ValueError,
            "Expected lambda_fn to return a bool or a dict of arguments for Embedding, got None",
        ),
    ],
)
def test_what_is_no_policy(policy: Any, error: type[Exception], text: str) -> None:
    with fake_ranks(2), pytest.raises(error) as caught:
        ours.FullyShardedDataParallel(Model(), auto_wrap_policy=policy, device_id="cpu")
    assert str(caught.value) == text
