"""A recorded order predicts the next pass; what differs from it costs a guess, nothing else."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable_shard.core.order import OrderRecord, stays_for_backward

keys = st.sampled_from("abcde")
orders = st.lists(keys, min_size=1, max_size=10)
orders_without_repeats = st.lists(keys, min_size=2, max_size=5, unique=True)


def run_pass(record: OrderRecord[str], order: list[str], count: int = 1) -> list[list[str]]:
    predictions = [record.advance(key, count) for key in order]
    record.finish()
    return predictions


def followers(order: list[str], count: int = 1) -> list[list[str]]:
    """Behind each place of ``order``, the next ``count`` keys that are not the one there."""
    found = []
    for place, key in enumerate(order):
        others = [other for other in order[place + 1 :] if other != key]
        found.append(sorted(set(others), key=others.index)[:count])
    return found


def recorded(order: list[str]) -> OrderRecord[str]:
    record = OrderRecord[str]()
    run_pass(record, order)
    return record


@given(orders)
def test_the_first_pass_predicts_nothing(order: list[str]) -> None:
    assert run_pass(OrderRecord(), order) == [[]] * len(order)


@given(orders, st.integers(1, 3), st.integers(0, 4))
def test_a_repeated_order_is_predicted_exactly(
    order: list[str], num_repeats: int, count: int
) -> None:
    record = recorded(order)
    for _ in range(num_repeats):
        assert run_pass(record, order, count) == followers(order, count)


@given(orders, orders)
def test_another_order_is_predicted_exactly_from_its_second_pass_on(
    before: list[str], order: list[str]
) -> None:
    record = recorded(before)
    predictions = run_pass(record, order)
    assert len(predictions) == len(order)
    assert {key for others in predictions for key in others} <= set(before)
    assert record.recorded == tuple(order)
    assert run_pass(record, order) == followers(order)


@given(orders_without_repeats, st.data())
def test_a_skipped_key_is_caught_up_with_at_once(order: list[str], data: st.DataObject) -> None:
    skipped = data.draw(st.integers(0, len(order) - 1))
    record = recorded(order)
    shorter = order[:skipped] + order[skipped + 1 :]
    after = dict(zip(order, followers(order), strict=True))
    assert run_pass(record, shorter) == [after[key] for key in shorter]


@given(orders, st.lists(keys, max_size=10))
def test_an_abandoned_pass_leaves_the_record(order: list[str], begun: list[str]) -> None:
    record = recorded(order)
    for key in begun:
        record.advance(key)
    record.abandon()
    record.finish()  # as if the pass had no key
    assert record.recorded == tuple(order)
    assert run_pass(record, order) == followers(order)


@given(orders, st.booleans())
def test_nothing_grows_from_pass_to_pass(order: list[str], fails: bool) -> None:
    record = recorded(order)
    nbytes = len(pickle.dumps(record))
    for _ in range(20):
        for key in order:
            record.advance(key)
        (record.abandon if fails else record.finish)()
    assert len(pickle.dumps(record)) == nbytes


@given(orders, orders, keys)
def test_a_group_stays_if_it_ended_forward_and_opened_backward(
    forward: list[str], backward: list[str], key: str
) -> None:
    stays = stays_for_backward(key, recorded(forward), recorded(backward))
    assert stays == (forward[-1] == key and backward[0] == key)


@pytest.mark.parametrize("known", ["forward", "backward", "neither"])
def test_no_group_stays_before_both_orders_are_known(known: str) -> None:
    forward = recorded(["a"]) if known == "forward" else OrderRecord[str]()
    backward = recorded(["a"]) if known == "backward" else OrderRecord[str]()
    assert stays_for_backward("a", forward, backward) is False
