"""Big unsharded parameters of the host, and the memory of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from near import Apart
from on_ranks import on_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from composable_shard import _torch, fully_shard
from composable_shard._torch import memory
from composable_shard.core.transport.gloo.mailbox import mailbox_of
from composable_shard.core.transport.gloo.point_to_point import DirectReduceScatter
from composable_shard.optim import flat
from composable_shard.testing import fake_ranks, run_ranks

NUM_LAYERS, WIDTH = 6, 1024


class Largest(TorchDispatchMode):
    """Notes the most bytes that an operation allocates."""

    nbytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not op.is_view and not result.is_meta:
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


def test_sharding_allocates_the_shards_alone() -> None:
    layer = nn.Linear(1024, 1024, bias=False)
    with fake_ranks(4), Largest() as largest:
        fully_shard(layer)
    assert largest.nbytes == layer.weight.nbytes // 4  # type: ignore[operator]


def test_a_gather_copies_no_padding() -> None:
    layer, numels = nn.Linear(8, 8), list[int]()

    def note(into: list[torch.Tensor], _: object) -> None:
        numels.extend(tensor.numel() for tensor in into)

    with fake_ranks(64), mock.patch.object(_torch, "copy_each_", note):
        fully_shard(layer)(torch.ones(2, 8))
    assert sum(numels) == 8 * 8 + 8


def gradients_left() -> list[int]:
    """Return how many gradients of later layers live when each layer gets its own."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    found: list[int] = []
    grads: list[StorageWeakRef] = []

    def note(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        found.append(sum(not grad.expired() for grad in grads))
        grads.append(StorageWeakRef(weight.grad.untyped_storage()))

    def observe(layer: nn.Linear, _: object) -> None:
        layer.weight.register_post_accumulate_grad_hook(note)

    for layer in model:
        layer.register_forward_pre_hook(observe)
    model(torch.randn(5, WIDTH)).sum().backward()
    return found


@pytest.mark.parametrize(("run", "most"), [(gradients_left, 0), (Apart(gradients_left), 1)])
def test_gradients_that_ranks_share_are_freed_once_their_reduction_is_launched(
    run: Callable[[], list[int]], most: int
) -> None:
    for found in run_ranks(run, 2):
        assert found == [0] + [most] * (NUM_LAYERS - 1)


def num_mapped(tensor: torch.Tensor) -> int:
    """Count the mappings of files of this or other ranks in the memory of a tensor."""
    begin, end, count = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(address, 16) for address in line.split()[0].split("-"))
        count += "memfd:composable_shard" in line and first < end and begin < last
    return count


@pytest.mark.skipif(memory._swap is None, reason="this torch cannot hand memory over")
@on_ranks(3)
def test_ranks_of_a_host_map_the_published_shards_and_write_only_their_own_memory() -> None:
    """Shards of 334 rows of 4,000 bytes: none begins or ends with a page, and the last is less."""
    plain = nn.ModuleList(nn.Linear(1000, 1000) for _ in range(6))
    model, rank = nn.Sequential(*copy.deepcopy(plain)), dist.get_rank()
    for layer in model:
        fully_shard(layer)
    mailbox = mailbox_of(model[0].weight.device_mesh.get_group())
    assert mailbox is not None
    for turn in range(5):
        for layer in model:  # all at once: no slab may be used again
            layer.unshard()
        for layer, same in zip(model, plain, strict=True):
            assert torch.equal(layer.weight, same.weight) and torch.equal(layer.bias, same.bias)
            assert num_mapped(layer.weight) == 3
            layer.weight.data[rank::3] = float(turn)
        dist.barrier()
        for layer, same in zip(model, plain, strict=True):
            others = torch.arange(1000) % 3 != rank
            assert torch.equal(layer.weight[others], same.weight[others])
            layer.reshard()
            assert num_mapped(layer.weight.to_local()) == 0
        dist.barrier()
    model[0].unshard()
    dist.barrier()
    model[1].unshard()
    assert len(mailbox._published) <= 3  # those of the five turns are free again


@on_ranks(2)
def test_large_gradients_have_their_own_memory_unless_a_flat_optimizer_steps_them() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))

    def spare() -> list[int]:
        model(torch.ones(2, WIDTH)).sum().backward()
        grads = [param.grad.to_local() for param in model.parameters()]
        model.zero_grad()
        return [grad.untyped_storage().nbytes() - grad.nbytes for grad in grads]

    assert spare()[0::2] == [0, 0]
    flat(torch.optim.SGD(model.parameters()))
    assert min(spare()) > WIDTH


@on_ranks(2)
def test_a_rank_lets_go_of_the_pages_of_its_message() -> None:
    full, rest = torch.ones(1 << 22), (dist.group.WORLD, dist.ReduceOp.SUM, 9, torch.float32)
    [work] = DirectReduceScatter().launch([full.new_empty(1 << 21)], [full], *rest)
    slab = mailbox_of(rest[0])._published[-1].slab
    text = Path("/proc/self/smaps").read_text().split(f"\n{slab.address:x}-")[1]
    work.wait()
    assert int(text.split("Rss:")[1].split()[0]) * 1024 < full.nbytes / 4
