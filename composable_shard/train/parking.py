"""Parking a model: its memory on a device is free for a while, and comes back with the values.

A storage that owns its memory is emptied, and filled again later, so that all tensors in it, also
views that others hold, are what they were. Local shards have storages of their own in the memory of
their bucket; those get new ones. Where somebody else has a view of such a shard, which nobody could
give another memory, the whole buffer stays on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.arguments import check_module, listed_optimizers
from composable_shard.core.group import ParamGroup
from composable_shard.core.hooks import groups_in
from composable_shard.core.storage import sharded_form
from composable_shard.core.transport import host
from composable_shard.core.tree import check_at_rest
from composable_shard.errors import ShardError
from composable_shard.module import FSDPModule
from composable_shard.optim.flat import flat_states
from composable_shard.optim.layouts import LayoutOptimizer
from composable_shard.train.ranks import Ranks

# What lies where: the memory of a model and of its optimizers -------------------------------------


@dataclass(frozen=True)
class Parked:
    """How much memory of a rank's device is free while a model is parked, in bytes.

    Attributes:
        parameters: Of shards, padding included, and of parameters that are not sharded.
        gradients: Of gradients, reduced or accumulated without sync.
        states: Of states of optimizers.
        buffers: Of buffers of the model.
        left: Of what stays where it is: on a device what somebody else has a view of, and all
            memory of the host.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    buffers: int = 0
    left: int = 0

    @property
    def nbytes(self) -> int:
        """All that is free."""
        return self.parameters + self.gradients + self.states + self.buffers


Tensors = dict[str, list[torch.Tensor]]
"""Plain tensors by kind, as :class:`Parked` has them."""


def _tensors_of(
    model: nn.Module, groups: Sequence[ParamGroup], optimizers: Sequence[Optimizer]
) -> Tensors:
    params, grads = [*map(sharded_form, model.parameters())], list[torch.Tensor | None]()
    buckets = list[torch.Tensor]()
    for group in groups:
        for param in group.params:
            params.append(param.sharded)
            if param.place is not None:
                buckets.append(param.place.buffer)
            unsharded = getattr(param, "unsharded", None)  # made by the first gather
            grads.append(None if unsharded is None else unsharded.grad)
    stock = [inner for one in optimizers for inner in (one, *_stock_inside(one))]
    stepped = [p for one in stock for group in one.param_groups for p in group["params"]]
    grads += [param.grad for param in (*params, *stepped)]
    states = _torch.tensors_of(*(value for one in stock for value in one.state.values()))
    states += [tensor for one in stock for tensor in flat_states(one)]
    return {
        "parameters": [*buckets, *_plain((*params, *stepped))],
        "gradients": _plain(grad for grad in grads if grad is not None),
        "states": _plain(states),
        "buffers": _plain(model.buffers()),
    }


def _stock_inside(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that one is made of."""
    return optimizer.stock_optimizers() if isinstance(optimizer, LayoutOptimizer) else []


def _plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank holds of tensors: plain ones with memory, that is values or none."""
    leaves = [leaf for tensor in tensors for leaf in _torch.leaves(_torch.local_part(tensor))]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_meta]


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


# Where it goes: storages of a device, to be emptied -----------------------------------------------


class _Shown:
    """The tensors that are known to lie in one storage, the first of them of some kind."""

    def __init__(self, kind: str, first: torch.Tensor) -> None:
        self.kind, self.first = kind, first
        self.tensors: dict[int, torch.Tensor] = {}
        storage = first.untyped_storage()  # which is not kept, or it would count as another's
        self.start, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.is_owner = storage.resizable()

    def lies_in(self, owner: _Shown) -> bool:
        """Whether its memory is a part of another one's."""
        is_within = owner.start <= self.start <= owner.start + owner.nbytes - self.nbytes
        return is_within and self.first.device == owner.first.device

    def are_all(self) -> bool:
        """Whether nobody else has a tensor there."""
        alone = torch.zeros(1, device=self.first.device)
        return _torch.num_uses(self.first) - _torch.num_uses(alone) == len(self.tensors) - 1


