"""Full tensors one after another: what comes, in which order, by how many collectives."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint.meshes import CASES, Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from composable_shard import CPUOffloadPolicy, fully_shard, iter_full
from composable_shard.core.transport.channel import Channel
from composable_shard.testing import run_ranks, run_threads
from composable_shard.train.weights import gathering
from composable_shard.train.weights.boxes import Parts
from loading.comparing import differences
from loading.test_kinds import Kinds, Tied, shard

EVERYTHING = 1 << 30


def whole_by_torch(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


def unlike(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Tell what differs: bits, or the order."""
    assert list(got) == list(wanted)
    return differences(got, wanted)


# Placements -------------------------------------------------------------------------------------


def over_placements(name: str, hidden: int, direct_nbytes: int) -> list[list[str]]:
    torch.manual_seed(1)
    model = CASES[name](Net(hidden))
    wanted = whole_by_torch(model)
    is_first = dist.get_rank() == 0
    found = []
    with mock.patch.object(gathering, "MIN_DIRECT_NBYTES", direct_nbytes):
        for nbytes in (1, 600, EVERYTHING):
            found.append(unlike(dict(iter_full(model, bucket_bytes=nbytes)), wanted))
            first = dict(iter_full(model, bucket_bytes=nbytes, rank0_only=True))
            found.append(unlike(first, wanted if is_first else {}))
    return found


@pytest.mark.brief(4)
@pytest.mark.parametrize("direct_nbytes", [0, 1 << 16])
@pytest.mark.parametrize("hidden", [8, 10])
@pytest.mark.parametrize("name", CASES)
def test_every_placement(name: str, hidden: int, direct_nbytes: int) -> None:
    num_ranks = CASES[name].num_ranks
    found = run_ranks(over_placements, num_ranks, name, hidden, direct_nbytes)
    assert found == [[[]] * 6] * num_ranks
