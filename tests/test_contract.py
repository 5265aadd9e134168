"""What others refuse or silently get wrong, one test for each, named after it.

Each takes the plainest case; the files that are imported here have all the others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from faults import test_diverging_orders as diverging
from faults import test_failed_iterations as failures
from faults import test_reset as resets
from interface import test_interface as interface
from meshes import test_hybrid as hybrid
from meshes import test_reshard_to_fewer as fewer
from meshes import test_tensor_parallel as tensor_parallel
from order import test_evaluation as evaluation
from order import test_events as event_cases
from order import test_events as events
from order import test_roots as roots
from parameters import test_buffers as buffers
from parameters import test_carried_over as carried
from parameters import test_deepcopy as copies
from parameters import test_freshness as freshness
from parameters import test_kinds as kinds
from parameters import test_ties as ties
from subclasses import test_errors as extension_errors
from subclasses import test_formats as extension_formats
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from training import test_accumulation as accumulation
from training import test_double_backward as double_backward
from training import test_frozen as frozen
from training import test_losses as losses
from training import test_outputs as outputs
from training.programs import NUM_PARAMS, Program
from training.programs import assert_same as assert_program

from composable_shard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from composable_shard.testing import run_ranks

LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def test_no_all_reduce_on_a_hybrid_mesh_while_microbatches_use_different_parameters() -> None:
    used = tuple((of_step,) * 4 for of_step in (hybrid.ONE_GROUP, hybrid.EVEN, hybrid.OTHER_GROUP))
    hybrid.assert_same(hybrid.Program(("no_all_reduce", "no_all_reduce", "sync"), used))


def test_ranks_use_different_parameters_of_one_group() -> None:
    used = ((accumulation.ONE_GROUP, accumulation.OTHER_GROUP),) * 2
    assert_program(Program(("sync", "sync"), used), 2)
    assert run_ranks(accumulation.gradients_without_use, 2) == [[False] + [True] * 5] * 2


def test_a_rank_skips_a_whole_group_that_others_run() -> None:
    said = run_ranks(diverging.at_once, 2, diverging.skips_in_the_middle, timeout=20)
    assert said == [diverging.text(2, diverging.ONE, diverging.TWO)] * 2


@pytest.mark.parametrize("clear", [interface.clear_by_module, interface.clear_by_optimizer])
def test_zero_grad_after_a_backward_without_sync(clear: interface.Clear) -> None:
    run_ranks(interface.clear_accumulated, 2, clear, True)


def test_reset_iter_state() -> None:
    run_ranks(resets.reset_before_first_forward, 2, False)
    run_ranks(resets.reset_drops_accumulated, 2)


@pytest.mark.parametrize("foreach", [True, False])
def test_no_reshard_after_backward_then_an_optimizer_step(foreach: bool) -> None:
    run_ranks(freshness.trained_while_kept, 2, freshness.as_it_is, foreach)


def test_share_comm_ctx_before_the_first_forward_of_two_roots() -> None:
    roots.test_two_roots_train_as_unsharded(roots.two_towers, True, True)


def test_int_reshard_with_an_inner_dim_with_dtensors_and_with_extensions() -> None:
    assert run_ranks(fewer.train, 4, 2, MixedPrecisionPolicy(), timeout=30) == [[]] * 4
    mesh = tensor_parallel.MESHES[0]
    assert run_ranks(tensor_parallel.train, 4, mesh, 12, 2, timeout=60) == [[]] * 4
    fewer.test_tensor_subclasses_gather_from_fewer_ranks()


def test_accumulate_then_a_parameter_first_used_later() -> None:
    first = (True,) + (False,) * (NUM_PARAMS - 1)
    used = ((first,) * 2, (accumulation.ALL,) * 2, (accumulation.ALL,) * 2)
    assert_program(Program(("no_sync", "no_sync", "sync"), used, policy=LOW), 2)


def test_grad_dtype_of_a_parameter() -> None:
    expected = [torch.float32, torch.float32, torch.bfloat16, True]
    assert run_ranks(carried.with_grad_dtype, 2, None) == [expected] * 2


@pytest.mark.parametrize("when", [0, 1])
def test_setters_before_and_after_the_first_forward_and_on_a_child(when: int) -> None:
    events.test_set_reshard_after_forward_acts_at_any_time(when)
    assert run_ranks(setter_on_a_child, 2) == [[True, False]] * 2


def setter_on_a_child() -> list[bool]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].set_requires_gradient_sync(False)  # type: ignore[operator]
    model(torch.ones(2, 4)).sum().backward()
    grads = [layer.weight.grad for layer in model]
    return [any(p.is_partial() for p in grad.placements) for grad in grads]  # type: ignore[union-attr]


def test_in_place_on_views_containers_cached_intermediates_and_no_tensor_inputs() -> None:
    run_ranks(outputs.train_in_place, 2, outputs.whole, outputs.add_, True)
    for container in ("named tuple", "dict", "dataclass"):
        outputs.test_outputs_in_any_container(container)
    losses.test_loss_on_a_cached_intermediate("attribute", True)
    outputs.test_no_tensor_inputs(True)


def test_double_backward() -> None:
    double_backward.test_gradient_penalties_are_exact(double_backward.penalty, True)


def test_no_grad_forwards() -> None:
    evaluation.test_no_grad_forwards_grow_nothing(torch.no_grad, None)


def test_mixed_dtypes_scalars_strides_and_uneven_inner_dims() -> None:
    assert run_ranks(kinds.train_mixed, 2) == [[]] * 2
    assert run_ranks(kinds.train, 2, 1, False, True, timeout=30) == [[]] * 2


def test_a_parameter_frozen_at_the_first_forward_and_unfrozen_later() -> None:
    frozen.test_a_parameter_frozen_at_the_first_forward_is_thawed_later(2, LOW)


def test_batch_norm_and_other_buffers_under_a_low_precision_policy() -> None:
    buffers.test_batch_norm_and_other_buffers_under_low_precision("bf16", False, True)


def test_deepcopy() -> None:
    assert run_ranks(copies.copied_and_trained, 2, copies.WHEN[1], {}) == [[]] * 2
    assert run_ranks(copies.averaged, 2, True) == [[]] * 2


def test_tied_parameters_across_groups() -> None:
    groups = ("inner.embedding", "inner.middle", "inner.head", "inner", "")
    assert run_ranks(ties.train, 2, groups, "inner", None, timeout=30) == [[]] * 2


def test_optimizer_attributes_and_hooks_on_the_original_parameter() -> None:
    carried.test_an_optimizer_built_before_is_refused_at_its_next_step(torch.optim.AdamW)
    carried.test_an_attribute_of_a_parameter_is_on_both_forms(2, "plain", None, "root")
    assert run_ranks(carried.train_with_hooks, 2, "before") == [[]] * 2
    assert run_ranks(carried.optimizer_in_backward, 2, "before", False) == [[]] * 2


def test_clip_grad_norm_over_several_meshes() -> None:
    norms = run_ranks(clipped_over_two_meshes, 4)
    assert all(abs(norm - wanted) < 1e-5 * wanted for norm, wanted in norms)
    assert len({norm for norm, _ in norms}) == 1


def clipped_over_two_meshes() -> tuple[float, float]:
    """One layer over all ranks, one over pairs and replicated; return our norm and the oracle's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (4,)))
    hybrid_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[1], mesh=hybrid_mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(torch_dist.get_rank()))
    model(x).square().sum().backward()
    grads = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
    wanted = torch.stack([grad.norm() for grad in grads]).norm().item()
    return clip_grad_norm_(model.parameters(), 1.0).item(), wanted


