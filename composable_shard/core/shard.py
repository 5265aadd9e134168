"""The steps of ``fully_shard``: collect the parameters, check, plan, shard and commit.

Every step that can fail runs before the module changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import _torch
from composable_shard.core.codec import GRAD_PRE, PRE, flatten, has_extension, needs_extension
from composable_shard.core.extension import build_buckets, raise_on_all
from composable_shard.core.group import ParamGroup
from composable_shard.core.storage import (
    ShardedParam,
    Slot,
    owner_of_full,
    owner_of_sharded,
    record_full_tensor,
)
from composable_shard.core.transport.process_groups import gather_by_rank
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh, ShardPlacementFn, own_mesh_of, placement_of, shard_dim
from composable_shard.policy import MixedPrecisionPolicy, Offload, check_names, offload_of


def is_parallelized(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` (ours or torch's) or ``replicate`` was applied to a module."""
    return "fully_shard" in _torch.composable_functions(module) or _torch.is_replicated(module)


def top_modules(module: object) -> tuple[nn.Module, ...]:
    """Return the outermost of the given modules: those that no other given module contains.

    Raises:
        TypeError: If the argument is not a module or a list of modules.
        ValueError: If the list is empty, or a module is a container without a forward.
    """
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, (list, tuple)):
        raise TypeError(
            f"Expected module to be an nn.Module or a list of them, got {type(module).__name__}"
        )
    if not modules:
        raise ValueError("Expected at least one module, got an empty list")
    for index, member in enumerate(modules):
        if not isinstance(member, nn.Module):
            kind = type(member).__name__
            raise TypeError(f"Expected a list of nn.Module, got {kind} at index {index}")
        if type(member).forward is nn.Module.forward and "forward" not in vars(member):
            raise ValueError(
                f"Expected a module with a forward, got the container {type(member).__name__}; "
                "call fully_shard on its children, or on a list of them"
            )
    inner = {id(m) for top in modules for m in top.modules() if m is not top}
    return tuple(dict.fromkeys(member for member in modules if id(member) not in inner))


def check_not_parallelized(modules: Iterable[nn.Module]) -> None:
    """Refuse modules that an earlier ``fully_shard`` or ``replicate`` manages.

    Raises:
        ValueError: If ``fully_shard`` (ours or torch's) or ``replicate`` was applied to a module.
    """
    for module in modules:
        kind = type(module).__name__
        if _torch.is_replicated(module):
            raise ValueError(
                "Expected a module without torch's replicate or DistributedDataParallel, got "
                f"{kind}; shard a module around it, or shard its children before you call replicate"
            )
        if is_parallelized(module):
            raise ValueError(
                f"Expected a module that is not sharded, got {kind}, which fully_shard was "
                "applied to before; give added modules, such as adapters, a call of their own"
            )


@dataclass(frozen=True)
class Managed:
    """The parameters that one ``fully_shard`` call shards.

    Attributes:
        modules: The top modules and all modules below them, except the modules of inner groups,
            replicated modules, and all below these.
        slots: The slots (modules and names) of each parameter.
        names: The qualified name of each parameter.
        taken_over: The parameters that inner groups lose to the new group.
    """

    modules: list[nn.Module]
    slots: dict[nn.Parameter, list[Slot]]
    names: dict[nn.Parameter, str]
    taken_over: list[ShardedParam]


Planned = dict[nn.Parameter, ShardedParam]
"""The `ShardedParam` of each original parameter."""


