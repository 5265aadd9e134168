"""What users may change about a group at any time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from composable_shard.mesh import ShardMesh

if TYPE_CHECKING:
    from composable_shard.core.group import ParamGroup

AllReduceHook = Callable[[torch.Tensor], object]


@dataclass
class ReductionSettings:
    """How gradients are reduced.

    Attributes:
        divisor: What the sum over all ranks is divided by; their number if ``None``.
        sums_only: Whether collectives only ever sum, and division is done beside them.
        all_reduces: Whether a reduction goes on over the replicas.
        hook: Called with each flat buffer of reduced gradients.
        hook_stream: Where the hook runs; on the compute stream if ``None``.
    """

    divisor: float | None = None
    sums_only: bool = False
    all_reduces: bool = True
    hook: AllReduceHook | None = None
    hook_stream: torch.Stream | None = None


@dataclass
class GroupSettings:
    """What users may change at any time.

    Attributes:
        reshard_after_forward: ``None`` lets the place in the tree decide: all but the root. A
            number keeps the parameters sharded over groups of so many ranks.
        reshard_after_backward: Whether unsharded parameters are freed once they have gradients.
        requires_gradient_sync: Whether backward reduces gradients over the ranks.
        keeps_unsharded_storage: Whether the memory of unsharded parameters stays when they are
            resharded.
        finalizes_by_hand: Whether a call, and not the end of a backward, finishes the reductions;
            of the root's group alone.
        unshards_in_backward: Whether backward needs the parameters.
        max_reductions: Reductions launched and not waited for when another is launched; each holds
            its gradients.
        forward_prefetch: Groups to gather when this one runs forward, instead of the recorded one.
        backward_prefetch: The same for backward.
        reduction: How gradients are reduced.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    keeps_unsharded_storage: bool = False
    finalizes_by_hand: bool = False
    unshards_in_backward: bool = True
    max_reductions: int = 1
    forward_prefetch: list[ParamGroup] = field(default_factory=list)
    backward_prefetch: list[ParamGroup] = field(default_factory=list)
    reduction: ReductionSettings = field(default_factory=ReductionSettings)


def check_reshard(
    reshard_after_forward: bool | int | None, meshes: Iterable[ShardMesh]
) -> bool | int | None:
    """Return the choice for parameters over ``meshes``: ``1`` means False, all ranks mean True.

    Raises:
        ValueError: If it is neither a bool nor a number that divides that of the shards.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if not isinstance(reshard_after_forward, int):
        raise ValueError(
            "Expected reshard_after_forward to be True, False, a number of ranks or None, got "
            f"{type(reshard_after_forward).__name__}: {reshard_after_forward!r}"
        )
    sizes = sorted({mesh.num_shards for mesh in meshes})
    for num_shards in sizes:
        if reshard_after_forward < 1 or num_shards % reshard_after_forward:
            raise ValueError(
                "Expected reshard_after_forward to divide the number of shards, got "
                f"{reshard_after_forward} for {num_shards} shards"
            )
    if reshard_after_forward == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps all parameters on every rank after forward; "
            "pass False to say so",
            stacklevel=3,
        )
        return False
    return True if sizes == [reshard_after_forward] else reshard_after_forward
