"""What explain says of a step is what a step does: launches, messages, bytes sent and copied.

Ranks are kept from sharing memory, so that every message is one that is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from copies import Copies
from subclasses.lossless import wire
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from two_tensors import two_tensor_hooks

from composable_shard import MixedPrecisionPolicy, explain
from composable_shard.insight.explain import Explanation
from composable_shard.testing import run_ranks
from tests.insight import models
from tests.insight.models import inputs_of
from tests.near import Apart

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
    model.synchronize_gradients()


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
        model.synchronize_gradients()
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


def told(explanation: Explanation, num_shards: int, num_replicas: int = 1) -> Sent:
    """Return what explain says, in the numbers that are counted."""
    launches = messages = nbytes = all_reduced = 0
    for group in explanation.groups:
        traffic = group.traffic
        launches += traffic.total.launches
        for part in (traffic.forward_gathers, traffic.backward_gathers, traffic.reductions):
            assert part.nbytes is not None
            messages += part.messages * (num_shards - 1)
            nbytes += part.nbytes
        assert traffic.all_reduces.nbytes is not None
        all_reduced += traffic.all_reduces.nbytes * num_replicas
    copied = sum(copy.nbytes * copy.times for g in explanation.groups for copy in g.copies)
    payload = all_reduced // max(1, 2 * (num_replicas - 1))  # a ring sends it almost twice
    return Sent(launches, messages, nbytes, payload, copied)


def count(case: str) -> tuple[Sent, Explanation, Explanation]:
    model = models.CASES[case]()
    before = explain(model)
    sent = count_step(model)
    return sent, before, explain(model)


@pytest.mark.parametrize("case", models.CASES)
def test_a_step_of_two_ranks(case: str) -> None:
    for sent, before, after in run_ranks(Apart(count), 2, case):
        assert sent == told(before, 2)
        assert after == before


def count_four(num_replicas: int, policy: MixedPrecisionPolicy) -> tuple[Sent, Sent]:
    model = models.hybrid(num_replicas, mp_policy=policy)
    before = explain(model)
    return count_step(model), told(before, 4 // num_replicas, num_replicas)


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), models.BF16_SUMS], ids=["fp32", "bf16"])
def test_replicas(num_replicas: int, policy: MixedPrecisionPolicy) -> None:
    for sent, said in run_ranks(Apart(count_four), 4, num_replicas, policy):
        assert sent == said
        assert sent.all_reduced > 0


def count_parts(num_replicas: int, policy: MixedPrecisionPolicy, width: int) -> tuple[Sent, Sent]:
    model = models.hybrid(num_replicas, width, mp_policy=policy, sharding="hybrid")
    before = explain(model)
    said = told(before, 4 // num_replicas, num_replicas)
    over_replicas = [group.traffic.all_reduces for group in before.groups]
    messages = sum(traffic.messages for traffic in over_replicas) * (num_replicas - 1)
    nbytes = sum(traffic.nbytes or 0 for traffic in over_replicas)
    said = replace(said, messages=said.messages + messages, nbytes=said.nbytes + nbytes)
    return count_step(model), replace(said, all_reduced=0)


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("width", [256, 253])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), models.BF16], ids=["fp32", "bf16"])
def test_replicas_that_share_shards(
    num_replicas: int, policy: MixedPrecisionPolicy, width: int
) -> None:
    for sent, said in run_ranks(Apart(count_parts), 4, num_replicas, policy, width):
        assert sent == said


def count_encoded(policy: MixedPrecisionPolicy, dim: int) -> tuple[Sent, Explanation, int]:
    def place(param: nn.Parameter) -> Shard:
        return Shard(dim % param.ndim)

    options = {"mp_policy": policy, "shard_placement_fn": place}
    precise = explain(models.shard(models.Stack(255, 385), shard_placement_fn=place))
    model = models.shard(models.Stack(255, 385), **options)
    before = explain(model)
    with wire() as exchanged:  # rows for both ranks, one of which is sent
        sent = count_step(model)
    own = exchanged[-len(before.groups) :]
    sent = replace(sent, messages=sent.messages + len(own), nbytes=sent.nbytes + sum(own) // 2)
    return sent, before, told(precise, 2).nbytes


@pytest.mark.parametrize("dim", [0, -1])
def test_int8_costs_little_more_than_a_quarter(dim: int) -> None:
    policy = MixedPrecisionPolicy(gather_wire=torch.int8, reduce_wire=torch.int8)
    for sent, before, precise in run_ranks(Apart(count_encoded), 2, policy, dim):
        said = told(before, 2)
        assert sent == replace(said, copied=sent.copied)
        assert sent.nbytes <= 0.27 * precise
        assert any("torch.int8" in copy.why for copy in before.groups[0].copies)


def count_fewer() -> tuple[Sent, Explanation]:
    model = models.shard(models.Stack(), reshard_after_forward=2)
    before = explain(model)
    return count_step(model), before


def test_fewer_ranks_to_gather_from() -> None:
    for sent, before in run_ranks(Apart(count_fewer), 4):
        said = told(before, 4)
        # One message goes to the one neighbour that keeps the other half, instead of to three.
        regathers = sum(group.traffic.backward_gathers.messages for group in before.groups)
        assert regathers == 3
        assert sent == replace(said, messages=said.messages - 2 * regathers)


def count_subclasses(has_hooks: bool) -> tuple[Sent, Explanation, Explanation]:
    if has_hooks:
        with two_tensor_hooks():
            return count_subclasses_as_they_are()
    return count_subclasses_as_they_are()


def count_subclasses_as_they_are() -> tuple[Sent, Explanation, Explanation]:
    model = models.subclasses()
    before = explain(model)
    sent = count_step(model)
    return sent, before, explain(model)


@pytest.mark.parametrize("has_hooks", [False, True])
def test_tensor_subclasses(has_hooks: bool) -> None:
    for sent, before, after in run_ranks(Apart(count_subclasses), 2, has_hooks):
        said = told(after, 2)
        assert sent == replace(said, copied=sent.copied)
        gathers = before.groups[1].traffic.forward_gathers
        assert gathers.launches == 2  # each subclass has a launch of its own
        assert gathers.nbytes == (
            None if has_hooks else after.groups[1].traffic.forward_gathers.nbytes
        )
