"""What tests of moving a model share: meshes, all that a rank has, and its memory."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_shard import move
from composable_shard.optim.flat import flat
from composable_shard.optim.layouts import Owned, Sharded, with_layout
from composable_shard.train import parking

MiB = 2**20


def on_mesh(*ranks: Any) -> DeviceMesh:
    """Return a mesh of these ranks: of one axis, or of two if they come as rows."""
    is_hybrid = not isinstance(ranks[0], int)
    names = ("replicate", "shard") if is_hybrid else ("shard",)
    return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)


def is_in(mesh: DeviceMesh) -> bool:
    return dist.get_rank() in mesh.mesh.flatten().tolist()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name} {key}", inner)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            found[name] = local.detach().clone()
        else:
            found[name] = torch.tensor(hash(str(value)))

    add("", model.state_dict())
    add("", optimizer.state_dict()["state"])
    return found


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert value.stride() == other[name].stride(), name


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def return_unused() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def from_disk(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    has_it: tuple[bool, bool],
    folder: Path,
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    suffix: str = "",
) -> tuple[nn.Module, torch.optim.Optimizer] | None:
    """Save on some ranks and load on others, as ``has_it`` says; return what this rank has then.

    What ``build`` makes has other values, and states to load into. A suffix follows the names of
    experts, which differ between ranks.
    """
    groups = []
    for is_one in has_it:
        heard: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(heard, is_one)
        groups.append(dist.new_group([rank for rank, is_member in enumerate(heard) if is_member]))
    if has_it[0]:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(_named(state, suffix), checkpoint_id=folder, process_group=groups[0])
    dist.barrier()
    if not has_it[1]:
        return None
    loaded, optim = build()
    with torch.no_grad():
        for param in loaded.parameters():
            param.zero_()
    state = dict(zip(("model", "optimizer"), get_state_dict(loaded, optim), strict=True))
    read = _named(state, suffix)
    dcp.load(read, checkpoint_id=folder, process_group=groups[1])
    back = _unnamed(read, suffix)
    set_state_dict(
        loaded, optim, model_state_dict=back["model"], optim_state_dict=back["optimizer"]
    )
    return loaded, optim


def stock(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def of_layouts(model: nn.Module) -> torch.optim.Optimizer:
    return with_layout(
        model,
        {
            "*.weight": Owned(partial(torch.optim.Adagrad, lr=0.02)),
            "*": Sharded(partial(torch.optim.AdamW, lr=0.01)),
        },
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "stock": stock,
    "flat": lambda model: flat(stock(model)),
    "layouts": of_layouts,
}


def follow_a_route(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    places: Sequence[Any],
    is_at: Callable[[Any], bool],
    build: Callable[[Any], tuple[nn.Module, torch.optim.Optimizer]],
    train: Callable[..., list[float]],
    folder: Path,
    suffix: str = "",
) -> None:
    """Move from place to place; compare with what a checkpoint gives there, and train both on."""
    ids = [id(param) for param in model.parameters()]
    for number, (before, after) in enumerate(pairwise(places)):
        has_it, there = (is_at(before), is_at(after)), partial(build, after)
        disk = from_disk(model, optimizer, has_it, folder / str(number), there, suffix)
        move(model, optimizer, after, bucket_nbytes=200)
        assert [id(param) for param in model.parameters()] == ids
        params = [param for param in model.parameters() if isinstance(param, DTensor)]
        if disk is None:
            assert not any(param.to_local().numel() for param in params)
            continue
        others = [param for param in disk[0].parameters() if isinstance(param, DTensor)]
        for param, other in zip(params, others, strict=True):
            assert (param.device_mesh, param.placements) == (other.device_mesh, other.placements)
        assert_same_bits(values(model, optimizer), values(*disk))
        steps = (10 * number + 2, 10 * number + 3)
        assert train(model, optimizer, *steps) == train(*disk, *steps)
        assert_same_bits(values(model, optimizer), values(*disk))


def _named(state: dict[str, Any], suffix: str) -> dict[str, Any]:
    """Return a state dict whose experts have names of their own in each column."""
    found = {}
    for key, value in state.items():
        inner = _named(value, suffix) if isinstance(value, dict) else value
        found[key + suffix if isinstance(key, str) and "experts" in key else key] = inner
    return found


def _unnamed(state: dict[str, Any], suffix: str) -> dict[str, Any]:
    return {
        key.removesuffix(suffix): _unnamed(value, suffix) if isinstance(value, dict) else value
        for key, value in state.items()
    }


def as_device() -> Any:
    return mock.patch.object(parking, "_is_on_device", lambda _: True)
