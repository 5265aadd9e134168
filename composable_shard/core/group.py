"""The parameters of one ``fully_shard`` call: a state machine that runs a compiled program.

A program consists of lists of operations, such as those of a gather (`program.py`). A bucket is a
set of parameters with common flat buffers; a slot is a name under which a module holds a parameter
(`storage.py`). A group does not know other groups or the progress of autograd. `Tree` (`tree.py`)
and `Backward` (`backward.py`) tell the group when to gather, free and reduce its parameters.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_, is_not
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import _torch
from composable_shard.core import user_changes
from composable_shard.core.extension import create_unsharded, have_plain_shards, move_into_buckets
from composable_shard.core.plugins import Op
from composable_shard.core.program import Ops, Program, grad_settings_of
from composable_shard.core.reduction import is_partial
from composable_shard.core.storage import Bucket, GatherOps, ShardedParam
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.failures import announce
from composable_shard.core.transport.pending import UsedStreams, compute_stream_id
from composable_shard.errors import ShardError, StaleParameterError
from composable_shard.mesh import ShardMesh
from composable_shard.policy import MixedPrecisionPolicy

_version, _local = map(attrgetter, ("_version", "local"))
_is_trainable, _group_of_reduction = attrgetter("sharded.requires_grad"), attrgetter("group")


# The attribute of a sharded module that holds its group.
_GROUP = "_composable_shard_group"


def group_of(module: nn.Module) -> ParamGroup | None:
    """Return the group of a sharded module."""
    group: ParamGroup | None = module.__dict__.get(_GROUP)
    return group


def set_group(module: nn.Module, group: ParamGroup) -> None:
    """Set the group of a module."""
    module.__dict__[_GROUP] = group


ON_OTHER_RANKS = "on other ranks; move() the model to a mesh with this rank first"
"""The value of `ParamGroup.why_absent` on ranks outside of the group's mesh."""


def process_groups_of(groups: Iterable[ParamGroup]) -> list[dist.ProcessGroup | None]:
    """Return the process groups in which other ranks may wait for this rank."""
    channels = (channel for group in groups for channel in group.channels.values())
    return [process_group for channel in channels for process_group in channel.process_groups]


class State(enum.Enum):
    """Whether the unsharded parameters exist."""

    SHARDED = enum.auto()
    UNSHARDING = enum.auto()  # the all-gather is in flight
    UNSHARDED = enum.auto()
    PARTLY_SHARDED = enum.auto()  # freed, except for this rank's part; see `Regather`


