"""Freezing and unfreezing at any time: while unsharded parameters stand in modules, and with
gradients that are not synchronized yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import Net, average_gradients, full, own_input, two_nets
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

Reshard = bool | int | None


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    loss: torch.Tensor = model(own_input(step)).square().sum()
    return loss


def assert_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Assert that all gradients are reduced, and those of the unsharded model."""
    for (name, param), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert isinstance(param, DTensor), name
        assert param.requires_grad == expected.requires_grad, name
        assert (param.grad is None) == (expected.grad is None), name
        if param.grad is not None:
            assert param.grad.placements == param.placements, (name, param.grad.placements)
            torch.testing.assert_close(full(param.grad), expected.grad, rtol=1e-5, atol=1e-6)


# While unsharded parameters are registered ------------------------------------------------------


Params = dict[str, nn.Parameter]


def by_a_part(model: Net, params: Params, wanted: bool) -> None:
    model.out.requires_grad_(wanted)
    model.inp.weight.requires_grad_(wanted)


def by_assigning(model: Net, params: Params, wanted: bool) -> None:
    model.out.weight.requires_grad = wanted
    model.blocks[0].up.bias.requires_grad = wanted


def by_the_sharded(model: Net, params: Params, wanted: bool) -> None:
    for name in ("out.weight", "inp.bias", "blocks.0.down.weight"):
        params[name].requires_grad_(wanted)


FREEZE: dict[str, Callable[[Net, Params, bool], object]] = {
    "module": lambda model, params, wanted: model.requires_grad_(wanted),
    "part": by_a_part,
    "assigning": by_assigning,
    "sharded": by_the_sharded,
}


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("by_then", ["backward", "forward"])
@pytest.mark.parametrize("freeze", FREEZE)
@on_ranks("num_ranks")
def test_frozen_between_forward_and_backward(
    freeze: str, reshard: Reshard, after: bool, by_then: str
) -> None:
    reference, model = two_nets(1, reshard_after_forward=reshard)
    model.set_reshard_after_backward(after)
    pairs = [(one, dict(one.named_parameters())) for one in (model, reference)]
    optimizers = [torch.optim.SGD(params.values(), lr=0.1) for _, params in pairs]
    (_, ours), (_, theirs) = pairs
    is_all = freeze == "module"
    for step in range(6):
        is_frozen = step in (1, 2, 4)
        for (one, params), optimizer in zip(pairs, optimizers, strict=True):
            loss = loss_of(one, step)
            if is_frozen:
                FREEZE[freeze](one, params, False)
            if by_then == "forward" and is_frozen:
                loss = loss_of(one, step + 10)
            if is_all and is_frozen:
                assert not any(param.requires_grad for param in ours.values())
            if loss.requires_grad:
                loss.backward()
            optimizer.step() if step % 2 else None
        assert [p.requires_grad for p in ours.values()] == [
            p.requires_grad for p in theirs.values()
        ]
        if by_then == "forward" and is_frozen and is_all:
            model(own_input(step)), reference(own_input(step))
        average_gradients(reference.parameters())
        for name, expected in theirs.items():
            assert (ours[name].grad is None) == (expected.grad is None), (step, name)
            if expected.grad is not None:
                got = full(ours[name].grad)
                torch.testing.assert_close(got, expected.grad, rtol=1e-4, atol=1e-5)
        for (one, params), optimizer in zip(pairs, optimizers, strict=True):
            optimizer.zero_grad()
            if is_frozen:
                FREEZE[freeze](one, params, True)
        follow_values(ours.values(), theirs.values())
    assert all(param.requires_grad for param in ours.values())


