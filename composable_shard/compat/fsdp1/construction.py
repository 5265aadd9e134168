"""Construction of wrappers: their modules and parameters, devices, initial values and meshes."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakTensorKeyDictionary

from composable_shard.api import check_calls, fully_shard
from composable_shard.arguments import check_type, check_value
from composable_shard.compat.fsdp1 import options
from composable_shard.compat.fsdp1.state_dicts import Wrapper
from composable_shard.core.shard import move_buffers
from composable_shard.errors import MaterializationError
from composable_shard.mesh import DataParallelMeshDims, current_device, start_process_group
from composable_shard.module import FSDPModule
from composable_shard.train.init import sync_module_states
from composable_shard.train.wrap import has_forward, inside_out

# The modules of one wrapper, without ignored modules and those of inner wrappers ------------------


class Place(NamedTuple):
    """Where a module has registered a parameter or a buffer."""

    module: nn.Module
    registered: dict[str, Any]
    name: str


class Scope(NamedTuple):
    """The modules of one wrapper.

    Attributes:
        modules: The modules that the wrapper shards, the wrapped module first.
        ignored_modules: Modules that the wrapper leaves alone, with all modules below them.
        ignored_params: Parameters that the wrapper leaves alone.
    """

    modules: tuple[nn.Module, ...]
    ignored_modules: frozenset[nn.Module]
    ignored_params: frozenset[nn.Parameter]

    def places(self, *, ignored: bool = False) -> Iterator[tuple[torch.Tensor, Place]]:
        """Yield all parameters and buffers, or those that are ignored, at each of their places."""
        for module in self.modules:
            for registered in (module._parameters, module._buffers):
                for name, tensor in registered.items():
                    if tensor is not None and (tensor in self.ignored_params) == ignored:
                        yield tensor, Place(module, registered, name)

    def held(self) -> dict[torch.Tensor, list[Place]]:
        """Return all parameters and buffers with their places."""
        found: dict[torch.Tensor, list[Place]] = {}
        for tensor, place in self.places():
            found.setdefault(tensor, []).append(place)
        return found

    def on_meta(self) -> set[nn.Module]:
        """Return the modules with parameters or buffers on the meta device."""
        return {place.module for tensor, place in self.places() if tensor.is_meta}

    def params(self) -> list[nn.Parameter]:
        """Return the parameters, each once."""
        return [tensor for tensor in self.held() if isinstance(tensor, nn.Parameter)]


def scope_of(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Scope:
    """Return the scope of a wrapper of ``module``.

    Raises:
        TypeError: If an ignored object is neither a parameter nor a module.
        ValueError: If both arguments are given, parameters and modules are mixed, or an ignored
            module is sharded.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("Expected ignored_modules or ignored_states, got both")
    name, kinds = "ignored_states", "parameters or modules"
    if ignored_modules is not None:
        name, kinds = "ignored_modules", "modules"
    modules, params = list[nn.Module](), list[nn.Parameter]()
    for state in ignored_modules or ignored_states or ():
        if isinstance(state, nn.Module):
            modules += state.modules()
        else:
            fits = isinstance(state, nn.Parameter) and ignored_modules is None
            check_type(name, state, fits, kinds)
            params.append(state)
    if modules and params:
        raise ValueError(f"Expected {name} to be {kinds}, got both kinds mixed")
    for inner in modules:
        is_plain, kind = not isinstance(inner, FSDPModule), type(inner).__name__
        check_value("ignored modules", kind, is_plain, "that are not sharded")
    params += [param for inner in modules for param in inner.parameters(False)]
    return Scope(modules_of(module, modules), frozenset(modules), frozenset(params))


