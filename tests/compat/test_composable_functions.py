"""Other functions of torch that are applied to modules, before ours and after, in one model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshes.compare import whole
from on_ranks import on_ranks
from torch import nn
from torch.distributed._composable import checkpoint, contract
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from composable_shard import apply_fully_shard, clip_grad_norm_, fully_shard
from composable_shard.testing import fake_ranks, run_ranks

WIDTH = 5
STEPS = 4


class Block(nn.Module):
    """Two layers, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(self.up(x).tanh())


def make(num_blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)), nn.Linear(WIDTH, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, generator=generator)


def differences(
    model: nn.Module, reference: nn.Module, *, microbatches: int = 1, clip: float | None = None
) -> list[str]:
    """Train a distributed model and the reference, on the batches of all ranks; compare.

    Two ranks add two numbers, which has one result: with one microbatch all must be equal.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [
        torch.optim.AdamW(one.parameters(), lr=0.05, weight_decay=0.1) for one in (model, reference)
    ]
    found = []
    for step in range(STEPS):
        for one in (model, reference):
            one.zero_grad()
        for microbatch in range(microbatches):
            number = step * microbatches + microbatch
            model(batch(number, rank)).square().sum().backward()
            for other in range(ranks):
                (reference(batch(number, other)).square().sum() / ranks).backward()
        if clip is not None:
            got = clip_grad_norm_(model.parameters(), clip)
            wanted = nn.utils.clip_grad_norm_(reference.parameters(), clip)
            if not torch.allclose(got, wanted):
                found.append(f"step {step}: norm {got} instead of {wanted}")
        for optimizer in optimizers:
            optimizer.step()
        pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
        for (name, param), own in pairs:
            got, wanted = whole(param.detach()), own.detach()
            tolerance = 0.0 if ranks == 2 and microbatches == 1 and clip is None else 1e-5
            if not torch.allclose(got, wanted, rtol=0, atol=tolerance):
                found.append(f"step {step}: {name} is off by {(got - wanted).abs().max():.3g}")
    return found


# torch's replicate ----------------------------------------------------------------------------


def replicate(kind: str, module: nn.Module) -> None:
    if kind == "ddp":
        replicate_by_ddp(module)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
        replicate_by_fsdp(module, mesh=mesh)


def a_child_first(kind: str, model: nn.Sequential) -> None:
    replicate(kind, model[1])
    fully_shard(model[0])
    fully_shard(model)


def a_child_after_others(kind: str, model: nn.Sequential) -> None:
    fully_shard(model[0])
    replicate(kind, model[1])
    replicate(kind, model[4])
    fully_shard(model)


def in_a_list(kind: str, model: nn.Sequential) -> None:
    replicate(kind, model[1].up)
    fully_shard([model[0], model[1], model[2]])
    fully_shard(model)


def around(kind: str, model: nn.Sequential) -> None:
    fully_shard(model[1])
    fully_shard([model[2], model[3]])
    replicate(kind, model)


def within_each_other(kind: str, model: nn.Sequential) -> None:
    fully_shard(model[1].up)
    replicate(kind, model[1])
    fully_shard(model[2])
    fully_shard(model)


def everything_inside(kind: str, model: nn.Sequential) -> None:
    for block in model:
        replicate(kind, block)
    fully_shard(model)


ARRANGEMENTS = {
    function.__name__: function
    for function in (
        a_child_first,
        a_child_after_others,
        in_a_list,
        around,
        within_each_other,
        everything_inside,
    )
}


def train_beside_replicate(kind: str, arrangement: str, **how: Any) -> tuple[list[str], set[str]]:
    model, reference = make(), make()
    ARRANGEMENTS[arrangement](kind, model)
    found = differences(model, reference, **how)
    forms = {str(getattr(param, "placements", "plain")) for param in model.parameters()}
    return found, forms


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_replicated_and_sharded_modules_train_as_one_model(kind: str, arrangement: str) -> None:
    kept = "plain" if kind == "ddp" else "(Replicate(),)"
    forms = {kept} if arrangement == "everything_inside" else {kept, "(Shard(dim=0),)"}
    assert run_ranks(train_beside_replicate, 2, kind, arrangement) == [([], forms)] * 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_replicated_modules_accumulate_and_are_clipped_with_the_others(kind: str) -> None:
    train = partial(train_beside_replicate, microbatches=2, clip=0.5)
    for found, _ in run_ranks(train, 3, kind, "a_child_after_others"):
        assert found == []


def shard_by_blocks(model: nn.Sequential) -> None:
    apply_fully_shard(model, Block)


def shard_by_size(model: nn.Sequential) -> None:
    apply_fully_shard(model, 100)


@pytest.mark.parametrize("function", [fully_shard, shard_by_blocks, shard_by_size])
@on_ranks(2)
def test_a_module_in_ddp_stays_replicated(function: Callable[[nn.Module], Any]) -> None:
    model, reference = make(), make()
    model[1] = DistributedDataParallel(model[1])
    own = list(model[1].parameters())
    function(model)
    found = differences(model, reference)
    if list(map(id, model[1].parameters())) != list(map(id, own)):
        found.append("the parameters of DDP were replaced")
    assert found == []


class Tied(nn.Module):
    """A head whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.new_zeros(x.shape) + self.embedding(x.abs().long().sum(1, keepdim=True) % 7)[:, 0]
        return self.head(self.block(x))


