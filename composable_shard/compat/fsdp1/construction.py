"""Making wrappers: which modules below get one, and how a module is sharded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from composable_shard import FSDPModule, fully_shard
from composable_shard.compat.fsdp1.choices import (
    Choices,
    CPUOffload,
    ExemptPrecision,
    MixedPrecision,
)
from composable_shard.compat.fsdp1.devices import materialize, stays_on_cpu, synchronize
from composable_shard.compat.fsdp1.layouts import Layout
from composable_shard.compat.fsdp1.scope import Scope
from composable_shard.compat.fsdp1.wrap_policies import AutoWrapPolicy, choose, in_order


def wrap_below(
    root: nn.Module,
    scope: Scope,
    policy: AutoWrapPolicy,
    wrapper_class: type[nn.Module],
    arguments: dict[str, Any],
) -> None:
    """Replace the modules below ``root`` that a policy picks by wrappers, inner ones first."""
    wrapped = {m for m in root.modules() if isinstance(m, (wrapper_class, FSDPModule))}
    left_alone = scope.ignored_modules | wrapped
    chosen = choose(root, policy, left_alone, scope.ignored_params)
    precision = arguments["mixed_precision"]
    if isinstance(precision, MixedPrecision):
        for module in root.modules():
            if module is root or module in left_alone or not precision.exempts(module):
                continue
            exempt = ExemptPrecision.of(module, precision)
            chosen[module] = {**chosen.get(module, {}), "mixed_precision": exempt}
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in vars(parent)["_modules"].items():
            places.setdefault(child, []).append((parent, name))
    for module, own in in_order(root, chosen):
        wrapper = wrapper_class(module, **{**arguments, **own})
        for parent, name in places[module]:
            setattr(parent, name, wrapper)


def arguments_below(
    choices: Choices, scope: Scope, layout: Layout, device: torch.device
) -> dict[str, Any]:
    """Return the arguments of the wrappers below one, the same ranks and device for all."""
    arguments = choices.as_arguments()
    arguments["ignored_states"] = scope.ignored_params
    if choices.device_id is not None:
        arguments["device_id"] = device
    if layout.strategy.is_hybrid:
        arguments |= {"process_group": None, "device_mesh": layout.mesh}
    return arguments


def shard(
    module: nn.Module, scope: Scope, layout: Layout, choices: Choices, device: torch.device
) -> tuple[nn.Module, ...]:
    """Shard a module, or what is in a container; return which modules are sharded."""
    tops = [module]
    if type(module).forward is nn.Module.forward:
        tops = list(_with_forward(module))
        warnings.warn(
            f"A container without a forward, {type(module).__name__}, cannot gather the parameters "
            "in it: they are gathered when one of its modules is called; wrap those one by one",
            stacklevel=3,
        )
    materialize(scope, choices.param_init_fn, device)
    stays = stays_on_cpu(scope, choices, device)
    if choices.sync_module_states:
        synchronize(scope, layout.mesh)
    kept = [(inner, dict(inner._buffers)) for inner in scope.ignored_modules]
    tops = [top for top in tops if not isinstance(top, FSDPModule)]
    if tops:
        fully_shard(
            tops,
            mesh=layout.mesh,
            dp_mesh_dims=layout.dims,
            reshard_after_forward=layout.strategy.reshard_after_forward,
            mp_policy=(choices.mixed_precision or MixedPrecision()).policy(),
            offload_policy=(choices.cpu_offload or CPUOffload()).policy(),
            ignored_params=set(scope.ignored_params),
        )
    for inner, buffers in kept:
        inner._buffers.update(buffers)
    if stays:
        own = set(scope.params())
        for inner in scope.modules:
            inner._apply(lambda t: t.cpu() if t in own else t, recurse=False)
    return tuple(tops)


def _with_forward(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules in a container that have a forward."""
    for name in container._parameters:
        raise ValueError(
            f"Expected a container without parameters of its own, got '{name}' of "
            f"{type(container).__name__}, which has no forward to gather it; register it elsewhere"
        )
    for child in container.children():
        if type(child).forward is nn.Module.forward:
            yield from _with_forward(child)
        else:
            yield child
