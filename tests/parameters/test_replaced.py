"""Parameters that something replaced: saved, loaded and trained before any gather sees them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nets import Net, assert_parity, own_input, shard_net, two_nets
from on_ranks import on_ranks
from torch.distributed.tensor import DTensor


def from_meta(used: bool) -> Net:
    with torch.device("meta"):
        model = shard_net(Net(1))
    return model.to_empty(device="cpu")


def new(used: bool) -> Net:
    model = shard_net(Net(1))
    if used:
        model(own_input()).sum().backward()
        model.zero_grad()
    return model


def to_double(used: bool) -> Net:
    return new(used).double()


def to_empty(used: bool) -> Net:
    return new(used).to_empty(device="cpu")


def assigned(used: bool) -> Net:
    model, other = new(used), shard_net(Net(1)).state_dict()
    model.load_state_dict({name: tensor.clone() for name, tensor in other.items()}, assign=True)
    return model


Replace = Callable[[bool], Net]


def fill(model: Net) -> None:
    """Write values into the parameters that are registered now."""
    for index, param in enumerate(model.parameters()):
        with torch.no_grad():
            param.fill_(index + 0.5)


@pytest.mark.parametrize(
    ("replace", "used"),
    [
        (from_meta, False),
        (to_double, False),
        (to_double, True),
        (to_empty, True),
        (assigned, False),
        (assigned, True),
    ],
)
@on_ranks(2)
def test_a_state_dict_holds_what_is_registered(replace: Replace, used: bool) -> None:
    model = replace(used)
    fill(model)
    state = model.state_dict()
    for index, (name, param) in enumerate(model.named_parameters()):
        assert isinstance(state[name], DTensor) and state[name].dtype == param.dtype, name
        assert state[name].to_local().eq(index + 0.5).all(), name
        # What is written to the state is written to the model.
        assert state[name].to_local().data_ptr() == param.to_local().data_ptr(), name


@on_ranks(2)
def test_a_checkpoint_is_loaded_in_place_after_materialization(tmp_path: Path) -> None:
    """Save, then load into a model that was just materialized and has never run."""
    reference, model = two_nets(1)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    fresh = from_meta(False)
    fill(fresh)
    dcp.load(fresh.state_dict(), checkpoint_id=tmp_path)
    assert_parity(fresh, reference)
    assert torch.equal(fresh(own_input()), reference(own_input()))
    dist.barrier()
