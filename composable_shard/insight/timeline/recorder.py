"""Hears the groups of a model and the optimizers of its parameters, and makes marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable_shard.core.group import ParamGroup
from composable_shard.core.passes.context import Listener
from composable_shard.insight.timeline.clocks import Clock
from composable_shard.insight.timeline.spans import Mark

# Asking costs more than a time does: only where memory was taken, or is about to be given back.
ASKS_MEMORY = {
    *("begin", "all_gather", "post_forward", "reshard", "post_backward"),
    *("reduce_scatter", "wait_for_reduce_scatter", "wait_for_all_reduce"),
    *("begin_optimizer", "optimizer", "step", "end"),
}


class Recorder:
    """Makes marks while it is open.

    Args:
        module: The model; optimizers of others are not heard.
        roots: The root groups of the sharded trees in it, by their names within the model.
        clock: When something happens.
        memory: Returns the live bytes; ``None`` if nothing tells them.
    """

    def __init__(
        self,
        module: nn.Module,
        roots: Mapping[str, ParamGroup],
        clock: Clock,
        memory: Callable[[], int] | None,
    ) -> None:
        self._module = module
        self._roots = roots
        self._clock = clock
        self._memory = memory
        self._stamp = clock.stamp
        self._marks: list[tuple[Any, str, str, int | None]] = []
        self._before: dict[str, Listener | None] = {}
        self._hooks: list[Any] = []
        self._is_ours: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()

    def open(self) -> None:
        """Begin to listen."""
        self.mark("begin")
        for prefix, root in self._roots.items():
            before = self._before[prefix] = root.context.listener
            root.context.listener = partial(self._hear, prefix, before)
        begin, end = partial(self._step, "begin_optimizer"), partial(self._step, "optimizer")
        self._hooks = [
            register_optimizer_step_pre_hook(begin),
            register_optimizer_step_post_hook(end),
        ]

    def close(self) -> list[Mark]:
        """Listen no longer; return all marks."""
        for prefix, root in self._roots.items():
            root.context.listener = self._before[prefix]
        for hook in self._hooks:
            hook.remove()
        self.mark("end")
        times = self._clock.times([stamp for stamp, *_ in self._marks])
        marks = [
            Mark(time, event, name, nbytes)
            for time, (_, event, name, nbytes) in zip(times, self._marks, strict=True)
        ]
        self._marks.clear()
        return marks

    def mark(self, event: str, name: str = "") -> None:
        """Note that something happens now."""
        ask = self._memory if event in ASKS_MEMORY else None
        self._marks.append((self._stamp(), event, name, ask() if ask is not None else None))

    def _hear(self, prefix: str, before: Listener | None, event: str, name: str) -> None:
        self.mark(event, join(prefix, name))
        if before is not None:
            before(event, name)

    def _step(self, event: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        is_ours = self._is_ours.get(optimizer)
        if is_ours is None:
            own = {id(param) for param in self._module.parameters()}
            is_ours = self._is_ours[optimizer] = any(
                id(param) in own for group in optimizer.param_groups for param in group["params"]
            )
        if is_ours:
            self.mark(event, type(optimizer).__name__)


def join(prefix: str, name: str) -> str:
    """Return the name within the model of a group that is called ``name`` within its tree."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
