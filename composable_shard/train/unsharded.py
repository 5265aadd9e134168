"""Full parameters within a context: to read, to edit, to save.

A DTensor of any placements becomes a plain tensor and a shard again; this code does not depend on
the placements.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.arguments import check_flags, check_module
from composable_shard.core.codec import AttributeCopier, share_attributes
from composable_shard.core.group import ParamGroup
from composable_shard.core.hooks import groups_in, owner_of
from composable_shard.core.reduction import assign_grad
from composable_shard.core.storage import Slot, owner_of_sharded, record_full_tensor
from composable_shard.core.tree import check_at_rest
from composable_shard.errors import MaterializationError
from composable_shard.train.full import digest
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.gathering import full_copies

_log = logging.getLogger("composable_shard")

# One parameter ------------------------------------------------------------------------------------


class _Opened:
    """A sharded parameter, and the full copy that replaces it on a rank that gets one.

    Attributes:
        param: The sharded parameter.
        mesh: Its mesh.
        label: Its name, for messages.
        value: The parameter that was registered at the end, if it is known.
        edit: The changed tensors, ``"value"`` and ``"grad"``, with their shapes; ``None`` for a
            gradient that was removed. All edits are found before any is written.
    """

    def __init__(self, param: nn.Parameter, slots: Sequence[Slot], writeback: bool) -> None:
        self.param, self._slots, self._writeback = param, slots, writeback
        sharded = cast(DTensor, param)
        self.mesh, self._placements = sharded.device_mesh, sharded.placements
        self.label = f"'{slots[0].name}' of {type(slots[0].module).__name__}"
        self.value: nn.Parameter | None = None
        self.edit: dict[str, tuple[int, ...] | None] = {}
        self._copy: nn.Parameter | None = None
        self._attributes: AttributeCopier | None = None
        self._digests: tuple[list[int], list[int] | None] | None = None

    def register_full(self, full: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Register a full copy with a gradient."""
        owner = owner_of_sharded(self.param)
        if owner is None:
            self._copy = nn.Parameter(full, requires_grad=self.param.requires_grad)
        else:
            self._copy = owner.leaf_around(full)
        self._attributes = share_attributes(self.param, self._copy)
        if grad is not None:
            assign_grad(self._copy, grad)
        if self._writeback:
            self._digests = digest(full), None if grad is None else digest(grad)
        for slot in self._slots:
            slot.put(self._copy)

    @torch.no_grad()
    def find_edit(self, *, with_grads: bool) -> None:
        """Compare the registered parameter with the original copy. Collective: none."""
        value = self._slots[0].get()
        if self._digests is None or value is None:
            return
        self.value, (known, known_grad) = value, self._digests
        if digest(value.detach().to(self.param.dtype)) != known:
            self.edit["value"] = tuple(value.shape)
        grad, present = value.grad, cast(DTensor | None, self.param.grad)
        is_reduced = present is not None and present.placements == self._placements
        if with_grads and not (grad is not None and is_reduced and digest(grad) == known_grad):
            self.edit["grad"] = None if grad is None else tuple(grad.shape)

    def register_sharded(self) -> None:
        """Register the sharded parameter again. Collective: none."""
        if self._attributes is not None:
            self._attributes.copy_to_sharded()
        for slot in self._slots:
            slot.put(self.param)
        owner = owner_of_sharded(self.param)
        if self._copy is not None and owner is not None:
            record_full_tensor(self._copy, owner)  # optimizers must not train it from now on

    def check_shape(self) -> None:
        """Raise ``ValueError`` if the new value has another shape."""
        shape = self.edit.get("value")
        if shape not in (None, tuple(self.param.shape)):
            raise ValueError(
                f"Expected {self.label} to have shape {list(self.param.shape)} at the end of "
                f"unsharded(), got {list(shape or ())}; edit values only"
            )

    def write_back(self, *, of_first: bool) -> None:
        """Copy the edit into the shards; all ranks write, so that their versions agree.

        Args:
            of_first: Whether only the first rank of the mesh has the new values.

        Collective: with ``of_first`` a broadcast of each edited tensor.
        """
        for name, shape in self.edit.items():
            full = self.value if self.value is None or name == "value" else self.value.grad
            shard = None if shape is None else self._shard_of(full, of_first)
            if name == "value":
                assert shard is not None
                _torch.local_tensor(self.param).copy_(shard)
            elif shard is None:
                self.param.grad = None
            else:
                local = shard.clone().to(_torch.local_tensor(self.param).device)
                assign_grad(self.param, _torch.local_like(self.param, local))

    def _shard_of(self, full: torch.Tensor | None, of_first: bool) -> torch.Tensor:
        """Cut this rank's part out of a full tensor; may be a view."""
        if of_first:  # it is pickled, and other ranks may lack a device of that index
            full = _ranks_of(self.mesh).from_one(None if full is None else full.detach().cpu())
        assert full is not None
        return _torch.cut(full.detach().to(self.mesh.device_type), self.mesh, self._placements)


