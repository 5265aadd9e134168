"""Custom collectives, hooks on the reduction, process groups and buffers of one's own choice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshes.compare import Oracle, gradient_differences, step_differences
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as TorchAllGather
from training.trees import TREE, build, inputs_for

from composable_shard import FSDPModule, _torch, fully_shard
from composable_shard.insight.events import record_events
from composable_shard.testing import run_ranks, shard_tree
from transport.own_collectives import CopyingAllGather, SummingReduceScatter


class TorchsAllGather(TorchAllGather):
    """One written against torch's interface."""

    allocate = CopyingAllGather.allocate
    __call__ = CopyingAllGather.__call__
    __init__ = CopyingAllGather.__init__


def in_memory_of_a_backend(module: FSDPModule) -> None:
    def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(tuple(shape), 7, dtype=dtype, device=device)

    with mock.patch.object(_torch, "backend_allocator", lambda *_: allocate):
        if dist.get_world_size() > 1:
            module.set_allocate_memory_from_process_group_for_comm(True)


def custom(module: FSDPModule) -> None:
    module.set_custom_all_gather(CopyingAllGather())
    module.set_custom_reduce_scatter(SummingReduceScatter())


def apart_and_back(module: FSDPModule) -> None:
    module.set_separate_reduce_scatter_group(True)
    module.set_separate_reduce_scatter_group(False)


CHOICES: dict[str, Callable[[FSDPModule], None]] = {
    "custom": custom,
    "torchs": lambda module: module.set_custom_all_gather(TorchsAllGather()),
    "in memory of a backend": in_memory_of_a_backend,
    "apart": lambda module: module.set_separate_reduce_scatter_group(),
    "apart and back": apart_and_back,
    "sums": lambda module: module.set_force_sum_reduction_for_comms(True),
    "three at once": lambda module: module.set_reduce_scatter_max_input_buffers(3),
    "zeros for unused": lambda module: module.set_reduce_scatter_unused_params(True),
}


def train(choice: str, when: int, hybrid: bool) -> list[str]:
    """Train the tree; choose before the first forward or after it."""
    model = build(TREE)
    oracle = Oracle(model)
    mesh = None
    if hybrid:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard_tree(model, mesh=mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    found: list[str] = []
    for step in range(3):
        if step == when:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    CHOICES[choice](module)
        x = inputs_for(step, dist.get_rank())
        for either in (model, oracle.model):
            either(x).square().mean().backward()
        oracle.take()
        oracle.reduce()
        found += step_differences(model, oracle, optimizers)
    return found


@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_equals_that_of_the_oracle(ranks: int, choice: str, when: int) -> None:
    assert run_ranks(train, ranks, choice, when, False, timeout=30) == [[]] * ranks


@pytest.mark.parametrize("choice", ["custom", "sums", "three at once"])
def test_training_on_a_hybrid_mesh_equals_that_of_the_oracle(choice: str) -> None:
    assert run_ranks(train, 4, choice, 0, True, timeout=30) == [[]] * 4


@on_ranks(2)
def test_custom_communication_acts_on_its_own_group_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    gather, reduce = CopyingAllGather(), SummingReduceScatter()
    fully_shard(model[0])
    fully_shard(model)
    model[0].set_custom_all_gather(gather)  # type: ignore[operator]
    model[0].set_custom_reduce_scatter(reduce)  # type: ignore[operator]
    model(torch.ones(2, 8)).sum().backward()
    own = (8 * 8 + 8) // 2
    assert (gather.allocated, reduce.ops) == ([own, 2 * own, own, 2 * own], [dist.ReduceOp.SUM])


@on_ranks(1)
def test_a_hook_on_a_stream_of_the_cpu_runs_in_place() -> None:
    model = fully_shard(nn.Linear(2, 1, bias=False))
    model.set_all_reduce_hook(lambda grads: grads.mul_(3), stream=torch.cpu.Stream())
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[3.0, 6.0]]


