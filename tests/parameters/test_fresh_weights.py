"""Compute sees the parameters as they are now; a change before backward is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from training.compare import Comparison
from training.oracle import OPTIMIZERS, OptimizerFactory, Unsharded
from training.scenarios import STACK_GROUPS, Stack, loss_of
from training.trees import inputs_for

from composable_shard import MixedPrecisionPolicy, StaleParameterError, fully_shard
from composable_shard.testing import RankError, run_ranks

Change = Callable[[nn.Module, list[nn.Parameter]], None]


def sharded_stack(**options: Any) -> tuple[Stack, list[nn.Parameter]]:
    model = Stack()
    for name in STACK_GROUPS:
        fully_shard(model.get_submodule(name), **options)
    return model, list(model.parameters())


# Fresh weights ------------------------------------------------------------------------------


def train_without_resharding(
    make_optimizer: OptimizerFactory, options: dict[str, Any], grow_only: bool
) -> list[str]:
    """Keep everything unsharded from forward to forward; step in between."""
    torch.manual_seed(3)
    model = Stack()
    oracle = Unsharded(model, options.get("mp_policy"))
    for name in STACK_GROUPS:
        fully_shard(model.get_submodule(name), **options)
    model.set_reshard_after_backward(False)
    comparison = Comparison(model, oracle, exact=False)
    params = list(model.parameters())
    optimizers = [make_optimizer(params), make_optimizer(oracle.model.parameters())]
    for step in range(4):
        x = inputs_for(step, dist.get_rank())
        losses = [loss_of(m(x)) for m in (model, oracle)]
        comparison.tensor(f"step {step}: loss", *losses)
        for loss in losses:
            loss.backward()
        oracle.after_backward()
        comparison.grads(f"step {step}")
        if not grow_only or step % 2:
            optimizers[0].step()
            optimizers[0].zero_grad()
            oracle.step(optimizers[1])
            oracle.clear()
        comparison.params(f"step {step}")
    return comparison.differences


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd_foreach", "adamw_foreach", "adamw_fused"])
def test_weights_are_fresh_after_a_step_without_resharding(
    optimizer: str, ranks: int, reshard: bool | None
) -> None:
    options = {"reshard_after_forward": reshard}
    args = (OPTIMIZERS[optimizer], options, False)
    differences = run_ranks(train_without_resharding, ranks, *args, timeout=20)
    assert differences == [[]] * ranks, differences


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_fresh_in_low_precision(ranks: int) -> None:
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    args = (OPTIMIZERS["sgd_foreach"], options, True)
    differences = run_ranks(train_without_resharding, ranks, *args, timeout=20)
    assert differences == [[]] * ranks, differences


def add_in_place(model: nn.Module, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.add_(1)


def write_the_local_tensor(model: nn.Module, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            assert isinstance(param, DTensor)
            param.to_local().fill_(0.5)


def load_a_state_dict(model: nn.Module, params: list[nn.Parameter]) -> None:
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})


def load_by_assignment(model: nn.Module, params: list[nn.Parameter]) -> None:
    state = {key: (value + 1).detach() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def step_of(make_optimizer: OptimizerFactory) -> Change:
    def take_a_step(model: nn.Module, params: list[nn.Parameter]) -> None:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = make_optimizer(params)
        optimizer.step()
        optimizer.zero_grad()

    return take_a_step


def foreach_step(model: nn.Module, params: list[nn.Parameter]) -> None:
    step_of(OPTIMIZERS["sgd_foreach"])(model, params)


def fused_step(model: nn.Module, params: list[nn.Parameter]) -> None:
    step_of(OPTIMIZERS["adamw_fused"])(model, params)


def plain_step(model: nn.Module, params: list[nn.Parameter]) -> None:
    step_of(OPTIMIZERS["sgd"])(model, params)


CHANGES: list[Change] = [
    add_in_place,
    write_the_local_tensor,
    load_a_state_dict,
    load_by_assignment,
    foreach_step,
    fused_step,
    plain_step,
]
LOADING = [load_a_state_dict, load_by_assignment]


def output_after(change: Change, options: dict[str, Any]) -> list[bool]:
    """Whether a forward after a change gives what a model that gathers anew gives."""
    model, params = sharded_stack(**options)
    model.set_reshard_after_backward(False)
    x = inputs_for(0, 0)
    with torch.no_grad():
        before = model(x)
    change(model, params)
    fresh = Stack()
    fresh.load_state_dict({key: t.full_tensor() for key, t in model.state_dict().items()})
    with torch.no_grad():
        after = model(x)
        return [torch.equal(after, fresh(x)), not torch.equal(after, before)]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_the_forward_after_a_change_sees_it(
    change: Change, ranks: int, reshard: bool | None
) -> None:
    options = {"reshard_after_forward": reshard}
    assert run_ranks(output_after, ranks, change, options) == [[True, True]] * ranks


# Stale weights ------------------------------------------------------------------------------


def change_before_backward(change: Change, options: dict[str, Any]) -> None:
    model, params = sharded_stack(**options)
    for step in range(2):  # the second time with recorded orders, and gathers under way
        loss = loss_of(model(inputs_for(step, dist.get_rank())))
        if step:
            change(model, params)
        loss.backward()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_forward_and_backward_is_refused(change: Change, ranks: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(change_before_backward, ranks, change, {}, timeout=20)
    failure = caught.value.agreed()
    assert failure.exception_type is StaleParameterError
    # Loading frees the root too; with one rank its parameters are the sharded ones.
    first = "the root group" if ranks == 1 or change in LOADING else "group 'blocks.2'"
    assert failure.message.startswith(
        f"Expected the parameters of {first} in backward as they were in forward, got "
    )


def train_after_a_refusal(change: Change) -> list[str]:
    """The refusal leaves the model usable: the next iteration is that of the oracle."""
    model, params = sharded_stack()
    loss = loss_of(model(inputs_for(0, dist.get_rank())))
    change(model, params)
    with pytest.raises(StaleParameterError):
        loss.backward()
    plain = Stack()
    plain.load_state_dict({key: t.full_tensor() for key, t in model.state_dict().items()})
    oracle = Unsharded(plain)
    comparison = Comparison(model, oracle, exact=dist.get_world_size() <= 2)
    for param in model.parameters():
        param.grad = None
    for step in range(2):
        x = inputs_for(step, dist.get_rank())
        losses = [loss_of(m(x)) for m in (model, oracle)]
        comparison.tensor(f"step {step}: loss", *losses)
        for loss in losses:
            loss.backward()
        oracle.after_backward()
        comparison.grads(f"step {step}")
    return comparison.differences


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("change", [add_in_place, foreach_step, load_by_assignment])
def test_training_goes_on_after_a_refusal(change: Change, ranks: int) -> None:
    differences = run_ranks(train_after_a_refusal, ranks, change, timeout=20)
    assert differences == [[]] * ranks, differences


def change_of_what_is_not_needed_again() -> list[str]:
    """Unsharded parameters that backward still has are those of forward: nothing is stale."""
    torch.manual_seed(3)
    model = Stack()
    oracle = Unsharded(model)
    for name in STACK_GROUPS:
        fully_shard(model.get_submodule(name), reshard_after_forward=False)
    comparison = Comparison(model, oracle, exact=True)
    params = list(model.parameters())
    x = inputs_for(0, dist.get_rank())
    losses = [loss_of(m(x)) for m in (model, oracle)]
    with torch.no_grad():
        for param in params:
            param.add_(1)
    for loss in losses:
        loss.backward()
    oracle.after_backward()
    comparison.grads("after")
    return comparison.differences


def test_a_change_is_harmless_where_nothing_is_gathered_again() -> None:
    assert run_ranks(change_of_what_is_not_needed_again, 2) == [[]] * 2
