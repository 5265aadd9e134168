"""A penalty on sharded parameters, whose gradient autograd writes by itself, beside the loss."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import FSDPModule, fully_shard
from training.trees import WIDTH, inputs_for

PENALTIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.sum,  # leaves a gradient that is replicated
    "absolute": lambda p: p.abs().sum(),  # leaves one that is sharded, but by ranks without rows
    "deviation": lambda p: p.std() if p.numel() > 1 else p.sum(),  # an average over the ranks
}


def penalty_of(model: nn.Module, name: str) -> torch.Tensor:
    return 0.1 * sum(full(PENALTIES[name](param)) for param in model.parameters())


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
        if kind == "hybrid" and setter == "requires_all_reduce" and name != "absolute":
            continue  # DTensor adds nothing replicated to what is partial on one axis alone
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, width)).double()
        model = copy.deepcopy(plain)
        for layer in (model[0], model[2]) if is_before else (model[0],):
            fully_shard(layer, mesh=mesh)
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
