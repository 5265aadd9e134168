"""A mistake in an extension on one rank is the same error on all ranks, and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import ExtensionError, fully_shard
from composable_shard.testing import RankError, run_ranks, run_threads

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def two_outputs(
    outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    if out is None:
        return outputs[0].clone(), outputs
    out.copy_(outputs[0])
    return None


def good_pre(tensor: torch.Tensor) -> Any:
    return (tensor, torch.ones(2, 3)), None


def other_dtype(tensor: torch.Tensor) -> Any:
    return (tensor, torch.ones(2, 3, dtype=torch.int64)), None


def other_trailing_dim(tensor: torch.Tensor) -> Any:
    return (tensor, torch.ones(2, 4)), None


def other_count(tensor: torch.Tensor) -> Any:
    return (tensor,), None


def raising(tensor: torch.Tensor) -> Any:
    raise KeyError("scale")


def tensor_alone(tensor: torch.Tensor) -> Any:
    return tensor


def tensor_without_tuple(tensor: torch.Tensor) -> Any:
    return tensor, None


def sharded_layer() -> tuple[nn.Sequential, torch.Tensor]:
    model = nn.Sequential(nn.Linear(3, 4, bias=False))
    fully_shard(model)
    return model, model[0].weight._local_tensor


def set_hooks(local: torch.Tensor, pre: Callable[[torch.Tensor], Any]) -> None:
    def pre_all_gather(mesh: Any) -> Any:
        return pre(local)

    local.fsdp_pre_all_gather = pre_all_gather
    local.fsdp_post_all_gather = two_outputs


def fail_once_then_work(bad_pre: Callable[..., Any], bad_rank: int) -> str:
    """Return the text of the error, and check that good hooks work afterwards."""
    model, local = sharded_layer()
    weight = model[0].weight.full_tensor()
    is_bad = dist.get_rank() == bad_rank
    set_hooks(local, bad_pre if is_bad else good_pre)
    x = torch.ones(1, 3)
    try:
        model(x)
    except ExtensionError as error:
        text = str(error)
    else:
        raise AssertionError("no error")
    set_hooks(local, good_pre)
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
NO_TUPLE = (
    f"Expected {PRE} of 0.weight to return a tuple of tensors and metadata, got Tensor as its "
    "first element"
)
LATER = (
    f"Expected {PRE} of 0.weight to return what it returned at the first unshard, "
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
INNER = (
    "Expected the inner tensors of Halves to have its shape [2, 3], got [[2, 1]]; "
    f"define {PRE} and {POST} on it"
)
FAILED = f"{PRE} failed on rank {{}}: {{}}"
TEXTS = [ALIKE, NO_METADATA, NO_TUPLE, LATER, SIGNATURE, NO_INNER, SHAPE, HALF, INNER, FAILED]


@pytest.mark.parametrize("run", [run_ranks, run_threads])
@pytest.mark.parametrize(
    ("bad_pre", "bad_rank", "text"),
    [
        (other_dtype, 1, ALIKE.format(GOOD, INT64, 1)),
        (other_dtype, 0, ALIKE.format(INT64, GOOD, 1)),
        (other_trailing_dim, 1, ALIKE.format(GOOD, WIDER, 1)),
        (other_count, 1, ALIKE.format(GOOD, FEWER, 1)),
        (other_count, 0, ALIKE.format(FEWER, GOOD, 1)),
        (raising, 1, FAILED.format(1, "KeyError: 'scale'")),
        (raising, 0, FAILED.format(0, "KeyError: 'scale'")),
        (tensor_alone, 1, FAILED.format(1, f"ExtensionError: {NO_METADATA}")),
        (tensor_without_tuple, 1, FAILED.format(1, f"ExtensionError: {NO_TUPLE}")),
    ],
)
def test_a_mistake_on_one_rank(
    run: Callable[..., list[str]], bad_pre: Callable[..., Any], bad_rank: int, text: str
) -> None:
    assert run(fail_once_then_work, 2, bad_pre, bad_rank, timeout=30) == [text, text]


def fail_on_every_rank() -> None:
    model, local = sharded_layer()
    set_hooks(local, raising)
    model(torch.ones(1, 3))


def test_every_failing_rank_is_named() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on_every_rank, 2)
    failure = caught.value.agreed()
    assert failure.exception_type is ExtensionError
    assert failure.message == FAILED.format(0, "KeyError: 'scale'; rank 1: KeyError: 'scale'")


def changing_formats() -> str:
    model, local = sharded_layer()
    set_hooks(local, good_pre)
    x = torch.ones(1, 3)
    with torch.no_grad():
        model(x)
    model.reshard()
    set_hooks(local, other_trailing_dim)
    with pytest.raises(ExtensionError) as caught, torch.no_grad():
        model(x)
    return str(caught.value)


def test_a_format_that_changes_later() -> None:
    assert run_ranks(changing_formats, 2) == [LATER, LATER]


def unusual_signature(mesh: Any, size: Any) -> Any:
    raise AssertionError("must not be called")


def wrong_signature() -> str:
    model, local = sharded_layer()
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = unusual_signature, two_outputs
    with pytest.raises(ExtensionError) as caught:
        model(torch.ones(1, 3))
    return str(caught.value)


def test_a_signature_that_is_neither_of_the_two() -> None:
    expected = FAILED.format(0, f"ExtensionError: {SIGNATURE}; rank 1: ExtensionError: {SIGNATURE}")
    assert run_ranks(wrong_signature, 2) == [expected] * 2


def bad_post(
    outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    return outputs[0]


def shard_instead_of_full(
    outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
) -> Any:
    return outputs[0][:2], outputs


def wrong_result_of_post(post: Callable[..., Any]) -> str:
    model, local = sharded_layer()
    set_hooks(local, good_pre)
    local.fsdp_post_all_gather = post
    with pytest.raises(ExtensionError) as caught:
        model(torch.ones(1, 3))
    return str(caught.value)


@pytest.mark.parametrize(("post", "text"), [(bad_post, NO_INNER), (shard_instead_of_full, SHAPE)])
def test_a_wrong_result_of_the_second_hook(post: Callable[..., Any], text: str) -> None:
    assert run_ranks(wrong_result_of_post, 2, post) == [text, text]


def half_a_protocol(found: str) -> str:
    model, local = sharded_layer()
    setattr(local, found, two_outputs)
    with pytest.raises(TypeError) as caught:
        model(torch.ones(1, 3))
    return str(caught.value)


@pytest.mark.parametrize(("found", "missing"), [(PRE, POST), (POST, PRE)])
def test_only_one_of_the_two_methods(found: str, missing: str) -> None:
    text = HALF.format("Tensor", found, missing)
    assert run_ranks(half_a_protocol, 2, found) == [text, text]


def half_a_class(found: str) -> str:
    layer = nn.Linear(3, 4, bias=False)
    layer.weight = nn.Parameter(TwoTensor(torch.ones(4, 3), torch.ones(4, 3)))
    weight = layer.weight
    setattr(TwoTensor, found, two_outputs)
    try:
        with pytest.raises(TypeError) as caught:
            fully_shard(layer)
    finally:
        delattr(TwoTensor, found)
    assert type(layer) is nn.Linear and layer.weight is weight
    return str(caught.value)


@pytest.mark.parametrize(("found", "missing"), [(PRE, POST), (POST, PRE)])
def test_a_class_with_only_one_of_the_two_methods(found: str, missing: str) -> None:
    text = HALF.format("TwoTensor", found, missing)
    assert run_ranks(half_a_class, 2, found) == [text, text]


class Halves(TwoTensor):
    """A subclass whose inner tensors have not its own shape."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if self.a.ndim == 2:
            self.half = self.a[:, :1]
        return ["half"], None


def inner_tensors_of_another_shape() -> str:
    layer = nn.Linear(3, 4, bias=False)
    layer.weight = nn.Parameter(Halves(torch.ones(4, 3), torch.ones(4, 3)))
    with pytest.raises(ExtensionError) as caught:
        fully_shard(layer)
    return str(caught.value)


def test_inner_tensors_of_another_shape_want_hooks() -> None:
    expected = (
        "Expected parameter 'weight', a Halves of shape [4, 3], to be cut into 2 shards along dim "
        f"0, got: {INNER}; shard it over a number of ranks that its class can be cut for, or pass "
        "it in ignored_params"
    )
    assert run_ranks(inner_tensors_of_another_shape, 2) == [expected] * 2
