"""Manual finalization: a call of the user finishes the reductions of several backwards."""

from __future__ import annotations

from typing import Any

from composable_shard.errors import ShardError


class Finalization:
    """Finishes the reductions of a tree when the user calls ``finalize_backward``.

    Attributes:
        is_manual: Whether ``finalize_backward``, instead of the end of a backward, finishes the
            reductions.
        handle: The handle made by the last ``finalize_backward``, until its ``wait()`` has been
            called; otherwise ``None``.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self.is_manual = False
        self.handle: object = None
        self._remedy: str | None = None  # how to finish earlier backwards; ``None`` if all are

    @property
    def has_unfinished_backwards(self) -> bool:
        """Whether there are backwards with unfinished reductions."""
        return self._remedy is not None

    def record_backward(self) -> bool:
        """Record the end of a backward; return whether it finishes its reductions itself."""
        self._remedy = "end it by finalize_backward()" if self.is_manual else None
        if not (self.is_manual or self._tree.is_last_backward):
            self._remedy = "call set_is_last_backward(True) and run one more backward"
        return self._remedy is None

    def set_manual(self, enabled: bool) -> None:
        """Let ``finalize_backward`` finish reductions, or (``False``) the end of each backward.

        Raises:
            ShardError: If a backward that began under the other setting is not finished.
        """
        if enabled != self.is_manual and self._remedy is not None:
            raise ShardError(
                "Expected set_manual_backward_finalization() between iterations, got it before a "
                f"backward is finished; {self._remedy}, or drop it by reset_iter_state()"
            )
        self.is_manual = enabled

    def start(self, handle: object) -> None:
        """Launch the unfinished reductions; reshard groups with ``reshard_after_backward``.

        Collective: the reductions.
        """
        self._tree.launch_reductions()
        self._remedy, self.handle = "end it by the wait() of its handle", handle

    def check_ended(self) -> None:
        """Raise if the handle of the last ``finalize_backward`` has not been waited for."""
        if self.handle is not None:
            raise ShardError(
                "Expected wait() on the last GradientReductionHandle before another forward or "
                "finalize_backward(), got none; call it"
            )

    def end(self) -> None:
        """Wait for the reductions.

        Collective: on the CPU, the reductions over the replicas, which start here.
        """
        self._tree.in_flight.finish()
        self.reset()

    def reset(self) -> None:
        """Record that no backward is unfinished."""
        self._remedy = self.handle = None