@on_ranks(2)
def test_what_is_tied_to_a_replicated_parameter_is_replicated() -> None:
    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    own = model.embedding.weight
    replicate("ddp", model.embedding)
    fully_shard(model.block)
    fully_shard(model)
    found = differences(model, reference)
    if model.embedding.weight is not own or model.head.weight is not own:
        found.append("the tied parameter was replaced")
    assert found == []


@pytest.mark.parametrize("arrangement", ["by blocks", "root"])
@on_ranks(2)
def test_what_torch_has_sharded_is_left_to_it(arrangement: str) -> None:
    model, reference = make(), make()
    torch_fully_shard(model[1], mesh=init_device_mesh("cpu", (2,)))
    if arrangement == "by blocks":
        shard_by_blocks(model)
    else:
        fully_shard(model)
    assert differences(model, reference) == []


def refused(case: str) -> str:
    model = make()
    try:
        if case.startswith("itself"):
            replicate(case.split()[1], model)
            fully_shard(model)
        elif case == "inner after outer":
            replicate("fsdp", model)
            fully_shard(model[1])
        elif case == "replicate after":
            fully_shard(model)
            replicate_by_ddp(model[1])
            model(batch(0, 0))
        else:
            fully_shard(model)
            replicate(case.split()[1], model)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


