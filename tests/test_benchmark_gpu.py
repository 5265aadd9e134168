"""The benchmark for a GPU, as far as a CPU can run it: that it compares what it says it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import CoalescedAllGather
from composable_shard.mesh import resolve_mesh

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = {
    **{"layers": 2, "width": 64, "ffn_width": 128, "head_width": 16, "kv_heads": 2},
    **{"batch": 2, "context": 8},
}
CONTESTANTS = [
    f"{name}{suffix}" for suffix in ("", "+checkpointing") for name in ("ours", "fsdp2", "plain")
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "cuda.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def size_flags() -> list[str]:
    pairs = [("--" + name.replace("_", "-"), str(value)) for name, value in TINY.items()]
    return [word for pair in pairs for word in pair]


@pytest.mark.matrix
def test_every_contestant_is_measured_in_every_world(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    flags = ["--device", "cpu", "--rounds", "2", "--steps-per-round", "1", "--json", str(file)]
    done = run(*flags, "--ranks", "1", "8", *size_flags())
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["size"] == TINY
    assert figures["failures"] == {}
    assert list(figures["worlds"]) == ["1", "8"]
    for world in figures["worlds"].values():
        assert (world["allocated"], world["reserved"]) == ({}, {})
        for kind in ("step", "host"):
            assert list(world[kind]) == CONTESTANTS
            assert all(len(sample) == 2 and min(sample) > 0 for sample in world[kind].values())
    for label in ("composable_shard", "torch FSDP2", "plain module"):
        assert done.stdout.count(label) == 4


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_one_rank_the_contestants_compute_the_same(checkpointing: bool) -> None:
    from llama import LABELS, Size, build_contestant
    from simulated import world

    with world(1, "cpu"):
        size, device = Size(**TINY), torch.device("cpu")
        losses, gradients = {}, {}
        for name in LABELS:
            contestant = build_contestant(name, size, device, checkpointing=checkpointing)
            loss = contestant.model(contestant.batch)
            loss.backward()
            losses[name] = loss.item()
            gradients[name] = contestant.batch.grad
    assert losses["ours"] == losses["fsdp2"] == losses["plain"]
    assert torch.isfinite(gradients["plain"]).all()
    assert torch.equal(gradients["ours"], gradients["plain"])
    assert torch.equal(gradients["fsdp2"], gradients["plain"])


def test_simulated_ranks_hold_their_share_and_gather_nothing() -> None:
    from llama import Size, build_contestant
    from simulated import simulated_ranks

    with simulated_ranks(16):
        group, device = dist.group.WORLD, torch.device("cpu")
        assert (group.rank(), group.size()) == (0, 16)
        channel = Channel(resolve_mesh(init_device_mesh("cpu", (16,))))
        assert isinstance(channel.all_gather, CoalescedAllGather)
        assert channel.can_average()
        full, own = torch.full((16, 2), 7.0), torch.ones(2)
        _torch.all_gather_flat([full.view(-1)], [own], group).wait()
        _torch.reduce_scatter_flat([own], [full.view(-1)], group, dist.ReduceOp.AVG).wait()
        dist.all_reduce(own)
        assert torch.equal(full, torch.full((16, 2), 7.0))
        assert torch.equal(own, torch.ones(2))
        for name in ("ours", "fsdp2"):
            model = build_contestant(name, Size(**TINY), device, checkpointing=False).model
            weight = dict(model.named_parameters())["blocks.0.query.weight"]
            assert isinstance(weight, DTensor)
            assert weight.to_local().shape == (4, 64)
            assert model(torch.ones(1, 8, 64)).ndim == 0
