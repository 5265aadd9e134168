"""After forward, parameters may stay sharded over fewer ranks, from which backward gathers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from near import Apart
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from training.trees import TREE, build, inputs_for
from two_tensors import two_tensor_hooks, two_tensor_mlp

from composable_shard import FSDPModule, MixedPrecisionPolicy, fully_shard
from composable_shard.core.transport.gloo import point_to_point
from composable_shard.core.transport.process_groups import subgroup
from composable_shard.testing import fake_ranks, run_ranks, shard_tree
from meshes.compare import Oracle, step_differences


def train(num_ranks: int, policy: MixedPrecisionPolicy) -> list[str]:
    """Train the tree, with small, big, inner-sharded and frozen parameters; tell what differs."""
    model = build(TREE)
    oracle = Oracle(model)
    shard_tree(model, reshard_after_forward=num_ranks, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    found: list[str] = []
    for step in range(3):
        x = inputs_for(step, dist.get_rank())
        for either in (model, oracle.model):
            first = either(x)
            (first + either(x.sin())).square().mean().backward()
        oracle.take()
        oracle.reduce()
        found += step_differences(model, oracle, optimizers)
    return found


@pytest.mark.parametrize(("ranks", "num_ranks"), [(4, 2), (4, 4), (2, 1), (3, 3)])
def test_training_equals_that_of_the_oracle(ranks: int, num_ranks: int) -> None:
    policy = MixedPrecisionPolicy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(train, ranks, num_ranks, policy, timeout=30) == [[]] * ranks


def two_layers(reshard: int | bool) -> list[torch.Tensor]:
    """Train layers whose weights are tensor subclasses; return the shards."""
    torch.manual_seed(0)
    with two_tensor_hooks():
        model = two_tensor_mlp(alike=False, dim=6)
        for layer in model:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for step in range(3):
            seed = torch.Generator().manual_seed(step + 7 * dist.get_rank())
            model(torch.randn(4, 6, generator=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [inner for param in model.parameters() for inner in (local(param).a, local(param).b)]


def local(param: nn.Parameter) -> Any:
    assert isinstance(param, DTensor)
    return param.to_local()


def test_tensor_subclasses_gather_from_fewer_ranks() -> None:
    few, all_of_them = run_ranks(two_layers, 4, 2), run_ranks(two_layers, 4, True)
    for rank in range(4):
        for got, wanted in zip(few[rank], all_of_them[rank], strict=True):
            assert torch.equal(got, wanted)


@on_ranks(4)
def test_backward_gathers_from_the_neighbours_only() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    seen = []  # the ranks that each gather was over, and the bytes sent and received
    launch = point_to_point.DirectAllGather.launch

    def watched(self: Any, outputs: Any, inputs: Any, group: Any, tag: int) -> Any:
        seen.append((group.size(), sum(t.nbytes for t in inputs), sum(t.nbytes for t in outputs)))
        return launch(self, outputs, inputs, group, tag)

    point_to_point.DirectAllGather.launch = watched  # type: ignore[method-assign]
    try:
        model(torch.ones(2, 64)).sum().backward()
    finally:
        point_to_point.DirectAllGather.launch = launch  # type: ignore[method-assign]
    full = 64 * 64 * 4
    forward, backward = (4, full // 4, full), (2, full // 2, full)
    assert seen == [forward, forward, backward, backward]


@on_ranks(4)
def test_process_groups_are_made_once_for_all_calls() -> None:
    made = []
    new_group = dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return new_group(*args, **kwargs)

    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")  # of which nobody has made parts
    dist.new_group = counted
    try:
        models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
        for model in models:
            for layer in model:
                fully_shard(layer, mesh=mesh, reshard_after_forward=2)
            fully_shard(model, mesh=mesh, reshard_after_forward=2)
            model(torch.ones(2, 4)).sum().backward()
    finally:
        dist.new_group = new_group
    assert len(made) == 1


def test_the_number_of_all_shards_means_true_and_1_means_false() -> None:
    with fake_ranks(4):
        model = fully_shard(nn.Linear(4, 4), reshard_after_forward=4)
        model(torch.ones(2, 4))
        assert tuple(model.weight.shape) == (4, 4) and hasattr(model.weight, "to_local")
        with pytest.warns(UserWarning) as caught:
            model = fully_shard(nn.Linear(4, 4), reshard_after_forward=1)
        assert [str(one.message) for one in caught] == [
            "reshard_after_forward=1 keeps all parameters after forward; pass False instead"
        ]
        model(torch.ones(2, 4))
        assert not hasattr(model.weight, "to_local")


@on_ranks(4)
def test_ranks_that_know_of_different_groups_make_one_together() -> None:
    whole = dist.new_group()  # torch 2.15 could not make it after a group of some ranks alone
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    mesh = DeviceMesh.from_group(whole, "cpu")
    pair = dist.get_rank() // 2 * 2
    for num_ranks, ranks in ((4, [0, 1, 2, 3]), (2, [pair, pair + 1])):
        group = subgroup(mesh.get_group(), num_ranks)
        assert dist.get_process_group_ranks(group) == ranks
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total == num_ranks


# Ranks that send, as those on other hosts do ----------------------------------------------------


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=str)
def test_training_is_the_same_on_ranks_that_send(param_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    seen = [run_ranks(run, 4, 2, policy, timeout=30) for run in (train, Apart(train))]
    assert seen[0] == seen[1]
    if param_dtype is None:
        assert seen[1] == [[]] * 4
