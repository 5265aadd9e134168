"""Weights count until gradients are cleared: those that are not reduced yet, too, and no others."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import clip_grad_norm_, fully_shard, sit_out, weigh

WIDTH = 4


class Parts(nn.Module):
    """Parts that are used or not; the gradient of one that is used by a factor of 0 is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, factors: tuple[float | None, ...]) -> torch.Tensor:
        pairs = zip(self.parts, factors, strict=True)
        return torch.stack([part(x).square().sum() * f for part, f in pairs if f is not None]).sum()


def pair(*, is_one_group: bool = False, **options: Any) -> tuple[Any, nn.Module]:
    """Return a sharded model, and the same in one process.

    Args:
        is_one_group: So that ranks may use different parts.
        options: For ``fully_shard``.
    """
    torch.manual_seed(0)
    whole = Parts().double()
    model: Any = copy.deepcopy(whole)
    for part in () if is_one_group else model.parts:
        fully_shard(part, **options)
    return fully_shard(model, **options), whole


def tokens(rank: int, count: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def expect(model: Any, whole: nn.Module, totals: tuple[float, ...]) -> None:
    """Compare the gradients of each part with sums of one process by its total."""
    for got, expected, total in zip(model.parts, whole.parts, totals, strict=True):  # type: ignore[arg-type]
        pairs = zip(got.named_parameters(), expected.parameters(), strict=True)
        for (name, param), plain in pairs:
            torch.testing.assert_close(
                param.grad.full_tensor(), plain.grad / total, rtol=1e-9, atol=1e-12, msg=name
            )


def step(
    model: Any,
    whole: nn.Module,
    number: int,
    counts: tuple[int, ...],
    used: tuple[tuple[float | None, ...], ...],
    *,
    cleared: nn.Module | None = None,
    to_none: bool = True,
) -> Any:
    """Run a microbatch on all ranks, of so many tokens and by these factors on each of them.

    Args:
        cleared: What is cleared between the call of ``weigh`` and the backward.
        to_none: How.
    """
    rank = dist.get_rank()
    runs = any(factor is not None for factor in used[rank])
    loss = model(tokens(rank, counts[rank], number), used[rank]) if runs else sit_out(model)
    weighed = weigh(model, counts[rank], loss)
    if cleared is not None:
        cleared.zero_grad(set_to_none=to_none)
    loss.backward()
    for other, (count, factors) in enumerate(zip(counts, used, strict=True)):
        if any(factor is not None for factor in factors):
            whole(tokens(other, count, number), factors).backward()
    return weighed


ALL = (1.0, 1.0, 1.0)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_what_was_weighed_for_gradients_without_sync_that_are_cleared_is_forgotten(
    to_none: bool, is_late: bool
) -> None:
    """Twice: the second microbatch is without sync too, and is cleared or not."""
    num = dist.get_world_size()
    for clears_twice in (False, True):
        model, whole = pair()
        total = 0
        for number, weights in enumerate([(3, 5), (2, 1), (4, 7)]):
            counts = weights[:num]
            clears = number == 1 or (number == 2 and clears_twice)
            if clears:
                whole.zero_grad()
                if not is_late:
                    model.zero_grad(set_to_none=to_none)
            total = sum(counts) + (0 if clears else total)
            with model.no_sync() if number < 2 else contextlib.nullcontext():
                cleared = model if clears and is_late else None
                used = (ALL,) * num
                one = step(model, whole, number, counts, used, cleared=cleared, to_none=to_none)
        assert one.total == total
        expect(model, whole, (total,) * 3)


@on_ranks(2)
def test_ranks_need_not_all_see_what_is_cleared_nor_all_be_cleared() -> None:
    """Rank 0 alone has used the first part, which alone is cleared; the last comes afterwards."""
    model, whole = pair(is_one_group=True)
    none = (None, None, None)
    with model.no_sync():
        step(model, whole, 0, (3, 0), ((1.0, 1.0, None), none))
    for one in (model, whole):
        one.parts[0].zero_grad()
    with model.no_sync():
        step(model, whole, 1, (2, 1), ((None, 1.0, None), (1.0, 1.0, None)))
    weighed = step(model, whole, 2, (4, 6), ((None, 1.0, 1.0), ALL))
    assert weighed.total == 2 + 1 + 4 + 6
    expect(model, whole, (13, 16, 13))
    for one in (model, whole):
        one.parts[1].zero_grad()
    step(model, whole, 3, (1, 2), (ALL, ALL))  # as ever
    expect(model, whole, (16, 3, 16))


@on_ranks(2)
def test_gradients_that_were_reduced_and_added_to_without_sync_are_cleared() -> None:
    model, whole = pair(is_one_group=True)
    step(model, whole, 0, (3, 2), (ALL, ALL))
    with model.no_sync():
        step(model, whole, 1, (1, 4), ((1.0, None, 1.0), ALL))
    for one in (model, whole):
        one.zero_grad()
    with model.no_sync():
        step(model, whole, 2, (5, 1), (ALL, ALL))
    weighed = step(model, whole, 3, (2, 2), (ALL, ALL))
    assert weighed.total == 10
    expect(model, whole, (10, 10, 10))


@pytest.mark.parametrize("to_none", [False, True])
@on_ranks(4)
def test_gradients_that_wait_for_the_replicas_are_cleared(to_none: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, whole = pair(mesh=mesh)
    model.set_requires_all_reduce(False)
    step(model, whole, 0, (3, 2, 1, 1), (ALL,) * 4)
    model.zero_grad(set_to_none=to_none)
    whole.zero_grad()
    model.set_requires_all_reduce(True)
    weighed = step(model, whole, 1, (1, 4, 2, 2), (ALL,) * 4)
    assert weighed.total == 9
    expect(model, whole, (9, 9, 9))


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_a_gradient_of_zeros_that_was_clipped_was_not_cleared() -> None:
    """The last part is used in the second microbatch only; what is cleared then is seen still."""
    num = dist.get_world_size()
    model, whole = pair()
    weighed = step(model, whole, 0, (3, 2)[:num], ((1.0, 0.0, None),) * num)
    clip_grad_norm_(model.parameters(), 1e9)  # multiplies by 1
    weighed = step(model, whole, 1, (1, 4)[:num], (ALL,) * num)
    assert weighed.total == sum((4, 6)[:num])
    expect(model, whole, (weighed.total,) * 3)
    clip_grad_norm_(model.parameters(), 1e9)
    for one in (model, whole):
        one.zero_grad(set_to_none=False)
    weighed = step(model, whole, 2, (2, 3)[:num], ((1.0, 0.0, 1.0),) * num)
    expect(model, whole, (sum((2, 3)[:num]),) * 3)
    for one in (model, whole):
        one.zero_grad(set_to_none=False)
    weighed = step(model, whole, 3, (1, 1)[:num], (ALL,) * num)
    assert weighed.total == num
    expect(model, whole, (num,) * 3)
