"""The errors of a model that is not in a condition to serve a call: the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from composable_shard import fully_shard
from composable_shard.testing import RankError, run_ranks

CHANGED = (
    "StaleParameterError: Expected the parameters of group '0' in backward as they were in "
    "forward, got parameters that were changed in between (an optimizer step?); run backward "
    "before changing them"
)
REPLACED = (
    "StaleParameterError: Expected the parameters of group '0' in backward as they were in "
    "forward, got replaced ones; run backward before replacing them"
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
    """Take an optimizer step between forward and backward."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4)).sum()
    model[1].unshard()  # the first to be needed, and gathered from the old values
    optimizer.step()
    loss.backward()


def replaced() -> None:
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
        (on_meta, ON_META, 2),
        (on_meta, ON_META, 1),
    ],
)
def test_message_of_a_state_on_all_ranks(fn: Callable[[], None], said: str, num_ranks: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fn, num_ranks)
    failure = caught.value.agreed()
    assert f"{failure.exception_type.__name__}: {failure.message}" == said
