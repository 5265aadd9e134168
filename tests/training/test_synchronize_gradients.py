"""``synchronize_gradients`` finishes what was deferred, without another backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes.compare import Oracle, gradient_differences, step_differences
from nets import Net, shard_net
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import FSDPModule, ShardError
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks, run_ranks
from training.programs import NUM_PARAMS, TREE
from training.trees import build, inputs_for, shard

Defer = Callable[[FSDPModule], Any]
FIRST = (True,) + (False,) * (NUM_PARAMS - 1)
ALL = (True,) * NUM_PARAMS


def by_sync(model: FSDPModule) -> None:
    model.set_requires_gradient_sync(False)


def by_all_reduce(model: FSDPModule) -> None:
    model.set_requires_all_reduce(False)


def by_last(model: FSDPModule) -> None:
    model.set_is_last_backward(False)


def train(defer: Defer, hybrid: bool, differ: bool) -> list[str]:
    """Defer every reduction, synchronize, step; ranks may use different parameters."""
    model = build(TREE)
    oracle = Oracle(model)
    mesh = None
    if hybrid:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard(model, TREE, mesh=mesh)
    assert isinstance(model, FSDPModule)
    defer(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    found: list[str] = []
    for step in range(3):
        for microbatch in range(2):
            used = FIRST if differ and (dist.get_rank() + microbatch) % 2 else ALL
            x = inputs_for(2 * step + microbatch, dist.get_rank())
            for either in (model, oracle.model):
                either(x, used).square().mean().backward()
            oracle.take()
        model.synchronize_gradients()
        oracle.reduce()
        found += gradient_differences(dict(model.named_parameters()), oracle)
        model.synchronize_gradients()  # there is nothing left
        found += step_differences(model, oracle, optimizers)
    return found


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("defer", [by_sync, by_last])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_was_deferred_is_reduced(ranks: int, defer: Defer, differ: bool) -> None:
    assert run_ranks(train, ranks, defer, False, differ, timeout=30) == [[]] * ranks


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("defer", [by_sync, by_all_reduce])
def test_what_was_deferred_on_a_hybrid_mesh_is_reduced(defer: Defer, differ: bool) -> None:
    assert run_ranks(train, 4, defer, True, differ, timeout=30) == [[]] * 4


def test_events() -> None:
    with fake_ranks(2):
        model = shard_net(Net(1))
        with model.no_sync():  # type: ignore[operator]
            model(torch.ones(2, 4)).sum().backward()
        with record_events(model) as events:
            model.synchronize_gradients()  # type: ignore[operator]
        assert events == [
            ("reduce_scatter", ""),
            ("wait_for_reduce_scatter", ""),
            ("reduce_scatter", "blocks.0"),
            ("wait_for_reduce_scatter", "blocks.0"),
        ]


def test_not_within_a_forward() -> None:
    with fake_ranks(2):
        model: Any = shard_net(Net(1))
        model.inp.register_forward_hook(lambda *_: model.synchronize_gradients())
        with pytest.raises(ShardError) as caught:
            model(torch.ones(2, 4))
        assert str(caught.value) == (
            "Expected synchronize_gradients() of the root group outside of forward and backward, "
            "got it within one; call it between iterations"
        )
