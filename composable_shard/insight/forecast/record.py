"""One step of a sharded model, run without memory on a few ranks that are not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from composable_shard.core.comms.collectives import (
    AllGatherLaunch,
    ReduceScatterLaunch,
    Tensors,
)
from composable_shard.core.comms.streams import Waitable
from composable_shard.core.group import ParamGroup
from composable_shard.core.params.param import ShardedParam
from composable_shard.insight.forecast.live import Live, LiveBytes


@dataclass(frozen=True)
class Moment:
    """An event of a group, and what happened since the one before.

    Attributes:
        event: Which; empty at the end of the step.
        group: The place of the group; -1 at the end.
        peak: The most that lived since.
        flops: Floating-point operations since.
    """

    event: str
    group: int
    peak: Live
    flops: int


@dataclass(frozen=True)
class Record:
    """What happened in a step.

    Attributes:
        moments: In order; the last one is the end.
        used: The parameters that got a gradient.
    """

    moments: tuple[Moment, ...]
    used: frozenset[ShardedParam]


class SilentAllGather(AllGatherLaunch):
    """Sends nothing, and leaves the output as it was."""

    def launch(self, outputs: Tensors, inputs: Tensors, group: Any, tag: int) -> list[Waitable]:
        """Return at once."""
        return []


class SilentReduceScatter(ReduceScatterLaunch):
    """Sends nothing, and leaves the output as it was."""

    def __init__(self, *, widens: bool) -> None:
        self.widens = widens

    def averages(self, group: Any, device: torch.device) -> bool:
        """Divide nothing by operations."""
        return True

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: Any, op: Any, tag: int
    ) -> list[Waitable]:
        """Return at once."""
        return []


def silence(groups: Sequence[ParamGroup], *, widens: bool) -> None:
    """Let groups communicate with nobody."""
    for group in groups:
        for channel in group.channels.values():
            channel.all_gather = SilentAllGather()
            channel.reduce_scatter = SilentReduceScatter(widens=widens)


def record_step(
    groups: Sequence[ParamGroup], lasting: Sequence[torch.Tensor], run: Callable[[], None]
) -> Record:
    """Run a step twice and return what happens in the second one, which knows the order.

    Args:
        groups: All groups.
        lasting: Tensors that live before and after.
        run: Does forward and backward, and clears the gradients.
    """
    live = LiveBytes()
    live.ignore(lasting)
    with live:
        run()
        live.forget()
        with _Recorder(groups, live) as recorder:
            run()
    moments = (*recorder.moments, Moment("", -1, live.peak, live.flops))
    return Record(moments, frozenset(recorder.used))


class _Recorder(contextlib.AbstractContextManager[Any]):
    """Notes the events of groups, with what happened between them."""

    def __init__(self, groups: Sequence[ParamGroup], live: LiveBytes) -> None:
        self.moments: list[Moment] = []
        self.used: set[ShardedParam] = set()
        self._groups = list(groups)
        self._live = live
        self._grads: dict[int, list[torch.Tensor]] = {}
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> _Recorder:
        for context in dict.fromkeys(group.context for group in self._groups):
            places = {g.name: i for i, g in enumerate(self._groups) if g.context is context}
            context.listener = lambda event, name, places=places: self._saw(event, places[name])
            self._hooks.callback(setattr, context, "listener", None)
        for tensor in self._unsharded(range(len(self._groups))):
            if tensor.requires_grad:
                handle = tensor.register_hook(self._live.call_gradient)
                self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _unsharded(self, places: Sequence[int]) -> Iterator[torch.Tensor]:
        for place in places:
            for param in self._groups[place].params:
                if param.unsharded is not None:
                    yield param.unsharded

    def _saw(self, event: str, place: int) -> None:
        if event == "post_backward":
            grads = [t.grad for t in self._unsharded([place]) if t.grad is not None]
            for grad in grads:
                self._live.call_gradient(grad)
            self.used.update(
                param
                for param in self._groups[place].params
                if param.unsharded is not None and param.unsharded.grad is not None
            )
            self._grads[place] = grads
        elif event == "reduce_scatter":
            self._live.hand_over(self._grads.pop(place, []))
        live = self._live
        self.moments.append(Moment(event, place, live.peak, live.flops))
        live.restart()
