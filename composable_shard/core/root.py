"""The groups of one module tree together: where forwards begin and end, and what stays gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from torch import nn

from composable_shard import _torch
from composable_shard.core.agreement import agree_on_model
from composable_shard.core.backward import BackwardPass
from composable_shard.core.calls import Call
from composable_shard.core.finalization import Finalization
from composable_shard.core.forward import ForwardPass
from composable_shard.core.group import ParamGroup, PartlySharded, Unsharded
from composable_shard.core.not_sharded import refuse_replicated, warn_of_plain
from composable_shard.core.optimizers import watch_optimizer_steps
from composable_shard.core.order import ExecutionOrder
from composable_shard.core.ties import refuse_unowned
from composable_shard.core.tree import Tree
from composable_shard.core.tree_reductions import Reductions
from composable_shard.errors import ShardError


class Context(Tree[ParamGroup]):
    """Shared by all groups below one root.

    Attributes:
        order: In which order forward and backward need them.
        forward: The running forward.
        backward: The running backward.
        reductions: What backwards reduce.
        finalization: Finishes reductions when users say so.
        has_run: Whether a forward has begun.
    """

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        super().__init__(groups)
        self.order: ExecutionOrder[ParamGroup] = ExecutionOrder()
        self.reductions = Reductions(self.groups)
        self.forward = ForwardPass(self.groups, self.order, self.reductions)
        self.backward = BackwardPass(self.groups, self.order, self.forward, self.reductions)
        self.finalization = Finalization(self.root, self.backward, self.reductions)
        self.has_run = False
        self._first: nn.Module | None = None
        for group in self.groups:
            group.context = self

    @property
    def is_reducing(self) -> bool:
        """Whether gradients of backwards are yet to arrive."""
        unfinished, in_flight = self.reductions, self.reductions.in_flight
        is_open = unfinished.by_hand is not None or unfinished.handle is not None
        return is_open or bool(in_flight.groups or in_flight.all_reducing)

    @property
    def is_computing(self) -> bool:
        """Whether a forward of the tree is under way, or any backward."""
        return self.forward.is_running or _torch.current_backward() != -1

    # Where a forward begins and ends --------------------------------------------------------

    def begin_forward(self, group: ParamGroup, module: nn.Module, call: Call) -> bool:
        """Begin a forward with a call of ``module``, unless it is part of one; return whether."""
        run = self.forward.run
        if run is not None and not run.was_interrupted:
            return False
        self.clean_up_if_failed()
        self._check_once()
        self.finalization.check_ended()
        if self.backward.ran_inside:
            self.backward.keep_inside()
        self._free_earlier(is_anew=self._begins_anew(group, module))
        self.forward.begin(group, module, call)
        if not _torch.has_streams(group.mesh.device):
            _torch.keep_spare()
        return True

    def end_forward(self, outermost: ParamGroup, *, failed: bool, has_backward: bool) -> None:
        """End a forward, or clean up after it.

        Args:
            outermost: The group that began it.
            failed: Whether it raised.
            has_backward: Whether it gave anything that a backward may start from.
        """
        if failed and self.backward.ran_inside:
            self.backward.clean_up()
        elif failed:
            self.forward.abandon()
            self.order.abandon()
            for group in self.groups:
                group.reshard()
            self.reductions.wait_for_copies()
        else:
            self.forward.close()
            if not has_backward:  # else its end waits for the copies
                self.backward.finish_inside()
                self.forward.show_sharded(outermost)
                self.reductions.wait_for_copies()
        if failed or _torch.current_backward() == -1:
            _torch.return_spare()

    def clean_up_if_failed(self) -> None:
        """Return to the state between two iterations if a forward or backward has failed."""
        run = self.forward.run
        if (run is not None and run.was_interrupted) or self.backward.was_aborted:
            self.backward.clean_up()

    def _begins_anew(self, group: ParamGroup, module: nn.Module) -> bool:
        """Tell whether a call begins another forward of the tree, and does not go on with the last.

        Modules of a tree may be called one by one, and a head several times. What is called first
        begins anew: the root, or that one of its modules which was the first to be called.
        """
        if group is not self.root:
            return False
        if self._first is None or len(group.modules) == 1:
            self._first = module
        return self._first is module

    # What is looked at once -----------------------------------------------------------------

    def _check_once(self) -> None:
        """Look once for parameters without an owner, and for settings that only the root has.

        Raises:
            ShardError: For a tied one, and for one that was replicated later; see refuse_unowned
                and refuse_replicated. For others there is a warning. For a group below the root
                whose backward is finalized by hand.
        """
        if self.has_run:
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
        self.has_run = True
        if self.root.mesh.num_ranks > 1:
            unsharded = (param.unsharded for group in self.groups for param in group.params)
            warn_of_plain(self.root.modules, unsharded)

    def agree(self) -> None:
        """Check once that all ranks hold the same model. Collective: see agree_on_model."""
        if self.is_agreed:
            return
        agree_on_model(self.groups)
        self.is_agreed = True

    def forget_forwards(self) -> None:
        """Forget the order of forwards: other ranks have joined, which have recorded nothing."""
        self.order.start_anew()

    def is_in_backward(self, group: ParamGroup) -> bool:
        """Tell whether the backward that is running, of whatever tree, goes through ``group``."""
        return self.backward.goes_through(group)

    def note_new_params(self, group: ParamGroup) -> None:
        """Have ``group``, of which parameters are new, told of optimizer steps on them."""
        watch_optimizer_steps(group)

    # What stays gathered --------------------------------------------------------------------

    def _free_earlier(self, *, is_anew: bool) -> None:
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
        """Free what users may have had the sharded parameters of, unless they said that it stays.

        Whether they had depends on this rank's graph, which decides nothing here either.
        """
        is_in_use = group.is_held or self.is_computing
        if group.is_unsharded and not is_in_use and not self._stays(group, is_anew=True):
            group.reshard()

    def _stays(self, group: ParamGroup, *, is_anew: bool) -> bool:
        settings = group.settings
        if group.freshness.saw_step:
            return False
        if group.is_held:
            return True
        if not settings.reshard_after_backward and self.reductions.are_to_go_on:
            return True
        if settings.reshard_after_forward is not False and (is_anew or group is not self.root):
            return False
        return any(one.is_trainable for one in self.groups)

    def take_over(self, inner: Context) -> None:
        """Go on with what another tree has under way, which is a part of this one from now on."""
        self.reductions.take_over(inner.reductions)
        if self.post_optim_event is None:
            self.post_optim_event = inner.post_optim_event

    def show_sharded(self) -> None:
        """Register the sharded parameters, which an optimizer has changed, but while computing."""
        if self.is_computing:
            return
        for group in self.groups:
            group.show_sharded()


context_of: Callable[[ParamGroup], Context] = attrgetter("context")
"""Returns what a group shares with the others of its tree."""


def check_at_rest(group: ParamGroup, op: str) -> None:
    """Raise ``ShardError`` if ``op`` is called while a group computes, or is open."""
    if context_of(group).is_computing:
        raise ShardError(
            f"Expected {op}() outside of forward and backward, got it in one of {group.label}; "
            "use it between iterations"
        )
    if group.is_opened:
        raise ShardError(
            f"Expected {op}() outside of unsharded(), got it inside of one of {group.label}; "
            "leave that first"
        )


def share_reductions(contexts: Sequence[Context]) -> None:
    """Let trees that train together count their reductions in flight as one."""
    shared = contexts[0].reductions.in_flight if contexts else None
    for context in contexts[1:]:
        if shared is not None and context.reductions.in_flight is not shared:
            shared.take_over(context.reductions.in_flight)
            context.reductions.in_flight = shared


def join_tree(root: ParamGroup, group_of: Callable[[nn.Module], ParamGroup | None]) -> Context:
    """Put the group of an outer module and all groups below it into one context.

    Args:
        root: The group of the outer module(s).
        group_of: Returns the group of a module, if it has one.
    """
    groups: dict[ParamGroup, list[str]] = {root: []}
    for place, top in enumerate(root.modules):
        prefix = f"{place}." if len(root.modules) > 1 else ""
        for name, module in top.named_modules():
            group = group_of(module)
            if group is not None and group is not root:
                groups.setdefault(group, []).append(f"{prefix}{name}")
    inner = list(dict.fromkeys(context_of(group) for group in groups if group is not root))
    listeners = {one.listener for one in inner if one.listener is not None}
    context = Context(list(groups))
    context.listener = listeners.pop() if len(listeners) == 1 else None
    if inner:
        context.reductions.in_flight = inner[0].reductions.in_flight  # other trees may share it
    for one in inner:
        context.take_over(one)
    for group, names in groups.items():
        group.name = ", ".join(names)
    return context
