"""What edits a module edits its tied parameters that belong to an outer group, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_shard import ShardError, fully_shard, load_sharded, sync_module_states, unsharded
from composable_shard.testing import run_ranks

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


def by_hand(model: Any) -> None:
    model.unshard()


def by_a_forward(model: Any) -> None:
    model(TOKENS)


def not_at_all(model: Any) -> None:
    pass


GATHERED = [by_hand, by_a_forward, not_at_all]


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


def edited(
    gather: Callable[[Any], None], edit: Callable[[Any, Path], None], folder: Path
) -> tuple[bool, bool, bool]:
    model = sharded()
    gather(model)
    edit(model, folder)
    model.reshard()
    weight = full(model.embed.weight)
    is_tied = model.embed.weight is model.head.weight
    return bool((weight == 3).all()), is_tied, bool((model(TOKENS).var(0) < 1e-6).all())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("edit", [fill, fill_alone, load])
@pytest.mark.parametrize("gather", GATHERED)
def test_an_edit_through_the_group_that_does_not_own_it_is_kept(
    tmp_path: Path,
    gather: Callable[[Any], None],
    edit: Callable[[Any, Path], None],
    ranks: int,
) -> None:
    assert run_ranks(edited, ranks, gather, edit, tmp_path) == [(True, True, True)] * ranks


def synchronized(gather: Callable[[Any], None]) -> list[float]:
    """Let replicas differ; those of the head are made equal, though the root owns its weight."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    with torch.no_grad():
        model.embed.weight.to_local().fill_(dist.get_rank() + 1)
    gather(model)
    sync_module_states(model.head, keep_shards=True)
    model.reshard()
    return [float(value) for value in model.embed.weight.to_local().unique()]


@pytest.mark.parametrize("gather", [by_hand, by_a_forward, not_at_all])
def test_replicas_of_it_are_synchronized(gather: Callable[[Any], None]) -> None:
    assert run_ranks(synchronized, 2, gather) == [[1.0], [1.0]]


def refused() -> str:
    model = sharded()
    model.unshard()
    with pytest.raises(ShardError) as caught:
        sync_module_states(model.head)
    return str(caught.value)


def test_synchronizing_it_is_refused_though_it_is_gathered() -> None:
    for text in run_ranks(refused, 2):
        assert text.startswith("Expected FSDPLinear before it is sharded, got 'weight' sharded")


def forward_within(opened: str, policy: Any = None) -> bool:
    """Open one group alone and run it, or the whole, as a plain module."""
    torch.manual_seed(0)
    oracle = Model()
    model = sharded()
    module, reference = model.get_submodule(opened), oracle.get_submodule(opened)
    x = TOKENS if opened in ("", "embed") else torch.ones(2, 4)
    with unsharded(module, recurse=False), torch.no_grad():
        return torch.equal(module(x), reference(x))


@pytest.mark.parametrize("opened", ["", "embed", "head"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_group_runs_as_a_plain_module(ranks: int, opened: str) -> None:
    assert run_ranks(forward_within, ranks, opened) == [True] * ranks


def opened_twice() -> list[bool]:
    """Open the root on the first rank alone, and the head within, which owns nothing but a bias."""
    model = sharded()
    found = []
    with (
        unsharded(model, recurse=False, rank0_only=True),
        unsharded(model.head, recurse=False),
        torch.no_grad(),
    ):
        found.append(isinstance(model.head.weight, DTensor) is (dist.get_rank() > 0))
        found.append(not isinstance(model.head.bias, DTensor))
        if dist.get_rank() == 0:
            model.head.weight.fill_(3)
    found.append(bool((full(model.embed.weight) == 3).all()))
    return found


def test_what_an_outer_context_has_opened_is_left_to_it() -> None:
    assert run_ranks(opened_twice, 2, timeout=30) == [[True] * 3] * 2


def root_within_head() -> str:
    model = sharded()
    with (
        unsharded(model.head),
        torch.no_grad(),
        pytest.raises(ShardError) as caught,
    ):
        model.unshard()
    return str(caught.value)


def test_the_owner_is_not_gathered_while_it_is_open_in_part() -> None:
    assert (
        run_ranks(root_within_head, 2)
        == [
            "Expected unshard() of the root group outside of unsharded(), got it inside, where the "
            "parameters are full"
        ]
        * 2
    )
