"""What a device needs of the communication: right waits, and memory that lives long enough."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nets import assert_parity, average_gradients, own_input, two_nets
from on_ranks import on_ranks
from support.simulated_device import SimulatedDevice, Stream
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import AllGather, ReduceScatter, fully_shard
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import BackendMemory
from composable_shard.mesh import resolve_mesh
from composable_shard.testing import fake_ranks, run_ranks
from transport.own_collectives import Allocating

CUDA = torch.device("cuda", 0)


@on_ranks(2)
def test_gloo_sends_memory_of_the_host_alone_from_rank_to_rank() -> None:
    mesh = resolve_mesh(init_device_mesh("cpu", (2,)))
    on_device = dataclasses.replace(mesh, device=CUDA)
    channels = [Channel(one) for one in (mesh, on_device)]
    direct = ["DirectAllGather", "DirectReduceScatter"]
    assert (
        [[type(c).__name__ for c in (one.all_gather, one.reduce_scatter)] for one in channels]
    ) == ([direct, ["UncoalescedAllGather", "CoalescedReduceScatter"]])


def note(group: Any, names: set[str], name: str, real: Any, *args: Any, **kwargs: Any) -> Any:
    names.add(name)
    return real(group, *args, **kwargs)


@on_ranks(2)
def test_gloo_launches_no_coalesced_all_gather() -> None:
    mesh, names = resolve_mesh(init_device_mesh("cpu", (2,))), set[str]()
    every = [name for name in dir(dist.ProcessGroup) if "gather" in name]
    ways = [Channel(mesh), *(Channel(dataclasses.replace(mesh, device=CUDA)) for _ in range(2))]
    ways[2].use_memory(
        BackendMemory(lambda shape, dtype, _: torch.empty(tuple(shape), dtype=dtype))
    )
    found = []
    for channel in ways:
        names.clear()
        with contextlib.ExitStack() as stack:
            for name in every:
                real = getattr(dist.ProcessGroup, name)
                noted = functools.partialmethod(note, names, name, real)
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, noted))
            inputs = [[torch.full((n,), 1.0 + n * dist.get_rank()) for n in (3, 5)]] * 2
            outputs = [[torch.empty(2 * n) for n in (3, 5)] for _ in range(2)]
            works = [channel.gather(*pair) for pair in zip(outputs, inputs, strict=True)]
            for work in itertools.chain(*works):
                work.wait()
        for tensor, n in zip(itertools.chain(*outputs), (3, 5, 3, 5), strict=True):
            assert torch.equal(tensor, torch.tensor([1.0, 1.0 + n]).repeat_interleave(n))
        found.append(set(names))
    assert not any("coalesced" in name for names in found for name in names)
    assert found[1:] == [{"_allgather_base"}] * 2  # the first sends from rank to rank


class Work:
    """A collective on a stream of its own: it reads what is sent when it is waited for."""

    def __init__(self, sent: torch.Tensor, act: Any) -> None:
        self._sent = weakref.ref(sent)
        self._act = act

    def wait(self) -> None:
        sent = self._sent()
        assert sent is not None, "the memory has been freed"
        self._act(sent)


class LateAllGather(Allocating, AllGather):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Work:
        output = output_tensor
        return Work(
            input_tensor, lambda sent: dist.all_gather_into_tensor(output, sent, group=group)
        )


class LateReduceScatter(Allocating, ReduceScatter):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Work:
        def reduce(sent: torch.Tensor) -> None:
            dist.all_reduce(sent, op, group=group)
            output_tensor.copy_(sent.chunk(group.size())[group.rank()])

        return Work(input_tensor, reduce)


def train_late() -> list[float]:
    model: Any = nn.Linear(4, 2, bias=False)
    nn.init.ones_(model.weight)
    fully_shard(model)
    model.set_custom_all_gather(LateAllGather())
    model.set_custom_reduce_scatter(LateReduceScatter())
    output = model(torch.full((1, 4), 1.0 + dist.get_rank()))
    output.sum().backward()
    return [*output[0].tolist(), *model.weight.grad.full_tensor().view(-1).tolist()]


def test_what_a_custom_collective_sends_lives_until_it_has_been_waited_for() -> None:
    expected = [[4.0 * (1 + rank)] * 2 + [1.5] * 8 for rank in range(2)]
    assert run_ranks(train_late, 2) == expected


class Input(torch.Tensor):
    """An input of a forward in memory that is pinned or not; notes how it was moved."""

    pinned: bool
    blocks: bool

    def is_pinned(self) -> bool:
        return self.pinned

    def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
        self.blocks = not non_blocking
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_forward_waits_until_its_pinned_inputs_may_be_overwritten(pinned: bool) -> None:
    value = torch.ones(2, 4).as_subclass(Input)
    value.pinned = pinned
    with fake_ranks(2), SimulatedDevice():
        fully_shard(nn.Linear(4, 4))(value)
    assert value.blocks == pinned


@on_ranks(2)
def test_on_another_stream_gradients_are_accumulated_by_other_nodes() -> None:
    streams = [0, 0, 1, 1, 0]
    renewed: list[list[bool]] = []

    def look(layer: nn.Module, _: object) -> None:
        edges = [torch.autograd.graph.get_gradient_edge(param) for param in layer.parameters()]
        renewed.append(["known" not in edge.node.metadata for edge in edges])
        for edge in edges:  # nobody here keeps the nodes
            edge.node.metadata["known"] = True

    with SimulatedDevice() as device:
        reference, model = two_nets()
        model.out.register_forward_pre_hook(look)
        there = [device.current, Stream()]
        for step, stream in enumerate(streams):
            model.zero_grad()
            reference.zero_grad()
            with there[stream]:
                model(own_input(step)).square().sum().backward()
            reference(own_input(step)).square().sum().backward()
            average_gradients(reference.parameters())
            assert_parity(model, reference)
    expected = [[is_new] * 2 for is_new in (True, False, True, False, True)]
    assert (renewed) == (expected)
