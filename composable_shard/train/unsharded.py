"""Full parameters for a while: to look at, to edit, to save."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import nn

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.passes.hooks import owner_of
from composable_shard.errors import ShardError
from composable_shard.module import group_of
from composable_shard.train.full_values import FullParams


@contextlib.contextmanager
def unsharded(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Let a module hold full, plain parameters within this context.

    They have the original dtype, not that of compute, and are copies: edits (in place, by
    ``param.data``, by loading a state dict or by registering another parameter of the same shape)
    reach the shards at the end, and what is the same is not written. If the context is left by an
    exception, nothing is written back. Optimizer steps within change the shards, which the
    writeback then overwrites. ``state_dict()`` within gives full tensors.

    Forward within is that of the plain module, for ``torch.no_grad()`` only. All ranks must enter
    and leave together.

    Args:
        module: A module that is sharded, has sharded modules below, or lies in one.
        recurse: Whether nested sharded modules have full parameters too.
        writeback: Whether each rank's edits are copied into its shards; all ranks must make the
            same ones. With ``rank0_only``, those of the first rank are sent to all.
        rank0_only: Whether only the first rank of a parameter's mesh, which is rank 0 for a mesh
            of all ranks, gets full parameters; the others keep their sharded ones.
        offload_to_cpu: Whether full parameters and gradients are on the CPU.
        with_grads: Whether full parameters have full gradients, and edits of those are written
            back too. What is accumulated without sync (``Partial``) is seen as what it stands for,
            and is reduced afterwards if there is a writeback; all ranks must have the same ones.

    Raises:
        TypeError: If ``module`` is not a module.
        ShardError: In a forward or backward, or within another such context of the same
            parameters, on all ranks alike; for a forward with gradients within.
        ValueError: If a parameter has another shape at the end; with ``rank0_only`` on all ranks.
        MaterializationError: If parameters are on the meta device.

    Collective: one all-gather of each parameter, and of each gradient with ``with_grads``; none for
        the writeback, but with ``rank0_only`` one broadcast of each.
    Memory: all full parameters (and gradients) at a time, on the first rank alone with
        ``rank0_only``; besides, one of them on the device of compute.
    Source: ``FullyShardedDataParallel.summon_full_params`` (FSDP1).

    Example:
        >>> import torch
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def double():
        ...     layer = fully_shard(nn.Linear(2, 2, bias=False))
        ...     with unsharded(layer), torch.no_grad():
        ...         layer.weight.fill_(1).mul_(2)
        ...         shape = layer.weight.shape
        ...     return shape, layer.weight.to_local().tolist()
        >>> run_threads(double, 2)[1]
        (torch.Size([2, 2]), [[2.0, 2.0]])
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected module to be an nn.Module, got {type(module).__name__}")
    modules = list(_opened_modules(module, recurse))
    groups = {group: None for m in modules if (group := owner_of(m)) is not None}
    _check_can_open(groups)
    for group in groups:
        group.reshard()
        group.context.before_gather()
    params = FullParams(
        modules, rank0_only=rank0_only, to_cpu=offload_to_cpu, with_grads=with_grads
    )
    with _opened(groups):
        try:
            params.register_full()
            yield
            edited = params.registered()
        finally:
            params.register_sharded()
    if writeback:
        params.write_back(edited)


@contextlib.contextmanager
def _opened(groups: Collection[ParamGroup]) -> Iterator[None]:
    for group in groups:
        group.context.opened.add(group)
    try:
        yield
    finally:
        for group in groups:
            group.context.opened.discard(group)


def _opened_modules(module: nn.Module, recurse: bool) -> Iterator[nn.Module]:
    """Yield the modules below, but those of nested groups unless ``recurse``."""
    if recurse:
        yield from module.modules()
        return
    own, seen = owner_of(module), set[nn.Module]()
    left = [module]
    while left:
        current = left.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        children = [c for c in current.children() if group_of(c) is None or group_of(c) is own]
        left += reversed(children)


def _check_can_open(groups: Collection[ParamGroup]) -> None:
    for group in groups:
        moment = (
            "backward"
            if _torch.current_backward() != -1
            else "forward"
            if group.context.forward.is_running
            else None
        )
        if moment is not None:
            raise ShardError(
                f"Expected unsharded() outside of forward and backward, got it in a {moment} of "
                f"{group.label}; use it between iterations"
            )
        if group in group.context.opened:
            raise ShardError(
                f"Expected one unsharded() of {group.label} at a time, got one within another; "
                "the parameters are full already"
            )
