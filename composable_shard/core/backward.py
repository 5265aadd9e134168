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
from collections.abc import Callable, Sequence

from composable_shard import _torch
from composable_shard.core.calls import Token
from composable_shard.core.forward import ForwardPass, waited_for
from composable_shard.core.group import ParamGroup, Sharded
from composable_shard.core.order import NO_PLAN, ExecutionOrder, Plan, Step
from composable_shard.core.tree_reductions import Reductions
from composable_shard.errors import ShardError, StaleParameterError

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
        had_turn: Whether its turn to be reduced has come.
        is_noted: Whether it is noted that this backward, which lies within a forward, came to it.
        num_computed_again: How often a checkpoint has computed it again.
    """

    def __init__(self, group: ParamGroup, *, is_inside: bool) -> None:
        self.pending: dict[int, int] = {}
        self.is_gathered = False
        self.is_bounded = True
        self.is_complete = False
        self.had_turn = False
        self.is_noted = False
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
        accumulators = self._group.units.all.accumulators
        self.pending[backward] = _torch.num_to_run(accumulators, self._refuse_leaves)

    def _refuse_leaves(self) -> None:
        """Raise if ``autograd.grad`` would return gradients that should be reduced.

        Those within a forward, and of parameters that the user has unsharded, are the user's.
        """
        group = self._group
        syncs = group.settings.requires_gradient_sync and group.mesh.num_ranks > 1
        if syncs and group.pending_nodes is self.pending and not group.is_held:
            raise ShardError(
                f"Expected a backward into the parameters of {group.label}, got torch.autograd."
                "grad by them, whose gradients are of this rank alone; call loss.backward() and "
                "read .grad, or set_requires_gradient_sync(False) to get those of this rank"
            )

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


# Halves of a backward, as pipeline schedules run them ---------------------------------------------


def refuse_half(group: ParamGroup) -> None:
    """Raise for the backward of inputs alone whose other half would not find the weights.

    A schedule runs the backwards of all microbatches without sync, some of them in two halves, by
    ``torch.autograd.grad``: the second one differentiates the parameters that are registered at the
    first, and the sharded ones are not in the graph.

    Raises:
        ShardError: If they are registered. On all ranks of the stage.
    """
    settings = group.settings
    if settings.requires_gradient_sync or settings.reshard_after_backward:
        return  # a schedule sets both to False
    accumulators = group.units.all.accumulators
    if group.shows_unsharded or not group.is_trainable or _torch.num_to_run(accumulators):
        return
    if _torch.is_ahead(accumulators, before=[marker.node for marker in group.input_markers]):
        raise ShardError(
            f"Expected the unsharded parameters of {group.label} to be registered in a backward of "
            "inputs alone, got the sharded ones, whose gradients would be lost; a pipeline "
            "schedule that splits backward into inputs and weights needs "
            "set_reshard_after_forward(False) on its stages"
        )


# A backward pass: who is gathered, and whose gradients are complete -------------------------------


class BackwardRun:
    """One backward: from its first gradient until it has ended, or something else has begun.

    Attributes:
        end: Dies with it.
        id: Its number.
        is_inside: Whether it lies within a forward.
        plan: What it does.
        steps: Its steps to be taken, the next one last.
        to_gather: The groups with a step that gathers among them.
        planned: The groups with a step that reduces, taken or not.
        to_reduce: The groups whose turn to be reduced has come.
        to_free: Those that are reduced, but a checkpoint may compute them again.
        groups: How far it has come with each group.
    """

    def __init__(
        self, end: weakref.ref[End], number: int, plan: Plan[ParamGroup], *, is_inside: bool
    ) -> None:
        self.end = end
        self.id = number
        self.is_inside = is_inside
        self.plan = plan
        self.steps = plan.steps.copy()
        self.to_gather = {group for group, gathers in self.steps if gathers}
        self.planned = {group for group, gathers in self.steps if not gathers}
        self.to_reduce: deque[ParamGroup] = deque()
        self.to_free: list[ParamGroup] = []
        self.groups: dict[ParamGroup, GroupRun] = {}

    @property
    def is_running(self) -> bool:
        """Whether it has neither ended nor failed, as far as is known."""
        end = self.end()
        return end is not None and not end.has_failed

    def plan_reduction(self, group: ParamGroup) -> None:
        """Have ``group`` reduced next if no step does, as in a backward of a backward."""
        if group.params and group not in self.planned and not self.is_inside:
            self.planned.add(group)
            self.steps.append(Step(group, gathers=False))

    def next_to_gather(self, count: int) -> list[ParamGroup]:
        """Return the next ``count`` groups that are gathered, as far as there are any."""
        found: dict[ParamGroup, None] = {}
        for group, gathers in reversed(self.steps):
            if len(found) == count:
                break
            if gathers and group.params:
                found[group] = None
        return list(found)

    def may_be_computed_again(self, group: ParamGroup) -> bool:
        """Tell whether a checkpoint has yet to compute ``group`` again."""
        num_checkpoints = self.plan.num_checkpoints
        return bool(num_checkpoints) and (
            self.groups[group].num_computed_again < num_checkpoints.get(group, 0)
        )


class BackwardPass:
    """The backwards of one tree, and what the last ones left to do.

    A group is complete when autograd has run all of its nodes that this backward will run: the
    accumulation into each parameter, and the markers at the module's inputs. It is reduced when it
    is complete and all steps before have been taken.

    Attributes:
        run: The one that was begun and not ended, if any.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        order: ExecutionOrder[ParamGroup],
        forward: ForwardPass,
        reductions: Reductions,
    ) -> None:
        self.run: BackwardRun | None = None
        self._groups = groups
        self._order = order
        self._forward = forward
        self._reductions = reductions
        self._plan: Plan[ParamGroup] = NO_PLAN
        self._last_forward = 0  # the latest forward that the last backward could go through
        self._ran_inside: dict[ParamGroup, None] = {}  # have gradients of backwards within forward

    def goes_through(self, group: ParamGroup) -> bool:
        """Tell whether the backward that is running, of whatever tree, goes through ``group``.

        The first that a backward comes to may be a checkpoint, which computes its groups again; a
        graph that is kept is gone through once more by the same plan.
        """
        if self.run is not None:
            return True
        return group in self._order or group in self._plan.num_checkpoints

    # Told by the hooks ----------------------------------------------------------------------

    def need(
        self,
        group: ParamGroup,
        *,
        forward: int | None = None,
        version: int | None = None,
        is_bounded: bool = False,
    ) -> None:
        """Gather ``group``, whose outputs have a gradient; prefetch the next one.

        Args:
            group: The group.
            forward: The number of the forward that gave these outputs, if it was one.
            version: The number of the state of the parameters that it computed with.
            is_bounded: Whether input markers lie in front of the call that gave them.
        """
        run, one = self._enter(group, forward)
        if not one.is_gathered and self._reductions.is_left_open:
            refuse_half(group)
        if not one.is_complete:
            one.expect_markers(_torch.current_backward())
            one.is_bounded = one.is_bounded and is_bounded
            if version is not None:
                group.check_computed_with(version)
        self._come_to(run, group)

    def come_past(self, group: ParamGroup, *, forward: int | None) -> None:
        """Take the steps before and at ``group``, which this rank has not computed; see need."""
        run, one = self._enter(group, forward)
        if not one.is_complete:  # other calls of it may have been computed
            one.expect_markers(_torch.current_backward())
        if group in run.to_gather:
            self._come_to(run, group)

    def recompute(self, group: ParamGroup) -> None:
        """Note that a checkpoint computes ``group`` again: steps before it are taken."""
        run = self.run
        if (run is not None and group in run.groups) or group in self._order:
            run = self._begin_unless_running(None)
        if run is None or run.is_inside or not (group in run.groups or group in run.to_gather):
            return
        run, one = self._enter(group)
        one.compute_again()
        if group in run.to_gather:
            self._come_to(run, group)

    def pass_marker(self, group: ParamGroup, token: Token) -> None:
        """Note that autograd has run an input marker; it counts if somebody waits for it."""
        if token.backward == _torch.current_backward():
            self.count(group)

    def count(self, group: ParamGroup) -> None:
        """Note that autograd has run one of the nodes that are waited for.

        A hook may differentiate another graph of a group that the backward has yet to come to,
        which then is not complete.
        """
        run, one = self._enter(group)
        if one.is_complete:
            self._open_again(run, group)
        if run.is_inside and not one.is_noted:
            one.is_noted = True
            self._ran_inside[group] = None
            group.gradients.leave_unsynced()
            self._order.forget(group)
        backward = _torch.current_backward()
        if not one.count(backward):
            return
        if backward != run.id and group in run.to_gather:
            del one.pending[backward]
        else:
            self._complete(run, group)
            self._reduce_in_order(run)

    # Steps ----------------------------------------------------------------------------------

    def _come_to(self, run: BackwardRun, group: ParamGroup) -> None:
        """Take the steps up to that which gathers ``group``; gather it now if there is none."""
        if group in run.to_gather and _torch.current_backward() == run.id:
            self._take_steps(run, group)
        else:
            self._gather_unless_there(run, group)

    def _take_steps(self, run: BackwardRun, until: ParamGroup | None) -> None:
        """Take the steps up to that which gathers ``until``, or all.

        Autograd goes back in the order of forward. So a group that was left later than ``until``,
        and has not been needed, will not be, and one that was entered later is complete, unless
        autograd says that it has nodes to run.
        """
        for computed in run.to_free:  # groups in checkpoints that the backward has come past
            computed.reshard()
        run.to_free.clear()
        while run.steps and (until is None or until in run.to_gather):
            group, gathers = run.steps.pop()
            if not gathers:
                one = run.groups.get(group) or self._enter(group)[1]
                one.stop_expecting_inner()
                self._take_turn(run, group)
                continue
            run.to_gather.discard(group)
            _, one = self._enter(group)
            if group is not until and not one.is_gathered:
                self._pass_by(group, one)
            self._gather_unless_there(run, group)
        self._reduce_in_order(run)

    def _pass_by(self, group: ParamGroup, one: GroupRun) -> None:
        """Prepare a group that this loss has not reached where it was left."""
        num_markers = 0 if one.is_complete else one.expect_markers(_torch.current_backward())
        if not one.is_waiting:
            group.freshness.forget_forward()  # perhaps of a loss that was let go
        elif not num_markers:
            one.is_bounded = False

    def _gather_unless_there(self, run: BackwardRun, group: ParamGroup) -> None:
        one = run.groups[group]
        if one.is_gathered and (group.is_unsharded or not group.is_read_in_backward):
            return
        one.is_gathered = True
        group.emit("pre_backward")
        if not group.params:
            return
        if run.is_inside:
            self._forward.gather(group)
            return
        self._order.of_backward.advance(group)
        if group.is_read_in_backward:
            group.unshard()
        depth = group.settings.prefetch_depth
        with waited_for(group):
            for target in group.settings.backward_prefetch or run.next_to_gather(depth):
                was_gathered = target in run.groups and run.groups[target].is_gathered
                if target.is_sharded and target.is_read_in_backward and not was_gathered:
                    with contextlib.suppress(StaleParameterError):  # raised where it is needed
                        target.unshard()

    def _take_turn(self, run: BackwardRun, group: ParamGroup) -> None:
        """Reduce ``group`` as soon as it is complete, and all whose turn came before it."""
        run.groups[group].had_turn = True
        run.to_reduce.append(group)
        self._reduce_complete(run)

    def _reduce_in_order(self, run: BackwardRun) -> None:
        """Take the next steps that reduce, of groups that are complete."""
        if run.is_inside:
            return
        if run.to_reduce:
            self._reduce_complete(run)
        while run.steps and not run.steps[-1].gathers:
            group = run.steps[-1].group
            one = run.groups.get(group) or self._enter(group)[1]
            if one.is_waiting or run.may_be_computed_again(group):
                return
            run.steps.pop()
            self._take_turn(run, group)

    def _reduce_complete(self, run: BackwardRun) -> None:
        """Reduce the groups whose turn has come, up to the first that is not complete."""
        while run.to_reduce:
            group = run.to_reduce[0]
            if run.groups[group].is_waiting:
                return
            run.to_reduce.popleft()
            if not run.groups[group].is_complete:
                self._complete(run, group)
            self._free_if_over(run, group)
            if group.settings.requires_gradient_sync:
                self._reductions.launch(group)

    # Completion -----------------------------------------------------------------------------

    def _enter(self, group: ParamGroup, forward: int | None = None) -> tuple[BackwardRun, GroupRun]:
        """Return the running backward, in which something happens to a group, and that group's."""
        run, backward = self.run, _torch.current_backward()
        if run is None or backward != run.id or backward == -1:  # -1: outside, or at the end of one
            run = self._begin_unless_running(forward)
        one = run.groups.get(group)
        if one is None:
            one = run.groups[group] = GroupRun(group, is_inside=run.is_inside)
            run.plan_reduction(group)
        if not one.is_complete and backward not in one.pending:
            one.enter(backward)
        return run, one

    def _open_again(self, run: BackwardRun, group: ParamGroup) -> None:
        """Wait for a node of a complete group, whose parameters are used outside of its modules."""
        one = run.groups[group]
        one.is_complete = False
        one.pending[_torch.current_backward()] = 1
        if one.had_turn:
            one.had_turn = False
            run.planned.discard(group)
            run.plan_reduction(group)

    def _begin_unless_running(self, forward: int | None) -> BackwardRun:
        if self.run is not None and self.run.is_running:
            return self.run
        if self.was_aborted:
            self.clean_up()
        return self._begin(forward)

    def _begin(self, forward: int | None) -> BackwardRun:
        self._forget_run()
        for group in self._groups:
            if group.is_unsharded or not group.settings.unshards_in_backward:
                group.take_over_from_users()
        end, is_inside = End(self._on_end), self._forward.is_running
        plan = NO_PLAN if is_inside else self._next_plan(forward)
        ref, number = weakref.ref(end, self._on_lost), _torch.current_backward()
        self.run = run = BackwardRun(ref, number, plan, is_inside=is_inside)
        if not _torch.has_streams(self._groups[0].mesh.device):
            _torch.keep_spare()
        _torch.on_backward_end(end)
        del end  # a traceback through here would keep it
        if is_inside:
            return run
        self._reductions.begin_backward()
        if self._reductions.by_hand is None:
            self._reductions.by_hand = self._groups[0].settings.finalizes_by_hand
        for group in self._ran_inside:
            _, one = self._enter(group)
            if not one.is_waiting and group not in run.to_gather:  # complete since its own backward
                one.is_complete = True
                self._accumulate_unless_synced(group)
        return run

    def _next_plan(self, forward: int | None) -> Plan[ParamGroup]:
        """Return the plan of a backward; that of the last one if it goes through the same."""
        if self._order:
            self._plan = self._order.plan(_is_trainable)
            self._last_forward = self._order.forward
        elif forward is None or forward > self._last_forward:
            self._plan = NO_PLAN
        return self._plan

    def _complete(self, run: BackwardRun, group: ParamGroup) -> None:
        """Note that all gradients of ``group`` are there; without sync, accumulate them."""
        one = run.groups[group]
        one.is_complete = True
        one.pending.clear()
        group.emit("post_backward")
        if run.is_inside:
            if one.is_bounded:
                self._forward.release(group)
            return
        self._free_if_over(run, group)
        self._accumulate_unless_synced(group)

    def _accumulate_unless_synced(self, group: ParamGroup) -> None:
        if not group.settings.requires_gradient_sync and group.is_trainable:
            self._reductions.accumulate(group)

    def _free_if_over(self, run: BackwardRun, group: ParamGroup) -> None:
        """Free a complete group unless something may read it, or other ranks gather it later."""
        one = run.groups[group]
        if not group.settings.reshard_after_backward or not one.is_bounded:
            return
        if not one.had_turn and self._may_be_called_again(run, group):
            return
        if run.may_be_computed_again(group):
            if one.had_turn:
                run.to_free.append(group)
        elif group not in run.to_gather:
            group.reshard()

    def _may_be_called_again(self, run: BackwardRun, group: ParamGroup) -> bool:
        """Tell whether this backward may come to another call of a complete group.

        What comes to nothing only keeps memory, so this rank may ask whether a graph lives.
        """
        is_alive = group in run.plan.called_before and self._forward.has_several_graphs
        return is_alive or group in run.plan.called_again

    # The end --------------------------------------------------------------------------------

    @property
    def was_aborted(self) -> bool:
        """Whether a backward began and failed, and nothing has cleaned up since.

        Hazard: the engine, on a thread of its own, lets go of a failed backward some time after it
        has raised. Guard: outside of every backward none is running, whatever is still alive.
        """
        run = self.run
        if run is None or run.is_inside:
            return False
        return _torch.current_backward() == -1 or not run.is_running

    @property
    def ran_inside(self) -> bool:
        """Whether a backward within a forward has left gradients, or failed."""
        return bool(self._ran_inside) or (self.run is not None and self.run.is_inside)

    def _on_lost(self, end: weakref.ref[End]) -> None:
        """Register the sharded parameters when a backward has failed; collective: none.

        Hazard: where there are streams, the engine lets go of it on a thread of its own. Guard:
        there they are registered by what comes next, which takes over what users set meanwhile.
        """
        run = self.run
        is_its_own = run is not None and run.end is end and not run.is_inside
        if is_its_own and not _torch.has_streams(self._groups[0].mesh.device):
            for group in self._groups:
                group.show_sharded()

    def _on_end(self) -> None:
        """End the backward, or one within a forward, whose gradients wait for that of the forward.

        What such a backward left may be used again by forward; nothing is sent.
        """
        run = self.run
        assert run is not None
        if not run.is_inside:
            self._close(run)
            return
        for group, one in list(run.groups.items()):
            if not one.is_complete:
                self._complete(run, group)
            if not one.is_bounded:
                self._forward.release(group)
        self._forget_run()

    def _close(self, run: BackwardRun) -> None:
        """End the backward: take the steps that are left, reduce what is unsynced, wait, free."""
        self._take_steps(run, None)
        for group, one in list(run.groups.items()):
            if not one.is_complete:  # autograd may have given it undefined gradients
                self._complete(run, group)
        self._reduce_in_order(run)
        self._reductions.end_backward()
        self._groups[0].check_order("end of a backward")
        self.free_what_is_over()
        for group in self._groups:
            group.freshness.forget_forward()
        self._reductions.wait_for_copies()
        self._order.of_backward.finish()
        self._reset()

    def free_what_is_over(self) -> None:
        """Free what stays neither for a running forward nor for the rest of an accumulation.

        What stays shows the sharded parameters, which have the gradients, unless a forward waits
        for its backward: its loss may be made of the unsharded ones yet.
        """
        goes_on = self._reductions.are_to_go_on
        for group in self._groups:
            if type(group.state) is Sharded or self._forward.holds(group):
                continue
            if group.settings.reshard_after_backward or not goes_on:
                group.reshard()
            elif self._forward.waits_for_backward:
                group.expose()
            else:
                group.show_sharded()

    def keep_inside(self) -> None:
        """Accumulate what backwards within an earlier forward left, as another forward begins.

        If that fails, what is not accumulated is dropped.
        """
        for group in self._ran_inside:
            if group.is_trainable:
                self._reductions.accumulate(group)
        self._ran_inside.clear()

    def finish_inside(self) -> None:
        """Reduce what backwards within a forward left, as none of that forward itself will come."""
        if self._ran_inside:
            self.reduce_left()

    def synchronize(self) -> None:
        """Reduce over all ranks what is not, whatever is set; wait.

        Collective: see Reductions.synchronize.
        """
        self._reductions.synchronize(self._ran())
        self._reductions.wait_for_copies()
        self._reductions.by_hand = None
        self._reductions.reset()

    def _ran(self) -> list[ParamGroup]:
        """Return the groups that may have gradients of which no backward has told."""
        ran = dict.fromkeys([*self._order.last_entered_first(), *self._ran_inside])
        trainable = [group for group in ran if group.is_trainable]
        for group in trainable:
            group.take_over_from_users()
        return trainable

    def reduce_left(self) -> None:
        """Reduce what backwards have left, without another; wait, and free.

        Collective: a reduction of each group that ran forward or is not synchronized, but those
            without sync.
        """
        for group in dict.fromkeys([*self._ran(), *self._reductions.unsynced]):
            if group.settings.requires_gradient_sync:
                self._reductions.launch_at_end(group)
            else:
                self._reductions.accumulate(group)
        self._reductions.wait_unless_open()
        self.free_what_is_over()
        self._reductions.wait_for_copies()
        self._reset()

    def clean_up(self, *, drops_earlier: bool = False) -> None:
        """Return to the state between two iterations, whatever was under way.

        What the backward that failed has not yet reduced is dropped; gradients that are visible
        on the sharded parameters stay.

        Args:
            drops_earlier: Whether so is what earlier backwards have left under way. If not, it is
                waited for.
        """
        if not drops_earlier:
            self._reductions.finish_earlier()
        self._forward.abandon()
        self._order.of_backward.abandon()
        self._last_forward = 0
        self._reductions.abandon()
        self._reset()
        for group in self._groups:
            group.is_exposed = group.is_exposed or group.shows_unsharded
            group.reshard()
            group.gradients.discard()
            group.freshness.forget_forward()
        self._reductions.wait_for_copies()

    def _reset(self) -> None:
        self._forget_run()
        _torch.return_spare()
        self._ran_inside.clear()
        self._reductions.reset()
        self._order.clear()

    def _forget_run(self) -> None:
        if self.run is not None:
            for group in self.run.groups:
                group.pending_nodes = {}
            self.run = None


def _is_trainable(group: ParamGroup) -> bool:
    return group.is_trainable
