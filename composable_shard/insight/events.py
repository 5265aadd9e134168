"""The events of a sharded module, in the order in which they happen on this rank.

Tests of schedules compare whole lists of ``(event, name)``.

A listener is also called where parts of the events begin and end, for timing. A collective ``x`` is
launched between ``begin_x`` and ``x`` (``begin_regather``: from parts that neighbours kept). The
rank only waits between ``begin_wait_for_x`` and ``waited_for_x``, and copies the result to its
place from then until ``wait_for_x``. ``begin_wait_for_copies`` and ``wait_for_copies`` enclose a
wait for copies between host and device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from composable_shard.arguments import check_module, check_value
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.tree import Listener, Tree

Event = tuple[str, str]

EVENTS = (
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "all_gather",
    "wait_for_all_gather",
    "reshard",
    "accumulate",
    "reduce_scatter",
    "wait_for_reduce_scatter",
    "all_reduce",
    "wait_for_all_reduce",
)
"""All events. The first four are moments of a group, the others its actions at these moments."""


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


def join(prefix: str, name: str) -> str:
    """Return the name within the model of a group that is called ``name`` within its tree."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


@contextlib.contextmanager
def listening(tree: Tree, hear: Listener) -> Iterator[None]:
    """Call ``hear`` with every event of a tree within the context, before earlier listeners."""
    before = tree.listener

    def hear_first(event: str, name: str) -> None:
        hear(event, name)
        if before is not None:
            before(event, name)

    tree.listener = hear_first
    try:
        yield
    finally:
        tree.listener = before


@contextlib.contextmanager
def record_events(module: nn.Module, *events: str) -> Iterator[list[Event]]:
    """Record what the groups of a sharded module do within the context.

    Args:
        module: A sharded module; the whole tree it belongs to is recorded.
        events: The events to record, out of ``EVENTS``; all of them if none is given.

    Returns:
        A list that grows while the context is open, of ``(event, group name)``; the group of the
        root is named ``""``.

    Raises:
        TypeError: If ``module`` is no module.
        ValueError: If the module is not sharded, or an event does not exist.

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
    group = group_of(module)
    if group is None:
        raise ValueError(
            f"Expected a sharded module, got {type(module).__name__}; apply fully_shard to it"
        )
    unknown = set(events) - set(EVENTS)
    check_value("events", sorted(unknown), not unknown, f"out of {EVENTS}")
    recorded, wanted = list[Event](), events or EVENTS

    def hear(event: str, name: str) -> None:
        if event in wanted:
            recorded.append((event, name))

    with listening(group.tree, hear):
        yield recorded
