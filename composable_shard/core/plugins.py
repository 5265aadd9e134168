"""The interface of features, which add operations to a step.

The phases say when the operations of a feature run, relative to those of the core. On devices with
streams, the all-reduce over replicas is launched right after the reduce-scatter, on a stream of its
own, so ``all_reduce_launched`` comes before ``averaged``.

- ``pre_forward``, ``post_forward``: when a forward enters and leaves the group's module.
- ``gather``, ``gather_launched``: before and after the all-gather is launched.
- ``regather``: in place of ``gather``, if neighbouring ranks have kept parts of the parameters.
- ``before_wait_for_gather``, ``gather_done``: before and after the wait for the all-gather. In
  ``gather_done``, the unsharded parameters already have their values.
- ``free``, ``freed``: before and after the unsharded memory is freed.
- ``pre_backward``, ``post_backward``: when a backward first needs the group, and when it finishes
  the group.
- ``accumulated``: after gradients were accumulated without a reduction.
- ``reduce``, ``reduce_launched``: before and after the reduce-scatter is launched.
- ``before_wait_for_reduction``, ``averaged``: before the wait for the reduce-scatter, and after its
  mean is in the reduced buffer.
- ``reduced_over_shards``: after ``averaged``, but only if the gradients are also reduced over
  replicas.
- ``all_reduce_launched``, ``before_wait_for_all_reduce``: after the reduction over replicas is
  launched, if there is one, and before the wait for it.
- ``deliver``: after the mean over all ranks is in the reduced buffer, before it is written to
  ``.grad``.
- ``delivered``: after ``.grad`` is written, if the gradients are not reduced over replicas. If a
  copy to the host must come first: after this copy is launched. The next stage then waits for the
  copy and writes ``.grad``.
- ``replicas_delivered``: like ``delivered``, but if the gradients are also reduced over replicas.
- ``before_wait_for_copies``, ``copies_done``: for the root, before and after the host waits for
  copies between host and device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

Op = Callable[[], object]
"""One operation of a program: a callable without arguments."""

Phase = Literal[
    "pre_forward",
    "gather",
    "regather",
    "gather_launched",
    "before_wait_for_gather",
    "gather_done",
    "free",
    "freed",
    "post_forward",
    "pre_backward",
    "accumulated",
    "reduce",
    "reduce_launched",
    "before_wait_for_reduction",
    "averaged",
    "reduced_over_shards",
    "all_reduce_launched",
    "before_wait_for_all_reduce",
    "deliver",
    "delivered",
    "replicas_delivered",
    "post_backward",
    "before_wait_for_copies",
    "copies_done",
]


class Feature:
    """Base class of features, which override some of its methods.

    Attributes:
        is_of_one_tree: Whether the feature is dropped when its tree joins an outer tree.
    """

    is_of_one_tree = False

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return operations to compile into the program of ``group``."""
        return ()

    def end_forward(self, tree: Any, outermost: Any) -> None:
        """Called when a forward ends without a failure; ``outermost`` is its outermost group."""

    def end_backward(self, tree: Any) -> None:
        """Called when a backward of the tree ends, after it has delivered its gradients."""


# Each function returns the features that a new tree begins with.
new_features: list[Callable[[], Sequence[Feature]]] = []