@on_ranks(4)
def test_an_all_reduce_hook_makes_replicas() -> None:
    """Shard over pairs of ranks; reduce between the pairs by a hook instead of a hybrid mesh."""
    model = build(TREE)
    oracle = Oracle(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard_tree(model, mesh=mesh["shard"])
    between = mesh.get_group("replicate")

    def hook(grads: torch.Tensor) -> None:
        dist.all_reduce(grads, group=between)
        grads.div_(2)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(hook)
    for either in (model, oracle.model):
        either(inputs_for(0, dist.get_rank())).square().mean().backward()
    oracle.take()
    oracle.reduce()
    assert gradient_differences(dict(model.named_parameters()), oracle) == []


@on_ranks(4)
def test_a_hook_may_bring_gradients_that_no_rank_here_has() -> None:
    """Pairs that use different parameters: the hook brings gradients from the other pair."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    either = nn.Module()
    either.a, either.b = nn.Linear(4, 4), nn.Linear(4, 4)
    either.forward = lambda x, name: getattr(either, name)(x)
    fully_shard(either, mesh=mesh["shard"])
    either.set_all_reduce_hook(lambda g: dist.all_reduce(g, group=mesh.get_group("replicate")))
    name = "ab"[mesh["replicate"].get_local_rank()]
    either(torch.ones(2, 4), name).sum().backward()
    assert [param.grad is not None for param in either.parameters()] == [True] * 4


IN_FLIGHT = {
    1: "launch 3 wait 3 launch 2 wait 2 launch 1 wait 1 launch 0 wait 0",
    3: "launch 3 launch 2 launch 1 wait 3 launch 0 wait 2 wait 1 wait 0",
}


@pytest.mark.parametrize("max_input_buffers", IN_FLIGHT)
@on_ranks(2)
def test_so_many_reductions_are_under_way_at_once(max_input_buffers: int) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.set_reduce_scatter_max_input_buffers(max_input_buffers)  # type: ignore[operator]
    with record_events(model, "reduce_scatter", "wait_for_reduce_scatter") as events:
        model(torch.ones(2, 4)).sum().backward()
    words = {"reduce_scatter": "launch", "wait_for_reduce_scatter": "wait"}
    seen = " ".join(f"{words[event]} {name}" for event, name in events)
    assert seen == IN_FLIGHT[max_input_buffers]


@on_ranks(2)
def test_a_group_that_backward_does_not_read_is_not_gathered_for_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    oracle = Oracle(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].set_unshard_in_backward(False)  # type: ignore[operator]
    found: list[object] = []
    for step in range(2):
        tokens = torch.tensor([1, 2, dist.get_rank() + step])
        with record_events(model, "all_gather") as events:
            for either in (model, oracle.model):
                either(tokens).square().sum().backward()
        oracle.take()
        oracle.reduce()
        found += gradient_differences(dict(model.named_parameters()), oracle)
        found.append([name for _, name in events])
    assert found == [["0", "1", "1"], ["0", "1"]]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_gather_waits_for_the_event_after_the_optimizer(reshard: bool) -> None:
    model: Any = fully_shard(nn.Linear(4, 4, bias=False), reshard_after_forward=reshard)
    x, weight = torch.ones(2, 4), model.weight

    def step() -> None:
        with torch.no_grad():
            weight.to_local().fill_(2.0)

    event = mock.Mock(spec=["wait"])
    event.wait.side_effect = step
    with torch.no_grad():
        model(x)
        model.set_post_optim_event(event)
        before = list(event.wait.call_args_list)
        outputs = [model(x).sum().item(), model(x).sum().item()]
    assert [before, event.wait.call_args_list, *outputs] == [[], [mock.call()], 64.0, 64.0]


@on_ranks(2)
def test_whatever_can_be_waited_for_is_an_event() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    done = threading.Event()
    done.set()
    seen: list[object] = []
    for event in (torch.Event("cpu"), torch.cpu.Event(), done, None):
        model.set_post_optim_event(event)
        seen.append(model(torch.ones(2, 4)).shape)
    replaced, event, failing = (mock.Mock(spec=["wait"]) for _ in range(3))
    model.set_post_optim_event(replaced)
    model.set_post_optim_event(event)
    model(torch.ones(2, 4))
    seen += [replaced.wait.call_args_list, event.wait.call_args_list]
    model.set_post_optim_event(event)
    model.set_post_optim_event(None)
    model(torch.ones(2, 4))
    failing.wait.side_effect = RuntimeError("the optimizer has failed")
    model.set_post_optim_event(failing)
    with pytest.raises(RuntimeError, match="the optimizer has failed"):
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    once, gradient = [mock.call()], model.weight.grad.full_tensor().sum().item()
    expected = [*[torch.Size([2, 4])] * 4, [], once, once, 32.0]
    assert [*seen, event.wait.call_args_list, gradient] == expected


@on_ranks(2)
def test_the_older_name_of_the_divide_factor() -> None:
    model: Any = fully_shard(nn.Linear(4, 1, bias=False))
    with pytest.warns(FutureWarning, match="call set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(0.5)
    model(torch.ones(1, 4)).sum().backward()
    assert float(model.weight.grad.full_tensor()[0, 0]) == 4.0
