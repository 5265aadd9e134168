"""Events where modules are grouped, nested, checkpointed, or accumulate without sync."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from nets import Net, average_gradients, own_input, shard_net, two_nets
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from composable_shard import fully_shard
from composable_shard.insight.events import record_events
from order.test_events import events, on_ranks, recorded_iterations, short

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
    return parts


def test_without_sync_gradients_are_accumulated_and_nothing_is_sent() -> None:
    first, second, last = on_ranks(accumulate_twice)
    assert (
        first
        == second
        == events(
            """pre_backward root, gather 1,
        pre_backward 1, wait 1, gather 0, post_backward 1, free 1, accumulate 1,
        pre_backward 0, wait 0, post_backward 0, free 0, accumulate 0,
        post_backward root, accumulate root, free root"""
        )
    )
    assert last == events(
        """pre_backward root, gather 1,
        pre_backward 1, wait 1, gather 0, post_backward 1, free 1, reduce 1,
        pre_backward 0, wait 0, post_backward 0, free 0, finish 1, reduce 0,
        post_backward root, finish 0, reduce root, finish root, free root"""
    )


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


class ChunkedHead(nn.Module):
    """A norm and a head; the head is called once for each chunk of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, num_chunks: int = 2) -> torch.Tensor:
        hidden = self.norm(self.body(x))
        return sum(self.head(chunk).square().sum() for chunk in hidden.chunk(num_chunks))


def chunked_head() -> list[list[str]]:
    reference = ChunkedHead()
    model = ChunkedHead()
    model.load_state_dict(reference.state_dict())
    fully_shard([model.norm, model.head])
    fully_shard(model)
    parts = []
    for step in range(2):
        x = own_input(step, rows=6)
        with record_events(model) as recorded:
            loss = model(x, 3)
        parts.append(short(recorded))
        with record_events(model) as recorded:
            loss.backward()
        parts.append(short(recorded))
        expected = reference(x, 3)
        expected.backward()
        assert loss.item() == expected.item()
    average_gradients(reference.parameters())
    assert_close_gradients(model, reference)
    return [[item.replace("norm, head", "tail") for item in part] for part in parts]


def assert_close_gradients(model: nn.Module, reference: nn.Module) -> None:
    model.reshard()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-6)


def test_a_chunked_head_is_reduced_once() -> None:
    parts = on_ranks(chunked_head)
    for forward, backward in zip(parts[::2], parts[1::2], strict=True):
        # The group has run in full when the head has run once; later calls gather it once more.
        assert forward.count("gather tail") <= 2
        assert forward.count("pre_forward tail") == 4
        assert backward.count("gather tail") <= 1
        assert backward.count("reduce tail") == backward.count("reduce root") == 1
        assert backward.count("free tail") == 1


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
        "pre_forward root, gather root, wait root, gather pair, "
        "pre_forward pair, wait pair, post_forward pair, "
        "post_forward root, free pair"
    )
    assert second_backward == events(
        "pre_backward root, gather pair, post_backward root, "
        "pre_backward pair, wait pair, post_backward pair, reduce pair, "
        "finish pair, reduce root, finish root, free root, free pair"
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


# Nested ---------------------------------------------------------------------------------------


def nested() -> list[list[str]]:
    model = Net(1)
    fully_shard(model.blocks[0].up)
    fully_shard(model.blocks[0])
    fully_shard(model)
    return recorded_iterations(model, 2)


def test_a_group_within_a_group() -> None:
    *_, forward, backward = on_ranks(nested)
    assert forward == events(
        """pre_forward root, gather root, wait root, gather 0,
        pre_forward 0, wait 0, gather 0.up,
        pre_forward 0.up, wait 0.up, post_forward 0.up, free 0.up,
        post_forward 0, free 0, post_forward root"""
    )
    assert backward == events(
        """pre_backward root, gather 0,
        pre_backward 0, wait 0, gather 0.up,
        pre_backward 0.up, wait 0.up, post_backward 0.up, free 0.up, reduce 0.up,
        post_backward 0, free 0, finish 0.up, reduce 0,
        post_backward root, finish 0, reduce root, finish root, free root"""
    )


# Checkpointing --------------------------------------------------------------------------------


class CheckpointedNet(Net):
    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.out(x)


def wrapped_outside(model: Net) -> Net:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(fully_shard(block))
    return fully_shard(model)


def wrapped_inside(model: Net) -> Net:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = fully_shard(checkpoint_wrapper(block))
    return fully_shard(model)


def checkpointed(make: type[Net], shard: Callable[[Net], Net], reentrant: bool) -> list[list[str]]:
    reference, model = Net(2), make(2)
    model.load_state_dict(reference.state_dict())
    model.use_reentrant = reentrant
    shard(model)
    parts = recorded_iterations(model, 2)
    for _ in range(2):
        reference(own_input()).sum().backward()
    average_gradients(reference.parameters())
    assert_close_gradients(model, reference)
    return [[item.replace("._checkpoint_wrapped_module", "") for item in part] for part in parts]


@pytest.mark.parametrize(
    ("make", "shard", "reentrant"),
    [
        (CheckpointedNet, shard_net, False),
        (CheckpointedNet, shard_net, True),
        (Net, wrapped_outside, False),
        (Net, wrapped_inside, False),
    ],
)
def test_checkpointing_gathers_each_block_once_more_at_most(
    make: type[Net], shard: Callable[[Net], Net], reentrant: bool
) -> None:
    parts = on_ranks(checkpointed, make, shard, reentrant)
    for forward, backward in zip(parts[::2], parts[1::2], strict=True):
        for block in ("0", "1"):
            assert forward.count(f"gather {block}") == 1
            assert backward.count(f"gather {block}") == 1
            assert backward.count(f"reduce {block}") == 1
            assert backward.count(f"free {block}") == 1
        assert forward.count("gather root") == 1 and backward.count("gather root") == 0
        assert backward[-2:] == ["finish root", "free root"]


def test_checkpointing_of_blocks_that_stay_gathers_nothing_in_backward() -> None:
    shard = partial(shard_net, reshard_after_forward=False)
    for backward in on_ranks(checkpointed, CheckpointedNet, shard, False)[1::2]:
        assert not [item for item in backward if item.startswith("gather")]
        assert backward.count("reduce 0") == backward.count("reduce 1") == 1
