"""Modules called in chunks, and with backwards of their own inside forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import assert_parity, assert_same, average_gradients, full, own_input
from on_ranks import on_ranks
from torch import nn

from composable_shard import FSDPModule, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks
from order.recording import short

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


def run_chunked(shard: Shard, kind: str, reshard: bool | None) -> list[list[str]]:
    torch.manual_seed(0)
    reference = ChunkLoss(kind)
    model = copy.deepcopy(reference)
    shard(model, reshard)
    parts = []
    for step in range(4):
        with record_events(model) as forward:
            loss = model(own_input(step, rows=6))
        with record_events(model) as backward:
            loss.backward()
        expected = reference(own_input(step, rows=6))
        expected.backward()
        assert_same(loss, expected.detach())
        parts += [short(forward), short(backward)]
        average_gradients(reference.parameters())
        assert_parity(model, reference)
        model.zero_grad()
        reference.zero_grad()
    return [[item.replace("norm, head", "head") for item in part] for part in parts]


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("kind", ["together", "backward", "grad", "function"])
@pytest.mark.parametrize("shard", [grouped, alone])
def test_chunked_loss_is_reduced_once(shard: Shard, kind: str, reshard: bool | None) -> None:
    first, second = run_ranks(run_chunked, 2, shard, kind, reshard)
    assert first == second
    for step, (forward, backward) in enumerate(zip(first[::2], first[1::2], strict=True)):
        for group in ("root", "body", "head"):
            assert forward.count(f"reduce {group}") == 0
            assert backward.count(f"reduce {group}") == 1, (group, backward)
            if step:  # once the order is known
                assert forward.count(f"gather {group}") == 1, forward
            assert backward.count(f"gather {group}") <= 1
        if kind == "together" and shard is grouped:
            # The group has run in full when the head has run once; later calls gather it again.
            assert forward.count("pre_forward head") == 4 and forward.count("gather head") <= 2
            assert backward.count("free head") == 1
        if kind in ("backward", "function") and shard is alone:  # the head's backward is over
            assert "gather head" not in backward
        assert [item for item in backward if "free" not in item][-1] == "finish root"


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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("num_losses", [1, 3])
@on_ranks("ranks")
def test_all_of_training_inside_forward(num_losses: int, reshard: bool | None) -> None:
    """What several backwards inside one forward leave is reduced once, when forward ends."""
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
            for module in (model, model.net, model.net.body, model.net.head):
                module.reshard()
            for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        reference.load_state_dict({k: full(v) for k, v in model.state_dict().items()})
        counts.append(len(recorded))
    assert counts == [3, 3, 3]