@dataclass
class Settings:
    """The settings of a group; setters of `FSDPModule` change them.

    Attributes:
        reshard_after_forward: Whether the parameters are freed after forward; ``None`` to free them
            unless the group is the root; a number k to keep one k-th of them on each of k ranks.
        reshard_after_backward: Whether the parameters are freed after backward.
        reduce_grads: Whether backward reduces gradients over the ranks.
        all_reduce_grads: Whether backward also reduces gradients over the replicas.
        divisor: The divisor of the sum of gradients; ``None`` for the number of ranks.
        sums_only: Whether collectives only sum, and divisions are separate operations.
        unshard_in_backward: Whether backward gathers the group.
        keeps_storage: Whether the unsharded memory stays allocated between uses.
        forward_prefetch: The groups to prefetch when forward uses this one; empty for the groups
            that the last forward used after this one.
        backward_prefetch: The groups to prefetch in backward; empty for the next groups of the plan
            that a backward follows (`tape.py`).
        prefetch_depth: The number of groups to prefetch.
        max_reductions: The number of reductions that may hold their unsharded gradients at once.
        all_reduce_hook: The user's function to call with each buffer of reduced gradients.
        hook_stream: The stream of ``all_reduce_hook``; ``None`` for the compute stream.
        zeros_for_unused: Whether a parameter that no rank used gets a gradient of zeros.
        gathers_once_a_step: Whether the parameters stay gathered, through forwards and backwards,
            until an optimizer has stepped or a shard has changed.
        reduces_each_step: Whether an optimizer reduces unsynced gradients before it steps.
        has_flat_grads: Whether an optimizer steps the reduced gradients as one buffer.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    divisor: float | None = None
    sums_only: bool = False
    unshard_in_backward: bool = True
    keeps_storage: bool = False
    forward_prefetch: Sequence[ParamGroup] = ()
    backward_prefetch: Sequence[ParamGroup] = ()
    prefetch_depth: int = 1
    max_reductions: int = 1
    all_reduce_hook: Callable[[torch.Tensor], object] | None = None
    hook_stream: torch.Stream | None = None
    zeros_for_unused: bool = False
    gathers_once_a_step: bool = False
    reduces_each_step: bool = False
    has_flat_grads: bool = False


class ParamGroup:
    """Parameters that are gathered, freed and reduced together.

    Attributes:
        modules: The modules passed to ``fully_shard``.
        name: The qualified names of ``modules`` below the root; empty for the root. Until the group
            joins the tree of a root, the class of the first module.
        settings: The settings, which users may change.
        state: Whether the unsharded parameters exist.
        is_unsharded_registered: Whether the modules hold the unsharded parameters, and not the
            sharded ones.
        is_kept_by_user: Whether the user has called ``unshard()`` since the group was freed.
        modules_run: If there are several ``modules``: those that have run in this forward; emptied
            when all have run.
        why_absent: Why the shards are not in memory, and the remedy; ``None`` if they are there.
        unsharded_version: The version counter of the unsharded parameters. It grows when a gather
            brings new values.
        awaits_weight_half: Whether a pipeline schedule has split a backward, and has run the half
            for the inputs, but not yet the half for the weights.
        is_in_unsharded_context: Whether ``unsharded()`` has given the modules full parameters.
        num_optimizer_steps: The number of optimizer steps that may have changed the shards.
        unsynced: The names of the parameters with a gradient that may not be reduced over all ranks
            yet. The value is a dtype wide enough for the sum, if the gradient was added to a
            reduced one; otherwise ``None``.
        has_unreduced: Whether some gradients of these parameters may be at stage ``unreduced``
            rather than ``reduced_over_shards`` (see `reduction.py`).
        skips_shards: Whether the latest reduction runs over the replicas only, because all
            gradients are reduced over the shards already.
        finished_nodes: For each gradient accumulation and each input marker (see `hooks.py`) that
            has run in backward, the id of its graph task.
        channels: The collectives of each mesh.
        streams: The streams that use the unsharded memory.
        is_compiled: Whether ``program`` may run. If not, ``program`` is missing or out of date.
        tree, calls: Set by the layers above: the `Tree` of the group, and weak references to each
            `Call` (`tree.py`) that a backward may still reach.
    """

    program: Program
    _gather_ops: GatherOps

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[ShardedParam],
        buckets: Sequence[Bucket],
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.modules = tuple(modules)
        self.name = type(modules[0]).__name__
        self.params = list(params)
        self.place(mesh, buckets)
        for param in params:
            param.group = self
        self.policy = policy.without_override()
        self.settings = Settings()
        self.state = State.SHARDED
        self.is_unsharded_registered = self.is_kept_by_user = False
        self.is_in_unsharded_context = self.awaits_weight_half = False
        self.modules_run: set[nn.Module] = set()
        self.unsharded_version = 0
        self.num_optimizer_steps = 0
        self.unsynced: dict[str, torch.dtype | None] = {}
        self.has_unreduced = self.skips_shards = False
        self.finished_nodes: list[int] = []
        self.streams = UsedStreams(mesh.device)
        self.tree: Any = None
        self.calls: list[weakref.ref[Any]] = []
        self._gathered_version = -1
        self._snapshot: user_changes.UnshardedSnapshot | None = None

    def place(self, mesh: ShardMesh, buckets: Sequence[Bucket]) -> None:
        """Put the group on the ranks of a mesh, with its buckets and new channels."""
        self.mesh, self.buckets = mesh, list(buckets)
        meshes = dict.fromkeys([mesh, *(bucket.mesh for bucket in buckets)])
        self.channels = {mesh: Channel(mesh) for each in meshes for mesh in each.channel_meshes}
        self.why_absent: str | None = None
        self.is_compiled = False

    def all_modules(self) -> Iterator[nn.Module]:
        """Yield the modules of the group and all of their submodules."""
        for top in self.modules:
            yield from top.modules()

    def live_calls(self) -> list[Any]:
        """Return the calls that a backward may still reach, because they have input markers."""
        return [call for ref in self.calls if (call := ref()) is not None]

    @property
    def label(self) -> str:
        """The name of the group in error messages."""
        return f"group '{self.name}'" if self.name else "the root group"

    def check_in_memory(self, purpose: str) -> None:
        """Raise ``ShardError`` if the shards of the group are not in memory."""
        if (why := self.why_absent) is not None:
            raise ShardError(f"Expected shards of {self.label} in memory {purpose}, got them {why}")

    @property
    def stays_after_forward(self) -> bool:
        """Whether the settings keep the unsharded parameters registered until the backward."""
        reshard = self.settings.reshard_after_forward
        return self.tree.root is self if reshard is None else not reshard

    @property
    def is_trained(self) -> bool:
        """Whether some parameters are not frozen."""
        return any(map(_is_trainable, self.params))

    # Gather ---------------------------------------------------------------------------------

    def refresh(self, *, is_used_now: bool = True) -> bool:
        """Free stale unsharded parameters; recompile the program if it is out of date.

        Each use in forward calls this. Backward does not: it must use the values that forward used,
        and autograd raises if the version of a saved parameter has changed.

        Args:
            is_used_now: Whether to check everything. A prefetch checks less: if the program is out
                of date when the group is used, the prefetched parameters are dropped.

        Returns:
            Whether the group computes with its own parameters, and not with full tensors of
            ``torch.func.functional_call``.
        """
        if self._snapshot is not None:
            self.apply_user_changes()
        registered = self.is_unsharded_registered
        if self.is_compiled:
            program, version = self.program, self._gathered_version
            is_current = program.is_current if is_used_now else program.has_same_slots
            if is_current(self.tree.generation, is_unsharded_registered=registered):
                if self.state is not State.SHARDED and version != self._shard_version():
                    self.reshard()
                return True
        if user_changes.is_substituted(self.params, self.label, is_unsharded_registered=registered):
            return False
        before = self.program if self.is_compiled else None
        if before is not None:
            self.reshard()
        self.check_in_memory("to be gathered")
        with torch.inference_mode(False), torch.no_grad():
            user_changes.adopt_registered(self.params, self.label)
            user_changes.check_materialized(self.params, self.label)
            if self._has_outside_shards() or not have_plain_shards(self.buckets):
                self._rebuild()
            create_unsharded(self.buckets, self.channels)
        self.compile()
        if before is None or not self.program.has_shards_of(before):
            self._gathered_version = -1
        return True

    def compile(self) -> None:
        """Compile the program for the current parameters, settings and features."""
        if self.state is State.PARTLY_SHARDED:  # a new program would not have the kept parts
            self.reshard()
        with torch.inference_mode(False):  # the program outlives a forward in inference mode
            self.program = Program(self)
        self.is_compiled = True

    def follow_stream(self) -> None:
        """Recompile if the current stream has changed: accumulation nodes belong to a stream."""
        if compute_stream_id(self.mesh.device) != self.program.stream:
            self.program.accumulators.clear()  # releases the nodes of the old stream
            self.compile()

    def remove(self, param: ShardedParam) -> None:
        """Remove a parameter, because another group takes it over."""
        self.params.remove(param)
        self._rebuild()

    def _has_outside_shards(self) -> bool:
        """Return whether shards lie outside the buckets, and must be copied into new buckets.

        Shards that ``functional_call`` passes are gathered from their own memory, without a copy,
        unless the unsharded parameters share memory with the shards.
        """
        buckets = self.buckets
        if _torch.in_functional_call():
            buckets = [bucket for bucket in buckets if bucket.params[0].shares_storage]
        return any(any(map(is_not, map(_local, each.params), each.locals)) for each in buckets)

    def _rebuild(self) -> None:
        """Copy the shards into new buckets, after some were replaced or removed."""
        for param in self.params:
            param.retire_unsharded()
        self.buckets = move_into_buckets(self.params)
        self.is_compiled = False

    def unshard(self) -> None:
        """Launch the all-gather, unless the group is unsharded or unsharding.

        Collective: the all-gather.
        """
        program = self.program
        if self._snapshot is not None:
            self.apply_user_changes()
        if self.why_absent is not None:
            self.check_in_memory("to be gathered")
        if self.state is State.SHARDED:
            version = self._shard_version()
            if version != self._gathered_version:
                self._gathered_version = version
                self.unsharded_version += 1
            self._gather_ops = program.gather
        elif self.state is State.PARTLY_SHARDED:
            self._gather_ops = program.regather
        else:
            return
        try:
            self.run(self._gather_ops.launch, "gathering")
        except Exception:
            for op in (*self._gather_ops.drop, *program.gather.free):
                op()
            self.state = State.SHARDED
            raise
        self.state = State.UNSHARDING

    def run(self, ops: Sequence[Op], doing: str) -> None:
        """Run operations in which other ranks take part; announce a failure to them."""
        try:
            for op in ops:
                op()
        except Exception as error:
            self.announce(doing, error)
            raise

    def announce(self, doing: str, error: Exception) -> None:
        """Tell the other ranks that this rank has failed, so that they do not wait for it.

        They may wait in a collective of another group, so this tells the ranks of all groups of the
        tree.
        """
        announce(process_groups_of(self.tree.groups), f"{doing} {self.label}", error)

    def prefetch(self) -> None:
        """Launch the all-gather early; the next use drops it if the program is then out of date."""
        if self.params and self.refresh(is_used_now=False):
            self.unshard()

    def wait(self) -> None:
        """Wait for the all-gather, if one is in flight."""
        if self.state is State.UNSHARDING:
            self.run(self._gather_ops.wait, "gathering")
            self.state = State.UNSHARDED

    def reshard(self, *, keeps_part: bool = False, keeps_memory: bool = False) -> None:
        """Free the unsharded parameters and register the sharded ones.

        Args:
            keeps_part: Whether to keep this rank's part for the next gather, if
                ``settings.reshard_after_forward`` is a number of ranks.
            keeps_memory: Whether to free nothing, and just register the sharded parameters.
        """
        if self.is_unsharded_registered:
            self.register_sharded()
        self.is_kept_by_user = self.awaits_weight_half = False
        if self.modules_run:
            self.modules_run.clear()
        if self.state is not State.SHARDED and not keeps_memory:
            program, state = self.program, State.SHARDED
            if self.state is State.UNSHARDING:
                for op in self._gather_ops.drop:
                    op()
            elif program.keep and keeps_part:
                for op in program.keep:
                    op()
                state = State.PARTLY_SHARDED
            was_partly = self.state is State.PARTLY_SHARDED
            try:
                for op in program.regather.free if was_partly else program.gather.free:
                    op()
            except RuntimeError:  # NumPy arrays share the memory; a new program keeps it allocated
                # A list, because `any` alone would stop at the first true value.
                if not any([bucket.free() for bucket in self.buckets]):
                    raise
                state = State.SHARDED
                self.compile()
            self.state = state

    def record_run(self, module: nn.Module) -> None:
        """Record a run of one of several modules; if it has run before, begin a new round."""
        if module in self.modules_run:
            self.modules_run.clear()
        self.modules_run.add(module)
        if len(self.modules_run) == len(self.modules):
            self.modules_run.clear()

    def take_snapshot(self) -> None:
        """Record the unsharded parameters: they stay registered, and users may change them."""
        if self._snapshot is None:
            # Pipeline schedules turn off both settings and write unsharded ``.grad`` themselves:
            # marks (see `UnshardedSnapshot`) would be in their way.
            has_marks = self.settings.reduce_grads or self.settings.reshard_after_backward
            with torch.inference_mode(False):  # inference tensors have no versions
                self._snapshot = user_changes.UnshardedSnapshot(self.params, has_marks=has_marks)

    def apply_user_changes(self) -> None:
        """Apply cleared ``.grad`` and ``requires_grad`` of unsharded to sharded parameters.

        Raises:
            ShardError: If users wrote to unsharded parameters after forward. Other ranks may not
                notice, so the error is announced to them.
        """
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        lost = snapshot.apply_user_changes()
        if not lost or self.is_kept_by_user:
            return
        self.reshard()
        self._rebuild()  # users may have replaced the memory of an unsharded parameter
        error = ShardError(
            f"Expected the unsharded parameters of {self.label} as their forward left them, got "
            f"writes to {', '.join(map(repr, lost))}, which are lost when the memory is freed; "
            "call reshard() first and write the sharded ones, or write within unsharded()"
        )
        self.announce("using the parameters of", error)
        raise error

    def register_sharded(self) -> None:
        """Register the sharded parameters."""
        if self._snapshot is not None:
            self.apply_user_changes()
        for copier in self.program.attribute_copiers:
            copier.copy_to_sharded()
        program = self.program
        if all(map(is_, program.registered(), program.slots_unsharded)):
            deque(program.put_all(program.slots_sharded), maxlen=0)
        else:  # user code has registered other parameters: leave them
            for slot, sharded, unsharded in program.slots():
                if slot.get() is unsharded:
                    slot.put(sharded)
        self.is_unsharded_registered = False

    def register_unsharded(self) -> None:
        """Register the unsharded parameters, which must exist."""
        for copier in self.program.attribute_copiers:
            copier.copy_to_unsharded()
        program = self.program
        if all(map(is_, program.registered(), program.slots_sharded)):
            deque(program.put_all(program.slots_unsharded), maxlen=0)
        else:
            for slot, sharded, unsharded in program.slots():
                if slot.get() is sharded:
                    slot.put(unsharded)
                elif slot.get() is not unsharded:  # a gradient of that parameter would be lost
                    error = StaleParameterError(
                        f"Expected the parameters of {self.label} in backward as they were in "
                        "forward, got replaced ones; run backward before replacing them"
                    )
                    self.announce("running backward of", error)
                    raise error
        if _torch.current_backward() != -1:
            with _torch.without_overrides():
                grad_settings = list(map(grad_settings_of, program.sharded))
            if grad_settings != program.grad_settings:  # users have changed some since forward
                for param in self.params:
                    param.unsharded.requires_grad_(param.sharded.requires_grad)
                program.generation = -1  # out of date
        self.is_unsharded_registered = True

    def _shard_version(self) -> int:
        """Return a number that grows with every detected change of the shards."""
        with _torch.without_overrides():
            return sum(map(_version, self.program.version_tensors)) + self.num_optimizer_steps

    # Reduce ---------------------------------------------------------------------------------

    def start_reduction(self, *, deferred: bool, all_reduces: bool) -> GroupReduction | None:
        """Launch the reduction of the gradients, or accumulate them without sync.

        Args:
            deferred: Whether to reduce only gradients that were accumulated without sync. All
                ranks then launch the same reductions, because the names in ``unsynced`` depend on
                the settings, and not on the gradients of a rank.
            all_reduces: Whether to reduce over the replicas even if the settings do not.

        Returns:
            The launched reduction; ``None`` if none was launched.
        """
        if deferred:
            if not (self.unsynced or self.zeros_unused_grads):
                return None
            self.refresh()
        elif not self.settings.reduce_grads:
            self.accumulate()
            return None
        if self.unsynced and self.program.would_round(self.unsynced):
            self.compile()  # the new program has a wider dtype
        all_reduces = all_reduces or self.settings.all_reduce_grads
        self.skips_shards = deferred and not (self.has_unreduced or self.zeros_unused_grads)
        if self.skips_shards and not all_reduces:
            return None
        self.has_unreduced = False
        launch, *stages = self.program.stages[all_reduces]
        self.run(launch, "reducing the gradients of")
        return GroupReduction(self, self.program, stages, all_reduces)

    def accumulate(self) -> None:
        """Add the gradients to those of the sharded parameters, without sync."""
        self.run(self.program.accumulate, "accumulating the gradients of")
        self.has_unreduced = True

    @torch.no_grad()
    def divide_by(self, divisor: float) -> None:
        """Set the divisor of gradient sums; rescale accumulated gradients that are not reduced yet.

        Raises:
            ShardError: On all ranks, if an unreduced gradient was added to a reduced one, which is
                already divided.
        """
        self.tree.in_flight.finish()
        to_scale: list[tuple[torch.Tensor, float]] = []
        for param in self.params:
            ratio = (self.settings.divisor or param.mesh.num_ranks) / divisor
            grad = param.sharded.grad
            if ratio == 1 or not is_partial(grad):
                continue
            if self.unsynced.get(param.name) is not None:
                raise ShardError(
                    f"Expected .grad of '{param.name}' reduced or unreduced when the divisor "
                    "changes, got a sum of both; call synchronize_gradients() or zero_grad()"
                )
            to_scale.append((_torch.local_tensor(grad), ratio))
        for local, ratio in to_scale:
            local.mul_(ratio)
        self.settings.divisor = divisor
        self.tree.invalidate_programs()

    @property
    def zeros_unused_grads(self) -> bool:
        """Whether parameters that no backward has reached get gradients of zeros."""
        is_asked_for = self.settings.zeros_for_unused and self.is_compiled
        return is_asked_for and bool(self.program.reductions)

    def refuse_writes(self, before: int) -> None:
        """Raise if forward wrote unsharded parameters, because freeing them loses the writes.

        Whether a forward writes may depend on the data of its rank, so the error is announced.

        Args:
            before: The sum of the version counters of the parameters before the forward.
        """
        if self.state is not State.UNSHARDED or sum(map(_version, self.program.freeable)) == before:
            return
        params = [param for param in self.params if not param.shares_storage]
        names = [repr(p.name) for p in params if p.unsharded._version != self.unsharded_version]
        error = ShardError(
            f"Expected a forward that does not write the parameters of {self.label}, got "
            f"in-place writes to {', '.join(names)}, lost when the parameters are freed; write the "
            "sharded ones between iterations, in torch.no_grad(); nn.Embedding: leave out max_norm"
        )
        self.announce("running forward of", error)
        raise error

    def reset(self) -> None:
        """After a forward or backward has failed, return to the state between two steps."""
        if self._snapshot is not None:
            self._snapshot.apply_user_changes()  # writes by users are lost here without an error
            self._snapshot = None
        self.reshard()
        if self.is_compiled:
            self.program.discard()


@dataclass(eq=False)
class GroupReduction:
    """The reduction of one group, in flight.

    Attributes:
        group: The group.
        program: The program that launched the reduction; the program may be out of date by now.
        stages: The stages that are left; see `Program.stages`.
        all_reduces: Whether the gradients are also reduced over the replicas.
    """

    group: ParamGroup
    program: Program
    stages: list[Ops]
    all_reduces: bool

    def advance(self) -> bool:
        """Run the next stage, which begins with a wait; return whether stages are left.

        Collective: on the CPU, and for subclasses of `Reduction`, the next stage after the launch
            launches the reduction over the replicas.
        """
        self.group.run(self.stages.pop(0), "reducing the gradients of")
        if self.stages:
            return True
        group, program = self.group, self.program
        if self.all_reduces and group.unsynced:
            group.unsynced.clear()
            # This program may reduce frozen parameters, or in a wider dtype than needed from now.
            if program.had_unsynced:
                program.generation = -1  # out of date
        return False


class ReductionQueue:
    """The reductions in flight, of one tree or of several trees that share the queue.

    A reduction holds the unsharded gradients of its group until the next stage after its launch
    has run, so ``max_reductions`` limits the number of such reductions. The end of a backward runs
    the other stages.
    """

    def __init__(self) -> None:
        self._holding_grads: deque[GroupReduction] = deque()  # the oldest first
        self._delivering: list[GroupReduction] = []  # these hold no unsharded gradients any more

    def __bool__(self) -> bool:
        return bool(self._holding_grads or self._delivering)

    def start(
        self, group: ParamGroup, *, deferred: bool = False, all_reduces: bool = False
    ) -> None:
        """Start the reduction of a group; see :meth:`ParamGroup.start_reduction`.

        First, run the next stage of the oldest reductions until the limit allows another one, and
        finish earlier reductions of this group.
        """
        holding_grads, limit = self._holding_grads, group.settings.max_reductions
        while len(holding_grads) >= limit:
            self._advance_oldest()
        if holding_grads or self._delivering:
            self.finish_reductions_of(group)
        reduction = group.start_reduction(deferred=deferred, all_reduces=all_reduces)
        if reduction is not None:
            holding_grads.append(reduction)

    def finish_reductions_of(self, group: ParamGroup) -> None:
        """Finish the reductions of a group."""
        holding_grads = self._holding_grads
        while holding_grads and group in map(_group_of_reduction, holding_grads):
            self._advance_oldest()
        for reduction in [other for other in self._delivering if other.group is group]:
            self._delivering.remove(reduction)
            while reduction.advance():
                pass

    def finish(self) -> None:
        """Finish all reductions."""
        while self._holding_grads:
            self._advance_oldest()
        while self._delivering:
            delivering, self._delivering = self._delivering, []
            self._delivering = [reduction for reduction in delivering if reduction.advance()]

    def discard(self, group: ParamGroup) -> None:
        """Drop the reductions of a group, after its backward has failed."""
        for reductions in (self._holding_grads, self._delivering):
            for reduction in [other for other in reductions if other.group is group]:
                reductions.remove(reduction)
                reduction.program.discard()

    def _advance_oldest(self) -> None:
        oldest = self._holding_grads.popleft()
        if not oldest.advance():
            return
        if oldest.program.has_offloaded_replicas:
            # Run the next stage of each earlier reduction, which copies gradients to the host. Do
            # not run a last stage: it would block the host until the copies are complete.
            self._delivering = [r for r in self._delivering if len(r.stages) == 1 or r.advance()]
        self._delivering.append(oldest)
