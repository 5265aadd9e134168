"""What a device is given in a step, counted: `benchmarks/overlap.py`, beside torch's FSDP2."""

from __future__ import annotations

import functools
import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from support.simulated_device import SimulatedDevice

from composable_shard._torch import poisoned_memory
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks
from streams.models import NUM_BLOCKS, OFFLOAD, WIDTH, Training

overlap = importlib.import_module("overlap")


NUM_OVERLAPPED = 6
SETTINGS = {setting.name: setting for setting in overlap.SETTINGS}


@functools.cache
def figures_of(name: str, setting: str) -> Any:
    """Return what a device is given in a step with fewer blocks than the benchmark has."""
    with (
        poisoned_memory(False),  # which keeps memory a little longer
        mock.patch.object(overlap, "NUM_BLOCKS", NUM_OVERLAPPED),
    ):
        return overlap.measure(name, SETTINGS[setting])


NUM_GROUPS = NUM_OVERLAPPED + 1  # the blocks and the root, which stays gathered for backward
GATHERS = 2 * NUM_GROUPS - 1


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["ours", "ours, 2 ahead"])
def test_each_collective_is_launched_once_and_travels_beside_compute(
    name: str, setting: str
) -> None:
    found, depth = figures_of(name, setting), overlap.CONTESTANTS[name]
    all_reduces = NUM_GROUPS if SETTINGS[setting].replicas > 1 else 0
    assert found.collectives == GATHERS + NUM_GROUPS + all_reduces
    assert found.forward_gather == found.backward_gather == depth
    assert found.reduce_scatter == 1
    assert (found.all_reduce is not None) == (SETTINGS[setting].replicas > 1)
    assert found.faults == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_host_waits_for_what_comes_to_it_alone(setting: str) -> None:
    ways = 2 if SETTINGS[setting].is_offloaded else 0 if SETTINGS[setting].scales else 1
    assert figures_of("ours", setting).host_waits == ways


@pytest.mark.brief(2)
@pytest.mark.parametrize("setting", ["fp32", "bf16, 2 replicas", "bf16"])
def test_fewer_kernels_are_launched_than_by_fsdp2_and_no_window_is_smaller(setting: str) -> None:
    ours, theirs = figures_of("ours, 2 ahead", setting), figures_of("fsdp2", setting)
    assert theirs.faults == 0
    assert ours.launches < theirs.launches
    for window in ("forward_gather", "backward_gather", "reduce_scatter", "all_reduce"):
        assert (getattr(ours, window) or 0) >= (getattr(theirs, window) or 0)


def test_one_ahead_takes_no_more_memory_than_fsdp2() -> None:
    ours, theirs = (figures_of(name, "fp32") for name in ("ours", "fsdp2"))
    assert ours.memory <= 1.01 * theirs.memory


@pytest.mark.parametrize("is_offloaded", [True, False])
def test_shards_that_go_to_the_host_do_not_wait_for_the_end_on_the_device(
    is_offloaded: bool,
) -> None:
    options = {"offload_policy": OFFLOAD} if is_offloaded else {}
    with fake_ranks(4), SimulatedDevice():
        model = Training(replicas=2, options=options).model()
        with record_events(model, "all_reduce", "wait_for_all_reduce") as events:
            model(torch.ones(3, WIDTH)).sum().backward()
    under_way, most = 0, 0
    for event, _ in events:
        under_way += 1 if event == "all_reduce" else -1
        most = max(under_way, most)
    assert under_way == 0
    assert most == (2 if is_offloaded else NUM_BLOCKS)
