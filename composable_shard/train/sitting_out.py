"""Taking part in what other ranks gather and reduce for a module that this rank does not run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.arguments import check_module
from composable_shard.core.calls import Imitated
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.hooks import groups_in, hooks_of
from composable_shard.core.order import Called
from composable_shard.core.root import context_of
from composable_shard.errors import ShardError

Notes = dict[int, dict[Any, Any]]


def sit_out(module: nn.Module) -> torch.Tensor:
    """Take part in a call of a module without computing anything.

    Ranks gather and reduce together. Where one of them has nothing for a module that others run,
    images for a vision tower for example, it calls this in the place of the module, with gradients
    or without as they do. It sends what it has of the parameters, and in backward zeros for their
    gradients. A group for which all ranks sit out gets gradients of ``None``.

    It goes through the calls of sharded modules inside as the last forward of this rank did, or
    another one that was sat out. Before the first one, it takes those inside to run once each, in
    the order in which they are registered, and without activation checkpoints; a module that does
    otherwise is first run once by all ranks, which may be under ``torch.no_grad()`` if it has no
    checkpoints.

    Args:
        module: A sharded module, or one with sharded ones inside.

    Returns:
        A zero. Where gradients are enabled and there is anything to train, it has a backward that
        takes part in that of the other ranks: add it to the loss, or, where there is no other loss,
        run its backward.

    Raises:
        TypeError: If ``module`` is no module.
        ShardError: If no module inside or around it is sharded, or if it is not sharded itself and
            the last forward has called something inside it several times.

    Collective: what a forward of the module does.
    Memory: what a forward of the module takes for its parameters; no activations.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = fully_shard(nn.Linear(4, 4))
        ...     zero = sit_out(model)
        ...     zero.backward()
        >>> zero
        tensor(0., grad_fn=<CloneBackward0>)
    """
    calls = _calls_like(module)
    zero = torch.zeros((), device=calls[0].group.mesh.device if calls else None)
    if torch.is_grad_enabled() and any(_may_train(called) for called in calls):
        zero.requires_grad_()
    notes: Notes = {}
    for called in calls:
        # Of one each, so that a backward comes to the calls in their reverse order.
        zero = zero.clone()
        _take_part(called, zero, notes if torch.is_grad_enabled() else None)
    return zero


def _take_part(called: Called[ParamGroup], zero: torch.Tensor, notes: Notes | None) -> None:
    """Take part in a call and in those inside of it, and in the backward of what this begins.

    Args:
        called: A call like it.
        zero: What stands for its output.
        notes: What stands for each activation checkpoint; ``None`` if there will be no backward.
    """
    module: Any = called.module
    hooks, outer = hooks_of(module), context_of(called.group).forward.run
    around = []
    if notes is not None and called.checkpoint is not None:
        around = [notes.setdefault(called.checkpoint, {})]
    imitated = Imitated(notes is not None and _may_train(called), around)
    with torch.set_grad_enabled(torch.is_grad_enabled() and (called.has_grad or not around)):
        try:
            call = hooks.imitate(module, imitated)
            run = context_of(called.group).forward.run
            for inner in called.inner:
                _take_part(inner, zero, notes)
        except Exception:
            hooks.leave(module, None, failed=True)
            raise
        hooks.leave(module, None, failed=False)
    if zero.requires_grad and call is not None and run is not None and run is not outer:
        zero.register_hook(partial(hooks.come_past, call.forward, run.graph))


_torch.count_as_module_call(_take_part)


def _may_train(called: Called[ParamGroup]) -> bool:
    """Tell whether outputs of a call may get a gradient."""
    if called.is_watched or called.group.is_trainable:
        return True
    return any(_may_train(inner) for inner in called.inner)


# Which calls to take part in ----------------------------------------------------------------------


def _calls_like(module: nn.Module) -> Sequence[Called[ParamGroup]]:
    """Return the calls of groups that one of ``module`` makes, as far as is known.

    Raises:
        TypeError: See sit_out.
        ShardError: See sit_out.
    """
    check_module("module", module)
    within = list(module.modules())
    groups = groups_in(within)
    if not groups:
        raise ShardError(
            f"Expected a module to sit out with sharded modules, got none in "
            f"{type(module).__name__}; apply fully_shard to it, or call it on all ranks"
        )
    if group_of(module) is not None:
        forward = context_of(groups[0]).forward
        calls = forward.called_last({module}) or _expected(module)
        return [calls[min(forward.num_called(module), len(calls) - 1)]]
    expected, last = _expected(module), list[Called[ParamGroup]]()
    for tree in dict.fromkeys(map(context_of, groups)):
        unknown = [one for one in expected if context_of(one.group) is tree]
        last += tree.forward.called_last(set(within)) or unknown
    called = [one.module for one in last]
    if len(set(called)) < len(called):
        raise ShardError(
            f"Expected a module to sit out that is sharded itself, got {type(module).__name__} "
            "whose last forward has called a sharded module inside several times; call sit_out() "
            "for each of these calls"
        )
    return last


def _expected(module: nn.Module) -> list[Called[ParamGroup]]:
    """Return what to expect of a module that this rank has never run."""
    inner = [called for child in module.children() for called in _expected(child)]
    group = group_of(module)
    return inner if group is None else [Called(group, module, inner)]
