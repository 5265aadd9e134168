"""Checks of a tree before its first gather: is all of it sharded, and alike on all ranks?

A collective that two ranks call with different sizes, or that only one of them calls, aborts or
hangs without saying why. So the facts that decide which collectives there will be are compared
first: one number each, and the whole description only if the numbers differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.codec import has_extension, has_grad_extension
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.failures import watched
from composable_shard.core.transport.process_groups import (
    compare,
    first_difference,
    gather_objects,
)
from composable_shard.errors import RankMismatchError, ShardError
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy

_IGNORED = "_composable_shard_ignored"
"""The attribute of a module that names its parameters that users left plain."""

_last_tag = 0
"""The last tag that this rank has heard of, in any process group.

Hazard: a message that a failed model has left behind is taken for one of another model. Guard: no
two trees of a process share a tag, though their process groups differ.
"""


def ignore(modules: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> None:
    """Note that users know of parameters of ``modules`` that stay plain.

    Hazard: a load, a move or a copy replaces them, and torch swaps no tensor that is weakly
    referenced. Guard: the names are noted on their modules, and not the tensors.
    """
    ids = set(map(id, params))
    if not ids:
        return
    for module in modules:
        names = [name for name, param in module._parameters.items() if id(param) in ids]
        if names:
            module.__dict__[_IGNORED] = (*module.__dict__.get(_IGNORED, ()), *names)


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
        and name not in module.__dict__.get(_IGNORED, ())
    ]
    if names:
        warnings.warn(
            f"Expected all trainable parameters to be sharded or ignored, got {names}, added after "
            "fully_shard, which each rank trains by itself; add them before it, shard new "
            "adapters of a sharded base alone, or pass them as ignored_params if their gradients "
            "are averaged elsewhere",
            stacklevel=2,
        )


def agree_on_model(groups: Sequence[Any]) -> None:
    """Raise the same error on all ranks if ``groups`` differ between them; else give them tags.

    Args:
        groups: The groups of a tree.

    Raises:
        RankMismatchError: On all ranks, with the first difference.

    Collective: all-reduces of 48 and of 24 bytes for each process group of more than one rank;
        another if parameters were sharded on the meta device; more only if it raises.
    """
    process_groups: dict[dist.ProcessGroup, _Members] = {}
    for group in groups:
        for channel in group.channels.values():
            channel.set_label(group.label)
            for ranks in channel.mesh.process_groups:
                process_groups.setdefault(ranks, []).append((group, channel))
    told: dict[dist.ProcessGroup, list[str]] = {}
    differs = False  # those who hear of a difference tell the next process group
    for ranks, members in process_groups.items():
        facts = [line for group, channel in members for line in _facts(group, channel.mesh)]
        told[ranks] = facts
        filled = [
            (f"'{param.name}' of {group.label}", local)
            for group, channel in members
            for param in group.params
            if param.began_on_meta and param.mesh == channel.mesh
            if channel.mesh.shard_group is ranks
            if (local := _local_of(param)).is_cpu and not _torch.is_subclass(local)
        ]
        tag, differs = _agree(ranks, members, facts, filled, differs)
        for place, (_, channel) in enumerate(members):
            if channel.mesh.shard_group is ranks:
                channel.set_tag(tag + place)
    for ranks, members in process_groups.items():  # the last group's news reaches the first too
        _, (heard,) = compare("", ranks, members[0][1].mesh.device, int(differs))
        differs = bool(heard)
    if differs:
        raise RankMismatchError(_difference(told))


_Filled = list[tuple[str, torch.Tensor]]
"""The shards that users have filled, with the names of their parameters."""


_Members = list[tuple[Any, Channel]]
"""The groups that communicate over a process group, with their channels."""

_OP = "comparing the model with that of the other ranks"


def _agree(
    ranks: dist.ProcessGroup, members: _Members, facts: list[str], filled: _Filled, differs: bool
) -> tuple[int, bool]:
    """Compare ``facts`` over ``ranks``.

    Returns:
        The first tag of the members, and whether any of the ranks knows a difference.
    """
    global _last_tag
    device = members[0][1].mesh.device
    with watched(ranks, _OP):
        numbers = (_last_tag, len(filled), -len(filled), int(differs))
        is_same, (last, most, fewest, heard) = compare("\n".join(facts), ranks, device, *numbers)
    _last_tag = max(_last_tag, last + len(members))
    if is_same and 0 < most == -fewest and _torch.backend_name(ranks, device) != "fake":
        _warn_of_same_rows(ranks, device, filled)
    return last + 1, not is_same or bool(heard)


def _difference(told: Mapping[dist.ProcessGroup, list[str]]) -> str:
    """Return the first difference, alike on all ranks: each group tells it to the next."""
    texts: list[str] = []
    for ranks, facts in [*told.items()] * 2:
        heard = gather_objects((facts, texts), ranks, _OP)
        texts = [text for _, theirs in heard for text in theirs]
        lines = [theirs for theirs, _ in heard]
        if any(theirs != facts for theirs in lines):
            numbers = dist.get_process_group_ranks(ranks)
            texts.append(first_difference(lines, numbers, "model"))
    return texts[0]


def _warn_of_same_rows(ranks: dist.ProcessGroup, device: torch.device, filled: _Filled) -> None:
    """Warn if all ranks hold the same random numbers, as those do that fill shards by one seed."""
    digests = []
    for _, local in filled:
        first = local.detach().flatten()[:64].contiguous()
        held = first.view(torch.uint8).tolist()  # bytes, of any dtype
        is_random = len({*held}) > max(4, len(held) / 4)  # no constants
        digests.append(hash(tuple(held)) >> 2 if is_random else ranks.rank())
    _, found = compare("", ranks, device, *digests, *(-digest for digest in digests))
    pairs = zip(filled, found, found[len(filled) :], strict=False)
    same = [name for (name, _), most, least in pairs if most == -least]
    if same:
        warnings.warn(
            f"All ranks hold the same rows of {same[0]}: on the CPU, ranks with the same seed fill "
            "their shards with the same random numbers; call init_sharded(model, seed=...) instead",
            stacklevel=2,
        )


def _facts(group: Any, mesh: ShardMesh) -> list[str]:
    name = group.label
    policy = group.policy
    replicas = f" times {mesh.num_replicas} replicas" if mesh.num_replicas > 1 else ""
    return [
        f"{name} over {mesh.num_shards} ranks{replicas}, param_dtype {policy.param_dtype}, "
        f"reduce_dtype {policy.reduce_dtype}",
        *(
            f"parameter '{param.name}' of {name}: {_fact(param, policy)}"
            for param in group.params
            if param.mesh == mesh
        ),
    ]


def _local_of(param: Any) -> torch.Tensor:
    """Return the local shard of the tensor that is registered as a parameter."""
    current = param.slots[0].get()
    return _torch.local_tensor(current) if isinstance(current, DTensor) else param.local


def _fact(param: Any, policy: MixedPrecisionPolicy) -> str:
    local, (shape, dim, asked) = _local_of(param), param.facts()
    kind = "trainable" if param.sharded.requires_grad else "frozen"
    placement = "replicated" if dim is None else f"Shard({dim})"
    extension = ", with its own all-gather" if has_extension(local) else ""
    extension += ", with its own reduce-scatter" if has_grad_extension(local) else ""
    own = param.policy.param_dtype
    dtypes = f", computed in {own}" if own != policy.param_dtype else ""
    dtypes += f", gradients in {asked}" if asked is not None else ""
    return (
        f"shape {list(shape)}, {local.dtype}, {placement}, "
        f"{kind}, on {local.device.type}{dtypes}{extension}"
    )
