"""Manual finalization: a call of the user finishes the reductions of several backwards."""

from __future__ import annotations

from typing import Any

from composable_shard import _torch
from composable_shard.errors import ShardError


class Finalization:
    """Finishes the reductions of a tree when the user calls ``finalize_backward``.

    Attributes:
        is_manual: Whether ``finalize_backward``, instead of the end of a backward, finishes the
            reductions.
        handle: The handle made by the last ``finalize_backward``, until its ``wait()`` has been
            called; otherwise ``None``.
        former_roots: Groups for which the user set ``is_manual`` while they were still roots.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self.is_manual = False
        self.handle: object = None
        self.former_roots: list[Any] = []
        # ``is_manual`` at the end of the last backward with unfinished reductions; else ``None``.
        self._was_manual: bool | None = None

    @property
    def has_unfinished_backwards(self) -> bool:
        """Whether there are backwards with unfinished reductions."""
        return self._was_manual is not None or self.handle is not None

    def record_backward(self) -> bool:
        """Record the end of a backward; return whether it finishes its reductions itself."""
        is_unfinished = self.is_manual or not self._tree.is_last_backward
        self._was_manual = self.is_manual if is_unfinished else None
        return not is_unfinished

    def set_manual(self, enabled: bool) -> None:
        """Set whether ``finalize_backward``, or else the end of a backward, finishes reductions.

        Raises:
            ShardError: If a backward that began under the other setting is not finished.
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
                remedy = "end it by finalize_backward()"
                if not was_manual:
                    remedy = "call set_is_last_backward(True) before one more backward"
                if self.handle is not None:
                    remedy = "end it by the wait() of its handle"
                raise ShardError(
                    "Expected set_manual_backward_finalization() to change between iterations, got "
                    f"a backward that is not finished; {remedy}, or drop it by "
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
        """Launch the unfinished reductions; reshard groups with ``reshard_after_backward``.

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
        """Wait for the reductions.

        Collective: on the CPU, the reductions over the replicas, which start here.
        """
        self._tree.in_flight.finish()
        self.handle = None

    def reset(self) -> None:
        """Forget unfinished backwards, after their gradients were dropped."""
        self._was_manual = self.handle = None
