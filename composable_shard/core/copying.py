"""Deep copies and pickles of sharded modules, with the same shards, groups and settings.

A module refers to its group, parameters and hooks, so a copy of its attributes reaches them. First,
empty objects are made for the copies of groups and parameters. Then the modules are copied, and
last the empty objects are filled.

A pickle reaches our objects through the attributes of modules, too; each object chooses the state
to save. A group and its modules refer to each other, so either may be restored first. When all of
them are restored, the group joins the tree.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.extension import move_into_buckets
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.hooks import record_owners
from composable_shard.core.state_dict import record_params
from composable_shard.core.storage import ShardedParam
from composable_shard.core.tree import Tree, join_tree
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy

Memo = dict[int, Any]


def copy_sharded(module: nn.Module, memo: Memo) -> nn.Module:
    """Return a deep copy of a sharded module and all modules below.

    The copy has no gradients, like ``copy.deepcopy`` of a parameter.

    Args:
        module: A sharded module.
        memo: The memo of ``copy.deepcopy``.

    Raises:
        ShardError: If its shards are not in memory.

    Collective: none.
    Memory: a second copy of this rank's shards.
    """
    distinct = dict.fromkeys(map(group_of, module.modules()))
    groups = [group for group in distinct if group is not None and id(group) not in memo]
    for group in groups:  # groups that are not being copied already, the outer ones first
        group.check_in_memory("to be copied")
    for group in groups:
        group.reshard()
        memo[id(group)] = object.__new__(ParamGroup)
        for param in group.params:
            memo[id(param)] = object.__new__(ShardedParam)
            memo[id(param.sharded)] = _copied_sharded(param, memo.get(id(param.sharded)))
    copied = memo[id(module)] = object.__new__(type(module))
    copied.__setstate__(copy.deepcopy(module.__getstate__(), memo))
    for group in groups:
        _fill(group, memo)
    for group in reversed(groups):  # the inner ones first, as fully_shard is called
        record_owners(memo[id(group)])
        record_params(memo[id(group)])
        join_tree(memo[id(group)]).is_last_backward = group.tree.is_last_backward
    return copied


@torch.no_grad()
def _copied_sharded(param: ShardedParam, copied: nn.Parameter | None) -> nn.Parameter:
    """Copy the sharded parameter, unless it was copied before, for example with an optimizer."""
    local = _torch.local_tensor(param.sharded)
    if copied is None:
        with torch.inference_mode(False):
            new = _torch.cloned(local)
            spec = param.spec("sharded", new.dtype)
            copied = _torch.parameter_of(_torch.from_local(new, spec), param.sharded.requires_grad)
    new = _torch.local_tensor(copied)
    if type(new) is torch.Tensor:
        new.__dict__.update(local.__dict__)
    for name, value in param.sharded.__dict__.items():
        copied.__dict__.setdefault(name, value)
    if param.sharded.grad_dtype != copied.grad_dtype:
        copied.grad_dtype = param.sharded.grad_dtype
    return copied


def _fill(group: ParamGroup, memo: Memo) -> None:
    """Fill the empty copies of a group and of its parameters."""
    params = []
    for param in group.params:
        copied_param: ShardedParam = memo[id(param)]
        copied_param.__dict__.update(param.__dict__)
        copied_param.slots = [
            replace(slot, module=copy.deepcopy(slot.module, memo)) for slot in param.slots
        ]
        copied_param.forget_unsharded()
        copied_param.sharded = memo[id(param.sharded)]
        params.append(copied_param)
    copied: ParamGroup = memo[id(group)]
    modules = tuple(copy.deepcopy(module, memo) for module in group.modules)
    _init(copied, modules, params, group.mesh, group.policy)
    _copy_settings(group, copied, memo)


def _init(
    group: ParamGroup,
    modules: tuple[nn.Module, ...],
    params: Sequence[ShardedParam],
    mesh: ShardMesh,
    policy: MixedPrecisionPolicy,
) -> None:
    """Initialize an empty group."""
    buckets = move_into_buckets(params)
    group.__init__(modules, params, buckets, mesh, policy)  # type: ignore[misc]


def _copy_settings(source: ParamGroup, target: ParamGroup, memo: Memo) -> None:
    """Copy the settings; leave out prefetched groups that are not copied."""
    settings = source.settings.__dict__
    target.settings.__dict__.update(settings)
    target.settings.__dict__.update(_prefetch_lists(settings, lambda group: memo.get(id(group))))
    for mesh, channel in source.channels.items():
        target.channels[mesh].__dict__.update(channel.__dict__)


def _prefetch_lists(settings: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Apply ``change`` to all prefetched groups; leave out those that it maps to ``None``."""
    lists = {name: settings[name] for name in ("forward_prefetch", "backward_prefetch")}
    return {
        name: None if groups is None else [new for new in map(change, groups) if new is not None]
        for name, groups in lists.items()
    }


