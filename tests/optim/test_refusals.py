"""What ``with_layout`` refuses: the text, and that all ranks raise it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from composable_shard import ShardError
from composable_shard.optim import Owned, Rows, Sharded, with_layout
from composable_shard.testing import fake_ranks
from optim.whole import Params, Rotated, Spec, adamw, muon, set_gradients, sharded

MODEL = [Spec((4, 4)), Spec((6, 2)), Spec((4,))]
REST = {"*": Sharded(adamw)}


def layouts(**given: Any) -> Callable[[], object]:
    return lambda: with_layout(Params(MODEL), {**given, **REST})


def two_groups(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*params, {"params": [torch.zeros(2)]}], lr=0.1)


def add_group() -> None:
    optimizer = with_layout(Params(MODEL), REST)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def copied() -> None:
    copy.deepcopy(with_layout(Params(MODEL), REST))


def pickled() -> None:
    torch.save(with_layout(Params(MODEL), REST), io.BytesIO())


def strided() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [_StridedShard(0, split_factor=2), Replicate()]
    weight = distribute_tensor(torch.zeros(8, 4), mesh, placements, src_data_rank=None)
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    with_layout(model, {"*": Owned(muon)})


COPIED = (
    "Expected state_dict() to transfer an optimizer of with_layout, since the owners hold its "
    "states, got a copy or a pickle of it; make a new optimizer by with_layout, and load the state "
    "dict"
)
CASES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        layouts(p0=muon),
        TypeError,
        "Expected the layout of 'p0' to be Owned, Rows or Sharded, got partial: functools.partial("
        "<class 'torch.optim.Muon'>, lr=0.05)",
    ),
    (
        layouts(p9=Owned(muon)),
        ValueError,
        "Expected pattern 'p9' to match a parameter name, got no match",
    ),
    (
        lambda: with_layout(Params(MODEL), {"p0": Owned(muon)}),
        ValueError,
        "Expected a layout for parameter 'p1', got none that fits; add one for '*'",
    ),
    (
        layouts(p1=Rows(muon, (2, 2))),
        ValueError,
        "Expected parameter 'p1' to be a matrix of 4 rows for split_sizes (2, 2), got [6, 2]",
    ),
    (
        strided,
        ValueError,
        "Expected parameter 'weight' to have one range of rows and columns on each rank, unless "
        "Sharded steps it, got (_StridedShard(dim=0, sf=2), Replicate())",
    ),
    (
        layouts(p2=Owned(muon)),
        ValueError,
        "Expected an optimizer that steps parameter 'p2' as Owned tensors of shape [4], got "
        "ValueError: Muon only supports 2D parameters whereas we found a parameter with size: "
        "torch.Size([4])",
    ),
    (
        layouts(p0=Owned(two_groups)),
        TypeError,
        "Expected the optimizer of Owned to be made of parameter groups, as by "
        "partial(torch.optim.AdamW, lr=3e-4), got SGD",
    ),
    (
        layouts(p1=Sharded(muon)),
        ValueError,
        "Expected an elementwise optimizer for parameter 'p1', got Muon, which may need whole "
        "tensors; use Owned, or pass is_elementwise=True",
    ),
    (
        add_group,
        ShardError,
        "Expected all parameters to have their layout from with_layout, got another group; make a "
        "new optimizer",
    ),
    *((call, ShardError, COPIED) for call in (copied, pickled)),
]


@pytest.mark.parametrize(("call", "error", "text"), CASES, ids=[text[9:45] for _, _, text in CASES])
def test_message(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with fake_ranks(4), pytest.raises(Exception) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == text


@on_ranks(3)
def test_states_that_are_no_tensors() -> None:
    """Also on the rank that owns nothing with such a state: the others tell it."""
    model = sharded([Spec((4, 4)), Spec((2, 2))])
    optimizer = with_layout(model, {"*": Owned(partial(Rotated, keeps=True))})
    set_gradients(model, 0)
    optimizer.step()
    with pytest.raises(ShardError) as caught:
        optimizer.state_dict()
    assert str(caught.value) == (
        "Expected states of 'p0' that are tensors or numbers, got 'list', a list, which cannot be "
        "saved in shards"
    )
