"""The events of a sharded module, in the order in which they happen on this rank.

Tests of schedules compare whole lists of ``(event, name)``.

A listener is also called where parts of the events begin and end, for timing. A collective ``x`` is
launched between ``begin_x`` and ``x`` (``begin_regather``: from parts that neighbours kept). The
rank only waits between ``begin_wait_for_x`` and ``waited_for_x``, and copies the result to its
place from then until ``wait_for_x``. ``begin_wait_for_copies`` and ``wait_for_copies`` enclose a
wait for copies between host and device.

With ``COMPOSABLE_SHARD_CHECK=1`` in the environment of all ranks, they compare their next operation
before every gather and reduction, and at the end of every forward and backward. If they differ, all
of them raise instead of waiting for each other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from composable_shard.arguments import check_module, check_value
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.plugins import Feature, Op, Phase, feature_factories
from composable_shard.core.transport.process_groups import compare, first_difference, gather_objects
from composable_shard.errors import RankMismatchError
from composable_shard.hybrid import PartMesh

Event = tuple[str, str]

_EVENTS: dict[Phase, tuple[str, ...]] = {
    "pre_forward": ("pre_forward",),
    "post_forward": ("post_forward",),
    "pre_backward": ("pre_backward",),
    "post_backward": ("post_backward",),
    "gather": ("begin_all_gather",),
    "regather": ("begin_regather",),
    "gather_launched": ("all_gather",),
    "before_wait_for_gather": ("begin_wait_for_all_gather",),
    "gather_done": ("waited_for_all_gather", "wait_for_all_gather"),
    "freed": ("reshard",),
    "accumulated": ("accumulate",),
    "reduce": ("begin_reduce_scatter",),
    "reduce_launched": ("reduce_scatter",),
    "before_wait_for_reduction": ("begin_wait_for_reduce_scatter",),
    "averaged": ("waited_for_reduce_scatter",),
    "reduced_over_shards": ("wait_for_reduce_scatter",),
    "delivered": ("wait_for_reduce_scatter",),
    "all_reduce_launched": ("all_reduce",),
    "before_wait_for_all_reduce": ("begin_wait_for_all_reduce",),
    "replicas_delivered": ("waited_for_all_reduce", "wait_for_all_reduce"),
    "before_wait_for_copies": ("begin_wait_for_copies",),
    "copies_done": ("wait_for_copies",),
}

_FOR_TIMING = ("begin_", "waited_for_", "wait_for_copies")

EVENTS = tuple(
    event
    for event in dict.fromkeys(chain.from_iterable(_EVENTS.values()))
    if not event.startswith(_FOR_TIMING)
)
"""All events. The first four are moments of a group, the others its actions at these moments."""

Hear = Callable[[str, ParamGroup], None]
"""A function that gets an event and its group."""


def groups_in(model: nn.Module) -> list[ParamGroup]:
    """Return the groups of all sharded modules in a model.

    Raises:
        ValueError: If there are none.
    """
    found = dict.fromkeys(map(group_of, model.modules()))
    groups = [group for group in found if group is not None]
    if not groups:
        raise ValueError(
            f"Expected sharded modules in {type(model).__name__}, got none; apply fully_shard to it"
        )
    return groups


def name_in(names: Mapping[nn.Module, str], group: ParamGroup) -> str:
    """Return the name of a group, given those of modules; empty for a root, or if it has none."""
    return ", ".join(filter(None, map(names.get, group.modules)))


class _Listener(Feature):
    """Calls functions with every event of a tree, and its group."""

    def __init__(self) -> None:
        self.hears: list[Hear] = []

    def ops(self, group: ParamGroup, phase: Phase) -> Sequence[Op]:
        """Return a call for each event of the phase."""
        return [partial(self._emit, event, group) for event in _EVENTS.get(phase, ())]

    def _emit(self, event: str, group: ParamGroup) -> None:
        sends_none = isinstance(group.mesh, PartMesh) and group.skips_shards
        if sends_none and event.endswith("reduce_scatter"):
            return
        for hear in self.hears:
            hear(event, group)


_listeners: WeakKeyDictionary[ParamGroup, _Listener] = WeakKeyDictionary()
"""By root. A reduction in flight keeps its program, and so calls the listener of earlier events."""


@contextlib.contextmanager
def listening(groups: Iterable[ParamGroup], hear: Hear) -> Iterator[None]:
    """Call ``hear`` with every event of the trees of some groups within the context."""
    roots = dict.fromkeys(group.tree.root for group in groups)
    for root in roots:
        listener = _listeners.setdefault(root, _Listener())
        listener.hears.append(hear)
        root.tree.install(listener)
    try:
        yield
    finally:
        for root in roots:
            listener = _listeners[root]
            listener.hears.remove(hear)
            if not listener.hears:
                root.tree.remove(listener)  # fully_shard may have put the root in another tree


@contextlib.contextmanager
def record_events(module: nn.Module, *events: str) -> Iterator[list[Event]]:
    """Record what the groups of a sharded module do within the context.

    Args:
        module: A sharded module, or one with sharded modules in it; the whole trees that they
            belong to are recorded.
        events: The events to record, out of ``EVENTS``; all of them if none is given.

    Returns:
        A list that grows while the context is open, of ``(event, group name)``; the group of the
        root is named ``""``.

    Raises:
        TypeError: If ``module`` is no module.
        ValueError: If nothing in the module is sharded, or an event does not exist.

    Collective: none.

    Example:
        >>> import torch
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     layer = fully_shard(nn.Linear(4, 4))
        ...     with record_events(layer, "all_gather", "reduce_scatter") as events:
        ...         layer(torch.ones(2, 4)).sum().backward()
        >>> events
        [('all_gather', ''), ('reduce_scatter', '')]
    """
    check_module("module", module)
    groups = groups_in(module)
    unknown = set(events) - set(EVENTS)
    check_value("events", sorted(unknown), not unknown, f"out of {EVENTS}")
    recorded, wanted = list[Event](), events or EVENTS

    def hear(event: str, group: ParamGroup) -> None:
        if event in wanted:
            recorded.append((event, group.name))

    with listening(groups, hear):
        yield recorded


# The order on all ranks ---------------------------------------------------------------------------

CHECK_VARIABLE = "COMPOSABLE_SHARD_CHECK"

_CHECKED = {"gather": "all-gather", "regather": "all-gather", "reduce": "reduction"}


class OrderCheck(Feature):
    """Compares the next operation of all ranks of a tree."""

    is_dropped_on_join = True

    def __init__(self) -> None:
        self._num_steps = 0

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return a comparison before a gather or a reduction is launched."""
        return [partial(self.agree, _CHECKED[phase], group)] if phase in _CHECKED else ()

    def end_forward(self, tree: Any, outermost: Any) -> None:
        """Compare at the end of a forward."""
        self.agree("end of a forward", outermost)

    def end_backward(self, tree: Any) -> None:
        """Compare at the end of a backward."""
        self.agree("end of a backward", tree.root)

    def agree(self, op: str, group: Any) -> None:
        """Raise on all ranks unless all have reached the operation ``op`` of a group.

        Raises:
            RankMismatchError: On all ranks, with the operations of two ranks that differ; only on
                the waiting ranks, if another rank does not arrive within the time-out.

        Collective: one all-reduce of 16 bytes for each process group of more than one rank; more
            only if it raises.
        """
        self._num_steps += 1
        for mesh in group.channels:
            for ranks in mesh.process_groups:
                self._compare(f"{op} of {group.label}", ranks, mesh.device)

    def _compare(self, op: str, ranks: dist.ProcessGroup, device: torch.device) -> None:
        step = f"{op}, operation {self._num_steps}"
        try:
            is_same, _ = compare(op, ranks, device)
        except RuntimeError as error:
            raise RankMismatchError(
                f"Expected all ranks to reach the {step}, got no message of some rank within "
                "the time-out; it has ended, or waits elsewhere"
            ) from error
        if not is_same:
            steps = gather_objects([step], ranks, "comparing the order of collectives")
            numbers = dist.get_process_group_ranks(ranks)
            raise RankMismatchError(first_difference(steps, numbers, "order of collectives"))


def _of_new_tree() -> list[Feature]:
    """Return a check for a new tree; nothing if the environment variable is not set."""
    return [OrderCheck()] if os.environ.get(CHECK_VARIABLE, "0") not in ("", "0") else []


feature_factories.append(_of_new_tree)
