"""What the groups of one module tree share: the running passes, the trace, the names.

Ranks that call different collectives, or the same ones in different order, wait for each other
until the process group's time-out, and nothing says which group it was. With
``COMPOSABLE_SHARD_CHECK=1`` in the environment of all ranks, they exchange a number before every
collective and at the end of every forward and backward: ranks that disagree raise the same error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import _torch
from composable_shard.core.agreement import agree_on_model
from composable_shard.core.backward import BackwardPass
from composable_shard.core.forward import ForwardPass
from composable_shard.core.group import ParamGroup, PartlySharded, Sharded, Unsharded
from composable_shard.core.not_sharded import refuse_replicated, warn_of_plain
from composable_shard.core.optimizers import watch_optimizer_steps
from composable_shard.core.ties import refuse_unowned
from composable_shard.core.transport import host, same_host
from composable_shard.core.transport.pending import Waitable
from composable_shard.core.transport.process_groups import compare
from composable_shard.errors import RankMismatchError, ShardError

# Comparing with the other ranks what comes next, for the one who hunts a hang ---------------------

VARIABLE = "COMPOSABLE_SHARD_CHECK"


def is_asked_for() -> bool:
    """Tell whether the environment asks for the check."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


class OrderCheck:
    """Compares what the ranks of a tree are about to do."""

    def __init__(self) -> None:
        self._count = 0

    def agree(self, group: ParamGroup, op: str) -> None:
        """Raise on all ranks if some of them do not come to ``op`` of ``group`` now.

        Raises:
            RankMismatchError: On all ranks, with what each of two does; on those that wait, if
                another does not come within the time-out.

        Collective: one all-reduce of 16 bytes for each process group of more than one rank; more
            only if it raises.
        """
        self._count += 1
        what = f"{op} of {group.label}"
        for mesh in group.channels:
            for ranks in mesh.process_groups:
                self._compare(what, ranks, mesh.device)

    def _compare(self, what: str, ranks: dist.ProcessGroup, device: torch.device) -> None:
        try:
            is_same, _ = compare(what, ranks, device)
        except RuntimeError as error:
            raise RankMismatchError(
                f"Expected all ranks to come to the {what}, step {self._count}, got none of "
                "some rank within the time-out; it has ended, or waits elsewhere"
            ) from error
        if not is_same:
            self._raise_difference(what, ranks)

    def _raise_difference(self, what: str, ranks: dist.ProcessGroup) -> None:
        heard: list[Any] = [None] * ranks.size()
        dist.all_gather_object(heard, what, group=ranks)
        first = heard[0]
        rank = next(rank for rank, theirs in enumerate(heard) if theirs != first)
        raise RankMismatchError(
            f"Expected the same order of collectives on all ranks, got at step {self._count} on "
            f"rank 0: {first}; on rank {rank}: {heard[rank]}"
        )


# What the groups of one module tree share: the running passes, the trace, the names ---------------

Listener = Callable[[str, str], None]


