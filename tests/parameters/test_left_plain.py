"""Trainable parameters that stay plain: ignored ones silently, others with a warning."""

from __future__ import annotations

import copy
import warnings
import weakref

import pytest
import torch
from nets import assert_same, average_gradients, own_input
from on_ranks import on_ranks
from torch import nn

from composable_shard import fully_shard
from composable_shard.testing import fake_ranks


def late(model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4))
    return [str(one.message) for one in seen]


def sharded(**options: object) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], **options)  # type: ignore[call-overload]
    return fully_shard(model, **options)  # type: ignore[call-overload, no-any-return]


def test_a_parameter_that_is_added_later_is_warned_of_once() -> None:
    with fake_ranks(2):
        model = sharded()
        model[0].scale = nn.Parameter(torch.ones(4))
        model.append(nn.Linear(4, 4, bias=False))
        assert late(model) == [
            "Expected all trainable parameters to be sharded or ignored, got ['0.scale', "
            "'2.weight'] added after fully_shard, so each rank trains them by itself; call "
            "fully_shard on the new modules alone, or pass them as ignored_params if their "
            "gradients are averaged elsewhere"
        ]


def test_no_warning_where_nothing_is_wrong() -> None:
    with fake_ranks(2):
        assert late(sharded()) == []
        frozen = sharded()
        frozen[0].scale = nn.Parameter(torch.ones(4), requires_grad=False)
        assert late(frozen) == []
        gathered = sharded()
        gathered[0].unshard()
        assert late(gathered) == []
    with fake_ranks(1):
        model = sharded()
        model[0].scale = nn.Parameter(torch.ones(4))
        assert late(model) == []


def test_no_warning_of_what_was_ignored_and_of_what_stands_there() -> None:
    with fake_ranks(2):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], ignored_params={model[0].bias})
        fully_shard(model, ignored_params={model[0].bias})
        assert weakref.getweakrefcount(model[0].bias) == 0  # or torch cannot load into it
        model.to_empty(device="cpu")
        assert late(copy.deepcopy(model)) == late(model) == []
        model[0].load_state_dict({"bias": torch.ones(4)}, strict=False, assign=True)
        assert late(model) == []


# Adapters of a sharded base -----------------------------------------------------------------------


class Wrapped(nn.Module):
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
    for wrapper in (model[0], model):
        remedy = r"; .*give added modules(, such as adapters,)? a call of their own$"
        with pytest.raises(ValueError, match=remedy):
            fully_shard(wrapper)
    around = fully_shard(nn.Sequential(model))
    with pytest.warns(UserWarning, match="call fully_shard on the new modules alone"):
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
