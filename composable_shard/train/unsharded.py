"""Full parameters for a while: to look at, to edit, to save.

A DTensor of any placements becomes a plain tensor and again a shard; nothing here asks how it is
sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from composable_shard import _torch
from composable_shard.arguments import check_flags, check_module
from composable_shard.core.codec import Attributes
from composable_shard.core.group import ParamGroup
from composable_shard.core.hooks import groups_in, owner_of
from composable_shard.core.reduction import assign_grad
from composable_shard.core.storage import remember_stand_in
from composable_shard.core.ties import owner_of_sharded
from composable_shard.errors import MaterializationError, ShardError
from composable_shard.module import group_of
from composable_shard.train.full import (
    count_write,
    digest,
    distributed,
    full_copy,
    same_bits,
)
from composable_shard.train.ranks import Together
from composable_shard.train.weights.gathering import full_copies

# From sharded parameters to full ones and back: what ``unsharded`` is made of ---------------------


class _Slot(NamedTuple):
    module: nn.Module
    attribute: str

    def __str__(self) -> str:
        return f"'{self.attribute}' of {type(self.module).__name__}"


class _Edit(NamedTuple):
    """What is to be written back for one parameter; known before any of it is written.

    Attributes:
        shape: Its shape.
        is_new: Whether it holds something else than it did.
        grad_dtype: That of its gradient; ``None`` if there is none.
        grad_is_subclass: Whether that is a tensor subclass.
        grad_is_new: Whether that holds something else than it did.
    """

    shape: tuple[int, ...]
    is_new: bool
    grad_dtype: torch.dtype | None
    grad_is_subclass: bool
    grad_is_new: bool


class FullParams:
    """Sharded parameters, and full copies registered in their places.

    Args:
        slots: The parameters, and where each is registered.
        rank0_only: Whether only the first rank of each mesh has copies.
        to_cpu: Whether copies are on the CPU.
        with_grads: Whether gradients go the same way.
        writeback: Whether edits are to be written back.
    """

    def __init__(
        self,
        slots: dict[nn.Parameter, list[_Slot]],
        *,
        rank0_only: bool,
        to_cpu: bool,
        with_grads: bool,
        writeback: bool,
    ) -> None:
        self._rank0_only, self._to_cpu, self._with_grads = rank0_only, to_cpu, with_grads
        self._writeback = writeback
        self._digests: dict[nn.Parameter, tuple[list[int], list[int] | None]] = {}
        self._attributes: list[Attributes] = []
        self._slots = slots
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._edited: list[nn.Parameter | None] = []
        self._edits: list[_Edit | None] = []

    def register_full(self) -> None:
        """Register full copies. Collective: see :meth:`_kept`."""
        for param, slots in self._slots.items():
            if _torch.local_tensor(param).is_meta:
                raise MaterializationError(
                    f"Expected materialized parameters, got {slots[0]} on meta; call "
                    "init_sharded(model, seed=...)"
                )
        with torch.inference_mode(False), torch.no_grad():
            present = {p: p.grad for p in self._slots if self._with_grads and p.grad is not None}
            names = [str(self._slots[param][0]) for param in (*self._slots, *present)]
            fulls = iter(self._kept([*self._slots, *present.values()], names))
            of_params = [next(fulls) for _ in self._slots]
            of_grads = [next(fulls) if param in present else None for param in self._slots]
            kept = zip(self._slots.items(), of_params, of_grads, strict=True)
            for (param, slots), full, grad in kept:
                if full is None:
                    continue
                owner = owner_of_sharded(param)
                if owner is None:
                    copy = nn.Parameter(full, requires_grad=param.requires_grad)
                else:
                    copy = owner.leaf_around(full)
                self._attributes.append(Attributes(param, copy))
                if grad is not None:
                    assign_grad(copy, grad)
                if self._writeback:
                    self._digests[param] = digest(full), None if grad is None else digest(grad)
                self._copies.append((copy, param))
                for slot in slots:
                    slot.module._parameters[slot.attribute] = copy

    @contextlib.contextmanager
    def edited(self) -> Iterator[None]:
        """Notice what was edited within; an exception on one rank is one on all that wait for it.

        Raises:
            ShardError: If another rank has failed within.

        Collective: with ``rank0_only``, if there is a writeback, 8 bytes along each axis.
        """
        if not self._writeback:
            yield
            return
        meshes = list(map(_mesh_of, self._slots)) if self._rank0_only else []
        together = Together(meshes, "the writeback of unsharded()")
        with together.noting_failure():
            yield
            places = [slots[0] for slots in self._slots.values()]
            self._edited = [place.module._parameters.get(place.attribute) for place in places]
            self._edits = list(map(self._described, self._slots, self._edited))
        together.go_on()

    def register_sharded(self) -> None:
        """Register the sharded parameters again. Collective: none."""
        for attributes in self._attributes:
            attributes.take()
        for param, slots in self._slots.items():
            for slot in slots:
                slot.module._parameters[slot.attribute] = param
        for copy, param in self._copies:  # optimizers must not train them from now on
            owner = owner_of_sharded(param)
            if owner is not None:
                remember_stand_in(copy, owner)
        self._copies.clear()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy what was edited into the shards; a parameter that was taken away stays.

        Collective: none; with ``rank0_only`` a broadcast of an object over each mesh, and of each
            parameter and gradient.
        """
        self._agree_on_edits()
        for param, value, edit in zip(self._slots, self._edited, self._edits, strict=True):
            if edit is None:
                continue
            _overwrite(param, self._full(param, value, param.dtype), is_new=edit.is_new)
            if not self._with_grads:
                continue
            if edit.grad_dtype is None:
                param.grad = None
                continue
            grad = None if value is None else value.grad
            full = self._full(param, grad, edit.grad_dtype, edit.grad_is_subclass)
            _write_grad(param, full, is_new=edit.grad_is_new)

    def _agree_on_edits(self) -> None:
        """Take over the edits of the first rank with ``rank0_only``; check the shapes."""
        edits = self._edits
        if self._rank0_only:
            for mesh in dict.fromkeys(map(_mesh_of, self._slots)):
                said = _object_of_first(edits, mesh)
                for index, param in enumerate(self._slots):
                    if _mesh_of(param) == mesh:
                        edits[index] = said[index]
        for (param, slots), edit in zip(self._slots.items(), edits, strict=True):
            if edit is not None and edit.shape != tuple(param.shape):
                raise ValueError(
                    f"Expected {slots[0]} to have shape {list(param.shape)} at the end of "
                    f"unsharded(), got {list(edit.shape)}; edit values only"
                )

    @torch.no_grad()
    def _described(self, param: nn.Parameter, value: nn.Parameter | None) -> _Edit | None:
        if value is None:
            return None
        shape, known = tuple(value.shape), self._digests.get(param)
        if known is None:  # the first rank says what it is
            return _Edit(shape, False, None, False, False)
        is_new = digest(value.detach().to(param.dtype)) != known[0]
        grad = value.grad if self._with_grads else None
        if grad is None:
            return _Edit(shape, is_new, None, False, False)
        is_subclass = _torch.is_wrapper_subclass(grad)
        return _Edit(shape, is_new, grad.dtype, is_subclass, digest(grad) != known[1])

    # Which rank has the full values ---------------------------------------------------------

    def _kept(
        self, tensors: Sequence[torch.Tensor], names: Sequence[str]
    ) -> list[torch.Tensor | None]:
        """Return the full values of parameters and gradients, where this rank is to have them.

        Collective: a gather for each bucket of them, and a reduction of what is pending.
        """
        device = torch.device("cpu") if self._to_cpu else None
        sharded = cast(Sequence[DTensor], tensors)
        return full_copies(sharded, names, first_only=self._rank0_only, device=device)

    def _full(
        self,
        param: nn.Parameter,
        value: torch.Tensor | None,
        dtype: torch.dtype,
        is_subclass: bool | None = None,
    ) -> torch.Tensor:
        """Return a full tensor to cut the shard from. Collective: see :meth:`write_back`."""
        mesh = _mesh_of(param)
        if not self._rank0_only:
            assert value is not None
            return value.detach().to(mesh.device_type, dtype)
        if is_subclass is None:
            is_subclass = _torch.is_wrapper_subclass(_torch.local_tensor(param))
        if is_subclass:  # only a gather knows what it is made of
            full = full_copy(param, str(self._slots[param][0])).to(dtype)
        else:
            full = _torch.empty(*param.shape, dtype=dtype, device=mesh.device_type)
        if _is_first(mesh):
            assert value is not None
            full.copy_(value.detach())
        for leaf in _torch.leaves(full):
            _broadcast_from_first(leaf, mesh)
        return full


