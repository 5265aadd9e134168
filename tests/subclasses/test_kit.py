"""The kit passes what is right, and says of each planted fault exactly what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor
from two_tensors import post_all_gather, pre_all_gather, two_tensor_hooks

from composable_shard.testing.extension_kit import Finding, check_extension
from int8_gradients import Int8Gradients

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
Hook = Callable[..., Any]
CHECKS = [
    *("hooks", "sent", "shard", "gathered", "out"),
    *("training", "fewer ranks", "offload", "mixed precision", "tensor parallel"),
    "meta device",
    *("sharded state dict", "full state dict", "deepcopy"),
]


def make(shape: tuple[int, ...]) -> TwoTensor:
    first = torch.randn(shape)
    return TwoTensor(first, 2 * first)


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    with two_tensor_hooks():
        yield


# The fewest ranks that are halved, and so many that the last has no rows.
FOUR_RANKS = {"world_sizes": [4], "shapes": [(5, 4)]}


@pytest.mark.parametrize(
    "arguments", [FOUR_RANKS, pytest.param({}, marks=pytest.mark.matrix)], ids=["four", "default"]
)
def test_a_right_subclass_keeps_every_promise(arguments: dict[str, Any]) -> None:
    report = check_extension(make, **arguments)
    assert [finding.check for finding in report] == CHECKS
    assert report.ok and report.failures == ()
    assert str(report).startswith("TwoTensor: all 14 checks pass\n  ok    hooks: Both hooks exist")


def test_a_subclass_without_hooks_travels_by_its_inner_tensors() -> None:
    del TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather
    report = check_extension(make, world_sizes=[2], shapes=[(5, 4)])
    assert [finding.check for finding in report] == ["hooks", *CHECKS[5:]]
    TwoTensor.fsdp_pre_all_gather = TwoTensor.fsdp_post_all_gather = None


# Faults of the first hook


def failing_on_one_rank(self: TwoTensor, mesh: Any) -> Any:
    if mesh.get_local_rank() == 1:
        raise KeyError("scale")
    return (self.a, self.b), None


def post(create: Hook, fill: Hook = lambda out, outputs, dtype: None) -> Hook:
    """Return a second hook by what it creates, and how it fills that later."""

    def hook(self: TwoTensor, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return create(outputs, dtype) if out is None else fill(out, outputs, dtype)

    return hook


def cast(outputs: Any, dtype: Any) -> Any:
    return TwoTensor(*(one.to(dtype) for one in outputs)), outputs


def copied(outputs: Any, dtype: Any) -> Any:
    return TwoTensor(*(one.to(dtype, copy=True) for one in outputs)), outputs


def first_twice(outputs: Any, dtype: Any) -> Any:
    first = outputs[0].to(dtype)
    return TwoTensor(first, first), outputs


def replace(out: TwoTensor, outputs: Any, dtype: Any) -> None:
    out.a, out.b = (one.to(dtype, copy=True) for one in outputs)


def scales_shard(self: TwoTensor, *given: Any, **out: Any) -> Any:
    self.b.div_(2)
    return post_all_gather(self, *given, **out)


ONE, TWO = " (1 rank, shape [8, 4])", " (2 ranks, shape [8, 4])"
FILL = (
    f"Expected {POST} to write the received values into out, got {{}}; write every part of out "
    "that is not an all-gather output"
)
UNCHANGED = (
    "Expected {} to leave the shard as it is, got inner tensor 1 of it changed in place; work on "
    "a copy"
)
# Of the first hook: what it returns; the check that fails, the sentence.
FIRST: list[tuple[Hook, str, str]] = [
    (
        lambda self, mesh: ((self.a[:1], self.b[:1]), None),
        "gathered",
        "Expected the unsharded tensor of weight to have shape [8, 4], got [1, 4] from "
        f"TwoTensor{ONE}",
    ),
    (
        lambda self, mesh: ((self.a, self.b), {"scale": torch.tensor(1.0 * mesh.get_local_rank())}),
        "sent",
        "Expected equal metadata on all ranks, since each rank gets its own back, got "
        f"{{'scale': tensor(0.)}} on rank 0 and {{'scale': tensor(1.)}} on rank 1; send "
        f"the parts that differ{TWO}",
    ),
    (lambda self, mesh: ((self.a, self.b.mul_(2)), None), "shard", UNCHANGED.format(PRE) + ONE),
    (
        lambda self, mesh: ((self.a, self.b if len(self.b) else torch.empty(0)), None),
        "sent",
        f"Expected {PRE} of the tensor to return tensors of the same number, dtypes and trailing "
        "dims on all ranks, got [torch.float32 [2, 4], torch.float32 [2, 4]] on rank 0 and "
        "[torch.float32 [0, 4], torch.float32 [0]] on rank 3 (4 ranks, shape [5, 4])",
    ),
    (failing_on_one_rank, "sent", f"Expected no error, got KeyError on rank 1: 'scale'{TWO}"),
]
SECOND: list[tuple[Hook, str, str]] = [
    (post(copied), "out", FILL.format("the values of the previous gather") + ONE),
    (
        post(copied, lambda out, outputs, dtype: out.a.copy_(outputs[0])),
        "out",
        FILL.format("other values") + ONE,
    ),
    (
        post(cast, replace),
        "out",
        f"Expected {POST} to keep the storages of out, which are freed and refilled, "
        f"got another one; copy into out instead of replacing its inner tensors{ONE}",
    ),
    (
        post(lambda outputs, dtype: (TwoTensor(*outputs), outputs)),
        "gathered",
        f"Expected {POST} to return a tensor of param_dtype, torch.bfloat16, got "
        f"torch.float32{ONE}",
    ),
    (scales_shard, "shard", UNCHANGED.format(POST) + ONE),
]
FAULTS = [
    *((pre, post_all_gather, check, sentence) for pre, check, sentence in FIRST),
    *((pre_all_gather, post, check, sentence) for post, check, sentence in SECOND),
    (
        lambda self, mesh: ((self.a,), None),
        post(first_twice),
        "gathered",
        "Expected the gathered tensor to give the outputs of the unsharded one, "
        f"got values that are off by 5.0e-01 of the largest, where 1e-05 is allowed{ONE}",
    ),
]


def where_it_shows(sentence: str) -> dict[str, Any]:
    """Return the number of ranks and the shape that a sentence ends with, as arguments."""
    found = re.search(r"\((\d) ranks?, shape \[(\d), 4\]\)$", sentence)
    assert found is not None
    return {"world_sizes": [int(found[1])], "shapes": [(int(found[2]), 4)]}


@pytest.mark.parametrize(("pre", "post", "check", "sentence"), FAULTS)
def test_a_planted_fault_gives_its_sentence(
    monkeypatch: pytest.MonkeyPatch, pre: Hook, post: Hook, check: str, sentence: str
) -> None:
    monkeypatch.setattr(TwoTensor, PRE, pre)
    monkeypatch.setattr(TwoTensor, POST, post)
    report = check_extension(make, **where_it_shows(sentence), strict=False)
    assert report.failures == (Finding(check, False, sentence),)
    assert [finding.check for finding in report] == CHECKS[: CHECKS.index(check) + 1]


def test_a_fault_is_reported_alone_and_where_it_shows_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TwoTensor, PRE, failing_on_one_rank)
    with pytest.raises(AssertionError) as caught:
        check_extension(make)
    first, *_, last = str(caught.value).splitlines()
    assert first == "TwoTensor: 1 of 2 checks fail"
    assert last == f"  FAILS sent: Expected no error, got KeyError on rank 1: 'scale'{TWO}"


@pytest.mark.parametrize(("there", "missing"), [(PRE, POST), (POST, PRE)])
def test_one_hook_alone(monkeypatch: pytest.MonkeyPatch, there: str, missing: str) -> None:
    monkeypatch.delattr(TwoTensor, missing)
    (finding,) = check_extension(make, strict=False)
    assert finding == ("hooks", False, f"Expected {PRE} and {POST}, got {there} alone{ONE}")
    setattr(TwoTensor, missing, None)


# What only a model shows


class UnevenGradient(torch.autograd.Function):
    """Passes a gradient on that depends on the rank."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 + dist.get_rank())


