"""Gradients of the mean over all tokens, however ranks and microbatches have them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from composable_shard import sit_out, weigh
from composable_shard.testing import run_ranks
from uneven.test_uneven_batches import Model, batch_of, sharded

SYNCS = ("each", "last", "by hand", "open until the last", "not over replicas until the last")


@dataclass(frozen=True)
class Weighing:
    """Steps of microbatches, and what they weigh.

    Attributes:
        weights: Of each step, microbatch and rank; ``None`` for a rank without that microbatch.
        sync: When gradients are reduced.
        clears: How gradients are cleared after a step.
    """

    num_replicas: int
    weights: tuple[tuple[tuple[float | None, ...], ...], ...]
    sync: str
    clears: str

    @property
    def num_ranks(self) -> int:
        return len(self.weights[0][0])


def check(case: Weighing) -> None:
    torch.manual_seed(0)
    whole = Model().double()
    model = sharded(whole, case.num_replicas)
    rank = dist.get_rank()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (whole, model)]
    for step, microbatches in enumerate(case.weights):
        losses, total, weighed = 0.0, 0.0, None
        for micro, of_ranks in enumerate(microbatches):
            is_last = micro == len(microbatches) - 1
            prepare(model, case.sync, is_last)
            weight, batch = of_ranks[rank], batch_of(step, rank, micro)
            loss = sit_out(model) if weight is None else loss_of(model, batch, weight)
            weighed = weigh(model, weight or 0, loss)
            loss.backward()
            for other, theirs in enumerate(of_ranks):
                if theirs is not None:
                    loss = loss_of(whole, batch_of(step, other, micro), theirs)
                    loss.backward()
                    losses, total = losses + loss.item(), total + theirs
        if case.sync == "by hand":
            model.synchronize_gradients()
        assert weighed is not None and weighed.total == pytest.approx(total, rel=1e-12)
        if total:
            assert weighed.loss == pytest.approx(losses / total, rel=1e-12)
        else:
            assert math.isnan(weighed.loss)
        for (name, one), (_, other) in zip(
            whole.named_parameters(), model.named_parameters(), strict=True
        ):
            if not total:
                one.grad = None
            if one.grad is None:
                assert other.grad is None, name
                continue
            one.grad /= total
            torch.testing.assert_close(
                other.grad.full_tensor(), one.grad, rtol=1e-9, atol=1e-12, msg=f"{name} {step}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=case.clears == "none")
    for one, other in zip(whole.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.full_tensor(), one, rtol=1e-9, atol=1e-12)


def loss_of(model: Any, batch: torch.Tensor, weight: float) -> torch.Tensor:
    """Return a sum over so many tokens: zero for none."""
    return model(batch).square().sum() * bool(weight)


def prepare(model: Any, sync: str, is_last: bool) -> None:
    if sync == "last":
        model.set_requires_gradient_sync(is_last)
    elif sync == "by hand":
        model.set_requires_gradient_sync(False)
    elif sync == "open until the last":
        model.set_is_last_backward(is_last)
    elif sync == "not over replicas until the last":
        model.set_requires_all_reduce(is_last)


weights = st.one_of(
    st.none(),
    st.sampled_from([0.0, 1.0, 1e15, 1e-6]),
    st.integers(1, 5000).map(float),
    st.floats(0.01, 100),
)


@st.composite
def weighings(draw: st.DrawFn) -> Weighing:
    num_ranks, num_replicas = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2)]))
    microbatch = st.lists(weights, min_size=num_ranks, max_size=num_ranks).map(tuple)
    step = st.lists(microbatch, min_size=1, max_size=3).map(tuple)
    return Weighing(
        num_replicas,
        tuple(draw(st.lists(step, min_size=1, max_size=3))),
        draw(st.sampled_from(SYNCS)),
        draw(st.sampled_from(["none", "zeros"])),
    )


@settings(deadline=None)
@given(case=weighings())
def test_any_weights_give_the_gradient_of_the_mean(case: Weighing) -> None:
    run_ranks(check, case.num_ranks, case, timeout=60)
