"""Losses that are refused: of parameters that were freed or written since forward read them."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from nets import assert_parity, average_gradients, own_input, train_step
from on_ranks import on_ranks

from composable_shard import ShardError, fully_shard
from composable_shard.testing import run_ranks
from training.models import ELSEWHERE, stored_loss, storing


def sharded_pair(place: str, reshard: bool | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    reference = storing(place)
    model: Any = copy.deepcopy(reference)
    for module in (model.first, model.block, model):
        fully_shard(module, reshard_after_forward=reshard)
    return reference, model


FREED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: [torch.FloatTensor [4]] is at version N; expected version 1 instead. "
    "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
    "with torch.autograd.set_detect_anomaly(True, check_nan=False)."
)


def refuse_freed(reshard: bool | None) -> list[str]:
    """The process lives on, and the next iteration is as if this one had not been."""
    reference, model = sharded_pair("elsewhere", reshard)
    texts = []
    for step in range(4):
        if step in (0, 2):
            model(own_input(step))
            with pytest.raises(RuntimeError) as caught:
                ELSEWHERE.pop().square().sum().backward()
            texts.append(re.sub(r"at version \d+", "at version N", str(caught.value)))
        else:
            train_step(model, step, None)
            train_step(reference, step, None)
            ELSEWHERE.clear()
            assert_parity(model, reference)
            model.zero_grad()
            reference.zero_grad()
    # What the backward needs may be gathered by hand.
    loss, expected = (stored_loss(one, own_input(4), 0) for one in (model, reference))
    for module in (model, model.block, model.first):
        module.unshard()
    loss.backward()
    expected.backward()
    average_gradients(reference.parameters())
    assert_parity(model, reference)
    return texts


@pytest.mark.parametrize("reshard", [True, None])
def test_loss_on_an_intermediate_kept_elsewhere_is_refused_once_parameters_are_freed(
    reshard: bool | None,
) -> None:
    assert run_ranks(refuse_freed, 2, reshard) == [[FREED] * 2] * 2


@on_ranks(2)
def test_a_parameter_that_forward_changes_in_place_is_refused() -> None:
    """Forward may not change it, freed in between or not; nor may who comes after it."""
    for reshard in (True, False):
        _, model = sharded_pair("attribute", reshard)

        def change(module: Any, args: Any, output: Any) -> None:
            with torch.no_grad():
                module.scale.mul_(2)

        handle = model.block.register_forward_hook(change, prepend=True)
        with pytest.raises(ShardError, match="'scale' written in place"):
            stored_loss(model, own_input(), 0, True)
        handle.remove()
    loss = stored_loss(model, own_input(), 0, True)
    change(model.block, None, None)
    with pytest.raises(ShardError, match="got 'scale' written, which is lost"):
        loss.backward()