# All parameters -----------------------------------------------------------------------------------


def _register_full(
    opened: Sequence[_Opened], grads_of: Sequence[_Opened], *, rank0_only: bool, to_cpu: bool
) -> None:
    """Register full copies of parameters, some of them with gradients.

    Collective: a gather for each bucket of them, and a reduction of pending gradients.
    """
    for item in opened:
        if _torch.local_tensor(item.param).is_meta:
            raise MaterializationError(
                f"Expected materialized parameters, got {item.label} on meta; call init_sharded()"
            )
    tensors = [*(item.param for item in opened), *(item.param.grad for item in grads_of)]
    names = [item.label for item in (*opened, *grads_of)]
    device = torch.device("cpu") if to_cpu else None
    with torch.inference_mode(False), torch.no_grad():
        sharded = cast(list[DTensor], tensors)
        found = full_copies(sharded, names, first_only=rank0_only, device=device)
        grads = dict(zip(grads_of, found[len(opened) :], strict=True))
        for item, full in zip(opened, found, strict=False):
            if full is not None:
                item.register_full(full, grads.get(item))


@torch.no_grad()
def _write_back(opened: Sequence[_Opened], *, rank0_only: bool) -> None:
    """Copy all edits into the shards; the shards of a removed parameter stay.

    Collective: none; with ``rank0_only`` a broadcast of an object over each mesh, and of each
        edited value and gradient.
    """
    if rank0_only:
        edits = [item.edit for item in opened]
        meshes = dict.fromkeys(item.mesh for item in opened)
        edits_of_first = {mesh: _ranks_of(mesh).from_one(edits) for mesh in meshes}
        for index, item in enumerate(opened):
            item.edit = edits_of_first[item.mesh][index]
    for item in opened:
        item.check_shape()
    for item in opened:
        item.write_back(of_first=rank0_only)


def _ranks_of(*meshes: DeviceMesh) -> Ranks:
    return Ranks(None, "writing back the edits of unsharded()", [*meshes])


