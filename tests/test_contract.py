"""What others refuse or silently get wrong, and the tests that hold it here, by their names."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from training.cases import Case, UsedAt
from training.trees import NUM_PARAMS, TREE

from composable_shard import MixedPrecisionPolicy

HELD_BY: dict[str, list[str]] = {
    "no all-reduce on a hybrid mesh while microbatches use different parameters": [
        "test_without_all_reduce_microbatches_may_use_different_parameters"
    ],
    "ranks use different parameters of one group": [
        "test_a_group_that_one_ranks_loss_does_not_reach_gets_the_exact_mean"
    ],
    "a rank skips a whole group that others run": [
        "test_ranks_that_diverge_all_name_the_groups",
        "test_a_rank_that_is_late_is_named_and_finds_the_others_gone",
    ],
    "zero_grad after a backward without sync": ["test_accumulated_gradients_are_cleared"],
    "reset_iter_state": [
        "test_reset_before_the_first_forward",
        "test_reset_drops_accumulated_gradients",
    ],
    "no reshard after backward, then an optimizer step": ["test_optimizer_steps_are_noticed"],
    "share_comm_ctx before the first forward of two roots": ["test_two_roots_train_as_unsharded"],
    "int reshard with an inner dim, with DTensors and with extensions": [
        "test_tensor_subclasses_gather_from_fewer_ranks",
        "test_training_with_fewer_ranks_to_gather_from",
        "test_scalars_and_other_strides_gather_from_fewer_ranks",
    ],
    "grad_dtype of a parameter": ["test_the_grad_dtype_of_a_parameter_is_kept"],
    "setters before and after the first forward": [
        "test_set_reshard_after_forward_acts_at_any_time"
    ],
    "in-place operations on view outputs": ["test_in_place_on_a_view_output"],
    "outputs in dict views and dataclasses": ["test_outputs_in_any_container"],
    "a loss on a cached intermediate": ["test_loss_on_a_cached_intermediate"],
    "no tensor inputs": ["test_any_inputs_give_the_gradients_of_the_oracle"],
    "double backward": ["test_gradient_penalties_are_exact"],
    "no-grad forwards": ["test_no_grad_forwards_grow_nothing"],
    "mixed dtypes, scalars, other strides and uneven inner dims": [
        "test_any_tree_of_mixed_dtypes_follows_any_program",
        "test_scalars_and_other_strides",
    ],
    "a parameter frozen at the first forward and thawed later": [
        "test_a_parameter_frozen_at_the_first_forward_is_thawed_later"
    ],
    "buffers under a low-precision policy": [
        "test_batch_norm_and_other_buffers_under_low_precision"
    ],
    "deepcopy": [
        "test_a_copy_and_its_source_train_independently",
        "test_an_exponential_moving_average",
    ],
    "tied parameters across groups": [
        "test_tied_across_groups_trains_as_the_oracle_with_one_gradient"
    ],
    "optimizer, attributes and hooks on the original parameter": [
        "test_an_optimizer_built_before_is_refused_at_its_next_step",
        "test_an_attribute_of_a_parameter_is_on_both_forms",
        "test_a_hook_on_a_sharded_parameter_sees_the_reduced_gradient",
        "test_an_optimizer_in_backward_trains_as_the_oracle",
    ],
    "clip_grad_norm_ over several meshes": [
        "test_any_mix_of_meshes_and_placements",
        "test_a_slice_of_a_mesh_beside_the_whole",
    ],
    "a custom divide factor on gloo": [
        "test_a_custom_divide_factor_divides_the_sum_over_all_ranks"
    ],
    "an exception or no memory in forward or backward": [
        "test_the_next_iteration_is_as_if_none_had_failed",
        "test_no_memory_to_reduce_into_keeps_its_type_and_is_got_over",
    ],
    "a loss over chunks of a grouped head": ["test_chunked_loss_is_reduced_once"],
    "a root without parameters": ["test_a_root_without_parameters_does_not_free_the_last_block"],
    "world size 1": ["test_one_rank_communicates_and_copies_nothing"],
    "extensions of several tensors, with uneven rows, with a mistake on one rank": [
        "test_int8_rows_with_a_scale_for_each_shard",
        "test_any_number_of_rows_on_any_rank",
        "test_a_mistake_on_one_rank",
    ],
}


def test_every_row_of_the_contract_has_its_tests() -> None:
    texts = [path.read_text() for path in Path(__file__).parent.rglob("test_*.py")]
    names = {
        name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)
    }
    missing = [(row, test) for row, tests in HELD_BY.items() for test in tests if test not in names]
    assert missing == []


def test_a_parameter_that_is_first_used_when_others_have_accumulated() -> None:
    every, first = (True,) * NUM_PARAMS, (True,) + (False,) * (NUM_PARAMS - 1)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    loss = UsedAt(((first,), (every,), (every,)))
    Case(TREE, ["accumulate", "accumulate", "backward"]).check(loss=loss, policy=policy)
