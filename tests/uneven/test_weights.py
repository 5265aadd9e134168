"""Gradients of the mean over all tokens, however ranks and microbatches have them."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import counted
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_reduce
from two_tensors import two_tensor_hooks, two_tensor_mlp

from composable_shard import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardedGradScaler,
    clip_grad_norm_,
    fully_shard,
    sit_out,
    weigh,
)
from composable_shard.errors import RankMismatchError, ShardError
from composable_shard.testing import fake_ranks

WIDTH = 8


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def sharded(model: nn.Module, **options: Any) -> Any:
    for child in model.children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


def tokens(rank: int, count: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def summed(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all tokens."""
    return model(x).square().mean(-1).sum()


def fail(_: torch.Tensor) -> None:
    raise InterruptedError


def fail_in_backward(_: nn.Module, __: Any, output: torch.Tensor) -> None:
    output.register_hook(fail)


def add_all(whole: nn.Module, counts: Sequence[int], step: int = 0) -> None:
    """Add the gradients of the batches of all ranks, of so many tokens each, in one process."""
    for rank, count in enumerate(counts):
        summed(whole, tokens(rank, count, step)).backward()


def expect_gradients(model: Any, whole: nn.Module, divisor: float) -> None:
    for (name, got), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(
            got.grad.full_tensor(), expected.grad / divisor, rtol=1e-9, atol=1e-12, msg=name
        )


# What the gradients are ---------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
@on_ranks(3)
def test_clearing_begins_anew(late: bool, to_none: bool) -> None:
    """Before or after the forward and its weight, by zeros or not."""
    rank = dist.get_rank()
    whole = blocks().double()
    model = sharded(copy.deepcopy(whole))
    for step, counts in enumerate([(5, 1, 2), (1, 7, 1), (2, 2, 3)]):
        for one in (whole, model):
            if not late or one is whole:
                one.zero_grad(set_to_none=to_none)
        loss = summed(model, tokens(rank, counts[rank], step))
        weighed = weigh(model, counts[rank], loss)
        if late:
            model.zero_grad(set_to_none=to_none)
        loss.backward()
        losses = [summed(whole, tokens(rank, count, step)) for rank, count in enumerate(counts)]
        sum(losses, torch.zeros(())).backward()
        expect_gradients(model, whole, sum(counts))
        assert weighed.total == sum(counts)
        expected = sum(loss.item() for loss in losses) / sum(counts)
        assert weighed.loss == pytest.approx(expected, rel=1e-12)


@on_ranks(2)
def test_a_gradient_of_zeros_is_not_taken_for_a_cleared_one() -> None:
    rank = dist.get_rank()
    whole = blocks().double()
    model = sharded(copy.deepcopy(whole))
    for step, (count, factor) in enumerate([(5, 0.0), (3, 1.0)]):
        loss = summed(model, tokens(rank, count, step)) * factor
        weighed = weigh(model, count, loss)
        loss.backward()
    add_all(whole, [3] * 2, 1)
    assert weighed.total == 16
    expect_gradients(model, whole, 16)


