"""A forward pass: who runs now, who is gathered next, who is freed."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.order import OrderRecord, stays_for_backward
from composable_shard.core.substituted import holds_shards

if TYPE_CHECKING:
    from composable_shard.core.root import Context


class Graph:
    """Lives as long as a backward may start from what a forward has given.

    Attributes:
        is_reached: Whether a backward has gone through it to parameters.
    """

    __slots__ = ("__weakref__", "is_reached")

    def __init__(self) -> None:
        self.is_reached = False


class ForwardPass:
    """The forward that is running in one tree, if any.

    The outermost group that is called opens the pass and closes it. Each outermost group has a
    record of its own, since calling an encoder alone is another pass than calling the model.

    Attributes:
        frees_all: Whether nothing stays unsharded when the running pass closes.
        graph: What the running pass makes, if that may have a backward.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._outermost: ParamGroup | None = None
        self._frame: FrameType | None = None
        self._orders: dict[ParamGroup, OrderRecord[ParamGroup]] = {}
        self._depths: dict[ParamGroup, int] = {}
        self._to_run: dict[ParamGroup, set[nn.Module]] = {}
        self._prefetched: dict[ParamGroup, None] = {}
        self._kept: dict[ParamGroup, None] = {}
        self.frees_all = False
        self._first: nn.Module | None = None
        self.graph: Graph | None = None
        self._graphs: WeakSet[Graph] = WeakSet()

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
        """Whether a forward is under way: not closed, and not ended by an interrupt."""
        return self._frame is not None and _torch.is_executing(self._frame)

    def recorded(self, outermost: ParamGroup) -> tuple[ParamGroup, ...]:
        """Return the order in which the last pass that ``outermost`` opened gathered groups."""
        order = self._orders.get(outermost)
        return () if order is None else order.recorded

    def enter(self, group: ParamGroup, module: nn.Module) -> bool:
        """Gather ``group``, as ``module`` of it is called; return whether that opens the pass."""
        context = self._context
        interrupted = self._frame is not None and not _torch.is_executing(self._frame)
        if interrupted or context.backward.was_aborted:
            context.clean_up()
        opens = self._outermost is None
        if opens:
            context.check_owners()
            context.backward.check_finalized()
            context.free_earlier(is_anew=self._begins_anew(group, module))
            self._outermost, self._frame = group, _torch.module_call_frame()
            if torch.is_grad_enabled() or _torch.notes_of_checkpoints(with_graph_around=False):
                self.graph = Graph()
                self._graphs.add(self.graph)
        self._depths[group] = self._depths.get(group, 0) + 1
        if len(group.modules) > 1:
            self._to_run.setdefault(group, set(group.modules))
        context.emit("pre_forward", group)
        self.gather(group)
        return opens

    def _begins_anew(self, group: ParamGroup, module: nn.Module) -> bool:
        """Tell whether a call begins another forward of the tree, and does not go on with the last.

        Modules of a tree may be called one by one, and a head several times. What is called first
        begins anew: the root, or that one of its modules which was the first to be called.
        """
        if group is not self._context.root:
            return False
        if self._first is None or len(group.modules) == 1:
            self._first = module
        return self._first is module

    def gather(self, group: ParamGroup) -> None:
        """Gather ``group``, which forward or a backward within it needs, and whom comes next."""
        if not group.params:
            return
        assert self._outermost is not None
        order = self._orders.setdefault(self._outermost, OrderRecord())
        expected = order.advance(group)
        group.unshard()
        group.wait_for_unshard()
        self._prefetched.pop(group, None)
        self._kept.pop(group, None)
        explicit = group.settings.forward_prefetch
        for target in explicit or ([expected] if expected is not None else []):
            if target.is_sharded and holds_shards(target):
                target.unshard()
                self._prefetched[target] = None

    def leave(
        self, group: ParamGroup, module: nn.Module, *, failed: bool, has_backward: bool
    ) -> None:
        """Free ``group`` if all of it has run; close the pass if it opened it.

        Args:
            group: The group.
            module: That of its modules which has run.
            failed: Whether it raised.
            has_backward: Whether it gave anything that a backward may start from.
        """
        context = self._context
        context.emit("post_forward", group)
        depth = self._depths.pop(group, 1) - 1
        if depth > 0:
            self._depths[group] = depth
        else:
            if self._has_run(group, module):
                self._free(group, has_backward=has_backward or torch.is_grad_enabled())
        if group is self._outermost and group not in self._depths:
            if failed and context.backward.ran_inside:
                context.clean_up()
            elif failed:
                self.abandon()
                context.backward.forget_forwards()
                for left in context.groups:
                    left.reshard()
                context.wait_until_read()
            else:
                self._close()
                if not has_backward:
                    context.backward.finish_inside()
                    self._show_sharded(group)

    def _has_run(self, group: ParamGroup, module: nn.Module) -> bool:
        left = self._to_run.get(group)
        if left is None:
            return True
        left.discard(module)
        if left:
            return False
        del self._to_run[group]
        return True

    def _free(self, group: ParamGroup, *, has_backward: bool) -> None:
        """Free a group that has run, unless a backward or the next module needs it at once.

        Under a reentrant checkpoint it has a backward although it has run without grad.
        """
        if has_backward:
            group.note_forward()
        reshard = group.settings.reshard_after_forward
        if reshard is None:  # the root's parameters are needed at once, if there is a backward
            reshard = group is not self._context.root
        stays = not reshard and (has_backward or group.is_held)
        if stays or self._opens_backward(group):
            group.is_exposed = True
            return
        if not reshard or self._is_needed_next(group):
            self._kept[group] = None
            return
        group.reshard(reshard if has_backward and reshard is not True else None)

    def holds(self, group: ParamGroup) -> bool:
        """Tell whether a running forward is in ``group``."""
        return group in self._depths

    def release(self, group: ParamGroup) -> None:
        """Free ``group``, whose backward within this forward has ended, unless it is needed."""
        if group in self._depths or not group.settings.reshard_after_backward:
            return
        if self._is_needed_next(group):
            self._kept[group] = None
        else:
            group.reshard()

    def _is_needed_next(self, group: ParamGroup) -> bool:
        order = None if self._outermost is None else self._orders.get(self._outermost)
        return order is not None and order.upcoming is group

    def _opens_backward(self, group: ParamGroup) -> bool:
        if not torch.is_grad_enabled() or self._outermost is None:
            return False
        order = self._orders.get(self._outermost)
        return order is not None and stays_for_backward(group, order, self._context.backward.record)

    def _close(self) -> None:
        """End the pass: finish groups that ran in part, drop gathers that nobody used."""
        assert self._outermost is not None
        self._context.check_order("end of a forward", self._outermost)
        for group in list(self._to_run):
            if group is not self._outermost:
                del self._to_run[group]
                self._free(group, has_backward=torch.is_grad_enabled())
        for group in [*self._prefetched, *self._kept]:
            group.reshard()
        self._prefetched.clear()
        self._kept.clear()
        if self.frees_all:
            for group in self._context.groups:
                group.reshard()
            self.frees_all = False
        if self._outermost in self._orders:
            self._orders[self._outermost].finish()
        self._context.wait_until_read()
        self._outermost = self._frame = self.graph = None

    def _show_sharded(self, outermost: ParamGroup) -> None:
        """Register the sharded parameters of what has run, as no backward will come of it."""
        for group in self.recorded(outermost):
            if not group.is_held:
                group.show_sharded()

    def abandon(self) -> None:
        """Forget a pass that did not end."""
        for group in self._context.groups:
            group.calls.clear()
        for order in self._orders.values():
            order.abandon()
        self._outermost = self._frame = self.graph = None
        self.frees_all = False
        self._depths.clear()
        self._to_run.clear()
        self._prefetched.clear()
        self._kept.clear()
