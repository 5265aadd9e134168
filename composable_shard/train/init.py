"""Initial values of a sharded model: those that the unsharded model gets of the same seed.

Every rank runs the same initialization with the same random numbers, module by module, and keeps
its own rows of each full tensor. Filling shards by themselves would go wrong: where ranks have the
same seed, each would get the same rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from composable_shard import _torch
from composable_shard.arguments import check_function, check_int
from composable_shard.errors import MaterializationError, ShardError
from composable_shard.train.full import boxes_of, count_write, full_copy
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import Entry, contents_of, listed, materialize


def init_sharded(
    model: nn.Module,
    fn: Callable[[nn.Module], object] | None = None,
    *,
    seed: int,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Initialize a sharded model with the values of the unsharded one.

    The values are bitwise those of ``torch.manual_seed(seed); model.apply(fn)`` on the unsharded
    model on the same device, on any number of ranks and however it is sharded. Parameters and
    buffers on the meta device get memory first, where they belong. While ``fn`` runs, functions of
    torch get the full tensor in the place of each shard, also of shards of other modules.

    Args:
        model: The model, sharded or not, the same on all ranks.
        fn: Called with each module, children before parents, as by ``model.apply``. Calls the
            ``reset_parameters()`` of those modules that have it if absent. Must do the same on all
            ranks, by random functions of torch alone.
        seed: Of the random numbers. The generators of this process stay as they are.
        process_group: The ranks that hold this model; all of them if absent.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``seed`` is negative.
        MaterializationError: On all ranks, if something has no values at the end: what was on the
            meta device and ``fn`` has not touched, or, without ``fn``, any parameter of a module
            without ``reset_parameters()``.
        ShardError: On all ranks, if a parameter is a tensor subclass of several tensors, or if
            ``fn`` fails on some ranks. In a forward or backward.
        RankMismatchError: On all ranks, if their models or seeds differ.

    Collective: two all-gathers of a small object. An all-gather of each parameter that has values
        when ``fn`` first touches it; none for what is on the meta device.
    Memory: besides the shards, the full tensors that one call of ``fn`` touches.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def build():
        ...     with torch.device("meta"):
        ...         layer = fully_shard(nn.Linear(2, 4))
        ...     init_sharded(layer, lambda module: nn.init.ones_(module.weight), seed=0)
    """
    ranks = Ranks(process_group, "initializing a model")
    with ranks.checking():
        check_function("fn", fn)
        check_int("seed", seed, 0)
        entries, needed = _planned(model, needs_all=fn is None)
    ranks.agree([f"seed {seed}", *(entry.fact() for entry in entries)], "model and seed", "a model")
    with ranks.checking():
        missing = _run(model, _reset if fn is None else fn, seed, entries, needed)
        if missing:
            by = "reset_parameters()" if fn is None else "fn"
            raise MaterializationError(
                f"Expected {by} to initialize every parameter and buffer without values, got none "
                f"for {listed(missing)}; pass a function that initializes each module"
            )
    ranks.agree([], "", "")


def _run(
    model: nn.Module,
    fn: Callable[[nn.Module], object],
    seed: int,
    entries: list[Entry],
    needed: Sequence[Entry],
) -> list[str]:
    """Initialize each module; return the names of what was needed and not touched."""
    fresh = [entry for entry in entries if entry.is_meta]
    with torch.inference_mode(False), torch.no_grad(), _forked_generators():
        materialize(model, entries)
        wholes = _Wholes(entries, fresh)
        torch.manual_seed(seed)
        model.apply(partial(wholes.run, fn))
    return [entry.names[0] for entry in needed if id(entry.tensor) not in wholes.touched]


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _planned(model: nn.Module, *, needs_all: bool) -> tuple[list[Entry], list[Entry]]:
    """Return the tensors of a model, and those of them that must be initialized."""
    entries = contents_of(model, "init_sharded").entries
    known = {id(entry.tensor) for entry in entries}
    entries += [Entry((name,), b) for name, b in model.named_buffers() if id(b) not in known]
    for entry in entries:
        if entry.plain is None:
            raise ShardError(
                f"Expected parameters of one plain tensor each, got '{entry.names[0]}', a "
                f"{type(entry.local).__name__}; give it its values before fully_shard"
            )
    is_param = {id(param) for param in model.parameters()} if needs_all else set[int]()
    return entries, [e for e in entries if e.is_meta or id(e.tensor) in is_param]


def _forked_generators() -> contextlib.AbstractContextManager[None]:
    """Leave the generators of the CPU and of the current device as they are."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return torch.random.fork_rng([])
    index = torch.accelerator.current_device_index()
    return torch.random.fork_rng([index], device_type=device.type)


class _Wholes(TorchFunctionMode):
    """Gives functions of torch full tensors in the place of shards, of which it keeps the rows.

    Args:
        entries: The tensors of a model.
        fresh: Those of them that have no values yet.

    Attributes:
        touched: The ids of the tensors that a function was given.
    """

    def __init__(self, entries: Iterable[Entry], fresh: Iterable[Entry]) -> None:
        super().__init__()
        self.touched: set[int] = set()
        self._entries = {id(entry.tensor): entry for entry in entries}
        self._fresh = {id(entry.tensor) for entry in fresh}
        self._full: dict[int, torch.Tensor] = {}

    def run(self, fn: Callable[[nn.Module], object], module: nn.Module) -> None:
        """Initialize one module."""
        with self:
            fn(module)
        for key, full in self._full.items():
            entry = self._entries[key]
            plain = entry.plain
            assert plain is not None
            for box, own in boxes_of(entry.tensor):
                plain[own].copy_(full[box])
            count_write(entry.local)
            entry.tensor.requires_grad_(full.requires_grad)
        self._full.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _torch.map_tensors(self._whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor)
        if key not in self._entries:
            return tensor
        self.touched.add(key)
        if not isinstance(tensor, DTensor):
            return tensor
        if key not in self._full:
            entry, strides = self._entries[key], tensor.stride()
            like = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
            full = _torch.empty_like(like, device=entry.local.device)
            if key in self._fresh:
                self._fresh.remove(key)
            else:
                full.copy_(full_copy(tensor, entry.names[0]))
            self._full[key] = full.requires_grad_(tensor.requires_grad)
        return self._full[key]
