"""What a step of a sharded model really sends and copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from copies import Copies
from torch import Tensor, nn

from tests.insight.models import inputs_of

NUM_WARMUP_STEPS = 2


@dataclass
class Sent:
    """What this rank sent in one step."""

    launches: int
    messages: int
    nbytes: int
    all_reduced: int
    copied: int


def step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def count_step(model: nn.Module) -> Sent:
    """Count one step, some steps after the first."""
    x = inputs_of(model)
    for _ in range(NUM_WARMUP_STEPS):
        step(model, x)
    reduced: list[int] = []
    with ExitStack() as stack:
        copies = stack.enter_context(Copies())
        stack.enter_context(noted_all_reduces(reduced))
        copies.phase = "forward"
        model.zero_grad()
        loss = model(x).square().mean()
        copies.phase = "backward"
        loss.backward()
    counts = copies.counts
    return Sent(
        counts.collectives, counts.messages, counts.sent, sum(reduced), sum(counts.moved.values())
    )


@contextmanager
def noted_all_reduces(nbytes: list[int]) -> Iterator[None]:
    """Note the bytes of each all-reduce."""
    before = dist.all_reduce

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nbytes.append(tensor.nbytes)
        return before(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", call):
        yield