def follow_values(params: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> None:
    """Let sums that were taken in another order not add up."""
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            other.copy_(full(param))


# With gradients that are not synchronized ---------------------------------------------------------


Part = Callable[[Net], list[nn.Module]]
PARTS: dict[str, Part] = {
    "everything": lambda model: [model],
    "a block": lambda model: [model.blocks[0]],
    "a layer": lambda model: [model.blocks[1].up, model.out],
    "all but the head": lambda model: [model.inp, *model.blocks],
}


HYBRID = (2, 2)


class Partly(Net):
    """Uses nothing of what its blocks give where it is told so."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            y = block(x)
            x = x if self.skips else y
        return self.out(x)


def options_of(kind: str) -> dict[str, Any]:
    if kind == "hybrid":
        return {"mesh": init_device_mesh("cpu", HYBRID, mesh_dim_names=("replicate", "shard"))}
    if kind == "offloaded":
        return {"offload_policy": CPUOffloadPolicy()}
    if kind == "mixed":
        return {"mp_policy": MixedPrecisionPolicy(torch.float64, torch.float64)}
    return {}


@pytest.mark.brief(6)
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("hybrid", 4), *product(("plain", "offloaded", "mixed"), (1, 2, 3))],
)
@pytest.mark.parametrize("uses", ["some", "all"])
@pytest.mark.parametrize(
    ("part", "how"), [("everything", "inputs"), *product(PARTS, ["sync", "all-reduce"])]
)
@on_ranks("num_ranks")
def test_what_was_accumulated_and_frozen_is_reduced(
    kind: str, uses: str, part: str, how: str
) -> None:
    """Accumulate without sync, freeze, then synchronize; on some ranks a part is not used."""
    reference, model = two_nets(2, make=Partly, **options_of(kind))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, reference)]
    for iteration in range(3):
        frozen = [module for one in (model, reference) for module in PARTS[part](one)]
        model.set_requires_gradient_sync(how == "all-reduce")
        model.set_requires_all_reduce(False)
        for one in (model, reference):
            one.skips = uses == "some" and dist.get_rank() == 0
            one(own_input(iteration)).square().sum().backward()
            one.skips = False
        for module in frozen:
            module.requires_grad_(False)
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        for one in (model, reference):
            x = own_input(10 + iteration)
            if part == "everything":
                x.requires_grad_(how == "inputs")
            loss = one(x).square().sum()
            if loss.requires_grad:
                loss.backward()
        if part == "everything" and how != "inputs":
            model.synchronize_gradients()
        average(reference)
        assert_gradients(model, reference)
        for module in frozen:
            module.requires_grad_(True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(param), expected, rtol=1e-5, atol=1e-6)
        follow_values(model.parameters(), reference.parameters())


def average(reference: nn.Module) -> None:
    """Average gradients over the ranks; one that only some ranks have is averaged, too."""
    for param in reference.parameters():
        has = torch.tensor(float(param.grad is not None))
        dist.all_reduce(has)
        if has.item() and param.grad is None:
            param.grad = torch.zeros_like(param)
    average_gradients(reference.parameters())


# Zeroed, not dropped ------------------------------------------------------------------------------


@pytest.mark.brief(2)
@pytest.mark.parametrize("foreach", ["single", "foreach", "fused"])
@pytest.mark.parametrize("by", ["optimizer", "module"])
@pytest.mark.parametrize(("num_ranks", "hybrid"), [(1, False), (2, False), (3, False), (4, True)])
@on_ranks("num_ranks")
def test_unsynced_gradients_are_zeroed(by: str, hybrid: bool, foreach: str) -> None:
    """Zero gradients between microbatches; accumulation goes on from there."""
    options = options_of("hybrid") if hybrid else {}
    reference, model = two_nets(2, **options)
    optimizers = []
    for one in (model, reference):
        made = {
            "foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=True),
            "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
            "single": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False),
        }[foreach](one)
        optimizers.append(made)
    for step in range(4):
        for micro in range(4):
            is_last = micro == 3
            if hybrid:
                model.set_requires_all_reduce(is_last)
            else:
                model.set_requires_gradient_sync(is_last)
            for one, optimizer in zip((model, reference), optimizers, strict=True):
                if micro == 1 or (micro == 0 and step):
                    if by == "optimizer":
                        optimizer.zero_grad(set_to_none=False)
                    else:
                        one.zero_grad(set_to_none=False)
                    for param in one.parameters():
                        grad = param.grad
                        local = grad.to_local() if isinstance(grad, DTensor) else grad
                        assert local is not None and not local.any()
                loss_of(one, 10 * step + micro).backward()
        average(reference)
        assert_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(param), expected, rtol=1e-4, atol=1e-5)
        follow_values(model.parameters(), reference.parameters())


@pytest.mark.parametrize("reshard", [None, False])
@on_ranks(2)
def test_a_module_of_a_list_freezes_and_clears_its_own_parameters(reshard: Reshard) -> None:
    model: Any = Net(2)
    fully_shard(list(model.blocks), reshard_after_forward=reshard)
    fully_shard(model)
    loss_of(model).backward()
    model.blocks[0].requires_grad_(False)
    model.blocks[0].zero_grad()
    for index, block in enumerate(model.blocks):
        found = {(param.requires_grad, param.grad is not None) for param in block.parameters()}
        assert found == {(index == 1, index == 1)}
