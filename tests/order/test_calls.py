"""Modules called in chunks, in part, and with backwards of their own inside forward."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import assert_parity, assert_same, average_gradients, full, own_input
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import FSDPModule, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks
from order.recording import events, short

WIDTH = 8  # powers of two, so that sums of chunks have the bits of the oracle


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class ChunkLoss(nn.Module):
    """A body, and a norm with a head that makes the loss chunk by chunk.

    How chunks run their backward:

    - together: none of their own
    - backward: each ``loss.backward()`` within forward, on detached features
    - grad: each ``torch.autograd.grad`` to its features and the head's weights
    - function: within the forward of an autograd function
    """

    def __init__(self, kind: str, num_chunks: int = 3) -> None:
        super().__init__()
        self.body = Body()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.kind = kind
        self.num_chunks = num_chunks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(x))
        if self.kind == "together":
            return self.scale * sum(map(self.loss_of, hidden.chunk(self.num_chunks)))
        loss = _Loss.apply(hidden, self) if self.kind == "function" else self.inside(hidden)
        return self.scale.detach() * loss + self.scale.square().sum()

    def loss_of(self, chunk: torch.Tensor) -> torch.Tensor:
        return self.head(chunk).square().sum()

    def inside(self, hidden: torch.Tensor) -> torch.Tensor:
        total, grad = self.run_chunks(hidden)
        # the value of the loss, with the gradient that its chunks have given
        return total + (hidden * grad).sum() - (hidden * grad).sum().detach()

    def run_chunks(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, grads = torch.zeros(()), []
        if self.kind == "grad" and isinstance(self.head, FSDPModule):
            self.head.unshard()  # the parameters to differentiate are the plain ones
        weights = list(self.head.parameters())
        for chunk in hidden.detach().chunk(self.num_chunks):
            chunk.requires_grad_()
            loss = self.loss_of(chunk)
            if self.kind == "grad":
                chunk_grad, *of_weights = torch.autograd.grad(loss, [chunk, *weights])
                for weight, grad in zip(weights, of_weights, strict=True):
                    weight.grad = grad if weight.grad is None else weight.grad + grad
            else:
                loss.backward()
                assert chunk.grad is not None
                chunk_grad = chunk.grad
            grads.append(chunk_grad)
            total = total + loss.detach()
        return total, torch.cat(grads)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, owner: ChunkLoss) -> torch.Tensor:
        with torch.enable_grad():
            total, grad = owner.run_chunks(hidden)
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * grad, None


Shard = Callable[[ChunkLoss, bool | None], Any]


def grouped(model: ChunkLoss, reshard: bool | None) -> None:
    fully_shard(model.body, reshard_after_forward=reshard)
    fully_shard([model.norm, model.head], reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)


def alone(model: ChunkLoss, reshard: bool | None) -> None:
    for module in (model.body, model.head, model):
        fully_shard(module, reshard_after_forward=reshard)


def run_chunked(shard: Shard, kind: str, reshard: bool | None, sync: bool) -> list[list[str]]:
    torch.manual_seed(0)
    reference = ChunkLoss(kind)
    model = copy.deepcopy(reference)
    shard(model, reshard)
    parts = []
    for step in range(4):
        model.set_requires_gradient_sync(sync or step % 2 == 1)
        with record_events(model) as forward:
            loss = model(own_input(step, rows=6))
        with record_events(model) as backward:
            loss.backward()
        expected = reference(own_input(step, rows=6))
        expected.backward()
        assert_same(loss, expected.detach())
        parts += [short(forward), short(backward)]
        if not sync and step % 2 == 0:
            assert all(p.grad.placements[0].is_partial() for p in sharded_params(model))
            continue
        average_gradients(reference.parameters())
        if sync:
            assert_parity(model, reference)
        else:
            close(model, reference)
        model.zero_grad()
        reference.zero_grad()
    return [[item.replace("norm, head", "head") for item in part] for part in parts]


def sharded_params(model: nn.Module) -> list[DTensor]:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return list(model.parameters())


def close(model: nn.Module, reference: nn.Module) -> None:
    for param, expected in zip(sharded_params(model), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


KINDS = ["together", "backward", "grad", "function"]


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", [grouped, alone])
def test_chunked_loss_is_reduced_once(shard: Shard, kind: str, reshard: bool | None) -> None:
    first, second = run_ranks(run_chunked, 2, shard, kind, reshard, True)
    assert first == second
    for step, (forward, backward) in enumerate(zip(first[::2], first[1::2], strict=True)):
        for group in ("root", "body", "head"):
            assert forward.count(f"reduce {group}") == 0
            assert backward.count(f"reduce {group}") == 1, (group, backward)
            if step:  # once the order is known
                assert forward.count(f"gather {group}") == (0 if step == 0 else 1), forward
            assert backward.count(f"gather {group}") <= 1
        if kind in ("backward", "function") and shard is alone:  # the head's backward is over
            assert "gather head" not in backward
        assert [item for item in backward if "free" not in item][-1] == "finish root"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", [grouped, alone])
def test_chunked_loss_without_sync(shard: Shard, kind: str) -> None:
    first, second = run_ranks(run_chunked, 2, shard, kind, None, False)
    assert first == second
    for step, backward in enumerate(first[1::2]):
        for group in ("root", "body", "head"):
            assert backward.count(f"reduce {group}") == step % 2
            assert backward.count(f"accumulate {group}") == 1 - step % 2


INSIDE_FORWARD = """
    pre_forward root, gather root, gather body, wait root,
    pre_forward body, gather head, wait body, post_forward body, free body,
    pre_forward head, wait head, post_forward head, pre_backward head, post_backward head,
    pre_forward head, post_forward head, pre_backward head, post_backward head,
    pre_forward head, post_forward head, pre_backward head, post_backward head, free head,
    post_forward root"""
INSIDE_BACKWARD = """
    pre_backward root, gather body, reduce head, post_backward root,
    pre_backward body, wait body, post_backward body,
    finish head, reduce body, finish body, reduce root, finish root, free root, free body"""


def test_events_of_backwards_inside_forward() -> None:
    """The head is gathered once for all chunks, and reduced when the backward of forward begins."""
    first, _ = run_ranks(run_chunked, 2, alone, "backward", None, True)
    forward, backward = first[-2:]
    assert forward == events(INSIDE_FORWARD)
    assert backward == events(INSIDE_BACKWARD)


# Training inside forward ------------------------------------------------------------------------


class TrainingStep(nn.Module):
    """Does all of forward and backward in its forward, and returns the loss without a graph."""

    def __init__(self, num_losses: int) -> None:
        super().__init__()
        self.net = ChunkLoss("together")
        self.num_losses = num_losses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = [self.net(x * (1 + step)) for step in range(self.num_losses)]
        for loss in losses[:-1]:
            loss.backward()
        losses[-1].backward()
        return torch.stack([loss.detach() for loss in losses])


def train_inside(num_losses: int, reshard: bool | None) -> list[int]:
    torch.manual_seed(0)
    reference = TrainingStep(num_losses)
    model = copy.deepcopy(reference)
    alone(model.net, reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, reference)]
    counts = []
    for step in range(3):
        with record_events(model, "reduce_scatter") as recorded:
            losses = model(own_input(step, rows=6))
        assert_same(losses, reference(own_input(step, rows=6)))
        average_gradients(reference.parameters())
        if num_losses == 1:
            assert_parity(model, reference)
        else:
            close(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        reference.load_state_dict({k: full(v) for k, v in model.state_dict().items()})
        counts.append(len(recorded))
    return counts


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("num_losses", [1, 3])
def test_all_of_training_inside_forward(num_losses: int, reshard: bool | None, ranks: int) -> None:
    """What several backwards inside one forward leave is reduced once, when forward ends."""
    assert run_ranks(train_inside, ranks, num_losses, reshard) == [[3, 3, 3]] * ranks


class Failing(ChunkLoss):
    """Fails in the backward of its second chunk."""

    fails = False

    def loss_of(self, chunk: torch.Tensor) -> torch.Tensor:
        loss = super().loss_of(chunk)
        self.calls = getattr(self, "calls", 0) + 1
        if self.fails and self.calls == 2:
            loss.register_hook(_raise)
        return loss


def _raise(*_: object) -> None:
    raise torch.OutOfMemoryError("inside")


@on_ranks(2)
def test_a_backward_inside_forward_that_fails_leaves_nothing() -> None:
    torch.manual_seed(0)
    reference = Failing("backward")
    model = copy.deepcopy(reference)
    alone(model, None)
    for step in range(4):
        model.fails, model.calls = step in (0, 2), 0
        if model.fails:
            with pytest.raises(torch.OutOfMemoryError, match="inside"):
                model(own_input(step, rows=6))
            continue
        for one in (model, reference):
            one.zero_grad()
            one(own_input(step, rows=6)).backward()
        average_gradients(reference.parameters())
        assert_parity(model, reference)


# Modules that are called again and again --------------------------------------------------------


class Repeated(nn.Module):
    """One block that is called several times in a row, and two that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.same = Body()
        self.same.linear = nn.Linear(4, 4)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
        for _ in range(times):
            x = self.same(x)
        for _ in range(2):
            x = self.right(torch.tanh(self.left(x)))
        return x


