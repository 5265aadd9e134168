"""`Tree`: all groups of one root module. It begins and ends forwards and backwards.

A group is the parameters of one ``fully_shard`` call (`group.py`), with a program: compiled lists
of operations (`program.py`), to which features add theirs (`plugins.py`). The tape records the
calls of forwards; from this record comes the plan of a backward (`tape.py`, `backward.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from composable_shard import _torch
from composable_shard.core.agreement import agree_on_model, check_modules
from composable_shard.core.backward import Backward
from composable_shard.core.group import ParamGroup, ReductionQueue, State, group_of
from composable_shard.core.nested import InputContainer
from composable_shard.core.plugins import Feature, Op, Phase, feature_factories
from composable_shard.core.tape import NO_PLAN, Interval, Plan, Tape, Visit
from composable_shard.core.transport import host
from composable_shard.core.transport.pending import Waitable
from composable_shard.errors import ShardError

_current_task = _torch.current_backward
_version = attrgetter("_version")
_is_trained = attrgetter("is_trained")


class Call:
    """One call of a group's module. After its return, only the autograd graph refers to it.

    Attributes:
        module: The module.
        visit: The record of the call on the tape; ``None`` if the call cannot have a backward.
        is_recomputed: Whether an activation checkpoint recomputes the module in a backward.
        exception_on_entry: The exception that was being handled when the call began.
        is_substituted: Whether the module computes with tensors that were passed to
            ``torch.func.functional_call``.
        version_sum: The sum of the version counters of ``Program.freeable`` when the call began.
        markers: The autograd nodes of the call's input markers, which are identities; each input
            that needs a gradient passes through one (see `hooks.py`).
        containers: Pairs of a container among the inputs and the copy that forward gets instead.
        is_reached: Whether a backward has reached an output of the call.
    """

    def __init__(self, group: ParamGroup, module: nn.Module, *, is_recomputed: bool) -> None:
        self.group, self.module = group, module
        self.is_recomputed = is_recomputed
        self.exception_on_entry = sys.exc_info()[1]
        self.visit: Visit[ParamGroup] | None = None
        self.markers: list[Node] = []
        self.containers: list[InputContainer] = []
        self.is_substituted = self.is_reached = False
        self.version_sum = 0

    def on_output_gradient(self, _: Any) -> None:
        """Gather the group, because an output of this call has a gradient."""
        group, self.is_reached = self.group, True
        with _torch.apart_from_transforms():
            backward = group.tree.begin_backward()
            backward.gather_for_backward(group, has_input_markers=bool(self.markers))


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
        self._remedy: str | None = None  # how to finish the unfinished backwards, if there are any

    @property
    def has_unfinished_backwards(self) -> bool:
        """Whether there are backwards with unfinished reductions."""
        return self._remedy is not None

    def record_backward(self) -> bool:
        """Record the end of a backward; return whether this end finishes the reductions."""
        self._remedy = "call finalize_backward()" if self.is_manual else None
        if not (self.is_manual or self._tree.is_last_backward):
            self._remedy = "call set_is_last_backward(True) and run one more backward"
        return self._remedy is None

    def set_manual(self, enabled: bool) -> None:
        """Set whether ``finalize_backward`` or the end of each backward finishes reductions.

        Raises:
            ShardError: If a backward that began under the other setting is not finished.
        """
        if enabled != self.is_manual and self._remedy is not None:
            raise ShardError(
                "Expected set_manual_backward_finalization() between iterations, got a call while "
                f"a backward is unfinished; {self._remedy}, or drop it by reset_iter_state()"
            )
        self.is_manual = enabled

    def start(self, handle: object) -> None:
        """Launch the reductions that backwards have left, and free groups, as the settings say.

        Collective: the reductions.
        """
        self._tree.launch_reductions()
        self._remedy, self.handle = "call wait() on the handle", handle

    def check_waited(self) -> None:
        """Raise if ``wait()`` of the last handle has not been called."""
        if self.handle is not None:
            raise ShardError(
                "Expected wait() on the last GradientReductionHandle before another forward or "
                "finalize_backward(), got no call; call it"
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


class Tree:
    """The groups that train together.

    Attributes:
        groups: The groups of the tree, with the group of the root module first.
        features: The features, in the order of their installation.
        generation: A counter that grows with each change of features or settings. A program that
            was compiled at another value is out of date.
        tape: The record of forwards since the last backward.
        call_stack: The calls in progress, the innermost last.
        in_flight: The queue of the reductions in flight; several trees may share one queue.
        is_last_backward: Whether the end of a backward waits for its reductions.
        is_agreed: Whether the ranks have compared their models, and found them equal.
        post_optim_event: The event of ``set_post_optim_event``, for which the next gather waits.
        finalization: The state of ``finalize_backward``.
        plan: The plan of the latest backward.
        has_inner_backward: Whether a backward has run inside the current forward.
    """

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self.groups = list(groups)
        self.root = groups[0]
        old_features = dict.fromkeys(
            chain.from_iterable(group.tree.features for group in groups if group.tree)
        )
        taken_over = (feature for feature in old_features if not feature.is_dropped_on_join)
        self.features = *taken_over, *chain.from_iterable(make() for make in feature_factories)
        self.generation = 0
        self.tape: Tape[ParamGroup] = Tape()
        self.call_stack: list[Call] = []
        self.in_flight = ReductionQueue()
        self.is_last_backward, self.is_agreed = True, False
        self.post_optim_event: Waitable | None = None
        self.finalization = Finalization(self)
        self._outer_frame: FrameType | None = None  # of the outermost call
        self._grad_enabled = False  # the grad mode when the outermost call began
        self._backward: Backward | None = None
        self.has_inner_backward = False
        self._to_free: dict[ParamGroup, None] = {}  # at the end of forward, unless used again
        self.plan: Plan[ParamGroup] = NO_PLAN
        for group in groups:
            group.reshard()
            group.tree, group.is_compiled = self, False

    def install(self, feature: Feature) -> None:
        """Add a feature, at any time."""
        self._set_features(dict.fromkeys([*self.features, feature]))

    def remove(self, feature: Feature) -> None:
        """Remove a feature, at any time."""
        self._set_features(other for other in self.features if other is not feature)

    def _set_features(self, features: Iterable[Feature]) -> None:
        """Set the features, and recompile the programs.

        A group with a gather in flight, or with a part kept by `Regather`, recompiles at its next
        use.
        """
        self.features = tuple(features)
        self.invalidate_programs()
        for group in self.groups:
            if group.is_compiled and group.state in (State.SHARDED, State.UNSHARDED):
                group.compile()

    def invalidate_programs(self) -> None:
        """Make every program out of date, so that its next use recompiles it."""
        self.generation += 1

    def ops(self, group: ParamGroup, phase: Phase) -> tuple[Op, ...]:
        """Return the operations of all features for one phase of one group."""
        return tuple(op for feature in self.features for op in feature.ops(group, phase))

    # Forward --------------------------------------------------------------------------------

    def enter(self, group: ParamGroup, module: nn.Module) -> Call:
        """Begin a call: gather ``group`` and prefetch the next group."""
        is_recomputed = _current_task() != -1 and self._is_in_backward(group)
        if not is_recomputed and (not self.call_stack or self._begins_forward(group)):
            self._begin_forward(group)
        # Begin the backward first: a backward that begins inside a call is an inner backward.
        backward = self.begin_backward() if is_recomputed else None
        call = Call(group, module, is_recomputed=is_recomputed)
        self.call_stack.append(call)
        if not group.params:
            if not is_recomputed:
                self._run_without_program(group, "pre_forward")
            return call
        if backward is not None:
            backward.gather_for_recompute(group)
        else:
            gather = self._gather
            if _torch.num_modes() or _torch.current_transform() is not None:
                # Parameters outlive modes and transforms, so they belong to neither.
                gather = _torch.outside_transforms()(gather)
            call.is_substituted = not gather(group)
            if call.is_substituted:
                return call
            if len(group.modules) > 1:
                group.record_run(module)
            freeable = group.program.freeable
            call.version_sum = group.unsharded_version * len(freeable)
            if group.is_kept_by_user:  # versions differ if users have written to parameters
                call.version_sum = sum(map(_version, freeable))
            checkpoints = _torch.dicts_of_checkpoints(grad_enabled_around=self._grad_enabled)
            if checkpoints or torch.is_grad_enabled():
                interval = self._interval_of(checkpoints) if checkpoints else None
                call.visit = self.tape.enter(group, interval)
        group.register_unsharded()
        return call

    def _run_without_program(self, group: ParamGroup, phase: Phase) -> None:
        """Run the operations of features for a group without parameters, which has no program."""
        if self.features and not group.params:
            for op in self.ops(group, phase):
                op()

    def _is_in_backward(self, group: ParamGroup) -> bool:
        """Return whether the running backward needs a group.

        The tape has no groups without parameters; such a group is needed if any other group is.
        """
        if not group.params:
            return bool(self.tape.visits or self.plan.groups)
        return group in self.tape or group in self.plan.groups

    def leave(self, call: Call, *, needs_grad: bool, has_failed: bool) -> None:
        """End the innermost call; free its group, unless the group is needed soon.

        See :meth:`free`. If a backward may follow, and ``reshard_after_forward`` is ``False`` (or
        ``None``, for the root), the unsharded parameters stay registered.
        """
        self.call_stack.pop()
        group = call.group
        if call.is_recomputed:
            return
        if group.params and group.is_compiled:
            for op in group.program.post_forward:
                op()
        else:
            self._run_without_program(group, "post_forward")
        if call.visit is not None and not has_failed:
            needs_reduce = bool(group.program.reductions)
            self.tape.leave(call.visit, needs_reduce=needs_reduce, needs_grad=needs_grad)
        interval = None if call.visit is None else call.visit.interval
        # The fields of a `CallRecord`.
        record = len(self.call_stack), group, call.module, interval
        self.tape.calls.append((*record, torch.is_grad_enabled(), needs_grad))
        self.free(group, may_have_backward=call.visit is not None and not has_failed)
        if not self.call_stack:
            self._end_forward(group, needs_grad=needs_grad, has_failed=has_failed)

    def _begins_forward(self, group: ParamGroup) -> bool:
        """Return whether this call begins a forward because an interrupt has ended the last one.

        An interrupt is an exception, such as ``KeyboardInterrupt``, that skips the forward hooks.
        """
        may_begin = group is self.call_stack[0].group or group is self.root
        # A call of any other group is an inner call. After an interrupt, the frame of the outermost
        # call has ended. If this frame still executes, a module has called itself. If the outermost
        # call did not go through ``Module.__call__``, its frame is unknown: assume an interrupt.
        return may_begin and not (self._outer_frame and _torch.is_executing(self._outer_frame))

    def _begin_forward(self, outermost: ParamGroup) -> None:
        if self.call_stack or self.has_failed:
            self.reset()
        self.has_inner_backward = False
        # Gathered values may be stale: a write through ``.data`` bumps no version.
        for group in self.groups:
            if group.state in (State.UNSHARDED, State.PARTLY_SHARDED) and not self._is_kept(group):
                group.reshard()
        self.finalization.check_waited()
        self.prepare_gather()
        self._outer_frame, self._grad_enabled = _torch.module_call_frame(), torch.is_grad_enabled()
        self.tape.begin_forward(outermost)

    def _is_kept(self, group: ParamGroup) -> bool:
        """Return whether a gathered group stays gathered when a forward begins.

        It stays if its settings or the user keep it between iterations, if some of its modules have
        yet to run, or if this iteration accumulates gradients and backward does not free it.
        """
        settings = group.settings
        is_kept = settings.reshard_after_forward is False or settings.gathers_once_a_step
        if is_kept or group.is_kept_by_user or group.modules_run:
            return True
        return not settings.reshard_after_backward and self.is_accumulating

    @property
    def is_accumulating(self) -> bool:
        """Whether the next backward probably adds to the gradients of the last one."""
        is_unfinished = not (self.is_last_backward or self.finalization.is_manual)
        is_unfinished = is_unfinished or self.finalization.has_unfinished_backwards
        return is_unfinished or any(group.unsynced for group in self.groups)

    def prepare_gather(self) -> None:
        """Compare the model between ranks before the first gather; wait for the optimizer event.

        Collective: at the first gather, see `agree_on_model`.
        """
        self.agree()
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            event.wait()

    def agree(self) -> None:
        """Check once that all ranks hold the same model.

        Collective: the first time, see `agree_on_model`.
        """
        if not self.is_agreed:
            check_modules(self.groups)
            agree_on_model(self.groups)
            self.is_agreed = True

    def _end_forward(self, outermost: ParamGroup, *, needs_grad: bool, has_failed: bool) -> None:
        self._outer_frame = None
        if has_failed:
            self.tape.discard_forward()
            self.reset()
            return
        if not self.tape.visits:  # otherwise the end of the backward waits
            self._wait_for_copies()
        for feature in self.features:
            feature.end_forward(self, outermost)
        self.tape.end_forward(outermost)
        for group in self.groups:
            # Whether only some modules of the group have run, and the others will not run before
            # the next use. The next forward may run those of the outermost group.
            will_not_complete = bool(group.modules_run) and group is not outermost
            if group.state is State.UNSHARDING:  # prefetched, but not used after all
                group.reshard()
            elif will_not_complete and group.stays_after_forward and group in self.tape:
                group.take_snapshot()
            elif will_not_complete:
                group.reshard()
        for group in self._to_free:
            group.reshard()
        self._to_free.clear()
        if self.has_inner_backward and not needs_grad:
            # This forward has no backward, so reduce the gradients of inner backwards here.
            for group in dict.fromkeys(group for _, group, *_ in reversed(self.tape.calls)):
                group.reshard()
                if group.params and group.program.reductions:
                    self.in_flight.start(group)
            self.in_flight.finish()
            self.tape.clear()

    def _gather(self, group: ParamGroup) -> bool:
        """Gather ``group`` for forward; launch the next gather before waiting for this one.

        Returns:
            Whether the group computes with its own parameters; see ``ParamGroup.refresh``.
        """
        if not group.refresh():
            return False
        for op in group.program.pre_forward:
            op()
        if group.state in (State.SHARDED, State.PARTLY_SHARDED):
            group.unshard()
        self._to_free.pop(group, None)
        predicted = self.tape.advance(group, group.settings.prefetch_depth)
        for other in group.settings.forward_prefetch or predicted:
            other.prefetch()
        group.wait()
        return True

    def free(self, group: ParamGroup, *, may_have_backward: bool) -> None:
        """Free a group after a call, unless something needs it soon.

        The first case that holds decides:

        - A call of the group is in progress, or some of its modules have yet to run: nothing is
          done.
        - ``stays_after_forward`` is true, and a backward may follow or the user has called
          ``unshard()``: the unsharded parameters stay registered, and the user may change them.
        - In four cases, the memory stays and the sharded parameters are registered:
          ``gathers_once_a_step`` is true and a backward may follow; this forward probably needs the
          group next; ``stays_after_forward`` is true, and this forward may call the group again
          (not the root); or a backward may follow that begins with the group, and the user has not
          called ``unshard()``.
        - Otherwise the group is freed. With ``reshard_after_forward=k``, it keeps a part if a
          backward may follow.
        """
        for call in self.call_stack:
            if call.group is group:  # its module has called itself
                return
        stays = group.stays_after_forward
        # A frozen group has a backward only if another group is trained.
        if stays and not group.is_trained and not group.is_kept_by_user:
            may_have_backward = may_have_backward and any(map(_is_trained, self.groups))
        if group.modules_run:  # its other modules have yet to run
            return
        if stays and (may_have_backward or group.is_kept_by_user):
            if group.is_unsharded_registered:
                group.take_snapshot()
            return
        keeps_memory = group.settings.gathers_once_a_step and may_have_backward
        # Until the end of this forward, keep a group that the forward probably needs next, or may
        # call again. A forward never calls the root again: the return of the root ends it.
        if not keeps_memory and (self.tape.upcoming is group or (stays and group is not self.root)):
            keeps_memory = True
            self._to_free[group] = None
        if may_have_backward and not group.is_kept_by_user:
            keeps_memory = keeps_memory or self.tape.is_turning_point(group)
        if not keeps_memory:
            group.reshard(keeps_part=may_have_backward)
        elif group.is_unsharded_registered:
            group.register_sharded()

    def _interval_of(self, checkpoints: Sequence[dict[Any, Any]]) -> Interval:
        """Return the `Interval` that these nested checkpoints share on the tape.

        Args:
            checkpoints: The dicts of ``_torch.dicts_of_checkpoints``, which store the interval
                under this tree.
        """
        known = next((notes[self] for notes in checkpoints if self in notes), None)
        interval = known or self.tape.enter_checkpoint()
        for notes in checkpoints:
            notes.setdefault(self, interval)
        return interval

    # Backward -------------------------------------------------------------------------------

    def begin_backward(self) -> Backward:
        """Return the running backward, or begin one."""
        backward = self._backward
        if backward is not None and backward.is_running:
            return backward
        if not self.call_stack:
            if backward is not None:  # an earlier backward, which has failed
                self.reset()
            # Make a plan after new forwards. Another backward of the same forwards uses it again.
            if self.tape.visits:
                self.plan = self.tape.plan_backward()
            self._run_without_program(self.root, "pre_backward")
        self._backward = Backward(self)
        return self._backward

    def end_backward(self, backward: Backward) -> None:
        """End a backward, when autograd has finished."""
        waits = not backward.is_inner and self.finalization.record_backward()
        with _torch.apart_from_transforms():
            reached = backward.close(waits=waits)
        if backward.is_inner:
            in_progress = [call.visit for call in self.call_stack]
            self.tape.forget(reached, in_progress)
            self._backward, self.has_inner_backward = None, True
            return
        self._run_without_program(self.root, "post_backward")
        self._wait_for_copies()
        self._backward = None
        self.tape.clear()
        if backward.kept and not self.is_accumulating:
            for group in backward.kept:
                group.reshard()
        for feature in self.features:
            feature.end_backward(self)

    def _wait_for_copies(self) -> None:
        """Wait for copies between host and device: users may write the shards from now on."""
        # Only uploads (copies to the device) read shards. There is nothing to wait for without
        # uploads, or if the host has already waited for all copies.
        if not host.uploads or not host.is_busy():
            return
        before = self.ops(self.root, "before_wait_for_copies")
        for op in (*before, host.synchronize, *self.ops(self.root, "copies_done")):
            op()

    def synchronize_gradients(self) -> None:
        """Reduce gradients that were accumulated without sync. Collective: the reductions."""
        self.in_flight.finish()
        for group in self.groups:
            if group.unsynced:
                self.in_flight.start(group, deferred=True, all_reduces=True)
        self.in_flight.finish()

    def launch_reductions(self) -> None:
        """Launch the reductions of unsynced gradients, and free groups, as the settings say.

        Collective: the reductions.
        """
        for group in self.groups:
            if group.settings.reduce_grads and group.unsynced:
                self.in_flight.start(group, deferred=True)
            if group.settings.reshard_after_backward and not group.settings.gathers_once_a_step:
                group.reshard()

    def clean_up_if_failed(self) -> None:
        """Return to the state between two steps if a forward or backward has failed."""
        if self.has_failed or (self.call_stack and _current_task() == -1):
            self.reset()

    @property
    def has_failed(self) -> bool:
        """Whether a backward has begun, has not ended, and no longer runs."""
        backward = self._backward
        return backward is not None and not backward.is_inner and not backward.is_running

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction is in flight, or a backward is not finalized."""
        return bool(self.in_flight) or self.finalization.has_unfinished_backwards

    @property
    def is_computing(self) -> bool:
        """Whether a forward of the tree is running, or any backward, even of another model."""
        return bool(self.call_stack) or _current_task() != -1

    def reset(self, *, drops_earlier: bool = False) -> None:
        """Return to the state between two steps, after a forward or a backward has failed.

        Gradients already in ``.grad`` of the sharded parameters stay. Reductions that earlier
        backwards have launched are finished, unless ``drops_earlier``. Other gradients are dropped.
        """
        launched = self._backward.launched if self._backward is not None else set()
        finishes_earlier = self.in_flight and not drops_earlier
        for group in self.groups:
            if finishes_earlier and group not in launched:
                with suppress(ShardError, RuntimeError):  # raised again by the next collective
                    self.in_flight.finish_reductions_of(group)
        if self._backward is not None:
            self._backward = None
            self.tape.clear()
        self.call_stack.clear()
        self._to_free.clear()
        self.finalization.reset()
        for group in self.groups:
            self.in_flight.discard(group)
            group.reset()


