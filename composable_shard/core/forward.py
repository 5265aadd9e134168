"""A forward pass: who runs now, who is gathered next, who is freed."""

from __future__ import annotations

from collections.abc import Container, Sequence
from types import FrameType
from weakref import WeakSet

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.calls import Call
from composable_shard.core.group import ParamGroup
from composable_shard.core.order import (
    Called,
    ExecutionOrder,
    OrderRecord,
    outermost_within,
    stays_for_backward,
)
from composable_shard.core.substituted import holds_shards
from composable_shard.core.tree_reductions import Reductions


class Graph:
    """Lives as long as a backward may start from what a forward has given.

    Attributes:
        is_reached: Whether a backward has gone through it to parameters.
    """

    __slots__ = ("__weakref__", "is_reached")

    def __init__(self) -> None:
        self.is_reached = False


class ForwardRun:
    """One forward: from the call of the outermost group that it enters until that has returned.

    Attributes:
        outermost: The group that was called first.
        frame: That of its call, which tells whether it has ended; ``None`` in a compiled one.
        order: In which order such forwards gather.
        graph: What it makes, if that may have a backward.
        depths: How many calls of each group are under way.
        to_run: The modules of a group that have not run, where it has several.
        spare: The groups that are unsharded for a need that has not come.
        called: The calls that no other call lies around: one, but of a group of several modules.
        under_way: The calls that have begun and not ended, the innermost last.
        frees_all: Whether nothing stays unsharded when it ends.
    """

    def __init__(
        self,
        outermost: ParamGroup,
        frame: FrameType | None,
        order: OrderRecord[ParamGroup],
        graph: Graph | None,
    ) -> None:
        self.outermost = outermost
        self.frame = frame
        self.order = order
        self.graph = graph
        self.depths: dict[ParamGroup, int] = {}
        self.to_run: dict[ParamGroup, set[nn.Module]] = {}
        self.spare: dict[ParamGroup, None] = {}
        self.called: list[Called[ParamGroup]] = []
        self.under_way: list[Called[ParamGroup]] = []
        self.frees_all = False

    @property
    def was_interrupted(self) -> bool:
        """Whether its call has ended, and no hook was told; not known of compiled calls."""
        return self.frame is not None and not _torch.is_executing(self.frame)


class waited_for:
    """Wait for ``group`` behind what is launched inside, which travels while this one is copied.

    Where a launch fails, the reason may be that this one had failed: then that is said.
    """

    __slots__ = ("_group",)

    def __init__(self, group: ParamGroup) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._group.wait_for_unshard()


