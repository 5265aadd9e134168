"""How many groups are gathered ahead in the recorded order."""

from __future__ import annotations

from functools import partial

import pytest
from nets import Net, shard_net

from composable_shard.testing import fake_ranks
from order.recording import events, on_ranks, recorded_iterations

AHEAD = {
    0: (
        """pre_forward root, gather root, wait root,
        pre_forward 0, gather 0, wait 0, post_forward 0, free 0,
        pre_forward 1, gather 1, wait 1, post_forward 1, free 1,
        pre_forward 2, gather 2, wait 2, post_forward 2, free 2,
        pre_forward 3, gather 3, wait 3, post_forward 3, free 3,
        post_forward root""",
        """pre_backward root,
        pre_backward 3, gather 3, wait 3, post_backward 3, free 3, reduce 3,
        pre_backward 2, gather 2, wait 2, post_backward 2, free 2, finish 3, reduce 2,
        pre_backward 1, gather 1, wait 1, post_backward 1, free 1, finish 2, reduce 1,
        pre_backward 0, gather 0, wait 0, post_backward 0, free 0, finish 1, reduce 0,
        post_backward root, finish 0, reduce root, finish root, free root""",
    ),
    2: (
        """pre_forward root, gather root, gather 0, gather 1, wait root,
        pre_forward 0, gather 2, wait 0, post_forward 0, free 0,
        pre_forward 1, gather 3, wait 1, post_forward 1, free 1,
        pre_forward 2, wait 2, post_forward 2, free 2,
        pre_forward 3, wait 3, post_forward 3, free 3,
        post_forward root""",
        """pre_backward root, gather 3, gather 2,
        pre_backward 3, gather 1, wait 3, post_backward 3, free 3, reduce 3,
        pre_backward 2, gather 0, wait 2, post_backward 2, free 2, finish 3, reduce 2,
        pre_backward 1, wait 1, post_backward 1, free 1, finish 2, reduce 1,
        pre_backward 0, wait 0, post_backward 0, free 0, finish 1, reduce 0,
        post_backward root, finish 0, reduce root, finish root, free root""",
    ),
}


def iterations(depth: int) -> list[list[str]]:
    model = shard_net(Net(4))
    model.set_prefetch_depth(depth)
    return recorded_iterations(model, 3)


@pytest.mark.parametrize("depth", AHEAD)
def test_so_many_groups_are_gathered_ahead(depth: int) -> None:
    *_, forward, backward = on_ranks(partial(iterations, depth))
    assert (forward, backward) == tuple(map(events, AHEAD[depth]))


def of_the_root_alone() -> list[list[str]]:
    model = shard_net(Net(4))
    model.set_prefetch_depth(2, recurse=False)
    return recorded_iterations(model, 2)


def test_a_group_alone_may_gather_further_ahead() -> None:
    *_, forward, _ = on_ranks(of_the_root_alone)
    assert forward[:8] == events(
        """pre_forward root, gather root, gather 0, gather 1, wait root,
        pre_forward 0, wait 0, post_forward 0"""
    )


def test_what_is_no_depth_is_refused() -> None:
    with fake_ranks(1):
        model = shard_net(Net(1))
        for depth in (1.0, True, None):
            with pytest.raises(TypeError) as wrong_type:
                model.set_prefetch_depth(depth)
            got = f"{type(depth).__name__}: {depth!r}"
            assert str(wrong_type.value) == f"Expected depth to be an int, got {got}"
        with pytest.raises(ValueError) as wrong:
            model.set_prefetch_depth(-1)
        assert str(wrong.value) == "Expected depth of at least 0, got -1"
