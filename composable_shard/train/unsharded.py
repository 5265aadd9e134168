"""Full parameters for a while: to look at, to edit, to save.

A DTensor of any placements becomes a plain tensor and again a shard; nothing here asks how it is
sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.arguments import check_flags, check_module
from composable_shard.core.codec import Attributes, share_attributes
from composable_shard.core.group import ParamGroup
from composable_shard.core.hooks import groups_in, owner_of
from composable_shard.core.reduction import assign_grad
from composable_shard.core.storage import Slot, remember_stand_in
from composable_shard.core.ties import owner_of_sharded
from composable_shard.core.tree import check_at_rest
from composable_shard.errors import MaterializationError
from composable_shard.train.full import digest
from composable_shard.train.ranks import Together
from composable_shard.train.weights.gathering import full_copies

# From sharded parameters to full ones and back: what ``unsharded`` is made of ---------------------


class _Edit(NamedTuple):
    """What is to be written for one parameter; known before any of it is written.

    Attributes:
        shape: The shape of its new value; ``None`` if it is the same value.
        has_grad: Whether it has a gradient.
        keeps_grad: Whether that is the same, and reduced.
    """

    shape: tuple[int, ...] | None
    has_grad: bool
    keeps_grad: bool


@dataclass
class FullParams:
    """Sharded parameters, and full copies registered in their places.

    Attributes:
        slots: The parameters, and where each is registered.
        rank0_only: Whether only the first rank of each mesh has copies.
        to_cpu: Whether copies are on the CPU.
        with_grads: Whether gradients go the same way.
        writeback: Whether edits are to be written back.
        copies: The full copies, as long as they are registered.
        digests: Those of the copies and of their gradients, before they are edited.
        edited: What is registered at the end, for each parameter.
        edits: What of that is to be written back.
    """

    slots: dict[nn.Parameter, list[Slot]]
    rank0_only: bool
    to_cpu: bool
    with_grads: bool
    writeback: bool
    copies: dict[nn.Parameter, tuple[nn.Parameter, Attributes | None]] = field(default_factory=dict)
    digests: dict[nn.Parameter, tuple[list[int], list[int] | None]] = field(default_factory=dict)
    edited: list[nn.Parameter | None] = field(default_factory=list)
    edits: list[_Edit | None] = field(default_factory=list)

    def register_full(self) -> None:
        """Register full copies.

        Collective: a gather for each bucket of them, and a reduction of what is pending.
        """
        for param, slots in self.slots.items():
            if _torch.local_tensor(param).is_meta:
                raise MaterializationError(
                    f"Expected materialized parameters, got {_told(slots)} on meta; call "
                    "init_sharded(model, seed=...)"
                )
        present = [p for p in self.slots if self.with_grads and p.grad is not None]
        tensors = cast(list[DTensor], [*self.slots, *(param.grad for param in present)])
        names = [_told(self.slots[param]) for param in (*self.slots, *present)]
        device = torch.device("cpu") if self.to_cpu else None
        with torch.inference_mode(False), torch.no_grad():
            fulls = full_copies(tensors, names, first_only=self.rank0_only, device=device)
            grads = dict(zip(present, fulls[len(self.slots) :], strict=True))
            for (param, slots), full in zip(self.slots.items(), fulls, strict=False):
                if full is not None:
                    self._register(param, slots, full, grads.get(param))

    def _register(
        self,
        param: nn.Parameter,
        slots: Sequence[Slot],
        full: torch.Tensor,
        grad: torch.Tensor | None,
    ) -> None:
        owner = owner_of_sharded(param)
        if owner is None:
            copy = nn.Parameter(full, requires_grad=param.requires_grad)
        else:
            copy = owner.leaf_around(full)
        self.copies[param] = copy, share_attributes(param, copy)
        if grad is not None:
            assign_grad(copy, grad)
        if self.writeback:
            self.digests[param] = digest(full), None if grad is None else digest(grad)
        for slot in slots:
            slot.put(copy)

    @contextlib.contextmanager
    def noticing_edits(self) -> Iterator[None]:
        """Notice what was edited within; an exception on one rank is one on all that wait for it.

        Raises:
            ShardError: If another rank has failed within.

        Collective: with ``rank0_only``, if there is a writeback, 8 bytes along each axis.
        """
        if not self.writeback:
            yield
            return
        meshes = list(map(_mesh_of, self.slots)) if self.rank0_only else []
        together = Together(meshes, "the writeback of unsharded()")
        with together.noting_failure():
            yield
            for param, slots in self.slots.items():
                self.edited.append(slots[0].get() if param in self.copies else None)
            self.edits = list(map(self._edit_of, self.slots, self.edited))
        together.go_on()

    @torch.no_grad()
    def _edit_of(self, param: nn.Parameter, value: nn.Parameter | None) -> _Edit | None:
        """Return what is to be written for a parameter; ``None`` if it was taken away."""
        if value is None or param not in self.digests:  # of which the first rank tells
            return None
        known, known_grad = self.digests[param]
        is_same = digest(value.detach().to(param.dtype)) == known
        keeps_grad, grad = not self.with_grads, value.grad
        if grad is not None and isinstance(param.grad, DTensor):
            is_reduced = param.grad.placements == cast(DTensor, param).placements
            keeps_grad |= is_reduced and digest(grad) == known_grad
        return _Edit(None if is_same else tuple(value.shape), grad is not None, keeps_grad)

    def register_sharded(self) -> None:
        """Register the sharded parameters again. Collective: none."""
        for _, attributes in self.copies.values():
            if attributes is not None:
                attributes.take()
        for param, slots in self.slots.items():
            for slot in slots:
                slot.put(param)
        for param, (copy, _) in self.copies.items():
            owner = owner_of_sharded(param)
            if owner is not None:  # optimizers must not train the copy from now on
                remember_stand_in(copy, owner)
        self.copies.clear()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy what was edited into the shards; a parameter that was taken away stays.

        Collective: none; with ``rank0_only`` a broadcast of an object over each mesh, and of each
            value and gradient that was edited.
        """
        if self.rank0_only:
            said = {
                mesh: _of_first(self.edits, mesh)
                for mesh in dict.fromkeys(map(_mesh_of, self.slots))
            }
            self.edits = [said[_mesh_of(param)][at] for at, param in enumerate(self.slots)]
        for (param, slots), edit in zip(self.slots.items(), self.edits, strict=True):
            if edit is not None and edit.shape not in (None, tuple(param.shape)):
                raise ValueError(
                    f"Expected {_told(slots)} to have shape {list(param.shape)} at the end of "
                    f"unsharded(), got {list(edit.shape or ())}; edit values only"
                )
        for param, value, edit in zip(self.slots, self.edited, self.edits, strict=True):
            if edit is not None and edit.shape is not None:
                # all ranks write, or their versions would differ
                _torch.local_tensor(param).copy_(self._shard_of(param, value))
            if edit is not None and not edit.keeps_grad:
                grad = None if value is None else value.grad
                _write_grad(param, self._shard_of(param, grad) if edit.has_grad else None)

    def _shard_of(self, param: nn.Parameter, full: torch.Tensor | None) -> torch.Tensor:
        """Cut this rank's part out of a full tensor; may be a view. Collective: see write_back."""
        mesh = _mesh_of(param)
        if self.rank0_only:  # pickled, and where others have no device of that number
            full = _of_first(None if full is None else full.detach().cpu(), mesh)
        assert full is not None
        return _torch.cut(full.detach().to(mesh.device_type), mesh, cast(DTensor, param).placements)


