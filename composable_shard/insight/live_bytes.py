"""Which bytes live at each moment of a step that runs without memory; the optimizer's state."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_shard import _torch, core
from composable_shard.core import hooks, nested, optimizers, substituted
from composable_shard.core.storage import ShardedParam

# Which bytes live at each moment of a step that runs without memory -------------------------------

# Frames of the core stand behind what the library allocates, but for those that cast what modules
# take and give, which is part of compute, and those that backwards run in.
_CORE = f"{core.__name__}.", f"{hooks.__name__.rpartition('.')[0]}."
_COMPUTES = {module.__name__ for module in (hooks, nested, optimizers, substituted)}


class Live(NamedTuple):
    """Bytes that live at one moment.

    Attributes:
        activations: What compute made and still needs.
        gradients: What autograd left on unsharded parameters.
    """

    activations: int = 0
    gradients: int = 0


class Tally:
    """Bytes by key, and how many they are in all.

    Attributes:
        total: All of them.
    """

    def __init__(self) -> None:
        self.total = 0
        self._nbytes: dict[int, int] = {}

    def add(self, key: int, nbytes: int) -> None:
        """Count some more."""
        self._nbytes[key] = nbytes
        self.total += nbytes

    def take(self, key: int) -> int | None:
        """Count them no more; return how many they were, ``None`` if they were not counted."""
        nbytes = self._nbytes.pop(key, None)
        self.total -= nbytes or 0
        return nbytes

    def clear(self) -> None:
        """Count nothing."""
        self._nbytes.clear()
        self.total = 0


class LiveBytes(_torch.DispatchMode):
    """Follows the storages that operations make, but those of the library itself.

    What is gathered and reduced depends on the number of ranks, so it is calculated instead.

    Attributes:
        peak: The moment with the most bytes since the last :meth:`restart`.
        flops: Floating-point operations since then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = Live()
        self.flops = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._activations = Tally()
        self._gradients = Tally()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _torch.is_on_distributed_tensors(types):
            return NotImplemented
        if _torch.reads_a_value(func) and _is_within_the_library():
            return 0  # whether another rank has a gradient that this one lacks: nobody is there
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops += _torch.flops_of(func, args, kwargs, result)
        new = [tensor for tensor in _torch.tensors_of(result) if not self._knows(tensor)]
        if new:
            self._note(new, is_own=_is_within_the_library())
        return result

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these as what was there before."""
        for tensor in tensors:
            if not self._knows(tensor):
                self._remember(tensor.untyped_storage())

    def forget(self) -> None:
        """Count everything that lives now as what was there before."""
        self._activations.clear()
        self._gradients.clear()
        self.restart()

    def restart(self) -> None:
        """Begin to look for a peak, and to count, from here."""
        self.peak, self.flops = self.now, 0

    @property
    def now(self) -> Live:
        """What lives."""
        return Live(self._activations.total, self._gradients.total)

    def call_gradient(self, grad: torch.Tensor) -> None:
        """Count a tensor as the gradient of an unsharded parameter from now on."""
        key = id(grad.untyped_storage())
        nbytes = self._activations.take(key)
        if nbytes is not None:
            self._gradients.add(key, nbytes)

    def hand_over(self, grads: Iterable[torch.Tensor]) -> None:
        """Stop counting gradients, which the library takes."""
        for grad in grads:
            self._gradients.take(id(grad.untyped_storage()))

    def _knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._storages

    def drop(self, key: int) -> None:
        """Forget a storage that is no more."""
        self._storages.pop(key, None)
        self._activations.take(key)
        self._gradients.take(key)

    def _remember(self, storage: torch.UntypedStorage) -> int:
        key, mine = id(storage), weakref.ref(self)

        def drop(_: object) -> None:
            live = mine()
            if live is not None:
                live.drop(key)

        self._storages[key] = weakref.ref(storage, drop)
        return key

    def _note(self, tensors: Sequence[torch.Tensor], *, is_own: bool) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) not in self._storages:
                key = self._remember(storage)
                if not is_own:
                    self._activations.add(key, storage.nbytes())
        self.peak = max(self.peak, self.now, key=sum)


def _is_within_the_library() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_CORE) and name not in _COMPUTES:
            return True
        frame = frame.f_back
    return False


# What an optimizer keeps for the shards of one rank, and what its step needs besides --------------

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of one rank.

    Attributes:
        state: What it keeps from step to step.
        besides: What a step needs besides at its peak.
    """

    state: int
    besides: int


def optimizer_bytes(
    factory: OptimizerFactory, shards: Sequence[nn.Parameter], *, at_once: bool
) -> OptimizerBytes:
    """Let an optimizer step on shards without memory.

    Args:
        factory: Makes the optimizer.
        shards: Parameters of the shapes that one rank holds, without memory.
        at_once: Whether it takes all parameters at once, as torch's own do on an accelerator, if
            the user has not chosen.

    Raises:
        ValueError: If the optimizer asks for values.
    """
    optimizer = factory(shards)
    for group in optimizer.param_groups:
        if at_once and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    live = LiveBytes()
    live.ignore(shards)
    for shard in shards:
        shard.grad = torch.empty_like(shard)
    live.ignore(shard.grad for shard in shards if shard.grad is not None)
    try:
        with live:
            optimizer.step()
            state = live.now.activations
            live.restart()
            optimizer.step()
    except _torch.ReadsValues as error:
        raise ValueError(
            f"Expected an optimizer whose step reads no values, got {type(optimizer).__name__}; "
            "pass another one with as much state, or optimizer=None to leave it out"
        ) from error
    return OptimizerBytes(state, live.peak.activations - state)


def shards_of(params: Sequence[ShardedParam], num_shards: int) -> list[nn.Parameter]:
    """Return the shards of the first of ``num_shards`` ranks, which has the most rows.

    A parameter that is whole on every rank stays so.
    """
    made = []
    for param in params:
        whole, dim, _ = param.facts()
        shape = list(whole)
        if dim is not None and param.mesh.num_shards > 1:
            shape[dim] = -(-shape[dim] // num_shards)
        made.append(nn.Parameter(torch.empty(shape, dtype=param.local.dtype)))
    return made
