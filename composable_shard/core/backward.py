"""One backward: when each group is gathered, and when it is finished (freed and reduced).

The tape makes the plan: a list of steps that gather or finish a group, the same on all ranks.
Events from autograd only decide when this rank runs the next steps. If this rank's loss does not
reach a group, the rank still gathers the group when its turn comes, and reduces zeros for it,
because another rank's loss may reach it.

On one device, autograd runs the most recently created nodes first. So all nodes of a group run
before those of a group that forward used earlier, and all ranks call collectives in the same order.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import partial
from operator import lt
from typing import Any

import torch

from composable_shard import _torch
from composable_shard.core.group import ParamGroup, State, process_groups_of
from composable_shard.core.tape import NO_PLAN, Plan, PlanStep
from composable_shard.core.transport.failures import announce, announced
from composable_shard.errors import ShardError

_current_task = _torch.current_backward


class GroupProgress:
    """The progress of one backward through one group; each backward creates a new object.

    Attributes:
        expected_nodes: For each graph task (by its id), the number of nodes of the group that the
            task will run: accumulations of gradients, and input markers. An input marker is an
            identity on an input of a module; backward runs it after the module (see `hooks.py`).
            When such a node has run, a hook appends the id of the task to ``group.finished_nodes``.
            Tasks are counted separately, because a reentrant checkpoint runs a graph task inside
            another task.
        awaits_inner_task: Whether a checkpoint has just recomputed the group. A reentrant
            checkpoint runs the backward of the recomputed calls in another graph task. Until that
            task begins, the nodes of these calls are missing from ``expected_nodes``.
        num_recomputes: The number of calls of this group that checkpoints have yet to recompute.
            Nested checkpoints recompute a call several times; only the last time, by the innermost
            one, counts.
        has_input_markers: Whether every call that autograd has reached has input markers. Without
            markers, autograd may read the parameters after it has accumulated their gradients, so
            the group is freed only at the end.
    """

    def __init__(self) -> None:
        self.expected_nodes: dict[int, int] = {}
        self.awaits_inner_task = False
        self.num_recomputes = 0
        self.has_input_markers = True


class Backward:
    """One backward through the forwards on the tape.

    Attributes:
        steps: The remaining steps of the plan, the next step last.
        is_inner: Whether this backward runs inside a forward. It then accumulates gradients without
            sync. They are reduced in the backward of that forward, or at the end of the forward if
            it has no backward.
        kept: The groups that this backward leaves unsharded. `Tree.end_backward` frees them, except
            during gradient accumulation.
        launched: The groups for which this backward has launched a reduction.
    """

    def __init__(self, tree: Any) -> None:
        """Begin a backward of ``tree``."""
        self.is_inner = bool(tree.call_stack)
        plan: Plan[ParamGroup] = NO_PLAN if self.is_inner else tree.plan
        self.steps = list(plan.steps)
        # `_reached`: the groups of the plan, and groups that `_ensure_progress` adds.
        # `_to_gather`: groups with a gather step ahead.
        self._reached, self._to_gather = set(plan.groups), set(plan.groups)
        self._finish_queue: deque[ParamGroup] = deque()  # finish step reached, nodes pending
        self._tree, self._groups = tree, tree.groups
        self._to_free: list[ParamGroup] = []  # groups that `close` frees
        self.kept: list[ParamGroup] = []
        self.launched: set[ParamGroup] = set()
        self._task = _current_task()
        self._creates_graph = self._has_closed = False
        self._progress: dict[ParamGroup, GroupProgress] = defaultdict(GroupProgress)
        for group in tree.groups:
            group.finished_nodes.clear()
        for group, number in plan.num_recomputes.items():
            self._progress[group].num_recomputes = number
        # Only the engine refers to the callback; if backward fails, the engine drops the callback.
        callback = partial(tree.end_backward, self)
        self._callback = weakref.ref(callback, self._on_callback_freed)
        _torch.on_backward_end(callback)
        # Gradients of inner backwards must be reduced, even those of groups outside of the plan.
        for group in tree.groups if tree.has_inner_backward else ():
            if group.unsynced and group not in plan.groups:
                self._ensure_progress(group)  # makes its finish step the next step

    @property
    def is_running(self) -> bool:
        """Whether the backward has neither ended nor failed."""
        return self._callback() is not None and _current_task() != -1

    def _on_callback_freed(self, _: object) -> None:
        """If autograd has failed, register the sharded parameters and announce the failure.

        On devices with streams, a thread of the engine may call this method. So on such
        devices, the next forward registers the parameters.
        """
        if self._has_closed:
            return
        if not (self.is_inner or _torch.has_streams(self._groups[0].mesh.device)):
            for group in self._groups:
                if group.is_unsharded_registered:
                    group.register_sharded()
        if not announced:  # this rank has announced no failure yet
            process_groups = process_groups_of(self._groups)
            error = RuntimeError("autograd raised an error; see the output of that rank")
            announce(process_groups, f"running backward of {self._groups[0].label}", error)

    # Events from autograd and checkpoints ---------------------------------------------------

    def gather_for_backward(self, group: ParamGroup, *, has_input_markers: bool) -> None:
        """Gather ``group``, because an output of its module has a gradient."""
        self._creates_graph = torch.is_grad_enabled()
        if self._creates_graph and _torch.num_to_run(group.program.accumulators):
            raise _graph_error(group)
        if not self._progress[group].expected_nodes:  # the first time
            settings = group.settings
            # A pipeline schedule may split a backward; see `_is_input_half`.
            if not (settings.reduce_grads or settings.reshard_after_backward):
                group.awaits_weight_half = group.awaits_weight_half or _is_input_half(group)
            for op in group.program.pre_backward:
                op()
        progress = self._ensure_progress(group)
        progress.has_input_markers = progress.has_input_markers and has_input_markers
        self._run_steps(up_to=group)

    def gather_for_recompute(self, group: ParamGroup) -> None:
        """Gather ``group``, because a checkpoint recomputes it."""
        progress = self._ensure_progress(group)
        if not _torch.is_in_checkpoint():  # no checkpoint inside this one recomputes it again
            progress.num_recomputes -= 1
        if not self._has_pending_nodes(group):  # pending nodes already keep it from being finished
            progress.awaits_inner_task = True
        self._run_steps(up_to=group)

    def count_marker(self, group: ParamGroup) -> None:
        """Count an input marker of ``group`` that has run; after the last one, run more steps."""
        expected, task = self._progress[group].expected_nodes, _current_task()
        if task in expected:
            group.finished_nodes.append(task)
            if group.finished_nodes.count(task) >= expected[task]:
                self._run_steps()

    # Steps ----------------------------------------------------------------------------------

    def _ensure_progress(self, group: ParamGroup) -> GroupProgress:
        """Return the progress of ``group``; count its nodes that the current graph task will run.

        The first time in a backward, this also adds a finish step for a group outside of the plan
        and, in an inner backward, gathers the group.
        """
        progress = self._progress[group]
        if not progress.expected_nodes:
            if group not in self._reached:  # an earlier backward has cleared its visits
                self._reached.add(group)
                self.steps.append(PlanStep(group, is_gather=False))
            if self.is_inner:
                self._tree.tape.advance(group, 0)  # so that the next forward prefetches it
                _gather_now(group)
        task = _current_task()
        if task not in progress.expected_nodes:
            nodes = [*group.program.accumulators]
            for ref in group.calls:
                call = ref()
                if call is not None:
                    nodes += call.markers
            num_nodes = _torch.num_to_run(nodes, partial(_refuse_autograd_grad, group))
            progress.expected_nodes[task] = num_nodes
            if num_nodes and task != self._task:
                progress.awaits_inner_task = False
        return progress

    def _run_steps(self, *, up_to: ParamGroup | None = None, ends: bool = False) -> None:
        """Run the next steps of the plan.

        Autograd visits calls in the reverse order of forward. So if autograd reaches ``up_to``
        before a group that precedes it in the plan, that group is not in the graph of this rank's
        loss. The steps of that group run, too.

        Args:
            up_to: Run the steps up to the gather of this group. If the group has been gathered and
                freed already, gather it again. If ``None``, only finish groups, up to the first
                gather step or the first group with pending nodes.
            ends: Whether to run all remaining steps, because autograd has finished.
        """
        queue = self._finish_queue
        while True:
            while queue and (ends or not self._has_pending_nodes(queue[0])):
                self._finish(queue.popleft())
            must_run = ends or up_to in self._to_gather
            if not self.steps or (up_to is not None and not must_run):
                break
            group, is_gather = self.steps[-1]
            if not must_run:  # only finish steps of groups whose nodes have all run
                may_be_recomputed = self._progress[group].num_recomputes > 0
                if queue or is_gather or may_be_recomputed or self._has_pending_nodes(group):
                    break
                self._finish(self.steps.pop().group)
                continue
            self.steps.pop()  # up to the gather of `up_to`, or to the end
            if not is_gather:
                queue.append(group)
                self._progress[group].awaits_inner_task = False  # autograd is past its checkpoints
                continue
            if not ends:
                self._ensure_progress(group)
            self._gather(group)
        if up_to is None or not up_to.settings.unshard_in_backward:
            return
        if up_to.state is not State.UNSHARDED:
            _gather_now(up_to)  # it was finished, and is needed again
            self._to_free.append(up_to)

    def _gather(self, group: ParamGroup) -> None:
        self._to_gather.discard(group)
        if not group.settings.unshard_in_backward:
            return
        group.unshard()
        for other in self._to_prefetch(group):
            other.unshard()
        group.wait()
        group.register_unsharded()  # checkpoints inside its module need the unsharded ones

    def _to_prefetch(self, group: ParamGroup) -> Iterable[ParamGroup]:
        """Return the groups to gather early: the user's choice, or the next ones of the plan."""
        chosen = group.settings.backward_prefetch
        if chosen:
            return [other for other in chosen if other in self._to_gather]
        planned: list[ParamGroup] = []
        depth = group.settings.prefetch_depth
        for other, is_gather in reversed(self.steps):
            if not depth:
                break
            if is_gather and other.settings.unshard_in_backward:
                planned.append(other)
                depth -= 1
        return planned

    def _has_pending_nodes(self, group: ParamGroup) -> bool:
        if self._progress[group].awaits_inner_task:
            return True
        finished, expected = group.finished_nodes, self._progress[group].expected_nodes
        # Whether fewer nodes have run than expected, in any graph task.
        return any(map(lt, map(finished.count, expected), expected.values()))

    def _finish(self, group: ParamGroup) -> None:
        """Free a group and reduce its gradients, as its settings say."""
        for op in group.program.post_backward:
            op()
        if self._creates_graph and group.program.has_unsharded_grads():
            raise _graph_error(group)
        if self.is_inner:
            self._tree.free(group, may_have_backward=False)
        elif not group.settings.reshard_after_backward:
            self.kept.append(group)
            # The weight half of a split backward, and calls that no backward has reached, still
            # need the unsharded parameters to be registered.
            if not group.awaits_weight_half and all(call.is_reached for call in group.live_calls()):
                group.register_sharded()
        elif group.settings.gathers_once_a_step:
            group.reshard(keeps_memory=True)
        elif self._progress[group].has_input_markers:
            group.reshard()
        else:
            self._to_free.append(group)
        if group.program.reductions and self.is_inner:
            self._tree.in_flight.finish_reductions_of(group)
            group.accumulate()
        elif group.program.reductions:
            self.launched.add(group)
            self._tree.in_flight.start(group)
        group.finished_nodes.clear()

    # The end --------------------------------------------------------------------------------

    def close(self, *, waits: bool) -> set[ParamGroup]:
        """Run the remaining steps, free groups and, with ``waits``, finish all reductions.

        This also finishes groups that still look incomplete: if autograd passes no gradient (an
        undefined tensor) to a parameter, the hook that counts accumulations does not run.

        Returns:
            The groups of the plan, and the other groups that this backward has reached.

        Raises:
            ShardError: If a gradient was accumulated after its group was reduced. Raised only on
                these ranks, after the last collective of the backward.
        """
        self._run_steps(ends=True)  # in the same order as ranks that ran these steps earlier
        for group in self._groups:
            if group in self._reached or self.is_inner:
                continue
            # A frozen group whose inputs need no gradient is not in the plan, but may be unsharded.
            if group.is_unsharded_registered and not group.is_kept_by_user:
                self.kept.append(group)
                group.register_sharded()
            # `deferred` reduces only gradients that earlier backwards accumulated without sync.
            if group.settings.reduce_grads and (group.unsynced or group.zeros_unused_grads):
                self.launched.add(group)
                self._tree.in_flight.start(group, deferred=True)
        if waits:
            self._tree.in_flight.finish()
        for group in self._to_free:
            if self.is_inner:
                self._tree.free(group, may_have_backward=False)
            else:
                group.reshard()
        # `_finish` has cleared `finished_nodes`: a node recorded since then has run too late.
        for group in self._reached:
            if group.finished_nodes and group.program.has_unsharded_grads():
                raise ShardError(
                    f"Expected all gradients of {group.label} before its reduction, got a later "
                    "gradient from a backward inside this one; run one backward after the other"
                )
        self._has_closed = True
        return self._reached


