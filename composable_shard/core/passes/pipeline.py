"""What the pipeline schedules of torch do with a sharded module.

A schedule runs the backwards of all microbatches without sync, some of them in two halves (first
the gradients of inputs, later those of weights, both by ``torch.autograd.grad``), and then has what
they left reduced: by ``FSDPModule.finalize_backward`` since torch 2.15, before by asking
``torch.distributed.fsdp.fully_shard.state(module)``.
"""

from __future__ import annotations

from collections.abc import Iterable

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.errors import ShardError


def loses_weights(group: ParamGroup) -> bool:
    """Tell whether this is a first half whose second half will not find the weights of ``group``.

    The schedule has noted which parameters are registered, and the second half differentiates those
    alone. If they are the sharded ones, which are not in the graph, it computes nothing.
    """
    settings = group.settings
    if settings.requires_gradient_sync or settings.reshard_after_backward:
        return False  # a schedule sets both
    if group.is_unsharded and not group.shows_sharded:
        return False
    if not group.is_trainable or _torch.num_to_run(group.units.all.accumulators):
        return False
    markers = [marker.node for marker in group.input_markers]
    return _torch.is_ahead(group.units.all.accumulators, before=markers)


def refuse_lost_weights(groups: Iterable[ParamGroup]) -> None:
    """Raise for groups of which backwards in halves have lost gradients.

    Raises:
        ShardError: If there are any. On all ranks of the stage.
    """
    for group in groups:
        raise ShardError(
            f"Expected gradients of {group.label} after the microbatches of a pipeline "
            "stage, got none; a schedule that splits backward into inputs and weights "
            "needs set_reshard_after_forward(False) on the stage"
        )


class PipelineState:
    """Reduces the gradients of a pipeline stage when its schedule says so.

    The schedule goes through all states of a context and their groups first; here there are none,
    and one call does everything.
    """

    all_states: tuple[()] = ()
    _group: ParamGroup

    def __init__(self, group: ParamGroup) -> None:
        self.__dict__["_group"] = group  # the subclass refuses to be written to

    @property
    def _state_ctx(self) -> PipelineState:
        return self

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what all microbatches left, wait, and free.

        Raises:
            ShardError: See :func:`refuse_lost_weights`.

        Collective: the reductions of a backward.
        """
        self._group.context.backward.settle()
