"""The interface of features, which are independent of the core. Imports nothing of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

Op = Callable[[], object]
"""One operation of a program: a callable without arguments."""

Phase = Literal[
    "pre_forward",
    "gather",
    "regather",
    "gathered",
    "await_gather",
    "wait",
    "free",
    "freed",
    "post_forward",
    "pre_backward",
    "accumulated",
    "reduce",
    "reduced",
    "await_reduction",
    "averaged",
    "scattered",
    "all_reduced",
    "await_all_reduce",
    "deliver",
    "delivered",
    "replicas_delivered",
    "post_backward",
]
"""When the operations of a feature run, relative to those of the core:

- ``pre_forward``, ``post_forward``: when a forward enters and leaves the group's module.
- ``gather``, ``gathered``: before and after the all-gather is launched.
- ``regather``: in place of ``gather``, if neighbouring ranks have kept parts of the parameters.
- ``await_gather``, ``wait``: before and after the wait for it; then the unsharded parameters are
  filled.
- ``free``, ``freed``: before and after the unsharded memory is freed.
- ``pre_backward``, ``post_backward``: when a backward first needs and has finished the group.
- ``accumulated``: after gradients were accumulated without a reduction.
- ``reduce``, ``reduced``: before and after the reduce-scatter is launched.
- ``await_reduction``, ``averaged``: before the wait for it, and after its mean is in the reduced
  buffer.
- ``scattered``: if there are replicas, right before the reduction over them.
- ``all_reduced``, ``await_all_reduce``: after the reduction over replicas is launched, if there is
  one, and before the wait for it.
- ``deliver``: after the mean over all ranks is in the reduced buffer, before it is written to
  ``.grad``.
- ``delivered``, ``replicas_delivered``: after ``.grad`` is written without, and with, a reduction
  over replicas.
"""


class Feature:
    """Base class of features. A method that is not overridden costs nothing in a step."""

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return operations to compile into the program of ``group``."""
        return ()

    def begin_forward(self, tree: Any) -> None:
        """Called when a forward of the tree begins."""

    def end_forward(self, tree: Any, outermost: Any) -> None:
        """Called when a forward ends without a failure; ``outermost`` is its outermost group."""

    def end_backward(self, tree: Any) -> None:
        """Called when a backward of the tree has delivered all gradients."""

    def fail(self, tree: Any) -> None:
        """Called when a forward or backward has raised and the tree resets."""


class Plugins:
    """The features of one tree of groups.

    Attributes:
        features: In installation order.
        generation: A program compiled under another generation is out of date.
    """

    def __init__(self, features: Sequence[Feature] = ()) -> None:
        self.features = tuple(dict.fromkeys(features))
        self.generation = 0

    def install(self, feature: Feature) -> None:
        """Add a feature, unless it is installed; recompile every program before its next use."""
        self.features = tuple(dict.fromkeys((*self.features, feature)))
        self.invalidate_programs()

    def remove(self, feature: Feature) -> None:
        """Remove a feature; recompile every program before its next use."""
        self.features = tuple(other for other in self.features if other is not feature)
        self.invalidate_programs()

    def invalidate_programs(self) -> None:
        """Recompile every program before its next use."""
        self.generation += 1

    def ops(self, group: Any, phase: Phase) -> tuple[Op, ...]:
        """Return the operations of all features for one phase of one group."""
        return tuple(op for feature in self.features for op in feature.ops(group, phase))
