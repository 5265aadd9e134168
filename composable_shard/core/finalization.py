"""Finishing the reductions of several backwards by a call, and not by the end of each."""

from __future__ import annotations

from composable_shard import _torch
from composable_shard.core.backward import BackwardPass
from composable_shard.core.group import ParamGroup
from composable_shard.core.tree_reductions import Reductions
from composable_shard.errors import ShardError


class Finalization:
    """Finishes the reductions of a tree when users say so."""

    def __init__(self, root: ParamGroup, backward: BackwardPass, reductions: Reductions) -> None:
        self._settings = root.settings
        self._backward = backward
        self._reductions = reductions

    def set_by_hand(self, enabled: bool) -> None:
        """Set whether a call, and not the end of a backward, finishes the reductions.

        Raises:
            ShardError: If it changes while a backward runs, or one before is not finished.
        """
        if self._backward.was_aborted:
            self._backward.clean_up()
        in_use = True if self._reductions.handle is not None else self._reductions.by_hand
        if enabled != (self._settings.finalizes_by_hand if in_use is None else in_use):
            if _torch.current_backward() != -1:
                raise ShardError(
                    "Expected set_manual_backward_finalization() to change outside of backward, "
                    "got it within one; call it between iterations"
                )
            if in_use is not None:
                remedy = "finalize_backward()" if in_use else "set_is_last_backward(True)"
                if self._reductions.handle is not None:
                    remedy = "the wait() of its handle"
                raise ShardError(
                    "Expected set_manual_backward_finalization() to change between iterations, got "
                    f"a backward that is not finished; end it by {remedy}, or drop it by "
                    "reset_iter_state()"
                )
        self._settings.finalizes_by_hand = enabled

    def start(self, handle: object) -> None:
        """Launch what backwards have left to reduce, and free.

        Collective: see Reductions.launch_left.
        """
        self._reductions.launch_left()
        self._reductions.reset()
        self._reductions.by_hand = None
        self._backward.free_what_is_over()
        self._reductions.handle = handle

    def check_ended(self) -> None:
        """Raise if one has been launched and not waited for."""
        if self._reductions.handle is not None:
            raise ShardError(
                "Expected the gradients of the last backward before another forward or "
                "finalize_backward(), got a GradientReductionHandle that was not waited for; call "
                "its wait()"
            )

    def end(self) -> None:
        """Wait for what was launched. Collective: none."""
        self._reductions.in_flight.wait()
        self._reductions.wait_for_copies()
        self._reductions.handle = None
