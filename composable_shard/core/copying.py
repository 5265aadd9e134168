"""Deep copies and pickles of sharded modules: the same shards, groups and settings.

The lists of modules to prefetch are left out; pickles also leave out streams. A copy works like a
pickle: each object chooses the state to save, and a new object gets this state.
A group and its modules refer to each other, so either may be restored first. When all modules and
groups below a group are restored, these groups join one tree.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Iterable, Iterator
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
from composable_shard.core.user_changes import carry_over
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy


def copy_sharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
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
    # Skip groups that an enclosing copy is already copying.
    groups = [group for group in _groups_below([module]) if id(group) not in memo]
    for group in groups:
        group.check_in_memory("to be copied")
    for param in (param for group in groups for param in group.params):
        memo[id(param.sharded)] = _copied_sharded(param, memo.get(id(param.sharded)))
    copied = memo[id(module)] = object.__new__(type(module))
    copied.__setstate__(copy.deepcopy(save_module(module), memo))
    for group in groups:  # share streams and the memory of backends, which cannot be pickled
        copied_group: ParamGroup = memo[id(group)]
        copied_group.settings.hook_stream = group.settings.hook_stream
        for mesh, channel in group.channels.items():
            copied_group.channels[mesh].__dict__.update(channel.__dict__)
    return copied


@torch.no_grad()
def _copied_sharded(param: ShardedParam, copied: nn.Parameter | None) -> nn.Parameter:
    """Copy the sharded parameter, unless this deepcopy has done so, such as for an optimizer."""
    local = _torch.local_tensor(param.sharded)
    if copied is None:
        with torch.inference_mode(False):
            new = _torch.cloned(local)
            spec = param.spec("sharded", new.dtype)
            copied = _torch.parameter_of(_torch.from_local(new, spec), param.sharded.requires_grad)
    new = _torch.local_tensor(copied)
    if type(new) is torch.Tensor:  # attributes of users, such as fsdp_pre_all_gather
        new.__dict__.update(local.__dict__)
    param.record_user_state()
    carry_over(param, copied)
    return copied


def _groups_below(modules: Iterable[nn.Module]) -> list[ParamGroup]:
    """Return the groups of some modules and of all modules below, the outer ones first."""
    below = (group_of(inner) for module in modules for inner in module.modules())
    return list(dict.fromkeys(group for group in below if group is not None))


class SavedModule(NamedTuple):
    """The pickled form of a sharded module.

    Attributes:
        attributes: The state that the module itself would pickle, without the other two fields.
        composable_states: The states of torch's composable functions on the module.
        composable_registry: Torch's registry of these functions for the module, by name.
    """

    attributes: Any
    composable_states: dict[Any, Any]
    composable_registry: dict[str, Any]


class _SavedGroup(NamedTuple):
    """The saved form of a group."""

    modules: tuple[nn.Module, ...]
    params: list[ShardedParam]
    mesh: ShardMesh
    policy: MixedPrecisionPolicy
    settings: dict[str, Any]
    channels: dict[ShardMesh, tuple[dict[str, Any], bool]]  # see `Channel.saved`

    def __deepcopy__(self, memo: dict[int, Any]) -> _SavedGroup:
        """Copy the modules and parameters; share everything else."""
        modules, params = copy.deepcopy((self.modules, self.params), memo)
        return self._replace(modules=modules, params=params)


_SAVED = "_composable_shard_saved"


def save_module(module: nn.Module) -> SavedModule:
    """Return the saved form of a sharded module. Collective: none.

    Memory: frees the unsharded parameters of the groups below.
    """
    for group in _groups_below([module]):
        group.reshard()
    attributes = module.__getstate__()
    states, applied = {}, {}
    if isinstance(attributes, dict):
        attributes = dict(attributes)
        states = dict(attributes.pop(_torch.COMPOSABLE_STATE, {}))
        applied = dict(attributes.pop(_torch.COMPOSABLE_REGISTRY, {}))
    return SavedModule(attributes, states, applied)


def restore_module(module: nn.Module, saved: SavedModule) -> ParamGroup:
    """Restore and return the group of a module that already has its attributes again."""
    group = group_of(module)
    assert group is not None
    module.__dict__[_torch.COMPOSABLE_STATE] = saved.composable_states
    module.__dict__[_torch.COMPOSABLE_REGISTRY] = saved.composable_registry
    attributes = group.__dict__
    if _SAVED in attributes:  # else unpickling has not reached the group's own state yet
        if "tree" not in attributes:
            _restore_group(group, attributes[_SAVED])
        _join(group)
    return group


def _pickle_group(group: ParamGroup) -> tuple[Any, ...]:
    # With references to prefetched groups, a pickle would nest as deep as the chain of layers.
    omitted = {"hook_stream": None, "forward_prefetch": (), "backward_prefetch": ()}
    settings = {**group.settings.__dict__, **omitted}
    channels = {mesh: channel.saved() for mesh, channel in group.channels.items()}
    saved = _SavedGroup(group.modules, group.params, group.mesh, group.policy, settings, channels)
    return object.__new__, (ParamGroup,), {_SAVED: saved}


def _restore_group(group: ParamGroup, saved: _SavedGroup) -> None:
    """Initialize an empty group, as the only group of a tree."""
    args = saved.params, move_into_buckets(saved.params), saved.mesh, saved.policy
    group.__init__(saved.modules, *args)  # type: ignore[misc]
    group.settings.__dict__.update(saved.settings)
    for mesh, channel in saved.channels.items():
        group.channels[mesh].restore(*channel)
    Tree([group])


copyreg.pickle(ParamGroup, _pickle_group)


def _join(group: ParamGroup) -> None:
    """Put the groups below a restored group into one tree, if all of them are restored."""
    modules = [inner for top in group.modules for inner in _restored(top)]
    if not all("_modules" in module.__dict__ for module in modules):
        return
    for module in modules:
        _torch.reserve_hook_ids(module)  # so that new hooks do not replace restored ones
    groups = _groups_below(group.modules)
    if not all("tree" in inner.__dict__ for inner in groups):
        return
    join_tree(group)
    for inner in groups:
        record_owners(inner)
        record_params(inner)


def _restored(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, and all below it that can be reached through restored modules."""
    yield module
    for child in module.__dict__.get("_modules", {}).values():
        if child is not None:
            yield from _restored(child)
