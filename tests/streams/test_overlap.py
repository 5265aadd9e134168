"""What a device is given in a step, counted: `benchmarks/overlap.py`, beside torch's FSDP2."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.simulated_device import SimulatedDevice

from composable_shard._torch import poisoned_memory
from composable_shard.insight.events import record_events
from composable_shard.testing import fake_ranks
from streams.models import NUM_BLOCKS, OFFLOAD, WIDTH, Training

overlap = importlib.import_module("overlap")


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("overlap") / "figures.json"
    with poisoned_memory(False):  # which keeps memory a little longer
        assert overlap.main(["--json", str(path)]) == 0
    return json.loads(path.read_text())["settings"]


NUM_GROUPS = overlap.NUM_BLOCKS + 1  # the blocks and the root, which stays gathered for backward
GATHERS = 2 * NUM_GROUPS - 1


@pytest.mark.parametrize("setting", overlap.SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("name", ["ours", "ours, 2 ahead"])
def test_each_collective_is_launched_once_and_travels_beside_compute(
    figures: Any, name: str, setting: Any
) -> None:
    found, depth = figures[setting.name][name], overlap.CONTESTANTS[name]
    all_reduces = NUM_GROUPS if setting.replicas > 1 else 0
    assert found["collectives"] == GATHERS + NUM_GROUPS + all_reduces
    assert found["forward_gather"] == found["backward_gather"] == depth
    assert found["reduce_scatter"] == 1
    assert (found["all_reduce"] is not None) == (setting.replicas > 1)
    assert found["faults"] == 0


@pytest.mark.parametrize("setting", overlap.SETTINGS, ids=lambda setting: setting.name)
def test_the_host_waits_for_what_comes_to_it_alone(figures: Any, setting: Any) -> None:
    ways = 2 if setting.is_offloaded else 0 if setting.scales else 1
    assert figures[setting.name]["ours"]["host_waits"] == ways


@pytest.mark.parametrize("setting", ["fp32", "bf16", "bf16, 2 replicas"])
def test_fewer_kernels_are_launched_than_by_fsdp2_and_no_window_is_smaller(
    figures: Any, setting: str
) -> None:
    ours, theirs = figures[setting]["ours, 2 ahead"], figures[setting]["fsdp2"]
    assert theirs["faults"] == 0
    assert ours["launches"] < theirs["launches"]
    for window in ("forward_gather", "backward_gather", "reduce_scatter", "all_reduce"):
        assert (ours[window] or 0) >= (theirs[window] or 0)


def test_one_ahead_takes_no_more_memory_than_fsdp2(figures: Any) -> None:
    assert figures["fp32"]["ours"]["memory"] <= 1.01 * figures["fp32"]["fsdp2"]["memory"]


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
