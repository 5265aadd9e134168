"""The parameters of one ``fully_shard`` call: sharded, being gathered, or unsharded.

In-place operations on a sharded parameter move its version counter or that of its local tensor.
Foreach and fused functions, ``.data`` and NumPy move neither. Of those, steps of ``torch.optim``
are counted; see "What stays gathered" in ``docs/design.md`` for the others.

A group gathers and frees its parameters as a whole. Its state is one value; a pending gather
exists nowhere but inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import _torch
from composable_shard.core.bucket import GatherUnit
from composable_shard.core.calls import Call, InputMarker
from composable_shard.core.gradient import Exposure, ReductionSettings
from composable_shard.core.not_sharded import GROUP
from composable_shard.core.param import ShardedParam
from composable_shard.core.reduction import GroupGradients
from composable_shard.core.transport import host
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.failures import announce
from composable_shard.core.transport.pending import (
    Pending,
    UsedStreams,
    Waitable,
    compute_stream,
)
from composable_shard.core.tree import Tree
from composable_shard.core.units import GroupUnits, Kept, ParamSet, Transfers
from composable_shard.errors import ShardError, StaleParameterError
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy

# Whether unsharded parameters still are what the shards say ---------------------------------------

_steps: Counter[tuple[object, ...]] = Counter()
"""Optimizer steps on sharded parameters, by this rank and the process groups they lie on."""


class Freshness:
    """Numbers the states of a group's sharded parameters.

    Attributes:
        at_forward: The number when a forward ran whose backward is to come, if any.
    """

    def __init__(self, params: ParamSet, mesh: ShardMesh) -> None:
        self.at_forward: int | None = None
        self._params = params
        self.num_optimizer_steps = 0
        groups = [group for group in (mesh.shard_group, mesh.replica_group) if group is not None]
        self._ranks = (dist.get_rank(), *(group.group_name for group in groups))
        self._steps_at_gather = 0

    def version(self) -> int:
        """Return a number that grows whenever the sharded parameters change in place."""
        return self.num_optimizer_steps + self._params.version()

    def note_optimizer_step(self) -> None:
        """Count a step of an optimizer that has some of the parameters."""
        self.num_optimizer_steps += 1
        _steps[self._ranks] += 1

    def note_gather(self) -> None:
        """Note that the parameters are gathered as they are now."""
        self._steps_at_gather = _steps[self._ranks]

    @property
    def saw_step(self) -> bool:
        """Whether an optimizer of any model over the same ranks has stepped since the gather.

        Averages of weights are updated after such a step, often by foreach functions. All ranks
        must give the same answer, so models over other ranks do not count.
        """
        return self._steps_at_gather != _steps[self._ranks]

    def forget_forward(self) -> None:
        """Expect no backward of the last forward any more."""
        self.at_forward = None

    def changed_since_forward(self) -> bool:
        """Tell whether a backward now would use other parameters than its forward did."""
        return self.at_forward is not None and self.at_forward != self.version()


# The parameters of one ``fully_shard`` call: sharded, being gathered, or unsharded ----------------


class Sharded(NamedTuple):
    """Only the shards exist; the sharded parameters are registered."""


class Unsharding(NamedTuple):
    """The gather has been launched; the sharded parameters are still registered.

    Attributes:
        is_regather: Whether it gathers parts that were kept.
    """

    pending: Pending
    transfers: Transfers
    version: int
    is_regather: bool = False


class Unsharded(NamedTuple):
    """The unsharded parameters are valid and registered."""

    version: int


class PartlySharded(NamedTuple):
    """Each of ``num_ranks`` neighbours keeps a part; the sharded parameters are registered."""

    kept: Kept
    num_ranks: int
    version: int


State = Sharded | Unsharding | Unsharded | PartlySharded

_LEGAL: dict[type, tuple[type, ...]] = {
    Sharded: (Unsharding,),
    Unsharding: (Unsharded, Sharded),
    Unsharded: (Sharded, PartlySharded),
    PartlySharded: (Unsharding, Sharded),
}


# What users may change at any time ----------------------------------------------------------------


@dataclass
class GroupSettings:
    """What users may change at any time.

    Attributes:
        reshard_after_forward: ``None`` lets the place in the tree decide: all but the root. A
            number keeps the parameters sharded over groups of so many ranks.
        reshard_after_backward: Whether unsharded parameters are freed once they have gradients.
        requires_gradient_sync: Whether backward reduces gradients over the ranks.
        keeps_storage: Whether the memory of unsharded parameters stays when they are
            resharded.
        finalizes_by_hand: Whether a call, and not the end of a backward, finishes the reductions;
            of the root's group alone.
        unshards_in_backward: Whether backward needs the parameters.
        max_reductions: Reductions launched and not waited for when another is launched; each holds
            its gradients.
        prefetch_depth: How many groups are gathered ahead in the recorded order.
        forward_prefetch: Groups to gather when this one runs forward, instead of the recorded one.
        backward_prefetch: The same for backward.
        reduction: How gradients are reduced.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    keeps_storage: bool = False
    finalizes_by_hand: bool = False
    unshards_in_backward: bool = True
    max_reductions: int = 1
    prefetch_depth: int = 1
    forward_prefetch: list[ParamGroup] = field(default_factory=list)
    backward_prefetch: list[ParamGroup] = field(default_factory=list)
    reduction: ReductionSettings = field(default_factory=ReductionSettings)

    @property
    def divisor(self) -> float | None:
        """What the sum of gradients is divided by; ``None`` for the number of ranks."""
        return self.reduction.divisor

    @property
    def all_reduce_hook(self) -> Callable[[torch.Tensor], object] | None:
        """Called with each buffer of reduced gradients."""
        return self.reduction.hook


