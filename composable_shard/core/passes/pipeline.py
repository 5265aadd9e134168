"""What the pipeline schedules of torch ask a sharded module for.

A schedule runs the backwards of all microbatches without sync, some of them in two halves (first
the gradients of inputs, later those of weights, both by ``torch.autograd.grad``), and then asks
``torch.distributed.fsdp.fully_shard.state(module)`` to reduce what they left. That function looks
into a dict of the module; ours answers with an object that does it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.params.param import ShardedParam
from composable_shard.errors import ShardError


class PipelineState:
    """Reduces the gradients of a pipeline stage when its schedule says so.

    The schedule goes through all states of a context and their groups first; here there are none,
    and one call does everything.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        self._state_ctx = self
        self.all_states: tuple[()] = ()

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what all microbatches left, wait, and free.

        Raises:
            ShardError: If a group that backwards went through has no gradient at all. On all ranks
                of the stage.

        Collective: the reductions of a backward.
        """
        context = self._group.context
        for group in context.backward.owing:
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


class _States(dict[Any, Any]):
    """Answers for ``fully_shard`` of torch, and is an ordinary dict to all others."""

    def __init__(self, group: ParamGroup) -> None:
        super().__init__()
        self._state = PipelineState(group)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state that a function of torch has given the module."""
        if key not in self and getattr(key, "__name__", None) == "fully_shard":
            return self._state
        return super().get(key, default)


def answer_schedules(module: nn.Module, group: ParamGroup) -> None:
    """Let the pipeline schedules of torch find what reduces the gradients of ``module``."""
    module.__dict__[_torch.COMPOSABLE_STATE] = _States(group)
