"""Hooks for gradients that do what they must not: refused on all ranks, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from composable_shard import (
    CommunicationError,
    ExtensionError,
    RankMismatchError,
    fully_shard,
)
from composable_shard.testing import RankError, fake_ranks, run_ranks
from int8_gradients import Int8Gradients
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
        f"{FAILS}ExtensionError: {RETURN}a tuple of tensors and metadata, got Tensor",
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


def gathers_on_last(self: Any, mesh: Any) -> Any:
    if dist.get_rank() == 3:
        raise ValueError("no")
    return (self.full[: 1 + (dist.get_rank() == 1)].t(),), None


@on_ranks(4)
def test_ranks_of_replicas_are_numbered_over_the_whole_job() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    kind = type("Broken", (Lossless,), {"fsdp_pre_all_gather": gathers_on_last})
    model = fully_shard(as_type(nn.Linear(2, 4, bias=False), kind), mesh=mesh)
    with pytest.raises(ExtensionError) as caught:
        model(torch.ones(1, 2))
    differs = (
        "Expected fsdp_pre_all_gather of weight to return tensors of the same number, dtypes and "
        "trailing dims on all ranks, got [torch.float32 [2, 1]] on rank 0 and [torch.float32 "
        "[2, 2]] on rank 1"
    )
    fails = "fsdp_pre_all_gather failed on rank 3: ValueError: no"
    assert str(caught.value) == (differs if dist.get_rank() < 2 else fails)


def lost_rank(weight: torch.Tensor, in_forward: bool) -> None:
    """Let the exchange of what hooks return fail, as it does when a rank dies."""
    layer = nn.Linear(2, 4, bias=False)
    layer.weight = nn.Parameter(weight)
    fully_shard(layer)
    failing = mock.patch.object(dist, "all_gather_object", side_effect=RuntimeError("closed"))
    with failing if in_forward else nullcontext():
        loss = layer(torch.ones(1, 2)).sum()
    with failing:
        loss.backward()


@pytest.mark.parametrize(
    ("weight", "in_forward", "act"),
    [
        (Lossless(torch.ones(4, 2)), True, "tensor subclasses send"),
        (Lossless(torch.ones(4, 2)), False, "gradients are on the wire"),
        (TwoTensor(torch.ones(4, 2), torch.ones(4, 2)), False, "gradients are made of"),
    ],
)
def test_a_rank_lost_when_the_ranks_first_agree_is_told_as_such(
    weight: torch.Tensor, in_forward: bool, act: str
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(lost_rank, 2, weight, in_forward)
    assert {failure.exception_type for failure in caught.value.failures} == {CommunicationError}
    assert [failure.message for failure in caught.value.failures] == [
        f"Rank {rank} failed while agreeing on what {act}: closed" for rank in range(2)
    ]


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


class Int8Rows(Int8Gradients):
    """Brings no hooks for gradients."""

    fsdp_pre_reduce_scatter = property()
    fsdp_post_reduce_scatter = property()


@on_ranks(2)
def test_hooks_on_one_rank_alone_are_refused_on_all() -> None:
    kind = Lossless if dist.get_rank() else Int8Rows
    layer = fully_shard(as_type(nn.Linear(2, 4, bias=False), kind))
    fact = (
        "parameter 'weight' of the root group: shape [4, 2], torch.float32, Shard(0), trainable, "
        "on cpu, with its own all-gather"
    )
    with pytest.raises(RankMismatchError) as caught:
        layer(torch.ones(1, 2))
    assert str(caught.value) == (
        f"Expected the same model on all ranks, got on rank 0: {fact}; on rank 1: {fact}, with its "
        "own reduce-scatter"
    )


class Forgets(TwoTensor):
    """Its parts are of another class."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is not torch.ops.aten.split.Tensor:
            return out
        return [TwoTensor(part.a, part.b) for part in out]


class Forgetful(Forgets):
    """With hooks for its gradient."""

    fsdp_pre_reduce_scatter = fsdp_post_reduce_scatter = summed


class ForgetfulGather(Forgets):
    """With hooks for its gather."""

    fsdp_pre_all_gather = fsdp_post_all_gather = summed


@pytest.mark.parametrize("kind", [Forgetful, ForgetfulGather])
def test_shards_that_lose_the_hooks_are_refused(kind: type[TwoTensor]) -> None:
    layer = nn.Linear(2, 4, bias=False)
    layer.weight = nn.Parameter(kind(torch.ones(4, 2), torch.ones(4, 2)))
    with fake_ranks(2), pytest.raises(ExtensionError) as caught:
        fully_shard(layer)
    assert str(caught.value) == (
        f"Expected parameter 'weight', a {kind.__name__} of shape [4, 2], to be cut into 2 shards "
        f"along dim 0, got: Expected split of {kind.__name__} to return its own class, got "
        "TwoTensor; shard it over a number of ranks that its class can be cut for, or pass it in "
        "ignored_params"
    )
    assert type(layer) is nn.Linear
