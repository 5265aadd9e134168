"""Trainable parameters that stay plain: ignored ones silently, others with a warning."""

from __future__ import annotations

import copy
import warnings
import weakref

import torch
from torch import nn

from composable_shard import fully_shard
from composable_shard.testing import fake_ranks


def late(model: nn.Module) -> list[str]:
    """Run forward twice; return the warnings."""
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
            "'2.weight'], added after fully_shard, which each rank trains by itself; add them "
            "before it, shard new adapters of a sharded base alone, or pass them as ignored_params "
            "if their gradients are averaged elsewhere"
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
