"""Backward that a call finishes: gradients as of the unsharded model, and as of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from nets import (
    Net,
    assert_parity,
    assert_trains_alike,
    average_gradients,
    own_input,
    shard_net,
    two_nets,
)
from on_ranks import on_ranks
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch_versions import needs_finalize_backward

from composable_shard import (
    CPUOffloadPolicy,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    ShardError,
    fully_shard,
)
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks

# Numbers -------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "always resharded": {"reshard_after_forward": True},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def finish(model: Net, async_op: bool) -> None:
    if async_op:
        handle = model.finalize_backward(async_op=True)
        assert isinstance(handle, GradientReductionHandle)
        handle.wait()
        handle.wait()
    else:
        assert model.finalize_backward() is None


def train(
    option: str, num_without_sync: int, async_op: bool, bound: int, num_forwards: int
) -> None:
    """Train three steps of two microbatches; only the call leaves gradients to step with."""
    reference, model = two_nets(2, **OPTIONS[option])
    model.set_manual_backward_finalization(True)
    model.set_reduce_scatter_max_input_buffers(bound)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (reference, model)]
    for step in range(3):
        xs = [own_input(2 * step), own_input(2 * step + 1)]
        for one in (reference, model):
            losses = []
            for index, x in enumerate(xs):
                unsynced = one is model and index < num_without_sync
                if num_forwards == 2:  # all forwards before any backward
                    losses.append(one(x).square().sum())
                    continue
                with model.no_sync() if unsynced else nullcontext():
                    one(x).square().sum().backward()
            for index, loss in enumerate(losses):
                unsynced = one is model and index < num_without_sync
                with model.no_sync() if unsynced else nullcontext():
                    loss.backward()
        average_gradients(reference.parameters())
        finish(model, async_op)
        assert all(hasattr(param, "placements") for param in model.parameters())
        if num_without_sync != 1:  # a sum of means has its own rounding
            assert_parity(model, reference)
        else:
            for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                assert param.grad.placements == param.placements
                torch.testing.assert_close(param.grad.full_tensor(), wanted.grad)
            for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                wanted.grad.copy_(param.grad.full_tensor())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.set_manual_backward_finalization(False)
    assert_trains_alike(model, reference, 9)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("async_op", [False, True])
def test_microbatches_without_sync_are_reduced_by_the_call(option: str, async_op: bool) -> None:
    run_ranks(train, 2, option, 2, async_op, 1, 1)


@pytest.mark.parametrize(("num_without_sync", "bound", "num_forwards"), [(1, 1, 1), (2, 3, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_microbatches_with_sync_and_all_forwards_first(
    num_without_sync: int, bound: int, num_forwards: int, ranks: int
) -> None:
    run_ranks(train, ranks, "default", num_without_sync, True, bound, num_forwards)


@pytest.mark.parametrize("together", [False, True])
@on_ranks(4)
def test_a_reduction_over_the_replicas_that_was_left_is_made_by_the_call(together: bool) -> None:
    """Reduce over the shards by two backwards, over the replicas by the call; torch refuses it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference, model = two_nets(2, mesh=mesh)
    model.set_manual_backward_finalization(True)
    seen = []
    for step in range(2):
        model.set_requires_all_reduce(False)
        for microbatch in range(2):
            for one in (reference, model):
                one(own_input(2 * step + microbatch)).square().sum().backward()
        model.finalize_backward()  # nothing is to be done: over the replicas it is switched off
        seen += [str(param.grad.placements) for param in model.parameters()]
        if together:
            with model.no_sync():
                model(own_input(8)).square().sum().backward()
            reference(own_input(8)).square().sum().backward()
        model.set_requires_all_reduce(True)
        model.finalize_backward(async_op=True).wait()
        average_gradients(reference.parameters())
        assert_parity(model, reference)
        model.zero_grad()
        reference.zero_grad()
    assert sorted(set(seen)) == ["(Partial(avg), Shard(dim=0))"]


# As of torch's own ---------------------------------------------------------------------------


