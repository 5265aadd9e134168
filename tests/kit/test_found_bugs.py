"""What the kit has found in the library, each as the program that showed it."""

from __future__ import annotations

from composable_shard.testing import (
    ParamSpec,
    TreeSpec,
    assert_trains_like_unsharded,
    fake_ranks,
    shard_tree,
)


def test_a_group_may_give_back_parameters_to_two_outer_groups_one_after_the_other() -> None:
    """It copies the parameters that stay, which counted as a change of them by the user."""
    lowest = TreeSpec((ParamSpec((), tied=True), ParamSpec((4, 3)), ParamSpec((3, 3), tied=True)))
    middle = TreeSpec((), (TreeSpec((ParamSpec(()),), grouped=False), lowest))
    tree = TreeSpec((ParamSpec((3, 3)),), (middle,))
    with fake_ranks(3):
        shard_tree(tree())
    assert_trains_like_unsharded(tree, ["backward", "step", "backward"], world_size=3)