class DeviceStorages:
    """The memory of a model and of its optimizers.

    Args:
        tensors: What is in it.

    Attributes:
        counted: How much of each kind can be freed, and how much is left, in bytes.
    """

    def __init__(self, tensors: Tensors) -> None:
        known: dict[int, _Shown] = {}
        for kind, several in tensors.items():
            for tensor in several:
                shown = known.setdefault(_torch.storage_number(tensor), _Shown(kind, tensor))
                shown.tensors[id(tensor)] = tensor
        parts = [shown for shown in known.values() if shown.nbytes and not shown.is_owner]
        alone = {(part.start, part.nbytes): part for part in parts}
        self._owners: list[tuple[_Shown, list[_Shown]]] = []
        self.counted = dict.fromkeys((*tensors, "left"), 0)
        for owner in [shown for shown in known.values() if shown.nbytes and shown.is_owner]:
            inside = [part for part in parts if part.lies_in(owner)]
            alone = {key: part for key, part in alone.items() if part not in inside}
            is_freed = _is_on_device(owner.first) and all(part.are_all() for part in inside)
            self._owners += [(owner, inside)] if is_freed else []
            self.counted[owner.kind if is_freed else "left"] += owner.nbytes
        self.counted["left"] += sum(part.nbytes for part in alone.values())
        self._copies: list[_Freed] = []
        self._left: list[_Freed] = []

    def copy(self) -> None:
        """Copy the values to memory of the host; nothing else changes."""
        self._copies = [_Freed(owner, inside) for owner, inside in self._owners]
        for device in {owner.first.device for owner, _ in self._owners}:
            if _torch.has_streams(device):
                torch.accelerator.synchronize(device)

    def let_go(self) -> None:
        """Free the memory of the device."""
        self._left, self._copies = self._copies, []
        for freed in self._left:
            freed.let_go()

    def come_back(self) -> None:
        """Have the values on the device again.

        Raises:
            torch.OutOfMemoryError: If there is no room; what is missing can be had later.
        """
        while self._left:
            self._left[-1].come_back()
            self._left.pop()


class _Freed:
    """One storage, with its values on the host, and the tensors that lie in it."""

    def __init__(self, owner: _Shown, inside: list[_Shown]) -> None:
        device = owner.first.device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(
            owner.first.untyped_storage()
        )
        is_pinned = _torch.has_streams(device)
        self._host = _torch.empty_like(self._bytes, device="cpu", pin_memory=is_pinned)
        self._host.copy_(self._bytes, non_blocking=is_pinned)
        self._places = [
            (t, slice(start, start + part.nbytes), t.storage_offset(), t.shape, t.stride())
            for part in inside
            for start in [part.start - owner.start]
            for t in part.tensors.values()
        ]

    def let_go(self) -> None:
        """Free the memory; local shards are of NaN meanwhile, without memory of their own."""
        for tensor, _, _, shape, _ in self._places:
            value = torch.nan if tensor.is_floating_point() else 0
            one = torch.full((1,), value, dtype=tensor.dtype, device=tensor.device)
            _set(tensor, one.untyped_storage(), 0, shape, (0,) * len(shape))
        _torch.free(self._bytes)

    def come_back(self) -> None:
        """Have the memory, and the values in it; tensors that shared a storage share one again."""
        _torch.allocate(self._bytes)
        self._bytes.copy_(self._host)
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor, place, offset, shape, stride in self._places:
            storage = storages.setdefault(place.start, self._bytes.untyped_storage()[place])
            _set(tensor, storage, int(offset), shape, stride)


def _set(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> None:
    """Give a tensor other memory; its version stays."""
    with torch.inference_mode(False), torch.no_grad(), _torch.preserved_versions([tensor]):
        tensor.set_(storage, offset, shape, stride)


def parkable(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, Parked]]:
    """Tell what :func:`parked` would free now of the memory of each device.

    Args:
        model: The model.
        optimizers: Its optimizers.

    Returns:
        The device, and how much memory that is.

    Collective: none.
    """
    by_device: dict[str, Tensors] = {}
    tensors = _tensors_of(model, groups_in(model.modules()), optimizers)
    for kind, several in tensors.items():
        for tensor in filter(_is_on_device, several):
            own = by_device.setdefault(str(tensor.device), {one: [] for one in tensors})
            own[kind].append(tensor)
    return [(name, Parked(**DeviceStorages(own).counted)) for name, own in by_device.items()]


# A parked model is not used -----------------------------------------------------------------------


