"""A sharded model that runs within the backward of another one is a model like any other."""

from __future__ import annotations

import copy

import pytest
import torch
from gathered import nbytes_of, note_gathered
from nets import Net, average_gradients, own_input, shard_net
from torch import nn

from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks


def distill(kept: bool, trains: bool) -> list[str]:
    """Let a teacher add to the gradient of a student's output, in the student's backward."""
    plain_student, plain_teacher = Net(), Net()
    student = shard_net(copy.deepcopy(plain_student))
    teacher = shard_net(copy.deepcopy(plain_teacher), reshard_after_forward=not kept)
    found = []

    def loss_of(model: nn.Module, guide: nn.Module, step: int) -> torch.Tensor:
        out = model(own_input(step))

        def guided(grad: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(trains):
                wanted = guide(own_input(step + 10))
                if trains:  # a backward of the teacher within that of the student
                    wanted.square().sum().backward()
            return grad + wanted.detach()

        out.register_hook(guided)
        return out.square().sum()

    gathered = note_gathered(teacher.blocks[0])
    for step in range(3):
        for model, guide in ((student, teacher), (plain_student, plain_teacher)):
            loss_of(model, guide, step).backward()
        for model, oracle in ((student, plain_student), (teacher, plain_teacher)):
            average_gradients(oracle.parameters())
            for (name, param), expected in zip(
                model.named_parameters(), oracle.parameters(), strict=True
            ):
                grad, wanted = param.grad, expected.grad
                if (grad is None) != (wanted is None):
                    found.append(f"{step} {name}: {grad} for {wanted}")
                elif grad is not None and not torch.allclose(grad.full_tensor(), wanted):  # type: ignore[attr-defined, arg-type]
                    found.append(f"{step} {name}: off")
                param.grad = expected.grad = None
        with torch.no_grad():  # what is gathered must not be what was before
            for param in (*teacher.parameters(), *plain_teacher.parameters()):
                param.mul_(1.5)
        if not kept and any(nbytes_of(gathered)):
            found.append(f"{step}: not freed")
    return found


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_a_teacher_within_the_backward_of_a_student(kept: bool, trains: bool) -> None:
    assert run_ranks(distill, 2, kept, trains, timeout=60) == [[]] * 2


def events_within() -> list[tuple[str, str]]:
    student, teacher = shard_net(Net()), shard_net(Net())
    out = student(own_input())
    found: list[tuple[str, str]] = []

    def guided(grad: torch.Tensor) -> None:
        with record_events(teacher, "all_gather", "reshard") as recorded, torch.no_grad():
            teacher(own_input())
        found.extend(recorded)

    out.register_hook(guided)
    out.sum().backward()
    return found


def test_it_is_gathered_and_freed_layer_by_layer() -> None:
    expected = [
        ("all_gather", ""),
        *[("all_gather", "blocks.0"), ("reshard", "blocks.0")],
        *[("all_gather", "blocks.1"), ("reshard", "blocks.1")],
        ("reshard", ""),
    ]
    assert run_ranks(events_within, 2, timeout=60) == [expected] * 2
