"""A backward pass: who is gathered, and whose gradients are complete.

The steps of a backward are read off the forward (``order.py``), the same on all ranks. What
autograd tells, that an output has a gradient or that a node has run, says how far the steps may be
taken: a group that this rank's loss does not reach is gathered and reduced in its turn, with zeros,
because another rank's loss may reach it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from composable_shard import _torch
from composable_shard.core.group import ParamGroup, Token
from composable_shard.core.order import NO_PLAN, ExecutionOrder, Interval, OrderRecord, Plan, Step
from composable_shard.core.tree_reductions import Reductions
from composable_shard.errors import ShardError, StaleParameterError

if TYPE_CHECKING:
    from composable_shard.core.root import Context

# What autograd still has to do for one group in the backward that is running ----------------------

_INNER = -2
"""Stands for the number of a backward that an activation checkpoint is going to begin."""


class End:
    """Called at the end of a backward; dies without being called if the backward fails.

    Attributes:
        has_failed: Whether it was called and raised: then who keeps the exception keeps it alive.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.has_failed = False
        self._on_end = on_end

    def __call__(self) -> None:
        try:
            with _torch.apart_from_transforms():
                self._on_end()
        except BaseException:
            self.has_failed = True
            raise


class GroupRun:
    """How far the running backward has come with one group.

    A checkpoint may run a backward inside a backward: the group is complete when no node is pending
    in any of them.

    Attributes:
        pending: By the number of each backward, how many nodes of autograd are left to run in it.
        is_gathered: Whether its parameters were gathered, where backward reads them.
        is_bounded: Whether input markers lie in front of all calls that the backward goes through.
            If not, nodes that read a parameter detached may run after its last gradient.
        is_complete: Whether all of its gradients are there.
        is_reduced: Whether its turn to be reduced has come.
        num_computed_again: How often a checkpoint has computed it again.
    """

    def __init__(self, group: ParamGroup, *, is_inside: bool) -> None:
        self.pending: dict[int, int] = {}
        self.is_gathered = False
        self.is_bounded = True
        self.is_complete = False
        self.is_reduced = False
        self.num_computed_again = 0
        self._group = group
        # Within a forward more changes than the count when a gradient is there.
        group.pending_nodes = {} if is_inside else self.pending

    @property
    def is_waiting(self) -> bool:
        """Whether autograd has nodes of the group to run."""
        return max(self.pending.values(), default=0) > 0

    def enter(self, backward: int) -> None:
        """Count the accumulations that are part of a backward."""
        self.pending.pop(_INNER, None)
        self.pending[backward] = _torch.num_to_run(self._group.units.all.accumulators)

    def compute_again(self) -> None:
        """Note that a checkpoint computes the group again.

        A reentrant one then runs a backward of its own, whose nodes are not known yet.
        """
        self.num_computed_again += 1
        if not self.is_waiting:
            self.pending[_INNER] = 1

    def stop_expecting_inner(self) -> None:
        """Note that the running backward has left the checkpoint that computed the group again."""
        self.pending.pop(_INNER, None)

    def expect_markers(self, backward: int) -> int:
        """Wait for the input markers of all calls, as one call of the module has been reached.

        Hazard: a rank whose loss uses no parameter would be done after one call, and gather again
        for the next; another has waited for its gradients, and gathers once. Guard: all calls that
        the backward goes through are waited for. Test:
        ``test_ranks_that_reach_other_parts_train_alike``.

        Returns:
            How many there are that were not expected before.
        """
        num_new = 0
        for marker in self._group.input_markers:
            if marker.token.backward != backward and _torch.will_run(marker.node):
                marker.token.backward = backward
                num_new += 1
        self.pending[backward] += num_new
        return num_new

    def count(self, backward: int) -> bool:
        """Count one node down; return whether the group is complete."""
        self.pending[backward] -= 1
        return not self.is_waiting


# What the pipeline schedules of torch do with a sharded module ------------------------------------
#
# A schedule runs the backwards of all microbatches without sync, some of them in two halves (first
# the gradients of inputs, later those of weights, both by ``torch.autograd.grad``), and then has
# what they left reduced: by ``FSDPModule.finalize_backward`` since torch 2.15, before by asking
# ``torch.distributed.fsdp.fully_shard.state(module)``.


