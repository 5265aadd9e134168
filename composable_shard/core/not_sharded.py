"""Trainable parameters that we do not shard.

Some are ignored, some belong to modules that torch's ``replicate`` keeps whole on every rank, some
were added too late, and some belong to modules of which only children were sharded.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.errors import ShardError

_looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_ATTRIBUTE = "_composable_shard_ignored"


def ignore(modules: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> None:
    """Note that users know of parameters of ``modules`` that stay plain.

    Hazard: others take their places when they are loaded, moved or copied, and torch swaps no
    tensor to which there are weak references. Guard: what is noted is where they are.
    """
    ids = set(map(id, params))
    if not ids:
        return
    for module in modules:
        names = [name for name, param in module._parameters.items() if id(param) in ids]
        if names:
            module.__dict__[_ATTRIBUTE] = (*module.__dict__.get(_ATTRIBUTE, ()), *names)


def is_taken(module: nn.Module) -> bool:
    """Tell whether a function, ``fully_shard`` or ``replicate``, reduces a module's gradients.

    It may be torch's own ``fully_shard``.
    """
    return "fully_shard" in _torch.composable_functions(module) or _torch.is_replicated(module)


def refuse_replicated(
    tops: Iterable[nn.Module], holders: Collection[nn.Module], label: str
) -> None:
    """Raise if ``replicate`` was applied to a module after its parameters were sharded.

    Args:
        tops: The modules of a group.
        holders: The modules in which its parameters are registered.
        label: What messages call the group.

    Raises:
        ShardError: On all ranks, with the name of the module.
    """
    for top in tops:
        for name, module in top.named_modules():
            is_ours = module is not top and _torch.is_replicated(module)
            if is_ours and any(inner in holders for inner in module.modules()):
                raise ShardError(
                    f"Expected replicate of '{name}' before fully_shard of {label}, whose "
                    "parameters it holds, got it after; apply replicate first"
                )


def warn_of_plain(modules: Iterable[nn.Module], ours: Iterable[nn.Parameter | None]) -> None:
    """Warn if trainable parameters of ``modules`` are plain and were not ignored.

    Args:
        modules: Modules that are sharded.
        ours: Plain parameters that belong there.
    """
    tops = tuple(modules)
    replicated = {
        id(param)
        for top in tops
        for module in top.modules()
        if _torch.is_replicated(module)
        for param in module.parameters()
    }
    known = replicated.union(map(id, ours))
    names = [
        f"{prefix}.{name}".lstrip(".")
        for top in tops
        for prefix, module in top.named_modules()
        for name, param in module._parameters.items()
        if param is not None
        and param.requires_grad
        and not isinstance(param, DTensor)
        and id(param) not in known
        and name not in module.__dict__.get(_ATTRIBUTE, ())
    ]
    if names:
        warnings.warn(
            f"Expected all trainable parameters to be sharded or ignored, got {names}, added after "
            "fully_shard, which each rank trains by itself; add them before it, shard new "
            "adapters of a sharded base alone, or pass them as ignored_params if their gradients "
            "are averaged elsewhere",
            stacklevel=2,
        )


def warn_of_unsharded(optimizer: torch.optim.Optimizer, groups: Iterable[ParamGroup]) -> None:
    """Warn once if ``optimizer`` is going to train parameters whose gradients nobody averages.

    These are plain ones with a gradient that belong to a module of which only parts are sharded, or
    that are optimized together with sharded ones. Not meant are those that were ignored, those of
    modules that ``DistributedDataParallel`` or ``replicate`` averages, and those with gradient
    hooks, which may do so. Parameters below a sharded module are another function's business.

    Args:
        optimizer: Which is about to step.
        groups: Those that were gathered in this process.

    Time: looks some ten times at what all objects of the interpreter refer to, which takes seconds
    for a thousand parameters, but only where there is something to look for.
    """
    if optimizer in _looked_at:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    plain = [p for p in params if p.requires_grad and not isinstance(p, DTensor)]
    groups = {group for group in groups if group.mesh.num_ranks > 1}
    if plain and not any(param.grad is not None for param in plain):
        return  # the next step may be the first one of these
    _looked_at.add(optimizer)
    suspects = [p for p in plain if p.grad is not None and not _torch.has_grad_hooks(p)]
    if not suspects or not groups:
        return
    tree = _Tree(suspects, {module for group in groups for module in group.modules})
    ours = {id(param.sharded) for group in groups for param in group.params}
    is_beside_ours = any(id(param) in ours for param in params)
    names = [
        name
        for param in suspects
        if (name := tree.name_if_unsharded(param, is_beside_ours)) is not None
    ]
    if names:
        warnings.warn(
            f"Expected all trainable parameters to be sharded or ignored, got {names}, outside of "
            "all sharded modules, which each rank trains by itself: they drift apart; call "
            "fully_shard on the outermost module after its children, with them as ignored_params "
            "if their gradients are averaged elsewhere",
            stacklevel=2,
        )


def _holders(objects: Iterable[object], attribute: str) -> list[nn.Module]:
    """Return the modules that hold any of some objects in a dict of theirs.

    Hazard: a list of all objects also holds tuples that other threads are making, which breaks them
    ("SystemError: bad argument to internal function"). Guard: only what refers to these objects is
    asked for. Test: ``test_other_threads_may_make_tuples_meanwhile``.

    Args:
        objects: Parameters or modules.
        attribute: The name of the dict, such as "_parameters".
    """
    dicts = [one for one in gc.get_referrers(*objects) if type(one) is dict]
    around = gc.get_referrers(*dicts)
    around += gc.get_referrers(*[one for one in around if type(one) is dict])
    held = set(map(id, dicts))
    # isinstance would ask proxies for their class
    modules = [one for one in around if issubclass(type(one), nn.Module)]
    return [one for one in dict.fromkeys(modules) if id(one.__dict__.get(attribute)) in held]


class _Tree:
    """The modules that hold some parameters, and all that those lie in.

    Args:
        params: The parameters.
        sharded: Which modules are sharded.
    """

    def __init__(self, params: Iterable[torch.Tensor], sharded: set[nn.Module]) -> None:
        self._sharded = sharded
        self._are_around_sharded: dict[nn.Module, bool] = {}
        self._parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        inner = _holders(params, "_parameters")
        for owner in inner:
            for name, param in owner.__dict__["_parameters"].items():
                self._owners.setdefault(id(param), []).append((owner, name))
        while inner:
            outer = _holders(inner, "_modules")
            for module in inner:
                self._parents[module] = [
                    (parent, name)
                    for parent in outer
                    for name, child in parent.__dict__["_modules"].items()
                    if child is module
                ]
            inner = [module for module in outer if module not in self._parents]

    def name_if_unsharded(self, param: torch.Tensor, is_beside_ours: bool) -> str | None:
        """Return the name of a parameter that should have been sharded, ``None`` for any other."""
        owners = self._owners.get(id(param), [])
        if any(name in owner.__dict__.get(_ATTRIBUTE, ()) for owner, name in owners):
            return None
        around = {outer: None for owner, _ in owners for outer in self._outwards(owner)}
        if any(module in self._sharded or _torch.is_averaged(module) for module in around):
            return None
        if not is_beside_ours and not any(map(self._is_around_sharded, around)):
            return None
        return self._name(*owners[0]) if owners else f"one of shape {list(param.shape)}"

    def _is_around_sharded(self, module: nn.Module) -> bool:
        known = self._are_around_sharded.get(module)
        if known is None:
            known = any(part in self._sharded for part in module.modules())
            self._are_around_sharded[module] = known
        return known

    def _outwards(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield a module and all that it lies in."""
        seen, left = {module}, [module]
        while left:
            inner = left.pop()
            yield inner
            outer = {parent for parent, _ in self._parents.get(inner, ())} - seen
            seen |= outer
            left += outer

    def _name(self, module: nn.Module, name: str) -> str:
        """Name a parameter within its outermost module."""
        seen = {module}
        while outer := [place for place in self._parents.get(module, ()) if place[0] not in seen]:
            module, attribute = outer[0]
            seen.add(module)
            name = f"{attribute}.{name}"
        return name
