"""What has no shards in memory is not read: neither of a parked model nor of one that has moved."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn

from composable_shard import (
    ShardError,
    explain,
    fully_shard,
    iter_full,
    load_sharded,
    local_shards,
    move,
    parked,
    save_full,
    sync_module_states,
    uneven,
    weigh,
)
from train.as_device import as_device
from train.moved import on_mesh


def uses(
    file: Path, ranks: dist.ProcessGroup | None = None
) -> dict[str, Callable[[nn.Module], Any]]:
    """Return what reads or writes shards, by what the error calls it."""
    return {
        "to be copied": copy.deepcopy,
        "for local_shards()": lambda model: list(local_shards(model)),
        "for iter_full()": lambda model: list(iter_full(model, process_group=ranks)),
        "for save_full()": lambda model: save_full(
            model, file, overwrite=True, process_group=ranks
        ),
        "for load_sharded()": lambda model: load_sharded(model, file, process_group=ranks),
        "for sync_module_states()": lambda model: sync_module_states(
            model, src_rank=dist.get_rank(), keep_shards=True, process_group=ranks
        ),
    }


def check(model: nn.Module, file: Path, why: str, ranks: dist.ProcessGroup | None = None) -> None:
    for purpose, use in uses(file, ranks).items():
        expected = f"Expected the root group in memory {purpose}, got it {why}"
        with pytest.raises(ShardError, match=f"^{re.escape(expected)}$"):
            use(model)


@on_ranks(2)
def test_a_parked_model_is_neither_read_nor_written() -> None:
    model = fully_shard(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters())
    with tempfile.TemporaryDirectory() as name:
        given = [name]
        dist.broadcast_object_list(given)
        file = Path(given[0]) / "model.safetensors"
        save_full(model, file)
        before = [shard.tensor.clone() for shard in local_shards(model)]
        with as_device(), parked(model, optimizer):
            check(model, file, "parked; leave the context of parked() first")
        dist.barrier()
    for shard, value in zip(local_shards(model), before, strict=True):
        assert torch.equal(shard.tensor, value)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.weight.full_tensor(), model.weight.full_tensor())


@on_ranks(2)
def test_what_a_rank_that_a_model_has_left_begins_for_training() -> None:
    """Nothing that waits for the ranks that it was on."""
    model = fully_shard(nn.Linear(4, 4), mesh=on_mesh(0, 1))
    batches = uneven(model, [torch.ones(1, 4)])
    move(model, (), on_mesh(0))
    begun: dict[str, Callable[[], Any]] = {
        "to be explained": lambda: explain(model),
        "to weigh a loss": lambda: weigh(model).__enter__(),
        "for a loop of uneven()": lambda: next(iter(batches)),
    }
    if dist.get_rank() == 1:
        for purpose, begin in begun.items():
            expected = f"Expected the root group in memory {purpose}, got it on other ranks; "
            with pytest.raises(ShardError, match=f"^{re.escape(expected)}"):
                begin()
        return
    assert explain(model).groups[0].parameters[0].num_shards == 1
    for batch in batches:  # alone on the new mesh
        assert torch.equal(model(batch), model(torch.ones(1, 4)))


@on_ranks(2)
def test_a_rank_that_a_model_has_left_is_told_so() -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=on_mesh(0, 1))
    first = on_mesh(0)
    move(model, (), first)
    alone = dist.new_group([1])
    why = "on other ranks; move() it to a mesh that has this one first"
    if dist.get_rank() == 1:
        with tempfile.TemporaryDirectory() as name:
            check(model, Path(name) / "model.safetensors", why, alone)
    text = f"ShardError: Expected the root group in memory for iter_full(), got it {why}"
    expected = f"Expected all ranks to begin gathering full weights, got on rank 1: {text}"
    with pytest.raises(ShardError, match=f"^{re.escape(expected)}$"):
        list(iter_full(model))
