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

from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.calls import Substitution
from composable_shard.core.group import ParamGroup
from composable_shard.core.param import ShardedParam
from composable_shard.errors import ShardError

# Parameters that are not ours while a forward runs: ``torch.func.functional_call`` ----------------


def find_substitution(group: ParamGroup) -> Substitution:
    """Tell what tensors of somebody else stand for the parameters of ``group``.

    Raises:
        ShardError: If they do for some, or stay there when the call is over, or if none stand for
            some that are gathered. On the ranks where.
    """
    is_unsharded, sharded = group.shows_unsharded, False
    if group.units.all.are_registered(unsharded=is_unsharded):
        return Substitution.NOTHING
    others, gone = [], []
    for param in group.params:
        form = param.unsharded if is_unsharded else param.sharded
        current = param.found(form)
        if current is form:
            continue
        if current is None:
            if is_unsharded:  # else the gather that follows refuses it, and tells the other ranks
                gone.append(param.name)
            continue
        if current is param.sharded or current is param.unsharded:
            _register(param, is_unsharded)  # a call that failed has put back what it had found
            continue
        sharded = sharded or isinstance(current, DTensor)
        if is_unsharded or not isinstance(current, DTensor):
            others.append(param.name)
    if gone:
        raise ShardError(
            f"Expected the parameters of {group.label} as fully_shard made them, got none for "
            f"{', '.join(map(repr, gone))}; change values by load_state_dict or in place"
        )
    if not others:
        return (
            Substitution.SHARDED
            if sharded and _torch.in_functional_call()
            else Substitution.NOTHING
        )
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
    return Substitution.FULL


def _register(param: ShardedParam, is_unsharded: bool) -> None:
    if is_unsharded:
        param.register_unsharded()
    else:
        param.register_sharded()


def holds_shards(group: ParamGroup) -> bool:
    """Tell whether sharded parameters, ours or assigned ones, stand in all places of ``group``."""
    return group.units.all.are_registered(unsharded=False) or all(
        isinstance(param.found(param.sharded), DTensor) for param in group.params
    )
