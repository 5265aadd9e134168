"""All that is given to a collective of a device has values: NCCL's NaN check looks at all of it.

There is no device here. The CPU is taken for one, so that gathers and reductions are launched and
packed as on a device, and memory is NaN where nothing has been written to it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nets import Net, own_input, shard_net
from subclasses.lossless import Lossless, as_type
from support.simulated_device import SimulatedDevice, unnoticed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from composable_shard import MixedPrecisionPolicy, _torch, fully_shard
from composable_shard.testing import run_ranks
from faults.poisoned import WIDTH, Block, batch_of, placement, train_and_compare

NBYTES = 16  # what the widest loads and stores of devices take at once


@contextlib.contextmanager
def taken_for_a_device() -> Iterator[None]:
    """Let the library take the CPU for a device."""
    with SimulatedDevice() as device, _torch.poisoned_memory(True):
        yield
    assert device.faults == []


class Inputs:
    """What collectives are given.

    Attributes:
        num_seen: How many tensors each kind of collective was given.
        unwritten: Which kinds were given something that is not finite.
    """

    def __init__(self) -> None:
        self.num_seen = Counter[str]()
        self.unwritten = Counter[str]()

    def look_at(self, kind: str, *tensors: torch.Tensor) -> None:
        self.num_seen[kind] += len(tensors)
        with unnoticed():
            self.unwritten[kind] += sum(not tensor.isfinite().all() for tensor in tensors)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the inputs of all collectives that are launched inside."""
        gather, scatter = _torch.all_gather_single, _torch.reduce_scatter_flat
        reduce, exchange = dist.all_reduce, dist.all_to_all_single

        def all_gather(output: Any, own: Any, **more: Any) -> Any:
            self.look_at("all-gather", own)
            return gather(output, own, **more)

        def reduce_scatter(outputs: Any, inputs: Any, *rest: Any) -> Any:
            self.look_at("reduce-scatter", *inputs)
            return scatter(outputs, inputs, *rest)

        def all_reduce(tensor: Any, *rest: Any, **more: Any) -> Any:
            self.look_at("all-reduce", tensor)
            return reduce(tensor, *rest, **more)

        def all_to_all(output: Any, source: Any, **more: Any) -> Any:
            self.look_at("all-to-all", source)
            return exchange(output, source, **more)

        with (
            mock.patch.object(_torch, "all_gather_single", all_gather),
            mock.patch.object(_torch, "reduce_scatter_flat", reduce_scatter),
            mock.patch.object(dist, "all_reduce", all_reduce),
            mock.patch.object(dist, "all_to_all_single", all_to_all),
        ):
            yield


