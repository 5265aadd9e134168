"""Hooks for gradients that do what they must not: refused on all ranks, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from composable_shard import ExtensionError, fully_shard
from composable_shard.testing import RankError, fake_ranks, run_ranks
from subclasses.lossless import POST, PRE, Lossless, as_type


def broken(name: str) -> None:
    """Train a weight whose hooks are those given."""
    names = {PRE: HOOKS[name][0], POST: summed}
    layer = as_type(nn.Linear(2, 4, bias=False), type("Broken", (Lossless,), names))
    fully_shard(layer)
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()


def another_later(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    self.num_calls += 1
    return (grad if self.num_calls == 1 else grad.half(),), None


def fails_on_one(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("no")
    return (grad,), None


RETURN = f"Expected {PRE} of weight to return "
FAILS = f"{PRE} of weight failed: "
HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "no tuple": (
        lambda self, grad, mesh: grad,
        f"{FAILS}ExtensionError: {RETURN}(tensors, metadata), got Tensor",
    ),
    "one tensor": (
        lambda self, grad, mesh: (grad, None),
        f"{FAILS}ExtensionError: {RETURN}a tuple of tensors and metadata, got Tensor as "
        "its first element",
    ),
    "no rows": (
        lambda self, grad, mesh: ((grad, grad.sum()), None),
        f"{FAILS}ExtensionError: {RETURN}tensors with a row for each of 2 ranks, got [[2, 4], []]",
    ),
    "another later": (
        another_later,
        f"{RETURN}[torch.float32 [4]] as before, got [torch.float16 [4]]",
    ),
    "fails on one": (fails_on_one, f"{FAILS}ValueError: no"),
    "differs": (
        lambda self, grad, mesh: ((grad if dist.get_rank() == 0 else grad.half(),), None),
        f"{RETURN}the same on all ranks, got [torch.float32 [4]] on rank 0 and [torch.float16 [4]] "
        "on rank 1",
    ),
}


def summed(self: Any, received: Any, metadata: Any, out: torch.Tensor) -> None:
    out.copy_(received[0].sum(0))


def gathers_on_one(self: Any, mesh: Any) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("no")
    return (self.full,), None


def broken_gather(name: str) -> None:
    kind = type("Broken", (Lossless,), {"fsdp_pre_all_gather": gathers_on_one})
    fully_shard(as_type(nn.Linear(2, 4, bias=False), kind))(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("fn", "name"), [*((broken, name) for name in HOOKS), (broken_gather, "gathers_on_one")]
)
def test_what_hooks_must_not_do_is_refused_on_all_ranks(fn: Callable[..., None], name: str) -> None:
    """And the rank on which a hook fails shows where."""
    with pytest.raises(RankError) as caught:
        run_ranks(fn, 2, name)
    failure = caught.value.agreed()
    assert failure.exception_type is ExtensionError
    if name in HOOKS:
        assert failure.message == HOOKS[name][1]
    if name in ("fails on one", "gathers_on_one"):
        hook = name.replace(" ", "_")
        shows = [f", in {hook}" in failure.traceback for failure in caught.value.failures]
        assert shows == [False, True]


def test_one_hook_alone_is_refused() -> None:
    kind = type("Half", (torch.Tensor,), {PRE: summed})
    layer = as_type(nn.Linear(2, 4, bias=False), kind)
    with fake_ranks(2), pytest.raises(TypeError) as caught:
        fully_shard(layer)
    assert str(caught.value) == (
        f"Expected both {PRE} and {POST} on Half, got only {PRE}; define {POST} too"
    )


class Spreads(Lossless):
    """Makes tensors of its own of all that is computed with it, gradients too."""

    fsdp_pre_all_gather = property()
    fsdp_post_all_gather = property()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain, named = tree_map_only(cls, lambda one: one.full, (args, kwargs or {}))
        out = tree_map_only(torch.Tensor, cls, func(*plain, **named))
        return return_and_correct_aliasing(func, args, kwargs, out)


@on_ranks(2)
def test_a_gradient_that_is_a_subclass_is_refused() -> None:
    layer = fully_shard(as_type(nn.Linear(2, 4, bias=False), Spreads))
    with pytest.raises(ExtensionError) as caught:
        layer(torch.ones(1, 2)).sum().backward()
    assert str(caught.value) == (
        f"Expected a plain gradient of weight to pass to {PRE}, got Spreads; let "
        "fsdp_post_all_gather return a plain tensor"
    )
