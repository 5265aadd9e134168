"""``torch.distributed.checkpoint``: saved on some ranks, loaded on others, training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from composable_shard import fully_shard
from composable_shard.testing import run_ranks
from dist.models import Net, full, shard_net

SAVE_AFTER, STOP_AFTER = 2, 4
Tensors = dict[str, torch.Tensor]


def same_on_all_ranks(step: int) -> torch.Tensor:
    """Return a batch that does not depend on the rank, so that world sizes may change."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        model(same_on_all_ranks(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> Tensors:
    return {name: full(tensor).clone() for name, tensor in model.state_dict().items()}


def uninterrupted() -> tuple[Tensors, Tensors, Tensors]:
    """Weights of the unsharded model: at first, when it is saved, and at the end."""
    torch.manual_seed(0)
    model = Net(2)
    first = weights(model)
    optimizer = adam(model)
    train(model, optimizer, 0, SAVE_AFTER)
    saved = weights(model)
    train(model, optimizer, SAVE_AFTER, STOP_AFTER)
    return first, saved, weights(model)


def other_model(num_shards: int, num_blocks: int = 2) -> Net:
    torch.manual_seed(num_shards + 100)
    return shard_net(Net(num_blocks))


def save(folder: Path) -> None:
    model = shard_net(Net(2))
    optimizer = adam(model)
    train(model, optimizer, 0, SAVE_AFTER)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert all(isinstance(tensor, DTensor) for tensor in model_state.values())
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_and_train(folder: Path, num_ranks: int) -> tuple[Tensors, Tensors]:
    """Return the weights as loaded, and as trained on with the loaded optimizer state."""
    model = other_model(num_ranks)
    optimizer = adam(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    loaded = weights(model)
    for param in model.parameters():
        state = optimizer.state[param]
        assert isinstance(state["exp_avg"], DTensor)
        assert state["exp_avg"].placements == param.placements
        assert state["step"].item() == SAVE_AFTER
    train(model, optimizer, SAVE_AFTER, STOP_AFTER)
    return loaded, weights(model)


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(save, 4, folder, timeout=60)
    return folder


@pytest.mark.parametrize("num_ranks", [4, 2, 3, 1])
def test_a_checkpoint_of_four_ranks_goes_on_on_any_number(
    saved_by_four: Path, num_ranks: int
) -> None:
    first, saved, expected = uninterrupted()
    assert not torch.allclose(first["inp.weight"], saved["inp.weight"])
    for loaded, trained in run_ranks(load_and_train, num_ranks, saved_by_four, num_ranks):
        assert list(loaded) == list(saved)
        for name in expected:
            torch.testing.assert_close(loaded[name], saved[name], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(trained[name], expected[name], rtol=1e-4, atol=1e-5)


def full_state(broadcast: bool) -> dict[str, torch.Tensor]:
    """Take the full state dict of one model to another, in whole or from rank 0 alone."""
    torch.manual_seed(3)
    source = shard_net(Net(1))
    options = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    state = get_model_state_dict(source, options=options)
    assert broadcast or not any(isinstance(tensor, DTensor) for tensor in state.values())
    target = shard_net(Net(1))
    set_model_state_dict(
        target,
        state,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast),
    )
    return weights(target)


@pytest.mark.parametrize("broadcast", [False, True])
def test_full_state_dicts(broadcast: bool) -> None:
    torch.manual_seed(3)
    expected = weights(Net(1))
    for got in run_ranks(full_state, 2, broadcast):
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert list(got) == list(expected)


def async_save(folder: Path) -> dict[str, torch.Tensor]:
    """Save while training goes on: what is saved is what was there at the call."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights(model)
    # The saving thread talks beside the training one: it needs a process group of its own.
    group = dist.new_group()
    future = dcp.async_save(
        {"model": model.state_dict()}, checkpoint_id=folder, process_group=group
    )
    train(model, optimizer, 0, 2)
    future.result()
    state = {"model": model.state_dict()}
    assert not torch.allclose(weights(model)["0.weight"], before["0.weight"])
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    after = weights(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    return after


def test_asynchronous_saving(tmp_path: Path) -> None:
    first, second = run_ranks(async_save, 2, tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)


def pickled(folder: Path) -> bool:
    """Save each rank's own shards with ``torch.save``; load them into another model."""
    source, target = shard_net(Net(1)), other_model(1, num_blocks=1)
    source(same_on_all_ranks(0))  # the root is unsharded now
    file = folder / f"{dist.get_rank()}.pt"
    torch.save(source.state_dict(), file)
    target.load_state_dict(torch.load(file, weights_only=False))
    expected, got = weights(source), weights(target)
    return all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_pickled_state_dict(tmp_path: Path) -> None:
    assert run_ranks(pickled, 2, tmp_path) == [True, True]
