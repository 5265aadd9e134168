"""The state of a sharded module that torch's functions and tensor subclasses read.

Schedules call ``torch.distributed.fsdp.fully_shard.state(module)``, which looks into a dict of the
module. Some tensor subclasses (those of Transformer Engine) read the private state of
``fully_shard`` in ``fsdp_pre_all_gather``, to send only the tensors that a forward or a backward
reads: they call ``module._get_fsdp_state()`` on the nearest sharded module, which they look up in
torch's list of modules with a state. This module provides that state, read-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from torch import nn

from composable_shard import _torch
from composable_shard.core.group import ParamGroup, State
from composable_shard.errors import TorchStateError


class TrainingState(Enum):
    """The phase of a group; equal to the member of the same name in torch's enum."""

    FORWARD = auto()
    PRE_BACKWARD = auto()
    IDLE = auto()

    def __eq__(self, other: object) -> bool:
        names = type(self).__name__, self.name
        return isinstance(other, Enum) and (type(other).__name__, other.name) == names

    def __hash__(self) -> int:
        return hash(self.name)


class TorchState:
    """The readable part of torch's ``FSDPState`` and of its ``FSDPParamGroup``, one object here.

    Reading another attribute, or setting any, raises. ``_reshard_after_forward`` tells a subclass
    whether backward gathers again, so that forward may gather less. It is False, since the last
    group of forward may stay unsharded for backward. Pipeline schedules of torch before 2.15 loop
    over the states of a context and their groups to reduce the gradients of a stage. Here the
    context lists no states, and one call reduces everything.
    """

    all_states: tuple[()] = ()
    _reshard_after_forward = False
    _group: ParamGroup

    def __init__(self, group: ParamGroup) -> None:
        self.__dict__["_group"] = group

    def __getattr__(self, name: str) -> Any:
        # A copy being made has no attributes yet.
        label = self._group.label if "_group" in self.__dict__ else "a sharded module"
        raise TorchStateError(
            "Expected to read only _training_state, _fsdp_param_group, _fsdp_param_groups, "
            "_comm_ctx, _reshard_after_forward, is_unsharded of torch's private state of "
            f"{label}, got {name}; use the methods of composable_shard.FSDPModule"
        )

    def __setattr__(self, name: str, value: object) -> None:
        self.__getattr__(name)

    @property
    def _training_state(self) -> TrainingState:
        if _torch.current_backward() != -1:
            return TrainingState.PRE_BACKWARD
        is_running = bool(self._group.tree.call_stack)
        return TrainingState.FORWARD if is_running else TrainingState.IDLE

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are valid."""
        return self._group.state is State.UNSHARDED

    @property
    def _fsdp_param_group(self) -> TorchState | None:
        return self if self._group.params else None

    @property
    def _fsdp_param_groups(self) -> list[TorchState]:
        return [self] if self._group.params else []

    @property
    def _state_ctx(self) -> TorchState:
        return self

    @property
    def _comm_ctx(self) -> object:
        """The same object for trees that wait for each other's reductions."""
        return self._group.tree.in_flight

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the unsynced gradients of all microbatches, and wait for the reductions.

        Collective: the reductions of a backward.
        """
        tree = self._group.tree
        tree.in_flight.finish()
        tree.launch_reductions()
        tree.in_flight.finish()


class _States(dict[Any, Any]):
    """A dict that returns our state for torch's ``fully_shard``.

    Args:
        state: Our state.
        others: The entries of other functions.
    """

    def __init__(self, state: TorchState, others: Mapping[Any, Any]) -> None:
        super().__init__(others)
        self.state = state

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the module's state under ``key``, a composable function of torch."""
        if key not in self and getattr(key, "__name__", None) == "fully_shard":
            return self.state
        return super().get(key, default)


def answer_torch(module: nn.Module, group: ParamGroup) -> None:
    """Let torch find a state of ``module``, and see that it is sharded."""
    others = module.__dict__.get(_torch.COMPOSABLE_STATE, {})
    module.__dict__[_torch.COMPOSABLE_STATE] = _States(TorchState(group), others)
    _torch.add_composable_function(module, "fully_shard")
    _torch.list_module_state(module, torch_state(module))


def torch_state(module: nn.Module) -> TorchState:
    """Return the state of a sharded module."""
    states: _States = module.__dict__[_torch.COMPOSABLE_STATE]
    return states.state