def modules_of(top: nn.Module, left_out: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Return the modules of a wrapper from the top down, each once, in FSDP1's breadth-first order.

    Args:
        top: The wrapped module.
        left_out: Modules to leave out with all modules below, besides wrapped and sharded ones.
    """
    found, seen = [top], {top, *left_out}
    for module in found:  # grows during the loop
        for child in module.children():
            if child not in seen and not isinstance(child, (Wrapper, FSDPModule)):
                seen.add(child)
                found.append(child)
    return tuple(found)


# The device of compute ----------------------------------------------------------------------------

_CPU = torch.device("cpu")


def resolve_device(scope: Scope, choices: options.Choices) -> torch.device:
    """Return the device of compute.

    Raises:
        RuntimeError: If parameters lie on several devices.
        ValueError: If the device of the parameters, ``device_id`` and the current device differ.
    """
    current = current_device()
    asked = _asked_device(choices, current)
    if asked == _CPU:
        current = _CPU
    found = {param.device for param in scope.params() if not param.is_meta}
    elsewhere = found - {_CPU}
    if len(elsewhere) > 1 or (asked is None and len(found) > 1):
        raise RuntimeError(
            f"Expected a module on a single device, got parameters on {sorted(map(str, found))}; "
            "wrap its parts one by one, or, if only some are on the CPU, please pass in device_id"
        )
    compute = next(iter(elsewhere), current)
    if compute != current or asked not in (None, compute):
        raise ValueError(
            f"Expected the module of {_rank()}, and device_id, on its current device {current}, or "
            f"the module on the CPU, got {compute} vs {asked}; call "
            "torch.accelerator.set_device_index first"
        )
    return compute


def _asked_device(choices: options.Choices, current: torch.device) -> torch.device | None:
    device_id, mesh = choices.device_id, choices.device_mesh
    if device_id is None:
        return _CPU if mesh is not None and mesh.device_type == "cpu" else None
    if isinstance(device_id, int):
        device_id = torch.device(current.type, int(device_id))
    asked = torch.device(device_id)
    fits = asked == _CPU or asked.type == current.type != "cpu"
    what = f"to be a device of this machine, such as {current}"
    check_value("device_id", choices.device_id, fits, what)
    if asked.index is None and asked != _CPU:
        warnings.warn(
            f"device_id {asked} of {_rank()} does not have an explicit index: the current device, "
            f"{current}, is used; pass it, or set another device first",
            stacklevel=5,
        )
        return current
    return asked


def _rank() -> str:
    return f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"


# Initial values -----------------------------------------------------------------------------------


_real = WeakTensorKeyDictionary()
"""By a meta tensor that other wrappers may still hold: its replacement, and a weak reference to the
module that initialized that."""


def materialize(scope: Scope, init_fn: Callable[..., object] | None, device: torch.device) -> None:
    """Replace parameters and buffers on the meta device by initialized tensors.

    Tied tensors stay tied, also across wrappers, and take the values that the first of their
    modules in the model gives them.

    Args:
        scope: The modules of the wrapper.
        init_fn: Called with each of the modules. If absent, modules on the meta device are
            initialized by their ``reset_parameters()``.
        device: The device of the new tensors.
    """
    held, on_meta = scope.held(), scope.on_meta()
    if not on_meta:
        return
    aside = list(scope.places(ignored=True))
    for param, place in aside:  # so that it keeps its values
        other = torch.empty_like(param, device="meta")
        place.registered[place.name] = nn.Parameter(other, param.requires_grad)
    try:
        for module in scope.modules:
            if init_fn is not None:
                init_fn(module)
            elif module in on_meta:
                with torch.no_grad():
                    module.to_empty(device=device, recurse=False)
                    module.reset_parameters()  # type: ignore[operator]
    finally:
        for param, place in aside:
            place.registered[place.name] = param
    top = scope.modules[0]
    order: dict[nn.Module | None, int] = {module: n for n, module in enumerate(top.modules())}
    for old, places in held.items():
        first = min(places, key=lambda place: order[place.module])
        new = first.registered[first.name]
        if old.is_meta and new is not old:
            known, initialized_by = _real.setdefault(old, (new, weakref.ref(first.module)))
            if order[first.module] < order.get(initialized_by(), 0):
                known.data.copy_(new)  # .data: its version must not change
                _real[old] = known, weakref.ref(first.module)
            new = known
        for place in places:
            place.registered[place.name] = new


def stays_on_cpu(scope: Scope, choices: options.Choices, device: torch.device) -> bool:
    """Return whether parameters stay on the CPU without offloading, and warn if they do.

    Raises:
        ValueError: If they stay on the CPU but must be synchronized.
    """
    if device == _CPU or choices.device_id is not None:
        return False
    if choices.sync_module_states and any(state.device == _CPU for state in scope.held()):
        raise ValueError(
            f"Expected parameters and buffers on {device} to synchronize them, got some on the "
            "CPU; pass device_id, or move the module first"
        )
    is_on_cpu = any(param.device == _CPU for param in scope.params())
    if choices.cpu_offload.offload_params or not is_on_cpu:
        return False
    warnings.warn(
        f"The module is on CPU and stays there: move it to {device} before training, or pass "
        "device_id to have it moved now",
        stacklevel=5,
    )
    return True


def synchronize(scope: Scope, mesh: DeviceMesh) -> None:
    """Give all ranks the values of the first. Collective: see ``sync_module_states``."""
    root, states = scope.modules[0], nn.Module()
    held = set(map(id, scope.held()))
    states._parameters.update((n, p) for n, p in root.named_parameters() if id(p) in held)
    states._buffers.update((n, b) for n, b in root.named_buffers() if id(b) in held)
    for axis in reversed(range(mesh.ndim)):  # within the first row, then from it to the others
        group = mesh.get_group(axis)
        first = dist.get_process_group_ranks(group)[0]
        sync_module_states(states, src_rank=first, process_group=group)


# The mesh of a strategy ---------------------------------------------------------------------------

_NAMES = ("replicate", "shard")


class Layout(NamedTuple):
    """The ranks that shard and replicate parameters.

    Attributes:
        strategy: The strategy; ``NO_SHARD`` on one rank.
        mesh: The mesh for ``fully_shard``, with names if an axis replicates.
        dims: The axis that replicates, if no axis shards.
    """

    strategy: options.ShardingStrategy
    mesh: DeviceMesh
    dims: DataParallelMeshDims | None


def resolve_layout(choices: options.Choices, device_type: str, wraps_below: bool) -> Layout:
    """Return the mesh of a strategy.

    Args:
        choices: Strategy and ranks; all ranks if absent.
        device_type: Type of the device of compute.
        wraps_below: Whether all wrappers of the tree are made by one call.

    Raises:
        ValueError: If the ranks are given in both forms, or do not fit the strategy.

    Collective: an all-gather of a small object for a pair of process groups; the creation of
        process groups for a hybrid strategy without any.
    """
    strategy, mesh, group = choices.sharding_strategy, choices.device_mesh, choices.process_group
    if mesh is not None and group is not None:
        raise ValueError("Expected process_group or device_mesh, got both; pass one of them")
    if mesh is None and group is None:
        if strategy.is_hybrid and not wraps_below:
            raise ValueError(
                f"Expected process groups or a device_mesh for {strategy} without an "
                "auto_wrap_policy, got none; pass the same ones to all nested wrappers"
            )
        start_process_group()
        mesh = _mesh_of_nodes(device_type) if strategy.is_hybrid else None
    if mesh is None:
        mesh = _mesh_of_groups(group or dist.group.WORLD, strategy, device_type)
    what = "2 axes (replicate, shard)" if strategy.is_hybrid else "1 axis"
    fits = mesh.ndim == 1 + strategy.is_hybrid
    check_value("device_mesh", mesh, fits, f"to have {what} for {strategy}")
    is_replicated = strategy is options.ShardingStrategy.NO_SHARD and mesh.size() > 1
    if mesh.mesh_dim_names is None and (strategy.is_hybrid or is_replicated):
        groups, names = [mesh.get_group(axis) for axis in range(mesh.ndim)], _NAMES[: mesh.ndim]
        mesh = DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=names)
    if mesh.size() == 1 and strategy is not options.ShardingStrategy.NO_SHARD:
        warnings.warn(f"One rank uses `NO_SHARD` instead of {strategy}", stacklevel=4)
        strategy = options.ShardingStrategy.NO_SHARD
    axes = mesh.mesh_dim_names
    return Layout(strategy, mesh, DataParallelMeshDims(replicate=axes) if is_replicated else None)


def _mesh_of_groups(
    group: options.ProcessGroups, strategy: options.ShardingStrategy, device_type: str
) -> DeviceMesh:
    """Return the mesh of a process group, or of a pair of them for a hybrid strategy.

    Collective: an all-gather of a small object for a pair.
    """
    given = group if isinstance(group, tuple) else (group,)
    groups = [group for group in given if isinstance(group, dist.ProcessGroup)]
    fits = len(groups) == len(given) == 1 + strategy.is_hybrid
    what = "a pair of process groups (shard, replicate)" if strategy.is_hybrid else "a ProcessGroup"
    check_value("process_group", type(group).__name__, fits, f"to be {what} for {strategy}")
    if not strategy.is_hybrid:
        return DeviceMesh.from_group(groups[0], device_type)
    shards, replicas = groups
    rows: list[list[int]] = [[]] * replicas.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shards), group=replicas)
    ranks = torch.tensor(rows)
    return DeviceMesh.from_group([replicas, shards], device_type, ranks, mesh_dim_names=_NAMES)


def _mesh_of_nodes(device_type: str) -> DeviceMesh:
    """Return a mesh (nodes, ranks of a node)."""
    num_ranks = dist.get_world_size()
    alone = num_ranks if device_type == "cpu" else torch.accelerator.device_count()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", alone))
    fits = per_node > 0 and num_ranks % per_node == 0
    what = f"to divide all {num_ranks} ranks without a device_mesh"
    check_value("the number of ranks of a node", per_node, fits, what)
    shape = (num_ranks // per_node, per_node)
    return init_device_mesh(device_type, shape, mesh_dim_names=_NAMES)


# Wrapping and sharding ----------------------------------------------------------------------------


def chosen_below(
    root: nn.Module, scope: Scope, policy: options.AutoWrapPolicy, arguments: Mapping[str, Any]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the modules below ``root`` that a policy picks, with the arguments of their wrappers.

    Inner modules come first, and containers are left out.
    """
    wrapped = (m for m in root.modules() if isinstance(m, (Wrapper, FSDPModule)))
    left_alone = scope.ignored_modules.union(*(outer.modules() for outer in wrapped))
    picked = options.picked_by(policy, root, left_alone, scope.ignored_params)
    precision, below = arguments["mixed_precision"], []
    for module in inside_out(root, set(left_alone)):
        own = picked.get(module)
        if precision is not None and precision.exempts(module):
            own = {**(own or {}), "mixed_precision": precision.exempted(module)}
        if own is not None and module is not root and has_forward(module):
            if unknown := sorted(own.keys() - arguments.keys()):
                raise TypeError(f"Expected lambda_fn to return arguments of FSDP, got {unknown}")
            below.append((module, {**arguments, **own}))
    return below


class Plan:
    """The construction of one wrapper.

    Args:
        module: The module to wrap.
        arguments: All arguments of the wrapper, by name.
        planned: Modules below that get wrappers of their own.

    Attributes:
        module: The module to wrap.
        choices: The arguments that are also those of the wrappers below.
        device: The device of compute.
        layout: The ranks.
        scope: The modules that this wrapper shards itself.
        below: The plans of the modules below that the policy picks, inner modules first.

    Raises:
        RuntimeError: If parameters lie on several devices.
        TypeError: If an argument has the wrong type or an unknown name.
        ValueError: If arguments, the module and the current device conflict.
    """

    def __init__(
        self, module: nn.Module, arguments: Mapping[str, Any], planned: Collection[nn.Module] = ()
    ) -> None:
        self.module, self.choices = module, options.Choices.of(arguments)
        scope = scope_of(module, arguments["ignored_modules"], arguments["ignored_states"])
        policy = arguments.get("auto_wrap_policy")
        self.device = resolve_device(scope, self.choices)
        self.layout = resolve_layout(self.choices, self.device.type, policy is not None)
        self.below: list[Plan] = []
        if policy is not None:
            # Inner wrappers have the ranks and the device of the outer one.
            shared = {**vars(self.choices), "ignored_modules": None}
            shared["ignored_states"] = scope.ignored_modules or scope.ignored_params
            if self.choices.device_id is not None:
                shared["device_id"] = self.device
            if self.layout.strategy.is_hybrid:
                shared |= {"process_group": None, "device_mesh": self.layout.mesh}
            chosen = chosen_below(module, scope, policy, shared)
            planned = [inner for inner, _ in chosen]
            self.below = [Plan(inner, own, planned) for inner, own in chosen]
        left_out = {*scope.ignored_modules, *planned}
        self.scope = scope._replace(modules=modules_of(module, left_out))

    def check(self) -> None:
        """Raise the errors of wrapping before anything is wrapped, initialized or sharded.

        Raises:
            ValueError: If a module cannot be sharded by its arguments.
            MaterializationError: If a module on the meta device cannot be initialized.
        """
        plans = [*self.below, self]
        check_calls((plan.tops, plan.shard_arguments) for plan in plans if plan.tops)
        to_reset = (plan.scope.on_meta() for plan in plans if plan.choices.param_init_fn is None)
        for module in chain.from_iterable(to_reset):
            if not callable(getattr(module, "reset_parameters", None)):
                raise MaterializationError(
                    f"Expected {type(module).__name__} on the meta device to have "
                    "reset_parameters(), got none; pass param_init_fn"
                )

    def wrap_below(self, wrap: Callable[[Plan], nn.Module]) -> None:
        """Replace the planned modules by wrappers, everywhere in the module."""
        places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent in self.module.modules():
            for name, child in vars(parent)["_modules"].items():
                places.setdefault(child, []).append((parent, name))
        for plan in self.below:
            wrapper = wrap(plan)
            for parent, name in places[plan.module]:
                setattr(parent, name, wrapper)

    def shard(self) -> tuple[nn.Module, ...]:
        """Shard the module, or the modules in a container; return the sharded modules."""
        module, scope, choices = self.module, self.scope, self.choices
        if not has_forward(module):
            warnings.warn(
                f"{type(module).__name__} has no forward, so it cannot gather the parameters in "
                "it: calls of its modules gather them; wrap these modules one by one",
                stacklevel=4,
            )
        materialize(scope, choices.param_init_fn, self.device)
        stays = stays_on_cpu(scope, choices, self.device)
        if choices.sync_module_states:
            synchronize(scope, self.layout.mesh)
        ignored = [buffer for inner in scope.ignored_modules for buffer in inner.buffers(False)]
        values = [buffer.data for buffer in ignored]
        if self.tops:
            fully_shard(self.tops, **self.shard_arguments)
        for buffer, value in zip(ignored, values, strict=True):
            buffer.data = value
        if choices.device_id is not None:
            move_buffers(scope.modules, self.device)  # a container is no top
        if stays:
            params = set(scope.params())
            for inner in scope.modules:
                inner._apply(lambda t: t.cpu() if t in params else t, recurse=False)
        return tuple(_tops(module))

    @property
    def tops(self) -> list[nn.Module]:
        """The modules to shard: the module, or those in a container that are not sharded yet."""
        return [top for top in _tops(self.module) if not isinstance(top, FSDPModule)]

    @property
    def shard_arguments(self) -> dict[str, Any]:
        """The arguments for ``fully_shard``."""
        return {
            "mesh": self.layout.mesh,
            "dp_mesh_dims": self.layout.dims,
            "reshard_after_forward": self.layout.strategy.reshard_after_forward,
            "mp_policy": (self.choices.mixed_precision or options.MixedPrecision()).policy(),
            "offload_policy": self.choices.cpu_offload.policy(),
            "ignored_params": set(self.scope.ignored_params),
        }


def _tops(module: nn.Module) -> list[nn.Module]:
    """Return the module if it has a forward, else the outermost modules in it that have one."""
    if has_forward(module):
        return [module]
    for name in module._parameters:
        raise ValueError(
            f"Expected a container without parameters of its own, got '{name}' of "
            f"{type(module).__name__}, which has no forward to gather it; register it elsewhere"
        )
    return [top for child in module.children() for top in _tops(child)]