def _free_kept_storage(groups: Sequence[ParamGroup], until: contextlib.ExitStack) -> None:
    """Free the memory that groups keep when they are resharded, ``until`` it is closed."""
    for group in groups:
        top = group.modules[0]
        if group.settings.keeps_storage and isinstance(top, FSDPModule):
            top.set_keep_unsharded_storage(False, recurse=False)
            until.callback(top.set_keep_unsharded_storage, True, recurse=False)


def _refuse_use(
    groups: Sequence[ParamGroup], optimizers: Sequence[Optimizer], until: contextlib.ExitStack
) -> None:
    """Let whoever uses what is parked get an error, ``until`` it is closed."""
    for group in groups:
        group.absence = "parked; leave the context of parked() first"
        until.callback(setattr, group, "absence", None)
    for one in optimizers:
        for register in (
            one.register_step_pre_hook,
            one.register_state_dict_pre_hook,
            one.register_load_state_dict_pre_hook,
        ):
            until.callback(register(_refuse_optimizer).remove)


def _refuse_optimizer(optimizer: Optimizer, *_: object) -> None:
    raise ShardError(
        f"Expected {type(optimizer).__name__} in memory for its step or its states, got it parked; "
        "leave the context of parked() first"
    )


# Parked -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def parked(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    *,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[Parked]:
    """Free the device memory of a model and its optimizers within this context.

    Training goes on afterwards as if nothing had been: parameters, gradients and states are the
    same objects with the same values, versions and hooks, and views of them are views still. The
    values are kept in pinned memory of the host. What is in memory of the host stays where it is.

    Within, a forward, a backward, a gather, a step of an optimizer, a state dict, a deep copy of
    the model, or one of the functions for its weights (``save_full``, ``iter_full``,
    ``local_shards``, ``load_sharded``) is an error. What reads a shard past all of these gets NaN,
    and a buffer or a state must not be read.

    Args:
        model: A module with sharded parameters. What else it has, buffers too, is parked as well.
        optimizer: Its optimizer, or several, whose states are parked with it.
        process_group: The ranks that park together; all of them if absent.

    Yields:
        :class:`Parked`: how many bytes are free, of what.

    Raises:
        TypeError: If an argument has the wrong type.
        ShardError: On all ranks, if an argument is wrong on some of them, one has nothing on a
            device, or has no memory on its host for the values: the model is as it was then; if one
            has no room on its device at the end: it stays parked. In a forward or backward, within
            :func:`unsharded`, and within another such context of the same model.

    Collective: an all-gather of a small object at either end. If an exception ends the context,
        none: the others may not come.
    Memory: on the host, that of what lies on the device.

    Example:
        >>> def generate_beside(model, optimizer, generate):
        ...     with parked(model, optimizer):
        ...         return generate()
    """
    ranks = Ranks(process_group, f"parking {type(model).__name__}")
    with ranks.checking():
        check_module("model", model)
        optimizers, groups = listed_optimizers(optimizer), groups_in(model.modules())
        for group in groups:
            check_at_rest(group, "parked")
            group.check_awake("to be parked")
        if not any(map(_is_on_device, chain(*_tensors_of(model, groups, optimizers).values()))):
            raise ShardError(
                f"Expected {type(model).__name__} on a device to be parked, got all of it in "
                "memory of the host, which parked() does not free; save a checkpoint, delete the "
                "model and its optimizers, and load them from it afterwards"
            )
        for group in groups:  # free what is gathered, or left of it
            group.reshard()
            group.register_params()
        host.settle()
        tensors = _tensors_of(model, groups, optimizers)
    until, storages = contextlib.ExitStack(), DeviceStorages({})
    try:
        _free_kept_storage(groups, until)
        with ranks.noting_failure():
            storages = DeviceStorages(tensors)
            storages.copy()
        ranks.agree([], "parked model", "all ranks to park the model")
        storages.let_go()
        _refuse_use(groups, optimizers, until)
        yield Parked(**storages.counted)
    except BaseException:
        storages.come_back()
        until.close()
        raise
    with ranks.noting_failure():
        storages.come_back()
    ranks.agree(
        [],
        "parked model",
        "all ranks to have the parked model in memory again",
        remedy="; it stays parked, so start all ranks again, from a checkpoint",
    )
    until.close()
