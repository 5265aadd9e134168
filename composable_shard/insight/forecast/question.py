"""What is asked of ``estimate``, checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.errors import ShardError
from composable_shard.insight.forecast.clock import Speeds
from composable_shard.insight.forecast.optimizer import OptimizerFactory

NEIGHBOURS = 2
"""From how many ranks the rehearsing ones gather, for any number of neighbours."""

Shard = Callable[[nn.Module, DeviceMesh], object]
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Ranks:
    """A mesh of ``num_replicas`` times ``num_shards`` ranks.

    Attributes:
        num_replicas: Ranks that hold the same shards.
        num_shards: Ranks that share each parameter.
        is_hybrid: Whether the mesh has an axis for the replicas.
        num_neighbours: What ``reshard_after_forward`` is, if it is a number of ranks between.
    """

    num_replicas: int
    num_shards: int
    is_hybrid: bool
    num_neighbours: int | None

    @property
    def rehearsing(self) -> tuple[int, int]:
        """Replicas and shards of the smallest mesh on which a step takes the same course."""
        shards = min(self.num_shards, 2) if self.num_neighbours is None else 2 * NEIGHBOURS
        return min(self.num_replicas, 2), shards


@dataclass(frozen=True)
class Question:
    """How to build, shard and train the model.

    Attributes:
        build_model: Makes it.
        shard: Applies ``fully_shard`` to it.
        batch: What one rank's forward takes, or a function that makes it.
        loss: Makes a scalar of the output and the batch.
        optimizer: Makes the optimizer.
        is_accelerator: Whether it is for an accelerator rather than the CPU.
    """

    build_model: Callable[[], nn.Module]
    shard: Shard
    batch: Any
    loss: Loss
    optimizer: OptimizerFactory | None
    is_accelerator: bool


def checked_ranks(mesh_shape: object, reshard_after_forward: Any) -> Ranks:
    """Return the mesh that is asked for.

    Raises:
        ValueError: If it is no number of ranks, nor ``(replicas, shards)``, or cannot be divided.
    """
    shape: Any = (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape
    is_shape = isinstance(shape, (tuple, list)) and len(shape) in (1, 2)
    if not is_shape or not all(map(_is_count, shape)):
        raise ValueError(
            f"Expected mesh_shape to be a number of ranks or (replicas, shards), got {mesh_shape!r}"
        )
    num_shards = shape[-1]
    neighbours = reshard_after_forward if _is_count(reshard_after_forward) else None
    if neighbours is not None and num_shards % neighbours:
        raise ValueError(
            "Expected reshard_after_forward to divide the number of shards, got "
            f"{neighbours} for {num_shards} shards"
        )
    if neighbours in (1, num_shards):
        neighbours = None
    is_hybrid = len(shape) == 2
    return Ranks(shape[0] if is_hybrid else 1, num_shards, is_hybrid, neighbours)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def checked_speeds(
    flops: float | None,
    bandwidth: float | None,
    replica_bandwidth: float | None,
    latency: float,
) -> Speeds | None:
    """Return the speeds, ``None`` if none are given.

    Raises:
        ValueError: If only some are given, or one is not positive.
    """
    if flops is None and bandwidth is None:
        return None
    if flops is None or bandwidth is None:
        raise ValueError(
            "Expected both flops and bandwidth, or neither, got "
            f"flops={flops!r} and bandwidth={bandwidth!r}"
        )
    other = bandwidth if replica_bandwidth is None else replica_bandwidth
    if min(flops, bandwidth, other) <= 0 or latency < 0:
        raise ValueError(
            "Expected positive speeds and a latency of at least 0, got "
            f"flops={flops!r}, bandwidth={bandwidth!r}, replica_bandwidth={other!r}, "
            f"latency={latency!r}"
        )
    return Speeds(float(flops), float(bandwidth), float(other), float(latency))


def rehearsing_arguments(ranks: Ranks, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``fully_shard`` that mean on few ranks what they mean on many."""
    reshard = kwargs.get("reshard_after_forward")
    if not _is_count(reshard):
        return dict(kwargs)
    if ranks.num_neighbours is not None:
        meant: bool | int = NEIGHBOURS
    else:
        meant = reshard == ranks.num_shards and ranks.num_shards > 1
    return {**kwargs, "reshard_after_forward": meant}


def check_no_process_group() -> None:
    """Raise ``ShardError`` if this process has a process group, which must not be disturbed."""
    if dist.is_initialized():
        raise ShardError(
            "Expected estimate in a process without a process group, got one of backend "
            f"'{dist.get_backend()}'; call it before init_process_group, or in a process of its own"
        )


def default_loss(output: Any, batch: Any) -> torch.Tensor:
    """Take the ``loss`` of an output that has one, else the sum of a tensor.

    Raises:
        TypeError: If it is neither.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            "Expected forward to return a tensor, or an output with a loss, got "
            f"{type(output).__name__}; pass loss=, a function of the output and the batch"
        )
    return output.sum()
