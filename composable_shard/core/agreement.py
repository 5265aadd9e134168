"""Checks before the first gather: all ranks must hold the same model.

If ranks call a collective with different sizes, or only some ranks call it, the collective aborts
or hangs without an explanation. So all ranks first compare the facts that determine their
collectives. They compare hashes, and exchange the facts themselves only if the hashes differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.codec import has_extension, has_grad_extension
from composable_shard.core.storage import Slot, owner_of_full
from composable_shard.core.transport.failures import watched
from composable_shard.core.transport.process_groups import compare, first_difference, gather_objects
from composable_shard.errors import RankMismatchError, ShardError
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy

# The attribute of a module that lists the names of its ignored parameters.
_IGNORED = "_composable_shard_ignored"

# The last message tag that this rank has agreed on, in any process group.
#
# Hazard: a model reads a message that another model has left behind after a failure. Guard: no two
# trees of a process share a tag, even if their process groups differ.
_last_tag = 0


def record_ignored(modules: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> None:
    """Record the ignored parameters of ``modules``, so that `check_modules` does not warn.

    This stores names on the modules, and no references to the tensors: a load, a move or a copy
    replaces tensors, and torch cannot swap a tensor that has weak references.
    """
    ids = set(map(id, params))
    for module in modules:
        names = [name for name, param in module._parameters.items() if id(param) in ids]
        if names:
            module.__dict__[_IGNORED] = (*module.__dict__.get(_IGNORED, ()), *names)


def check_modules(groups: Sequence[Any]) -> None:
    """Check a whole tree for mistakes that a single group does not show.

    Args:
        groups: The groups of the tree, the root first.

    Raises:
        ShardError: On all ranks, if ``replicate`` was applied to a module after its parameters were
            sharded, or if no group contains all modules with a tied parameter.

    Warns: If trainable parameters are neither sharded, replicated nor ignored.
    """
    _refuse_shared(module for group in groups for module in group.all_modules())
    for group in groups:
        holders = {slot.module for param in group.params for slot in param.slots}
        for top in group.modules:
            for name, module in top.named_modules():
                is_inner = module is not top and _torch.is_replicated(module)
                if is_inner and not holders.isdisjoint(module.modules()):
                    raise ShardError(
                        f"Expected replicate of '{name}' before fully_shard of {group.label}, "
                        "which shards its parameters, got replicate after it; apply replicate first"
                    )
    root = groups[0]
    known = {id(param.__dict__.get("unsharded")) for group in groups for param in group.params}
    for module in root.all_modules():
        known.update(id(module._parameters.get(name)) for name in module.__dict__.get(_IGNORED, ()))
        if _torch.is_replicated(module):
            known.update(map(id, module.parameters()))
    names = [
        name
        for top in root.modules
        for name, param in top.named_parameters()
        if param.requires_grad and not isinstance(param, DTensor) and id(param) not in known
    ]
    if names and root.mesh.num_ranks > 1:
        warnings.warn(
            f"Expected all trainable parameters to be sharded or ignored, got {names} added after "
            "fully_shard, so each rank trains them by itself; call fully_shard on the new modules "
            "alone, or pass them as ignored_params if their gradients are averaged elsewhere",
            stacklevel=2,
        )


def _refuse_shared(modules: Iterable[nn.Module]) -> None:
    """Raise if a group owns a parameter that is also tied to a module outside of that group."""
    for slot in (Slot(module, name) for module in modules for name in module._parameters):
        param = slot.get()
        owner = None if param is None else owner_of_full(param)
        if owner is not None and slot not in owner.slots:
            slots = (*owner.slots, slot)
            places = [f"'{each.name}' of {type(each.module).__name__}" for each in slots]
            raise ShardError(
                "Expected one group to contain all modules with a tied parameter, got none for "
                f"{', '.join(places)}; apply fully_shard to the module that contains them"
            )


_OP = "comparing the model between ranks"


def agree_on_model(groups: Sequence[Any]) -> None:
    """Give channels their tags; raise the same error on all ranks if their ``groups`` differ.

    Args:
        groups: The groups of a tree.

    Raises:
        RankMismatchError: On all ranks, with the first difference.

    Collective: all-reduces of 48 and of 24 bytes for each process group of more than one rank; if
        the groups differ, also the all-gathers of :func:`_difference`.
    """
    global _last_tag
    users_of: dict[dist.ProcessGroup, list[tuple[Any, ShardMesh]]] = {}
    for group in groups:
        for channel in group.channels.values():
            channel.set_label(group.label)
            for process_group in channel.mesh.process_groups:
                users_of.setdefault(process_group, []).append((group, channel.mesh))
    facts_of: dict[dist.ProcessGroup, list[str]] = {}
    differs = False  # whether this rank knows of a difference in any process group so far
    for process_group, users in users_of.items():
        facts = facts_of[process_group] = [line for user in users for line in _facts(*user)]
        name, digest = _random_rows(process_group, users)
        numbers, device = (_last_tag, int(differs), digest, -digest), users[0][1].device
        with watched(process_group, _OP):
            is_same, results = compare("\n".join(facts), process_group, device, *numbers)
        largest_tag, any_differs, largest_digest, negated_smallest = results
        differs = bool(any_differs) or not is_same
        _last_tag = max(_last_tag, largest_tag + len(users))
        for tag, (group, mesh) in enumerate(users, largest_tag + 1):
            if mesh.shard_group is process_group:
                group.channels[mesh].set_tag(tag)
        if name and largest_digest == -negated_smallest and not differs:  # all digests are equal
            warnings.warn(
                f"Expected ranks to hold different rows of {name}, got the same random numbers on "
                "all of them, from the same seed; call init_sharded(model, seed=...) instead",
                stacklevel=2,
            )
    # A difference in a later process group must also reach the ranks of earlier ones.
    for process_group, users in users_of.items():
        _, (any_differs,) = compare("", process_group, users[0][1].device, int(differs))
        differs = bool(any_differs)
    if differs:
        raise RankMismatchError(_difference(facts_of))


def _difference(facts_of: Mapping[dist.ProcessGroup, list[str]]) -> str:
    """Return the text of the first difference, the same on all ranks.

    In each of two rounds, and in each of its process groups, a rank exchanges the differences that
    it knows. A rank of two process groups passes differences on from one to the other. So after the
    second round, all ranks know the first difference.

    Collective: all-gathers of objects, two for each process group.
    """
    texts: list[str] = []
    for process_group, facts in [*facts_of.items()] * 2:
        gathered = gather_objects((facts, texts), process_group, _OP)
        texts = [text for _, known in gathered for text in known]
        all_facts = [of_rank for of_rank, _ in gathered]
        if any(of_rank != facts for of_rank in all_facts):
            ranks = dist.get_process_group_ranks(process_group)
            texts.append(first_difference(all_facts, ranks, "model"))
    return texts[0]


def _random_rows(
    process_group: dist.ProcessGroup, users: Iterable[tuple[Any, ShardMesh]]
) -> tuple[str, int]:
    """Find the first parameter that was sharded on meta and then got random values on the CPU.

    Returns:
        The name of the parameter, and a digest of its first elements on this rank. If there is no
        such parameter, an empty name and the index of this rank: a number that no two ranks share.
    """
    for group, mesh in users:
        is_fake = _torch.backend_name(process_group, mesh.device) == "fake"
        if is_fake or mesh.shard_group is not process_group:
            continue
        for param in group.params:
            local = _local_of(param)
            is_filled = param.began_on_meta and param.mesh == mesh and local.is_cpu
            if not is_filled or _torch.is_subclass(local):
                continue
            elements = local.detach().flatten()[:64].contiguous()
            values = elements.view(torch.uint8).tolist()  # bytes, for any dtype
            if len({*values}) > max(4, len(values) / 4):  # random values, not equal constants
                # After the shift, the negated digest fits into 64 bits, too.
                return f"'{param.name}' of {group.label}", hash(tuple(values)) >> 2
    return "", process_group.rank()


def _facts(group: Any, mesh: ShardMesh) -> list[str]:
    """Return the facts about a group and its parameters on ``mesh`` that ranks must agree on."""
    name, policy = group.label, group.policy
    replicas = f" times {mesh.num_replicas} replicas" if mesh.num_replicas > 1 else ""
    shared = (
        f"{name} over {mesh.num_shards} ranks{replicas}, param_dtype {policy.param_dtype}, "
        f"reduce_dtype {policy.reduce_dtype}{policy.wires()}"
    )
    params = [param for param in group.params if param.mesh == mesh]
    return [shared, *(f"parameter '{p.name}' of {name}: {_fact(p, policy)}" for p in params)]


def _local_of(param: Any) -> torch.Tensor:
    """Return the local tensor of the registered DTensor; ``param.local`` if none is registered."""
    current = param.slots[0].get()
    return _torch.local_tensor(current) if isinstance(current, DTensor) else param.local


def _fact(param: Any, policy: MixedPrecisionPolicy) -> str:
    local, (shape, dim, grad_dtype) = _local_of(param), param.facts()
    kind = "trainable" if param.sharded.requires_grad else "frozen"
    placement = "replicated" if dim is None else f"Shard({dim})"
    extension = ", with all-gather hooks" if has_extension(local) else ""
    extension += ", with reduce-scatter hooks" if has_grad_extension(local) else ""
    dtype = param.policy.param_dtype
    dtypes = f", computed in {dtype}" if dtype != policy.param_dtype else ""
    dtypes += f", gradients in {grad_dtype}" if grad_dtype is not None else ""
    return (
        f"shape {list(shape)}, {local.dtype}, {placement}, "
        f"{kind}, on {local.device.type}{dtypes}{extension}"
    )
