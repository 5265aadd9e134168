"""Parking a model: its memory goes to somebody else for a while, and comes back with the values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.arguments import check_module, check_path
from composable_shard.core.group import ParamGroup
from composable_shard.core.hooks import groups_in
from composable_shard.core.optimizers import watch_optimizer_steps
from composable_shard.core.param import sharded_form
from composable_shard.core.root import check_at_rest
from composable_shard.core.transport import host
from composable_shard.core.transport.mailbox import return_free_slabs
from composable_shard.errors import ShardError
from composable_shard.optim.flat import flat_states
from composable_shard.optim.layouts import LayoutOptimizer
from composable_shard.train.optimizers import listed
from composable_shard.train.parking.device_storages import DeviceStorages
from composable_shard.train.parking.host_pages import HostPages, Span, merged, movable_pages
from composable_shard.train.ranks import Ranks

# What lies where: the memory of a model and of its optimizers -------------------------------------


@dataclass(frozen=True)
class Parked:
    """How much memory of this rank is free while a model is parked, in bytes.

    What is counted is what the system, or the device, has got back: whole pages of memory of the
    host, whole storages of a device.

    Attributes:
        parameters: Of shards, padding included, and of parameters that are not sharded.
        gradients: Of gradients, reduced or accumulated without sync.
        states: Of states of optimizers.
        buffers: Of buffers of the model.
        shared: Of what this rank had published for others of the host to read.
        left: Of what stays where it is: what is small, pinned, shared with other processes or
            mapped from a file; on a device, what somebody else has a view of.
    """

    parameters: int = 0
    gradients: int = 0
    states: int = 0
    buffers: int = 0
    shared: int = 0
    left: int = 0

    @property
    def nbytes(self) -> int:
        """All that is free."""
        return self.parameters + self.gradients + self.states + self.buffers + self.shared


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
            if param.unsharded is not None:
                grads.append(param.unsharded.grad)
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


class _Place(Protocol):
    """Where values are meanwhile; what has failed leaves all as it was."""

    def copy(self) -> None:
        """Have the values there, too."""

    def let_go(self) -> list[Span]:
        """Free the memory."""

    def come_back(self) -> None:
        """Have the memory again, with the values."""

    def close(self) -> None:
        """Let go of the copy."""


def _places(tensors: Tensors, folder: str | os.PathLike[str] | None) -> list[_Place]:
    several = [tensor for kind in tensors.values() for tensor in kind]
    on_host = [tensor for tensor in several if not _is_on_device(tensor)]
    places: list[_Place] = [DeviceStorages([t for t in several if _is_on_device(t)])]
    if folder is not None:
        places.append(HostPages(folder, _spans(t for t in on_host if not t.is_pinned())))
    return places


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def parkable(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, bool, Parked]]:
    """Tell what :func:`parked` would free now of the memory of each device.

    Of the same addresses, by the same rules. What this rank has published for others is not in it:
    who has read it nobody knows before.

    Args:
        model: The model.
        optimizers: Its optimizers.

    Returns:
        The device, whether its memory goes to a file, and how much it is.

    Collective: none.
    """
    tensors = _tensors_of(model, groups_in(model.modules()), optimizers)
    kinds: dict[tuple[str, bool], Tensors] = {}
    for kind, several in tensors.items():
        for tensor in several:
            key = str(tensor.device), not _is_on_device(tensor)
            kinds.setdefault(key, {one: [] for one in tensors})[kind].append(tensor)
    found = []
    for (device, is_on_host), own in kinds.items():
        together = [tensor for several in own.values() for tensor in several]
        if is_on_host:
            freed = movable_pages(_spans(t for t in together if not t.is_pinned()))
        else:
            freed = DeviceStorages(together).spans
        spans = {kind: _spans(several) for kind, several in own.items()}
        found.append((device, is_on_host, Parked(**_count_freed(spans, freed))))
    return found


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
        self._places: list[_Place] = []

    def leave(self, folder: str | os.PathLike[str] | None) -> dict[str, int]:
        """Move all out, on all ranks or on none; return how many bytes of each kind are free.

        Raises:
            ShardError: On all ranks, if one has failed.
        """
        spans = {kind: _spans(tensors) for kind, tensors in self._tensors.items()}
        places: list[_Place] = []
        with self._ranks.noting_failure():
            places = _places(self._tensors, folder)
            for place in places:
                place.copy()
        try:
            self._ranks.agree([], "parked model", "all ranks to park the model")
        except ShardError:
            for place in places:
                place.close()
            raise
        self._places = places
        freed = [span for place in places for span in place.let_go()]
        return _count_freed(spans, freed)

    def come_back(self) -> None:
        """Have everything in memory again. Collective: none."""
        for place in self._places:
            place.come_back()

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


def _put_away(groups: Sequence[ParamGroup]) -> int:
    """Free what is gathered, or left of it, and what others have read; return bytes of the latter.

    Collective: none.
    """
    for group in groups:
        group.reshard()
        watch_optimizer_steps(group)
    host.settle()
    process_groups = dict.fromkeys(
        ranks for group in groups for mesh in group.channels for ranks in mesh.process_groups
    )
    return sum(map(return_free_slabs, process_groups))


@contextlib.contextmanager
def _without_kept_storage(groups: Sequence[ParamGroup]) -> Iterator[None]:
    """Free the memory that groups keep when they are resharded; the next gather has other."""
    keeping = [group for group in groups if group.settings.keeps_unsharded_storage]
    for group in keeping:
        group.keep_unsharded_storage(False)
    try:
        yield
    finally:
        for group in keeping:
            group.keep_unsharded_storage(True)


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
    folder: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Iterator[Parked]:
    """Free the memory of a model and its optimizers within this context, for somebody else.

    Training goes on afterwards as if nothing had been: parameters, gradients and states are the
    same objects with the same values, versions and hooks, and views of them are views still. What
    is on a device is kept in pinned memory of the host. What is in memory of the host, as all is
    where the CPU computes, is kept in a file, if there is a folder for it. The file has no name and
    goes when this process does, whatever ends it.

    Within, a forward, a backward, a gather, a step of an optimizer, a state dict, a deep copy of
    the model, or one of the functions for its weights (``save_full``, ``iter_full``,
    ``local_shards``, ``load_sharded``) is an error. What reads a tensor of the host past all of
    these gets its values, from the file; a shard of a device is NaN, and a buffer or a state of a
    device must not be read.

    Args:
        model: A module with sharded parameters. What else it has, buffers too, is parked as well.
        optimizer: Its optimizer, or several, whose states are parked with it.
        folder: Where the memory of the host is written, on a disk: what is in ``/dev/shm`` is in
            memory, too. It is made if it is not there. Linux alone has what it takes.
        process_group: The ranks that park together; all of them if absent.

    Yields:
        :class:`Parked`: how many bytes are free, of what.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no folder, and nothing lies on a device.
        ShardError: On all ranks, if an argument is wrong on some of them, or one cannot write: the
            model is as it was then; if one cannot read at the end: it stays parked. In a forward or
            backward, within :func:`unsharded`, and within another such context of the same model.

    Collective: an all-gather of a small object at either end. If an exception ends the context,
        none: the others may not come.
    Memory: that of the host for what lies on a device. While it comes back, one buffer more.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = fully_shard(nn.Linear(1024, 1024, bias=False))
        ...     with parked(model, folder=tempfile.mkdtemp()) as memory:
        ...         is_free = memory.parameters > 0.99 * 1024 * 1024 * 4 / 2
        >>> is_free
        True
    """
    ranks = Ranks(process_group, f"parking {type(model).__name__}")
    with ranks.checking():
        check_module("model", model)
        check_path("folder", folder, is_needed=False)
        optimizers, groups = listed(optimizer), groups_in(model.modules())
        _check_can_park(groups)
        shared = _put_away(groups)
        tensors = _tensors_of(model, groups, optimizers)
        if folder is None and not any(_is_on_device(t) for kind in tensors.values() for t in kind):
            raise ValueError(
                "Expected a folder for a model in memory of the host, got none; pass folder=..., "
                "on a disk"
            )
    with _without_kept_storage(groups):
        memory, until = _Memory(tensors, ranks), contextlib.ExitStack()
        try:
            freed = Parked(**memory.leave(folder), shared=shared)
            _refuse_use(groups, optimizers, until)
            yield freed
        except BaseException:
            memory.come_back()
            until.close()
            raise
        memory.come_back_everywhere()
        until.close()
