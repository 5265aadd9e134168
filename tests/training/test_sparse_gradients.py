"""Sparse gradients: reduced by nobody, so refused by name where there are ranks to reduce over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import ShardError, fully_shard
from composable_shard.testing import fake_ranks, run_ranks

TOKENS = torch.arange(8)
TEXT = (
    "Expected a dense gradient of '{}', got a sparse one, which is not reduced over ranks; set "
    "sparse=False on its nn.Embedding or nn.EmbeddingBag, or pass it as ignored_params and reduce "
    "its gradient yourself"
)


def made(is_apart: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    if is_apart:
        fully_shard(model[0], **options)
    return fully_shard(model, **options)


def raised(is_apart: bool, syncs: bool, is_replicated: bool) -> tuple[str, bool]:
    """Return what a backward raises, and whether the next one, with dense gradients, works."""
    mesh = None
    if is_replicated:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = made(is_apart, mesh=mesh)
    model.set_requires_gradient_sync(syncs)
    with pytest.raises(ShardError) as caught:
        model(TOKENS).sum().backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model[0].sparse = False
    model(TOKENS).sum().backward()
    grad = model[0].weight.grad.full_tensor()
    return str(caught.value), grad.shape == (8, 4) and bool(grad.any())


@pytest.mark.parametrize(("is_apart", "name"), [(True, "weight"), (False, "0.weight")])
@pytest.mark.parametrize(("syncs", "is_replicated"), [(True, False), (False, False), (True, True)])
def test_a_sparse_gradient_is_refused_by_name_on_all_ranks(
    is_apart: bool, name: str, syncs: bool, is_replicated: bool
) -> None:
    run = run_ranks(raised, 2, is_apart, syncs, is_replicated)
    assert run == [(TEXT.format(name), True)] * 2


@pytest.mark.parametrize("is_apart", [True, False])
def test_on_one_rank_it_stays_sparse(is_apart: bool) -> None:
    with fake_ranks(1):
        model = made(is_apart)
        model(TOKENS).sum().backward()
        assert model[0].weight.grad._local_tensor.is_sparse