def test_custom_divide_factor_on_gloo() -> None:
    hybrid.test_a_custom_divide_factor_divides_the_sum_over_all_ranks(3.0)


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_exception_or_out_of_memory_in_forward_or_backward(error: type[Exception]) -> None:
    for break_at in (failures.within_block, failures.between_blocks):
        run_ranks(failures.train_with_failure, 2, break_at, error, 1)


def test_eager_loss_over_chunks_of_a_grouped_head() -> None:
    event_cases.test_a_chunked_head_is_reduced_once()


def test_root_without_own_parameters() -> None:
    events.test_a_root_without_parameters_does_not_free_the_last_block()


def copies_on_one_rank() -> list[Any]:
    model = fully_shard(nn.Linear(64, 64, bias=False), reshard_after_forward=True)
    place = model.weight.to_local().data_ptr()
    inside: list[int] = []
    model.register_forward_pre_hook(lambda module, _: inside.append(module.weight.data_ptr()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(2, 64))
    copied = [e.key for e in profile.key_averages() if e.key in ("aten::copy_", "aten::cat")]
    return [inside == [place], copied]


def test_world_size_1() -> None:
    assert run_ranks(copies_on_one_rank, 1) == [[True, []]]


def test_extension_with_several_tensors_uneven_rows_and_a_wrong_one_on_one_rank() -> None:
    extension_formats.test_int8_rows_with_a_scale_for_each_shard(5, True, 1)
    extension_formats.test_any_number_of_rows_on_any_rank((3, 1, 2))
    extension_errors.test_a_mistake_on_one_rank(
        run_ranks,
        extension_errors.raising,
        1,
        extension_errors.FAILED.format(1, "KeyError: 'scale'"),
    )