def train(model: nn.Module, batches: Callable[[int], torch.Tensor], *args: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        model(batches(step), *args).float().square().mean().backward()
        optimizer.step()
        for name, param in model.named_parameters():
            local = param.grad.to_local()
            assert local.isfinite().all(), name
            assert local.data_ptr() % NBYTES == 0, name
        optimizer.zero_grad()


def every_kind(**kwargs: Any) -> None:
    """A subclass, uneven rows and columns, packed ones, gradients that one rank has not."""
    torch.manual_seed(0)
    model, rank = fully_shard(Block(), shard_placement_fn=placement, **kwargs), dist.get_rank()
    train(model, lambda step: batch_of(rank, step), rank)


def plain(stored: torch.dtype, computed: torch.dtype, reshards: bool | int = True) -> None:
    """Uneven rows and columns of their own message, and packed biases."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*layers()) for _ in range(2))).to(stored)
    for block in (*model, model):
        fully_shard(
            block,
            reshard_after_forward=reshards,
            mp_policy=MixedPrecisionPolicy(computed, reduce_dtype=torch.float32),
            shard_placement_fn=lambda param: Shard(1 if param.shape == (WIDTH, 301) else 0),
        )
    for name, param in model.named_parameters():
        assert param.to_local().data_ptr() % NBYTES == 0, name
    train(model, lambda step: batch_of(dist.get_rank(), step))


def layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, 301), nn.LayerNorm(301), nn.Linear(301, WIDTH)]


def replicated(*shape: int) -> None:
    every_kind(mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


FP32, BF16 = torch.float32, torch.bfloat16
BOTH = {"all-gather", "reduce-scatter"}
PROGRAMS: dict[str, tuple[int, Callable[[], None], set[str]]] = {
    "fp32": (2, lambda: train_and_compare(True), BOTH),
    "subclass regathered": (4, lambda: train_and_compare(2), BOTH),
    "regathered": (4, lambda: plain(FP32, FP32, 2), BOTH),
    "uneven": (3, every_kind, BOTH),
    "bf16": (2, lambda: plain(FP32, BF16), BOTH),
    "stored and handed out in bf16, computed and reduced in fp32": (
        *(3, lambda: plain(BF16, FP32)),
        BOTH,
    ),
    "hybrid": (4, lambda: replicated(2, 2), {*BOTH, "all-reduce"}),
    "replicated": (2, lambda: replicated(2, 1), {"all-reduce"}),
    "encoded": (
        *(3, lambda: train(shard_net(as_type(Net(), Lossless)), own_input)),
        {"all-gather", "all-to-all"},
    ),
}


def inputs_of(program: str, clears: bool = True) -> Inputs:
    """Run a program; return what its collectives were given, where gaps are cleared or not."""
    inputs = Inputs()
    with taken_for_a_device(), inputs.watched(), contextlib.ExitStack() as stack:
        if not clears:
            stack.enter_context(mock.patch.object(_torch, "zero_ranges_", lambda *_: None))
        PROGRAMS[program][1]()
    return inputs


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_that_collectives_are_given_has_values(program: str) -> None:
    num_ranks, _, kinds = PROGRAMS[program]
    for inputs in run_ranks(inputs_of, num_ranks, program):
        assert set(inputs.num_seen) >= kinds
        assert not +inputs.unwritten


@pytest.mark.parametrize(
    ("program", "kind"), [("regathered", "all-gather"), ("hybrid", "all-reduce")]
)
def test_gaps_that_are_not_cleared_are_seen(program: str, kind: str) -> None:
    ranks = run_ranks(inputs_of, PROGRAMS[program][0], program, clears=False)
    assert {unwritten for inputs in ranks for unwritten in +inputs.unwritten} == {kind}


def calls_and_survivors() -> tuple[list[tuple[str, int]], int]:
    """Reduce one group of bf16 gradients in fp32.

    Returns:
        The calls by which they are copied, each with the number of tensors, and how many gradients
        are still there when the reduce-scatter is launched.
    """
    calls, grads, survivors = [], list[weakref.ref[torch.UntypedStorage]](), list[int]()
    copy, zero, launch = _torch.copy_all_, _torch.zero_all_, _torch.reduce_scatter_flat

    def copy_all(into: Any, sources: Any) -> None:
        is_alike = all(map(lambda a, b: a.stride() == b.stride(), into, sources))
        calls.append(("copy" if is_alike else "permuting copy", len(into)))
        copy(into, sources)

    def zero_all(tensors: Any) -> None:
        calls.append(("zero", len(tensors)))
        zero(tensors)

    def note(arriving: tuple[torch.Tensor, ...]) -> None:
        grads.extend(weakref.ref(grad.untyped_storage()) for grad in arriving)

    def look(layer: nn.Module, _: object) -> None:
        for param in layer.parameters():
            torch.autograd.graph.get_gradient_edge(param).node.register_prehook(note)

    def reduce_scatter(*args: Any) -> Any:
        survivors.append(sum(grad() is not None for grad in grads))
        return launch(*args)

    with (
        taken_for_a_device(),
        mock.patch.object(_torch, "copy_all_", copy_all),
        mock.patch.object(_torch, "zero_all_", zero_all),
        mock.patch.object(_torch, "reduce_scatter_flat", reduce_scatter),
    ):
        model = nn.Sequential(*layers(), *layers())
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mp_policy=policy)
        for layer in model:
            layer.register_forward_pre_hook(look)
        model(batch_of(dist.get_rank(), 0)).float().sum().backward()
    assert len(grads) == len(list(model.parameters()))
    return calls, sum(survivors)


def test_gradients_are_cast_in_one_call_and_go_before_they_are_sent() -> None:
    for calls, num_survivors in run_ranks(calls_and_survivors, 2):
        assert calls == [("zero", 4), ("copy", 4)]  # the weights, whose rows are odd
        assert num_survivors == 0
