"""Parking a model: its memory on a device is free for a while, and comes back with the values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.arguments import check_module
from composable_shard.core.group import ParamGroup
from composable_shard.core.hooks import groups_in
from composable_shard.core.storage import sharded_form
from composable_shard.core.transport import host
from composable_shard.core.tree import check_at_rest
from composable_shard.errors import ShardError
from composable_shard.module import FSDPModule
from composable_shard.optim.flat import flat_states
from composable_shard.optim.layouts import LayoutOptimizer
from composable_shard.train.optimizers import listed
from composable_shard.train.parking.device_storages import DeviceStorages, Span, merged
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
    stock = [one for optimizer in optimizers for one in _stock(optimizer)]
    stepped = [p for one in stock for group in one.param_groups for p in group["params"]]
    grads += [param.grad for param in (*params, *stepped)]
    states = [tensor for one in stock for tensor in _nested(one.state)]
    states += [tensor for one in stock for tensor in flat_states(one)]
    return {
        "parameters": [*buckets, *_plain((*params, *stepped))],
        "gradients": _plain(grad for grad in grads if grad is not None),
        "states": _plain(states),
        "buffers": _plain(model.buffers()),
    }


def _stock(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that one is made of, and itself."""
    inner = optimizer.stock_optimizers() if isinstance(optimizer, LayoutOptimizer) else []
    return [optimizer, *inner]


def _nested(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in dicts and sequences of states."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _nested(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _nested(inner)


def _plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank holds of tensors: plain ones with memory, that is values or none."""
    leaves = [leaf for tensor in tensors for leaf in _torch.leaves(_torch.local_part(tensor))]
    return [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_meta]


def _spans(tensors: Iterable[torch.Tensor]) -> list[Span]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [Span(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]


def _spans_of(tensors: Tensors) -> dict[str, list[Span]]:
    return {kind: _spans(several) for kind, several in tensors.items()}


def _total(spans: Iterable[Span]) -> int:
    return sum(span.nbytes for span in merged(spans))


def _count_freed(spans: dict[str, list[Span]], freed: Sequence[Span]) -> dict[str, int]:
    """Count what was freed of each kind, and what was left; each address once."""
    found, seen, known = dict[str, int](), list[Span](), 0
    for kind, own in spans.items():
        seen += own
        now = _total(seen) + _total(freed) - _total([*seen, *freed])  # of all kinds so far
        found[kind], known = now - known, now
    return {**found, "left": _total(seen) - known}


# Where it goes ------------------------------------------------------------------------------------


def _on_device(tensors: Tensors) -> list[torch.Tensor]:
    return [tensor for kind in tensors.values() for tensor in kind if _is_on_device(tensor)]


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def parkable(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, Parked]]:
    """Tell what :func:`parked` would free now of the memory of each device.

    Args:
        model: The model.
        optimizers: Its optimizers.

    Returns:
        The device, and how much memory that is.

    Collective: none.
    """
    tensors = _tensors_of(model, groups_in(model.modules()), optimizers)
    kinds: dict[str, Tensors] = {}
    for kind, several in tensors.items():
        for tensor in filter(_is_on_device, several):
            own = kinds.setdefault(str(tensor.device), {one: [] for one in tensors})
            own[kind].append(tensor)
    return [
        (device, Parked(**_count_freed(_spans_of(own), DeviceStorages(_on_device(own)).spans)))
        for device, own in kinds.items()
    ]


class _Memory:
    """The memory of a model and of its optimizers: all of it there, or all of it away.

    Args:
        tensors: What is in it; kept, so that nobody else gets the memory.
        ranks: Those that park together.
    """

    def __init__(self, tensors: Tensors, ranks: Ranks) -> None:
        self._tensors, self._ranks = tensors, ranks
        # a tensor may be given other memory meanwhile, as `module.to` does
        self._storages = [one.untyped_storage() for kind in tensors.values() for one in kind]
        self._device: DeviceStorages | None = None

    def leave(self) -> dict[str, int]:
        """Move all out, on all ranks or on none; return how many bytes of each kind are free.

        Raises:
            ShardError: On all ranks, if one has failed.
        """
        spans = _spans_of(self._tensors)
        with self._ranks.noting_failure():
            device = DeviceStorages(_on_device(self._tensors))
            device.copy()
        self._ranks.agree([], "parked model", "all ranks to park the model")
        self._device = device
        return _count_freed(spans, device.let_go())

    def come_back(self) -> None:
        """Have everything in memory again. Collective: none."""
        if self._device is not None:
            self._device.come_back()

    def come_back_everywhere(self) -> None:
        """Have everything in memory again, on all ranks.

        Raises:
            ShardError: On all ranks, if one has failed.
        """
        with self._ranks.noting_failure():
            self.come_back()
        self._ranks.agree(
            [],
            "parked model",
            "all ranks to have the parked model in memory again",
            remedy="; it stays parked, so start all ranks again, from a checkpoint",
        )


# A parked model is not used -----------------------------------------------------------------------


def _check_can_park(groups: Iterable[ParamGroup]) -> None:
    for group in groups:
        check_at_rest(group, "parked")
        group.check_awake("to be parked")


def _put_away(groups: Sequence[ParamGroup]) -> None:
    """Free what is gathered, or left of it. Collective: none."""
    for group in groups:
        group.reshard()
        group.register_params()
    host.settle()


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
        optimizers, groups = listed(optimizer), groups_in(model.modules())
        _check_can_park(groups)
        if not _on_device(_tensors_of(model, groups, optimizers)):
            raise ShardError(
                f"Expected {type(model).__name__} on a device to be parked, got all of it in "
                "memory of the host, which parked() does not free; save a checkpoint, delete the "
                "model and its optimizers, and load them from it afterwards"
            )
        _put_away(groups)
        tensors = _tensors_of(model, groups, optimizers)
    memory, until = _Memory(tensors, ranks), contextlib.ExitStack()
    try:
        _free_kept_storage(groups, until)
        freed = Parked(**memory.leave())
        _refuse_use(groups, optimizers, until)
        yield freed
    except BaseException:
        memory.come_back()
        until.close()
        raise
    memory.come_back_everywhere()
    until.close()
