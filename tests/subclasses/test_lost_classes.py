"""A class that one of its ops would lose is refused, on all ranks, and nothing is converted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from composable_shard import ExtensionError, MixedPrecisionPolicy, fully_shard, unsharded
from composable_shard.testing import run_threads

aten = torch.ops.aten
ALL = {aten.split, aten.slice, aten.detach, aten.view, aten._to_copy, aten.new_zeros, aten.copy_}


class Quantized(torch.Tensor):
    """Holds bytes and one scale; what it has no op for, it dequantizes."""

    KEEPS = ALL

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, codes.stride())

    def __init__(self, codes: torch.Tensor, scale: float) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["codes"], self.scale

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, scale: float, *rest: object) -> Quantized:
        return cls(inner["codes"], scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        op, scale = func.overloadpacket, args[0].scale
        if op not in cls.KEEPS:
            args = tree_map_only(cls, lambda one: one.codes * one.scale, args)
            return func(*args, **kwargs or {})
        if op is aten._to_copy:
            return cls(args[0].codes.clone(), scale)
        out = func(*tree_map_only(cls, lambda one: one.codes, args), **kwargs or {})
        return tree_map_only(torch.Tensor, lambda one: cls(one, scale), out)


class Unsplit(Quantized):
    KEEPS = ALL - {aten.split, aten.slice}


class Unviewed(Quantized):
    KEEPS = ALL - {aten.view}


class Uncast(Quantized):
    KEEPS = ALL - {aten._to_copy}


class Closed(Quantized):
    """Says neither what it is made of nor what it sends."""

    @property
    def __tensor_flatten__(self) -> Any:
        raise AttributeError


class Rows(Quantized):
    """Is made of a tensor that has not its shape, as torchao's ``Float8Tensor``."""

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        self.row = self.codes[:, :1]
        return ["row"], self.scale


def refused(kind: type[Quantized], on_rank: int | None) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = kind if on_rank in (None, dist.get_rank()) else Quantized
    codes = torch.ones(4, 4, dtype=torch.uint8)
    model[1].weight = nn.Parameter(own(codes, 0.5), requires_grad=False)
    before = list(model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind is Uncast else None
    with pytest.raises(ExtensionError) as caught:
        fully_shard(model, mp_policy=policy)
    assert type(model) is nn.Sequential
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return str(caught.value)


KEEP = "Expected {} of {} to return its own class, got Tensor"
INNER = (
    "Expected {} to have inner tensors of its shape [{{}}, 4], got {}; define fsdp_pre_all_gather "
    "and fsdp_post_all_gather on it"
)
CASES = {
    Unsplit: KEEP.format("split", "Unsplit"),
    Unviewed: KEEP.format("view", "Unviewed"),
    Uncast: KEEP.format("to(torch.bfloat16)", "Uncast"),
    Closed: INNER.format("Closed", "[]"),
    Rows: INNER.format("Rows", "[[{}, 1]]"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", CASES)
def test_a_class_that_would_be_lost_is_refused(kind: type[Quantized], ranks: int) -> None:
    expected = (
        f"Expected parameter '1.weight', a {kind.__name__} of shape [4, 4], to be cut into {ranks} "
        f"shards along dim 0, got: {CASES[kind].format(*[4 // ranks] * 2)}; shard it over "
        "another number of ranks, or pass it in ignored_params"
    )
    assert run_threads(refused, ranks, kind, None) == [expected] * ranks


def shard_quantized() -> None:
    model: Any = nn.Linear(4, 4, bias=False)
    codes = torch.arange(16, dtype=torch.uint8).view(4, 4)
    model.weight = nn.Parameter(Quantized(codes, 0.5), requires_grad=False)
    fully_shard(model)
    local = model.weight.to_local()
    assert type(local) is Quantized and local.codes.dtype == torch.uint8 and len(local) == 2
    model.unshard()
    assert torch.equal(model.weight.codes, codes)


def test_a_class_that_keeps_itself_is_sharded_in_its_bytes() -> None:
    run_threads(shard_quantized, 2)


class Hooked(Quantized):
    """Knows no collectives but by its hooks."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes,), None

    def fsdp_post_all_gather(
        self, arrived: Any, metadata: Any, dtype: Any, *, out: Any = None
    ) -> Any:
        return (type(self)(arrived[0], self.scale), arrived) if out is None else None


def opened() -> str:
    model = nn.Linear(4, 4, bias=False)
    codes = torch.ones(4, 4, dtype=torch.uint8)
    model.weight = nn.Parameter(Hooked(codes, 0.5), requires_grad=False)
    fully_shard(model)
    with pytest.raises(ExtensionError) as caught, unsharded(model):
        pass
    model.unshard()  # type: ignore[operator]
    assert torch.equal(model.weight.codes, codes)
    return str(caught.value)


def test_what_has_hooks_alone_has_no_full_tensor() -> None:
    texts = run_threads(opened, 2)
    expected = (
        "Expected 'weight' of FSDPLinear, a Hooked, to have the ops by which DTensor makes a full "
        "tensor of its shards, got TypeError: a Tensor; its hooks gather it for forward alone, as "
        "module.unshard() does"
    )
    assert texts == [expected] * 2