@on_ranks(4)
def test_experts_see_the_tokens_of_all_ranks() -> None:
    """Each on two ranks of four; the rest is sharded over all four."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    group, place = mesh["expert"].get_group(), mesh["expert"].get_local_rank()
    torch.manual_seed(0)
    gate = nn.Linear(WIDTH, WIDTH).double()
    experts = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    counts = [3, 0, 5, 1]
    longest = 5

    def masked(x: torch.Tensor, expert: int) -> torch.Tensor:
        return (x.sum(-1, keepdim=True) > 0).double().sub(1 - expert).abs()

    own = copy.deepcopy(experts[place])
    model = nn.Sequential(copy.deepcopy(gate), own)  # called one by one
    fully_shard(own, mesh=mesh["data"])
    everywhere = init_device_mesh("cpu", (4,))
    fully_shard(model[0], mesh=everywhere)
    fully_shard(model, mesh=everywhere)
    padded = torch.zeros(longest, WIDTH, dtype=torch.float64)
    padded[: counts[rank]] = tokens(rank, counts[rank])
    hidden = model[0](padded)
    both = torch.stack([hidden * (place == other) for other in range(2)])
    both = all_reduce(both, group=group)
    routed = all_reduce(own(both) * masked(both, place), group=group)
    loss = routed[place][: counts[rank]].square().sum()
    weighed = weigh(model, counts[rank], loss)
    loss.backward()
    for other, count in enumerate(counts):
        hidden = gate(tokens(other, count))
        out = sum(expert(hidden) * masked(hidden, n) for n, expert in enumerate(experts))
        out.square().sum().backward()
    assert weighed.total == 9
    expect_gradients(model[0], gate, 9)
    expect_gradients(own, experts[place], 9)


@on_ranks(4)
def test_ranks_of_tensor_parallelism_are_not_counted() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    place = mesh["data"].get_local_rank()
    whole = blocks().double()
    model = sharded(copy.deepcopy(whole), mesh=mesh["data"])
    counts = [3, 4]
    weighed = weigh(model, counts[place])
    summed(model, tokens(place, counts[place])).backward()
    add_all(whole, counts)
    assert weighed.total == 7, rank
    expect_gradients(model, whole, 7)


@pytest.mark.parametrize("together", [False, True])
@on_ranks(2)
def test_towers_that_are_trees_of_their_own(together: bool) -> None:
    """Weighed together, one of them left out in between; or each by itself."""
    rank = dist.get_rank()
    wholes = [blocks(2).double(), blocks(3).double()]
    towers = nn.ModuleList(copy.deepcopy(wholes))
    for tower in towers:
        sharded(tower)
    totals = [0, 0]
    for step, (counts, used) in enumerate([((2, 3), (0, 1)), ((4, 1), (0,)), ((1, 1), (0, 1))]):
        losses = [summed(towers[n], tokens(rank, counts[rank], step)) for n in used]
        loss = sum(losses, torch.zeros(()))
        if together:
            weighed = [weigh(towers, counts[rank], loss)] * 2
        else:
            weighed = [
                weigh(towers[n], (n + 1) * counts[rank], one)
                for n, one in zip(used, losses, strict=True)
            ]
        loss.backward()
        for n in used:
            add_all(wholes[n], counts, step)
        for n in (0, 1):
            if together or n in used:
                totals[n] += sum(counts) * (1 if together else n + 1)
        assert [weighed[n].total for n in used] == [totals[n] for n in used]
        for n in (0, 1):
            expect_gradients(towers[n], wholes[n], totals[n])


@on_ranks(2)
def test_the_scaler_and_clipping_see_means() -> None:
    rank = dist.get_rank()
    whole = blocks().double()
    model = sharded(copy.deepcopy(whole))
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (whole, model)]
    for step, counts in enumerate([(3, 5), (1, 2)]):
        loss = summed(model, tokens(rank, counts[rank], step))
        weigh(model, counts[rank], loss)
        scaler.scale(loss * (math.inf if step == 1 and rank == 1 else 1.0)).backward()
        scaler.unscale_(optimizers[1])
        norm = clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizers[1])
        scaler.update()
        optimizers[1].zero_grad()
        if step == 0:
            for other, count in enumerate(counts):
                (summed(whole, tokens(other, count, step)) / sum(counts)).backward()
            expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
            torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0.0)
            optimizers[0].step()
    assert scaler.get_scale() == 2.0**9
    for got, full in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), full, rtol=1e-12, atol=1e-14)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "bf16, reduced in fp32": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "subclass": {},
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_powers_of_two_give_bitwise_what_losses_divided_by_hand_do(kind: str) -> None:
    """Two microbatches, each reduced, of 8 and 24 tokens: by hand, the total must be known."""
    rank, counts = dist.get_rank(), [(2, 6), (20, 4)]
    grads = []
    for weighs in (False, True):
        model = blocks()
        with two_tensor_hooks() if kind == "subclass" else contextlib.nullcontext():
            model = two_tensor_mlp() if kind == "subclass" else model
            model = sharded(model, **KINDS[kind])
            for step, of_ranks in enumerate(counts):
                x = tokens(rank, of_ranks[rank], step).to(next(model.parameters()).dtype)
                loss = summed(model, x)
                if weighs:
                    weigh(model, of_ranks[rank])
                (loss if weighs else loss * 2 / 32).backward()
        grads.append([param.grad.to_local() for param in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


# What is weighed together with what ---------------------------------------------------------------


@pytest.mark.parametrize("to_none", [False, True])
@on_ranks(2)
def test_gradients_that_are_left_alone_do_not_count_for_others(to_none: bool) -> None:
    """One block is cleared after each step, one after two, one never."""
    rank = dist.get_rank()
    whole = blocks().double()
    model = sharded(copy.deepcopy(whole))
    totals = [0, 0, 0]
    for step in range(4):
        loss = summed(model, tokens(rank, 2 + step, step))
        weighed = weigh(model, 2 + step, loss)
        loss.backward()
        add_all(whole, [2 + step] * 2, step)
        totals = [total + 2 * (2 + step) for total in totals]
        for place, total in enumerate(totals):
            expect_gradients(model[place], whole[place], total)
        assert weighed.total == 2 * (2 + step)
        for place in (0, 1) if step % 2 else (0,):
            totals[place] = 0
            for one in (model, whole):
                one[place].zero_grad(set_to_none=to_none)


@on_ranks(2)
def test_what_the_user_has_put_on_others_stays() -> None:
    rank = dist.get_rank()
    model = sharded(blocks().double())
    model[0].requires_grad_(requires_grad=False)
    for param in model[0].parameters():
        param.grad = torch.ones_like(param)
    for step in range(2):
        weigh(model, 3)
        summed(model, tokens(rank, 3, step)).backward()
    for param in model[0].parameters():
        assert param.grad.to_local().eq(1).all()


@on_ranks(2)
def test_evaluation_and_forwards_that_failed_weigh_nothing() -> None:
    rank = dist.get_rank()
    model = sharded(blocks().double())
    with torch.no_grad():
        weigh(model, 50, summed(model, tokens(rank, 3)))
    weigh(model, 7)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, WIDTH + 1, dtype=torch.float64))
    weighed = weigh(model, 3)
    summed(model, tokens(rank, 3)).backward()
    assert weighed.total == 6


@on_ranks(2)
def test_gradients_of_inputs_in_between_use_nothing_up() -> None:
    rank = dist.get_rank()
    whole = blocks().double()
    model = sharded(copy.deepcopy(whole))
    x = tokens(rank, 3).requires_grad_()
    loss = summed(model, x)
    weighed = weigh(model, 3, loss)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    add_all(whole, [3] * 2)
    assert weighed.total == 6
    expect_gradients(model, whole, 6)


@on_ranks(2)
def test_a_backward_that_fails_after_clearing_brings_nothing_back() -> None:
    rank = dist.get_rank()
    whole = blocks().double()
    model = sharded(copy.deepcopy(whole))
    weigh(model, 100)
    summed(model, tokens(rank, 2)).backward()
    model.zero_grad()
    handle = model[1].register_forward_hook(fail_in_backward)
    weigh(model, 50)
    with pytest.raises(InterruptedError):
        summed(model, tokens(rank, 3)).backward()
    handle.remove()
    model.zero_grad()
    weighed = weigh(model, 5)
    summed(model, tokens(rank, 5, 1)).backward()
    add_all(whole, [5] * 2, 1)
    assert weighed.total == 10
    expect_gradients(model, whole, 10)


@on_ranks(2)
def test_what_is_weighed_together_may_change() -> None:
    """Two towers together, then each by itself, then wrapped by one root."""
    rank = dist.get_rank()
    whole = nn.Sequential(blocks(2), blocks(3)).double()
    model: Any = copy.deepcopy(whole)
    for tower in model:
        sharded(tower)
    steps = [[(model, 3)], [(model[0], 2), (model[1], 7)], [(model, 4)]]
    totals = [0, 0]
    for step, weights in enumerate(steps):
        if step == 2:
            fully_shard(model)
        for part, weight in weights:
            weigh(part, weight)
            for place in (0, 1):
                totals[place] += 2 * weight * (part in (model, model[place]))
        summed(model, tokens(rank, 3, step)).backward()
        add_all(whole, [3] * 2, step)
        for place in (0, 1):
            expect_gradients(model[place], whole[place], totals[place])


@on_ranks(2)
def test_groups_that_are_not_synchronized_do_not_hold_up_others() -> None:
    rank = dist.get_rank()
    whole = blocks().double()
    model = sharded(copy.deepcopy(whole))
    model[0].set_requires_gradient_sync(False)
    for step in range(2):
        weigh(model, 3)
        summed(model, tokens(rank, 3, step)).backward()
        add_all(whole, [3] * 2, step)
        expect_gradients(model[1], whole[1], 6 * (step + 1))
    model[0].set_requires_gradient_sync(True)
    model.synchronize_gradients()
    for place in range(3):
        expect_gradients(model[place], whole[place], 12)


@on_ranks(4)
def test_the_ranks_are_those_of_the_largest_mesh() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model: Any = blocks().double()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model, mesh=mesh["b"])
    weighed = weigh(model, 2 + rank)
    summed(model, tokens(rank, 2 + rank)).backward()
    assert weighed.total == 2 + 3 + 4 + 5


@on_ranks(2)
def test_numbers_are_those_at_the_call() -> None:
    rank = dist.get_rank()
    model = sharded(blocks().double())
    count, sums = torch.tensor(0), 0.0
    for weight in (3, 4):
        model.set_requires_gradient_sync(weight == 4)
        count.fill_(weight)
        loss = summed(model, tokens(rank, weight))
        weighed = weigh(model, count, loss)
        sums += loss.item()
        (loss * 1).backward()
        with torch.no_grad():
            loss.mul_(1024)
    both = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(both, torch.tensor(sums))
    assert weighed.total == 14
    assert weighed.loss == pytest.approx(sum(both).item() / 14, rel=1e-6)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (
            torch.ones(2),
            "Expected a weight that is one real number, got torch.float32 of shape [2]",
        ),
        (
            torch.tensor(1j),
            "Expected a weight that is one real number, got torch.complex64 of shape []",
        ),
    ],
)
def test_what_is_no_number_is_refused_at_once(weight: torch.Tensor, expected: str) -> None:
    with fake_ranks(2):
        model = sharded(blocks())
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            weigh(model, weight)
        with pytest.raises(TypeError):
            weigh(model, None)  # type: ignore[arg-type]


def test_a_hook_on_reductions_beside_it_is_refused() -> None:
    expected = (
        "Expected no hooks on gradients beside weigh(), which divides them after all are reduced, "
        "got one on the reductions of group '1'; remove it, or divide by the sum of the weights "
        "yourself"
    )
    with fake_ranks(2):
        model = sharded(blocks())
        model[1].set_all_reduce_hook(lambda buffer: buffer.mul_(0.5))
        with pytest.raises(ShardError, match=f"^{re.escape(expected)}$"):
            weigh(model, 3)


# Refusals, failures -------------------------------------------------------------------------------


@on_ranks(2)
def test_a_backward_that_fails_leaves_the_means_there_were() -> None:
    rank = dist.get_rank()
    model = sharded(blocks().double())
    weigh(model, 3 + rank)
    summed(model, tokens(rank, 3 + rank)).backward()
    before = [param.grad.to_local().clone() for param in model.parameters()]
    handle = model[1].register_forward_hook(fail_in_backward)
    loss = summed(model, tokens(rank, 5, 1))
    handle.remove()
    weigh(model, 5)
    with pytest.raises(InterruptedError):
        loss.backward()
    weighed = weigh(model, 2)
    reduced = [*model[2].parameters()]  # before it failed
    for param, grad in zip(model.parameters(), before, strict=True):
        if not any(param is one for one in reduced):
            torch.testing.assert_close(param.grad.to_local(), grad, rtol=1e-12, atol=0.0)
    summed(model, tokens(rank, 2, 3)).backward()
    assert weighed.total == 3 + 4 + 2 + 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@on_ranks(2)
def test_a_weight_that_is_none_is_an_error_on_all_ranks(bad: float) -> None:
    rank = dist.get_rank()
    model = sharded(blocks().double())
    weigh(model, torch.tensor(bad) if rank == 1 else 3)
    expected = (
        f"Expected a weight that is finite and not negative, got {bad}"
        if rank == 1
        else "Expected weights that are finite and not negative on all ranks, got another one on "
        "some rank"
    )
    kind = ValueError if rank == 1 else ShardError
    with pytest.raises(kind, match=f"^{re.escape(expected)}$"):
        summed(model, tokens(rank, 3)).backward()
    assert [param.grad for param in model.parameters()] == [None] * 6
    weighed = weigh(model, 1)
    summed(model, tokens(rank, 3)).backward()
    assert weighed.total == 2


@on_ranks(2)
def test_ranks_that_weigh_different_microbatches_hear_of_it() -> None:
    """One of them weighs another model."""
    rank = dist.get_rank()
    models = [sharded(blocks().double()) for _ in range(2)]
    weigh(models[0], 3)
    sum(summed(one, tokens(rank, 3)) for one in models).backward()
    models[0].zero_grad()
    weigh(models[1 - rank], 3)
    expected = (
        f"Expected all ranks to weigh their microbatches in step, got number {1 + rank} on this "
        "rank and another one on some; one has failed before its backward, or has left weigh() "
        "out: a rank without a batch weighs 0"
    )
    with pytest.raises(RankMismatchError, match=f"^{re.escape(expected)}$"):
        sum(summed(one, tokens(rank, 3)) for one in models).backward()


def test_it_is_not_known_before_the_backward() -> None:
    expected = (
        "Expected a backward that reduces gradients before asking what all microbatches weigh, got "
        "none yet; ask after loss.backward()"
    )
    with fake_ranks(2):
        model = sharded(blocks())
        weighed = weigh(model, 3)
        with pytest.raises(ShardError, match=f"^{re.escape(expected)}$"):
            _ = weighed.total


def test_a_divide_factor_beside_it_is_refused() -> None:
    expected = (
        "Expected no gradient divide factor beside weigh(), which divides by what all microbatches "
        "weigh, got 4.0 for group '1'; leave out set_gradient_divide_factor()"
    )
    with fake_ranks(2):
        model = sharded(blocks())
        model[1].set_gradient_divide_factor(4.0)
        with pytest.raises(ShardError, match=f"^{re.escape(expected)}$"):
            weigh(model, 3)


def test_hooks_on_gradients_beside_it_are_refused() -> None:
    expected = (
        "Expected no hooks on gradients beside weigh(), which divides them after all are reduced, "
        "got one on 'inner.bias'; remove it, or divide by the sum of the weights yourself"
    )
    with fake_ranks(2):
        model = sharded(blocks())
        model[1].inner.bias.register_hook(lambda grad: grad * 2)
        with pytest.raises(ShardError, match=f"^{re.escape(expected)}$"):
            weigh(model, 3)


def test_a_model_that_is_not_sharded_is_refused() -> None:
    expected = (
        "Expected a model with sharded modules, got none in Linear; apply fully_shard before "
        "weigh()"
    )
    with pytest.raises(ShardError, match=f"^{re.escape(expected)}$"):
        weigh(nn.Linear(2, 2), 1)


# What it costs ------------------------------------------------------------------------------------


def test_one_all_reduce_for_each_backward_that_reduces() -> None:
    """And nothing more, so none in a loop that weighs nothing any more."""
    launched = []
    with fake_ranks(4):
        model = sharded(blocks())
        model(torch.ones(2, WIDTH)).sum().backward()  # ranks agree on the model once
        for weighs, syncs in [(0, 1), (1, 1), (1, 0), (1, 1), (0, 1)]:
            model.set_requires_gradient_sync(bool(syncs))
            with counted() as one:
                loss = model(torch.ones(2, WIDTH)).sum()
                if weighs:
                    weigh(model, 2, loss)
                loss.backward()
            launched.append(sum("allreduce" in name for name in one))
            if syncs:
                model.zero_grad()
    assert launched == [0, 1, 0, 1, 0]


@on_ranks(2)
def test_a_rank_that_sits_out_weighs_nothing() -> None:
    rank = dist.get_rank()
    whole = blocks().double()
    model = sharded(copy.deepcopy(whole))
    for step, runs in enumerate([(True, False), (False, False), (False, True)]):
        loss = summed(model, tokens(rank, 3, step)) if runs[rank] else sit_out(model)
        weighed = weigh(model, 3 if runs[rank] else 0, loss)
        loss.backward()
        for other in range(2):
            if runs[other]:
                summed(whole, tokens(other, 3, step)).backward()
        assert weighed.total == 3 * (1 + step // 2)
        expect_gradients(model, whole, weighed.total)
