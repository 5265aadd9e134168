"""Parking a model: its device memory is freed for a while, and later restored with its values.

A storage that owns its memory is resized to zero, and filled again later, so that all tensors in it
stay valid, including views that users hold. Local shards have separate storages in the memory of
their bucket, and get new ones. If a user holds a view of such a shard, the view cannot get new
memory, so the whole buffer stays on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.arguments import check_module, listed_optimizers
from composable_shard.core.group import ParamGroup
from composable_shard.core.hooks import groups_in
from composable_shard.core.storage import as_sharded
from composable_shard.core.transport import host
from composable_shard.errors import ShardError
from composable_shard.module import FSDPModule
from composable_shard.optim.flat import flat_states
from composable_shard.optim.layouts import LayoutOptimizer
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import reshard

# The memory of a model and of its optimizers ------------------------------------------------------


@dataclass(frozen=True)
class Parked:
    """The device memory of a rank that is freed while a model is parked, in bytes.

    Attributes:
        parameters: Bytes of shards, padding included, and of unsharded parameters.
        gradients: Bytes of gradients, reduced or accumulated without sync.
        states: Bytes of optimizer states.
        buffers: Bytes of the model's buffers.
        left: Bytes that stay: device memory with views that users hold, and all host memory.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    buffers: int = 0
    left: int = 0

    @property
    def nbytes(self) -> int:
        """All freed bytes."""
        return self.parameters + self.gradients + self.states + self.buffers


Tensors = dict[str, list[torch.Tensor]]  # by kind, as Parked has them


def _tensors_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> Tensors:
    sharded = [param for group in groups_in(model.modules()) for param in group.params]
    stock = list(optimizers)
    for optimizer in optimizers:
        stock += optimizer.stock_optimizers() if isinstance(optimizer, LayoutOptimizer) else []
    params = [*map(as_sharded, model.parameters()), *(param.sharded for param in sharded)]
    params += [p for one in stock for group in one.param_groups for p in group["params"]]
    buckets = [param.flat_position.buffer for param in sharded if param.flat_position is not None]
    unsharded = [getattr(param, "unsharded", None) for param in sharded]  # from the first gather on
    grads = [param.grad for param in (*params, *unsharded) if param is not None]
    states = _torch.tensors_of(*(value for one in stock for value in one.state.values()))
    return {
        "parameters": _plain([*buckets, *params]),
        "gradients": _plain(grad for grad in grads if grad is not None),
        "states": _plain([*states, *(tensor for one in stock for tensor in flat_states(one))]),
        "buffers": _plain(model.buffers()),
    }


def _plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's parts of tensors, as plain tensors with memory."""
    leaves = [leaf for tensor in tensors for leaf in _torch.leaves(_torch.local_part(tensor))]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_meta]


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


# Storages of a device that can be freed -----------------------------------------------------------


