"""Manual finalization: a call of the user finishes the reductions of several backwards."""

from __future__ import annotations

from typing import Any

from composable_shard import _torch
from composable_shard.errors import ShardError


class Finalization:
    """Finishes the reductions of a tree when the user calls ``finalize_backward``.

    Attributes:
        is_manual: Whether ``finalize_backward`` finishes the reductions, and not the end of a
            backward.
        handle: The handle made by the last ``finalize_backward``, until its ``wait()`` has been
            called; otherwise ``None``.
        former_roots: Groups that were roots of their own when the user set ``is_manual``.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self.is_manual = False
        self.handle: object = None
        self.former_roots: list[Any] = []
        # ``is_manual`` when the last unfinished backward ended; ``None`` if all are finished.
        self._was_manual: bool | None = None

    @property
    def has_unfinished_backwards(self) -> bool:
        """Whether there are unfinished backwards."""
        return self._was_manual is not None or self.handle is not None

    def record_backward(self) -> bool:
        """Record the end of a backward; return whether ``finalize_backward`` will finish it."""
        is_unfinished = self.is_manual or not self._tree.is_last_backward
        self._was_manual = self.is_manual if is_unfinished else None
        return self.is_manual

    def set_manual(self, enabled: bool) -> None:
        """Set whether ``finalize_backward`` finishes the reductions, and not the end of a backward.

        Raises:
            ShardError: If it changes during a backward or before an earlier one is finished.
        """
        if self._tree.has_failed:
            self._tree.reset()
        was_manual = True if self.handle is not None else self._was_manual
        if enabled != (self.is_manual if was_manual is None else was_manual):
            if _torch.current_backward() != -1:
                raise ShardError(
                    "Expected set_manual_backward_finalization() to change outside of backward, "
                    "got it within one; call it between iterations"
                )
            if was_manual is not None:
                remedy = "finalize_backward()" if was_manual else "set_is_last_backward(True)"
                if self.handle is not None:
                    remedy = "the wait() of its handle"
                raise ShardError(
                    "Expected set_manual_backward_finalization() to change between iterations, got "
                    f"a backward that is not finished; end it by {remedy}, or drop it by "
                    "reset_iter_state()"
                )
        self.is_manual = enabled

    def refuse_former_roots(self) -> None:
        """Raise if ``is_manual`` was set for a group that is no longer a root."""
        if self.former_roots:
            raise ShardError(
                "Expected set_manual_backward_finalization() on the root alone, got it on "
                f"{self.former_roots[0].label}; set it to False there and to True on the root"
            )

    def start(self, handle: object) -> None:
        """Launch the deferred reductions; reshard the groups with ``reshard_after_backward``.

        Collective: the reductions.
        """
        self._tree.launch_reductions()
        self._was_manual, self.handle = None, handle

    def check_ended(self) -> None:
        """Raise if the handle of the last ``finalize_backward`` has not been waited for."""
        if self.handle is not None:
            raise ShardError(
                "Expected a wait for the gradients of the last backward before another forward or "
                "finalize_backward(), got a GradientReductionHandle without a wait; call its wait()"
            )

    def end(self) -> None:
        """Wait for the reductions. Collective: on the CPU, those over the replicas."""
        self._tree.in_flight.finish()
        self.handle = None

    def reset(self) -> None:
        """Forget unfinished backwards, after their gradients were dropped."""
        self._was_manual = self.handle = None
