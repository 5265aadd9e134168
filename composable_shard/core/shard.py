"""The steps of ``fully_shard``: collect the parameters, check, plan, shard and commit.

Imports group, storage, ties, extension. Every step that can fail runs before the module changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composable_shard import _torch
from composable_shard.core.codec import GRAD_PRE, PRE, flatten, has_extension, needs_extension
from composable_shard.core.extension import build_buckets, raise_on_all
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.storage import ShardedParam, Slot, owner_of_sharded
from composable_shard.core.ties import Managed, record_original
from composable_shard.core.transport.process_groups import gather_by_rank
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh, ShardPlacementFn, own_mesh_of, placement_of, shard_dim
from composable_shard.policy import MixedPrecisionPolicy, Offload, check_names, offload_of


def is_parallelized(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` (ours or torch's) or ``replicate`` was applied to a module."""
    return "fully_shard" in _torch.composable_functions(module) or _torch.is_replicated(module)


def top_modules(module: object) -> tuple[nn.Module, ...]:
    """Return the modules of the argument, without those that other modules of it contain.

    Raises:
        TypeError: If it is not a module or a list of modules.
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
            raise TypeError(
                f"Expected a list of nn.Module, got {type(member).__name__} at index {index}"
            )
        if type(member).forward is nn.Module.forward and "forward" not in vars(member):
            raise ValueError(
                f"Expected a module with a forward, got the container {type(member).__name__}; "
                "call fully_shard on its children, or on a list of them"
            )
    inner = {id(m) for top in modules for m in top.modules() if m is not top}
    unique = {id(member): member for member in modules if id(member) not in inner}
    return tuple(unique.values())


def check_not_parallelized(modules: Iterable[nn.Module]) -> None:
    """Refuse modules with gradients that another call or function already reduces.

    Raises:
        ValueError: If ``fully_shard`` (ours or torch's) or ``replicate`` was applied to a module,
            or if torch's ``fully_shard`` was applied to a module around it.
    """
    for module in modules:
        kind = type(module).__name__
        if _torch.is_replicated(module):
            raise ValueError(
                f"Expected a module without torch's replicate or DistributedDataParallel, got "
                f"{kind}; apply fully_shard to a module around it, or to modules inside of it "
                "before you call replicate"
            )
        if is_parallelized(module):
            raise ValueError(
                f"Expected a module that is not sharded, got {kind}, which fully_shard was "
                "applied to before; shard modules that were added since, such as new adapters, "
                "alone"
            )
        if not any(isinstance(param, DTensor) for param in module.parameters()):
            continue
        for outer in _torch.modules_with_state():
            is_of_torch = group_of(outer) is None and is_parallelized(outer)
            if is_of_torch and any(module is inner for inner in outer.modules()):
                raise ValueError(
                    f"Expected fully_shard of {kind} before torch has converted the parameters "
                    f"of {type(outer).__name__} around it, got it after; start with the inner "
                    "modules"
                )


def find_managed(
    modules: Sequence[nn.Module],
    ignored: Iterable[nn.Parameter],
    planned: Collection[nn.Module] = (),
) -> Managed:
    """Collect the parameters of modules, except those below sharded or replicated inner modules.

    A parameter that is tied to a parameter of a replicated module is replicated, too.

    Args:
        modules: The top modules.
        ignored: Parameters to leave alone.
        planned: Inner modules that other calls will shard before this one.
    """
    ignored_ids = {id(param) for param in ignored}
    visited: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        if module in visited:
            return
        visited[module] = prefix
        for name, child in module.named_children():
            if _torch.is_replicated(child):
                ignored_ids.update(map(id, child.parameters()))
            elif not is_parallelized(child) and child not in planned:
                visit(child, f"{prefix}{name}.")

    for top in modules:
        visit(top, "")
    slots: dict[nn.Parameter, list[Slot]] = {}
    names: dict[nn.Parameter, str] = {}
    for module, prefix in visited.items():
        for name, param in module._parameters.items():
            if param is not None and id(param) not in ignored_ids:
                slots.setdefault(param, []).append(Slot.of(module, name))
                names.setdefault(param, f"{prefix}{name}")
    return Managed(tuple(visited), {param: tuple(places) for param, places in slots.items()}, names)


def plan_params(
    managed: Managed,
    mesh: ShardMesh,
    shard_placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
    offload: Offload = None,
) -> list[ShardedParam]:
    """Choose the sharded dim, mesh and dtypes of each parameter.

    Raises:
        ValueError: If a parameter cannot be sharded that way, with its name.
    """
    check_names(offload, set(managed.names.values()))
    meshes: dict[DeviceMesh, ShardMesh] = {}
    planned = []
    for param, slots in managed.slots.items():
        name = managed.names[param]
        if is_lazy(param):
            raise ValueError(
                f"Expected parameter '{name}' of {type(slots[0].module).__name__} to have a shape, "
                "got an uninitialized one; run a forward of the model before fully_shard"
            )
        placement, own_mesh = placement_of(name, param, shard_placement_fn)
        param_mesh = mesh
        if own_mesh is not None:
            if own_mesh not in meshes:
                meshes[own_mesh] = own_mesh_of(name, own_mesh)
            param_mesh = meshes[own_mesh]
        _check_param(name, param, param_mesh)
        dim = shard_dim(name, param, placement)
        policies = policy.for_parameter(name, param), offload_of(name, offload)
        planned.append(ShardedParam(name, slots, param, dim, param_mesh, *policies))
    return planned


def _check_param(name: str, param: nn.Parameter, mesh: ShardMesh) -> None:
    owner = owner_of_sharded(param)
    if owner is not None:
        raise ValueError(
            f"Expected parameter '{name}' to be sharded by one fully_shard call, got the sharded "
            f"parameter '{owner.name}' of another group; shard inner modules before outer ones, "
            "tie parameters before both, and if you added adapters to a sharded model, shard only "
            "the adapters"
        )
    if param.device.type not in ("meta", "cpu", mesh.device.type):
        raise ValueError(
            f"Expected parameter '{name}' on {mesh.device}, on the CPU or on the meta device, "
            f"got {param.device}"
        )


def build_group(
    modules: tuple[nn.Module, ...],
    managed: Managed,
    planned: Sequence[ShardedParam],
    mesh: ShardMesh,
    policy: MixedPrecisionPolicy,
) -> ParamGroup:
    """Copy this rank's shards into buckets and make the sharded parameters; change no module.

    Collective: for tensor subclasses, one small object for each mesh axis.
    """
    with torch.inference_mode(False), torch.no_grad():
        shards = _cut_shards(planned, list(managed.slots))
        buckets = build_buckets(planned, shards)
        originals = dict(zip(planned, managed.slots, strict=True))
        for bucket in buckets:
            for param, local in zip(bucket.params, bucket.locals, strict=True):
                param.create_sharded(local, originals[param])
    return ParamGroup(modules, planned, buckets, mesh, policy)


def _cut_shards(
    planned: Sequence[ShardedParam], originals: Sequence[nn.Parameter]
) -> list[torch.Tensor]:
    """Cut this rank's shards: copies of tensor subclasses, and views or copies of plain tensors.

    Collective: one small object for each mesh axis if there are tensor subclasses, else none.
    """
    shards: list[torch.Tensor] = []
    meshes: dict[DeviceMesh, None] = {}
    failure = None
    for param, original in zip(planned, originals, strict=True):
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
    if meshes:
        _agree_on_shards(failure, list(meshes))
    return shards


def _cut_subclass(param: ShardedParam, part: torch.Tensor) -> torch.Tensor:
    """Copy this rank's shard of a tensor subclass; a tensor on the meta device stays there.

    Raises:
        ExtensionError: If the class cannot be cut that way, copied or gathered, or if an operation
            does not return its own class.
    """
    kind = type(part)
    keeps_class = _torch.is_subclass(part) or hasattr(kind, PRE) or hasattr(kind, GRAD_PRE)

    def checked(op: str, result: torch.Tensor) -> torch.Tensor:
        if keeps_class and not isinstance(result, kind):
            name, got = kind.__name__, type(result).__name__
            raise ExtensionError(f"Expected {op} of {name} to return its own class, got {got}")
        return result

    try:
        shard = checked("split", param.layout.shard_of(part, param.mesh.shard_rank))
        shard = checked("detach", shard.detach())
        viewed = shard
        with contextlib.suppress(Exception):  # a class may raise in `view`
            viewed = shard.view(shard.shape)
        checked("view", viewed)
        if not has_extension(shard):
            flatten([shard])
            dtype = param.policy.compute_dtype(shard.dtype)
            checked(f"to({dtype})", shard.to(dtype))
        is_meta = shard.device.type == "meta"
        return checked("new_zeros", _torch.cloned(shard if is_meta else shard.to(param.device)))
    except Exception as error:
        is_ours = isinstance(error, ExtensionError)
        got = str(error) if is_ours else f"{type(error).__name__}: {error}"
        raise ExtensionError(
            f"Expected parameter '{param.name}', a {kind.__name__} of shape {list(part.shape)}, "
            f"to be cut into {param.mesh.num_shards} shards along dim {param.layout.dim}, got: "
            f"{got}; shard it over a number of ranks that its class can be cut for, or pass it in "
            "ignored_params"
        ) from error


def _agree_on_shards(failure: ExtensionError | None, meshes: Sequence[DeviceMesh]) -> None:
    """Raise the same error on all ranks of some meshes if one of them could not cut its shards.

    Args:
        failure: The error of this rank, if it failed.
        meshes: The meshes of the parameters that are tensor subclasses; the same on all ranks.

    Raises:
        ExtensionError: On all ranks, with the text of every rank that failed.

    Collective: an all-gather of a small object over each axis.
    """
    text = None if failure is None else str(failure)
    axes = [mesh.get_group(index) for mesh in meshes for index in range(mesh.ndim)]
    groups = [axis for axis in dict.fromkeys(axes) if axis.size() > 1 and not _torch.is_fake(axis)]
    texts = gather_by_rank(text, groups, "agreeing on how tensor subclasses are cut")
    raise_on_all(texts, failure)


def check_subclasses(planned: Sequence[ShardedParam], managed: Managed) -> None:
    """Cut the tensor subclasses only to raise the errors of :func:`build_group` on all ranks.

    Collective: see :func:`build_group`.
    """
    pairs = zip(planned, managed.slots, strict=True)
    cut = [(p, full) for p, full in pairs if needs_extension(p.tensor_parallel_part(full))]
    _cut_shards([param for param, _ in cut], [full for _, full in cut])


def commit(group: ParamGroup, managed: Managed, planned: Sequence[ShardedParam]) -> None:
    """Register the sharded parameters and move buffers to the compute device."""
    for param, original in zip(planned, managed.slots, strict=True):
        param.put(param.sharded)
        record_original(original, param.slots, param)
    device = group.mesh.device
    for module in managed.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", device.type):
                module._buffers[name] = buffer.to(device)