def find_managed(
    modules: Sequence[nn.Module],
    ignored: Iterable[nn.Parameter],
    sharded_first: Collection[nn.Module] = (),
) -> Managed:
    """Collect the parameters of modules, except those of sharded or replicated inner modules.

    A parameter that is tied to one of a replicated module is left alone. Users call ``fully_shard``
    from the bottom up, and inner groups have replaced their original parameters by shards. So an
    original that a module here still holds is tied. The new group takes it over if all modules that
    hold it are inside of ``modules``; otherwise the inner group keeps it, and a later call may take
    it over.

    Args:
        modules: The top modules.
        ignored: Parameters to leave alone.
        sharded_first: Inner modules that other planned calls shard before this call does.

    Raises:
        ValueError: If a tied parameter was used or changed since an inner group has sharded it.
    """
    ignored_ids = {id(param) for param in ignored}
    managed_modules: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        managed_modules[module] = None
        for child in module.children():
            if _torch.is_replicated(child):
                ignored_ids.update(map(id, child.parameters()))
            elif not (child in managed_modules or child in sharded_first or is_parallelized(child)):
                visit(child)

    for top in modules:
        visit(top)
    prefixes = {m: name and f"{name}." for top in modules for name, m in top.named_modules()}
    slots: dict[nn.Parameter, list[Slot]] = {}
    tied: dict[tuple[nn.Parameter, ShardedParam], list[Slot]] = {}
    for slot in (Slot(module, name) for module in prefixes for name in module._parameters):
        param = slot.get()
        if param is None or id(param) in ignored_ids:
            continue
        owner = owner_of_full(param)
        if owner is not None and slot not in owner.slots:
            tied.setdefault((param, owner), []).append(slot)
        elif slot.module in managed_modules:
            slots.setdefault(param, []).append(slot)
    taken_over = []
    for (param, owner), tied_slots in tied.items():
        if not owner.is_untouched:
            raise ValueError(
                f"Expected parameter '{prefixes[tied_slots[0].module]}{tied_slots[0].name}' to be "
                f"sharded with '{owner.name}', to which it is tied, got a call after that group "
                "was used or changed; shard all modules that share it before use"
            )
        if all(slot.module in prefixes for slot in owner.slots):
            slots[param] = [*owner.slots, *tied_slots]
            taken_over.append(owner)
    names = {param: f"{prefixes[first.module]}{first.name}" for param, (first, *_) in slots.items()}
    return Managed(list(managed_modules), slots, names, taken_over)


def plan_params(
    managed: Managed,
    mesh: ShardMesh,
    shard_placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
    offload: Offload = None,
) -> Planned:
    """Choose the sharded dim, mesh and dtypes of each parameter.

    Raises:
        ValueError: If a parameter cannot be sharded like this. The message names the parameter.
    """
    check_names(offload, set(managed.names.values()))
    planned: Planned = {}
    for param, slots in managed.slots.items():
        name = managed.names[param]
        placement, own_mesh = placement_of(name, param, shard_placement_fn)
        param_mesh = mesh if own_mesh is None else own_mesh_of(name, own_mesh)
        owner = owner_of_sharded(param)
        if owner is not None:
            raise ValueError(
                f"Expected parameter '{name}' to be sharded once, got the sharded parameter "
                f"'{owner.name}' of another group; shard inner modules before outer ones, tie "
                "parameters before any call, and give added modules a call of their own"
            )
        if param.device.type not in ("meta", "cpu", param_mesh.device.type):
            raise ValueError(
                f"Expected parameter '{name}' on {param_mesh.device}, on the CPU or on the meta "
                f"device, got {param.device}"
            )
        dim = shard_dim(name, param, placement)
        policies = policy.for_parameter(name, param), offload_of(name, offload)
        planned[param] = ShardedParam(name, slots, param, dim, param_mesh, *policies)
    return planned


def build_group(
    modules: tuple[nn.Module, ...], planned: Planned, mesh: ShardMesh, policy: MixedPrecisionPolicy
) -> ParamGroup:
    """Copy this rank's shards into buckets and make the sharded parameters; change no module.

    Collective: for tensor subclasses, one small object for each mesh axis.
    """
    params = list(planned.values())
    with torch.inference_mode(False), torch.no_grad():
        buckets = build_buckets(params, _cut_shards(planned))
        originals = {param: original for original, param in planned.items()}
        for bucket in buckets:
            for param, local in zip(bucket.params, bucket.locals, strict=True):
                param.create_sharded(local, originals[param])
    return ParamGroup(modules, params, buckets, mesh, policy)


