"""What users may change about a group at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

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
    """

    divisor: float | None = None
    sums_only: bool = False
    all_reduces: bool = True
    hook: AllReduceHook | None = None


@dataclass
class GroupSettings:
    """What users may change at any time.

    Attributes:
        reshard_after_forward: ``None`` lets the place in the tree decide: all but the root. A
            number keeps the parameters sharded over groups of so many ranks.
        reshard_after_backward: Whether unsharded parameters are freed once they have gradients.
        requires_gradient_sync: Whether backward reduces gradients over the ranks.
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
    unshards_in_backward: bool = True
    max_reductions: int = 1
    forward_prefetch: list[ParamGroup] = field(default_factory=list)
    backward_prefetch: list[ParamGroup] = field(default_factory=list)
    reduction: ReductionSettings = field(default_factory=ReductionSettings)
