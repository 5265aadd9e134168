"""Big unsharded parameters of the host take turns in the same memory, inside of passes alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from near import Apart
from on_ranks import on_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard._torch import memory
from composable_shard.testing import fake_ranks, run_ranks

WIDTHS = 1024, 1024, 1024, 1024, 768, 1024, 1024  # most are 4 MiB, some 3


class Deep(nn.Module):
    """Wide layers, of which some do not fit into the memory of those before."""

    def __init__(self) -> None:
        super().__init__()
        sizes = itertools.pairwise(WIDTHS)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in sizes)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.fails:
            raise ArithmeticError("as planned")
        return x


def sharded(*, bf16: bool) -> tuple[Deep, Deep]:
    torch.manual_seed(3)
    plain, model = Deep(), Deep()
    model.load_state_dict(plain.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return plain, model


def addresses_of_a_step() -> tuple[list[int], float]:
    """Note where each gather of a step lands; return that and how far a gradient is off."""
    plain, model = sharded(bf16=False)
    x = torch.randn(5, WIDTHS[0])
    landed: list[int] = []
    allocate = memory.allocate

    def noted(tensor: torch.Tensor) -> None:
        allocate(tensor)
        if tensor.nbytes > 2 << 20:
            landed.append(tensor.data_ptr())

    for _ in range(2):
        landed.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "allocate", noted)
            model(x).sum().backward()
    for _ in range(2):
        plain(x).sum().backward()
    off = [
        (mine.grad.full_tensor() - theirs.grad).abs().max().item()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    return landed, max(off)


@pytest.mark.skipif(memory._swap is None, reason="this torch cannot hand memory over")
def test_gathers_of_one_size_land_where_the_last_but_one_was() -> None:
    for landed, off in run_ranks(Apart(addresses_of_a_step), 2):
        assert len(landed) == 11  # the last layer waits for backward
        assert landed[2] == landed[0] and len(set(landed[:3])) == 2  # two are there at a time
        assert off < 1e-4


class Largest(TorchDispatchMode):
    """Notes the most bytes that an operation allocates."""

    nbytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not op.is_view and not result.is_meta:
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


def test_sharding_allocates_the_shards_alone() -> None:
    layer = nn.Linear(1024, 1024, bias=False)
    with fake_ranks(4), Largest() as largest:
        fully_shard(layer)
    assert largest.nbytes == layer.weight.nbytes // 4  # type: ignore[operator]


def gradients_left() -> list[int]:
    """Return how many gradients of later layers live when each layer gets its own."""
    _, model = sharded(bf16=False)
    found: list[int] = []
    grads: list[StorageWeakRef] = []

    def note(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        found.append(sum(not grad.expired() for grad in grads))
        grads.append(StorageWeakRef(weight.grad.untyped_storage()))

    def observe(layer: nn.Linear, _: object) -> None:
        layer.weight.register_post_accumulate_grad_hook(note)

    for layer in model.layers:
        layer.register_forward_pre_hook(observe)
    model(torch.randn(5, WIDTHS[0])).sum().backward()
    return found


@pytest.mark.parametrize(("run", "most"), [(gradients_left, 0), (Apart(gradients_left), 1)])
def test_gradients_that_ranks_share_are_freed_once_their_reduction_is_launched(
    run: Callable[[], list[int]], most: int
) -> None:
    for found in run_ranks(run, 2):
        assert found == [0] + [most] * (len(WIDTHS) - 2)


@pytest.mark.skipif(memory._swap is None, reason="this torch cannot hand memory over")
@on_ranks(2)
def test_nothing_is_kept_outside_of_passes() -> None:
    _, model = sharded(bf16=True)
    x, kept = torch.randn(5, WIDTHS[0]), []

    def note(what: str) -> None:
        kept.append((what, len(memory._spare or ())))

    loss = model(x).sum()
    note("forward")
    loss.backward()
    note("backward")
    with torch.no_grad():
        model(x)
    note("without gradients")
    model.fails = True
    with pytest.raises(ArithmeticError):
        model(x)
    note("failure")
    model.fails = False
    for layer in model.layers:
        layer.unshard()
    for layer in model.layers:
        layer.reshard()
    note("by hand")
    for layer in model.layers:
        layer.set_reshard_after_forward(False)
    loss = model(x).sum()
    inside: list[int] = []
    weight = model.layers[0].weight
    weight.register_post_accumulate_grad_hook(lambda _: inside.append(len(memory._spare or ())))
    loss.backward()
    note("gathered throughout")
    assert len(inside) == 1 and 1 <= inside[0] <= 2
    assert [count for _, count in kept] == [0] * 6, kept
