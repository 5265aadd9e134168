"""Other functions of torch that are applied to modules, before ours and after, in one model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from nets import Block, average_gradients, full, own_input
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

from composable_shard import fully_shard
from composable_shard.testing import fake_ranks

STEPS = 4


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(4) for _ in range(4)), nn.Linear(4, 3))


def differences(model: nn.Module, reference: nn.Module) -> list[str]:
    """Train a distributed model and a plain one; two ranks add two numbers, which is exact."""
    found = []
    pairs = [(one, torch.optim.AdamW(one.parameters(), lr=0.05)) for one in (model, reference)]
    for step in range(STEPS):
        for one, optimizer in pairs:
            optimizer.zero_grad()
            one(own_input(step)).square().sum().backward()
            if one is reference:
                average_gradients(reference.parameters())
            optimizer.step()
        params = zip(model.named_parameters(), reference.parameters(), strict=True)
        found += [n for (n, p), own in params if not torch.equal(full(p.detach()), own.detach())]
    return found


def replicate(kind: str, module: nn.Module) -> None:
    if kind == "ddp":
        replicate_by_ddp(module)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replicate",))
        replicate_by_fsdp(module, mesh=mesh)


ARRANGEMENTS: dict[str, list[str]] = {
    "a child after others": ["-0", "+1", "+4", "-"],
    "in a list": ["+1.up", "-0 1 2", "-"],
    "around": ["-1", "-2 3", "+"],
    "everything inside": ["+0", "+1", "+2", "+3", "+4", "-"],
}
"""The names of what is replicated, after "+", and of what is sharded, after "-", in turns."""


def arrange(kind: str, steps: list[str]) -> nn.Sequential:
    model = make()
    for step in steps:
        modules = [model.get_submodule(name) for name in step[1:].split(" ")]
        if step[0] == "+":
            replicate(kind, modules[0])
        else:
            fully_shard(modules if len(modules) > 1 else modules[0])
    return model


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(2)
def test_replicated_and_sharded_modules_train_as_one_model(kind: str, arrangement: str) -> None:
    model = arrange(kind, ARRANGEMENTS[arrangement])
    assert differences(model, make()) == []
    forms = {str(getattr(param, "placements", "plain")) for param in model.parameters()}
    kept = "plain" if kind == "ddp" else "(Replicate(),)"
    assert forms == {kept} | ({"(Shard(dim=0),)"} if "inside" not in arrangement else set())


ITSELF = (
    "Expected a module without torch's replicate or DistributedDataParallel, got {}; shard a "
    "module around it, or shard its children before you call replicate"
)
# what torch says, since the registry of the module names fully_shard
OF_TORCH = "Cannot apply `replicate()` on a Module already managed by `fully_shard`"
REFUSALS: list[tuple[str, list[str], str]] = [
    ("ddp", ["+", "-"], ITSELF.format("DDPSequential")),
    ("fsdp", ["+", "-"], ITSELF.format("ReplicateSequential")),
    (
        "fsdp",
        ["+", "-1"],
        "Expected the mesh of the DTensor parameter 'norm.weight' and the data-parallel mesh to be "
        "parts of one mesh with named axes",
    ),
    (
        "ddp",
        ["-", "+1"],
        "Expected replicate of '1' before fully_shard of the root group, which shards its "
        "parameters, got replicate after it; apply replicate first",
    ),
    ("ddp", ["-", "+"], OF_TORCH),
    ("fsdp", ["-", "+"], OF_TORCH),
]


@pytest.mark.parametrize(("kind", "steps", "text"), REFUSALS)
@on_ranks(2)
def test_what_would_be_reduced_twice_is_refused_on_all_ranks(
    kind: str, steps: list[str], text: str
) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        arrange(kind, steps)(own_input())
    assert str(caught.value).split(", got DeviceMesh")[0] == text
    if steps == ["+", "-"]:  # a module that is refused is as it was
        model = arrange(kind, ["+"])
        params, kind_of_module = list(map(id, model.parameters())), type(model)
        with pytest.raises(ValueError):
            fully_shard(model)
        assert list(map(id, model.parameters())) == params
        assert type(model) is kind_of_module
        assert list(_get_registry(model) or ()) == ["replicate"]


@pytest.mark.parametrize("order", ["before", "after", "inside"])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_the_composable_checkpoint_computes_again(order: str) -> None:
    """Each block runs twice in a step: in forward, and again in backward."""
    model, calls = make(), [0] * 4

    def count(index: int) -> None:
        calls[index] += 1

    for index in range(4):
        if order == "before":
            checkpoint(model[index])
        if order != "inside" or index % 2:
            fully_shard(model[index])
        if order != "before":
            checkpoint(model[index])
        model[index].up.register_forward_pre_hook(lambda *_, index=index: count(index))
    assert (differences(fully_shard(model), make()), calls) == ([], [2 * STEPS] * 4)


class OwnState:
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
    model, reference = make(), make()
    if inner_too:
        fully_shard(model[0])
    model[0] = checkpoint_wrapper(model[0], CheckpointImpl.NO_REENTRANT)
    fully_shard(model[0])
    assert differences(fully_shard(model), reference) == []


def test_the_states_of_other_functions_survive() -> None:
    with fake_ranks(2):
        model = make()
        labelled(model, "before")
        fully_shard(model)
        assert labelled.state(model).label == "before"  # type: ignore[attr-defined]
        copied = copy.deepcopy(model)
        labelled.state(copied).label = "of the copy"  # type: ignore[attr-defined]
        assert labelled.state(model).label == "before"  # type: ignore[attr-defined]
        later = fully_shard(make())
        labelled(later, "after")
        assert labelled.state(later).label == "after"  # type: ignore[attr-defined]
        within = shard_it(make())  # a composable function may shard
        for one in (model, later, within):
            assert torch_fully_shard.state(one)._fsdp_param_group is not None


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
