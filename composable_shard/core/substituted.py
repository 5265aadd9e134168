"""Whether ``torch.func.functional_call`` has put full tensors in the places of parameters.

A group of which all parameters are replaced by full tensors computes with them as an unsharded
module would: nothing is gathered, cast or freed. Imports storage.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.storage import ShardedParam
from composable_shard.errors import ShardError


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