REFUSALS = {
    "itself ddp": "Expected a module without torch's replicate or DistributedDataParallel, got "
    "DDPSequential; leave that out, or apply fully_shard to modules inside of it, before it, or to "
    "one around it",
    "itself fsdp": "Expected a module without torch's replicate or DistributedDataParallel, got "
    "ReplicateSequential; leave that out, or apply fully_shard to modules inside of it, before it, "
    "or to one around it",
    "inner after outer": "Expected fully_shard of Block before torch has converted "
    "the parameters of ReplicateSequential around it, got it after; start with the inner modules",
    "replicate after": "Expected replicate of '1' before fully_shard of the root "
    "group, whose parameters it holds, got it after; apply replicate first",
    # what torch says, since the registry of the module names fully_shard
    "sharded ddp": "Cannot apply `replicate()` on a Module already managed by `fully_shard`",
    "sharded fsdp": "Cannot apply `replicate()` on a Module already managed by `fully_shard`",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_be_reduced_twice_is_refused_on_all_ranks(case: str) -> None:
    assert run_ranks(refused, 2, case) == [REFUSALS[case]] * 2


def test_a_refused_module_is_as_it_was() -> None:
    with fake_ranks(2):
        model = make()
        replicate_by_ddp(model)
        params, kind = list(model.parameters()), type(model)
        with pytest.raises(ValueError, match="without torch's replicate"):
            fully_shard(model)
        assert list(map(id, model.parameters())) == list(map(id, params))
        assert type(model) is kind
        assert list(_get_registry(model) or ()) == ["replicate"]


# Others with a state on the module -------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after", "inside"])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_the_composable_checkpoint_computes_again(order: str) -> None:
    """Each block runs twice in a step: in forward, and again in backward."""
    model, reference = make(), make()
    for index in range(4):
        if order == "before":
            checkpoint(model[index])
        if order != "inside" or index % 2:
            fully_shard(model[index])
        if order != "before":
            checkpoint(model[index])
    fully_shard(model)
    found = differences(model, reference)
    assert (found, [model[index].calls for index in range(4)]) == ([], [2 * STEPS] * 4)


class OwnState:
    """What a composable function keeps."""

    label = "none"


@contract(state_cls=OwnState)  # type: ignore[arg-type]
def labelled(module: nn.Module, label: str) -> nn.Module:
    labelled.state(module).label = label  # type: ignore[attr-defined]
    return module


@contract()
def shard_it(module: nn.Module) -> nn.Module:
    return fully_shard(module)


@pytest.mark.parametrize("inner_too", [False, True])
@on_ranks(2)
def test_a_checkpoint_wrapper_around_a_sharded_module(inner_too: bool) -> None:
    """Shard a wrapper that passes the attributes of its module off as its own; see accelerate."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = copy.deepcopy(reference)
    if inner_too:
        fully_shard(model[0])
    model[0] = checkpoint_wrapper(model[0], CheckpointImpl.NO_REENTRANT)
    fully_shard(model[0])
    fully_shard(model)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for one in (reference, model):
        one(x).square().sum().backward()
    off = []
    for param, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(wanted.grad)
        off.append((whole(param.grad) - wanted.grad / 2).abs().max().item())
    assert off == [0.0] * 4


def test_the_states_of_other_functions_survive() -> None:
    with fake_ranks(2):
        model = make()
        labelled(model, "before")
        fully_shard(model)
        assert labelled.state(model).label == "before"  # type: ignore[attr-defined]
        copied = copy.deepcopy(model)
        labelled.state(copied).label = "of the copy"  # type: ignore[attr-defined]
        assert labelled.state(model).label == "before"  # type: ignore[attr-defined]
        assert torch_fully_shard.state(model)._fsdp_param_group is not None
        later = fully_shard(make())
        labelled(later, "after")
        assert labelled.state(later).label == "after"  # type: ignore[attr-defined]
        assert torch_fully_shard.state(later)._fsdp_param_group is not None


def test_a_composable_function_may_shard() -> None:
    with fake_ranks(2):
        model = shard_it(make())
        assert shard_it.state(model) is not None  # type: ignore[attr-defined]
        assert torch_fully_shard.state(model)._fsdp_param_group is not None
        with pytest.raises(AssertionError, match="shard_it has already been applied"):
            shard_it(model)


def test_the_registry_names_what_was_applied() -> None:
    with fake_ranks(2):
        model = make()
        checkpoint(model[0])
        fully_shard([model[0], model[1]])
        fully_shard(model)
        assert list(_get_registry(model[0]) or ()) == ["checkpoint", "fully_shard"]
        assert list(_get_registry(model[1]) or ()) == ["fully_shard"]
        assert _get_registry(model[2]) is None
        assert list(_get_registry(model) or ()) == ["fully_shard"]
        assert list(_get_registry(copy.deepcopy(model)) or ()) == ["fully_shard"]
        with pytest.raises(AssertionError, match="fully_shard has already been applied"):
            torch_fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="which fully_shard was applied to before"):
            fully_shard(model[1])
