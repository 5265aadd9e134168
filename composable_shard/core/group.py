"""The parameters of one ``fully_shard`` call: sharded, being gathered, or unsharded.

A group gathers and frees its parameters as a whole. Its state is one value; a pending gather
exists nowhere but inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.bucket import GatherUnit, Transfer
from composable_shard.core.collectives import AllGather, choose_collectives
from composable_shard.core.freshness import Freshness
from composable_shard.core.gradients import GroupGradients
from composable_shard.core.optimizer_steps import watch_optimizer_steps
from composable_shard.core.param import ShardedParam
from composable_shard.core.streams import Pending
from composable_shard.core.units import GroupUnits
from composable_shard.errors import StaleParameterError
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy

if TYPE_CHECKING:
    from composable_shard.core.context import Context
    from composable_shard.core.hooks import Call


@dataclass(frozen=True)
class Sharded:
    """Only the shards exist; the sharded parameters are registered."""


@dataclass(frozen=True)
class Unsharding:
    """The gather has been launched; the sharded parameters are still registered."""

    pending: Pending
    transfers: tuple[Transfer, ...]
    version: int


@dataclass(frozen=True)
class Unsharded:
    """The unsharded parameters are valid and registered."""

    version: int


State = Sharded | Unsharding | Unsharded

_LEGAL: dict[type, tuple[type, ...]] = {
    Sharded: (Unsharding,),
    Unsharding: (Unsharded, Sharded),
    Unsharded: (Sharded,),
}


@dataclass
class GroupSettings:
    """What users may change at any time.

    Attributes:
        reshard_after_forward: ``None`` lets the place in the tree decide: all but the root.
        reshard_after_backward: Whether unsharded parameters are freed once they have gradients.
        requires_gradient_sync: Whether backward reduces gradients over the ranks.
        forward_prefetch: Groups to gather when this one runs forward, instead of the recorded one.
        backward_prefetch: The same for backward.
    """

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    forward_prefetch: list[ParamGroup] = field(default_factory=list)
    backward_prefetch: list[ParamGroup] = field(default_factory=list)


class ParamGroup:
    """One communication group: gathered together, reduced together.

    Attributes:
        modules: The modules that were passed to ``fully_shard``.
        units: Their parameters, in what is gathered as a whole.
        freshness: Whether unsharded parameters are still valid.
        settings: What users may change.
        context: What is shared with the other groups of the tree.
        name: Name of the modules within the root; for messages and traces.
        gradients: The way back.
        state: Sharded, being gathered or unsharded.
        calls: The calls of its modules that are under way, the innermost last.
        on_gradient: Called when a backward has accumulated into one of the parameters.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        params: Sequence[ShardedParam],
        units: list[GatherUnit],
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.modules = modules
        self.units = GroupUnits(params, units, mesh, policy)
        self.freshness = Freshness(self.units.params)
        self.settings = GroupSettings()
        self.context: Context
        self.name = ""
        self.state: State = Sharded()
        self.all_gather: AllGather
        self.all_gather, reduce_scatter = choose_collectives(mesh.group, mesh.device)
        self.gradients = GroupGradients(self.params, mesh, policy, reduce_scatter)
        self.calls: list[Call] = []
        self.on_gradient: Callable[[torch.Tensor], None]

    def set_tag(self, tag: int) -> None:
        """Let the group's messages carry two tags made of one on which the ranks have agreed."""
        self.all_gather.tag, self.gradients.reduce_scatter.tag = 2 * tag, 2 * tag + 1

    @property
    def label(self) -> str:
        """What messages call the group; that of the root has no name."""
        return f"group '{self.name}'" if self.name else "the root group"

    @property
    def params(self) -> list[ShardedParam]:
        """The parameters of the modules, but those of nested groups and ignored ones."""
        return self.units.params

    @property
    def mesh(self) -> ShardMesh:
        """Over which ranks they are sharded."""
        return self.units.mesh

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Which dtypes they have."""
        return self.units.policy

    # The state machine ----------------------------------------------------------------------

    def _move_to(self, state: State) -> None:
        assert type(state) in _LEGAL[type(self.state)], f"{self.state} -> {state}"
        self.state = state

    @property
    def is_unsharded(self) -> bool:
        return type(self.state) is Unsharded

    @property
    def is_trainable(self) -> bool:
        return any(param.sharded.requires_grad for param in self.params)

    def unshard(self) -> None:
        """Launch the gather unless it is under way, done and still valid.

        Collective: one all-gather launch of the group's bytes, or none.
        Memory: the unsharded parameters, in the compute dtype.
        """
        if not self.params:
            return
        state, in_backward = self.state, _torch.current_backward() != -1
        if in_backward:
            self._check_unchanged_since_forward()
        if not isinstance(state, Sharded):
            if in_backward or state.version == self.freshness.version():
                if not in_backward and self.is_unsharded:
                    self._follow_requires_grad()
                return
            self.reshard()
        self.context.agree()
        if self.units.settle(self.label):
            watch_optimizer_steps(self)
        transfers = self.units.start_gather()
        inputs = [tensor for transfer in transfers for tensor in transfer.inputs]
        outputs = [tensor for transfer in transfers for tensor in transfer.outputs]
        works = self.all_gather.launch(outputs, inputs, self.mesh.group) if inputs else []
        version = self.freshness.version()
        self._move_to(Unsharding(Pending(works, inputs), transfers, version))
        self.context.emit("all_gather", self)

    def wait_for_unshard(self) -> None:
        """Finish a launched gather and register the unsharded parameters."""
        state = self.state
        if not isinstance(state, Unsharding):
            return
        state.pending.wait()
        self.units.finish_gather(state.transfers)
        self._follow_requires_grad()
        for param in self.params:
            param.register_unsharded()
        self._move_to(Unsharded(state.version))
        self.context.emit("wait_for_all_gather", self)

    def reshard(self) -> None:
        """Free the unsharded parameters and register the sharded ones. Collective: none."""
        state = self.state
        if isinstance(state, Sharded):
            return
        if isinstance(state, Unsharding):
            state.pending.wait()
        else:
            for param in self.params:
                param.register_sharded()
        self.units.free()
        self._move_to(Sharded())
        self.context.emit("reshard", self)

    def _follow_requires_grad(self) -> None:
        for param in self.params:
            param.follow_requires_grad(self.on_gradient)

    def _check_unchanged_since_forward(self) -> None:
        uses_shards = isinstance(self.state, Sharded) or self.units.share_storage
        if uses_shards and self.freshness.changed_since_forward():
            raise StaleParameterError(
                f"Expected the parameters of {self.label} in backward as they were in "
                "forward, got parameters that were changed in between (an optimizer step?); run "
                "backward before changing them"
            )

    def __repr__(self) -> str:
        return f"ParamGroup({self.name or 'root'}, {len(self.params)} params, {self.state})"
