"""A forward pass: who runs now, who is gathered next, who is freed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.group import ParamGroup, Sharded
from composable_shard.core.schedule import OrderRecord, stays_for_backward

if TYPE_CHECKING:
    from composable_shard.core.context import Context


class ForwardPass:
    """The forward that is running in one tree, if any.

    The outermost group that is called opens the pass and closes it. Each outermost group has a
    record of its own, since calling an encoder alone is another pass than calling the model.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._outermost: ParamGroup | None = None
        self._frame: FrameType | None = None
        self._orders: dict[ParamGroup, OrderRecord[ParamGroup]] = {}
        self._depths: dict[ParamGroup, int] = {}
        self._to_run: dict[ParamGroup, set[nn.Module]] = {}
        self._prefetched: set[ParamGroup] = set()

    @property
    def is_running(self) -> bool:
        """Whether a forward of the tree is on this thread's stack."""
        return self._frame is not None and _is_running(self._frame)

    def enter(self, group: ParamGroup) -> bool:
        """Gather ``group`` for a forward; return whether that opens the pass."""
        context = self._context
        interrupted = self._frame is not None and not _is_running(self._frame)
        if interrupted or context.backward.was_aborted:
            context.clean_up()
        opens = self._outermost is None
        if opens:
            self._outermost, self._frame = group, _torch.module_call_frame()
        self._depths[group] = self._depths.get(group, 0) + 1
        if len(group.modules) > 1:
            self._to_run.setdefault(group, set(group.modules))
        context.emit("pre_forward", group)
        self._gather(group)
        return opens

    def _gather(self, group: ParamGroup) -> None:
        if not group.params:
            return
        assert self._outermost is not None
        order = self._orders.setdefault(self._outermost, OrderRecord())
        expected = order.advance(group)
        group.unshard()
        group.wait_for_unshard()
        self._prefetched.discard(group)
        explicit = group.settings.forward_prefetch
        for target in explicit or ([expected] if expected is not None else []):
            if isinstance(target.state, Sharded) and target.params:
                target.unshard()
                self._prefetched.add(target)

    def leave(self, group: ParamGroup, module: nn.Module, *, failed: bool = False) -> None:
        """Free ``group`` if all of it has run; close the pass if it opened it."""
        context = self._context
        context.emit("post_forward", group)
        depth = self._depths.pop(group, 1) - 1
        if depth > 0:
            self._depths[group] = depth
        else:
            if self._has_run(group, module):
                self._free(group)
        if group is self._outermost and group not in self._depths:
            if failed:
                self.abandon()
                context.backward.forget_forwards()
                for left in context.groups:
                    left.reshard()
            else:
                self._close()

    def _has_run(self, group: ParamGroup, module: nn.Module) -> bool:
        left = self._to_run.get(group)
        if left is None:
            return True
        left.discard(module)
        if left:
            return False
        del self._to_run[group]
        return True

    def _free(self, group: ParamGroup) -> None:
        if torch.is_grad_enabled():
            group.freshness.note_forward()
        reshard = group.settings.reshard_after_forward
        if reshard is None:
            reshard = group is not self._context.root
        if not reshard or self._opens_backward(group):
            return
        group.reshard()

    def _opens_backward(self, group: ParamGroup) -> bool:
        if not torch.is_grad_enabled() or self._outermost is None:
            return False
        order = self._orders.get(self._outermost)
        return order is not None and stays_for_backward(group, order, self._context.backward.order)

    def _close(self) -> None:
        """End the pass: finish groups that ran in part, drop gathers that nobody used."""
        assert self._outermost is not None
        for group in list(self._to_run):
            if group is not self._outermost:
                del self._to_run[group]
                self._free(group)
        for group in self._prefetched:
            group.reshard()
        self._prefetched.clear()
        if self._outermost in self._orders:
            self._orders[self._outermost].finish()
        self._outermost = self._frame = None

    def abandon(self) -> None:
        """Forget a pass that did not end."""
        for group in self._context.groups:
            group.calls.clear()
        for order in self._orders.values():
            order.abandon()
        self._outermost = self._frame = None
        self._depths.clear()
        self._to_run.clear()
        self._prefetched.clear()


def _is_running(frame: FrameType | None) -> bool:
    """Tell whether ``frame`` is on this thread's stack.

    An exception in a forward is seen by the hooks that are always called; an interrupt is not, and
    leaves a pass open that nobody will close.
    """
    current: FrameType | None = sys._getframe()
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False