class Context:
    """Shared by all groups below one root.

    Attributes:
        groups: All groups, the root first, in the order of ``named_modules``.
        root: The group of the outermost sharded module.
        forward: The running forward pass.
        backward: The running backward pass.
        listener: Called with ``(event, group name)`` and ``(moment, group name)``, if set.
        post_optim_event: What the next gather waits for besides the compute stream.
        opened: Groups whose modules hold full parameters, inside of ``unsharded()``.
    """

    def __init__(self, root: ParamGroup, groups: Sequence[ParamGroup]) -> None:
        self.root = root
        self.groups = list(groups)
        self.forward = ForwardPass(self)
        self.backward = BackwardPass(self)
        self.listener: Listener | None = None
        self.post_optim_event: Waitable | None = None
        self.opened: set[ParamGroup] = set()
        self._agreed = False
        self._ops: dict[int, str] = {}  # by the tag under which tensors are offered for them
        self._owners_checked = False
        self._order_check = OrderCheck() if is_asked_for() else None
        self._below: dict[ParamGroup, set[nn.Module]] = {}
        for group in self.groups:
            group.context = self

    def emit(self, event: str, group: ParamGroup) -> None:
        """Tell the listener that ``event``, or a part of one, happened; see ``insight.events``."""
        if self.listener is not None:
            self.listener(event, group.name)

    @property
    def has_run(self) -> bool:
        """Whether a forward has begun."""
        return self._owners_checked

    def check_order(self, op: str, group: ParamGroup) -> None:
        """Compare with the other ranks what comes next, if that is asked for."""
        if self._order_check is not None:
            self._order_check.agree(group, op)

    def check_owners(self) -> None:
        """Look once for parameters without an owner, and for settings that only the root has.

        Raises:
            ShardError: For a tied one, and for one that was replicated later; see refuse_unowned
                and refuse_replicated. For others there is a warning. For a group below the root
                whose backward is finalized by hand.
        """
        if self._owners_checked:
            return
        for group in self.groups:
            if group is not self.root and group.settings.finalizes_by_hand:
                raise ShardError(
                    "Expected set_manual_backward_finalization() on the root alone, got it on "
                    f"{group.label}; set it to False there and to True on the root"
                )
        refuse_unowned(m for group in self.groups for top in group.modules for m in top.modules())
        for group in self.groups:
            holders = {slot.module for param in group.params for slot in param.slots}
            refuse_replicated(group.modules, holders, group.label)
        self._owners_checked = True
        if self.root.mesh.num_ranks > 1:
            unsharded = (param.unsharded for group in self.groups for param in group.params)
            warn_of_plain(self.root.modules, unsharded)

    def wait_for_optimizer(self) -> None:
        """Wait for the end of an optimizer step that runs beside, if that was asked for.

        Hazard: a stream takes an event of another kind for one that was never recorded, and does
        not wait. Guard: the event is asked, which knows its kind.
        """
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            event.wait()

    def before_gather(self) -> None:
        """Check once that all ranks hold the same model. Collective: see agree_on_model."""
        if not self._agreed:
            agree_on_model(self.groups)
            self._agreed = True
            channels = (channel for group in self.groups for channel in group.channels.values())
            self._ops = {
                tag: op
                for channel in channels
                for tag, op in zip(channel.tags, (channel.gathering, channel.reducing), strict=True)
            }

    def note_new_params(self, group: ParamGroup) -> None:
        """Have ``group``, of which parameters are new, told of optimizer steps on them."""
        watch_optimizer_steps(group)

    def wait_until_read(self) -> None:
        """Wait until the other ranks, and the device, have read what they read of this rank's.

        Gradients that are copied to the host are there, too.
        """
        self.emit("begin_wait_for_readers", self.root)
        host.settle()
        self.backward.reductions.in_flight.end_returns()
        same_host.settle(self._ops)
        for group in self.groups:
            if group.gradients.still_read:
                group.gradients.release()
        self.emit("wait_for_readers", self.root)

    # What stays gathered --------------------------------------------------------------------

    def free_earlier(self, *, is_anew: bool) -> None:
        """Free what an earlier pass has gathered and what nobody said stays as it is.

        Writes that move no counter cannot be seen, so a forward trusts what was gathered before it
        only where users said so. All ranks must decide alike: nothing here depends on this rank's
        graph. Test: ``tests/parameters/test_registered.py``.

        Args:
            is_anew: Whether another forward begins. If not, what is kept for backward stays, too.
        """
        for group in self.groups:
            state = type(group.state)
            is_left = state is Unsharded or state is PartlySharded
            if is_left and not self._stays(group, is_anew=is_anew):
                group.reshard()

    def free_unless_trusted(self, group: ParamGroup) -> None:
        """Free what users have had the sharded parameters of, unless they said that it stays."""
        if group.shows_sharded and not self._stays(group, is_anew=True):
            group.reshard()

    def _stays(self, group: ParamGroup, *, is_anew: bool) -> bool:
        settings = group.settings
        if group.freshness.saw_step:
            return False
        if group.is_held:
            return True
        if not settings.reshard_after_backward and self.backward.reductions.are_to_go_on:
            return True
        is_for_backward = settings.reshard_after_forward is False or not is_anew
        return is_for_backward and any(one.is_trainable for one in self.groups)

    def free_after_backward(self) -> None:
        """Free what stays neither for a running forward nor for the rest of an accumulation.

        What stays shows the sharded parameters, which have the gradients, unless a forward waits
        for its backward: its loss may be made of the unsharded ones yet.
        """
        goes_on = self.backward.reductions.are_to_go_on
        for group in self.groups:
            if type(group.state) is Sharded or self.forward.holds(group):
                continue
            if group.settings.reshard_after_backward or not goes_on:
                group.reshard()
            elif not self.forward.waits_for_backward:
                group.show_sharded()

    def show_sharded(self) -> None:
        """Register the sharded parameters, which an optimizer has changed, but while computing."""
        if self.forward.is_running or _torch.current_backward() != -1:
            return
        for group in self.groups:
            group.show_sharded()

    def agree_on_requires_grad(self) -> None:
        """Let both forms of all parameters ask for gradients as users said, to whichever form."""
        for group in self.groups:
            if group.is_unsharded or not group.settings.unshards_in_backward:
                group.agree_on_requires_grad()

    def encloses(self, outer: ParamGroup, inner: ParamGroup) -> bool:
        """Tell whether the modules of ``inner`` lie within those of ``outer``."""
        below = self._below.get(outer)
        if below is None:
            below = self._below[outer] = {m for top in outer.modules for m in top.modules()}
        return any(module in below for module in inner.modules)

    def clean_up(self) -> None:
        """Return to the state between two iterations, whatever was under way.

        What this iteration's backward has not yet reduced is dropped; gradients that are visible
        on the sharded parameters stay.
        """
        self.forward.abandon()
        self.backward.abandon()
        for group in self.groups:
            group.reshard()
            group.gradients.discard()
            group.freshness.forget_forward()
        self.wait_until_read()


def share_reductions(contexts: Sequence[Context]) -> None:
    """Let trees that train together count their reductions in flight as one."""
    shared = contexts[0].backward.reductions.in_flight if contexts else None
    for context in contexts[1:]:
        if shared is not None and context.backward.reductions.in_flight is not shared:
            shared.take_over(context.backward.reductions.in_flight)
            context.backward.reductions.in_flight = shared


def join_tree(root: ParamGroup, group_of: Callable[[nn.Module], ParamGroup | None]) -> Context:
    """Put the group of an outer module and all groups below it into one context.

    Args:
        root: The group of the outer module(s).
        group_of: Returns the group of a module, if it has one.
    """
    groups: dict[ParamGroup, list[str]] = {root: []}
    for top in root.modules:
        for name, module in top.named_modules():
            group = group_of(module)
            if group is not None and group is not root:
                groups.setdefault(group, []).append(name)
    listeners = {g.context.listener for g in groups if g is not root and g.context.listener}
    context = Context(root, list(groups))
    context.listener = listeners.pop() if len(listeners) == 1 else None
    for group, names in groups.items():
        group.name = ", ".join(names)
    return context
