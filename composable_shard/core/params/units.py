"""The units of one group: its parameters, sorted into what is gathered as a whole.

Plain parameters live in flat buckets, tensor subclasses by themselves. Loading, moving or extending
parameters replaces tensors behind the group's back; that is noticed before the next gather, and the
units are built anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable_shard import _torch
from composable_shard.core.params.bucket import GatherUnit, ParamBucket, Transfer
from composable_shard.core.params.extension import needs_extension
from composable_shard.core.params.extension_gather import ExtensionGather, agree_formats
from composable_shard.core.params.param import ShardedParam
from composable_shard.core.params.param_set import ParamSet
from composable_shard.errors import MaterializationError, StaleParameterError
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy

Transfers = tuple[tuple[ShardMesh, Transfer], ...]
"""What the units of a group send and receive, each over its mesh."""

Kept = list[list[torch.Tensor]]
"""For each unit, this rank's part of what was gathered."""

_BucketKey = tuple[ShardMesh, torch.dtype, torch.dtype, torch.device]


class GroupUnits:
    """The buckets and subclass parameters of one group.

    Attributes:
        params: The parameters.
        policy: The dtypes of modules, and of parameters that have none of their own.
        all: The parameters, taken together.
        share_storage: Whether some unsharded parameters are the shards themselves.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        units: list[GatherUnit],
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.params = list(params)
        self.policy = policy
        self.all = ParamSet(self.params)
        self._settled = False
        self._set_units(units)

    def _set_units(self, units: list[GatherUnit]) -> None:
        self._units = units
        self._extensions: dict[ShardMesh, list[ExtensionGather]] = {}
        for unit in units:
            if isinstance(unit, ExtensionGather):
                self._extensions.setdefault(unit.mesh, []).append(unit)
        self.share_storage = any(
            isinstance(unit, ParamBucket) and unit.shares_storage for unit in units
        )

    @property
    def members(self) -> Sequence[GatherUnit]:
        """The units, in the order in which they are sent."""
        return self._units

    def start_gather(self) -> Transfers:
        """Allocate the unsharded storage and name what is sent and received.

        Collective: one all-gather of a small object at the first gather of tensor subclasses.
        """
        for gathers in self._extensions.values():
            agree_formats(gathers)
        return tuple((unit.mesh, unit.start_gather()) for unit in self._units)

    def finish_gather(self, transfers: Transfers) -> None:
        """Make the unsharded parameters valid; creates them at the first time."""
        for unit, (_, transfer) in zip(self._units, transfers, strict=True):
            unit.finish_gather(transfer)
            if isinstance(unit, ParamBucket) and unit.params[0].unsharded is None:
                unit.create_unsharded_params()
        if not self.all.is_created:
            self.all.look_again()

    def keep(self, num_parts: int) -> Kept:
        """Copy this rank's part, of ``num_parts`` equal ones, of the unsharded storage."""
        return [unit.keep(unit.mesh.shard_rank % num_parts, num_parts) for unit in self._units]

    def start_regather(self, kept: Kept, num_parts: int) -> Transfers:
        """Allocate the unsharded storage and name what of the kept parts is sent."""
        return tuple(
            (unit.mesh, unit.start_regather(parts, num_parts))
            for unit, parts in zip(self._units, kept, strict=True)
        )

    def finish_regather(self, transfers: Transfers) -> None:
        """Make the unsharded parameters valid again."""
        for unit, (_, transfer) in zip(self._units, transfers, strict=True):
            unit.finish_regather(transfer)

    def free(self) -> None:
        """Free the unsharded storage."""
        for unit in self._units:
            unit.free()

    def settle(self, label: str) -> bool:
        """Take over what was loaded, moved or extended since the last gather.

        Args:
            label: What messages call the group.

        Returns:
            Whether anything may have changed.

        Raises:
            StaleParameterError: If parameters were replaced between forward and backward.
            MaterializationError: If parameters are not on the device of compute.
        """
        intact = self.all.are_intact()
        if self._settled and intact:
            return False
        if self._settled and _torch.current_backward() != -1:
            raise StaleParameterError(
                f"Expected the parameters of {label} in backward as they were in "
                "forward, got replaced ones; run backward before replacing them"
            )
        if not intact:
            for param in self.params:
                param.recover()
        self._check_materialized(label)
        if not intact or self._extended_since_built():
            self._rebuild()
        self.all.look_again()
        self._settled = True
        return True

    def give_back(self, param: ShardedParam) -> None:
        """Let go of a parameter."""
        self.params.remove(param)
        param.slots = ()
        self._rebuild()

    def _extended_since_built(self) -> bool:
        bucketed = [p for u in self._units if isinstance(u, ParamBucket) for p in u.params]
        return any(needs_extension(param.local) for param in bucketed)

    def _rebuild(self) -> None:
        units, locals_ = build_units(self.params, [param.local for param in self.params])
        for param, local in zip(self.params, locals_, strict=True):
            param.adopt_local(local)
            param.forget_unsharded()
        self._set_units(units)
        self.all.look_again()

    def _check_materialized(self, label: str) -> None:
        wrong = [param for param in self.params if param.local.device != param.device]
        if not wrong:
            return
        place = wrong[0].device
        if any(param.local.is_meta for param in wrong):
            remedy = (
                f"call module.to_empty(device='{place}') and initialize them, for example with "
                "reset_parameters()"
            )
        elif wrong[0].offload is not None:
            remedy = "leave the module there, since its policy offloads them"
        else:
            remedy = f"call module.to('{place}') before training"
        places = ", ".join(f"{param.name} on {param.local.device}" for param in wrong)
        raise MaterializationError(
            f"Expected the parameters of {label} on {place}, got {places}; {remedy}"
        )


def build_units(
    params: Sequence[ShardedParam],
    shards: Sequence[torch.Tensor],
) -> tuple[list[GatherUnit], list[torch.Tensor]]:
    """Sort parameters into flat buckets, and tensor subclasses by themselves.

    Args:
        params: The parameters.
        shards: Values of the local shard of each; copied into the buckets.

    Returns:
        The units, and for each parameter the tensor that is its local shard from now on.
    """
    units: list[GatherUnit] = []
    locals_: list[torch.Tensor] = list(shards)
    keyed: dict[_BucketKey, list[int]] = {}
    for index, (param, shard) in enumerate(zip(params, shards, strict=True)):
        if needs_extension(shard):
            param.local = shard
            units.append(ExtensionGather(param, param.mesh.device))
        else:
            dtypes = (shard.dtype, param.policy.compute_dtype(shard.dtype))
            keyed.setdefault((param.mesh, *dtypes, shard.device), []).append(index)
    for (_, dtype, compute_dtype, device), indices in keyed.items():
        bucket = ParamBucket([params[i] for i in indices], dtype, compute_dtype, device)
        for place, index in enumerate(indices):
            locals_[index] = bucket.local_view(place)
            if device.type != "meta":
                locals_[index].copy_(shards[index])
        units.append(bucket)
    return units, locals_