def uneven(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return UnevenGradient.apply(torch.nn.functional.linear(x, weight))


OFF = r"got values that are off by \S+ of the largest, where 1e-05 is allowed"
MODEL_FAULTS = [
    (
        {"compute": uneven},
        {
            check: rf"Expected outputs as of the unsharded model in step 1, {OFF}"
            for check in ("training", "offload")
        },
    ),
    (
        {
            "compute": lambda x, weight: torch.nn.functional.linear(x.float(), weight.float()),
            "trains": False,
        },
        {"mixed precision": r"Expected outputs of torch\.bfloat16, got torch\.float32"},
    ),
    (
        {
            "make_tensor": lambda _: TwoTensor(*[torch.ones(8, 4, device="cpu")] * 2),
            "trains": False,
        },
        {"meta device": "Expected a tensor on the meta device from make_tensor, got one on cpu"},
    ),
]


@pytest.mark.brief(1)
@pytest.mark.parametrize(("arguments", "sentences"), MODEL_FAULTS)
def test_faults_that_only_a_model_shows(
    arguments: dict[str, Any], sentences: dict[str, str]
) -> None:
    report = check_extension(
        **{"make_tensor": make, **arguments}, world_sizes=[2], shapes=[(8, 4)], strict=False
    )
    assert [finding.check for finding in report] == CHECKS
    assert [finding.check for finding in report.failures] == list(sentences)
    for finding in report.failures:
        pattern = sentences[finding.check] + re.escape(TWO)
        assert re.fullmatch(pattern, finding.sentence), finding.sentence


def test_skipping_what_is_no_check() -> None:
    with pytest.raises(ValueError) as caught:
        check_extension(make, skip=["copies"])
    known = [*CHECKS[:5], "gradient sent", "gradient summed", "no gradient", *CHECKS[5:]]
    assert str(caught.value) == f"Expected skip to name checks out of {known}, got ['copies']"


# Hooks for gradients ------------------------------------------------------------------------------

REDUCE_PRE, REDUCE_POST = "fsdp_pre_reduce_scatter", "fsdp_post_reduce_scatter"
OF_GRADIENTS = ["gradient sent", "gradient summed", "no gradient"]
SKIP = [*CHECKS[5:9], *CHECKS[10:]]


def report(kind: type[Int8Gradients], world_sizes: Any, shapes: Any) -> Any:
    return check_extension(
        lambda shape: kind(torch.randn(shape)),
        world_sizes=world_sizes,
        shapes=shapes,
        tolerance=0.01,
        skip=SKIP,
        strict=False,
    )


def test_int8_with_error_feedback_passes_on_any_number_of_ranks() -> None:
    found = report(Int8Gradients, (1, 4), [(5, 4)])
    assert found.ok, str(found)
    assert [finding.check for finding in found][5:8] == OF_GRADIENTS


@pytest.mark.matrix
def test_the_example_passes_the_whole_kit() -> None:
    found = check_extension(
        lambda shape: Int8Gradients(torch.randn(shape)),
        world_sizes=(3,),
        shapes=[(5, 4)],
        tolerance=0.03,
    )
    assert len(found.findings) == 17


def half_of_odd_ranks(self: Any, grad: torch.Tensor, mesh: Any) -> Any:
    return (grad.half() if dist.get_rank() % 2 else grad,), None


def filling(decode: Any) -> Any:
    """Return a second hook that fills ``out`` with what ``decode`` makes of what arrived."""

    def hook(self: Any, received: Any, metadata: Any, out: torch.Tensor) -> None:
        out.copy_(decode(received[0], metadata))

    return hook


total = filling(lambda rows, metadata: rows.sum(0))
SENT, SUMMED, NONE = OF_GRADIENTS
# What the first hook returns, the second one, the check that fails, and what it says.
OF_REDUCTIONS: dict[str, tuple[Any, Any, str, str]] = {
    "half of odd ranks": (
        half_of_odd_ranks,
        total,
        SENT,
        f"Expected {REDUCE_PRE} to return the same dtypes and shapes on all ranks and each time, "
        "got [torch.float32 [2, 16]] on rank 0 and [torch.float16 [2, 16]] on rank 1",
    ),
    "halves": (
        lambda self, grad, mesh: ((grad / 2,), None),
        total,
        SUMMED,
        "Expected the mean of 8 reductions to be the sum over ranks, got values that are off by "
        "5.0e-01 of the largest, where 0.01 is allowed",
    ),
    "returns it": (
        lambda self, grad, mesh: ((grad,), None),
        lambda self, received, metadata, out: received[0].sum(0),
        SUMMED,
        f"Expected {REDUCE_POST} to fill out, 16 elements, got unwritten elements; write into it",
    ),
    "asks shape": (
        lambda self, grad, mesh: ((grad.flatten(1),), grad.shape),
        filling(lambda rows, metadata: rows.sum(0).view(metadata[1:])),
        NONE,
        f"Expected {REDUCE_POST} to work with metadata None on a rank that never had a gradient, "
        "got TypeError: 'NoneType' object is not subscriptable",
    ),
    "shifted": (
        lambda self, grad, mesh: ((grad + 1,), None),
        filling(lambda rows, metadata: (rows - 1).sum(0)),
        NONE,
        f"Expected {REDUCE_POST} to make zeros of zero bytes, got values up to 2; a rank without a "
        "gradient sends zero bytes",
    ),
}


@pytest.mark.parametrize("fault", OF_REDUCTIONS)
def test_what_is_wrong_is_said(fault: str) -> None:
    pre, post, check, sentence = OF_REDUCTIONS[fault]
    kind = type("Sends", (Int8Gradients,), {REDUCE_PRE: pre, REDUCE_POST: post})
    (failure,) = report(kind, (2,), [(8, 4)]).failures
    assert failure == (check, False, sentence + TWO)
