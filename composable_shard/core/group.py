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
from composable_shard.core.bucket import GatherUnit, ParamBucket, Transfer
from composable_shard.core.collectives import AllGather, choose_collectives
from composable_shard.core.extension import ExtensionGather, agree_formats, needs_extension
from composable_shard.core.gradients import GroupGradients
from composable_shard.core.optimizer_steps import watch_optimizer_steps
from composable_shard.core.param import ShardedParam
from composable_shard.core.streams import Pending
from composable_shard.errors import MaterializationError, StaleParameterError
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy

if TYPE_CHECKING:
    from composable_shard.core.context import Context


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
        params: Their parameters, but those of nested groups and ignored ones.
        mesh: Where they are sharded.
        policy: Which dtypes they have.
        settings: What users may change.
        context: What is shared with the other groups of the tree.
        name: Name of the modules within the root; for messages and traces.
        gradients: The way back.
        state: Sharded, being gathered or unsharded.
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
        self.params = list(params)
        self.mesh = mesh
        self.policy = policy
        self.settings = GroupSettings()
        self.context: Context
        self.name = ""
        self.state: State = Sharded()
        self.all_gather: AllGather
        self.all_gather, reduce_scatter = choose_collectives(mesh.group, mesh.device)
        self.gradients = GroupGradients(self.params, mesh, policy, reduce_scatter)
        self.on_gradient: Callable[[torch.Tensor], None]
        self._units = units
        self._settled = False
        self._num_optimizer_steps = 0
        self._forward_version: int | None = None

    def set_tag(self, tag: int) -> None:
        """Let the group's messages carry ``tag``, on which the ranks have agreed."""
        self.all_gather.tag = self.gradients.reduce_scatter.tag = tag

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
            if in_backward or state.version == self.version():
                return
            self.reshard()
        self.context.agree()
        self._settle()
        extensions = [unit for unit in self._units if isinstance(unit, ExtensionGather)]
        if extensions:
            agree_formats(extensions)
        transfers = tuple(unit.start_gather() for unit in self._units)
        inputs = [tensor for transfer in transfers for tensor in transfer.inputs]
        outputs = [tensor for transfer in transfers for tensor in transfer.outputs]
        works = self.all_gather.launch(outputs, inputs, self.mesh.group) if inputs else []
        self._move_to(Unsharding(Pending(works, inputs), transfers, self.version()))
        self.context.emit("all_gather", self)

    def wait_for_unshard(self) -> None:
        """Finish a launched gather and register the unsharded parameters."""
        state = self.state
        if not isinstance(state, Unsharding):
            return
        state.pending.wait()
        for unit, transfer in zip(self._units, state.transfers, strict=True):
            unit.finish_gather(transfer)
        self._register_unsharded()
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
        for unit in self._units:
            unit.free()
        self._move_to(Sharded())
        self.context.emit("reshard", self)

    def _register_unsharded(self) -> None:
        for unit in self._units:
            if isinstance(unit, ParamBucket) and unit.params[0].unsharded is None:
                unit.create_unsharded_params()
        for param in self.params:
            param.follow_requires_grad(self.on_gradient)
            param.register_unsharded()

    # Freshness ------------------------------------------------------------------------------

    def version(self) -> int:
        """Return a number that grows whenever the sharded parameters change in place.

        Fused and foreach optimizers change a DTensor without moving any version counter, so
        optimizer steps are counted besides.
        """
        version = self._num_optimizer_steps
        for param in self.params:
            version += param.version()
        return version

    def note_optimizer_step(self) -> None:
        self._num_optimizer_steps += 1

    def note_forward(self) -> None:
        """Remember with which parameters a forward ran whose backward is to come."""
        self._forward_version = self.version()

    def forget_forward(self) -> None:
        self._forward_version = None

    def _check_unchanged_since_forward(self) -> None:
        uses_shards = isinstance(self.state, Sharded) or any(
            isinstance(unit, ParamBucket) and unit.shares_storage for unit in self._units
        )
        if uses_shards and self._forward_version not in (None, self.version()):
            raise StaleParameterError(
                f"Expected the parameters of group '{self.name}' in backward as they were in "
                "forward, got parameters that were changed in between (an optimizer step?); run "
                "backward before changing them"
            )

    def _settle(self) -> None:
        """Take over parameters that were loaded, moved or extended since the last gather."""
        intact = all(param.is_intact() for param in self.params)
        if self._settled and intact:
            return
        if self._settled and _torch.current_backward() != -1:
            raise StaleParameterError(
                f"Expected the parameters of group '{self.name}' in backward as they were in "
                "forward, got replaced ones; run backward before replacing them"
            )
        bucketed = {
            id(param)
            for unit in self._units
            if isinstance(unit, ParamBucket)
            for param in unit.params
        }
        extended = any(id(p) in bucketed and needs_extension(p.local) for p in self.params)
        if not intact or extended:
            self._rebuild()
        self._check_materialized()
        watch_optimizer_steps(self)
        self._settled = True

    def _rebuild(self) -> None:
        for param in self.params:
            param.recover()
        self._check_materialized()
        self._units, locals_ = build_units(
            self.params, [param.local for param in self.params], self.mesh, self.policy
        )
        for param, local in zip(self.params, locals_, strict=True):
            param.adopt_local(local)
            param.forget_unsharded()

    def _check_materialized(self) -> None:
        wrong = [p for p in self.params if p.local.device != self.mesh.device]
        if not wrong:
            return
        names = ", ".join(f"{param.name} on {param.local.device}" for param in wrong)
        raise MaterializationError(
            f"Expected the parameters of group '{self.name}' on {self.mesh.device}, got {names}; "
            f"call module.to_empty(device='{self.mesh.device}') and initialize them, "
            "for example with reset_parameters()"
        )

    def __repr__(self) -> str:
        return f"ParamGroup({self.name or 'root'}, {len(self.params)} params, {self.state})"


def build_units(
    params: Sequence[ShardedParam],
    shards: Sequence[torch.Tensor],
    mesh: ShardMesh,
    policy: MixedPrecisionPolicy,
) -> tuple[list[GatherUnit], list[torch.Tensor]]:
    """Sort parameters into flat buckets, and tensor subclasses by themselves.

    Args:
        params: The parameters.
        shards: Values of the local shard of each; copied into the buckets.
        mesh: Over which ranks they are sharded.
        policy: Which dtype they compute in.

    Returns:
        The units, and for each parameter the tensor that is its local shard from now on.
    """
    units: list[GatherUnit] = []
    locals_: list[torch.Tensor] = list(shards)
    keyed: dict[tuple[torch.dtype, torch.dtype, torch.device], list[int]] = {}
    for index, (param, shard) in enumerate(zip(params, shards, strict=True)):
        if needs_extension(shard):
            param.local = shard
            units.append(ExtensionGather(param, policy, mesh.device))
        else:
            key = (shard.dtype, policy.compute_dtype(shard.dtype), shard.device)
            keyed.setdefault(key, []).append(index)
    for (dtype, compute_dtype, device), indices in keyed.items():
        bucket = ParamBucket([params[i] for i in indices], mesh, dtype, compute_dtype, device)
        for place, index in enumerate(indices):
            locals_[index] = bucket.local_view(place)
            if device.type != "meta":
                locals_[index].copy_(shards[index])
        units.append(bucket)
    return units, locals_
