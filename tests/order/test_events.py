"""What happens in which order: whole lists of events of whole iterations."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from nets import Block, Net, own_input, shard_net
from torch import nn

from composable_shard import fully_shard
from composable_shard.insight.events import Event, record_events
from composable_shard.testing import run_ranks

SHORT = {
    "all_gather": "gather",
    "wait_for_all_gather": "wait",
    "reshard": "free",
    "reduce_scatter": "reduce",
    "wait_for_reduce_scatter": "finish",
}


def events(text: str) -> list[str]:
    """Split ``"gather root, wait root, pre_forward 0"``; blocks go by their number."""
    return [item.strip() for item in text.replace("\n", " ").split(",")]


def short(recorded: list[Event]) -> list[str]:
    return [
        f"{SHORT.get(event, event)} {name.removeprefix('blocks.') or 'root'}"
        for event, name in recorded
    ]


def forward(model: nn.Module) -> torch.Tensor:
    return model(own_input()).sum()


def iterations(count: int, *, num_blocks: int = 2, **kwargs: object) -> list[list[str]]:
    """Record forward and backward of every iteration: [forward 0, backward 0, forward 1, ...]."""
    return recorded_iterations(shard_net(Net(num_blocks), **kwargs), count)


def recorded_iterations(model: nn.Module, count: int) -> list[list[str]]:
    parts = []
    for _ in range(count):
        with record_events(model) as recorded:
            loss = forward(model)
        parts.append(short(recorded))
        with record_events(model) as recorded:
            loss.backward()
        parts.append(short(recorded))
    return parts


def on_ranks(fn: Callable[..., list[list[str]]], *args: object) -> list[list[str]]:
    """Run on two ranks, whose events are the same."""
    first, second = run_ranks(fn, 2, *args, timeout=60)
    assert first == second
    return first


FIRST_FORWARD = """
    pre_forward root, gather root, wait root,
    pre_forward 0, gather 0, wait 0, post_forward 0, free 0,
    pre_forward 1, gather 1, wait 1, post_forward 1, free 1,
    post_forward root"""
NEXT_FORWARD = """
    pre_forward root, gather root, wait root, gather 0,
    pre_forward 0, wait 0, gather 1, post_forward 0, free 0,
    pre_forward 1, wait 1, post_forward 1, free 1,
    post_forward root"""
BACKWARD = """
    pre_backward root, gather 1,
    pre_backward 1, wait 1, gather 0, post_backward 1, free 1, reduce 1,
    pre_backward 0, wait 0, post_backward 0, free 0, finish 1, reduce 0,
    post_backward root, finish 0, reduce root, finish root, free root"""


def test_backward_gathers_ahead_at_once_and_forward_from_the_second_iteration_on() -> None:
    first_forward, first_backward, *rest = on_ranks(iterations, 3)
    assert first_forward == events(FIRST_FORWARD)
    assert first_backward == events(BACKWARD)
    assert rest == [events(NEXT_FORWARD), events(BACKWARD)] * 2


KEPT_FORWARD = """
    pre_forward root, gather root, wait root, gather 0,
    pre_forward 0, wait 0, gather 1, post_forward 0,
    pre_forward 1, wait 1, post_forward 1,
    post_forward root"""
KEPT_BACKWARD = """
    pre_backward root,
    pre_backward 1, post_backward 1, free 1, reduce 1,
    pre_backward 0, post_backward 0, free 0, finish 1, reduce 0,
    post_backward root, finish 0, reduce root, finish root, free root"""


def test_without_reshard_after_forward_backward_gathers_nothing() -> None:
    *_, last_forward, last_backward = on_ranks(
        functools.partial(iterations, reshard_after_forward=False), 2
    )
    assert last_forward == events(KEPT_FORWARD)
    assert last_backward == events(KEPT_BACKWARD)


def test_with_reshard_after_forward_the_root_is_freed_too() -> None:
    first_forward, first_backward, second_forward, second_backward = on_ranks(
        functools.partial(iterations, reshard_after_forward=True), 2
    )
    assert first_forward == events(FIRST_FORWARD + ", free root")
    assert first_backward == events(
        BACKWARD.replace("pre_backward root,", "pre_backward root, gather root, wait root,")
    )
    assert second_forward == events(NEXT_FORWARD + ", free root")
    assert second_backward == events(
        BACKWARD.replace("pre_backward root,", "pre_backward root, gather root, wait root,")
    )


def set_before_and_after_first_forward(when: int) -> list[list[str]]:
    model = shard_net(Net(2))
    parts = []
    for iteration in range(3):
        if iteration == when:
            model.set_reshard_after_forward(False)
        parts += recorded_iterations(model, 1)
    return parts


@pytest.mark.parametrize("when", [0, 1])
def test_set_reshard_after_forward_acts_at_any_time(when: int) -> None:
    parts = on_ranks(set_before_and_after_first_forward, when)
    if when:
        assert parts[:2] == [events(FIRST_FORWARD), events(BACKWARD)]
    assert parts[4:] == [events(KEPT_FORWARD), events(KEPT_BACKWARD)]


def keep_after_backward() -> list[list[str]]:
    """What is gathered and freed where parameters are kept from backward to forward."""
    model = shard_net(Net(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    model.set_is_last_backward(False)
    parts = recorded_iterations(model, 2)
    model.synchronize_gradients()
    optimizer.step()
    parts += recorded_iterations(model, 1)
    model.set_is_last_backward(True)
    parts += recorded_iterations(model, 2)
    return [[event for event in part if event.split()[0] in ("free", "gather")] for part in parts]


def test_without_reshard_after_backward_parameters_stay_until_gradients_are_complete() -> None:
    first, second, after_step, last, anew = batched(on_ranks(keep_after_backward))
    gathers = "gather root, gather 0, gather 1"
    frees = "free root, free 0, free 1"
    assert first == (events(gathers), [])
    assert second == ([], [])
    assert after_step == (events(f"{frees}, {gathers}"), [])
    assert last == ([], events(frees))
    assert anew == (events(gathers), events(frees))


def batched(parts: list[list[str]]) -> list[tuple[list[str], list[str]]]:
    """Return the events of forward and backward of each iteration."""
    return list(zip(parts[::2], parts[1::2], strict=True))


class Stack(nn.Module):
    """Blocks without anything around them: the root has no parameter of its own."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack_iterations() -> list[list[str]]:
    model = Stack(3)
    for block in model.blocks:
        fully_shard(block)
    return recorded_iterations(fully_shard(model), 3)


