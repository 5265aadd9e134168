"""What the pipeline schedules of torch ask the state of a sharded module for.

A schedule runs the backwards of all microbatches without sync, some of them in two halves (first
the gradients of inputs, later those of weights, both by ``torch.autograd.grad``), and then asks
``torch.distributed.fsdp.fully_shard.state(module)`` to reduce what they left.
"""

from __future__ import annotations

from composable_shard.core.group import ParamGroup
from composable_shard.core.params.param import ShardedParam
from composable_shard.errors import ShardError


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
            ShardError: If a group that backwards went through has no gradient at all. On all ranks
                of the stage.

        Collective: the reductions of a backward.
        """
        context = self._group.context
        for group in reversed(context.backward.reductions.unsynced):
            if group.is_trainable and not any(map(_has_gradient, group.params)):
                raise ShardError(
                    f"Expected gradients of {group.label} after the microbatches of a pipeline "
                    "stage, got none; a schedule that splits backward into inputs and weights "
                    "needs set_reshard_after_forward(False) on the stage"
                )
        context.backward.settle()


def _has_gradient(param: ShardedParam) -> bool:
    """Tell whether a parameter has a gradient in any state."""
    full = param.unsharded
    return param.sharded.grad is not None or (full is not None and full.grad is not None)