def loses_weights(group: ParamGroup) -> bool:
    """Tell whether this is a first half whose second half will not find the weights of ``group``.

    The schedule has noted which parameters are registered, and the second half differentiates those
    alone. If they are the sharded ones, which are not in the graph, it computes nothing.
    """
    settings = group.settings
    if settings.requires_gradient_sync or settings.reshard_after_backward:
        return False  # a schedule sets both to False
    if group.is_unsharded and not group.shows_sharded:
        return False
    if not group.is_trainable or _torch.num_to_run(group.units.all.accumulators):
        return False
    markers = [marker.node for marker in group.input_markers]
    return _torch.is_ahead(group.units.all.accumulators, before=markers)


def refuse_lost_weights(groups: Iterable[ParamGroup]) -> None:
    """Raise for groups of which backwards in halves have lost gradients.

    Raises:
        ShardError: If there are any. On all ranks of the stage.
    """
    for group in groups:
        raise ShardError(
            f"Expected gradients of {group.label} after the microbatches of a pipeline "
            "stage, got none; a schedule that splits backward into inputs and weights "
            "needs set_reshard_after_forward(False) on the stage"
        )


class PipelineState:
    """Reduces the gradients of a pipeline stage when its schedule says so.

    The schedule goes through all states of a context and their groups first; here there are none,
    and one call does everything.
    """

    all_states: tuple[()] = ()
    _group: ParamGroup

    def __init__(self, group: ParamGroup) -> None:
        self.__dict__["_group"] = group  # the subclass refuses to be written to

    @property
    def _state_ctx(self) -> PipelineState:
        return self

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what all microbatches left, wait, and free.

        Raises:
            ShardError: See :func:`refuse_lost_weights`.

        Collective: the reductions of a backward.
        """
        self._group.context.backward.settle()


# A backward pass: who is gathered, and whose gradients are complete -------------------------------


class BackwardPass:
    """The backward that is running in one tree, if any, and what the last ones left to do.

    A group is complete when autograd has run all of its nodes that this backward will run: the
    accumulation into each parameter, and the markers at the module's inputs. It is reduced when it
    is complete and all steps before have been taken.

    Attributes:
        order: What forwards have done since the last backward.
        record: In which order the last backward gathered.
        reductions: What is reduced.
        finalization: The handle of one that is to be waited for, if any.
    """

    def __init__(self, context: Context) -> None:
        self.order: ExecutionOrder[ParamGroup] = ExecutionOrder()
        self.record: OrderRecord[ParamGroup] = OrderRecord()
        self.reductions = Reductions(context)
        self.finalization: object | None = None
        self._context = context
        self._lost: dict[ParamGroup, None] = {}  # of which backwards in halves lose gradients
        self._end: weakref.ref[End] | None = None
        self._id = -1
        self._runs: dict[ParamGroup, GroupRun] = {}
        self._steps: list[Step[ParamGroup]] = []  # to be taken, the next one last
        self._to_gather: set[ParamGroup] = set()  # those with a step that gathers among them
        self._planned: set[ParamGroup] = set()  # those with a step that reduces, taken or not
        self._to_reduce: deque[ParamGroup] = deque()  # their turn has come
        self._to_free: list[ParamGroup] = []  # reduced, but a checkpoint may compute them again
        self._plan: Plan[ParamGroup] = NO_PLAN
        self._last_forward = 0  # the latest forward that the last backward could go through
        self._is_inside = False  # the running backward lies within a forward
        self._ran_inside: dict[ParamGroup, None] = {}  # have gradients of such backwards

    # Told by the hooks ----------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Note that a forward begins."""
        self.order.begin()

    def leave(self, group: ParamGroup, interval: Interval | None, *, is_watched: bool) -> None:
        """Note that a forward leaves ``group``.

        Args:
            group: The group.
            interval: What the execution order returned when it was entered; ``None`` if the call
                cannot have a backward.
            is_watched: Whether it has outputs that may get a gradient; a frozen group is read then.
        """
        if interval is not None:
            self.order.leave(group, interval, trains=group.is_trainable, is_watched=is_watched)

    def forget_forwards(self) -> None:
        """Expect no backward of the forwards so far; one that comes all the same works."""
        self.order.clear()

    def need(
        self, group: ParamGroup, *, forward: int | None = None, is_bounded: bool = False
    ) -> None:
        """Gather ``group``, whose outputs have a gradient; prefetch the next one.

        Args:
            group: The group.
            forward: The number of the forward that gave these outputs, if it was one.
            is_bounded: Whether input markers lie in front of the call that gave them.
        """
        run = self._enter(group, forward)
        if not run.is_gathered and loses_weights(group):
            self._lost[group] = None
        if not run.is_complete:
            run.expect_markers(_torch.current_backward())
            run.is_bounded = run.is_bounded and is_bounded
        self._come_to(group, run)

    def recompute(self, group: ParamGroup) -> None:
        """Note that a checkpoint computes ``group`` again: steps before it are taken."""
        if group in self._runs or group in self.order:
            self._begin_unless_running(None)
        if self._is_inside or not (group in self._runs or group in self._to_gather):
            return
        run = self._enter(group)
        run.compute_again()
        if group in self._to_gather:
            self._come_to(group, run)

    def pass_marker(self, group: ParamGroup, token: Token) -> None:
        """Note that autograd has run an input marker; it counts if somebody waits for it."""
        if token.backward == _torch.current_backward():
            self.count(group)

    def count(self, group: ParamGroup) -> None:
        """Note that autograd has run one of the nodes that are waited for."""
        run = self._enter(group)
        if run.is_complete:
            self._open_again(group, run)
        if self._is_inside:
            self._ran_inside[group] = None
            self.order.forget(group)
        if run.count(_torch.current_backward()):
            self._complete(group, run)
            self._reduce_in_order()

    # Steps ----------------------------------------------------------------------------------

    def _come_to(self, group: ParamGroup, run: GroupRun) -> None:
        """Take the steps up to that which gathers ``group``; gather it now if there is none."""
        if group in self._to_gather and _torch.current_backward() == self._id:
            self._take_steps(group)
        elif not run.is_gathered or (group.is_read_in_backward and not group.is_unsharded):
            self._gather(group, run)

    def _take_steps(self, until: ParamGroup | None) -> None:
        """Take the steps up to that which gathers ``until``, or all.

        Autograd goes back in the order of forward. So a group that was left later than ``until``,
        and has not been needed, will not be, and one that was entered later is complete, unless
        autograd says that it has nodes to run.
        """
        for computed in self._to_free:  # groups in checkpoints that the backward has come past
            computed.reshard()
        self._to_free.clear()
        while self._steps and (until is None or until in self._to_gather):
            group, gathers = self._steps.pop()
            if not gathers:
                self._take_turn(group).stop_expecting_inner()
                self._reduce_complete()
                continue
            self._to_gather.discard(group)
            run = self._enter(group)
            if group is not until and not run.is_gathered:
                self._pass_by(group, run)
            if not run.is_gathered or (group.is_read_in_backward and not group.is_unsharded):
                self._gather(group, run)
        self._reduce_in_order()

    def _pass_by(self, group: ParamGroup, run: GroupRun) -> None:
        """Prepare a group that this loss has not reached where it was left."""
        num_markers = 0 if run.is_complete else run.expect_markers(_torch.current_backward())
        if not run.is_waiting:
            group.freshness.forget_forward()  # perhaps of a loss that was let go
        elif not num_markers:
            run.is_bounded = False

    def _gather(self, group: ParamGroup, run: GroupRun) -> None:
        run.is_gathered = True
        self._context.emit("pre_backward", group)
        if not group.params:
            return
        if self._is_inside:
            self._context.forward.gather(group)
            return
        self.record.advance(group)
        if group.is_read_in_backward:
            group.unshard()
            group.wait_for_unshard()
        for target in group.settings.backward_prefetch or self._next_to_gather():
            was_gathered = target in self._runs and self._runs[target].is_gathered
            if target.is_sharded and target.is_read_in_backward and not was_gathered:
                with contextlib.suppress(StaleParameterError):  # raised where it is needed, if ever
                    target.unshard()

    def _next_to_gather(self) -> list[ParamGroup]:
        for group, gathers in reversed(self._steps):
            if gathers and group.params:
                return [group]
        return []

    def _take_turn(self, group: ParamGroup) -> GroupRun:
        run = self._runs.get(group) or self._enter(group)
        run.is_reduced = True
        self._to_reduce.append(group)
        return run

    def _reduce_in_order(self) -> None:
        """Take the next steps that reduce, of groups that are complete."""
        if self._is_inside:
            return
        self._reduce_complete()
        while self._steps and not self._steps[-1].gathers:
            group = self._steps[-1].group
            run = self._runs.get(group) or self._enter(group)
            if run.is_waiting or self._may_be_computed_again(group, run):
                return
            self._steps.pop()
            self._take_turn(group)
            self._reduce_complete()

    def _reduce_complete(self) -> None:
        """Reduce the groups whose turn has come, up to the first that is not complete."""
        while self._to_reduce:
            group = self._to_reduce[0]
            run = self._runs.get(group) or self._enter(group)
            if run.is_waiting:
                return
            self._to_reduce.popleft()
            self._complete(group, run)
            self._free_if_over(group, run)
            if group.settings.requires_gradient_sync:
                self.reductions.launch(group)

    def _may_be_computed_again(self, group: ParamGroup, run: GroupRun) -> bool:
        return run.num_computed_again < self._plan.num_checkpoints.get(group, 0)

    # Completion -----------------------------------------------------------------------------

    def _enter(self, group: ParamGroup, forward: int | None = None) -> GroupRun:
        """Return the run of a group, of which something happens in the running backward."""
        backward = _torch.current_backward()
        if backward != self._id or backward == -1:  # -1: outside of all, or at the end of one
            self._begin_unless_running(forward)
        run = self._runs.get(group)
        if run is None:
            run = self._runs[group] = GroupRun(group, is_inside=self._is_inside)
            self._plan_reduction(group)
        if not run.is_complete and backward not in run.pending:
            run.enter(backward)
        return run

    def _plan_reduction(self, group: ParamGroup) -> None:
        """Have ``group`` reduced next if no step does, as in a backward of a backward."""
        if group.params and group not in self._planned and not self._is_inside:
            self._planned.add(group)
            self._steps.append(Step(group, gathers=False))

    def _open_again(self, group: ParamGroup, run: GroupRun) -> None:
        """Wait for a node of a complete group, whose parameters are used outside of its modules."""
        run.is_complete = False
        run.pending[_torch.current_backward()] = 1
        if run.is_reduced:
            run.is_reduced = False
            self._planned.discard(group)
            self._plan_reduction(group)

    def _begin_unless_running(self, forward: int | None) -> None:
        if self._is_running:
            return
        if self.was_aborted:
            self._context.clean_up()
        self._begin(forward)

    def _begin(self, forward: int | None) -> None:
        self._forget_runs()
        end = End(self.end)
        self._end, self._id = weakref.ref(end), _torch.current_backward()
        _torch.on_backward_end(end)
        del end  # a traceback through here would keep it
        self._is_inside = self._context.forward.is_running
        self._context.agree_on_requires_grad()
        if self._is_inside:
            return
        if self.reductions.by_hand is None:
            self.reductions.by_hand = self._context.root.settings.finalizes_by_hand
        if self.order:
            self._plan = self.order.plan(_is_trainable)
            self._last_forward = self.order.forward
        elif forward is None or forward > self._last_forward:
            self._plan = NO_PLAN
        self._steps = self._plan.steps.copy()  # that of the last one if it goes through the same
        self._to_gather = {group for group, gathers in self._steps if gathers}
        self._planned = {group for group, gathers in self._steps if not gathers}
        for group in self._ran_inside:
            run = self._enter(group)
            if not run.is_waiting:  # complete since its own backward within forward
                run.is_complete = True
                self._accumulate_unless_synced(group)

    def _complete(self, group: ParamGroup, run: GroupRun) -> None:
        """Note that all gradients of ``group`` are there; without sync, accumulate them."""
        if run.is_complete:
            return
        run.is_complete = True
        run.pending.clear()
        self._context.emit("post_backward", group)
        if self._is_inside:
            if run.is_bounded:
                self._context.forward.release(group)
            return
        self._free_if_over(group, run)
        self._accumulate_unless_synced(group)

    def _accumulate_unless_synced(self, group: ParamGroup) -> None:
        if not group.settings.requires_gradient_sync and group.is_trainable:
            self.reductions.accumulate(group)

    def _free_if_over(self, group: ParamGroup, run: GroupRun) -> None:
        """Free a complete group unless something may read it, or other ranks gather it later."""
        if not group.settings.reshard_after_backward or not run.is_bounded:
            return
        if not run.is_reduced and self._may_be_called_again(group):
            return
        if self._may_be_computed_again(group, run):
            if run.is_reduced:
                self._to_free.append(group)
        elif group not in self._to_gather:
            group.reshard()

    def _may_be_called_again(self, group: ParamGroup) -> bool:
        """Tell whether this backward may come to another call of a complete group.

        What comes to nothing only keeps memory, so this rank may ask whether a graph lives.
        """
        plan = self._plan
        is_alive = group in plan.called_before and self._context.forward.has_several_graphs
        return is_alive or group in plan.called_again

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
        for group, run in list(self._runs.items()):
            self._complete(group, run)
            if not run.is_bounded:
                self._context.forward.release(group)
        self._end, self._id, self._is_inside = None, -1, False

    def finish_inside(self) -> None:
        """Reduce what backwards within a forward left, as none of that forward itself will come."""
        if self._ran_inside:
            self.settle()

    def synchronize(self) -> None:
        """Reduce over all ranks what is not, whatever is set; wait. Collective: see settle."""
        self.reductions.synchronize(self._ran())
        self._context.wait_until_read()
        self.reductions.by_hand = None

    def _ran(self) -> list[ParamGroup]:
        """Return the groups that may have gradients of which no backward has told."""
        return [
            group
            for group in dict.fromkeys([*self.order.last_entered_first(), *self._ran_inside])
            if group.is_trainable
        ]

    def settle(self) -> None:
        """Reduce what backwards have left, without another; wait, and free.

        Raises:
            ShardError: See refuse_lost_weights.

        Collective: a reduction of each group that ran forward or is not synchronized, but those
            without sync.
        """
        self._refuse_lost_weights()
        for group in dict.fromkeys([*self._ran(), *self.reductions.unsynced]):
            if group.settings.requires_gradient_sync:
                self.reductions.launch_at_end(group)
            else:
                self.reductions.accumulate(group)
        if not self.reductions.is_left_open:
            self.reductions.in_flight.wait()
        self._context.free_after_backward()
        self._context.wait_until_read()
        self._reset()

    # Finalization by a call -----------------------------------------------------------------

    def finalize_by_hand(self, enabled: bool) -> None:
        """Set whether a call, and not the end of a backward, finishes the reductions.

        Raises:
            ShardError: If it changes while a backward runs, or one before is not finished.
        """
        if self.was_aborted:
            self._context.clean_up()
        settings = self._context.root.settings
        in_use = True if self.finalization is not None else self.reductions.by_hand
        if enabled != (settings.finalizes_by_hand if in_use is None else in_use):
            if _torch.current_backward() != -1:
                raise ShardError(
                    "Expected set_manual_backward_finalization() to change outside of backward, "
                    "got it within one; call it between iterations"
                )
            if in_use is not None:
                remedy = "finalize_backward()" if in_use else "set_is_last_backward(True)"
                raise ShardError(
                    "Expected set_manual_backward_finalization() to change between iterations, got "
                    f"a backward that is not finished; end it by {remedy}, or drop it by "
                    "reset_iter_state()"
                )
        settings.finalizes_by_hand = enabled

    def start_finalization(self, handle: object) -> None:
        """Launch what backwards have left to reduce, and free.

        Raises:
            ShardError: See refuse_lost_weights.

        Collective: see Reductions.launch_left.
        """
        self._refuse_lost_weights()
        self.reductions.launch_left()
        self.reductions.reset()
        self.reductions.by_hand = None
        self._context.free_after_backward()
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
        self.finalization = None

    def _refuse_lost_weights(self) -> None:
        lost = list(self._lost)
        self._lost.clear()
        refuse_lost_weights(lost)

    def close(self) -> None:
        """End the backward: take the steps that are left, reduce what is unsynced, wait, free."""
        self._take_steps(None)
        for group, run in list(self._runs.items()):
            self._complete(group, run)  # autograd may have given it undefined gradients
        self._reduce_in_order()
        self.reductions.end_backward()
        self._context.check_order("end of a backward", self._context.root)
        self._context.free_after_backward()
        for group in self._context.groups:
            group.freshness.forget_forward()
        self._context.wait_until_read()
        self.record.finish()
        self._reset()

    def abandon(self) -> None:
        """Forget a backward that failed, and what forwards left for it to do."""
        self.record.abandon()
        self._last_forward = 0
        self.reductions.abandon()
        self.reductions.by_hand = self.finalization = None
        self._lost.clear()
        self._reset()

    def _reset(self) -> None:
        self._end, self._id, self._is_inside = None, -1, False
        self._ran_inside.clear()
        self.reductions.reset()
        self.order.clear()
        self._forget_runs()

    def _forget_runs(self) -> None:
        for group in self._runs:
            group.pending_nodes = {}
        self._runs.clear()
        self._steps.clear()
        self._to_gather.clear()
        self._planned.clear()
        self._to_reduce.clear()
        self._to_free.clear()


def _is_trainable(group: ParamGroup) -> bool:
    return group.is_trainable
