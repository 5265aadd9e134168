"""What a tree has under way when a module around it is sharded, or when others share with it."""

from __future__ import annotations

import copy

import torch
from nets import Net, average_gradients, own_input, shard_net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from composable_shard import fully_shard, share_comm_ctx
from composable_shard.testing import fake_ranks, run_ranks


def differences(model: nn.Module, oracle: nn.Module) -> list[str]:
    found = []
    for (name, param), expected in zip(model.named_parameters(), oracle.parameters(), strict=True):
        grad = param.grad
        is_reduced = isinstance(grad, DTensor) and grad.placements == param.placements  # type: ignore[attr-defined]
        if not is_reduced or not torch.allclose(grad.full_tensor(), expected.grad):  # type: ignore[union-attr, arg-type]
            found.append(f"{name}: {grad}")
    return found


def accumulated_before() -> list[str]:
    oracle = Net()
    model = shard_net(copy.deepcopy(oracle))
    with model.no_sync():  # type: ignore[operator]
        model(own_input()).square().sum().backward()
    outer = fully_shard(nn.Sequential(model))
    outer.synchronize_gradients()
    oracle(own_input()).square().sum().backward()
    average_gradients(oracle.parameters())
    return differences(model, oracle)


def test_what_was_accumulated_is_reduced_by_the_tree_around() -> None:
    assert run_ranks(accumulated_before, 2, timeout=60) == [[]] * 2


def left_open() -> list[str]:
    oracle = Net()
    model = shard_net(copy.deepcopy(oracle))
    model.set_is_last_backward(False)  # type: ignore[operator]
    model(own_input()).square().sum().backward()
    outer = fully_shard(nn.Sequential(model))
    missing = [name for name, param in model.named_parameters() if param.grad is None]
    outer.set_is_last_backward(True)
    outer(own_input()).square().sum().backward()
    for _ in range(2):
        oracle(own_input()).square().sum().backward()
    average_gradients(oracle.parameters())
    return [*differences(model, oracle), *([] if missing else ["nothing was left open"])]


def test_what_was_left_open_is_ended_by_the_tree_around() -> None:
    assert run_ranks(left_open, 2, timeout=60) == [[]] * 2


def shared_while_over_replicas() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    oracles = [Net(), Net()]
    models = [shard_net(copy.deepcopy(oracle), mesh=mesh) for oracle in oracles]
    for model in models:
        model.set_manual_backward_finalization(True)  # type: ignore[operator]
        model(own_input()).square().sum().backward()
    share_comm_ctx(models)
    found = []
    for model, oracle in zip(models, oracles, strict=True):
        model.finalize_backward()  # type: ignore[operator]
        oracle(own_input()).square().sum().backward()
        average_gradients(oracle.parameters())
    for model, oracle in zip(models, oracles, strict=True):
        found += differences(model, oracle)
    return found


def test_trees_share_what_is_under_way_over_replicas() -> None:
    assert run_ranks(shared_while_over_replicas, 2, timeout=60) == [[]] * 2


def test_a_tree_that_a_schedule_has_settled_may_be_finalized_by_hand() -> None:
    with fake_ranks(2):
        model = shard_net(Net())
        model.set_is_last_backward(False)  # type: ignore[operator]
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        model(own_input()).sum().backward()
        model.set_is_last_backward(True)  # type: ignore[operator]
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
        state = torch.distributed.fsdp.fully_shard.state(model)  # type: ignore[attr-defined]
        state._root_post_backward_final_callback()
        model.set_manual_backward_finalization(True)  # type: ignore[operator]
        model.zero_grad()
        model(own_input()).sum().backward()
        model.finalize_backward()  # type: ignore[operator]
        grads = [param.grad for param in model.parameters()]
        assert [grad.placements for grad in grads] == [p.placements for p in model.parameters()]  # type: ignore[union-attr, attr-defined]
