"""The kit catches what it is made to catch, says where, and prints what reproduces it."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from composable_shard import MixedPrecisionPolicy
from composable_shard.testing import (
    STEPS,
    ParamSpec,
    Step,
    TreeLoss,
    TreeSpec,
    assert_trains_like_unsharded,
    programs,
)
from composable_shard.testing.oracle import apart
from composable_shard.testing.programs import expression
from composable_shard.testing.strategies import module_trees, policies, training_programs
from kit import models
from kit.models import MLP, linear, linear_loss, mlp_loss, shard_blocks

SCOPE = {**vars(models), "assert_trains_like_unsharded": assert_trains_like_unsharded}


def told(
    program: Sequence[Step],
    shard: Callable[..., Any],
    world_size: int = 2,
) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_trains_like_unsharded(
            linear, program, shard=shard, loss=linear_loss, world_size=world_size
        )
    return str(caught.value)


def assert_found(text: str, where: str, lines: Sequence[str]) -> None:
    """Compare all that is told but numbers."""
    head, *told_lines = text.split("\n\n")[0].splitlines()
    assert head == (f"Expected to train like the unsharded model, got a difference at {where}:")
    assert [re.sub(r"\d\.\d+", "#", line) for line in told_lines] == list(lines)


def on_both(*lines: str) -> list[str]:
    return [f"rank {rank}: {line}" for rank in (0, 1) for line in lines]


OFF = "off by # of #, expected the same bits"
PLANTED: dict[Callable[..., Any], tuple[list[Step], str, list[str]]] = {
    models.hook_scales_on_rank_1: (
        ["evaluate", "backward", "step"],
        "step 2 of 3, 'backward'",
        [f"rank 1: grad of weight: {OFF}"],
    ),
    models.wrong_divisor: (
        ["backward"],
        "step 1 of 1, 'backward'",
        on_both(f"grad of weight: {OFF}", f"grad of bias: {OFF}"),
    ),
    models.no_reduction_on_rank_1: (
        ["accumulate", "sync"],
        "step 2 of 2, 'sync'",
        [f"rank 1: grad of weight: {OFF}"],
    ),
    models.stale_parameters: (
        ["backward", "step", "evaluate"],
        "step 3 of 3, 'evaluate'",
        on_both(f"loss: {OFF}"),
    ),
    models.zero_grad_does_nothing: (
        ["backward", "zero_grad"],
        "step 2 of 2, 'zero_grad'",
        on_both(
            "grad of weight: expected none, got float32 [2, 3]",
            "grad of bias: expected none, got float32 [2]",
        ),
    ),
}


@pytest.mark.parametrize("shard", PLANTED)
def test_a_planted_bug_is_told_with_a_call_that_shows_it(shard: Callable[..., Any]) -> None:
    program, where, lines = PLANTED[shard]
    text = told(program, shard)
    assert_found(text, where, lines)
    assert text.split("\n\n")[1] == (
        "assert_trains_like_unsharded(\n"
        "    linear,\n"
        f"    {program},\n"
        "    world_size=2,\n"
        f"    shard={shard.__name__},\n"
        "    loss=linear_loss,\n"
        ")"
    )


@pytest.mark.parametrize(
    ("got", "wanted", "expected"),
    [
        ([1 + 2j], [1 - 1j], (3.0, 2**0.5)),
        ([torch.inf, 1.0, torch.nan], [torch.inf, 3.0, torch.nan], (2.0, 3.0)),
        ([5.0, 1.0], [torch.inf, 1.0], (torch.inf, 1.0)),
        ([], [], (0.0, 0.0)),
    ],
)
def test_how_far_tensors_are_apart(got: Any, wanted: Any, expected: tuple[float, float]) -> None:
    assert apart(torch.tensor(got), torch.tensor(wanted)) == pytest.approx(expected)
    assert apart(torch.tensor([torch.nan]), torch.tensor([1.0]))[0] not in (0.0, 1.0)


def test_an_exception_is_told_with_its_step() -> None:
    text = told(["backward", "step", "backward"], models.fails_in_the_second_forward)
    lines = text.splitlines()
    assert lines[:3] == [
        "Expected to train like the unsharded model, got an error:",
        "rank 0: step 3 of 3, 'backward': raised ValueError: no second time",
        "rank 1: step 3 of 3, 'backward': raised ValueError: no second time",
    ]
    assert "in fails_in_the_second_forward" not in lines[3]
    assert text.rstrip().endswith("    loss=linear_loss,\n)")


def test_more_differences_than_a_person_reads_are_counted() -> None:
    text = told(["backward"], models.wrong_divisor, world_size=4)
    assert text.split("\n\n")[0].splitlines()[-1] == "and 2 more differences"


# Shrinking ------------------------------------------------------------------------------------

UNTIL_SHRUNK = settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)


def shrunk(test: Callable[[], None]) -> str:
    """Return what the smallest failing example of a property says."""
    with pytest.raises(AssertionError) as caught:
        test()
    return str(caught.value)


@pytest.mark.matrix
def test_a_failing_program_shrinks_to_one_that_can_be_read_and_pasted() -> None:
    @UNTIL_SHRUNK
    @given(training_programs(max_steps=10))
    def trains(program: list[Step]) -> None:
        assert_trains_like_unsharded(
            linear, program, shard=models.stale_parameters, loss=linear_loss
        )

    text = shrunk(trains)
    explained, call = text.split("\n\n")
    assert "\n    ['backward', 'step', 'backward'],\n" in call
    assert explained.startswith(
        "Expected to train like the unsharded model, got a difference at step 3 of 3, 'backward':\n"
        "rank 0: loss: off by "
    )
    with pytest.raises(AssertionError) as pasted:
        eval(call, SCOPE)
    assert str(pasted.value) == text


@contextlib.contextmanager
def finding() -> Iterator[list[str]]:
    found: list[str] = []
    yield found
    found += [f"a fault that is known at the end of rank {dist.get_rank()}"]


def test_what_a_context_finds_is_a_difference() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_trains_like_unsharded(linear, ["backward"], loss=linear_loss, within=finding)
    assert_found(
        str(caught.value),
        "step 1 of 1, 'backward'",
        [f"rank {rank}: a fault that is known at the end of rank {rank}" for rank in range(2)],
    )


# What is refused ------------------------------------------------------------------------------


TREE = TreeSpec((ParamSpec((3,)),))
FINITE = "Expected tolerance to be a finite number of at least 0, got {}"
REFUSED: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    f"Expected step 0 to be one of {programs.STEPS}, got 'jump'": (TREE, ["jump"], {}),
    "Expected a program of at least one step, got none": (TREE, [], {}),
    **{FINITE.format(one): (TREE, ["step"], {"tolerance": one}) for one in (math.inf, -1.0)},
    "Expected mesh to be (shard,) or (replicate, shard), got (1, 1, 2)": (
        *(TREE, ["step"]),
        {"mesh": (1, 1, 2)},
    ),
    "Expected mesh to have 2 ranks, as world_size says, got (3,)": (
        *(TREE, ["step"]),
        {"world_size": 2, "mesh": (3,)},
    ),
    "Expected a loss, loss(model, step, rank), for a model that is no tree": (linear, ["step"], {}),
}


def test_arguments_that_cannot_be_are_refused() -> None:
    for text, (build, program, options) in REFUSED.items():
        with pytest.raises(ValueError) as caught:
            assert_trains_like_unsharded(build, program, **options)
        assert str(caught.value) == text


ONE_MODEL = linear()


def same_model() -> Any:
    return ONE_MODEL


def test_a_build_and_a_shard_that_do_not_do_their_work_are_refused() -> None:
    text = told(["step"], models.not_sharded)
    assert (
        "ValueError: Expected shard() to apply fully_shard to the model, got a plain Linear" in text
    )
    with pytest.raises(AssertionError) as caught:
        assert_trains_like_unsharded(same_model, ["step"], loss=linear_loss)
    assert "Expected build() to return a new model each time, got the same one twice" in str(
        caught.value
    )


# What is printed ------------------------------------------------------------------------------


@st.composite
def values(draw: st.DrawFn) -> Any:
    return draw(st.tuples(module_trees(2), policies(any_inputs=True), st.integers()))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(values())
def test_printed_values_are_what_they_were(value: Any) -> None:
    scope = {
        "torch": torch,
        "TreeSpec": TreeSpec,
        "ParamSpec": ParamSpec,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "TreeLoss": TreeLoss,
    }
    assert eval(expression(value), scope) == value


# A model as users have them: buffers, dropout, tied weights, a loss of its own -----------------

PROGRAM = [*STEPS, *reversed(STEPS), "backward", "step", "evaluate"]


@pytest.mark.brief(2)
@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_a_model_with_buffers_dropout_and_ties_follows_all_steps(mesh: tuple[int, ...]) -> None:
    program = [step for step in PROGRAM if step != "accumulate"]
    assert_trains_like_unsharded(MLP, program, mesh=mesh, loss=mlp_loss, shard=shard_blocks)


@pytest.mark.parametrize("mesh", [(1,), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_a_policy_that_casts_all(dtype: torch.dtype, mesh: tuple[int, ...]) -> None:
    policy = MixedPrecisionPolicy(dtype, torch.float32, buffer_dtype=dtype)
    program = ["backward", "step", "accumulate", "backward", "step", "evaluate"]
    case = {"mesh": mesh, "loss": mlp_loss, "shard": shard_blocks, "policy": policy}
    assert_trains_like_unsharded(MLP, program, **case)


def low() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()


def low_loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, 4, generator=generator).bfloat16()).float().square().mean()


@pytest.mark.parametrize("mesh", [(1,), (2,)], ids=str)
@pytest.mark.parametrize("sums", [torch.float32, torch.float64], ids=str)
def test_sums_that_are_wider_than_gradients_are_rounded_once(
    mesh: tuple[int, ...], sums: torch.dtype
) -> None:
    """On one rank, too: what is accumulated is not what users get until it is reduced."""
    program = ["accumulate", "accumulate", "backward", "step", "accumulate", "sync", "step"]
    policy = MixedPrecisionPolicy(reduce_dtype=sums)
    assert_trains_like_unsharded(low, program, mesh=mesh, loss=low_loss, policy=policy)