class _Storage:
    """A storage, and the tensors of the model in it; the first one sets the kind.

    Attributes:
        kind: The kind.
        first: The first tensor.
        tensors: The tensors, by their ids.
        is_owner: Whether it owns its memory, so that it can be emptied.
        parts: The storages that lie in its memory.
    """

    def __init__(self, kind: str, first: torch.Tensor) -> None:
        self.kind, self.device, self.first = kind, first.device, first
        self.tensors: dict[int, torch.Tensor] = {}
        storage = first.untyped_storage()  # not kept, as it would count as a user's reference
        self.start, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.is_owner = storage.resizable()
        self.parts: list[_Storage] = []

    def lies_in(self, owner: _Storage) -> bool:
        """Whether its memory is a part of the memory of ``owner``."""
        is_within = owner.start <= self.start <= owner.start + owner.nbytes - self.nbytes
        return is_within and self.device == owner.device

    def can_be_freed(self) -> bool:
        """Return whether it is on a device, and no user holds a view of one of its parts."""
        alone = _torch.num_uses(torch.zeros(1))
        uses = [(_torch.num_uses(part.first) - alone, len(part.tensors)) for part in self.parts]
        return _is_on_device(self.first) and all(num == known - 1 for num, known in uses)

    def copy(self) -> None:
        """Copy the values to host memory, and record the layout of the tensors of the parts."""
        empty, is_pinned = torch.empty(0, dtype=torch.uint8), _torch.has_streams(self.device)
        self._bytes = empty.to(self.device).set_(self.first.untyped_storage())
        self._host = _torch.empty_like(self._bytes, device="cpu", pin_memory=is_pinned)
        self._host.copy_(self._bytes, non_blocking=is_pinned)
        self._views = [
            (part, tensor, tensor.storage_offset(), tensor.shape, tensor.stride())
            for part in self.parts
            for tensor in part.tensors.values()
        ]

    def let_go(self) -> None:
        """Free the memory; meanwhile, local shards are NaN and take no memory."""
        for _, tensor, _, shape, _ in self._views:
            value = torch.nan if tensor.is_floating_point() else 0
            filler = torch.full((1,), value, dtype=tensor.dtype, device=tensor.device)
            _set(tensor, filler.untyped_storage(), 0, shape, (0,) * len(shape))
        _torch.free(self._bytes)

    def come_back(self) -> None:
        """Fill the memory with the values; tensors that shared a storage share one again."""
        _torch.allocate(self._bytes)
        self._bytes.copy_(self._host)
        storages: dict[_Storage, torch.UntypedStorage] = {}
        for part, tensor, offset, shape, stride in self._views:
            start = part.start - self.start
            view = self._bytes.untyped_storage()[start : start + part.nbytes]
            _set(tensor, storages.setdefault(part, view), int(offset), shape, stride)


def _set(tensor: torch.Tensor, *place: Any) -> None:
    """Give a tensor other memory: a storage, an offset, a shape and a stride; its version stays."""
    with torch.inference_mode(False), torch.no_grad(), _torch.preserved_versions([tensor]):
        tensor.set_(*place)


class DeviceStorages:
    """The memory of a model and of its optimizers.

    Args:
        tensors: The tensors in it.

    Attributes:
        counted: The bytes of each kind that can be freed, and the bytes that stay.
    """

    def __init__(self, tensors: Tensors) -> None:
        known: dict[int, _Storage] = {}
        for kind, several in tensors.items():
            for tensor in several:
                storage = known.setdefault(_torch.storage_number(tensor), _Storage(kind, tensor))
                storage.tensors[id(tensor)] = tensor
        used = [storage for storage in known.values() if storage.nbytes]
        owners = [storage for storage in used if storage.is_owner]
        parts = [storage for storage in used if not storage.is_owner]
        for owner in owners:
            owner.parts = [part for part in parts if part.lies_in(owner)]
        self._owners = [owner for owner in owners if owner.can_be_freed()]
        self.counted = dict.fromkeys((*tensors, "left"), 0)
        for owner in owners:
            self.counted[owner.kind if owner in self._owners else "left"] += owner.nbytes
        others = {(part.start, part.nbytes) for part in parts if not any(map(part.lies_in, owners))}
        self.counted["left"] += sum(nbytes for _, nbytes in others)
        self._freed: list[_Storage] = []

    def copy(self) -> None:
        """Copy the values to host memory; nothing else changes."""
        for owner in self._owners:
            owner.copy()
        for device in {owner.device for owner in self._owners}:
            if _torch.has_streams(device):
                torch.accelerator.synchronize(device)

    def let_go(self) -> None:
        """Free the memory of the device."""
        self._freed, self._owners = self._owners, []
        for owner in self._freed:
            owner.let_go()

    def come_back(self) -> None:
        """Restore the values on the device.

        Raises:
            torch.OutOfMemoryError: If the memory does not suffice; the call can then be repeated.
        """
        while self._freed:
            self._freed[-1].come_back()
            self._freed.pop()


