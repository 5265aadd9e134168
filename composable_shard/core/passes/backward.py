"""A backward pass: who is gathered, and whose gradients are complete.

A group is complete when autograd has run all of its nodes that this backward will run: the
accumulation into each parameter, and the boundaries at the module's inputs. Reductions are
launched in the reverse order of forward, on every rank alike: a group that this rank's loss does
not reach takes its turn with zeros, because another rank's loss may reach it.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.passes.countdown import Countdown, Countdowns, End, Token
from composable_shard.core.passes.pipeline import loses_weights, refuse_lost_weights
from composable_shard.core.passes.reductions import Reductions
from composable_shard.core.passes.schedule import OrderRecord
from composable_shard.core.passes.trail import Trail
from composable_shard.errors import ShardError, StaleParameterError

if TYPE_CHECKING:
    from composable_shard.core.passes.context import Context


class BackwardPass:
    """The backward that is running in one tree, if any, and what the last ones left to do.

    Attributes:
        order: In which order groups were needed.
        reductions: What is reduced, and when.
        finalization: The handle of one that is to be waited for, if any.
    """

    def __init__(self, context: Context) -> None:
        self.order: OrderRecord[ParamGroup] = OrderRecord()
        self.reductions = Reductions(context)
        self.finalization: object | None = None
        self._context = context
        self._by_hand: bool | None = None  # how it is finalized, once a backward has begun
        self._lost: dict[ParamGroup, None] = {}  # backwards in halves have lost gradients
        self._end: weakref.ref[End] | None = None
        self._id = -1
        self._countdowns = Countdowns()
        self._trail = Trail()
        self._needed: set[ParamGroup] = set()
        self._missed: set[ParamGroup] = set()  # gathered, as another rank may need them
        self._is_inside = False  # the running backward lies within a forward
        self._ran_inside: dict[ParamGroup, None] = {}  # have gradients of such backwards

    # Told by the hooks ----------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Note that a forward begins."""
        self._trail.begin()

    def join(self, group: ParamGroup) -> None:
        """Note that ``group`` is entered by a forward that may have a backward."""
        self._trail.enter(group)
        self.reductions.expect(group)

    def expect(self, group: ParamGroup, *, is_watched: bool) -> None:
        """Note that ``group`` is left by a forward that may have a backward.

        Args:
            group: The group.
            is_watched: Whether it has outputs that may get a gradient; a frozen group is read then.
        """
        if group.is_trainable or (is_watched and group.params):
            self._trail.leave(group)
        elif group not in self._trail:
            self.reductions.forget(group)

    def forget_forwards(self) -> None:
        """Expect no backward of the forwards so far; one that comes all the same works."""
        self.reductions.forget_forwards()
        self._trail.clear()

    def need(self, group: ParamGroup, *, is_bounded: bool = False) -> None:
        """Gather ``group``, whose outputs have a gradient; prefetch who comes next.

        Args:
            group: The group.
            is_bounded: Whether boundaries lie in front of the call that gave these outputs.
        """
        self._enter(group)
        if group not in self._needed and loses_weights(group):
            self._lost[group] = None
        self._missed.discard(group)
        self._countdown(group).expect(_torch.current_backward(), is_bounded=is_bounded)
        if group not in self._needed:
            self._pass_by_until(group)
        if group not in self._needed or (group.is_read_in_backward and not group.is_unsharded):
            self._gather(group)

    def recompute(self, group: ParamGroup) -> None:
        """Note that ``group`` computes again: those left later take their turns before."""
        if group in self._trail and group not in self._needed:
            self._begin_unless_running()
            self._pass_by_until(group)

    def _gather(self, group: ParamGroup) -> None:
        self._needed.add(group)
        self._context.emit("pre_backward", group)
        if not group.params:
            return
        if self._is_inside:
            self._context.forward.gather(group)
            return
        expected = self.order.advance(group)
        if group.is_read_in_backward:
            group.unshard()
            group.wait_for_unshard()
        explicit = group.settings.backward_prefetch
        for target in explicit or ([expected] if expected is not None else []):
            if target.is_sharded and target.is_read_in_backward:
                with contextlib.suppress(StaleParameterError):  # raised where it is needed, if ever
                    target.unshard()

    def _pass_by_until(self, group: ParamGroup | None) -> None:
        """Let the groups that this loss does not reach before ``group`` take their turns.

        Autograd goes back in the order of forward, so a group that was left later and has not been
        needed yet will not be. Another rank's loss may reach it; gathering it, and reducing zeros,
        keeps all ranks calling the same collectives in the same order.
        """
        if self._is_inside or _torch.current_backward() != self._id:
            return  # a backward within forward or backward sees only a part of the graph
        for missed, side in self._trail.back_to(group):
            if side == "left" and missed not in self._needed:
                self._pass_by(missed, group)
            elif side == "entered" and missed in self._missed:
                self._countdown(missed).left.clear()
                self._finish_group(missed)

    def _pass_by(self, missed: ParamGroup, group: ParamGroup | None) -> None:
        self._enter(missed)
        # they may share an output, whose inner hook runs first
        comes = group is not None and self._context.encloses(missed, group)
        # or it comes later than its place, as in a double backward or a checkpoint over several
        comes = comes or self._will_arrive(missed) or self._will_pass(missed)
        if not comes:
            self._missed.add(missed)
            missed.freshness.forget_forward()  # perhaps of a loss that was let go
        self._gather(missed)

    def arrive_at_boundary(self, group: ParamGroup, token: Token) -> None:
        """Note that autograd has run a boundary; it counts if somebody waits for it."""
        if token.backward == _torch.current_backward():
            self.arrive(group)

    def arrive(self, group: ParamGroup) -> None:
        """Note that autograd has run one of the nodes that are waited for."""
        backward = _torch.current_backward()
        countdown = self._countdowns.get(group)
        if countdown is None or backward not in countdown.left:
            self._enter(group)
            countdown = self._countdown(group)
        if self._is_inside:
            self._ran_inside[group] = None
            self._trail.forget(group)
        if countdown.arrive(backward):
            self._finish_group(group)

    # Completion -----------------------------------------------------------------------------

    def _countdown(self, group: ParamGroup) -> Countdown:
        return self._countdowns.of(group, is_inside=self._is_inside)

    def _enter(self, group: ParamGroup) -> None:
        self._begin_unless_running()
        if group.is_trainable:
            self.reductions.expect(group)
        self._countdown(group).enter(_torch.current_backward())

    def _begin_unless_running(self) -> None:
        if self._is_running:
            return
        if self.was_aborted:
            self._context.clean_up()
        self._begin()

    def _begin(self) -> None:
        self._countdowns.clear()
        self._needed.clear()
        self._missed.clear()
        end = End(self.end)
        self._end, self._id = weakref.ref(end), _torch.current_backward()
        _torch.on_backward_end(end)
        del end  # a traceback through here would keep it
        self._is_inside = self._context.forward.is_running
        if self._is_inside:
            return
        if self._by_hand is None:
            self._by_hand = self._context.root.settings.finalizes_by_hand
        for group in list(self._ran_inside):
            if not self._will_arrive(group):
                self.reductions.complete(group)

    def _will_arrive(self, group: ParamGroup) -> bool:
        """Tell whether the running backward accumulates into a parameter of ``group``."""
        return self._countdown(group).num_to_arrive() > 0

    def _will_pass(self, group: ParamGroup) -> bool:
        """Tell whether the running backward goes through a call of ``group``."""
        return any(_torch.will_run(boundary.node) for boundary in group.boundaries)

    def _finish_group(self, group: ParamGroup) -> None:
        self._context.emit("post_backward", group)
        if self._is_inside:
            if self._countdown(group).is_bounded:
                self._context.forward.release(group)
            return
        if group.settings.reshard_after_backward and self._countdown(group).is_bounded:
            group.reshard()
        self.reductions.complete(group)
        self.reductions.launch_in_order()

    # The end --------------------------------------------------------------------------------

    @property
    def _is_running(self) -> bool:
        end = None if self._end is None else self._end()
        return end is not None and not end.has_failed

    @property
    def was_aborted(self) -> bool:
        """Whether a backward began and failed, and nothing has cleaned up since.

        Hazard: the engine, on a thread of its own, lets go of a failed backward some time after it
        has raised. Guard: outside of every backward none is running, whatever is still alive.
        """
        if self._end is None or self._is_inside:
            return False
        return _torch.current_backward() == -1 or not self._is_running

    @property
    def ran_inside(self) -> bool:
        """Whether a backward within a forward has left gradients, or failed."""
        return bool(self._ran_inside) or self._is_inside

    def end(self) -> None:
        """End the backward, or one within a forward, whose gradients wait for that of the forward.

        What such a backward left may be used again by forward; nothing is sent.
        """
        if not self._is_inside:
            self.close()
            return
        for group, countdown in list(self._countdowns.items()):
            if countdown.left:
                countdown.left.clear()
                self._finish_group(group)
            if not countdown.is_bounded:
                self._context.forward.release(group)
        self._end, self._id, self._is_inside = None, -1, False

    def finish_inside(self) -> None:
        """Reduce what backwards within a forward left, as none of that forward itself will come."""
        if self._ran_inside:
            self.settle()

    def synchronize(self) -> None:
        """Reduce over all ranks what is not, whatever is set; wait. Collective: see settle."""
        self.reductions.synchronize()
        self._context.wait_until_read()
        if self.finalization is None:
            self._by_hand = None

    def settle(self) -> None:
        """Reduce what backwards have left, without another; wait, and free.

        Raises:
            ShardError: See refuse_lost_weights.

        Collective: a reduction of each group that ran forward or owes, but those without sync.
        """
        self._refuse_lost_weights()
        self.reductions.settle()
        for group in self._context.groups:
            if group.settings.reshard_after_backward and not self._context.forward.holds(group):
                group.reshard()
        self._context.wait_until_read()
        self._reset()

    def finalize_by_hand(self, enabled: bool) -> None:
        """Set whether a call, and not the end of a backward, finishes the reductions.

        Raises:
            ShardError: If it changes while a backward runs, or one before is not finished.
        """
        settings = self._context.root.settings
        if self.was_aborted:
            self._context.clean_up()
        if enabled == (settings.finalizes_by_hand if self._by_hand is None else self._by_hand):
            settings.finalizes_by_hand = enabled
            return
        if _torch.current_backward() != -1:
            raise ShardError(
                "Expected set_manual_backward_finalization() to change outside of backward, got it "
                "within one; call it between iterations"
            )
        if self._by_hand is not None:
            remedy = "finalize_backward()" if self._by_hand else "set_is_last_backward(True)"
            raise ShardError(
                "Expected set_manual_backward_finalization() to change between iterations, got a "
                f"backward that is not finished; end it by {remedy}, or drop it by "
                "reset_iter_state()"
            )
        settings.finalizes_by_hand = enabled

    def start_finalization(self, handle: object) -> None:
        """Launch what backwards have left to reduce, and free.

        Raises:
            ShardError: See refuse_lost_weights.

        Collective: see Reductions.finalize.
        """
        self._refuse_lost_weights()
        self.reductions.finalize()
        for group in self._context.groups:
            if group.settings.reshard_after_backward:
                group.reshard()
        self.finalization = handle

    def check_finalized(self) -> None:
        """Raise if a finalization has been launched and not waited for."""
        if self.finalization is not None:
            raise ShardError(
                "Expected the gradients of the last backward before another forward or "
                "finalize_backward(), got a GradientReductionHandle that was not waited for; call "
                "its wait()"
            )

    def end_finalization(self) -> None:
        """Wait for what was launched. Collective: none."""
        self.reductions.in_flight.wait()
        self._context.wait_until_read()
        self.finalization = self._by_hand = None

    def close(self) -> None:
        """End the backward: complete the rest, reduce what is owed, wait, free."""
        self._pass_by_until(None)
        for group, countdown in self._countdowns.items():
            if countdown.left:
                countdown.left.clear()
                self._finish_group(group)
        self.reductions.end_backward()
        if not self.reductions.is_left_open:
            self._by_hand = None
        self._context.check_order("end of a backward", self._context.root)
        for group in self._context.groups:
            if group.settings.reshard_after_backward:
                group.reshard()
            group.freshness.forget_forward()
        self._context.wait_until_read()
        self.order.finish()
        self._reset()

    def abandon(self) -> None:
        """Forget a backward that failed, and what forwards left for it to do."""
        self.order.abandon()
        self.forget_forwards()
        self.reductions.abandon()
        self._lost.clear()
        self.finalization = self._by_hand = None
        self._reset()

    def _refuse_lost_weights(self) -> None:
        lost = list(self._lost)
        self._lost.clear()
        refuse_lost_weights(lost)

    def _reset(self) -> None:
        self._end, self._id, self._is_inside = None, -1, False
        self._ran_inside.clear()
        self.reductions.reset()
        self._trail.clear()
        self._countdowns.clear()
        self._needed.clear()
        self._missed.clear()