# One tensor -----------------------------------------------------------------------------------


def _told(slots: Sequence[Slot]) -> str:
    return f"'{slots[0].name}' of {type(slots[0].module).__name__}"


def _mesh_of(param: nn.Parameter) -> DeviceMesh:
    return cast(DTensor, param).device_mesh


def _of_first(said: Any, mesh: DeviceMesh) -> Any:
    """Return what the first rank of a mesh says."""
    box = [said]
    for axis in range(mesh.ndim):  # after axis k, all ranks that begin like the first have it
        dist.broadcast_object_list(box, group=mesh.get_group(axis), group_src=0)
    return box[0]


def _write_grad(param: nn.Parameter, shard: torch.Tensor | None) -> None:
    """Give a sharded parameter a reduced gradient, or none."""
    sharded, present = cast(DTensor, param), param.grad
    if shard is None:
        param.grad = None
    elif (
        isinstance(present, DTensor)
        and present.placements == sharded.placements
        and present.dtype == shard.dtype
    ):
        _torch.local_tensor(present).copy_(shard)
    else:
        local = shard.clone().to(_torch.local_tensor(param).device)
        assign_grad(param, _torch.local_like(param, local))


# Full parameters for a while: to look at, to edit, to save ----------------------------------------


@contextlib.contextmanager
def unsharded(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Let a module hold full, plain parameters within this context.

    They have the original dtype, not that of compute, and are copies: edits (in place, by
    ``param.data``, by loading a state dict or by registering another parameter of the same shape)
    reach the shards at the end, and what is the same is not written. If the context is left by an
    exception, nothing is written back. Optimizer steps within change the shards, which the
    writeback of an edited parameter then overwrites. ``state_dict()`` within gives full tensors.

    A parameter that is tied is full in all of its places, also where other groups run the module.

    Forward within is that of the plain module, for ``torch.no_grad()`` only. All ranks must enter
    and leave together. With ``rank0_only`` and ``writeback``, an exception on one rank, as of a
    first one that fails to save, is an error on all; that rank waits for the others to come to the
    end and hear of it, so they must not wait for it within.

    Args:
        module: A module that is sharded, has sharded modules below, or lies in one.
        recurse: Whether nested sharded modules have full parameters too.
        writeback: Whether each rank's edits are copied into its shards; all ranks must make the
            same ones. With ``rank0_only``, those of the first rank are sent to all. Without it,
            nothing is compared: what only looks or saves is done sooner.
        rank0_only: Whether only the first rank of a parameter's mesh, which is rank 0 for a mesh
            of all ranks, gets full parameters; the others keep their sharded ones.
        offload_to_cpu: Whether full parameters and gradients are on the CPU.
        with_grads: Whether full parameters have full gradients, and edits of those are written
            back too. What is accumulated without sync (``Partial``) is seen as what it stands for,
            and is reduced afterwards if there is a writeback; all ranks must have the same ones.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If a flag is no bool; if a parameter has another shape at the end, with
            ``rank0_only`` on all ranks.
        ShardError: In a forward or backward, or within another such context of the same
            parameters, on all ranks alike; for a forward with gradients within; at the end with
            ``rank0_only`` and ``writeback``, if another rank has left by an exception.
        MaterializationError: If parameters are on the meta device.
        ExtensionError: If a tensor subclass lacks the ops by which DTensor makes it whole.

    Collective: one all-gather of each bucket of 64 MiB of parameters, and of gradients with
        ``with_grads``; a gather to the first rank with ``rank0_only``. None for the writeback, but
        with ``rank0_only`` 8 bytes along each axis and a broadcast of what was edited.
    Memory: all full parameters (and gradients) at a time, on the first rank alone with
        ``rank0_only``; besides, a bucket of them on the device of compute.
    Source: ``FullyShardedDataParallel.summon_full_params`` (FSDP1).

    Example:
        >>> import torch
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def double():
        ...     layer = fully_shard(nn.Linear(2, 2, bias=False))
        ...     with unsharded(layer), torch.no_grad():
        ...         layer.weight.fill_(1).mul_(2)
        ...         shape = layer.weight.shape
        ...     return shape, layer.weight.to_local().tolist()
        >>> run_threads(double, 2)[1]
        (torch.Size([2, 2]), [[2.0, 2.0]])
    """
    check_module("module", module)
    check_flags(
        recurse=recurse,
        writeback=writeback,
        rank0_only=rank0_only,
        offload_to_cpu=offload_to_cpu,
        with_grads=with_grads,
    )
    modules = [m for m in module.modules() if recurse or owner_of(m) is owner_of(module)]
    own = {group: None for m in modules if (group := owner_of(m)) is not None}
    for group in own:
        check_at_rest(group, "unsharded")
        group.check_awake("for unsharded()")
    groups = [group for group in groups_in(modules) if not group.is_opened]
    for group in groups:
        group.reshard()
        group.register_params()
        group.tree.agree()
    slots = _slots_in(modules, groups)
    params = FullParams(slots, rank0_only, offload_to_cpu, with_grads, writeback)
    for group in groups:
        group.is_opened = True
    try:
        params.register_full()
        with params.noticing_edits():
            yield
    finally:
        params.register_sharded()
        for group in groups:
            group.is_opened = False
    if writeback:
        params.write_back()


def _slots_in(
    modules: Sequence[nn.Module], groups: Sequence[ParamGroup]
) -> dict[nn.Parameter, list[Slot]]:
    """Return the DTensors in ``modules`` with all of their places, those in ``modules`` first.

    A parameter that is tied across groups has places elsewhere, which hold the same copy. One that
    has no other place belongs to the outer group as a whole. Left out is what an outer context has
    opened, on whichever ranks.

    Args:
        modules: The modules.
        groups: Those that own parameters in them and are not open.
    """
    within = set(modules)
    slots: dict[nn.Parameter, list[Slot]] = {}
    for module in modules:
        for attribute, param in module._parameters.items():
            if isinstance(param, DTensor):
                slots.setdefault(param, []).append(Slot.of(module, attribute))
    known = {one.slots[0].get(): (group, one) for group in groups for one in group.params}
    for param in list(slots):
        if param not in known and owner_of_sharded(param) is not None:
            del slots[param]
    for registered, (group, one) in known.items():
        is_whole = not within.isdisjoint(group.modules)
        is_outside = all(owner_of(slot.module) is not group for slot in one.slots)
        is_opened = registered in slots or (is_whole and is_outside)
        if isinstance(registered, DTensor) and is_opened:
            places = slots.setdefault(registered, [])
            places += [place for place in one.slots if place not in places]
    return slots
