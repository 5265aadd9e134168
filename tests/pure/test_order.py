"""The steps of a backward, read off where forwards have entered and left groups."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable_shard.core.order import ExecutionOrder, Interval, Plan

FROZEN = "xyz"  # all other groups train


def order_of(*forwards: str) -> ExecutionOrder[str]:
    """Follow forwards: ``"a"`` enters group ``a``, ``"A"`` leaves it.

    Brackets are checkpoints; ``"!"`` after a group that is left says that nothing of it is watched.
    """
    order: ExecutionOrder[str] = ExecutionOrder()
    for forward in forwards:
        order.begin()
        calls: list[tuple[str, Interval]] = []
        checkpoints: list[dict[Any, Any]] = []
        for letter, following in zip(forward, f"{forward}."[1:], strict=True):
            if letter == "[":
                checkpoints.append({})
            elif letter == "]":
                checkpoints.pop()
            elif letter.islower():
                calls.append((letter, order.enter(letter, checkpoints[:1])))
            elif letter.isupper():
                group, interval = calls.pop()
                assert group == letter.lower()
                order.leave(
                    group, interval, trains=group not in FROZEN, is_watched=following != "!"
                )
    return order


def plan_of(order: ExecutionOrder[str]) -> Plan[str]:
    return order.plan(lambda group: group not in FROZEN)


def steps_of(order: ExecutionOrder[str]) -> str:
    """Return ``"+a"`` where ``a`` is gathered and ``"-a"`` where it is reduced."""
    steps = plan_of(order).steps
    return " ".join(("+" if step.gathers else "-") + step.group for step in reversed(steps))


CASES = [
    ("one after the other", ["raAbBR"], "+r +b -b +a -a -r"),
    ("nested", ["raabBAAR"], "+r +a +b -b -a -r"),
    ("twice", ["raAbBaAbBR"], "+r +b +a -b -a -r"),
    ("two forwards", ["raAR", "raAR"], "+r +a -a -r"),
    ("two forwards in another order", ["aAbB", "bBaA"], "+a +b -b -a"),
    ("two forwards in another order, nested", ["raAbBR", "rbBaAR"], "+r +a +b -b -a -r"),
    ("parts by themselves", ["aA", "bB"], "+b -b +a -a"),
    ("a part that the second forward leaves out", ["raAbBR", "raAR"], "+r +a +b -b -a -r"),
    ("frozen before all that trains", ["xX!aAR".replace("R", "")], "+a -a"),
    ("frozen behind what trains, though not on this rank", ["aAxX!bB"], "+b -b +x -x +a -a"),
    ("frozen, with a gradient to its inputs", ["xXaA"], "+a -a +x -x"),
    ("a checkpoint", ["r[aAbB]cCR"], "+r +c -c +a +b -b -a -r"),
    ("checkpoints one after the other", ["[aAbB][cCdD]"], "+c +d -d -c +a +b -b -a"),
    ("checkpoints within each other", ["[aA[bB]cC]dD"], "+d -d +a +b +c -c -b -a"),
    ("of one group", ["[aA][bB]"], "+b -b +a -a"),
    ("around frozen ones before one that trains", ["[xX!yY!aA]bB"], "+b -b +x +y +a -a -y -x"),
    ("around frozen ones alone", ["[xX!yY!]aA"], "+a -a"),
    ("in two checkpoints", ["[aAbB][aAcC]"], "+a +c -c +b -b -a"),
]


@pytest.mark.parametrize(
    ("forwards", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_steps_are_the_reverse_of_forward(forwards: list[str], expected: str) -> None:
    assert steps_of(order_of(*forwards)) == expected


def test_a_group_that_no_backward_reads_is_reduced_only() -> None:
    order = order_of("raAbBR")
    order.forget("b")
    assert steps_of(order) == "+r -b +a -a -r"
    order.clear()
    assert steps_of(order) == ""


def test_checkpoints_are_counted_once_for_all_that_they_compute() -> None:
    assert plan_of(order_of("[aAaAbB][aA]cC")).num_checkpoints == {"a": 2, "b": 1}
    assert plan_of(order_of("[aA]", "[aA]")).num_checkpoints == {"a": 2}


def test_calls_are_counted_in_the_latest_forward_and_before() -> None:
    plan = plan_of(order_of("aAbBaAcC", "cC"))
    assert (plan.called_again, plan.called_before) == ({"a"}, {"c"})
    assert plan_of(order_of("aAaA", "aA")).called_again == frozenset()


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
def test_every_group_is_gathered_once_and_reduced_once_afterwards(forwards: list[str]) -> None:
    steps = steps_of(order_of(*forwards)).split()
    assert len(set(steps)) == len(steps)
    for group in {letter for forward in forwards for letter in forward if letter.islower()}:
        assert f"+{group}" in steps
        assert steps.index(f"+{group}") < steps.index(f"-{group}")


@given(calls)
def test_all_of_a_checkpoint_is_gathered_before_any_of_it_is_reduced(inside: str) -> None:
    groups = {letter for letter in inside if letter.islower()}
    steps = steps_of(order_of(f"hH[{inside}]iI")).split()
    assert steps[:2] == ["+i", "-i"] and steps[-2:] == ["+h", "-h"]
    middle = steps[2:-2]
    assert {step[0] for step in middle[: len(groups)]} <= {"+"}
    first_entered = list(dict.fromkeys(letter for letter in inside if letter.islower()))
    assert middle[: len(groups)] == [f"+{group}" for group in first_entered]
