"""What edits a module edits its tied parameters that belong to an outer group, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_shard import ShardError, fully_shard, load_sharded, sync_module_states, unsharded

safetensors = pytest.importorskip("safetensors.torch")


class Model(nn.Module):
    """An embedding and a head that share a weight, each in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(self.embed(tokens)))
        return result


TOKENS = torch.arange(7)


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    for child in (model.embed, model.body, model.head):
        fully_shard(child, **options)
    return fully_shard(model, **options)


# How the root, which owns the weight, comes to be gathered ----------------------------------------


GATHERED: dict[str, Callable[[Any], object]] = {
    "by hand": lambda model: model.unshard(),
    "by a forward": lambda model: model(TOKENS),
    "not at all": lambda model: None,
}


# What edits the head, which does not own it -------------------------------------------------------


def fill(model: Any, folder: Path) -> None:
    with unsharded(model.head), torch.no_grad():
        assert model.head.weight is model.embed.weight
        assert not isinstance(model.head.weight, DTensor)
        model.head.weight.fill_(3)


def fill_alone(model: Any, folder: Path) -> None:
    with unsharded(model.head, recurse=False), torch.no_grad():
        model.head.weight.fill_(3)


def load(model: Any, folder: Path) -> None:
    file = folder / "head.safetensors"
    if dist.get_rank() == 0:
        safetensors.save_file({"weight": torch.full((7, 4), 3.0), "bias": torch.zeros(7)}, file)
    dist.barrier()
    load_sharded(model.head, file)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("edit", [fill, fill_alone, load])
@pytest.mark.parametrize("gather", GATHERED)
@on_ranks("ranks")
def test_an_edit_through_the_group_that_does_not_own_it_is_kept(
    tmp_path: Path, gather: str, edit: Callable[[Any, Path], None]
) -> None:
    model = sharded()
    GATHERED[gather](model)
    edit(model, tmp_path)
    model.reshard()
    assert (full(model.embed.weight) == 3).all()
    assert model.embed.weight is model.head.weight
    assert (model(TOKENS).var(0) < 1e-6).all()


@pytest.mark.parametrize("gather", GATHERED)
@on_ranks(2)
def test_replicas_of_it_are_synchronized(gather: str) -> None:
    """Let replicas differ; those of the head are made equal, though the root owns its weight."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    with torch.no_grad():
        model.embed.weight.to_local().fill_(dist.get_rank() + 1)
    GATHERED[gather](model)
    sync_module_states(model.head, keep_shards=True)
    model.reshard()
    assert model.embed.weight.to_local().unique().tolist() == [1.0]


@on_ranks(2)
def test_synchronizing_it_is_refused_though_it_is_gathered() -> None:
    model = sharded()
    model.unshard()
    text = r"^Expected FSDPLinear before it is sharded, got 'weight' sharded"
    with pytest.raises(ShardError, match=text):
        sync_module_states(model.head)


@pytest.mark.parametrize("opened", ["", "embed", "head"])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_one_group_runs_as_a_plain_module(opened: str) -> None:
    """Open one group alone and run it, or the whole, as a plain module."""
    torch.manual_seed(0)
    oracle, model = Model(), sharded()
    module, reference = model.get_submodule(opened), oracle.get_submodule(opened)
    x = TOKENS if opened in ("", "embed") else torch.ones(2, 4)
    with unsharded(module, recurse=False), torch.no_grad():
        assert torch.equal(module(x), reference(x))


@on_ranks(2)
def test_what_an_outer_context_has_opened_is_left_to_it() -> None:
    """Open the root on the first rank alone, and the head within, which owns nothing but a bias."""
    model = sharded()
    with (
        unsharded(model, recurse=False, rank0_only=True),
        unsharded(model.head, recurse=False),
        torch.no_grad(),
    ):
        assert isinstance(model.head.weight, DTensor) is (dist.get_rank() > 0)
        assert not isinstance(model.head.bias, DTensor)
        if dist.get_rank() == 0:
            model.head.weight.fill_(3)
    assert (full(model.embed.weight) == 3).all()


@on_ranks(2)
def test_the_owner_is_not_gathered_while_it_is_open_in_part() -> None:
    model = sharded()
    with unsharded(model.head), torch.no_grad(), pytest.raises(ShardError) as caught:
        model.unshard()
    assert str(caught.value) == (
        "Expected unshard() of the root group outside of unsharded(), got it inside, where the "
        "parameters are full"
    )
