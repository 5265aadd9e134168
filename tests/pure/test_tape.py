"""The steps of a backward, read off where forwards have entered and left groups."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from composable_shard.core.tape import Interval, Tape, Visit

FROZEN = "xyz"  # all other groups train


def end(tape: Tape[str], outermost: str) -> None:
    """End a forward whose outermost call was of a module of ``outermost``."""
    tape.calls.append((0, outermost, f"module of {outermost}", None, True, True))
    tape.end_forward(outermost)


def tape_of(*forwards: str) -> Tape[str]:
    """Follow forwards: ``"a"`` enters group ``a``, ``"A"`` leaves it.

    Brackets are checkpoints; ``"!"`` after a group that is left says that no output of it may get a
    gradient.
    """
    tape: Tape[str] = Tape()
    for forward in forwards:
        tape.begin_forward(forward.strip("[")[:1])
        visits: list[Visit[str]] = []
        checkpoints: list[Interval] = []
        for letter, following in zip(forward, f"{forward}."[1:], strict=True):
            if letter == "[":
                checkpoints.append(checkpoints[-1] if checkpoints else tape.enter_checkpoint())
            elif letter == "]":
                checkpoints.pop()
            elif letter.islower():
                visits.append(tape.enter(letter, checkpoints[-1] if checkpoints else None))
            elif letter.isupper():
                visit = visits.pop()
                assert visit.group == letter.lower()
                needs_reduce = visit.group not in FROZEN
                tape.leave(visit, needs_reduce=needs_reduce, needs_grad=following != "!")
        end(tape, forward.strip("[")[:1])
    return tape


def steps_of(tape: Tape[str]) -> str:
    """Return ``"+a"`` where ``a`` is gathered and ``"-a"`` where it is finished."""
    plan = reversed(tape.plan_backward().steps)
    return " ".join(("+" if step.is_gather else "-") + step.group for step in plan)


CASES = [
    ("one after the other", ["raAbBR"], "+r +b -b +a -a -r"),
    ("nested", ["raabBAAR"], "+r +a +b -b -a -r"),
    ("twice", ["raAbBaAbBR"], "+r +b +a -b -a -r"),
    ("two forwards", ["raAR", "raAR"], "+r +a -a -r"),
    ("two forwards in another order", ["aAbB", "bBaA"], "+a +b -b -a"),
    ("two forwards in another order, nested", ["raAbBR", "rbBaAR"], "+r +a +b -b -a -r"),
    ("parts by themselves", ["aA", "bB"], "+b -b +a -a"),
    ("a part that the second forward leaves out", ["raAbBR", "raAR"], "+r +a +b -b -a -r"),
    ("frozen behind what trains, though not on this rank", ["aAxX!bB"], "+b -b +x -x +a -a"),
    ("frozen, behind an input with a gradient", ["xXyY!aA"], "+a -a +y -y +x -x"),
    ("a checkpoint", ["r[aAbB]cCR"], "+r +c -c +a +b -b -a -r"),
    ("checkpoints one after the other", ["[aAbB][cCdD]"], "+c +d -d -c +a +b -b -a"),
    ("checkpoints within each other", ["[aA[bB]cC]dD"], "+d -d +a +b +c -c -b -a"),
    ("of one group", ["[aA][bB]"], "+b -b +a -a"),
    ("around frozen ones before one that trains", ["[xX!yY!aA]bB"], "+b -b +x +y +a -a -y -x"),
    ("in two checkpoints", ["[aAbB][aAcC]"], "+a +c -c +b -b -a"),
]


@pytest.mark.parametrize(
    ("forwards", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_steps_are_the_reverse_of_forward(forwards: list[str], expected: str) -> None:
    assert steps_of(tape_of(*forwards)) == expected


def test_frozen_groups_that_no_backward_reads_take_no_steps() -> None:
    assert steps_of(tape_of("xX!aA")) == "+a -a"


def test_calls_within_checkpoints_are_counted() -> None:
    plan = tape_of("[aAaAbB][aA]cC", "[aA]").plan_backward()
    assert plan.num_recomputes == {"a": 4, "b": 1}


calls = st.recursive(
    st.sampled_from("abcdx").map(lambda group: group + group.upper()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.tuples(st.sampled_from("efgy"), inner).map(lambda x: x[0] + x[1] + x[0].upper()),
        inner.map(lambda text: f"[{text}]"),
    ),
    max_leaves=6,
)


@given(st.lists(calls, min_size=1, max_size=3))
def test_every_group_is_gathered_once_and_finished_once_afterwards(forwards: list[str]) -> None:
    steps = steps_of(tape_of(*forwards)).split()
    assert len(set(steps)) == len(steps)
    for group in {letter for forward in forwards for letter in forward if letter.islower()}:
        assert f"+{group}" in steps
        assert steps.index(f"+{group}") < steps.index(f"-{group}")


@example("aAeaAE")
@given(calls)
def test_all_of_a_checkpoint_is_gathered_before_any_of_it_is_finished(inside: str) -> None:
    groups = {letter for letter in inside if letter.islower()}
    steps = steps_of(tape_of(f"hH[{inside}]iI")).split()
    assert steps[:2] == ["+i", "-i"] and steps[-2:] == ["+h", "-h"]
    middle = steps[2:-2]
    first_entered = list(dict.fromkeys(letter for letter in inside if letter.islower()))
    assert middle[: len(groups)] == [f"+{group}" for group in first_entered]


@given(st.lists(calls, min_size=1, max_size=3), st.integers(1, 20))
def test_forwards_without_a_backward_leave_no_more_than_one(
    forwards: list[str], times: int
) -> None:
    inside = [text.replace("[", "").replace("]", "") for text in forwards]
    once, often = tape_of(*inside, *inside), tape_of(*inside * (times + 1))
    assert steps_of(once) == steps_of(often)
    assert len(often.visits) <= 2 * len({v.group for v in once.visits}) + len(inside[-1])


# What a forward predicts --------------------------------------------------------------------------

orders = st.lists(st.sampled_from("abcde"), min_size=1, max_size=10)


def advance(tape: Tape[str], order: list[str], depth: int = 1) -> list[list[str]]:
    tape.begin_forward("root")
    predicted = [list(tape.advance(group, depth)) for group in order]
    end(tape, "root")
    return predicted


@given(orders, st.integers(0, 4))
def test_a_repeated_order_is_predicted_exactly(order: list[str], depth: int) -> None:
    tape: Tape[str] = Tape()
    assert advance(tape, order, depth) == [[]] * len(order)
    for _ in range(2):
        expected = [order[index + 1 : index + 1 + depth] for index in range(len(order))]
        assert advance(tape, order, depth) == expected


@given(orders, orders)
def test_another_order_is_predicted_as_far_as_it_agrees(before: list[str], now: list[str]) -> None:
    tape: Tape[str] = Tape()
    advance(tape, before)
    for index, found in enumerate(advance(tape, now)):
        agrees = before[index : index + 1] == [now[index]]
        assert found == (before[index + 1 : index + 2] if agrees else [])


@given(orders, orders)
def test_a_failed_forward_predicts_nothing(order: list[str], begun: list[str]) -> None:
    tape: Tape[str] = Tape()
    advance(tape, order)
    tape.begin_forward("root")
    for group in begun:
        tape.advance(group)
        tape.leave(tape.enter(group, None), needs_reduce=True, needs_grad=True)
    tape.discard_forward()
    assert tape.visits == []
    assert advance(tape, order) == [order[index + 1 : index + 2] for index in range(len(order))]


@pytest.mark.parametrize(("forward", "stays"), [("raAbBR", False), ("aAbB", True)])
def test_a_group_stays_if_it_ended_forward_and_began_the_last_backward(
    forward: str, stays: bool
) -> None:
    tape = tape_of(forward)
    for group in "ab":
        tape.advance(group)
    tape.plan_backward()
    end(tape, "a")
    tape.clear()
    tape.begin_forward("a")
    found = []
    for group in "ab":
        tape.advance(group)
        found.append(tape.is_turning_point(group))
    assert found == [False, stays]