def _gather_now(group: ParamGroup) -> None:
    group.unshard()
    group.wait()
    group.register_unsharded()


# Uses of autograd that would lose gradients -------------------------------------------------------


def _graph_error(group: ParamGroup) -> ShardError:
    return ShardError(
        f"Expected a backward into the parameters of {group.label} without create_graph=True, got "
        "create_graph=True, and reduced gradients have no graph; for gradients of inputs, call "
        "torch.autograd.grad(loss, inputs, create_graph=True)"
    )


def _refuse_autograd_grad(group: ParamGroup) -> None:
    """Raise if ``torch.autograd.grad`` would return gradients that should be reduced.

    Unreduced gradients are allowed inside a forward, and after the user has called ``unshard()``.
    """
    reduces = group.settings.reduce_grads and group.mesh.num_ranks > 1
    if reduces and not group.tree.call_stack and not group.is_kept_by_user:
        raise ShardError(
            f"Expected loss.backward() for the parameters of {group.label}, got autograd.grad, "
            "which returns gradients of this rank only; for them, set_requires_gradient_sync(False)"
        )


def _is_input_half(group: ParamGroup) -> bool:
    """Return whether a pipeline schedule runs the input half of a split (zero-bubble) backward.

    A pipeline schedule runs all backwards without sync and without freeing. It may split a backward
    into two calls of ``torch.autograd.grad``: for the inputs, and later for the weights. During the
    first call, the schedule looks up the parameters for the second. So the unsharded parameters
    must be registered: the sharded ones are not in the graph.

    Raises:
        ShardError: On all ranks of the stage, if the sharded parameters are registered.
    """
    # A schedule that splits backwards has called set_is_last_backward(False), or finalizes by hand.
    tree = group.tree
    is_last = tree.is_last_backward and not tree.finalization.is_manual
    accumulators = group.program.accumulators
    if is_last or not accumulators or _torch.num_to_run(accumulators):
        return False  # not split, or frozen, or not a backward of inputs alone
    if group.is_unsharded_registered:
        return True
    markers = [node for call in group.live_calls() for node in call.markers]
    # If the module used the unsharded parameters, the graph has their accumulators. This backward
    # does not run them, so a weight half will.
    if _torch.is_reachable(accumulators, stop_at=markers):
        raise ShardError(
            f"Expected the unsharded parameters of {group.label} to be registered in a backward of "
            "inputs alone, got the sharded ones, which lose their gradients; if a pipeline "
            "schedule splits backward, call set_reshard_after_forward(False) on its stages"
        )
    return False
