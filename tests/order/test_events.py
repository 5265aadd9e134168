"""What happens in which order: whole lists of events of whole iterations."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from nets import Block, Net, average_gradients, own_input, shard_net, train_step, two_nets
from torch import nn

from composable_shard import fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks
from order.recording import events, loss_of, on_ranks, recorded_iterations, short


def iterations(count: int, *, num_blocks: int = 2, **kwargs: object) -> list[list[str]]:
    """Record forward and backward of every iteration: [forward 0, backward 0, forward 1, ...]."""
    return recorded_iterations(shard_net(Net(num_blocks), **kwargs), count)


FIRST_FORWARD = """
    pre_forward root, gather root, wait root,
    pre_forward 0, gather 0, wait 0, post_forward 0, free 0,
    pre_forward 1, gather 1, wait 1, post_forward 1, free 1,
    post_forward root"""
NEXT_FORWARD = """
    pre_forward root, gather root, gather 0, wait root,
    pre_forward 0, gather 1, wait 0, post_forward 0, free 0,
    pre_forward 1, wait 1, post_forward 1, free 1,
    post_forward root"""
BACKWARD = """
    pre_backward root, gather 1,
    pre_backward 1, gather 0, wait 1, post_backward 1, free 1, reduce 1,
    pre_backward 0, wait 0, post_backward 0, free 0, finish 1, reduce 0,
    post_backward root, finish 0, reduce root, finish root, free root"""


def test_backward_gathers_ahead_at_once_and_forward_from_the_second_iteration_on() -> None:
    first_forward, first_backward, *rest = on_ranks(iterations, 3)
    assert first_forward == events(FIRST_FORWARD)
    assert first_backward == events(BACKWARD)
    assert rest == [events(NEXT_FORWARD), events(BACKWARD)] * 2


KEPT_FORWARD = """
    pre_forward root, gather root, gather 0, wait root,
    pre_forward 0, gather 1, wait 0, post_forward 0,
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
        pre_forward 0, gather 0, gather 1, wait 0, post_forward 0, free 0,
        pre_forward 1, gather 2, wait 1, post_forward 1, free 1,
        pre_forward 2, wait 2, post_forward 2,
        post_forward root"""
    second_backward = """
        pre_backward root, pre_backward 2, gather 1, post_backward 2, free 2, reduce 2,
        pre_backward 1, gather 0, wait 1, post_backward 1, free 1, finish 2, reduce 1,
        pre_backward 0, wait 0, post_backward 0, finish 1, reduce 0,
        finish 0, free 0, post_backward root"""
    assert rest == [events(second_forward), events(second_backward)] * 2


def explicit_prefetch() -> list[list[str]]:
    model = shard_net(Net(3))
    first, second, third = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([third])
    model.set_modules_to_backward_prefetch([third, second])
    third.set_modules_to_backward_prefetch([first])
    first.set_modules_to_backward_prefetch([third])  # which is over by then
    parts = recorded_iterations(model, 2)
    for module in (model, first, third):
        module.set_modules_to_forward_prefetch([])
        module.set_modules_to_backward_prefetch([])
    default_backward = recorded_iterations(shard_net(Net(3)), 3)[-1]
    return [*parts, *recorded_iterations(model, 1), default_backward]


def test_explicit_lists_replace_the_recorded_order() -> None:
    first_forward, first_backward, _, _, third_forward, *backwards = on_ranks(explicit_prefetch)
    explicit_forward = """
        pre_forward root, gather root, gather 0, gather 1, wait root,
        pre_forward 0, gather 2, wait 0, post_forward 0, free 0,
        pre_forward 1, wait 1, post_forward 1, free 1,
        pre_forward 2, wait 2, post_forward 2, free 2,
        post_forward root"""
    explicit_backward = """
        pre_backward root, gather 2, gather 1,
        pre_backward 2, gather 0, wait 2, post_backward 2, free 2, reduce 2,
        pre_backward 1, wait 1, post_backward 1, free 1, finish 2, reduce 1,
        pre_backward 0, wait 0, post_backward 0, free 0, finish 1, reduce 0,
        post_backward root, finish 0, reduce root, finish root, free root"""
    recorded_forward = """
        pre_forward root, gather root, gather 0, wait root,
        pre_forward 0, gather 1, wait 0, post_forward 0, free 0,
        pre_forward 1, gather 2, wait 1, post_forward 1, free 1,
        pre_forward 2, wait 2, post_forward 2, free 2,
        post_forward root"""
    assert first_forward == events(explicit_forward)
    assert first_backward == events(explicit_backward)
    assert third_forward == events(recorded_forward)
    assert backwards[0] == backwards[1] != first_backward  # empty lists, and a model without lists


def evaluations(context: Callable[[], torch.no_grad]) -> list[list[str]]:
    model = shard_net(Net(2))
    parts = []
    for _ in range(2):
        with record_events(model) as recorded, context():
            loss_of(model)
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
        loss_of(model)
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


# Without sync ---------------------------------------------------------------------------------


def accumulate_twice() -> list[list[str]]:
    reference, model = two_nets(2)
    parts = []
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss = model(own_input(step)).sum()
        with record_events(model) as recorded:
            loss.backward()
        parts.append(short(recorded))
        reference(own_input(step)).sum().backward()
    average_gradients(reference.parameters())
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-6, atol=1e-7)
    with record_events(model) as recorded:
        model.synchronize_gradients()
    return [*parts, short(recorded)]


def test_without_sync_gradients_are_accumulated_and_nothing_is_sent() -> None:
    first, second, last, again = on_ranks(accumulate_twice)
    unsynced = """
        pre_backward root, gather 1,
        pre_backward 1, gather 0, wait 1, post_backward 1, free 1, accumulate 1,
        pre_backward 0, wait 0, post_backward 0, free 0, accumulate 0,
        post_backward root, accumulate root, free root"""
    assert first == second == events(unsynced)
    assert last == events(BACKWARD)
    assert again == []


def kept_after_backward() -> list[list[str]]:
    model = shard_net(Net(1))
    model.set_reshard_after_backward(False)
    parts = []
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        parts += recorded_iterations(model, 1)
    return parts


def test_groups_kept_after_backward_are_freed_at_the_end_of_the_last_one() -> None:
    _, first, forward, last = on_ranks(kept_after_backward)
    assert [event for event in first if event.startswith("free")] == []
    assert [event for event in forward if event.startswith("gather")] == []
    assert [event for event in last if event.startswith("free")] == ["free 0", "free root"]


def keep_last_reductions_open() -> list[list[str]]:
    _, model = two_nets(1)
    model.set_is_last_backward(False)
    with record_events(model, "reduce_scatter", "wait_for_reduce_scatter") as first:
        model(own_input()).sum().backward()
    model.set_is_last_backward(True)
    with record_events(model, "reduce_scatter", "wait_for_reduce_scatter") as second:
        model(own_input()).sum().backward()
    return [short(first), short(second)]


def test_a_backward_that_is_not_the_last_leaves_its_last_reduction_open() -> None:
    first, second = on_ranks(keep_last_reductions_open)
    assert first == events("reduce 0, finish 0, reduce root")
    assert second == events("finish root, reduce 0, finish 0, reduce root, finish root")


# A list as one group --------------------------------------------------------------------------


class PartlyCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def partly_called() -> list[list[str]]:
    """The second module of the group is never called."""
    model = PartlyCalled()
    fully_shard([model.first, model.second])
    fully_shard(model)
    parts = recorded_iterations(model, 2)
    assert model.second.weight.grad is None and model.second.bias.grad is None
    assert model.first.weight.grad is not None
    return [[item.replace("first, second", "pair") for item in part] for part in parts]


def test_a_group_called_in_part_is_freed_at_the_end_of_forward() -> None:
    first_forward, _, second_forward, second_backward = on_ranks(partly_called)
    assert first_forward == events(
        "pre_forward root, gather root, wait root, "
        "pre_forward pair, gather pair, wait pair, post_forward pair, "
        "post_forward root, free pair"
    )
    assert second_forward == events(
        "pre_forward root, gather root, gather pair, wait root, "
        "pre_forward pair, wait pair, post_forward pair, "
        "post_forward root, free pair"
    )
    assert second_backward == events(
        "pre_backward root, gather pair, "
        "pre_backward pair, wait pair, post_backward pair, reduce pair, "
        "post_backward root, finish pair, reduce root, finish root, free pair, free root"
    )


def prefetched_in_vain() -> list[list[str]]:
    model = PartlyCalled()
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    model.first.set_modules_to_forward_prefetch([model.second])
    parts = []
    for _ in range(2):
        with record_events(model) as recorded, torch.no_grad():
            model(own_input())
        parts.append(short(recorded))
    return parts


def test_a_group_gathered_ahead_and_not_called_is_freed_at_the_end_of_forward() -> None:
    expected = """
        pre_forward root, gather root, wait root,
        pre_forward first, gather first, gather second, wait first, post_forward first, free first,
        post_forward root, free root, free second"""
    first, second = on_ranks(prefetched_in_vain)
    assert first == events(expected)
    assert second == events(
        expected.replace("root, wait", "root, gather first, wait").replace(
            "pre_forward first, gather first", "pre_forward first"
        )
    )


def list_as_root() -> list[list[str]]:
    """Two modules without a common parent form one tree with one group."""
    modules = [nn.Linear(4, 4), nn.Linear(4, 3)]
    fully_shard(modules)
    parts = []
    for _ in range(2):
        with record_events(modules[0]) as recorded:
            modules[1](modules[0](own_input())).sum().backward()
        parts.append(short(recorded))
    return parts


def test_a_list_as_root_is_gathered_and_reduced_once() -> None:
    for recorded in on_ranks(list_as_root):
        assert recorded.count("gather root") == 1
        assert recorded.count("reduce root") == 1
        assert recorded[-2:] == ["finish root", "free root"]


def one_inside_of_the_other(both: bool) -> list[list[str]]:
    model = PartlyCalled()
    fully_shard([model.first, model] if both else model)
    return recorded_iterations(model, 2)


def test_a_module_inside_of_another_of_its_list_is_as_without_it() -> None:
    assert on_ranks(one_inside_of_the_other, True) == on_ranks(one_inside_of_the_other, False)


# How many groups are gathered ahead ---------------------------------------------------------------


def ahead(depth: int) -> tuple[list[str], list[str]]:
    """Return the events of forward and backward of four blocks, so many of them gathered ahead."""

    def gathers(order: list[int], place: int) -> str:
        """Name what is gathered when a block begins; at first, as many as may be ahead."""
        first = place + depth if place >= 0 else 0
        return "".join(f"gather {block}, " for block in order[first : place + depth + 1])

    order, forward = [0, 1, 2, 3], f"pre_forward root, gather root, {gathers([0, 1, 2, 3], -1)}"
    forward += "wait root, "
    for block in order:
        forward += f"pre_forward {block}, {gathers(order, block)}wait {block}, "
        forward += f"post_forward {block}, free {block}, "
    order, backward, finish = order[::-1], "pre_backward root, " + gathers(order[::-1], -1), ""
    for place, block in enumerate(order):
        backward += f"pre_backward {block}, {gathers(order, place)}wait {block}, "
        backward += f"post_backward {block}, free {block}, {finish}reduce {block}, "
        finish = f"finish {block}, "
    backward += f"post_backward root, {finish}reduce root, finish root, free root"
    return events(forward + "post_forward root"), events(backward)


def with_depth(depth: int) -> list[list[str]]:
    model = shard_net(Net(4))
    model.set_prefetch_depth(depth)
    return recorded_iterations(model, 3)


@pytest.mark.parametrize("depth", [0, 2])
def test_so_many_groups_are_gathered_ahead(depth: int) -> None:
    *_, forward, backward = on_ranks(with_depth, depth)
    assert (forward, backward) == ahead(depth)


# Forwards without gradients, which leave nothing behind -------------------------------------------


def num_references(model: nn.Module) -> int:
    """Count the references in everything that a model holds on to, hooks and groups included."""
    seen, ahead, count = set[int](), list[Any]([model]), 0
    while ahead:
        one = ahead.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType)):
            continue
        seen.add(id(one))
        held = gc.get_referents(one)
        if isinstance(one, FunctionType):
            held = list(one.__closure__ or ())  # not the globals
        ahead, count = ahead + held, count + len(held)
    return count


class Storing(Net):
    """Keeps something of every forward, and calls a block twice."""

    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.inp(x))
        self.kept = x
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def growth(context: Callable[[], Any], reshard: bool | None, trains: bool) -> list[int]:
    _, model = two_nets(2, make=Storing, reshard_after_forward=reshard)
    if trains:
        train_step(model, 0, None)
    counts = []
    for num_forwards in (3, 50):
        for step in range(num_forwards):
            with context():
                model(own_input(step))
        counts.append(num_references(model))
    return counts


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_no_grad_forwards_grow_nothing(context: Callable[[], Any], reshard: bool | None) -> None:
    """Neither do forwards with gradients whose results are dropped."""
    for trains in (False, True):
        for before, after in run_ranks(growth, 2, context, reshard, trains):
            assert before == after > 1000