# One tensor -----------------------------------------------------------------------------------


def _shard_of(like: DTensor, full: torch.Tensor) -> torch.Tensor:
    """Cut this rank's part out of a full tensor; may be a view. Collective: none."""
    mesh = like.device_mesh
    whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()


def _overwrite(target: torch.Tensor, full: torch.Tensor, *, is_new: bool) -> None:
    """Write a DTensor in place, where it is not the same.

    Its version tells whether the full tensor is new, as all ranks know, and not whether the rows of
    this rank are: see ``count_write``.
    """
    local, shard = _torch.local_tensor(target), _shard_of(cast(DTensor, target), full)
    if is_new:
        count_write(local)
    if not same_bits(local, shard.to(local.device)):
        counted = [one for one in (local, *_torch.leaves(local)) if not one.is_inference()]
        with _torch.preserved_versions(counted):
            local.copy_(shard)


def _write_grad(param: nn.Parameter, full: torch.Tensor, *, is_new: bool) -> None:
    """Make a full gradient the reduced gradient of a sharded parameter."""
    sharded, present = cast(DTensor, param), param.grad
    if (
        isinstance(present, DTensor)
        and present.placements == sharded.placements
        and present.dtype == full.dtype
    ):
        _overwrite(present, full, is_new=is_new)
        return
    local = _shard_of(sharded, full).clone().to(_torch.local_tensor(param).device)
    assign_grad(param, distributed(local, sharded, sharded.placements))