# Pickles --------------------------------------------------------------------------------------


class SavedModule(NamedTuple):
    """The pickled form of a sharded module.

    Attributes:
        attributes: The state that the module itself would pickle, without the other two fields.
        states: The states of composable functions of torch, by function.
        applied: Torch's registry of these functions, by name.
    """

    attributes: Any
    states: dict[Any, Any]
    applied: dict[str, Any]


class _SavedGroup(NamedTuple):
    """The pickled form of a group. It refers to prefetched groups by name.

    A reference to a prefetched group would make the pickle as deep as the chain of layers.
    """

    modules: tuple[nn.Module, ...]
    params: list[ShardedParam]
    mesh: ShardMesh
    policy: MixedPrecisionPolicy
    name: str
    settings: dict[str, Any]
    channels: dict[ShardMesh, tuple[dict[str, Any], bool]]
    is_last_backward: bool


_SAVED = "_composable_shard_saved"


def save_module(module: nn.Module) -> SavedModule:
    """Return the pickled form of a sharded module. Collective: none.

    Memory: none here; the groups below free their unsharded parameters.
    """
    for inner in module.modules():
        group = group_of(inner)
        if group is not None:
            group.reshard()
    attributes = module.__getstate__()
    states, applied = {}, {}
    if isinstance(attributes, dict):
        attributes = dict(attributes)
        states = dict(attributes.pop(_torch.COMPOSABLE_STATE, {}))
        applied = dict(attributes.pop(_torch.COMPOSABLE_REGISTRY, {}))
    return SavedModule(attributes, states, applied)


def restore_module(module: nn.Module, saved: SavedModule) -> ParamGroup:
    """Shard a module again after its attributes are restored; return its group."""
    group = group_of(module)
    assert group is not None
    module.__dict__[_torch.COMPOSABLE_STATE] = saved.states
    module.__dict__[_torch.COMPOSABLE_REGISTRY] = saved.applied
    _join(group)
    return group


def _reduce_group(group: ParamGroup) -> tuple[Any, ...]:
    names = _prefetch_lists(group.settings.__dict__, attrgetter("name"))
    settings = {**group.settings.__dict__, "hook_stream": None, **names}
    saved = _SavedGroup(
        group.modules,
        group.params,
        group.mesh,
        group.policy,
        group.name,
        settings,
        {mesh: channel.saved() for mesh, channel in group.channels.items()},
        group.tree.is_last_backward,
    )
    return object.__new__, (ParamGroup,), saved, None, None, _restore_group


def _restore_group(group: ParamGroup, saved: _SavedGroup) -> None:
    _init(group, saved.modules, saved.params, saved.mesh, saved.policy)
    group.settings.__dict__.update(saved.settings)
    group.settings.__dict__.update(_prefetch_lists(saved.settings, lambda name: None))
    for mesh, channel in saved.channels.items():
        group.channels[mesh].restore(*channel)
    group.__dict__[_SAVED] = saved
    Tree([group])
    _join(group)


copyreg.pickle(ParamGroup, _reduce_group)


def _join(group: ParamGroup) -> None:
    """Join the groups below a restored group to one tree, if all of them are restored."""
    modules = [inner for top in group.__dict__.get("modules", ()) for inner in _restored(top)]
    if not modules or not all("_modules" in module.__dict__ for module in modules):
        return
    for module in modules:
        _torch.reserve_hook_ids(module)
    groups = list(dict.fromkeys(inner for m in modules if (inner := group_of(m)) is not None))
    if not all(_SAVED in inner.__dict__ for inner in groups):
        return
    join_tree(group).is_last_backward = group.__dict__[_SAVED].is_last_backward
    by_name = {inner.__dict__[_SAVED].name: inner for inner in groups}
    for inner in groups:
        record_owners(inner)
        record_params(inner)
        prefetched = _prefetch_lists(inner.__dict__[_SAVED].settings, by_name.get)
        inner.settings.__dict__.update(prefetched)


def _restored(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those modules below it that are restored."""
    yield module
    for child in module.__dict__.get("_modules", {}).values():
        if child is not None:
            yield from _restored(child)
