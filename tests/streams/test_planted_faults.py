"""Faults in the order of streams that were planted are seen, whatever the numbers are.

Each leaves out a wait, frees memory too early or uses a wrong stream, as a mistake would. On one
process of pretended ranks every collective returns at once, and so does every copy: the numbers
would not tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given
from support.happens_before import Block, Memory, Order, Span
from support.simulated_device import Event, SimulatedDevice, Stream, on_simulated_device
from training.cases import Case, cases, reproducible

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, _torch
from composable_shard._torch.streams import on_stream
from composable_shard.core.transport import host, pending
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.pending import Pending, UsedStreams
from composable_shard.core.transport.process_groups import SmallAllReduce
from composable_shard.testing import fake_ranks, run_ranks
from composable_shard.testing.strategies import policies
from streams.models import LOW, NUM_BLOCKS, PROGRAMS, WIDTH, Training

HERE = contextlib.nullcontext()


def instead(owner: object, name: str, value: Any) -> Any:
    return mock.patch.object(owner, name, value)


def forget_works(self: Pending) -> None:
    self._works.clear()
    self._owned.clear()


def launch_and_forget(name: str) -> Callable[..., Any]:
    """Free what a collective reads at its launch."""
    real = getattr(Channel, name)

    def launch(self: Channel, outputs: Any, inputs: Any, *rest: Any) -> Any:
        works = real(self, outputs, inputs, *rest)
        for tensor in inputs:
            _torch.free(tensor)
        return works

    return launch


def waiting_only_for(kind: str) -> Callable[[Pending], None]:
    real = Pending.wait

    def wait(self: Pending) -> None:
        real(self) if kind not in self._op else forget_works(self)

    return wait


def copy_before_compute(self: host.CopyStream) -> Any:
    return self._stream


def arrive_at_once(self: host.CopyStream) -> Any:
    return mock.Mock(wait=lambda: None)


def copy_and_forget(self: host.CopyStream, into: Any, source: Any) -> None:
    self.is_busy = True
    with self.after_compute():
        into.copy_(source, non_blocking=True)


def gather_on_another_stream(self: Channel, *args: Any) -> Any:
    with Stream():
        return real_gather(self, *args)


real_gather = Channel.gather


def continue_at_once(self: Pending, stream: Stream) -> None:
    """Go on on a stream that does not wait for the reduce-scatter."""


def all_reduce_without_works(self: Channel, tensor: Any) -> list[Any]:
    real_all_reduce(self, tensor)
    return []


real_all_reduce = Channel.all_reduce


def wait_unless_given(self: Stream, other: Stream) -> None:
    """Let the streams of the user wait for nobody."""
    if self not in self.simulated.__dict__["of_the_test"]:
        real_wait_stream(self, other)


real_wait_stream = Stream.wait_stream


def fill_without_waiting(self: UsedStreams) -> None:
    with instead(self, "_wait_for_users", lambda _: None):
        real_fill(self)


def wait_for_the_owner_alone(self: UsedStreams, stream: Any) -> None:
    self._users.clear()
    real_wait_for_users(self, stream)


real_fill, real_wait_for_users = UsedStreams.record_fill, UsedStreams._wait_for_users


class Plant(NamedTuple):
    """A fault, the training in which it is seen, and parts of its report."""

    fault: Callable[[], Any]
    program: str
    says: tuple[str, ...]


PLANTS: dict[str, Plant] = {
    "nobody waits for a gather": Plant(
        lambda: instead(Pending, "wait", waiting_only_for("gathering")),
        "plain",
        ("does not wait for all_gather", "writes"),
    ),
    "nobody waits for a reduction": Plant(
        lambda: instead(Pending, "wait", waiting_only_for("reducing")),
        "plain",
        ("does not wait for reduce_scatter", "writes"),
    ),
    "nobody waits for an all-reduce": Plant(
        lambda: instead(Channel, "all_reduce", all_reduce_without_works),
        "replicas",
        ("does not wait for allreduce", "writes"),
    ),
    "what is sent is let go of at the launch": Plant(
        lambda: instead(Channel, "gather", launch_and_forget("gather")),
        "bf16",
        ("has gone back to the compute stream", "does not wait for all_gather", "reads it"),
    ),
    "gradients are let go of at the launch": Plant(
        lambda: instead(Channel, "reduce", launch_and_forget("reduce")),
        "replicas, bf16",
        ("has gone back to the compute stream", "does not wait for reduce_scatter", "reads it"),
    ),
    "a gather is launched on a stream that waits for nobody": Plant(
        lambda: instead(Channel, "gather", gather_on_another_stream),
        "plain",
        ("all_gather", "does not wait for", "on the compute stream"),
    ),
    "an all-reduce does not wait for its reduce-scatter": Plant(
        lambda: instead(Pending, "order_before", continue_at_once),
        "replicas",
        ("allreduce", "does not wait for reduce_scatter"),
    ),
    "memory is freed on the stream that used it last": Plant(
        lambda: instead(UsedStreams, "on_allocating_stream", lambda _: HERE),
        "gathered beside",
        ("has gone back to stream", "on the compute stream"),
    ),
    "memory is freed while another stream than its owner uses it": Plant(
        lambda: instead(UsedStreams, "_wait_for_users", wait_for_the_owner_alone),
        "used beside, freed here",
        ("has gone back to the compute stream", "on stream", "reads it"),
    ),
    "kept memory is filled while another stream uses it": Plant(
        lambda: instead(UsedStreams, "record_fill", fill_without_waiting),
        "kept, gathered without waiting",
        ("all_gather", "does not wait for", "on the compute stream"),
    ),
    "a module does not wait for the stream that gathered": Plant(
        lambda: instead(UsedStreams, "record_use", lambda _: None),
        "gathered beside",
        ("on the compute stream", "does not wait for split_with_sizes_copy on stream"),
    ),
    "a gather is finished where it is waited for": Plant(
        lambda: instead(pending, "_on_side_stream", lambda _: HERE),
        "gathered beside, bf16",
        ("has gone back to stream", "does not wait for"),
    ),
    "gradients are reduced on another stream than theirs": Plant(
        lambda: instead(UsedStreams, "on_last_user", lambda _: HERE),
        "branches, one of them at first",
        ("has gone back to stream", "does not wait for", "reads it"),
    ),
    "copies do not wait for compute": Plant(
        lambda: instead(host.CopyStream, "after_compute", copy_before_compute),
        "offload",
        ("copy_", "does not wait for"),
    ),
    "nobody waits for what is copied to the device": Plant(
        lambda: instead(host.CopyStream, "copies_event", arrive_at_once),
        "offload, one shard",
        ("does not wait for copy_", "writes"),
    ),
    "memory of copies is let go of while another stream gathers from it": Plant(
        lambda: instead(host.CopyStream, "reuse_guard", arrive_at_once),
        "custom, offload, branches",
        ("has gone back to stream", "does not wait for all_gather", "reads it"),
    ),
    "what is copied to the host is let go of": Plant(
        lambda: instead(host.CopyStream, "copy", copy_and_forget),
        "offload",
        ("has gone back to the compute stream", "does not wait for copy_"),
    ),
    "the host reads before copies have arrived": Plant(
        lambda: instead(host, "synchronize", lambda: None),
        "offload",
        ("on the host", "does not wait for copy_"),
    ),
    "the sum of the weights is read before it has arrived": Plant(
        lambda: instead(SmallAllReduce, "wait", lambda self: self._numbers.tolist()),
        "weighed, replicas",
        ("on the compute stream reads", "does not wait for allreduce"),
    ),
    "flags are read before they have arrived": Plant(
        lambda: instead(host, "synchronize", lambda: None),
        "missing gradients",
        ("on the host reads", "does not wait for copy_"),
    ),
    "a hook does not wait for what was reduced": Plant(
        lambda: instead(Stream, "wait_stream", wait_unless_given),
        "a hook",
        ("mul_ on stream", "does not wait for"),
    ),
    "a gather does not wait for the optimizer": Plant(
        lambda: instead(Stream, "record_event", lambda self: Event()),
        "optimizer beside",
        ("all_gather", "does not wait for mul_ on stream"),
    ),
    "memory is freed while a gather writes it": Plant(
        lambda: instead(Pending, "drop", forget_works),
        "dropped",
        ("has gone back to the compute stream", "does not wait for all_gather", "writes it"),
    ),
}


def faults_of(program: str) -> list[str]:
    training = PROGRAMS[program]
    with fake_ranks(training.replicas * training.shards):
        return training.run()[0]


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    plant = PLANTS[name]
    with plant.fault():
        faults = faults_of(plant.program)
    seen = [fault for fault in faults if all(part in fault for part in plant.says)]
    assert seen, faults


@pytest.mark.brief(8)
@pytest.mark.parametrize("program", [n for n, one in PROGRAMS.items() if not one.is_for_any_device])
def test_nothing_is_seen_where_nothing_was_planted(program: str) -> None:
    assert faults_of(program) == []


# What counts as a fault in the order of streams, and what does not ------------------------------

COMPUTE, OTHER = "compute", "another stream"
BESIDE = Span(8, 16)


@pytest.mark.parametrize(
    ("block", "is_allocated", "num_faults"),
    [
        (Block(BESIDE, COMPUTE), True, 1),
        (Block(BESIDE, OTHER), True, 0),
        (Block(BESIDE, COMPUTE, is_of_host=True), True, 0),
        (Block(BESIDE, COMPUTE), False, 0),
    ],
    ids=["of the stream", "of another stream", "of the host", "that was there"],
)
def test_memory_is_given_to_what_its_stream_allocates_next(
    block: Block, is_allocated: bool, num_faults: int
) -> None:
    """Free memory of the compute stream while another one reads it, then allocate."""
    order = Order()
    memory, freed = Memory(order), Block(Span(0, 8), COMPUTE)
    memory.add(freed)
    memory.touch(order.work(OTHER, "read"), [freed.span], [])
    memory.free(freed)
    memory.add(block, is_allocated=is_allocated)
    assert len(memory.faults) == num_faults


def test_a_stream_is_entered_by_an_object_for_each_time() -> None:
    stream = torch.Stream(7, 1, 1)
    first, second = on_stream(stream), on_stream(stream)
    assert first == second == stream
    assert hash(first) == hash(stream)
    assert len({id(one) for one in (first, second, stream)}) == 3


# What fails on a device ---------------------------------------------------------------------------


class _PlannedError(RuntimeError):
    """What a launch raises."""


def failing_at(number: int) -> Any:
    real, numbers = Channel.all_reduce, iter(range(number, -1, -1))

    def all_reduce(self: Channel, tensor: torch.Tensor) -> Any:
        if not next(numbers, None):
            raise _PlannedError
        return real(self, tensor)

    return mock.patch.object(Channel, "all_reduce", all_reduce)


@pytest.mark.parametrize("number", range(NUM_BLOCKS))
@pytest.mark.parametrize("options", [{}, {"mp_policy": LOW}], ids=["fp32", "bf16"])
def test_memory_of_a_failed_launch_goes_back_when_nothing_uses_it(
    number: int, options: dict[str, Any]
) -> None:
    with fake_ranks(4), SimulatedDevice() as device:
        model = Training(replicas=2, options=options).model()
        x = torch.ones(3, WIDTH)
        model(x).sum().backward()
        with failing_at(number), pytest.raises(_PlannedError):
            model(x).sum().backward()
        torch.ones(3)  # allocates what has been freed
        model.reset_iter_state()
        model(x).sum().backward()
    assert device.faults == []


# Numbers are as without a device ------------------------------------------------------------------


@reproducible(12)
@given(cases(), policies(any_inputs=True))
def test_any_tree_follows_any_program_under_any_policy(
    case: Case, policy: MixedPrecisionPolicy
) -> None:
    case.check(within=on_simulated_device, policy=policy, timeout=60)


@reproducible(8)
@given(cases(differs=True))
def test_any_tree_of_which_ranks_use_different_parameters_follows_any_program(case: Case) -> None:
    case.check(within=on_simulated_device, timeout=60)


@reproducible(8)
@given(cases())
def test_any_offloaded_tree_follows_any_program(case: Case) -> None:
    case.check(within=on_simulated_device, offload_policy=CPUOffloadPolicy(), timeout=60)


def train_twice(program: str) -> tuple[list[str], list[bool]]:
    faults, there = PROGRAMS[program].run()
    _, here = PROGRAMS[program].run(simulated=False)
    pairs = zip(there, here, strict=True)
    return faults, [torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs]


# Those that give work to streams cannot be trained without a device.
@pytest.mark.brief(7)
@pytest.mark.parametrize("program", [n for n, one in PROGRAMS.items() if one.is_for_any_device])
def test_training_is_that_of_the_cpu(program: str) -> None:
    num_ranks = PROGRAMS[program].replicas * PROGRAMS[program].shards
    for faults, are_same in run_ranks(train_twice, num_ranks, program, timeout=60):
        assert faults == []
        assert all(are_same) and len(are_same) >= 6
