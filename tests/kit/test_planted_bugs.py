"""The kit catches what it is made to catch, says where, and prints what reproduces it."""

from __future__ import annotations

import contextlib
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
    ParamSpec,
    Step,
    TreeLoss,
    TreeSpec,
    assert_trains_like_unsharded,
    programs,
)
from composable_shard.testing.oracle import apart
from composable_shard.testing.strategies import training_programs
from kit import models
from kit.models import linear, linear_loss

SCOPE = {**vars(models), "assert_trains_like_unsharded": assert_trains_like_unsharded}


def told(
    program: Sequence[Step],
    shard: Callable[..., Any],
    world_size: int = 2,
    *,
    build: Callable[[], Any] = linear,
    loss: Callable[..., Any] = linear_loss,
    tolerance: float | None = None,
) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_trains_like_unsharded(
            build, program, shard=shard, loss=loss, world_size=world_size, tolerance=tolerance
        )
    return str(caught.value)


def assert_found(text: str, where: str, lines: Sequence[str]) -> None:
    """Compare all that is told but numbers."""
    head, *told_lines = text.split("\n\n")[0].splitlines()
    assert head == (f"Expected to train like the unsharded model, got a difference at {where}:")
    assert [re.sub(r"\d\.\d+", "#", line) for line in told_lines] == list(lines)


def test_a_hook_that_scales_on_one_rank() -> None:
    text = told(["evaluate", "backward", "step"], models.hook_scales_on_rank_1)
    assert_found(
        text,
        "step 2 of 3, 'backward'",
        ["rank 1: grad of weight: off by # of #, expected the same bits"],
    )
    assert text.split("\n\n")[1] == (
        "assert_trains_like_unsharded(\n"
        "    linear,\n"
        "    ['evaluate', 'backward', 'step'],\n"
        "    world_size=2,\n"
        "    shard=hook_scales_on_rank_1,\n"
        "    loss=linear_loss,\n"
        ")"
    )


def test_a_wrong_divisor() -> None:
    text = told(["backward"], models.wrong_divisor)
    lines = [
        f"rank {rank}: grad of {name}: off by # of #, expected the same bits"
        for rank in (0, 1)
        for name in ("weight", "bias")
    ]
    assert_found(text, "step 1 of 1, 'backward'", lines)


def test_a_gradient_that_is_lost_on_one_rank() -> None:
    text = told(["accumulate", "sync"], models.no_reduction_on_rank_1)
    expected = "rank 1: grad of weight: off by # of #, expected the same bits"
    assert_found(text, "step 2 of 2, 'sync'", [expected])


@pytest.mark.parametrize("tolerance", [None, 0.01])
def test_imaginary_parts_that_differ(tolerance: float | None) -> None:
    options = {"build": models.Waves, "loss": models.waves_loss, "tolerance": tolerance}
    text = told(["backward"], models.turns_phases, **options)
    said = "the same bits" if tolerance is None else "at most # of it"
    lines = [f"rank {rank}: grad of phase: off by # of 1, expected {said}" for rank in (0, 1)]
    assert_found(text, "step 1 of 1, 'backward'", lines)


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


def test_counters_are_not_rounded() -> None:
    options = {"build": models.Waves, "loss": models.waves_loss, "tolerance": 0.01}
    text = told(["evaluate"], models.counts_twice, **options)
    lines = [
        f"rank {rank}: num_calls: off by 1 of 1e+03, expected the same bits" for rank in (0, 1)
    ]
    assert_found(text, "step 1 of 1, 'evaluate'", lines)


def test_what_is_infinite_is_not_near_to_what_is_not() -> None:
    options = {"build": models.Overflowing, "loss": models.overflowing_loss, "tolerance": 0.01}
    text = told(["evaluate"], models.does_not_overflow, **options)
    lines = [f"rank {rank}: loss: off by inf of 0, expected at most # of it" for rank in (0, 1)]
    assert_found(text, "step 1 of 1, 'evaluate'", lines)


def test_stale_parameters() -> None:
    text = told(["backward", "step", "evaluate"], models.stale_parameters)
    lines = [f"rank {rank}: loss: off by # of #, expected the same bits" for rank in (0, 1)]
    assert_found(text, "step 3 of 3, 'evaluate'", lines)


def test_gradients_kept_over_zero_grad() -> None:
    text = told(["backward", "zero_grad"], models.zero_grad_does_nothing)
    lines = [
        f"rank {rank}: grad of {name}: expected none, got float32 {shape}"
        for rank in (0, 1)
        for name, shape in (("weight", [2, 3]), ("bias", [2]))
    ]
    assert_found(text, "step 2 of 2, 'zero_grad'", lines)


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
    assert call == (
        "assert_trains_like_unsharded(\n"
        "    linear,\n"
        "    ['backward', 'step', 'backward'],\n"
        "    world_size=2,\n"
        "    shard=stale_parameters,\n"
        "    loss=linear_loss,\n"
        ")"
    )
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


def test_arguments_that_cannot_be_are_refused() -> None:
    tree = TreeSpec((ParamSpec((3,)),))
    with pytest.raises(ValueError) as caught:
        assert_trains_like_unsharded(tree, ["jump"])  # type: ignore[list-item]
    assert str(caught.value) == (f"Expected step 0 to be one of {programs.STEPS}, got 'jump'")
    with pytest.raises(ValueError) as caught:
        assert_trains_like_unsharded(tree, [])
    assert str(caught.value) == "Expected a program of at least one step, got none"
    for tolerance in (float("inf"), float("nan"), -1.0):
        with pytest.raises(ValueError) as caught:
            assert_trains_like_unsharded(tree, ["step"], tolerance=tolerance)
        text = f"Expected tolerance to be a finite number of at least 0, got {tolerance}"
        assert str(caught.value) == text
    with pytest.raises(ValueError) as caught:
        assert_trains_like_unsharded(tree, ["step"], mesh=(1, 1, 2))
    assert str(caught.value) == (
        "Expected mesh to be (shard,) or (replicate, shard), got (1, 1, 2)"
    )
    with pytest.raises(ValueError) as caught:
        assert_trains_like_unsharded(tree, ["step"], world_size=2, mesh=(3,))
    assert str(caught.value) == "Expected a mesh of 2 ranks, got (3,), which has 3"
    with pytest.raises(ValueError) as caught:
        assert_trains_like_unsharded(linear, ["step"])
    assert str(caught.value) == (
        "Expected a loss, loss(model, step, rank), for a model that is no tree"
    )


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
    from composable_shard.testing.strategies import module_trees, policies

    return draw(st.tuples(module_trees(2), policies(any_inputs=True), st.integers()))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(values())
def test_printed_values_are_what_they_were(value: Any) -> None:
    from composable_shard.testing.programs import expression

    scope = {
        "torch": torch,
        "TreeSpec": TreeSpec,
        "ParamSpec": ParamSpec,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "TreeLoss": TreeLoss,
    }
    assert eval(expression(value), scope) == value