def check_at_rest(group: ParamGroup, op: str) -> None:
    """Raise ``ShardError`` if ``op`` is called in a forward, a backward or ``unsharded()``."""
    if group.tree.is_computing:
        raise ShardError(
            f"Expected {op}() for {group.label} outside of forward and backward, got a call "
            "inside of one; use it between iterations"
        )
    if group.is_in_unsharded_context:
        raise ShardError(
            f"Expected {op}() outside of unsharded(), got a call inside of unsharded() of "
            f"{group.label}; leave that context first"
        )


def join_tree(root: ParamGroup) -> Tree:
    """Put the group of an outer module and all groups below it into one tree, and name them."""
    groups: dict[ParamGroup, list[str]] = {root: []}
    for index, top in enumerate(root.modules):
        prefix = f"{index}." if len(root.modules) > 1 else ""
        for name, module in top.named_modules():
            group = group_of(module)
            if group is not None and group is not root:
                groups.setdefault(group, []).append(f"{prefix}{name}")
    inner = list(dict.fromkeys(group.tree for group in groups if group is not root))
    tree = Tree(list(groups))
    if inner:
        tree.in_flight = inner[0].in_flight  # other trees may share this queue
        tree.is_last_backward = all(old.is_last_backward for old in inner)
        tree.finalization.is_manual = any(old.finalization.is_manual for old in inner)
    for group, names in groups.items():
        group.name = ", ".join(names)
    return tree
