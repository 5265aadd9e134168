"""Copies between host and device that run beside compute: nobody uses their memory too early."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.simulated_device import SimulatedDevice
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, _torch, fully_shard
from composable_shard.core.transport import host
from composable_shard.testing import run_ranks

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


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


def mixed_sync_after_another(model: Any, x: torch.Tensor) -> None:
    """What was reduced is on its way when a backward without sync adds to it."""
    model.set_is_last_backward(False)
    step(model, x)
    model.set_is_last_backward(True)
    with model.no_sync():
        step(model, x)
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
    model[1].set_reshard_after_forward(False)  # a gather in backward would have other values
    model[1].unshard()
    with torch.no_grad():
        for param in model[1].parameters():
            param.mul_(0.5)
    step(model, x)


def fail_in_between(model: Any, x: torch.Tensor) -> None:
    handle = model[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(x)
    handle.remove()
    step(model, x)


def fail_in_backward(model: Any, x: torch.Tensor) -> None:
    """Gradients that a caller zeroes in place after a failure do not come later."""
    step(model, x)
    armed = x.clone().requires_grad_()
    armed.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(armed).square().sum().backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()
    step(model, x)


def memory_runs_out(model: Any, x: torch.Tensor) -> None:
    """What was taken is given back once nothing is on its way into it."""
    copy = host.CopyStream.copy

    def run_out(*args: Any) -> None:
        copy(*args)
        raise MemoryError("on purpose")

    if _torch.has_streams(x.device):
        out_of_memory = mock.patch.object(host.CopyStream, "copy", run_out)
        with out_of_memory, pytest.raises(MemoryError, match="on purpose"):
            model(x)
    step(model, x)


def fail(*_: object) -> None:
    raise ValueError("on purpose")


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
    fail_in_between,
    fail_in_backward,
    memory_runs_out,
    mixed_sync_after_another,
    reduce_over_replicas_later,
]
CASES = [(None, True), (LOW, False)]


def new_model(policy: MixedPrecisionPolicy | None = None, reshard: bool = True) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))
    kwargs: Any = {"mp_policy": policy, "offload_policy": CPUOffloadPolicy()}
    if dist.get_world_size() == 4:
        names = ("replicate", "shard")
        kwargs["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    for block in model:
        fully_shard(block, reshard_after_forward=reshard, **kwargs)
    return fully_shard(model, **kwargs)


def outcome(act: Act, policy: MixedPrecisionPolicy | None, reshard: bool) -> list[torch.Tensor]:
    """Act twice on a new model, with a step after each; return its shards and gradients."""
    model = new_model(policy, reshard)
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
            copy = host.CopyStream.copy
            noted = mock.patch.object(host.CopyStream, "copy", autospec=True, side_effect=copy)
            with SimulatedDevice() as device, noted as copies:
                got = outcome(act, policy, reshard)
            case = f"{act.__name__}, {'bf16' if policy else 'fp32'}, {reshard=}"
            found += [f"{case}: {fault}" for fault in device.faults]
            if not all(map(torch.equal, got, expected)):
                found.append(case)
            ways = 1 if act is hooks else 2  # gradients that hooks see are waited for
            if copies.call_count < ways * 2 * 3:  # in two turns, of three groups
                found.append(f"{case}: {copies.call_count} copies")
    return found


@pytest.mark.brief(1)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_copies_may_be_late(ranks: int) -> None:
    """On four ranks over a hybrid mesh."""
    acts = {
        1: ACTS,
        2: [*ACTS, change_after_unshard],  # alone, it changes the shards
        4: [accumulate, reduce_over_replicas_later],
    }
    assert run_ranks(differences, ranks, acts[ranks], timeout=120) == [[]] * ranks


# The copy stream itself, on streams that record calls -------------------------------------------


class Stream:
    """Stands for a stream of a device; ``events`` lists the calls on all streams, in order."""

    events: ClassVar[list[str]] = []
    current: Stream

    def __init__(self, name: object) -> None:
        self.name = "copies" if isinstance(name, torch.device) else name
        self._outer: list[Stream] = []

    def __enter__(self) -> None:
        self._outer.append(Stream.current)
        Stream.current = self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._outer.pop()

    def wait_stream(self, other: Stream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> Any:
        self.events.append(f"{self.name} records")
        event = mock.MagicMock(**{"__str__.return_value": f"event of {self.name}"})
        event.wait = lambda: Stream.current.wait_event(event)
        return event

    def wait_event(self, event: Any) -> None:
        self.events.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.events.append(f"host waits for {self.name}")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> host.CopyStream:
    Stream.events, Stream.current = [], Stream("compute")
    monkeypatch.setattr(_torch, "make_stream", Stream)
    monkeypatch.setattr(_torch, "current_stream", lambda _: Stream.current)
    monkeypatch.setattr(_torch, "on_stream", lambda stream: stream)
    return host.CopyStream(torch.device("cpu"))


COPY = ["copies waits for compute", "copies records"]


def test_a_copy_begins_after_compute_and_compute_continues_after_it(copies: Any) -> None:
    into, source = torch.zeros(2), torch.ones(2)
    copies.copy(into, source)
    assert torch.equal(into, source) and Stream.current.name == "compute"
    with pytest.raises(ValueError, match="on purpose"), copies.after_compute():
        assert Stream.current.name == "copies"
        fail()
    assert Stream.current.name == "compute"
    copies.copies_event().wait()
    copies.synchronize()
    copies.synchronize()
    assert Stream.events == [
        *COPY,
        "copies waits for compute",
        "copies records",
        "compute waits for event of copies",
        "host waits for copies",
    ]


def test_tensors_are_kept_until_compute_continues_after_their_copy(copies: Any) -> None:
    kept = []
    for number in range(4):
        pair = torch.zeros(2), torch.ones(2)
        kept.append([weakref.ref(tensor) for tensor in pair])
        copies.copy(*pair)
        del pair
        let_go = ["compute waits for event of copies"] if number > 1 else []
        assert Stream.events == COPY + let_go
        Stream.events.clear()
    alive = [all(tensor() is not None for tensor in pair) for pair in kept]
    assert alive == [False, False, True, True]
    copies.synchronize()
    assert not any(tensor() for pair in kept for tensor in pair)