def repeat(num_forwards: int, reshard: bool | None, times: list[int]) -> list[list[str]]:
    torch.manual_seed(0)
    reference = Repeated()
    model = copy.deepcopy(reference)
    for module in (model.same, model.left, model.right, model):
        fully_shard(module, reshard_after_forward=reshard)
    parts = []
    for step, count in enumerate(times):
        losses = []
        for one in (model, reference):
            with record_events(model) as forward:
                losses.append(
                    sum(
                        one(own_input(step + 10 * index), count).square().sum()
                        for index in range(num_forwards)
                    )
                )
            if one is model:
                parts.append(short(forward))
        with record_events(model) as backward:
            losses[0].backward()
        losses[1].backward()
        parts.append(short(backward))
        assert_same(losses[0], losses[1].detach())
        average_gradients(reference.parameters())
        assert_parity(model, reference)
        model.zero_grad()
        reference.zero_grad()
    return parts


@pytest.mark.parametrize("num_forwards", [1, 3])
@pytest.mark.parametrize("reshard", [True, None])
def test_modules_called_several_times(num_forwards: int, reshard: bool | None) -> None:
    first, second = run_ranks(repeat, 2, num_forwards, reshard, [3, 3, 3, 1, 4])
    assert first == second
    for step, (forward, backward) in enumerate(zip(first[::2], first[1::2], strict=True)):
        gathers = forward.count("gather same")
        assert gathers == num_forwards if step in (1, 2) else gathers <= 4 * num_forwards
        assert forward.count("gather left") == 2 * num_forwards
        for group in ("same", "left", "right"):
            assert backward.count(f"gather {group}") <= 1
            assert backward.count(f"reduce {group}") == 1
            both = forward + backward
            assert both.count(f"free {group}") == both.count(f"gather {group}")


