"""All that is given to a collective of a device has values: NCCL's NaN check looks at all of it.

Parts that neighbours keep (an int ``reshard_after_forward``) are an exception: gaps are sent, too.

There is no device here. The CPU is taken for one, so that gathers and reductions are launched and
packed as on a device, and memory is NaN where nothing has been written to it.
"""

from __future__ import annotations

import contextlib
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
from faults.poisoned import WIDTH, Block, batch_of, placement

NBYTES = 16  # what the widest loads and stores of devices take at once


@contextlib.contextmanager
def taken_for_a_device() -> Iterator[None]:
    with SimulatedDevice() as device, _torch.poisoned_memory(True):
        yield
    assert device.faults == []


class Inputs:
    """How many tensors collectives were given, by their kind, and how many were not all finite."""

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


def bf16_computed_in_fp32() -> None:
    """Uneven rows and columns of their own message, and packed biases."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 301), nn.LayerNorm(301), nn.Linear(301, WIDTH)]
    model = nn.Sequential(*layers).bfloat16()
    fully_shard(
        model,
        mp_policy=MixedPrecisionPolicy(torch.float32, reduce_dtype=torch.float32),
        shard_placement_fn=lambda param: Shard(1 if param.shape == (WIDTH, 301) else 0),
    )
    for name, param in model.named_parameters():
        assert param.to_local().data_ptr() % NBYTES == 0, name
    train(model, lambda step: batch_of(dist.get_rank(), step))


def hybrid() -> None:
    every_kind(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


BOTH = {"all-gather", "reduce-scatter"}
PROGRAMS: dict[str, tuple[int, Callable[[], None], set[str]]] = {
    "uneven": (3, every_kind, BOTH),
    "stored and handed out in bf16": (3, bf16_computed_in_fp32, BOTH),
    "hybrid": (4, hybrid, {*BOTH, "all-reduce"}),
    "encoded": (
        *(3, lambda: train(shard_net(as_type(Net(), Lossless)), own_input)),
        {"all-gather", "all-to-all"},
    ),
}


def inputs_of(program: str) -> Inputs:
    inputs = Inputs()
    with taken_for_a_device(), inputs.watched():
        PROGRAMS[program][1]()
    return inputs


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_that_collectives_are_given_has_values(program: str) -> None:
    num_ranks, _, kinds = PROGRAMS[program]
    for inputs in run_ranks(inputs_of, num_ranks, program):
        assert set(inputs.num_seen) >= kinds
        assert not +inputs.unwritten
