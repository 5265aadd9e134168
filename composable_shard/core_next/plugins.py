"""What features add to the core, which does not know them. Imports nothing of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

Op = Callable[[], object]
"""One operation of a program: a callable without arguments."""

Phase = Literal["gather", "wait", "free", "reduce", "deliver", "delivered"]
"""When the operations of a feature run, relative to those of the core:

- ``gather``: before the all-gather is launched.
- ``wait``: after the all-gather has finished and the unsharded parameters are filled.
- ``free``: before the unsharded memory is freed.
- ``reduce``: after the gradients are taken, before the reduce-scatter is launched.
- ``deliver``: after the mean is in the reduced buffer, before it is written to ``.grad``.
- ``delivered``: after ``.grad`` is written.
"""


class Feature:
    """Base class of features. A method that is not overridden costs nothing in a step."""

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return operations to compile into the program of ``group``."""
        return ()

    def begin_forward(self, tree: Any) -> None:
        """Called when a forward of the tree begins."""

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
