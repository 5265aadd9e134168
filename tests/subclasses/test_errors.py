"""A mistake in an extension on one rank is the same error on all ranks, and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import ExtensionError, fully_shard
from composable_shard.testing import run_ranks, run_threads

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def two_outputs(
    outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    if out is None:
        return outputs[0].clone(), outputs
    out.copy_(outputs[0])
    return None


PRES: dict[str, Callable[[torch.Tensor], Any]] = {
    "good": lambda tensor: ((tensor, torch.ones(2, 3)), None),
    "dtype": lambda tensor: ((tensor, torch.ones(2, 3, dtype=torch.int64)), None),
    "trailing dim": lambda tensor: ((tensor, torch.ones(2, 4)), None),
    "count": lambda tensor: ((tensor,), None),
    "raising": lambda tensor: {}["scale"],
    "tensor alone": lambda tensor: tensor,
    "no tuple": lambda tensor: (tensor, None),
}


def sharded_layer() -> tuple[nn.Sequential, torch.Tensor]:
    model = nn.Sequential(nn.Linear(3, 4, bias=False))
    fully_shard(model)
    return model, model[0].weight._local_tensor


def set_hooks(local: torch.Tensor, pre: str, post: Any = two_outputs) -> None:
    def pre_all_gather(mesh: Any) -> Any:
        return PRES[pre](local)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre_all_gather, post


def refused(model: nn.Module) -> str:
    with pytest.raises((ExtensionError, TypeError)) as caught:
        model(torch.ones(1, 3))
    return str(caught.value)


def fail_once_then_work(bad_pre: str, bad_rank: int | None) -> str:
    """Return the text of the error, and check that good hooks work afterwards."""
    model, local = sharded_layer()
    weight = model[0].weight.full_tensor()
    set_hooks(local, bad_pre if bad_rank in (None, dist.get_rank()) else "good")
    text = refused(model)
    set_hooks(local, "good")
    x = torch.ones(1, 3)
    assert torch.equal(model(x), x @ weight.T)
    return text


GOOD = "torch.float32 [2, 3], torch.float32 [2, 3]"
INT64 = "torch.float32 [2, 3], torch.int64 [2, 3]"
WIDER = "torch.float32 [2, 3], torch.float32 [2, 4]"
FEWER = "torch.float32 [2, 3]"
ALIKE = (
    f"Expected {PRE} of 0.weight to return tensors of the same number, dtypes and trailing dims "
    "on all ranks, got [{}] on rank 0 and [{}] on rank {}"
)
NO_METADATA = f"Expected {PRE} of 0.weight to return (tensors, metadata), got Tensor"
NO_TUPLE = f"Expected {PRE} of 0.weight to return (tensors, metadata), got (Tensor, NoneType)"
LATER = (
    f"Expected {PRE} of 0.weight to return the same tensors as at the first unshard, "
    f"[{GOOD}], got [{WIDER}]"
)
SIGNATURE = (
    f"Expected {PRE} of 0.weight to take (mesh) or (mesh, outer_size, outer_stride, module, "
    "mp_policy), got 2 parameters: (mesh: 'Any', size: 'Any') -> 'Any'"
)
NO_INNER = (
    f"Expected {POST} of 0.weight to return (tensor, inner tensors) when out is None, got Tensor"
)
SHAPE = "Expected the unsharded tensor of 0.weight to have shape [4, 3], got [2, 3] from Tensor"
HALF = f"Expected both {PRE} and {POST} on {{}}, got only {{}}; define {{}} too"
FAILED = f"{PRE} of 0.weight failed: KeyError: 'scale'"


@pytest.mark.parametrize("run", [run_ranks, run_threads])
@pytest.mark.parametrize(
    ("bad_pre", "bad_rank", "text"),
    [
        ("dtype", 1, ALIKE.format(GOOD, INT64, 1)),
        ("trailing dim", 1, ALIKE.format(GOOD, WIDER, 1)),
        ("count", 1, ALIKE.format(GOOD, FEWER, 1)),
        ("raising", 1, f"rank 1: {FAILED}"),
        ("raising", None, FAILED),
        ("tensor alone", 1, f"rank 1: {NO_METADATA}"),
        ("no tuple", 1, f"rank 1: {NO_TUPLE}"),
    ],
)
def test_a_mistake_on_one_rank(
    run: Callable[..., list[str]], bad_pre: str, bad_rank: int | None, text: str
) -> None:
    assert run(fail_once_then_work, 2, bad_pre, bad_rank, timeout=30) == [text, text]


@on_ranks(4)
def test_a_mistake_on_one_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Sequential(nn.Linear(3, 4, bias=False)), mesh=mesh)
    set_hooks(model[0].weight._local_tensor, "raising" if dist.get_rank() == 3 else "good")
    assert refused(model) == f"rank 3: {FAILED}"


@on_ranks(2)
def test_a_format_that_changes_later() -> None:
    model, local = sharded_layer()
    set_hooks(local, "good")
    with torch.no_grad():
        model(torch.ones(1, 3))
        model.reshard()
        set_hooks(local, "trailing dim")
        assert refused(model) == LATER


def unusual_signature(mesh: Any, size: Any) -> Any:
    raise AssertionError("must not be called")


@on_ranks(2)
def test_a_signature_that_is_neither_of_the_two() -> None:
    model, local = sharded_layer()
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = unusual_signature, two_outputs
    assert refused(model) == SIGNATURE


@on_ranks(2)
def test_a_wrong_result_of_the_second_hook() -> None:
    for post, text in (
        (lambda outputs, metadata, dtype, *, out=None: outputs[0], NO_INNER),
        (lambda outputs, metadata, dtype, *, out=None: (outputs[0][:2], outputs), SHAPE),
    ):
        model, local = sharded_layer()
        set_hooks(local, "good", post)
        assert refused(model) == text


@pytest.mark.parametrize(("found", "missing"), [(PRE, POST), (POST, PRE)])
@on_ranks(2)
def test_only_one_of_the_two_methods(found: str, missing: str) -> None:
    """On a tensor, or on its class."""
    model, local = sharded_layer()
    setattr(local, found, two_outputs)
    assert refused(model) == HALF.format("Tensor", found, missing)
    layer = nn.Linear(3, 4, bias=False)
    weight = layer.weight = nn.Parameter(TwoTensor(torch.ones(4, 3), torch.ones(4, 3)))
    hook = mock.patch.object(TwoTensor, found, two_outputs, create=True)
    with hook, pytest.raises(TypeError) as caught:
        fully_shard(layer)
    assert type(layer) is nn.Linear and layer.weight is weight
    assert str(caught.value) == HALF.format("TwoTensor", found, missing)
