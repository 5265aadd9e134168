"""What the kit has found in the library, each as the program that showed it."""

from __future__ import annotations

import gc
import weakref

import torch
from subclasses.lossless import shard_encoded
from torch import nn

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.testing import (
    ParamSpec,
    TreeLoss,
    TreeSpec,
    assert_trains_like_unsharded,
    fake_ranks,
    run_on_ranks,
    shard_tree,
)


def test_a_group_may_give_back_parameters_to_two_outer_groups_one_after_the_other() -> None:
    """It copies the parameters that stay, which counted as a change of them by the user."""
    lowest = TreeSpec((ParamSpec((2,), tied=True), ParamSpec((3,)), ParamSpec((5,), tied=True)))
    middle = TreeSpec((), (TreeSpec((ParamSpec((2,)),), grouped=False), lowest))
    tree = TreeSpec((ParamSpec((5,)),), (middle,))
    with fake_ranks(3):
        shard_tree(tree())
    assert_trains_like_unsharded(tree, ["backward", "step", "backward"], world_size=3)


def test_a_reduction_under_way_when_backward_failed_is_not_delivered_by_a_sync() -> None:
    """`synchronize_gradients` waited for it, after gradients had been cleared."""
    tree = TreeSpec((), (TreeSpec((ParamSpec((1,)),)), TreeSpec((ParamSpec((1,)),))))
    assert_trains_like_unsharded(tree, ["backward", "backward", "fail_backward", "sync"])


def test_a_step_reduces_what_was_accumulated() -> None:
    """A program by hand, with no reduction before its step, was said to train otherwise."""
    tree = TreeSpec((ParamSpec((3,)), ParamSpec((4, 2))))
    assert_trains_like_unsharded(tree, ["accumulate", "step", "backward", "step"])


def test_ranks_of_which_one_uses_nothing_of_a_module_that_is_called_twice() -> None:
    """That one was done after a call, gathered for the other again, alone, and waited for ever."""
    children = TreeSpec((ParamSpec((3,)),)), TreeSpec()
    tree = TreeSpec((ParamSpec((3,)),), children, together=True)
    loss = TreeLoss(used=((True, True), (True, False)))
    assert_trains_like_unsharded(tree, ["backward", "step", "backward"], loss=loss, timeout=20)


def test_gradients_wider_than_their_sums_are_compared_as_the_sums_are() -> None:
    """Encoded fp32 gradients, summed over three ranks in another order, were held to 4e-12."""
    assert_trains_like_unsharded(
        TreeSpec((ParamSpec((17, 2048)),)),
        ["backward"],
        mesh=(3,),
        policy=MixedPrecisionPolicy(grad_dtype=torch.float64),
        shard=shard_encoded,
    )


def models_alive() -> int:
    alive = []
    for _ in range(3):
        model = fully_shard(nn.Linear(3, 4))
        model(torch.ones(2, 3)).sum().backward()
        alive.append(weakref.ref(model))
        del model
    gc.collect()
    return sum(ref() is not None for ref in alive)


def test_a_model_that_has_run_and_is_dropped_is_freed() -> None:
    """A hook on each unsharded parameter held its group, and through it the parameter."""
    assert run_on_ranks(models_alive, 2) == [0, 0]
    assert run_on_ranks(models_alive, 1) == [0]
