"""The errors of a model that is not in a condition to serve a call: the same on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from composable_shard import fully_shard
from composable_shard.errors import MaterializationError
from composable_shard.testing import RankError, fake_ranks, run_ranks

CHANGED = (
    "RuntimeError: one of the variables needed for gradient computation has been modified by an "
    "inplace operation"
)
REPLACED = (
    "StaleParameterError: Expected the parameters of group '0' in backward as they were in "
    "forward, got replaced ones; run backward before replacing them"
)
CONVERTED = (
    "RuntimeError: attempting to assign a gradient with dtype 'float' to a tensor with grad_dtype "
    "'Double'"
)
ON_META = (
    "MaterializationError: Expected the parameters of the root group on cpu, got weight on meta, "
    "bias on meta; call init_sharded(model, seed=...), or load values by load_sharded()"
)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def two_layers() -> nn.Sequential:
    model = nn.Sequential(linear(), linear())
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def changed() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4, requires_grad=True)).sum()
    optimizer.step()
    loss.backward()


def replaced() -> None:
    model = two_layers()
    loss = model(torch.ones(2, 4)).sum()
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    loss.backward()


def converted() -> None:
    model = two_layers()
    loss = model(torch.ones(2, 4)).sum()
    model[0].to(torch.float64)
    loss.backward()


def on_meta() -> None:
    with torch.device("meta"):
        model = fully_shard(linear())
    model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("fn", "said", "num_ranks"),
    [
        (changed, CHANGED, 2),
        (replaced, REPLACED, 2),
        (converted, CONVERTED, 2),
        (on_meta, ON_META, 2),
        (on_meta, ON_META, 1),
    ],
)
def test_message_of_a_state_on_all_ranks(fn: Callable[[], None], said: str, num_ranks: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fn, num_ranks)
    failure = caught.value.agreed()
    text = f"{failure.exception_type.__name__}: {failure.message}"
    # Errors of autograd say more.
    assert text.startswith(said) if said in (CHANGED, CONVERTED) else text == said


def test_a_forward_that_cannot_gather_ends_without_an_error_of_its_hooks() -> None:
    with fake_ranks(2), torch.device("meta"), warnings.catch_warnings(record=True) as caught:
        model = fully_shard(linear())
        with pytest.raises(MaterializationError):
            model(torch.ones(2, 4))
    assert caught == []