def losses_of(shard: Callable[..., Any], policy: Any, async_op: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = Net(2)
    for block in model.blocks:
        shard(block, mp_policy=policy)
    shard(model, mp_policy=policy)
    model.set_manual_backward_finalization(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        for microbatch in range(2):
            model.set_requires_gradient_sync(False)
            loss = model(own_input(2 * step + microbatch)).float().square().sum()
            loss.backward()
            losses.append(loss.detach())
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@needs_finalize_backward
@pytest.mark.parametrize("dtypes", [(), (torch.bfloat16,), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_losses_are_those_of_torch_bit_by_bit(
    dtypes: tuple[torch.dtype | None, ...], async_op: bool
) -> None:
    theirs = losses_of(fsdp.fully_shard, fsdp.MixedPrecisionPolicy(*dtypes), async_op)
    ours = losses_of(fully_shard, MixedPrecisionPolicy(*dtypes), async_op)
    assert not torch.equal(ours[0], ours[2]), "nothing was learnt"
    assert torch.equal(torch.stack(ours), torch.stack(theirs))


# When what happens ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_last", [False, True])
@on_ranks(2)
def test_only_the_wait_waits_for_the_last_reduction(is_last: bool) -> None:
    model = shard_net(Net(2))
    model.set_manual_backward_finalization(True)
    model.set_is_last_backward(is_last)
    seen = []
    for act in ("backward", "finalize", "wait"):
        with record_events(model, "reduce_scatter", "wait_for_reduce_scatter") as events:
            if act == "backward":
                model(own_input()).sum().backward()
            elif act == "finalize":
                handle = model.finalize_backward(async_op=True)
            else:
                handle.wait()
        seen.append(list(events))
    backward = [
        ("reduce_scatter", "blocks.1"),
        ("wait_for_reduce_scatter", "blocks.1"),
        ("reduce_scatter", "blocks.0"),
        ("wait_for_reduce_scatter", "blocks.0"),
        ("reduce_scatter", ""),
    ]
    assert seen == [backward, [], [("wait_for_reduce_scatter", "")]]


# Wrong calls ---------------------------------------------------------------------------------


def text_of(call: Callable[[], object]) -> str:
    with pytest.raises(ShardError) as caught:
        call()
    assert isinstance(caught.value, RuntimeError)
    return str(caught.value)


NOT_WAITED = (
    "Expected wait() on the last GradientReductionHandle before another forward or "
    "finalize_backward(), got no call; call it"
)


@on_ranks(2)
def test_wrong_calls_say_what_to_do() -> None:
    reference, model = two_nets(1)
    assert model.finalize_backward() is None  # before the first forward
    assert isinstance(model.finalize_backward(async_op=True), GradientReductionHandle)
    model.finalize_backward(async_op=True).wait()
    model(own_input()).sum().backward()
    texts = [text_of(model.finalize_backward), text_of(model.blocks[0].finalize_backward)]
    texts.append(text_of(lambda: model.blocks[0].set_manual_backward_finalization(True)))
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    loss = model(own_input()).square().sum()
    inside: list[str] = []

    def within_backward(_: torch.Tensor) -> None:
        inside.append(text_of(model.finalize_backward))
        inside.append(text_of(lambda: model.set_manual_backward_finalization(False)))

    loss.register_hook(within_backward)
    loss.backward()
    texts += inside
    texts.append(text_of(lambda: model.set_manual_backward_finalization(False)))
    handle = model.finalize_backward(async_op=True)
    texts.append(text_of(lambda: model(own_input())))
    texts.append(text_of(model.finalize_backward))
    by_handle = texts[-3].replace("finalize_backward(),", "wait() on the handle,")
    assert text_of(lambda: model.set_manual_backward_finalization(False)) == by_handle
    handle.wait()
    reference(own_input()).square().sum().backward()
    average_gradients(reference.parameters())
    assert_parity(model, reference)
    model(own_input()).sum().backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    texts.append(text_of(handle.wait))
    model.set_manual_backward_finalization(False)
    model.zero_grad()
    reference.zero_grad()
    assert_trains_alike(model, reference, 3)
    assert texts == [
        "Expected finalize_backward() with manual finalization, got a root that finalizes "
        "at the end of backward; call set_manual_backward_finalization(True) first",
        "Expected finalize_backward() on the root, got it on group 'blocks.0'; call it on the "
        "outermost sharded module",
        "Expected set_manual_backward_finalization() on the root, got it on group 'blocks.0'; call "
        "it on the outermost sharded module",
        "Expected finalize_backward() of the root group between iterations, got it within one",
        "Expected set_manual_backward_finalization() of the root group between iterations, got it "
        "within one",
        "Expected set_manual_backward_finalization() between iterations, got a call while a "
        "backward is unfinished; call finalize_backward(), or drop it by reset_iter_state()",
        NOT_WAITED,
        NOT_WAITED,
        "Expected the reductions that finalize_backward() launched, got none, since they were "
        "dropped by reset_iter_state() or after a failure; run the iteration again",
    ]


@on_ranks(2)
def test_a_root_that_ends_up_inside_of_another_sets_it_there() -> None:
    model = Net(1)
    fully_shard(model.blocks[0])
    model.blocks[0].set_manual_backward_finalization(True)
    fully_shard(model)
    model(own_input()).sum().backward()
    assert "; call finalize_backward()" in text_of(
        lambda: model.set_manual_backward_finalization(False)
    )
    model.finalize_backward()
    assert all(param.grad is not None for param in model.parameters())