# The first rank of a mesh ---------------------------------------------------------------------


def _mesh_of(param: nn.Parameter) -> DeviceMesh:
    return cast(DTensor, param).device_mesh


def _is_first(mesh: DeviceMesh) -> bool:
    coordinate = mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def _broadcast_from_first(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    for axis in range(mesh.ndim):  # after axis k, all ranks that begin like the first have it
        dist.broadcast(tensor, group=mesh.get_group(axis), group_src=0)


def _object_of_first(value: Any, mesh: DeviceMesh) -> Any:
    box = [value]
    for axis in range(mesh.ndim):
        dist.broadcast_object_list(box, group=mesh.get_group(axis), group_src=0)
    return box[0]


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
    writeback then overwrites. ``state_dict()`` within gives full tensors.

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
        with ``rank0_only`` 8 bytes along each axis and one broadcast of each.
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
    modules = list(_opened_modules(module, recurse))
    own = {group: None for m in modules if (group := owner_of(m)) is not None}
    _check_can_open(own)
    groups = [group for group in groups_in(modules) if not group.is_opened]
    for group in groups:
        group.reshard()
        group.register_params()
        group.tree.agree()
    slots = _slots_in(modules, groups)
    params = FullParams(
        slots,
        rank0_only=rank0_only,
        to_cpu=offload_to_cpu,
        with_grads=with_grads,
        writeback=writeback,
    )
    with _opened(groups):
        try:
            params.register_full()
            with params.edited():
                yield
        finally:
            params.register_sharded()
    if writeback:
        params.write_back()


@contextlib.contextmanager
def _opened(groups: Collection[ParamGroup]) -> Iterator[None]:
    for group in groups:
        group.is_opened = True
    try:
        yield
    finally:
        for group in groups:
            group.is_opened = False


def _opened_modules(module: nn.Module, recurse: bool) -> Iterator[nn.Module]:
    """Yield the modules below, but those of nested groups unless ``recurse``."""
    if recurse:
        yield from module.modules()
        return
    own, seen = owner_of(module), set[nn.Module]()
    left = [module]
    while left:
        current = left.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        children = [c for c in current.children() if group_of(c) is None or group_of(c) is own]
        left += reversed(children)


def _slots_in(
    modules: Sequence[nn.Module], groups: Sequence[ParamGroup]
) -> dict[nn.Parameter, list[_Slot]]:
    """Return the DTensors in ``modules`` with all of their places, those in ``modules`` first.

    A parameter that is tied across groups has places elsewhere, which hold the same copy. One that
    has no other place belongs to the outer group as a whole. Left out is what an outer context has
    opened, on whichever ranks.

    Args:
        modules: The modules.
        groups: Those that own parameters in them and are not open.
    """
    within = set(modules)
    slots: dict[nn.Parameter, list[_Slot]] = {}
    for module in modules:
        for attribute, param in module._parameters.items():
            if isinstance(param, DTensor):
                slots.setdefault(param, []).append(_Slot(module, attribute))
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
            others = (_Slot(holder, attribute) for holder, attribute, _ in one.slots)
            places += [place for place in others if place not in places]
    return slots


def _check_can_open(groups: Collection[ParamGroup]) -> None:
    for group in groups:
        if group.tree.is_computing:
            moment = "backward" if _torch.current_backward() != -1 else "forward"
            raise ShardError(
                f"Expected unsharded() outside of forward and backward, got it in a {moment} of "
                f"{group.label}; use it between iterations"
            )
        group.check_awake("for unsharded()")
        if group.is_opened:
            raise ShardError(
                f"Expected one unsharded() of {group.label} at a time, got one within another; "
                "the parameters are full already"
            )
