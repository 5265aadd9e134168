"""Parameters that are not ours while a forward runs: ``torch.func.functional_call``.

It puts other tensors into the modules for one call. A group of which all parameters are replaced by
full tensors computes with them as an unsharded module would, and nothing of it is gathered, cast or
freed. Sharded ones are gathered as if they had been assigned, and freed when the call is over.
"""

from __future__ import annotations

import enum

from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.params.param import ShardedParam
from composable_shard.errors import ShardError


class Lent(enum.Enum):
    """What stands in the places of a group's parameters while a forward runs."""

    NOTHING = enum.auto()
    FULL = enum.auto()
    SHARDED = enum.auto()


def find_lent(group: ParamGroup) -> Lent:
    """Tell what tensors of somebody else stand for the parameters of ``group``.

    Raises:
        ShardError: If they do for some, or stay there when the call is over. On the ranks where.
    """
    is_unsharded, sharded = group.shows_unsharded, False
    if group.units.all.are_registered(unsharded=is_unsharded):
        return Lent.NOTHING
    others = []
    for param in group.params:
        current = param.slots[0].get()
        if current is None or current is (param.unsharded if is_unsharded else param.sharded):
            continue
        if current is param.sharded or current is param.unsharded:
            _register(param, is_unsharded)  # a call that failed has put back what it had found
            continue
        sharded = sharded or isinstance(current, DTensor)
        if is_unsharded or not isinstance(current, DTensor):
            others.append(param.name)
    if not others:
        return Lent.SHARDED if sharded and _torch.in_functional_call() else Lent.NOTHING
    if not _torch.in_functional_call():
        raise ShardError(
            f"Expected the parameters of {group.label} as fully_shard made them, got others for "
            f"{others}; change values by load_state_dict or in place"
        )
    if sharded or len(others) < len(group.params):
        raise ShardError(
            f"Expected torch.func.functional_call to replace all parameters of {group.label} by "
            f"plain tensors, or none, got {others}; pass all as full tensors, or call reshard() "
            "before passing sharded ones"
        )
    return Lent.FULL


def _register(param: ShardedParam, is_unsharded: bool) -> None:
    if is_unsharded:
        param.register_unsharded()
    else:
        param.register_sharded()


def holds_shards(group: ParamGroup) -> bool:
    """Tell whether sharded parameters, ours or assigned ones, stand in all places of ``group``."""
    return group.units.all.are_registered(unsharded=False) or all(
        isinstance(param.slots[0].get(), DTensor) for param in group.params
    )
