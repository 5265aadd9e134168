"""One rank's values on all of them: before sharding, from the meta device, in small buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from nets import Net, assert_parity, shard_net, train_step
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from training.cases import reproducible

from composable_shard import sync_module_states
from composable_shard.testing import run_ranks
from composable_shard.train import init


class Everything(nn.Module):
    """Parameters and buffers of many dtypes and layouts, tied, empty and scalar ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.low = nn.Parameter(torch.randn(7).bfloat16())
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("flags", torch.randn(9) > 0)
        self.register_buffer("counts", torch.randint(0, 9, (3,)))
        self.register_buffer("waves", torch.randn(3, dtype=torch.complex64), persistent=False)


def own_values(make: Callable[[], nn.Module], rank: int) -> nn.Module:
    torch.manual_seed(100 + rank)
    module = make()
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.add_(rank)
    return module


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def synchronized(src_rank: int, bucket_nbytes: int) -> list[int]:
    """Synchronize, and compare with what the source has; return how much was sent at a time."""
    expected = tensors_of(own_values(Everything, src_rank))
    module = own_values(Everything, dist.get_rank())
    before, versions = tensors_of(module), {}
    for name, tensor in before.items():
        versions[name] = tensor._version, tensor.stride()
    sent: list[int] = []
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return broadcast(tensor, **kwargs)

    init.dist.broadcast = counted
    try:
        sync_module_states(module, src_rank=src_rank, bucket_nbytes=bucket_nbytes)
    finally:
        init.dist.broadcast = broadcast
    for name, tensor in tensors_of(module).items():
        assert tensor is before[name]
        assert tensor.stride() == versions[name][1]
        assert torch.equal(tensor, expected[name]), name
        if dist.get_rank() != src_rank and tensor.numel():
            assert tensor._version > versions[name][0], name
    return sent


@reproducible(12)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(16, 1500))
def test_buckets_of_any_size(num_ranks: int, from_end: int, bucket_nbytes: int) -> None:
    src_rank = max(num_ranks - from_end, 0)
    total = sum(tensor.nbytes for tensor in tensors_of(Everything()).values())
    largest = max(tensor.nbytes for tensor in tensors_of(Everything()).values())
    for sent in run_ranks(synchronized, num_ranks, src_rank, bucket_nbytes):
        assert sum(sent) == (total if num_ranks > 1 else 0)
        assert all(nbytes <= max(bucket_nbytes, largest) for nbytes in sent)


@on_ranks(4)
def test_within_a_process_group() -> None:
    """Two pairs of ranks, each from its second rank."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = dist.get_rank() // 2
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, dist.get_rank())
    sync_module_states(module, src_rank=2 * own + 1, process_group=pairs[own])
    assert module.weight.item() == 2 * own + 1


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks("num_ranks")
def test_training_from_the_values_of_one_rank(on_meta: bool) -> None:
    reference = own_values(Net, 0)
    if on_meta and dist.get_rank() > 0:
        with torch.device("meta"):
            model = Net()
        model.to_empty(device="cpu")
    else:
        model = own_values(Net, dist.get_rank())  # type: ignore[assignment]
    sync_module_states(model)
    shard_net(model)
    for step in range(2):
        for one in (model, reference):
            train_step(one, step, torch.optim.SGD(one.parameters(), lr=0.01))
        assert_parity(model, reference)


@on_ranks(4)
def test_replicas_of_shards() -> None:
    """Each row of ranks has replicas of the shards of the first row."""
    mesh = init_device_mesh("cpu", (2, 2))
    own = torch.arange(4.0) + 10 * dist.get_rank()
    module = nn.Module()
    for name, second in (("hybrid", Shard(0)), ("copies", Replicate())):
        placements = [Replicate(), second]
        laid = distribute_tensor(own.clone(), mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(laid))
    module.register_buffer("mean", own.clone())
    sync_module_states(module, keep_shards=True)
    assert module.mean.tolist() == [0.0, 1.0, 2.0, 3.0]
    shard = [12.0, 13.0] if dist.get_rank() % 2 else [0.0, 1.0]
    got = [param.to_local().tolist() for param in module.parameters()]
    assert got == [shard, [0.0, 1.0, 2.0, 3.0]]


SAME = "Expected the same arguments, parameters and buffers on all ranks, got on rank 0: "


def on_meta_on_one() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[dist.get_rank()].to("meta" if dist.get_rank() else "cpu")
    return model


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def one_of(*values: Any) -> Any:
    return values[dist.get_rank()]


REFUSED: dict[str, Callable[[], object]] = {
    "ShardError: Expected FSDPNet before it is sharded, got 'inp.weight' sharded; call "
    "sync_module_states before fully_shard, or set keep_shards=True": (
        lambda: sync_module_states(shard_net(Net(1)))
    ),
    "ValueError: Expected src_rank to be one of the ranks [0, 1], got 5": (
        lambda: sync_module_states(linear(), src_rank=5)
    ),
    "ValueError: Expected bucket_nbytes of at least 1, got 0": (
        lambda: sync_module_states(linear(), bucket_nbytes=0)
    ),
    "ShardError: Expected no failure while synchronizing Sequential, got on rank 1: "
    "MaterializationError: Expected '1.weight' with values, got it on meta; call module.to_empty() "
    "first": (lambda: sync_module_states(on_meta_on_one())),
    f"RankMismatchError: {SAME}'weight' of shape [4, 4], torch.float32; on rank 1: 'weight' of "
    "shape [5, 4], torch.float32": lambda: sync_module_states(nn.Linear(4, one_of(4, 5))),
    f"RankMismatchError: {SAME}src_rank 0, keep_shards False, bucket_nbytes 33554432; on rank "
    "1: src_rank 1, keep_shards False, bucket_nbytes 33554432": (
        lambda: sync_module_states(linear(), src_rank=one_of(0, 1))
    ),
    "ShardError: Expected no failure while synchronizing Linear, got on rank 1: ValueError: "
    "Expected keep_shards to be a bool, got str: 'no'": (
        lambda: sync_module_states(linear(), keep_shards=one_of(False, "no"))
    ),
}


@on_ranks(2)
def test_what_is_refused_is_refused_on_all_ranks() -> None:
    for text, use in REFUSED.items():
        with pytest.raises(Exception) as caught:
            use()
        assert f"{type(caught.value).__name__}: {caught.value}" == text