class ForwardPass:
    """The forwards of one tree.

    Attributes:
        run: The one that was begun and not ended, if any.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        order: ExecutionOrder[ParamGroup],
        reductions: Reductions,
    ) -> None:
        self.run: ForwardRun | None = None
        self._groups = groups
        self._order = order
        self._reductions = reductions
        self._graphs: WeakSet[Graph] = WeakSet()
        self._left: tuple[ParamGroup, set[nn.Module]] | None = None  # to run after the last
        self._last: dict[tuple[bool, object], Called[ParamGroup]] = {}

    @property
    def waits_for_backward(self) -> bool:
        """Whether a backward may come of a forward that none has reached; may differ by rank."""
        return any(not graph.is_reached for graph in self._graphs)

    @property
    def has_several_graphs(self) -> bool:
        """Whether backwards may start from what several forwards have given; may differ by rank."""
        return len(self._graphs) > 1

    @property
    def is_running(self) -> bool:
        """Whether one is under way: not closed, and not ended by an interrupt."""
        run = self.run
        return run is not None and run.frame is not None and _torch.is_executing(run.frame)

    def begin(self, outermost: ParamGroup, module: nn.Module, call: Call) -> None:
        """Begin a forward with a call of ``module`` of ``outermost``.

        Where that has several modules, their calls one after the other are forwards of their own.
        """
        graph = None
        if torch.is_grad_enabled() or _is_in_checkpoint(call):
            graph = Graph()
            self._graphs.add(graph)
        self._order.begin()
        order = self._order.of_forward(outermost)
        self.run = ForwardRun(outermost, _torch.module_call_frame(), order, graph)
        if self._left is not None and self._left[0] is outermost and module in self._left[1]:
            self.run.to_run[outermost] = self._left[1]
        self._left = None

    def enter(self, group: ParamGroup, module: nn.Module) -> Called[ParamGroup]:
        """Gather ``group``, of which ``module`` is called; return what is noted of the call."""
        run = self.run
        assert run is not None
        called = Called(group, module)
        (run.under_way[-1].inner if run.under_way else run.called).append(called)
        run.under_way.append(called)
        run.depths[group] = run.depths.get(group, 0) + 1
        if len(group.modules) > 1:
            run.to_run.setdefault(group, set(group.modules))
        group.emit("pre_forward")
        self.gather(group)
        return called

    def gather(self, group: ParamGroup) -> None:
        """Gather ``group``, which forward or a backward within it needs, and whom comes next."""
        if not group.params:
            return
        run = self.run
        assert run is not None
        expected = run.order.advance(group, group.settings.prefetch_depth)
        group.unshard()
        run.spare.pop(group, None)
        with waited_for(group):
            for target in group.settings.forward_prefetch or expected:
                if target.is_sharded and holds_shards(target):
                    target.unshard()
                    run.spare[target] = None

    def leave(self, group: ParamGroup, module: nn.Module, *, has_backward: bool) -> bool:
        """Free ``group`` if all of it has run.

        Args:
            group: The group.
            module: That of its modules which has run.
            has_backward: Whether it gave anything that a backward may start from.

        Returns:
            Whether this ends the forward.
        """
        group.emit("post_forward")
        run = self.run
        if run is None:  # it could not begin, or was abandoned within a call
            return False
        if run.under_way:
            run.under_way.pop()
        left = run.to_run.get(group)
        if left is not None:
            left.discard(module)
        depth = run.depths.pop(group, 1) - 1
        if depth > 0:
            run.depths[group] = depth
            return False
        has_backward = has_backward or torch.is_grad_enabled()
        if left:
            if has_backward:
                group.note_forward()
        else:
            run.to_run.pop(group, None)
            self._free(run, group, has_backward=has_backward)
        return group is run.outermost

    def _free(self, run: ForwardRun, group: ParamGroup, *, has_backward: bool) -> None:
        """Free a group that has run, unless a backward or the next module needs it at once.

        Under a reentrant checkpoint it has a backward although it has run without grad.
        """
        if has_backward:
            group.note_forward()
        stays = group.stays_after_forward
        if stays and (has_backward or group.is_held):
            if group.is_unsharded:
                group.expose()
        elif not group.is_held and self._opens_backward(run, group):
            group.show_sharded()  # what is kept for backward is memory, not a form
        elif stays or run.order.upcoming is group:
            run.spare[group] = None
        else:
            reshard = group.settings.reshard_after_forward
            group.reshard(reshard if has_backward and reshard is not True else None)

    def _opens_backward(self, run: ForwardRun, group: ParamGroup) -> bool:
        """Tell whether backward needs ``group`` at once, in a tree whose root leaves the choice."""
        if self._groups[0].settings.reshard_after_forward is not None:
            return False
        is_recorded = stays_for_backward(group, run.order, self._order.of_backward)
        return is_recorded and torch.is_grad_enabled()

    def holds(self, group: ParamGroup) -> bool:
        """Tell whether a running forward is in ``group``."""
        return self.run is not None and group in self.run.depths

    def release(self, group: ParamGroup) -> None:
        """Free ``group``, whose backward within this forward has ended, unless it is needed."""
        run = self.run
        if run is None or group in run.depths or not group.settings.reshard_after_backward:
            return
        if run.order.upcoming is group:
            run.spare[group] = None
        else:
            group.reshard()

    def close(self) -> None:
        """End the forward: finish groups that ran in part, drop gathers that nobody used."""
        run = self.run
        assert run is not None
        run.outermost.check_order("end of a forward")
        if run.outermost in run.to_run:
            self._left = run.outermost, run.to_run.pop(run.outermost)
        for group in run.to_run:
            self._free(run, group, has_backward=torch.is_grad_enabled())
        for group in run.spare:
            group.reshard()
        if run.frees_all:
            for group in self._groups:
                group.reshard()
        run.order.finish()
        for called in run.called:
            key = run.graph is not None, called.module
            self._last.pop(key, None)
            self._last[key] = called  # the latest one last
        self.run = None

    def called_last(self, modules: Container[object]) -> list[Called[ParamGroup]]:
        """Return the calls of some modules, as far as known, in forwards like that under way.

        Args:
            modules: The modules; calls inside of the calls of one of them are left out.
        """
        run, has_graph = self.run, torch.is_grad_enabled()
        began = run.called[0].module if run is not None and run.called else None
        for is_alike in (has_graph, not has_graph):
            kept = [called for (has, _), called in self._last.items() if has is is_alike]
            ways = [
                [called for called in kept if called.module is began],  # called as now
                [called for called in kept if called.module in modules],  # each by itself
                *([called] for called in reversed(kept)),
            ]
            for way in ways:
                if found := outermost_within(way, modules):
                    return found
        return [] if run is None else outermost_within(run.called, modules)

    def num_called(self, module: nn.Module) -> int:
        """Return how often ``module`` was called in the forward under way, if there is one."""
        run = self.run
        return 0 if run is None else len(outermost_within(run.called, {module}))

    def show_sharded(self, outermost: ParamGroup) -> None:
        """Register the sharded parameters of what ``outermost`` ran, if no backward comes of it."""
        for group in self._order.of_forward(outermost).recorded:
            if not group.is_held:
                group.show_sharded()

    def abandon(self) -> None:
        """Forget a forward that did not end."""
        for group in self._groups:
            group.calls.clear()
        if self.run is not None:
            self.run.order.abandon()
        self.run = self._left = None


def _is_in_checkpoint(call: Call) -> bool:
    """Tell whether a call lies in a checkpoint that a backward may compute again, here or there."""
    if call.imitated is not None and call.imitated.notes:
        return True
    return bool(_torch.notes_of_checkpoints(with_graph_around=False))
