"""How much a rank reads, and how much memory that takes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import Shard
from train.moved import memory, return_unused

from composable_shard import fully_shard, load_sharded, save_full
from composable_shard._torch import poisoned_memory
from composable_shard.testing import run_ranks
from composable_shard.train.weights import save
from loading.counting import held

MIB = 2**20
NUM_TENSORS, TENSOR_NBYTES = 12, 8 * MIB
SLACK_NBYTES = 8 * MIB


def build(is_meta: bool, dim: int = 0) -> nn.Module:
    width = 1024
    with torch.device("meta" if is_meta else "cpu"):
        layers = [nn.Linear(width, 2 * width, bias=False) for _ in range(NUM_TENSORS)]
        model = nn.Sequential(*layers)
    return fully_shard(model, shard_placement_fn=lambda _: Shard(dim))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "x.safetensors"
    save_file({f"{i}.weight": torch.full((2048, 1024), i + 0.5) for i in range(NUM_TENSORS)}, path)
    return path


@contextlib.contextmanager
def growth() -> Iterator[list[int]]:
    """Measure by how many bytes the memory of this process grows at most."""
    return_unused()  # what is free already would hide what is needed
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, found = memory("VmRSS"), list[int]()
    yield found
    found.append(memory("VmHWM") - before)


@poisoned_memory(False)  # which keeps memory for a while
def growth_while_loading(file: Path, dim: int, sends: bool) -> int:
    for _ in range(2):  # the first time, code is loaded too
        model = build(True, dim)
        dist.barrier()
        with growth() as found:
            load_sharded(model, file, broadcast_from_rank0=sends)
    return found[0]


def held_while_saving(folder: Path, limit: int) -> int:
    model = build(False, dim=1)
    with mock.patch.object(save, "BUCKET_NBYTES", TENSOR_NBYTES), held() as most:
        save_full(model, folder, max_shard_size=limit)
    return most[0]


on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="peaks of memory are read from /proc, which only Linux has"
)


@on_linux
@pytest.mark.parametrize(("dim", "sends"), [(0, False), (1, False), (0, True)])
def test_memory_grows_by_the_shard_and_one_tensor_at_most(
    file: Path, dim: int, sends: bool
) -> None:
    shard = NUM_TENSORS * TENSOR_NBYTES // 2
    grown = run_ranks(growth_while_loading, 2, file, dim, sends)
    assert min(grown) > shard - SLACK_NBYTES, grown  # or this would measure nothing
    assert max(grown) < shard + TENSOR_NBYTES + SLACK_NBYTES, grown


def test_saving_holds_a_bucket_and_not_a_file(tmp_path: Path) -> None:
    """Of 12 tensors, each a bucket: one file, by rank 0, or two at once, by both ranks."""
    two = 2 * TENSOR_NBYTES
    assert run_ranks(held_while_saving, 2, tmp_path / "1", 1 << 30) == [two, 0]
    assert run_ranks(held_while_saving, 2, tmp_path / "2", 6 * TENSOR_NBYTES) == [two, two]
