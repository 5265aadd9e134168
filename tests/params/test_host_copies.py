"""Copies between host and device that run beside compute, as late as they may.

A lane of the tests copies only when something waits for it that has to. So whoever reads too early,
writes too early or frees too early gets other numbers than without a lane, or an error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, _torch, fully_shard
from composable_shard.core.comms import host_copies
from composable_shard.core.grads import mesh_gradients, route
from composable_shard.core.params import bucket
from composable_shard.testing import run_ranks

UNPINNED = CPUOffloadPolicy(pin_memory=False)
LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ALONE = _torch.num_uses(torch.empty(1))


class LateLane:
    """Stands for a lane of a device; copies are made when they are waited for."""

    made = 0

    def __init__(self, device: torch.device) -> None:
        self.left: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.lent: list[tuple[int, torch.Tensor]] = []
        self.num_launched = 0
        self.num_made = 0

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self.left.append((into, source))
        self.num_launched += 1

    def make(self, num_launched: int) -> None:
        while self.num_made < num_launched:
            into, source = self.left.pop(0)
            for tensor in (into, source):
                assert tensor.untyped_storage().size() >= tensor.nbytes, "memory was freed"
                num_names = 4  # here: two, those that are looped over, and the argument below
                is_kept = sys.getrefcount(tensor) > num_names or _torch.num_uses(tensor) > ALONE
                assert is_kept, "nobody keeps the memory"
            into.copy_(source)
            self.num_made += 1
            LateLane.made += 1

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        self.settle()
        yield

    def arrival(self) -> Any:
        return mock.Mock(wait=partial(self.make, self.num_launched))

    def lend(self, source: torch.Tensor) -> None:
        self.lent.append((self.num_launched, source))
        if len(self.lent) > host_copies._MOST_LENT:
            num_launched, _ = self.lent.pop(0)
            self.make(num_launched)

    def settle(self) -> None:
        self.make(self.num_launched)
        self.lent.clear()


@contextlib.contextmanager
def late_lanes() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(host_copies, "Lane", LateLane))
        stack.enter_context(mock.patch.dict(host_copies._uploads, clear=True))
        stack.enter_context(mock.patch.dict(host_copies._downloads, clear=True))
        for user in (bucket, route, mesh_gradients):
            stack.enter_context(
                mock.patch.object(user, "copies_beside_compute", lambda policy, _: bool(policy))
            )
        LateLane.made = 0
        yield


Act = Callable[[Any, torch.Tensor], None]


def step(model: Any, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def accumulate(model: Any, x: torch.Tensor) -> None:
    for _ in range(3):
        step(model, x)


def accumulate_without_sync(model: Any, x: torch.Tensor) -> None:
    step(model, x)
    with model.no_sync():
        step(model, x)
    step(model, 2 * x)


def backward_then_another(model: Any, x: torch.Tensor) -> None:
    """As in pipelines: the first one does not wait for its reductions."""
    model.set_is_last_backward(False)
    step(model, x)
    model.set_is_last_backward(True)
    step(model, x)


def hooks(model: Any, x: torch.Tensor) -> None:
    """Hooks see the gradient, and what they return counts."""
    handles = [param.register_hook(lambda grad: grad * 2) for param in model[0].parameters()]
    step(model, x)
    for handle in handles:
        handle.remove()


def change_after_forward(model: Any, x: torch.Tensor) -> None:
    """What a forward used may be written as soon as it has returned, as by averages of weights."""
    with torch.no_grad():
        output = model(x)
        for param in model.parameters():
            param.mul_(0.5)
        x = x + output.float().square().sum() / 1000
    step(model, x)


def change_after_unshard(model: Any, x: torch.Tensor) -> None:
    model[1].unshard()
    with torch.no_grad():
        for param in model[1].parameters():
            param.mul_(0.5)
    step(model, x)


def fail_in_between(model: Any, x: torch.Tensor) -> None:
    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    handle = model[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(x)
    handle.remove()
    step(model, x)


def reduce_over_replicas_later(model: Any, x: torch.Tensor) -> None:
    model.set_requires_all_reduce(False)
    accumulate(model, x)
    model.set_requires_all_reduce(True)
    step(model, x)


ACTS = [
    step,
    accumulate,
    accumulate_without_sync,
    backward_then_another,
    hooks,
    change_after_forward,
    change_after_unshard,
    fail_in_between,
    reduce_over_replicas_later,
]
CASES = [(None, True), (LOW, False)]


def outcome(act: Act, policy: MixedPrecisionPolicy | None, reshard: bool) -> list[torch.Tensor]:
    """Act twice on a new model, with a step after each; return its shards and gradients."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))
    kwargs: Any = {"mp_policy": policy, "offload_policy": UNPINNED}
    if dist.get_world_size() == 4:
        names = ("replicate", "shard")
        kwargs["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for block in model:
        fully_shard(block, reshard_after_forward=reshard, **kwargs)
    fully_shard(model, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seen = []
    for turn in range(2):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(turn + dist.get_rank()))
        act(model, x)
        seen += [param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [param.to_local().clone() for param in model.parameters()]


def differences(acts: list[Act]) -> list[str]:
    found = []
    for act in acts:
        for policy, reshard in CASES:
            expected = outcome(act, policy, reshard)
            with late_lanes():
                got = outcome(act, policy, reshard)
            case = f"{act.__name__}, {'bf16' if policy else 'fp32'}, {reshard=}"
            if not all(map(torch.equal, got, expected)):
                found.append(case)
            if LateLane.made < 2 * 2 * 3:  # both ways, in two turns, of three groups
                found.append(f"{case}: {LateLane.made} copies")
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_may_be_late(ranks: int) -> None:
    assert run_ranks(differences, ranks, ACTS, timeout=60) == [[]] * ranks


def test_copies_may_be_late_on_a_hybrid_mesh() -> None:
    acts = [accumulate, reduce_over_replicas_later]
    assert run_ranks(differences, 4, acts, timeout=60) == [[]] * 4


def sources_kept() -> int:
    """Return how many gradients of ten groups were kept on the device at the end of backward."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    for layer in model:
        fully_shard(layer, offload_policy=UNPINNED)
    fully_shard(model)
    most = 0
    lend = LateLane.lend

    def count(lane: LateLane, source: torch.Tensor) -> None:
        nonlocal most
        lend(lane, source)
        most = max(most, len(lane.lent))

    with late_lanes(), mock.patch.object(LateLane, "lend", count):
        model(torch.ones(2, 4)).sum().backward()
    return most


def test_few_gradients_wait_on_the_device() -> None:
    assert run_ranks(sources_kept, 2) == [2, 2]