def test_modules_called_several_times_that_stay_gather_once() -> None:
    first, _ = run_ranks(repeat, 2, 3, False, [3, 3])
    for forward, backward in zip(first[::2], first[1::2], strict=True):
        assert sum(item.startswith("gather") for item in forward) == 3
        assert not [item for item in backward if item.startswith("gather")]


# Groups that are called in part -----------------------------------------------------------------


class Parts(nn.Module):
    """A group of three, of which forward calls those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        for index in which:
            x = torch.tanh(self.parts[index](x))
        return x


def call_parts(by_rank: bool) -> list[tuple[int, int]]:
    torch.manual_seed(0)
    reference = Parts()
    model = copy.deepcopy(reference)
    fully_shard(list(model.parts))
    fully_shard(model)
    counts = []
    for step, which in enumerate(([0], [1, 2], [2, 0, 2], [0, 1, 2], [1], [0, 1, 2, 0, 1])):
        own = which[: 1 + dist.get_rank()] if by_rank else which
        for one in (model, reference):
            with record_events(model, "all_gather", "reduce_scatter") as recorded:
                one(own_input(step), own).square().sum().backward()
            if one is model:
                events_of = [event for event, _ in recorded]
                counts.append((events_of.count("all_gather"), events_of.count("reduce_scatter")))
        if not by_rank:
            average_gradients(reference.parameters())
        else:
            average_over_users(reference)
        assert_parity(model, reference)
        model.zero_grad()
        reference.zero_grad()
    return counts


def average_over_users(reference: nn.Module) -> None:
    """Average gradients that some ranks have; those that none has stay ``None``."""
    for param in reference.parameters():
        used = torch.tensor([float(param.grad is not None)])
        dist.all_reduce(used)
        if used.item():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    average_gradients(reference.parameters())


@pytest.mark.parametrize("by_rank", [False, True])
def test_groups_called_in_part(by_rank: bool) -> None:
    first, second = run_ranks(call_parts, 2, by_rank)
    assert first == second
    # in part, or more than once: gathered for forward and for backward, and reduced once
    assert all(gathers <= 3 and reductions == 1 for gathers, reductions in first)


# Chunks of a loss in the training loop ------------------------------------------------------------


def chunks_in_the_loop(retains: bool) -> list[list[str]]:
    """Run a backward for each chunk of the output; only the last one is with sync."""
    torch.manual_seed(0)
    reference = nn.Sequential(OrderedDict(body=Body(), head=nn.Linear(WIDTH, 3)))
    model = copy.deepcopy(reference)
    fully_shard(model.body)
    fully_shard(model)
    parts = []
    for step in range(3):
        outputs = [one(own_input(step, rows=4)) for one in (model, reference)]
        with record_events(model) as recorded:
            for index in range(4):
                is_last = index == 3
                model.set_requires_gradient_sync(is_last)
                model.set_is_last_backward(is_last)
                model.set_reshard_after_backward(is_last)
                for output in outputs:
                    chunk = output[index : index + 1].square().sum()
                    chunk.backward(retain_graph=retains or not is_last)
        parts.append(short(recorded))
        average_gradients(reference.parameters())
        close(model, reference)
        model.zero_grad()
        reference.zero_grad()
    return parts


@pytest.mark.parametrize("retains", [False, True])
def test_chunks_in_the_training_loop_are_gathered_and_reduced_once(retains: bool) -> None:
    first, second = run_ranks(chunks_in_the_loop, 2, retains)
    assert first == second
    for events_of in first:
        assert events_of.count("gather body") <= 1
        assert events_of.count("reduce body") == 1
        assert events_of.count("accumulate body") == 3


class Partial(nn.Module):
    """A layer of whose parameters one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class PartialStep(nn.Module):
    """Runs a backward in its forward, whose end alone tells that no more gradients come."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Partial()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().sum()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_gradients_of_a_backward_inside_forward_that_none_completes() -> None:
    torch.manual_seed(0)
    reference = PartialStep()
    model = copy.deepcopy(reference)
    fully_shard(model.layer)
    fully_shard(model)
    for step in range(3):
        for one in (model, reference):
            one(own_input(step))
        average_gradients(reference.parameters())
        assert model.layer.unused.grad is None
        for mine, other in zip(
            model.layer.linear.parameters(), reference.layer.linear.parameters(), strict=True
        ):
            assert mine.grad is not None and other.grad is not None
            assert_same(full(mine.grad), other.grad)
        for one in (model, reference):
            one.zero_grad()
