"""Finishing the reductions of several backwards by a call of the user. Imports group."""

from __future__ import annotations

from typing import Any

from composable_shard import _torch
from composable_shard.errors import ShardError


class Finalization:
    """Finishes the reductions of a tree when the user calls ``finalize_backward``.

    Attributes:
        by_hand: Whether a call, and not the end of a backward, finishes the reductions.
        handle: The handle of the last call, until its wait.
        misplaced: Former roots for which ``by_hand`` was set.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self.by_hand = False
        self.handle: object = None
        self.misplaced: list[Any] = []
        self._used: bool | None = None  # ``by_hand`` as it was in unfinished backwards

    @property
    def is_open(self) -> bool:
        """Whether there are unfinished backwards."""
        return self._used is not None or self.handle is not None

    def note_backward(self) -> bool:
        """Record that a backward ends; return whether the user finishes it by a call."""
        is_unfinished = self.by_hand or not self._tree.is_last_backward
        self._used = self.by_hand if is_unfinished else None
        return self.by_hand

    def set_by_hand(self, enabled: bool) -> None:
        """Set whether a call, and not the end of a backward, finishes the reductions.

        Raises:
            ShardError: If it changes during a backward or before an earlier one is finished.
        """
        if self._tree.has_failed:
            self._tree.reset()
        used = True if self.handle is not None else self._used
        if enabled != (self.by_hand if used is None else used):
            if _torch.current_backward() != -1:
                raise ShardError(
                    "Expected set_manual_backward_finalization() to change outside of backward, "
                    "got it within one; call it between iterations"
                )
            if used is not None:
                remedy = "finalize_backward()" if used else "set_is_last_backward(True)"
                if self.handle is not None:
                    remedy = "the wait() of its handle"
                raise ShardError(
                    "Expected set_manual_backward_finalization() to change between iterations, got "
                    f"a backward that is not finished; end it by {remedy}, or drop it by "
                    "reset_iter_state()"
                )
        self.by_hand = enabled

    def refuse_misplaced(self) -> None:
        """Raise if ``by_hand`` was set for a group that is no longer the root."""
        if self.misplaced:
            raise ShardError(
                "Expected set_manual_backward_finalization() on the root alone, got it on "
                f"{self.misplaced[0].label}; set it to False there and to True on the root"
            )

    def start(self, handle: object) -> None:
        """Launch the reductions that backwards have deferred, and free memory.

        Collective: those reductions.
        """
        self._tree.launch_reductions()
        self._used, self.handle = None, handle

    def check_ended(self) -> None:
        """Raise if the reductions of :meth:`start` were not waited for."""
        if self.handle is not None:
            raise ShardError(
                "Expected the gradients of the last backward before another forward or "
                "finalize_backward(), got a GradientReductionHandle that was not waited for; call "
                "its wait()"
            )

    def end(self) -> None:
        """Wait for the reductions. Collective: none."""
        self._tree.in_flight.finish()
        self.handle = None

    def reset(self) -> None:
        """Forget unfinished backwards, after their gradients were dropped."""
        self._used = self.handle = None
