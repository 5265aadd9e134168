"""What a microbatch that fails leaves of those before it."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
import torch.distributed as dist
from nets import full
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import FSDPModule, fully_shard

WIDTH = 6


def inputs(rank: int, place: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * place + rank))


def assert_means(sharded: nn.Module, plain: nn.Module, places: list[int]) -> None:
    """Compare the gradients with the means over ranks of those of an unsharded model."""
    ranks = dist.get_world_size()
    plain.zero_grad()
    for rank in range(ranks):
        for place in places:
            (loss_of(plain, inputs(rank, place)) / ranks).backward()
    for (name, param), theirs in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert param.grad is not None
            torch.testing.assert_close(full(param.grad), theirs.grad)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", model(x).square().mean())


def layers() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)])
@pytest.mark.parametrize("way", ["open", "by hand", "interrupted", "finished"])
@on_ranks("shape")
def test_a_failed_microbatch_takes_nothing_of_those_before(
    way: str, shape: tuple[int, ...]
) -> None:
    """Let the second of three microbatches fail at the start of its backward."""
    plain = layers()
    model = copy.deepcopy(plain)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    root = cast("FSDPModule", fully_shard(model, mesh=mesh))
    rank = dist.get_rank()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt if way == "interrupted" else ZeroDivisionError

    if way == "by hand":
        root.set_manual_backward_finalization(True)
    elif way != "finished":
        root.set_is_last_backward(False)
    loss_of(model, inputs(rank, 0)).backward()
    if way == "interrupted":
        handle = model[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(inputs(rank, 1))
        handle.remove()
    else:
        output = model(inputs(rank, 1))
        output.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            output.square().mean().backward()
    if way == "open":
        root.set_is_last_backward(True)
    loss_of(model, inputs(rank, 2)).backward()
    if way == "by hand":
        root.finalize_backward()
    root.synchronize_gradients()
    assert_means(model, plain, [0, 2])
