"""Gradients of the mean over all tokens, however ranks and microbatches have them."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import counted
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from train.moved import on_mesh
from two_tensors import two_tensor_hooks, two_tensor_mlp

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, move, sit_out, weigh
from composable_shard.errors import ShardError
from composable_shard.testing import fake_ranks, shard_children

WIDTH = 8
SUMS = "The gradients are sums; clear them by zero_grad()"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def blocks(count: int = 3) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).double()


def tokens(rank: int, count: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(model: Any, steps: Sequence[Sequence[int]], place: int | None = None) -> Any:
    """Run the microbatches of a scope, of so many tokens on each rank."""
    place = dist.get_rank() if place is None else place
    with weigh(model) as weighing:
        for step, counts in enumerate(steps):
            count = counts[place]
            loss = mean(model, tokens(place, count, step)) if count else sit_out(model)
            weighing.add(count, loss).backward()
    return weighing


def train_whole(whole: nn.Module, steps: Sequence[Sequence[int]]) -> float:
    """Add the gradients of the mean over the same tokens in one process; return their loss."""
    total = sum(map(sum, steps))
    loss = torch.zeros((), dtype=torch.float64)
    for step, counts in enumerate(steps):
        for rank, count in enumerate(counts):
            if count:
                loss = loss + mean(whole, tokens(rank, count, step)) * count / total
    loss.backward()
    return loss.item()


def expect_gradients(model: Any, whole: nn.Module) -> None:
    for (name, got), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            got.grad.full_tensor(), expected.grad, rtol=1e-9, atol=1e-12, msg=name
        )


def expect_refusal(text: str, kind: type[Exception] = ShardError) -> Any:
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


# What the gradients are ---------------------------------------------------------------------------


@on_ranks(4)
def test_ranks_of_tensor_parallelism_are_not_counted() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole = blocks()
    model = shard_children(copy.deepcopy(whole), mesh=mesh["data"])
    assert train(model, [(3, 4)], mesh["data"].get_local_rank()).total == 7
    train_whole(whole, [(3, 4)])
    expect_gradients(model, whole)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16, reduced in fp32": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "subclass": {},
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_powers_of_two_give_bitwise_what_losses_divided_by_hand_do(kind: str) -> None:
    """Two microbatches, each reduced, of 8 and 24 tokens: by hand, the total must be known."""
    rank, counts, grads = dist.get_rank(), [(4, 4), (16, 8)], []
    for weighs in (False, True):
        with two_tensor_hooks() if kind == "subclass" else contextlib.nullcontext():
            model = blocks().float()
            model = two_tensor_mlp() if kind == "subclass" else model
            model = shard_children(model, **KINDS[kind])
            with weigh(model) if weighs else contextlib.nullcontext() as weighing:
                for step, of_ranks in enumerate(counts):
                    x = tokens(rank, of_ranks[rank], step).to(next(model.parameters()).dtype)
                    loss = mean(model, x)
                    if weighing is not None:
                        weighing.add(of_ranks[rank], loss).backward()
                    else:
                        (loss * (of_ranks[rank] * 2 / 32)).backward()
        grads.append([param.grad.to_local() for param in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@on_ranks(2)
def test_numbers_are_those_at_the_call_and_may_be_tensors() -> None:
    """A rank without tokens may have no loss, as a mean over none is NaN; evaluation adds up."""
    rank, model, count, sums = dist.get_rank(), shard_children(blocks()), torch.tensor(0), 0.0
    with weigh(model) as weighing:
        for step, weight in enumerate((3, 4)):
            count.fill_(weight)
            loss = mean(model, tokens(rank, weight, step))
            sums += weight * loss.item()
            summed = weighing.add(count, loss)
            count.fill_(1024)
            summed.backward()
    both = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(both, torch.tensor(sums))
    assert weighing.total == 14
    assert weighing.loss == pytest.approx(sum(both).item() / 14, rel=1e-6)
    model.zero_grad()
    with torch.no_grad(), weigh(model) as weighing:
        weighing.add(torch.tensor(3 * rank), mean(model, tokens(rank, 3 * rank)))
        expected = mean(model, tokens(1, 3)).item()
    assert (weighing.total, weighing.loss) == (3, pytest.approx(expected, rel=1e-12))


# What is refused ----------------------------------------------------------------------------------


@on_ranks(2)
def test_gradients_at_the_begin_are_an_error_on_all_ranks() -> None:
    """Though one rank alone has a gradient, which is not reduced."""
    model = shard_children(blocks())
    with model.no_sync():
        output = mean(model, tokens(0, 3)) if dist.get_rank() else sit_out(model)
        output.backward()
    param = model[1].inner.weight
    assert (param.grad is None) == (dist.get_rank() == 0)
    expected = (
        "Expected no gradients at the start of weigh(), got one of 'inner.bias'; call zero_grad() "
        "first"
    )
    with expect_refusal(expected), weigh(model):
        pass
    model.zero_grad()
    model.set_is_last_backward(False)
    mean(model, tokens(0, 3)).backward()
    model.zero_grad()
    with expect_refusal(expected.replace("one of 'inner.bias'", "reductions in flight")):
        train(model, [(3, 3)])
    model.set_is_last_backward(True)
    model.reset_iter_state()
    assert train(model, [(3, 3)]).total == 6


ONLY_SUMS = (
    "no optimizer step and no other mesh or divide factor inside weigh(), where gradients are sums"
)
FINITE = "weights in weigh() that are finite and not negative"
WRONG: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "nan": (lambda _, weighing: weighing.add(math.nan, torch.ones(())), FINITE),
    "negative": (lambda _, weighing: weighing.add(torch.tensor(-1.0), torch.ones(())), FINITE),
    "step": (lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1).step(), ONLY_SUMS),
    "factor": (lambda model, _: model[1].set_gradient_divide_factor(3.0), ONLY_SUMS),
}


@pytest.mark.parametrize("name", WRONG)
@on_ranks(2)
def test_what_one_rank_does_wrong_is_an_error_on_all_at_the_end(name: str) -> None:
    do, expected = WRONG[name]
    rank, model = dist.get_rank(), shard_children(blocks())
    text = f"Expected {expected}; got others on some rank. {SUMS}"
    with expect_refusal(text), weigh(model) as weighing:
        weighing.add(3, mean(model, tokens(rank, 3))).backward()
        if rank:
            do(model, weighing)
    with expect_refusal(
        "Expected total and loss to be read after weigh(), got it open or ended by an error"
    ):
        _ = weighing.loss
    with expect_refusal("Expected add() inside of `with weigh(model)`, got it after the end"):
        weighing.add(1, torch.ones(()))
    model.zero_grad()
    model[1].set_gradient_divide_factor(2.0)
    assert train(model, [(3, 1)]).total == 4


@on_ranks(2)
def test_reductions_under_way_moves_and_scopes_without_tokens_are_errors_on_all_ranks() -> None:
    """At the end; an exception inside says that nothing was divided."""
    rank, model = dist.get_rank(), shard_children(blocks())
    with pytest.raises(ShardError, match=r"^Expected finished reductions at the end of weigh"):
        model.set_is_last_backward(False)
        train(model, [(3, 3)])
    model.set_is_last_backward(True)
    model.reset_iter_state()
    model.zero_grad()
    expected = (
        "Expected a weight above 0 on any rank inside of weigh(), since without tokens there is no "
        f"mean; got others on some rank. {SUMS}"
    )
    with expect_refusal(expected):
        train(model, [(0, 0)])
    with pytest.raises(InterruptedError) as caught, weigh(model) as weighing:
        weighing.add(3, mean(model, tokens(rank, 3))).backward()
        raise InterruptedError
    assert caught.value.__notes__ == [f"It has left weigh() before its end. {SUMS}."]
    with pytest.raises(ShardError, match=r"^Expected no gradients at the start"), weigh(model):
        pass
    model.zero_grad()
    assert train(model, [(3, 1)]).total == 4
    model.zero_grad()
    expected = r"^Expected no optimizer step and no other mesh"
    with pytest.raises(ShardError, match=expected), weigh(model):
        move(model, (), on_mesh(0))


HOOKS: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook": (lambda model: model[1].inner.bias.register_hook(lambda g: g), "'inner.bias'"),
    "optimizer in backward": (
        lambda model: model[1].inner.bias.register_post_accumulate_grad_hook(lambda _: None),
        "'inner.bias'",
    ),
    "all-reduce hook": (
        lambda model: model[1].set_all_reduce_hook(lambda _: None),
        "the reductions of group '1'",
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_would_see_sums_are_refused(name: str) -> None:
    put, where = HOOKS[name]
    expected = f"Expected no gradient hooks in weigh(): they get sums; got one on {where}"
    with fake_ranks(2):
        model = shard_children(blocks())
        put(model)
        with expect_refusal(expected), weigh(model):
            pass


def test_scopes_within_one_another_and_what_is_no_number_are_refused() -> None:
    expected = "Expected one weigh() at a time, got group '1' in another; add losses there"
    with fake_ranks(1):
        model = shard_children(blocks())
        with weigh(model) as weighing:
            with expect_refusal(expected), weigh(model[1]):
                pass
            for bad in (torch.ones(2), torch.tensor(1j)):
                for name, given in (
                    ("num_tokens", (bad, torch.ones(()))),
                    ("loss", (1, bad)),
                ):
                    text = (
                        f"Expected {name} to be one real number, got {bad.dtype} of shape "
                        f"{list(bad.shape)}"
                    )
                    with expect_refusal(text, ValueError):
                        weighing.add(*given)
            weighing.add(1, torch.ones(()))


# What it costs ------------------------------------------------------------------------------------


def test_two_all_reduces_for_each_scope() -> None:
    """And nothing in a loop that weighs nothing."""
    with fake_ranks(4):
        model = shard_children(blocks())
        model(tokens(0, 2)).sum().backward()  # ranks agree on the model once
        model.zero_grad()
        with counted() as launched:
            train(model, [(2,), (3,)])
    assert sum("allreduce" in name for name in launched) == 2