def test_a_root_without_parameters_does_not_free_the_last_block() -> None:
    _, _, *rest = on_ranks(stack_iterations)
    second_forward = """
        pre_forward root,
        pre_forward 0, gather 0, wait 0, gather 1, post_forward 0, free 0,
        pre_forward 1, wait 1, gather 2, post_forward 1, free 1,
        pre_forward 2, wait 2, post_forward 2,
        post_forward root"""
    second_backward = """
        pre_backward 2, gather 1, pre_backward root, post_backward 2, free 2, reduce 2,
        pre_backward 1, wait 1, gather 0, post_backward 1, free 1, finish 2, reduce 1,
        pre_backward 0, wait 0, post_backward 0, finish 1, reduce 0,
        post_backward root, finish 0, free 0"""
    assert rest == [events(second_forward), events(second_backward)] * 2


def explicit_prefetch() -> list[list[str]]:
    model = shard_net(Net(3))
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([third])
    model.set_modules_to_backward_prefetch([third, second])
    third.set_modules_to_backward_prefetch([first])
    parts = recorded_iterations(model, 2)
    model.set_modules_to_forward_prefetch([])
    first.set_modules_to_forward_prefetch([])
    return parts + recorded_iterations(model, 1)


def test_explicit_lists_replace_the_recorded_order() -> None:
    first_forward, first_backward, _, _, third_forward, _ = on_ranks(explicit_prefetch)
    explicit_forward = """
        pre_forward root, gather root, wait root, gather 0, gather 1,
        pre_forward 0, wait 0, gather 2, post_forward 0, free 0,
        pre_forward 1, wait 1, post_forward 1, free 1,
        pre_forward 2, wait 2, post_forward 2, free 2,
        post_forward root"""
    explicit_backward = """
        pre_backward root, gather 2, gather 1,
        pre_backward 2, wait 2, gather 0, post_backward 2, free 2, reduce 2,
        pre_backward 1, wait 1, post_backward 1, free 1, finish 2, reduce 1,
        pre_backward 0, wait 0, post_backward 0, free 0, finish 1, reduce 0,
        post_backward root, finish 0, reduce root, finish root, free root"""
    recorded_forward = """
        pre_forward root, gather root, wait root, gather 0,
        pre_forward 0, wait 0, gather 1, post_forward 0, free 0,
        pre_forward 1, wait 1, gather 2, post_forward 1, free 1,
        pre_forward 2, wait 2, post_forward 2, free 2,
        post_forward root"""
    assert first_forward == events(explicit_forward)
    assert first_backward == events(explicit_backward)
    assert third_forward == events(recorded_forward)


def evaluations(context: Callable[[], torch.no_grad]) -> list[list[str]]:
    model = shard_net(Net(2))
    parts = []
    for _ in range(2):
        with record_events(model) as recorded, context():
            forward(model)
        parts.append(short(recorded))
    return parts


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_frees_every_block_and_prefetches(context: type) -> None:
    first, second = on_ranks(evaluations, context)
    assert first == events(FIRST_FORWARD + ", free root")
    # The root is not kept either: no backward needs it.
    assert second == events(NEXT_FORWARD + ", free root")


def unshard_by_hand() -> list[list[str]]:
    model = shard_net(Net(1))
    block, parts = model.blocks[0], []

    def handle_twice() -> None:
        handle = block.unshard(async_op=True)
        parts.append(short(recorded))
        handle.wait()
        handle.wait()

    for step in (block.unshard, block.unshard, block.reshard, block.reshard, handle_twice):
        with record_events(model) as recorded:
            step()
        parts.append(short(recorded))
    with record_events(model) as recorded:
        model.unshard(async_op=True)
        forward(model)
    parts.append(short(recorded))
    return parts


def test_unshard_and_reshard_by_hand() -> None:
    unshard, again, reshard, twice, launched, waited, with_forward = on_ranks(unshard_by_hand)
    assert unshard == events("gather 0, wait 0")
    assert again == []
    assert reshard == events("free 0")
    assert twice == []
    assert launched == events("gather 0")
    assert waited == events("gather 0, wait 0")
    # Forward waits for what was launched, and uses the block that is still unsharded.
    assert with_forward == events(
        "gather root, pre_forward root, wait root, pre_forward 0, post_forward 0, free 0, "
        "post_forward root"
    )