# The context --------------------------------------------------------------------------------------


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

    Full parameters have the original dtype, not that of compute, and are copies: edits (in place,
    by ``param.data``, by loading a state dict or by registering another parameter of the same
    shape) are written to the shards at the end; unchanged values are not. If an exception ends the
    context, nothing is written back. Optimizer steps in the context change the shards, and the
    writeback of an edited parameter overwrites them. ``state_dict()`` in the context returns full
    tensors. A tied parameter is full in all of its places, also where other groups run the module.
    Forward in the context runs the plain module, under ``torch.no_grad()`` only. All ranks must
    enter and leave together. With ``rank0_only`` and ``writeback``, an exception on one rank, such
    as a first rank that fails to save, is an error on all ranks; the failed rank waits until the
    others reach the end, so they must not wait for it in the context.

    Args:
        module: A module that is sharded, has sharded modules below, or lies in one.
        recurse: Whether nested sharded modules have full parameters too.
        writeback: Whether each rank's edits are copied into its shards; all ranks must make the
            same edits. With ``rank0_only``, the edits of the first rank are sent to all. ``False``
            skips the comparison, which is faster for code that only reads or saves.
        rank0_only: Whether only the first rank of a parameter's mesh, which is rank 0 for a mesh
            of all ranks, gets full parameters; the others keep their sharded ones.
        offload_to_cpu: Whether full parameters and gradients are on the CPU.
        with_grads: Whether full parameters have full gradients, and edits of those are written back
            too. Gradients accumulated without sync (``Partial``) appear reduced, and stay reduced
            afterwards with ``writeback``; all ranks must have the same ones.

    Raises:
        TypeError: If ``module`` is not a module.
        ValueError: If a flag is no bool; if a parameter has another shape at the end, with
            ``rank0_only`` on all ranks.
        ShardError: In a forward or backward, or within another such context of the same parameters,
            on all ranks alike; for a forward with gradients in the context; at the end with
            ``rank0_only`` and ``writeback``, if another rank has raised an exception.
        MaterializationError: If parameters are on the meta device.
        ExtensionError: If a tensor subclass lacks the ops by which DTensor gathers it.

    Collective: one all-gather of each bucket of 64 MiB of parameters, and of gradients with
        ``with_grads``; a gather to the first rank with ``rank0_only``. None for the writeback,
        except with ``rank0_only``: 8 bytes along each axis and a broadcast of each edited tensor.
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
    check_flags(recurse=recurse, writeback=writeback, rank0_only=rank0_only)
    check_flags(offload_to_cpu=offload_to_cpu, with_grads=with_grads)
    modules = [m for m in module.modules() if recurse or owner_of(m) is owner_of(module)]
    owners = {group: None for m in modules if (group := owner_of(m)) is not None}
    for group in owners:
        check_at_rest(group, "unsharded")
        group.check_in_memory("for unsharded()")
    groups = [group for group in groups_in(modules) if not group.is_in_unsharded_context]
    for group in groups:
        group.reshard()
        group.tree.agree()
    slots = _slots_in(modules, groups)
    opened = [_Opened(param, places, writeback) for param, places in slots.items()]
    ranks = _ranks_of(*(item.mesh for item in opened if rank0_only and writeback))
    for group in groups:
        group.is_in_unsharded_context = True
    try:
        grads_of = [item for item in opened if with_grads and item.param.grad is not None]
        _register_full(opened, grads_of, rank0_only=rank0_only, to_cpu=offload_to_cpu)
        try:
            yield
            for item in opened:
                item.find_edit(with_grads=with_grads)
        except Exception as error:
            if ranks.groups:  # the others may come late, or never if they are in another collective
                _log.warning("unsharded() has failed with %r; telling the other ranks", error)
                ranks.leave(f"{type(error).__name__}: {error}")
            raise
        ranks.go_on()
    finally:
        for item in opened:
            item.register_sharded()
        for group in groups:
            group.is_in_unsharded_context = False
    if writeback:
        _write_back(opened, rank0_only=rank0_only)


def _slots_in(
    modules: Sequence[nn.Module], groups: Sequence[ParamGroup]
) -> dict[nn.Parameter, list[Slot]]:
    """Return the DTensors in ``modules`` with all of their places, places in ``modules`` first.

    A parameter that is tied across groups has places elsewhere, which hold the same copy. A
    parameter without another place belongs to the outer group only. Parameters that an outer
    context has opened, on any rank, are left out.

    Args:
        modules: The modules.
        groups: The groups with parameters in these modules that are not open.
    """
    within, slots = set(modules), dict[nn.Parameter, list[Slot]]()
    for module in modules:
        for attribute, param in module._parameters.items():
            if isinstance(param, DTensor) and owner_of_sharded(param) is None:
                slots.setdefault(param, []).append(Slot(module, attribute))
    for group in groups:
        is_whole = not within.isdisjoint(group.modules)
        for one in group.params:
            registered = one.slots[0].get()
            is_inside = any(slot.module in within for slot in one.slots)
            is_outside = all(owner_of(slot.module) is not group for slot in one.slots)
            if isinstance(registered, DTensor) and (is_inside or (is_whole and is_outside)):
                slots[registered] = sorted(one.slots, key=lambda slot: slot.module not in within)
    return slots
