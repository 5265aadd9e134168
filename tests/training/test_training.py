"""Training a sharded model gives the losses, gradients and parameters of the unsharded one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from near import Apart
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composable_shard import fully_shard
from composable_shard.testing import run_ranks
from training.compare import Comparison, step_both
from training.oracle import OPTIMIZERS, Unsharded
from training.trees import ParamSpec, TreeSpec, build, inputs_for, shard


@dataclass(frozen=True)
class Training:
    """A model, how it is sharded and how it is trained."""

    spec: TreeSpec
    reshard_after_forward: bool | None = None
    optimizer: str = "sgd"
    num_steps: int = 3
    max_norm: float | None = None


def train(case: Training) -> list[str]:
    """Train both on this rank; return what differs."""
    model = build(case.spec)
    oracle = Unsharded(model)
    shard(model, case.spec, reshard_after_forward=case.reshard_after_forward)
    exact = dist.get_world_size() <= 2 and case.optimizer.startswith("sgd")
    exact = exact and case.max_norm is None
    comparison = Comparison(model, oracle, exact)
    comparison.params("before")
    optimizers = [OPTIMIZERS[case.optimizer](m.parameters()) for m in (model, oracle.model)]
    for step in range(case.num_steps):
        x = inputs_for(step, dist.get_rank())
        losses = [m(x).square().mean() for m in (model, oracle)]
        comparison.tensor(f"step {step}: loss", *losses)
        for loss in losses:
            loss.backward()
        oracle.after_backward()
        comparison.grads(f"step {step}")
        if case.max_norm is not None:
            clip_both(case.max_norm, model, comparison, f"step {step}")
        step_both(optimizers, oracle)
        comparison.params(f"step {step}")
    return comparison.differences


def clip_both(max_norm: float, model: nn.Module, comparison: Comparison, when: str) -> None:
    """Clip with torch's function on both sides."""
    oracle = comparison.oracle
    whole = [nn.Parameter(grad) for grad in oracle.totals().values()]
    for param in whole:
        param.grad = param.detach().clone()
    wanted = nn.utils.clip_grad_norm_(whole, max_norm)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    assert isinstance(norm, DTensor)
    comparison.tensor(f"{when}: norm", norm.full_tensor(), wanted)
    clipped = [param.grad for param in whole if param.grad is not None]
    oracle.reduced = dict(zip(oracle.reduced, clipped, strict=True))


def assert_same(case: Training, ranks: int) -> None:
    assert run_ranks(train, ranks, case, timeout=20) == [[]] * ranks


# By hand: the edges that a generator may miss -----------------------------------------------

ROWS = ParamSpec((3,)), ParamSpec((1, 5)), ParamSpec((2, 3)), ParamSpec((7, 2))
BIG = ParamSpec((301, 701)), ParamSpec((512, 512)), ParamSpec((5,))
INNER = ParamSpec((3, 5), dim=1), ParamSpec((2, 3, 5), dim=-1), ParamSpec((200, 301, 4), dim=1)
FLAT = ParamSpec((1,)), ParamSpec((1, 2), dim=1), ParamSpec((1, 1, 5), dim=-1), ParamSpec((2,))
LEAF, OTHER = TreeSpec(ROWS), TreeSpec(BIG)

TREES = {
    "fewer rows than ranks": TreeSpec(ROWS),
    "messages of their own": TreeSpec(BIG),
    "inner dims": TreeSpec(INNER),
    "inner dims after dims of one": TreeSpec(FLAT),
    "an empty parameter": TreeSpec((ParamSpec((0, 3)), ParamSpec((4, 0)), ParamSpec((2,)))),
    "nested groups": TreeSpec(ROWS, (TreeSpec(BIG, (TreeSpec(INNER),)), LEAF)),
    "a list as one group": TreeSpec(ROWS, (LEAF, OTHER), together=True),
    "a root without parameters": TreeSpec((), (LEAF, OTHER)),
    "an inner group without parameters": TreeSpec(ROWS, (TreeSpec((), (LEAF,)), TreeSpec())),
    "a root alone": TreeSpec(ROWS, (TreeSpec(BIG, grouped=False),)),
    "groups of the same layout": TreeSpec((), (LEAF, LEAF, LEAF)),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("tree", list(TREES))
def test_this_tree_trains_as_unsharded(tree: str, ranks: int) -> None:
    for reshard in (None, True, False) if ranks == 2 else (None,):
        assert_same(Training(TREES[tree], reshard, num_steps=2), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer_steps_as_unsharded(optimizer: str, ranks: int) -> None:
    tree = TreeSpec(ROWS, (OTHER, TreeSpec(INNER)))
    assert_same(Training(tree, optimizer=optimizer, num_steps=4), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_gradients_are_clipped_as_unsharded(max_norm: float, ranks: int) -> None:
    tree = TreeSpec(ROWS, (OTHER, TreeSpec(INNER)))
    assert_same(Training(tree, max_norm=max_norm), ranks)


def shards_as_distributed(params: tuple[ParamSpec, ...]) -> list[bool]:
    spec = TreeSpec(params)
    full = [param.detach().clone() for param in build(spec).parameters()]
    model = shard(build(spec), spec)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    same = []
    for param, whole, own in zip(model.parameters(), full, params, strict=True):
        assert isinstance(param, DTensor)
        wanted = distribute_tensor(whole, mesh, [Shard(own.dim % whole.ndim)])
        assert param.placements == wanted.placements
        same.append(torch.equal(param.to_local(), wanted.to_local()))
    return same


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_are_those_of_distribute_tensor(ranks: int) -> None:
    params = (*ROWS, *BIG, *INNER)
    assert run_ranks(shards_as_distributed, ranks, params) == [[True] * len(params)] * ranks


# Parameters that are not laid out in order --------------------------------------------------


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6).t())
        self.kernel = nn.Parameter(
            torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum() * self.kernel.cos().sum() + self.kernel.square().sum()


def train_transposed() -> list[str]:
    model = Transposed()
    oracle = Unsharded(model)
    fully_shard(model)
    comparison = Comparison(model, oracle, exact=False)
    comparison.params("before")
    for m in (model, oracle):
        m(inputs_for(0, dist.get_rank())).backward()
    oracle.after_backward()
    comparison.grads("after")
    return comparison.differences


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parameters_that_are_not_contiguous_train_as_unsharded(ranks: int) -> None:
    assert run_ranks(train_transposed, ranks) == [[]] * ranks


# Ranks that send, as those on other hosts do ----------------------------------------------------


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("apart", [None, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("tree", list(TREES))
def test_this_tree_trains_as_unsharded_on_ranks_that_send(
    tree: str, ranks: int, apart: int | None
) -> None:
    case = Training(TREES[tree], num_steps=2)
    assert run_ranks(Apart(train, apart), ranks, case, timeout=30) == [[]] * ranks