def _cut_shards(planned: Planned) -> list[torch.Tensor]:
    """Cut this rank's shards: copies of tensor subclasses, and views or copies of plain tensors.

    Raises:
        ExtensionError: On all ranks, with the text of every rank that could not cut its shards.

    Collective: one small object for each mesh axis if there are tensor subclasses, else none. All
        ranks have the same meshes of tensor subclasses.
    """
    shards: list[torch.Tensor] = []
    meshes: dict[DeviceMesh, None] = {}
    failure = None
    for original, param in planned.items():
        part = param.tensor_parallel_part(original)
        if not needs_extension(part):
            shard = param.shard_of(original)
            shards.append(shard if shard.device.type == "meta" else shard.to(param.device))
            continue
        meshes[param.placement.mesh] = None
        try:
            shards.append(_cut_subclass(param, part))
        except ExtensionError as error:
            failure = failure or error
    axes = [mesh.get_group(index) for mesh in meshes for index in range(mesh.ndim)]
    groups = [axis for axis in dict.fromkeys(axes) if axis.size() > 1 and not _torch.is_fake(axis)]
    text = None if failure is None else str(failure)
    texts = gather_by_rank(text, groups, "agreeing on how tensor subclasses are cut")
    raise_on_all(texts, failure)
    return shards


def _cut_subclass(param: ShardedParam, part: torch.Tensor) -> torch.Tensor:
    """Copy this rank's shard of a tensor subclass; a tensor on the meta device stays there.

    Raises:
        ExtensionError: If the tensor cannot be cut, copied or gathered, or if an operation does not
            return the tensor's class.
    """
    kind = type(part)
    # Hooks that are set on the tensor itself do not count.
    must_keep_class = _torch.is_subclass(part) or hasattr(kind, PRE) or hasattr(kind, GRAD_PRE)

    def checked(op: str, result: torch.Tensor) -> torch.Tensor:
        if must_keep_class and not isinstance(result, kind):
            name, got = kind.__name__, type(result).__name__
            raise ExtensionError(f"Expected {op} of {name} to return its own class, got {got}")
        return result

    try:
        shard = checked("split", param.layout.shard_of(part, param.mesh.shard_rank))
        shard = checked("detach", shard.detach())
        viewed = shard
        with contextlib.suppress(Exception):  # a class need not have `view`
            viewed = shard.view(shard.shape)
        checked("view", viewed)
        if not has_extension(shard):
            flatten([shard])  # raises if the shard cannot be gathered
            dtype = param.policy.compute_dtype(shard.dtype)
            checked(f"to({dtype})", shard.to(dtype))
        is_meta = shard.device.type == "meta"
        # `cloned` calls `new_zeros` only for a class that it cannot rebuild from inner tensors.
        return checked("new_zeros", _torch.cloned(shard if is_meta else shard.to(param.device)))
    except Exception as error:
        is_ours = isinstance(error, ExtensionError)
        got = str(error) if is_ours else f"{type(error).__name__}: {error}"
        raise ExtensionError(
            f"Expected parameter '{param.name}', a {kind.__name__} of shape {list(part.shape)}, "
            f"to be cut into {param.mesh.num_shards} shards along dim {param.layout.dim}, got: "
            f"{got}; shard it over another number of ranks, or pass it in ignored_params"
        ) from error


def check_subclasses(planned: Planned) -> None:
    """Raise the errors that :func:`build_group` would raise for tensor subclasses, on all ranks.

    Collective: see :func:`build_group`.
    """
    pairs = planned.items()
    _cut_shards({full: p for full, p in pairs if needs_extension(p.tensor_parallel_part(full))})


def commit(group: ParamGroup, managed: Managed, planned: Planned) -> None:
    """Register the sharded parameters, remove taken-over ones from inner groups, move buffers."""
    for lost in managed.taken_over:
        lost.group.remove(lost)
    for original, param in planned.items():
        param.put(param.sharded)
        record_full_tensor(original, param)
    move_buffers(managed.modules, group.mesh.device)


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move the buffers of modules to a device, in place: modules may share a buffer."""
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and buffer.device.type not in ("meta", device.type):
                if _torch.is_wrapper_subclass(buffer):
                    torch.utils.swap_tensors(buffer, buffer.to(device))
                else:
                    buffer.data = buffer.to(device)
