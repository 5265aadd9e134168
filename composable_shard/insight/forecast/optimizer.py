"""What an optimizer keeps for the shards of one rank, and what its step needs besides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.params.param import ShardedParam
from composable_shard.insight.forecast.live import LiveBytes

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of one rank.

    Attributes:
        state: What it keeps from step to step.
        besides: What a step needs besides at its peak.
    """

    state: int
    besides: int


def optimizer_bytes(
    factory: OptimizerFactory, shards: Sequence[nn.Parameter], *, at_once: bool
) -> OptimizerBytes:
    """Let an optimizer step on shards without memory.

    Args:
        factory: Makes the optimizer.
        shards: Parameters of the shapes that one rank holds, without memory.
        at_once: Whether it takes all parameters at once, as torch's own do on an accelerator, if
            the user has not chosen.

    Raises:
        ValueError: If the optimizer asks for values.
    """
    optimizer = factory(shards)
    for group in optimizer.param_groups:
        if at_once and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    live = LiveBytes()
    live.ignore(shards)
    for shard in shards:
        shard.grad = torch.empty_like(shard)
    live.ignore(shard.grad for shard in shards if shard.grad is not None)
    try:
        with live:
            optimizer.step()
            state = live.now.activations
            live.restart()
            optimizer.step()
    except _torch.ReadsValues as error:
        raise ValueError(
            f"Expected an optimizer whose step reads no values, got {type(optimizer).__name__}; "
            "pass another one with as much state, or optimizer=None to leave it out"
        ) from error
    return OptimizerBytes(state, live.peak.activations - state)


def shards_of(params: Sequence[ShardedParam], num_shards: int) -> list[nn.Parameter]:
    """Return the shards of the first of ``num_shards`` ranks, which has the most rows."""
    made = []
    for param in params:
        shape, dim = list(param.form.shape), param.form.dim
        if dim is not None:
            shape[dim] = -(-shape[dim] // num_shards)
        made.append(nn.Parameter(torch.empty(shape, dtype=param.local.dtype)))
    return made
