"""Calls of a group's modules: what is known of each between its two hooks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from composable_shard.core.nested import Given
from composable_shard.core.order import Called, Interval
from composable_shard.core.units import Versions


class Substitution(enum.Enum):
    """What stands in the places of a group's parameters while a forward runs."""

    NOTHING = enum.auto()
    FULL = enum.auto()
    SHARDED = enum.auto()


class InputMarker:
    """An identity in front of a module, whose node runs when all of the module's nodes have.

    Hazard: a graph that never runs backward stays alive as long as somebody refers to its nodes.
    Guard: only the hooks on the module's outputs refer to a marker, so they die together; the
    node itself refers to the token alone, or it would keep itself alive.

    Attributes:
        node: The node of the identity.
        token: Says in which backward it is waited for.
    """

    __slots__ = ("__weakref__", "node", "token")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.token = Token()


class Token:
    """Says in which backward an input marker is waited for."""

    __slots__ = ("backward",)

    def __init__(self) -> None:
        self.backward = -1


class Imitated(NamedTuple):
    """What a rank knows of a call that it takes part in without computing.

    Attributes:
        is_watched: Whether outputs of it may get a gradient on other ranks.
        notes: What stands for the checkpoints around it.
    """

    is_watched: bool
    notes: list[dict[Any, Any]]


@dataclass
class Call:
    """One call of a module, between its two hooks.

    Attributes:
        input_markers: What was put before the inputs that need a gradient.
        outer_bases: The tensors that those inputs are views of, and the nodes they had.
        given: The containers among its inputs.
        substitution: Whether it computes with parameters of somebody else.
        forward: The number of the forward that it is part of, if that may have a backward.
        interval: Where it stands in the execution order, if it may have a backward.
        handled: The exception that was being handled when it began, if any.
        is_observed: Whether it runs within a transform or a mode.
        is_again: Whether a backward of the tree computes it again, by an activation checkpoint.
        versions: What the unsharded parameters were when it began, to see whether it writes them.
        called: What is noted of it, for those who imitate it later.
        imitated: What is done in its place, if this rank does not compute it.
    """

    input_markers: list[InputMarker] = field(default_factory=list)
    outer_bases: list[tuple[torch.Tensor, Node | None]] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    substitution: Substitution = Substitution.NOTHING
    forward: int | None = None
    interval: Interval | None = None
    handled: BaseException | None = None
    is_observed: bool = False
    is_again: bool = False
    versions: Versions | None = None
    called: Called[Any] | None = None
    imitated: Imitated | None = None

    def came_in(self, base: torch.Tensor) -> bool:
        """Tell whether ``base`` was made outside, and not changed in place by the call."""
        return any(base is outer and base.grad_fn is node for outer, node in self.outer_bases)