# A parked model is not used -----------------------------------------------------------------------


def _refuse_use(
    groups: Sequence[ParamGroup], optimizers: Sequence[Optimizer], until: contextlib.ExitStack
) -> None:
    """Let any use of the parked model raise, until ``until`` is closed.

    Until then, groups also free the memory that they would keep after a reshard.
    """
    for group in groups:
        top = group.modules[0]
        if group.settings.keeps_storage and isinstance(top, FSDPModule):
            top.set_keep_unsharded_storage(False, recurse=False)
            until.callback(top.set_keep_unsharded_storage, True, recurse=False)
        group.why_absent, group.is_compiled = "parked; leave the context of parked() first", False
        until.callback(setattr, group, "why_absent", None)
    for optimizer in optimizers:
        for use in ("step", "state_dict", "load_state_dict"):
            register = getattr(optimizer, f"register_{use}_pre_hook")
            until.callback(register(_refuse_optimizer).remove)


def _refuse_optimizer(optimizer: Optimizer, *_: object) -> None:
    kind = type(optimizer).__name__
    raise ShardError(f"Expected {kind} in memory, got it parked; leave parked() first")


# Parked -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def parked(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[Parked]:
    """Free the device memory of a model and its optimizers within this context.

    Training then continues unchanged: parameters, gradients and states are the same objects with
    the same values, versions and hooks, and views of them stay views. The values are kept in pinned
    host memory. Tensors in host memory stay there.

    Within, a forward, a backward, a gather, a step of an optimizer, a state dict, a deep copy of
    the model, or one of the functions for its weights (``save_full``, ``iter_full``,
    ``local_shards``, ``load_sharded``) is an error. Code that reads a shard directly gets NaN, and
    must not read a buffer or a state.

    Args:
        model: A module with sharded parameters. Its other parameters and its buffers are parked
            too.
        optimizer: Its optimizer, or several; their states are parked with the model.
        process_group: The ranks that park together; all of them if absent.

    Yields: :class:`Parked`: the freed bytes by kind.

    Raises:
        TypeError: If an argument has the wrong type.
        ShardError: On all ranks, if an argument is wrong on some ranks, if a rank has nothing on a
            device, or lacks host memory for the values (the model is then unchanged); if a rank
            lacks device memory at the end (the model stays parked). In a forward or backward,
            within :func:`unsharded`, and within another such context of the same model.

    Collective: an all-gather of a small object at the begin and at the end. If an exception ends
        the context, none at the end, as other ranks may not reach it.
    Memory: on the host, as much as is freed on the device.

    Example:
        >>> def generate_beside(model, optimizer, generate):
        ...     with parked(model, optimizer):
        ...         return generate()
    """
    ranks = Ranks(process_group, f"parking {type(model).__name__}")
    with ranks.checking():
        check_module("model", model)
        optimizers, groups = listed_optimizers(optimizer), groups_in(model.modules())
        reshard(model, "parked")  # frees gathered parameters
        host.synchronize()
        tensors = _tensors_of(model, optimizers)
        if not any(map(_is_on_device, chain(*tensors.values()))):
            raise ShardError(
                f"Expected {type(model).__name__} on a device to be parked, got all of it in host "
                "memory, which parked() cannot free; save a checkpoint and load it afterwards"
            )
    until, storages = contextlib.ExitStack(), DeviceStorages({})
    try:
        _refuse_use(groups, optimizers, until)
        with ranks.noting_failure():
            storages = DeviceStorages(tensors)
            storages.copy()
        ranks.agree()
        storages.let_go()
        yield Parked(**storages.counted)
    except BaseException:
        storages.come_back()
        until.close()
        raise
    with ranks.noting_failure():
        storages.come_back()
    ranks.agree(remedy="; it stays parked, so start all ranks again, from a checkpoint")
    until.close()
