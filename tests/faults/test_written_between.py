"""What is written between a forward and its backward, where it is not on all ranks.

Each rank has a part of what is written, or nothing of it. That a backward is refused is decided by
every rank by itself: where some refuse and others gather, those wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nets import own_input
from safetensors.torch import save_file
from torch import nn

from composable_shard import fully_shard, load_sharded, unsharded
from composable_shard.testing import RankError, run_ranks

ROWS = 6


class Rows(nn.Module):
    """A weight of several rows, of which each rank has some, and one of a single row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inp = nn.Linear(4, ROWS)
        self.few = nn.Parameter(torch.randn(1, ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inp(x)) * self.few


def build(module: nn.Module | None = None) -> Rows:
    return fully_shard(Rows() if module is None else module)


def add_to_a_row(model: nn.Module, row: int) -> None:
    with torch.no_grad():
        model.inp.weight[row].add_(1)


def add_unseen(model: nn.Module, row: int) -> None:
    """Write without a version counter of the full parameter that could tell."""
    model.inp.weight.data[row] += 1


def put_another(model: nn.Module, row: int) -> None:
    weight = model.inp.weight.detach().clone()
    weight[row] += 1
    model.inp.weight = nn.Parameter(weight)


EDITS = [add_to_a_row, add_unseen, put_another]


def edit_between(edit: Callable[[nn.Module, int], None], row: int, rank0_only: bool) -> None:
    reference, model = Rows(), build()
    loss = model(own_input()).square().sum()
    with unsharded(model, rank0_only=rank0_only):
        if not rank0_only or dist.get_rank() == 0:
            edit(model, row)
    edit(reference, row)
    assert torch.equal(model.inp.weight.full_tensor(), reference.inp.weight)
    loss.backward()


STALE = (  # by autograd
    "one of the variables needed for gradient computation has been modified by an inplace operation"
)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("row", [0, ROWS - 1])
@pytest.mark.parametrize("rank0_only", [False, True])
def test_an_edit_of_rows_of_one_rank_is_stale_on_all(
    edit: Callable[[nn.Module, int], None], row: int, rank0_only: bool
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(edit_between, 2, edit, row, rank0_only, timeout=30)
    assert caught.value.agreed().message.startswith(STALE)


def load_between(file: str, sends: bool) -> None:
    model = build()
    loss = model(own_input()).square().sum()
    load_sharded(model, file, strict=False, broadcast_from_rank0=sends)
    assert torch.equal(model.few.full_tensor(), torch.full((1, ROWS), 2.0))
    loss.backward()


@pytest.mark.parametrize("sends", [False, True])
def test_a_load_of_what_one_rank_has_is_stale_on_all(tmp_path: Path, sends: bool) -> None:
    file = tmp_path / "few.safetensors"
    save_file({"few": torch.full((1, ROWS), 2.0)}, file)
    with pytest.raises(RankError) as caught:
        run_ranks(load_between, 2, str(file), sends, timeout=30)
    assert caught.value.agreed().message.startswith(STALE)
