"""Losses of freed or written parameters, which are refused, and of parameters themselves."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import (
    Net,
    assert_parity,
    assert_trains_alike,
    average_gradients,
    full,
    own_input,
    shard_net,
)
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch_versions import needs_newer_torch

from composable_shard import FSDPModule, ShardError, fully_shard
from training.models import ELSEWHERE, stored_loss, storing
from training.trees import WIDTH, inputs_for


def sharded_pair(place: str, reshard: bool | None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    reference = storing(place)
    model: Any = copy.deepcopy(reference)
    for module in (model.first, model.block, model):
        fully_shard(module, reshard_after_forward=reshard)
    return reference, model


FREED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: [torch.FloatTensor [4]] is at version N; expected version 1 instead. "
    "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
    "with torch.autograd.set_detect_anomaly(True, check_nan=False)."
)


@pytest.mark.parametrize("reshard", [True, None])
@on_ranks(2)
def test_loss_on_an_intermediate_kept_elsewhere_is_refused_once_parameters_are_freed(
    reshard: bool | None,
) -> None:
    """The process lives on, and the next iteration is as if this one had not been."""
    reference, model = sharded_pair("elsewhere", reshard)
    texts = []
    for step in range(4):
        if step in (0, 2):
            model(own_input(step))
            with pytest.raises(RuntimeError) as caught:
                ELSEWHERE.pop().square().sum().backward()
            texts.append(re.sub(r"at version \d+", "at version N", str(caught.value)))
        else:
            assert_trains_alike(model, reference, step)
            ELSEWHERE.clear()
    # What the backward needs may be gathered by hand.
    loss, expected = (stored_loss(one, own_input(4), 0) for one in (model, reference))
    for module in (model, model.block, model.first):
        module.unshard()
    loss.backward()
    expected.backward()
    average_gradients(reference.parameters())
    assert_parity(model, reference)
    assert texts == [FREED] * 2


@on_ranks(2)
def test_a_parameter_that_forward_changes_in_place_is_refused() -> None:
    """Forward may not change it, freed in between or not; nor may who comes after it."""
    for reshard in (True, False):
        _, model = sharded_pair("attribute", reshard)

        def change(module: Any, args: Any, output: Any) -> None:
            with torch.no_grad():
                module.scale.mul_(2)

        handle = model.block.register_forward_hook(change, prepend=True)
        with pytest.raises(ShardError, match="in-place writes to 'scale'"):
            stored_loss(model, own_input(), 0, True)
        handle.remove()
    loss = stored_loss(model, own_input(), 0, True)
    change(model.block, None, None)
    with pytest.raises(ShardError, match="got writes to 'scale', which are lost"):
        loss.backward()


# Gradients of gradients into parameters -----------------------------------------------------------


CREATE_GRAPH = (
    "Expected a backward into the parameters of the root group without create_graph=True, "
    "got create_graph=True, and reduced gradients have no graph; for gradients of inputs, call "
    "torch.autograd.grad(loss, inputs, create_graph=True)"
)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(2)
def test_create_graph_into_parameters_is_refused(reshard: bool | None) -> None:
    reference = Net(2)
    model = shard_net(copy.deepcopy(reference), reshard_after_forward=reshard)
    texts = []
    for step in range(4):
        if step in (0, 2):
            loss = model(own_input(step)).square().sum()
            with pytest.raises(ShardError) as caught:
                loss.backward(create_graph=True)
            texts.append(str(caught.value))
            del loss
        else:
            assert_trains_alike(model, reference, step)
    assert texts == [CREATE_GRAPH] * 2


# Penalties on sharded parameters, whose gradients autograd writes ---------------------------------


PENALTIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.sum,  # leaves a gradient that is replicated
    "absolute": lambda p: p.abs().sum(),  # leaves one that is sharded, but by ranks without rows
    "deviation": lambda p: p.std() if p.numel() > 1 else p.sum(),  # an average over the ranks
}


def penalty_of(model: nn.Module, name: str) -> torch.Tensor:
    return 0.1 * sum(full(PENALTIES[name](param)) for param in model.parameters())


@needs_newer_torch("DTensor adds no sharded gradient to an unreduced one", (2, 12))
@pytest.mark.parametrize(("kind", "num_ranks"), [("flat", 3), ("hybrid", 4)])
@on_ranks("num_ranks", timeout=120)
def test_a_penalty_counts_wherever_it_is_computed(kind: str) -> None:
    count, rank = dist.get_world_size(), dist.get_rank()
    shape, names = ((2, 2), ("replicate", "shard")) if kind == "hybrid" else ((count,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    ways = [("", 1), ("requires_gradient_sync", 1), ("requires_all_reduce", 4)]
    for name, is_before, (setter, width) in itertools.product(PENALTIES, [False, True], ways):
        if setter and is_before == (name == "absolute"):
            continue  # for speed
        if setter == "requires_all_reduce" and kind == "flat":
            continue  # there are no replicas
        if kind == "hybrid" and setter == "requires_all_reduce" and name != "absolute":
            continue  # DTensor adds nothing replicated to what is partial on one axis alone
        torch.manual_seed(0)
        layers = nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, width)
        plain = nn.Sequential(*layers).double()
        model = copy.deepcopy(plain)
        for index in (0, 2, 3) if is_before else (0,):  # the last one is delivered in between
            fully_shard(model[index], mesh=mesh)
        assert isinstance(fully_shard(model, mesh=mesh), FSDPModule)
        for microbatch in range(2 if setter else 1):
            if setter:
                getattr(model, f"set_{setter}")(microbatch == 1)
            batches = [inputs_for(microbatch, one, torch.float64) for one in range(count)]
            for module, own in ((model, batches[rank : rank + 1]), (plain, batches)):
                loss = penalty_of(module, name) if is_before else 0.0
                loss = loss + sum(module(batch).square().mean() for batch in own) / len(own)
                (loss if is_before else loss + penalty_of(module, name)).backward()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.grad.placements == param.placements
            torch.testing.assert_close(full(param.grad), other.grad, msg=f"{name}, {setter}")