ON_OTHER_RANKS = "on other ranks; move() it to a mesh that has this one first"
"""Why shards are not in memory of a rank that is not in their mesh."""


# The group itself ---------------------------------------------------------------------------------


class ParamGroup:
    """One communication group: gathered together, reduced together.

    Attributes:
        modules: The modules that were passed to ``fully_shard``.
        mesh: Over which ranks its parameters are sharded, but those with a mesh of their own.
        channels: How it talks to the ranks of each mesh.
        policy: Which dtypes they have.
        params: The parameters of the modules, but those of nested groups and ignored ones.
        units: The same, in what is gathered as a whole.
        streams: Which streams use the unsharded parameters.
        freshness: Whether unsharded parameters are still valid.
        settings: What users may change.
        context: What it shares with the other groups of the tree.
        name: Name of the modules within the root; for messages and traces.
        gradients: Its gradients: accumulated, reduced and delivered.
        state: Sharded, being gathered or unsharded.
        calls: The calls of its modules that are under way, the innermost last.
        input_markers: What lies in front of all calls whose graph is alive.
        shows_sharded: Whether the sharded parameters are registered though it is unsharded.
        is_held: Whether the user unsharded it; it shows the unsharded ones until ``reshard()``.
        is_opened: Whether its modules hold full parameters, inside of ``unsharded()``.
        absence: Why its shards are not in memory, and what to do; ``None`` if they are.
        is_exposed: Whether users may have had the unsharded ones in their hands.
        on_gradient: Called when a backward has accumulated into one of the parameters.
        pending_nodes: By the number of each backward that waits for the group, how many nodes of
            autograd are left to run in it.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        params: Sequence[ShardedParam],
        units: list[GatherUnit],
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.modules = modules
        self.mesh = mesh
        self.policy = policy
        self.units = GroupUnits(params, units)
        self.params = self.units.params
        self.channels = {m: Channel(m) for m in dict.fromkeys([mesh, *(p.mesh for p in params)])}
        self.streams = UsedStreams(mesh.device)
        self.freshness = Freshness(self.units.all, mesh)
        self.settings = GroupSettings()
        self.context: Tree[ParamGroup]
        self.name = ""
        self.state: State = Sharded()
        self.gradients: GroupGradients
        self._create_gradients()
        self.calls: list[Call] = []
        self.input_markers: WeakSet[InputMarker] = WeakSet()
        self.shows_sharded = self.is_held = self.is_opened = self.is_exposed = False
        self.absence: str | None = None
        self._exposure: Exposure | None = None
        self.on_gradient: Callable[[torch.Tensor], None]
        self.pending_nodes: dict[int, int] = {}
        self._stream = 0

    @property
    def num_optimizer_steps(self) -> int:
        """How many optimizer steps have changed the shards."""
        return self.freshness.num_optimizer_steps

    @property
    def label(self) -> str:
        """What messages call the group; that of the root has no name."""
        return f"group '{self.name}'" if self.name else "the root group"

    def emit(self, event: str) -> None:
        """Tell who listens that ``event``, or a part of one, happened; see ``insight.events``."""
        if self.context.listener is not None:
            self.context.listener(event, self.name)

    def check_order(self, op: str) -> None:
        """Compare with the other ranks what comes next, if that is asked for."""
        if self.context.order_check is not None:
            self.context.order_check.agree(f"{op} of {self.label}", self.channels)

    def check_awake(self, purpose: str) -> None:
        """Raise ``ShardError`` if its shards are not in memory."""
        if self.absence is not None:
            raise ShardError(f"Expected {self.label} in memory {purpose}, got it {self.absence}")

    def give_back(self, param: ShardedParam) -> None:
        """Let go of a parameter that another group will own; nothing was gathered yet."""
        self.units.give_back(param)
        self._create_gradients()

    def relocate(
        self,
        units: list[GatherUnit],
        mesh: ShardMesh,
        successors: Iterable[tuple[ShardMesh, ShardMesh]],
    ) -> None:
        """Let the parameters lie on other ranks, in other units; settings stay.

        Args:
            units: Those of the parameters, which are planned for their ranks.
            mesh: The ranks of the group.
            successors: A mesh that it had, and one in its place; what was set for one is for both.

        Collective: makes a process group if reductions have one of their own.
        """
        choices = {new: self.channels[old].saved() for old, new in successors}
        meshes = dict.fromkeys([mesh, *(param.mesh for param in self.params)])
        self.mesh, self.channels = mesh, {one: Channel(one) for one in meshes}
        for one, choice in choices.items():
            self.channels[one].restore(*choice)
        self._hold(GroupUnits(self.params, units))
        self.absence = None
        self.context.is_agreed = False

    def _hold(self, units: GroupUnits) -> None:
        """Let go of the units, and hold others of the same parameters, which are sharded."""
        self.units, self.params, self.state = units, units.params, Sharded()
        self.streams = UsedStreams(self.mesh.device)
        self.freshness = Freshness(units.all, self.mesh)
        self._create_gradients()

    def leave(self) -> None:
        """Let the parameters lie on other ranks alone; this one has nothing of them."""
        self._hold(GroupUnits(self.params, []))
        self.absence = ON_OTHER_RANKS

    def _create_gradients(self) -> None:
        channels = list(self.channels.values())
        self.gradients = GroupGradients(self.params, channels, self.settings.reduction)

    # The state machine ----------------------------------------------------------------------

    def _move_to(self, state: State) -> None:
        assert type(state) in _LEGAL[type(self.state)], f"{self.state} -> {state}"
        self.state = state

    @property
    def is_unsharded(self) -> bool:
        return type(self.state) is Unsharded

    @property
    def shows_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return type(self.state) is Unsharded and not self.shows_sharded

    @property
    def is_sharded(self) -> bool:
        """Whether there is something to gather and no gather is under way."""
        return bool(self.params) and isinstance(self.state, (Sharded, PartlySharded))

    @property
    def is_read_in_backward(self) -> bool:
        """Whether backward reads the parameters."""
        return bool(self.params) and self.settings.unshards_in_backward

    @property
    def is_trainable(self) -> bool:
        return self.units.all.is_trainable

    @property
    def stays_after_forward(self) -> bool:
        """Whether forward leaves it unsharded, if a backward may come: see the settings."""
        reshard = self.settings.reshard_after_forward
        return self.context.groups[0] is self if reshard is None else not reshard

    def unshard(self) -> None:
        """Launch the gather unless it is under way, done and still valid.

        Collective: one all-gather launch of the group's bytes for each mesh, or none.
        Memory: the unsharded parameters, in the compute dtype.
        """
        if not self.params:
            return
        self.check_awake("to be gathered")
        if self.context.post_optim_event is not None:
            self.context.wait_for_optimizer()
        if torch.is_inference_mode_enabled():  # what is made now outlives it
            with torch.inference_mode(False), torch.no_grad():
                self._unshard()
        else:
            self._unshard()

    def _unshard(self) -> None:
        state = self.state
        in_backward = _torch.current_backward() != -1 and self.context.is_in_backward(self)
        if in_backward:
            self._check_unchanged_since_forward()
        if not isinstance(state, Sharded):
            is_valid = in_backward or self._is_valid(state)
            if is_valid and isinstance(state, PartlySharded):
                self._regather(state)
                return
            if is_valid:
                if self.is_unsharded:
                    self.streams.use()
                    self._show_unsharded()
                    if not in_backward:
                        self._follow_requires_grad()
                return
            is_held = self.is_held
            self.reshard()
            self.is_held = is_held
        self.emit("begin_all_gather")
        if not self.context.is_agreed:
            self.context.agree()
        try:
            is_new = self.units.refresh(self.label)
        except Exception as error:
            self._tell_failure(error)
            raise
        if is_new:
            self.context.note_new_params(self)
        self.freshness.note_gather()
        version = self.freshness.at_forward  # in backward they are as they were then
        if version is None or not in_backward:
            version = self.freshness.version()
        self._start(self.units.start_gather, version)

    def _is_valid(self, state: Unsharding | Unsharded | PartlySharded) -> bool:
        """Tell whether what was gathered is what the registered parameters say."""
        if state.version != self.freshness.version():
            return False
        return not self.shows_sharded or self.units.all.are_intact()

    def _regather(self, state: PartlySharded) -> None:
        """Gather what neighbours keep.

        Hazard: kept parts lie on the stream of the unsharded parameters, and another one would read
        them early and let go of them while they are sent. Guard: it is launched from theirs. Test:
        ``test_planted_faults.py``, by the program "blocks on streams, fewer ranks".
        """
        self.emit("begin_regather")
        start = partial(self.units.start_regather, state.kept, state.num_ranks)
        with self.streams.where_filled():
            self._start(start, state.version, state.num_ranks)

    def _start(
        self, allocate: Callable[[], Transfers], version: int, num_ranks: int | None = None
    ) -> None:
        """Allocate what a gather needs and launch it; if that fails, the other ranks hear of it."""
        try:
            self._launch(self._allocated(allocate), version, num_ranks)
        except Exception as error:
            self._tell_failure(error)
            raise

    def _allocated(self, allocate: Callable[[], Transfers]) -> Transfers:
        """Allocate what a gather needs: all of it, or, where memory runs out, nothing."""
        self.streams.fill()
        try:
            transfers = allocate()
            for mesh, transfer in transfers:
                if transfer.buffer is None:
                    continue
                gives_memory = self.channels[mesh].gives_memory()
                if not gives_memory or self.stays_after_forward or self.settings.keeps_storage:
                    _torch.allocate(transfer.buffer)  # users may have it in their hands
                if not gives_memory:
                    transfer.buffer = None
            return transfers
        except BaseException:
            host.settle()  # what is freed may be on its way
            self._free()
            raise

    def _free(self) -> None:
        self.units.free()
        self.streams.freed()

    def _launch(self, transfers: Transfers, version: int, num_ranks: int | None = None) -> None:
        self.check_order("all-gather")
        lane, works = None, list[Waitable]()
        op = ""
        for _, transfer in transfers:
            lane = lane or transfer.lane
        for mesh, channel in self.channels.items():
            inputs, outputs, buffers = [], [], list[torch.Tensor]()
            for over, transfer in transfers:
                if over is mesh or over == mesh:
                    inputs += transfer.inputs
                    outputs += transfer.outputs
                    if transfer.buffer is not None:
                        buffers.append(transfer.buffer)
            if not inputs:
                continue
            with nullcontext() if lane is None else lane.behind():
                if num_ranks is None:
                    works += channel.gather(outputs, inputs, buffers)
                else:
                    works += channel.regather(outputs, inputs, num_ranks)
            op = channel.gathering
        if lane is not None:  # gathers may read on the compute stream, and leave memory behind
            works = [lane.arrival(), *works, lane.departure()]
        pending = Pending(works, op, self.streams.home)
        self._move_to(Unsharding(pending, transfers, version, num_ranks is not None))
        self.emit("all_gather")

    def wait_for_unshard(self) -> None:
        """Finish a launched gather and register the unsharded parameters."""
        if not isinstance(self.state, Unsharding):
            return
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                self._finish_unshard(self.state)
        else:
            self._finish_unshard(self.state)

    def _finish_unshard(self, state: Unsharding) -> None:
        self.emit("begin_wait_for_all_gather")
        try:
            with state.pending.resumed():
                state.pending.wait()
                self.emit("waited_for_all_gather")
                if state.is_regather:
                    self.units.finish_regather(state.transfers)
                else:
                    self.units.finish_gather(state.transfers)
        except Exception as error:
            self._tell_failure(error)
            raise
        self.streams.use()
        self._follow_requires_grad()
        self.units.all.register_unsharded()
        self.shows_sharded = False
        self.units.all.allow_reading()
        if self.is_held:
            self.units.own_memory()
            self.expose()
        self._move_to(Unsharded(state.version))
        self.emit("wait_for_all_gather")

    def _tell_failure(self, error: Exception) -> None:
        """Tell this rank, by a note, and the others that it failed in gathering."""
        groups = [group for one in self.channels.values() for group in one.process_groups]
        announce(groups, f"gathering {self.label}", error)

    def reshard(self, num_ranks: int | None = None) -> None:
        """Free the unsharded parameters and register the sharded ones.

        Collective: none, but for the process group of neighbours at the first time.

        Args:
            num_ranks: Of how many neighbours each keeps a part, to regather from; all of the
                parameters are freed if absent.
        """
        state = self.state
        self.is_held = False
        if isinstance(state, Sharded):
            return
        if isinstance(state, PartlySharded) and num_ranks is not None:
            return
        with self.streams.at_owner():
            freed = self._freed(state, num_ranks)
            if not self.settings.keeps_storage:
                self._free()
        self.units.all.forbid_reading()
        self._move_to(freed)
        self.emit("reshard")

    def _freed(self, state: State, num_ranks: int | None) -> Sharded | PartlySharded:
        """Let nobody use the unsharded parameters any more; return what comes of them."""
        if isinstance(state, Unsharding):
            state.pending.drop()
        elif isinstance(state, Unsharded):
            self.show_sharded()
            self.shows_sharded = False
            if num_ranks is not None:
                for channel in self.channels.values():
                    channel.prepare_regather(num_ranks)
                return PartlySharded(self.units.keep(num_ranks), num_ranks, state.version)
        return Sharded()

    def keep_unsharded_storage(self, keep: bool) -> None:
        """Set whether resharding leaves the memory of the unsharded parameters where it is."""
        self.settings.keeps_storage = keep
        if not keep and isinstance(self.state, (Sharded, PartlySharded)):
            with self.streams.at_owner():
                self._free()

    def show_sharded(self) -> None:
        """Register the sharded parameters and keep the unsharded ones until the next use.

        Collective: none, and none later: a rank may look at its shards without the others.
        """
        if self.shows_unsharded:
            if self.is_exposed:
                self._adopt()
                self.is_exposed = False
            self.units.all.register_sharded()
            self.shows_sharded = True

    def _show_unsharded(self) -> None:
        if self.shows_sharded:
            self.units.all.register_unsharded()
            self.shows_sharded = False

    def _follow_requires_grad(self) -> None:
        """Let the unsharded parameters ask for gradients as the sharded ones do.

        Hazard: the node that accumulates a gradient runs on the stream on which it was made, and
        what it triggers there would free memory that this stream still uses. Guard: on another
        stream than before there are other nodes.
        """
        if self.is_exposed:
            self._adopt()
        stream = compute_stream(self.mesh.device)
        if stream != self._stream:
            self._stream = stream
            self.units.all.renew_accumulators()
        self.units.all.follow_requires_grad(self.on_gradient)

    def take_over_from_users(self) -> None:
        """Adopt what users set; let both forms ask for gradients as users said, to whichever form.

        Raises:
            ShardError: See _adopt.
        """
        units = self.units.all
        if self.is_unsharded or (units.is_created and not self.settings.unshards_in_backward):
            if self.is_exposed:
                self._adopt()
            units.follow_requires_grad(self.on_gradient)

    def expose(self) -> None:
        """Leave the unsharded parameters to users until they are used or freed.

        Where a pipeline schedule may add gradients to them by itself, their gradients stay as they
        are.
        """
        has_marks = self.settings.requires_gradient_sync or self.settings.reshard_after_backward
        self.is_exposed = True
        self._exposure = self._exposure or Exposure(self.params, has_marks=has_marks)

    def _adopt(self) -> None:
        """Give the sharded parameters what users have set on the unsharded ones.

        Raises:
            ShardError: If users wrote some after forward. A rank may see that alone, so the others
                are told.
        """
        self.units.all.adopt_requires_grad()
        exposure, self._exposure = self._exposure, None
        lost = [] if exposure is None else exposure.adopt()
        if lost and not self.is_held:
            self.reshard()
            error = ShardError(
                f"Expected the unsharded parameters of {self.label} as their forward left them, "
                f"got {', '.join(map(repr, lost))} written, which is lost when they are freed; "
                "call reshard() first and write the sharded ones, or write within unsharded()"
            )
            self._tell_failure(error)
            raise error

    @property
    def computed_version(self) -> int:
        """The number of the state with which a forward computes now, or a backward would."""
        state = self.state
        if isinstance(state, Sharded) or self.units.share_storage:
            return self.freshness.version()
        return state.version

    def note_forward(self) -> None:
        """Remember with which parameters a forward ran whose backward is to come."""
        state = self.state
        version = state.version if isinstance(state, Unsharded) else self.freshness.version()
        self.freshness.at_forward = version

    def check_computed_with(self, version: int) -> None:
        """Raise if a backward would read other parameters than the forward of its graph.

        Hazard: ranks whose losses do not reach the group gather it for those whose losses do, and
        wait. Guard: they hear of the error. Test:
        ``test_a_rank_whose_loss_reaches_less_hears_of_a_stale_graph``.

        Args:
            version: The number of the state with which that forward has computed.
        """
        if self.is_read_in_backward and version != self.computed_version:
            self._refuse_stale()

    def _check_unchanged_since_forward(self) -> None:
        uses_shards = isinstance(self.state, Sharded) or self.units.share_storage
        if uses_shards and self.freshness.changed_since_forward():
            self._refuse_stale()

    def _refuse_stale(self) -> None:
        error = StaleParameterError(
            f"Expected the parameters of {self.label} in backward as they were in "
            "forward, got parameters that were changed in between (an optimizer step?); run "
            "backward before changing them"
        )
        self._tell_failure(error)
        raise error

    def __repr__(self) -> str:
        return f"ParamGroup({self.name or 'root'}, {len(self.params)} params, {self.state})"


def group_of(module: nn.Module) -> ParamGroup | None:
    """Return the group of a sharded module, ``None`` for any other."""
    return module.__dict__.get(GROUP)


def set_group(module: nn.Module, group: ParamGroup) -> None:
    """Remember the group of a module that is being sharded."""
    module.__dict__[GROUP] = group
