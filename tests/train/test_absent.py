"""What has no shards in memory is not read: neither of a parked model nor of one that has moved."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

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
    unsharded,
    weigh,
)
from train.as_device import as_device
from train.moved import assert_same_bits, on_mesh, values


def uses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    file: Path,
    ranks: dist.ProcessGroup | None = None,
) -> list[tuple[str, Callable[[], Any]]]:
    """Return what reads, writes or computes with shards, by what the error calls it."""
    state, other = model.state_dict(), torch.optim.SGD(model.parameters(), lr=0.1)
    within = {"process_group": ranks}
    return [
        ("to be gathered", lambda: model(torch.ones(1, 64))),
        ("to be gathered", lambda: model.unshard()),
        ("for a state dict", lambda: model.state_dict()),
        ("to load a state dict", lambda: model.load_state_dict(state)),
        ("for unsharded()", lambda: unsharded(model).__enter__()),
        ("to be parked", lambda: parked(model, **within).__enter__()),
        ("for a step of AdamW", optimizer.step),
        ("for a step of SGD", other.step),
        ("to be copied", lambda: copy.deepcopy(model)),
        ("for local_shards()", lambda: list(local_shards(model))),
        ("for iter_full()", lambda: list(iter_full(model, **within))),
        ("for save_full()", lambda: save_full(model, file, overwrite=True, **within)),
        ("for load_sharded()", lambda: load_sharded(model, file, **within)),
        (
            "for sync_module_states()",
            lambda: sync_module_states(model, src_rank=dist.get_rank(), keep_shards=True, **within),
        ),
    ]


def check(cases: list[tuple[str, Callable[[], Any]]], why: str) -> None:
    for purpose, use in cases:
        with pytest.raises(ShardError) as caught:
            use()
        text = f"Expected the root group in memory {purpose}, got it {why}"
        assert str(caught.value) == text


def trained(mesh: DeviceMesh) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = fully_shard(nn.Linear(64, 64), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 64), dist.get_rank() + 1.0)).square().mean().backward()
    optimizer.step()


@on_ranks(2)
def test_a_parked_model_is_not_used(tmp_path: Path) -> None:
    pairs = [trained(on_mesh(0, 1)) for _ in range(2)]
    model, optimizer = pairs[0]
    file = tmp_path / "model.safetensors"
    save_full(model, file)
    cases, states = uses(model, optimizer, file), optimizer.state_dict()
    loss = model(torch.ones(2, 64)).sum()
    with as_device(), parked(model, optimizer):
        why = "parked; leave the context of parked() first"
        check([("to be gathered", loss.backward), *cases], why)
        for use in (optimizer.state_dict, lambda: optimizer.load_state_dict(states)):
            with pytest.raises(ShardError) as caught:
                use()
            assert str(caught.value) == (
                f"Expected AdamW in memory for its step or its states, got it {why}"
            )
    for one, its_optimizer in pairs:  # and afterwards all is well
        step(one, its_optimizer)
    assert_same_bits(*(values(*pair) for pair in pairs))
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
def test_a_rank_that_a_model_has_left_is_told_so(tmp_path: Path) -> None:
    (model, optimizer), first = trained(on_mesh(0, 1)), on_mesh(0)
    alone = dist.new_group([1])
    cases = uses(model, optimizer, tmp_path / "model.safetensors", alone)
    move(model, optimizer, first)
    why = "on other ranks; move() it to a mesh that has this one first"
    if dist.get_rank() == 1:
        check(cases, why)
        assert list(optimizer.state_dict()) == ["state", "param_groups"]
        for param in model.parameters():
            assert param.to_local().numel() == 0 and param.grad is None
            assert param.device_mesh.mesh.tolist() == [0]
            assert not optimizer.state.get(param)
    else:
        step(model, optimizer)
    text = f"ShardError: Expected the root group in memory for iter_full(), got it {why}"
    with pytest.raises(ShardError) as caught:
        list(iter_full(model))
    assert str(caught.value) == (
        f"Expected all ranks to begin gathering full weights, got on rank 1: {text}"
    )
