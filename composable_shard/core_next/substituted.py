"""What a forward finds in the place of registered parameters and buffers.

``torch.func.functional_call`` puts other tensors into modules for one call. A group of which all
parameters are replaced by full tensors computes with them as an unsharded module would, and nothing
of it is gathered, cast or freed. Sharded ones are gathered as if they had been assigned, and freed
when the call is over.

A policy with ``buffer_dtype`` casts buffers for the time of forward. Without it the statistics of a
batch norm stay as precise as they are, and its weights, which torch demands in the same dtype, are
cast to theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core_next.storage import ShardedParam
from composable_shard.errors import ShardError

# Parameters that are not ours while a forward runs: ``torch.func.functional_call`` ----------------


def is_substituted(
    params: Sequence[ShardedParam], label: str, *, is_unsharded_registered: bool
) -> bool:
    """Return whether full tensors of the user stand in the places of all parameters of a group.

    Args:
        params: The parameters of the group.
        label: The group as messages call it.
        is_unsharded_registered: Which of their forms is registered otherwise.

    Raises:
        ShardError: If they do for some alone, or outside of ``torch.func.functional_call``, or if
            a parameter that is gathered has gone. On the ranks where.
    """
    others, sharded, gone = [], False, []
    for param in params:
        current = param.find_registered()
        if current is param.sharded:
            continue
        if current is None:
            if is_unsharded_registered:  # otherwise the gather refuses it, and tells the others
                gone.append(param.name)
            continue
        sharded = sharded or isinstance(current, DTensor)
        if is_unsharded_registered or not isinstance(current, DTensor):
            others.append(param.name)
    if gone:
        raise ShardError(
            f"Expected the parameters of {label} as fully_shard made them, got none for "
            f"{', '.join(map(repr, gone))}; change values by load_state_dict or in place"
        )
    if not others:
        return False
    if not _torch.in_functional_call():
        raise ShardError(
            f"Expected the parameters of {label} as fully_shard made them, got others for "
            f"{others}; change values by load_state_dict or in place"
        )
    if sharded or len(others) < len(params):
        raise ShardError(
            f"Expected torch.func.functional_call to replace all parameters of {label} by "
            f"plain tensors, or none, got {others}; pass all as full tensors, or call reshard() "
            "before passing sharded ones"
        )
    return True


# Buffers under mixed precision: cast during forward, kept in their own dtype otherwise ------------


class CastBuffers:
    """Puts floating-point buffers in another dtype in their places while forward runs.

    What forward wrote to such a buffer is copied back when it ends. Elements that it did not write
    keep their own precision.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype | None) -> None:
        self._modules = list(modules) if dtype is not None else []
        self._dtype = dtype
        self._replaced: list[tuple[nn.Module, str, torch.Tensor]] = []

    @property
    def may_substitute(self) -> bool:
        """Whether there is anything that it could ever replace."""
        return bool(self._modules)

    def put(self) -> None:
        """Put the cast buffers in."""
        casts: dict[int, torch.Tensor] = {}  # several modules may share a buffer
        for module in self._modules:
            for name, buffer in list(module._buffers.items()):
                if buffer is None or not buffer.is_floating_point() or buffer.dtype == self._dtype:
                    continue
                if id(buffer) not in casts:
                    casts[id(buffer)] = buffer.to(self._dtype)
                module._buffers[name] = casts[id(buffer)]
                self._replaced.append((module, name, buffer))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back, but where forward has taken them out or put others in."""
        for module, name, buffer in self._replaced:
            current = module._buffers.get(name)
            if current is None:
                continue
            if current.shape != buffer.shape:
                module._buffers[name] = current.to(buffer.dtype)
                continue
            # batch norm writes its statistics without moving their version counters
            written = current != buffer.to(self._dtype)
            buffer.copy_(torch.where(written, current.to(buffer.dtype), buffer))
            module._buffers[name] = buffer
        self._replaced.clear()


class PreciseNormWeights:
    """Gives batch norms their weights in the dtype of their running statistics while forward runs.

    Batch norm takes inputs of a lower precision than its statistics, but no weights of one.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._norms = [module for module in modules if _torch.is_batch_norm(module)]
        self._replaced: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]] = []

    @property
    def may_substitute(self) -> bool:
        """Whether there is anything that it could ever replace."""
        return bool(self._norms)

    def put(self) -> None:
        """Put the cast weights in; gradients reach the parameters through the cast."""
        for norm in self._norms:
            statistics = norm._buffers.get("running_mean")
            if statistics is None:
                continue
            for name, param in norm._parameters.items():
                if param is not None and param.dtype != statistics.dtype:
                    cast = param.to(statistics.dtype)
                    norm._parameters[name] = cast  # type: ignore[assignment]
                    self._replaced.append((norm, name, param, cast))

    def restore(self) -> None:
        """Register the parameters again, but where others have been registered meanwhile."""
        for norm, name, param, cast in self._replaced:
            if norm._parameters.get(name) is cast:
                norm._parameters[name] = param
        self._replaced.clear()
