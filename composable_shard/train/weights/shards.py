"""What this rank holds of a model, and what of it has changed: nothing is communicated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from composable_shard import _torch
from composable_shard.arguments import check_type
from composable_shard.train.full import Box, boxes_of
from composable_shard.train.weights.entries import Entry, contents_of

# Versions -----------------------------------------------------------------------------------------

Version = tuple[int, ...]
"""Equal if nothing has been seen to change in between; its numbers mean nothing."""


# Attributes of tensors: with a weak reference to it, a parameter could no longer be converted.
_SERIAL = "_composable_shard_serial"  # which tensor it is, of all that this process has seen
_STEPS = "_composable_shard_num_steps"  # that optimizers have made which have it
_serials = count()


@cache
def _watch_steps() -> None:
    """Count the steps of all optimizers from now on.

    Hazard: a foreach or fused step moves no version counter. Guard: this. Test:
    ``test_every_change_is_seen``.
    """
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                vars(param)[_STEPS] = vars(param).get(_STEPS, 0) + 1


def _version(entry: Entry) -> Version:
    tensor, seen = entry.tensor, vars(entry.tensor)
    if _SERIAL not in seen:
        seen[_SERIAL] = next(_serials)
    leaves = _torch.leaves(entry.local)
    counted = {id(one): one for one in (tensor, entry.local, *leaves)}
    counters = sum(one._version for one in counted.values() if not one.is_inference())
    return seen[_SERIAL], seen.get(_STEPS, 0), counters, *(leaf.data_ptr() for leaf in leaves)


# What a rank holds --------------------------------------------------------------------------------


class LocalShard(NamedTuple):
    """A part of a full tensor that this rank holds.

    Attributes:
        name: The first name of the tensor in the model.
        box: Which part it is: a slice of each dim of the full tensor.
        tensor: The part itself, in the memory of the model.
        version: Compare it with a later one, by ``==``, to see whether the tensor has changed.
    """

    name: str
    box: Box
    tensor: torch.Tensor
    version: Version


def local_shards(model: nn.Module) -> Iterator[LocalShard]:
    """Yield what this rank holds of the parameters and persistent buffers of a model.

    ``full[shard.box]`` is ``shard.tensor`` for every one of them, and together those of all ranks
    are all of the model. As a rule there is one for a tensor, none where a rank holds no row of it,
    and several where tensor parallelism leaves a rank rows that are no neighbours. What is
    replicated every rank yields as a whole. A tensor that is tied comes once.

    Args:
        model: The model, sharded or not.

    Raises:
        TypeError: If ``model`` is not a module.
        ShardError: In a forward or backward.

    Collective: none.
    Memory: none; tensors are views of the model's.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def held():
        ...     model = fully_shard(nn.Linear(2, 3, bias=False))
        ...     return [(shard.box[0], shard.tensor.shape) for shard in local_shards(model)]
        >>> run_threads(held, 2)
        [[(slice(0, 2, None), torch.Size([2, 2]))], [(slice(2, 3, None), torch.Size([1, 2]))]]
    """
    _watch_steps()
    for entry in contents_of(model, "local_shards").entries:
        local, version = entry.local.detach(), _version(entry)
        boxes = list(boxes_of(entry.tensor))
        for box, own in boxes:
            part = local if len(boxes) == 1 else local[own]
            yield LocalShard(entry.names[0], box, part, version)


def changed_since(model: nn.Module, versions: Mapping[str, Version]) -> list[str]:
    """Return the names of what has changed on this rank since :func:`local_shards` gave versions.

    Seen are writes in place, by whatever operation of torch, on the parameter or on its local
    tensor; loads; tensors that were put in the place of others; and steps of optimizers, for all
    parameters that they have and that need a gradient, whether these came out the same or not. Not
    seen are writes that torch does not count either: into ``.data``, through NumPy, or by foreach
    functions outside of an optimizer.

    Args:
        model: The model.
        versions: By name, the versions from before. What is not in it has changed.

    Returns:
        Names in the order of the model; those of which this rank holds nothing are left out.

    Raises:
        TypeError: If ``model`` is not a module, or ``versions`` no mapping.
        ShardError: In a forward or backward.

    Collective: none; ranks that do the same to a model see the same.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> before = {shard.name: shard.version for shard in local_shards(model)}
        >>> with torch.no_grad():
        ...     _ = model.bias.add_(1)
        >>> changed_since(model, before)
        ['bias']
    """
    is_mapping = isinstance(versions, Mapping)
    check_type("versions", versions, is_mapping, "a mapping from names to versions")
    now = {shard.name: shard.version for shard in local_shards(model)}
    return [name for name, version in now.items() if versions.get(name) != version]
