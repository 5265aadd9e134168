"""The interface of features: optional parts that add operations to a training step.

The order check and the event log are features. A feature belongs to a tree: a root with all groups
below it.

The phases say when the operations of a feature run, relative to those of the core. On devices with
streams, the all-reduce over replicas is launched right after the reduce-scatter, on a stream of its
own, so ``all_reduce_launched`` comes before ``averaged``.

- ``pre_forward``, ``post_forward``: when a forward enters and leaves the group's module.
- ``gather``, ``gather_launched``: before and after the all-gather is launched.
- ``regather``: in place of ``gather`` in backward, with ``reshard_after_forward=k``.
- ``before_wait_for_gather``, ``gather_done``: before and after the wait for the all-gather. In
  ``gather_done``, the unsharded parameters already have their values.
- ``free``, ``freed``: before and after the unsharded memory is freed.
- ``pre_backward``, ``post_backward``: when a backward first needs the group, and when it finishes
  the group.
- ``accumulated``: after gradients were accumulated without a reduction.
- ``reduce``, ``reduce_launched``: before and after the reduce-scatter is launched.
- ``before_wait_for_reduction``, ``averaged``: before and after the wait for the reduce-scatter.
  After the wait, the reduced buffer holds the mean over the shard axis; but with streams and
  replicas, the all-reduce is already running, so do not read the buffer.
- ``reduced_over_shards``: only if the gradients are also reduced over replicas: the first phase
  after both ``averaged`` and the launch of the all-reduce. Do not read the buffer.
- ``all_reduce_launched``, ``before_wait_for_all_reduce``: only if gradients are reduced over
  replicas: after the launch of this reduction, and before the wait for it.
- ``deliver``: after the mean over all ranks is in the reduced buffer, before it is written to
  ``.grad``.
- ``delivered``: if the gradients are not reduced over replicas: after ``.grad`` is written, or, if
  they are copied to the host first, after this copy is launched (no phase marks the write).
- ``replicas_delivered``: like ``delivered``, but if the gradients are also reduced over replicas.
- ``before_wait_for_copies``, ``copies_done``: before and after the host waits for copies between
  host and device, at the end of a backward, or of a forward that cannot have one; for the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

Op = Callable[[], object]
"""One operation of a compiled step (`program.py`): a callable without arguments."""

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
        is_dropped_on_join: Whether the feature is dropped when the root of its tree becomes part
            of a larger sharded model.
    """

    is_dropped_on_join = False

    def ops(self, group: Any, phase: Phase) -> Sequence[Op]:
        """Return the operations of this feature that ``group`` runs in ``phase``."""
        return ()

    def end_forward(self, tree: Any, outermost: Any) -> None:
        """Called when a forward ends without a failure; ``outermost`` is its outermost group."""

    def end_backward(self, tree: Any) -> None:
        """Called when a backward of the tree ends, after it has delivered its gradients."""


# Each is called for a new tree and returns features of the tree.
feature_factories: list[Callable[[], Sequence[Feature]]] = []
