"""Initial values: those of the unsharded model of the same seed, on any number of ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import full, own_input
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from two_tensors import TwoTensor

from composable_shard import fully_shard, init_sharded


class Scale(nn.Module):
    """Parameters and buffers of its own, whose values depend on those of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.empty(7, 5).T)
        self.register_buffer("table", torch.empty(3), persistent=False)

    def reset_parameters(self) -> None:
        self.inner.weight.data.mul_(0.5)[0] = 3.0
        self.inner.reset_parameters()
        nn.init.zeros_(self.inner.bias)
        self.scale.data = torch.randn(5, 7)
        nn.init.xavier_normal_(self.scale)
        self.table.copy_(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.scale.T + self.table.sum()


class Everything(nn.Module):
    """Nested groups, ties, norms with buffers, frozen and bf16 parameters, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5, padding_idx=1)
        self.blocks = nn.ModuleList(Scale() for _ in range(2))
        self.norm = nn.BatchNorm1d(5)
        self.half = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].inner.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + self.half(x.bfloat16()))


def build(device: str) -> Everything:
    with torch.device(device):
        return Everything()


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def normal(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        if param.ndim > 1:
            param.data.normal_(std=0.02)
        else:
            param.zero_()
    for name, param in module.named_parameters():  # of other groups, too
        if name.endswith("inner.weight"):
            param.data.uniform_()
    for buffer in module.buffers(recurse=False):
        buffer.fill_(1)


def shard_rows(model: Everything) -> None:
    for block in model.blocks:
        fully_shard(block.inner)
        fully_shard(block)
    fully_shard(model)


def shard_columns(model: Everything) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))


def shard_in_two_ways(model: Everything) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    for block in model.blocks:
        plan = {"inner": ColwiseParallel()}
        parallelize_module(block, mesh["model"], plan)
        fully_shard(block, mesh=mesh["data"])
    parallelize_module(model, mesh["model"], {"half": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])


def leave_plain(model: Everything) -> None:
    pass


@pytest.mark.parametrize("init", [None, normal])
@pytest.mark.parametrize(
    ("num_ranks", "shard", "begin"),
    [
        (3, shard_rows, "meta"),
        (2, shard_rows, "empty"),
        (4, shard_columns, "meta"),
        (4, shard_in_two_ways, "cpu"),
        (2, leave_plain, "meta"),
    ],
)
@on_ranks("num_ranks")
def test_values_are_those_of_the_unsharded_model(
    init: Callable[[nn.Module], None] | None, begin: str, shard: Callable[[Everything], None]
) -> None:
    torch.manual_seed(7)
    expected = build("cpu")
    model = copy.deepcopy(expected) if begin == "cpu" else build("meta")
    shard(model)
    if begin == "empty":
        model.to_empty(device="cpu")
    with torch.no_grad():
        torch.manual_seed(3)
        expected.apply(init or reset)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    init_sharded(model, init, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    pairs = [*zip(model.named_parameters(), expected.named_parameters(), strict=True)]
    pairs += zip(model.named_buffers(), expected.named_buffers(), strict=True)
    for (name, mine), (_, theirs) in pairs:
        assert torch.equal(full(mine.detach()), theirs), name
        assert mine.dtype == theirs.dtype, name
    assert model.embed.weight is model.head.weight


def ones(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.ones_(param)


SAME = (
    "Expected ranks to hold different rows of '1.weight' of the root group, got the same random "
    "numbers on all of them, from the same seed; call init_sharded(model, seed=...) instead"
)


@pytest.mark.parametrize(
    ("seeds", "how", "expected"), [((0, 0), reset, [SAME]), ((0, 1), reset, []), ((0, 0), ones, [])]
)
@on_ranks(2)
def test_shards_that_are_filled_alike_are_warned_of(
    seeds: tuple[int, int], how: Any, expected: list[str]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device("meta"):
            model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6)).to(dtype)
        fully_shard(model)
        model.to_empty(device="cpu")
        torch.manual_seed(seeds[dist.get_rank()])
        model.apply(how)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(own_input().to(dtype))
        assert [str(warning.message) for warning in caught] == expected


def attention() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))


def weights_alone(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


def subclass() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    return model


def fail(module: nn.Module) -> None:
    raise KeyError("no rule")


NONE = (
    "MaterializationError: Expected {} to initialize 0.in_proj_weight, 0.in_proj_bias{}, got no "
    "values; pass another fn"
)
REFUSED: list[tuple[Callable[[], nn.Module], Any, str]] = [
    (attention, None, NONE.format("reset_parameters()", "")),
    (attention, weights_alone, NONE.format("fn", ", 0.out_proj.bias, 1.bias")),
    (
        subclass,
        None,
        "ShardError: Expected parameters of one plain tensor each, got 'weight', a TwoTensor; give "
        "it its values before fully_shard",
    ),
    (attention, fail, "KeyError: 'no rule'"),
    (attention, 3, "TypeError: Expected fn to be a function or None, got int: 3"),
]


@on_ranks(2)
def test_errors_are_the_same_on_all_ranks() -> None:
    for make, init, text in REFUSED:
        with pytest.raises(Exception) as caught:
            init_sharded(fully_shard(make()), init, seed=0)
        assert f"{type(caught.value).__name__}: {caught.value}" == text
