"""Compiles the steady-state step of one group into tuples of operations.

Imports reduction, storage, plugins. Rare events have no code of their own: they make the program
out of date, and the group compiles a new one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial, reduce
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from composable_shard import _torch
from composable_shard.core.codec import share_attributes
from composable_shard.core.plugins import Op, Phase
from composable_shard.core.reduction import LocalReduction, Reduction, reduce_dtype, wide_dtype
from composable_shard.core.storage import Bucket, GatherOps, Regather, ShardedParam
from composable_shard.core.transport.pending import UsedStreams, on_side_stream, side_stream

Ops = tuple[Op, ...]

FREED = 1_000_000_000
"""The version of unsharded parameters without memory, so that autograd refuses to read them."""

_requires_grad = attrgetter("requires_grad")
_grad_dtype = attrgetter("grad_dtype")
_version = attrgetter("_version")
_grad = attrgetter("grad")


class Mode(enum.Enum):
    """Whether new gradients are reduced, and whether they add to earlier gradients."""

    FRESH = enum.auto()  # reduce; no sharded parameter has a gradient
    ADDING = enum.auto()  # reduce; some have a gradient, which may be unreduced
    UNSYNCED = enum.auto()  # accumulate without a reduction


class Program:
    """The compiled steady-state step of one group, and the guards that keep it current.

    Attributes:
        generation: ``Plugins.generation`` at compile time; -1 if the program is out of date.
        gather: Operations that gather the parameters, and free them.
        keep: If ``reshard_after_forward`` is a number of ranks, operations that keep this rank's
            part of the unsharded memory before it is freed.
        regather: Operations that gather these parts from neighbouring ranks, or free the kept part.
        pre_forward, post_forward, pre_backward, post_backward: Operations of features only.
        reduce: For each mode, operations that launch the reduction, or accumulate without sync.
        over_replicas: On devices with streams, operations that launch the reduction over the
            replicas right after the reduction over the shards; otherwise empty.
        deliver: The stages that complete a reduction: ``True`` with the reduction over the
            replicas, ``False`` without it. Each stage begins with a wait; the last stage writes
            ``.grad``.
        has_offloaded_replicas: Whether a reduction over the replicas is followed by a copy to the
            host.
        version_tensors: Tensors with version counters that grow when the shards change.
        slots: For each name of each parameter: the dict that holds it, the name, the sharded and
            the unsharded parameter, and the function that registers a parameter.
        attribute_copiers: The copiers of parameters with a ``__dict__`` for the sharded and another
            for the unsharded parameter.
        sharded: The sharded parameters that were registered at compile time.
        requires_grad: Whether each of them was trainable.
        freeable: The unsharded parameters with memory that is freed between uses.
        unsharded_storages: The ids of their storages; see ``_torch.storage_number``.
        accumulators: The autograd nodes that accumulate into the trainable parameters.
        reduced_names: The parameters to reduce: trainable ones, and frozen ones that still have
            unsynced gradients.
        reductions: A reduction for each mesh, subclass of `Reduction`, dtype and place of
            ``.grad``; see `reduced_together`.
        needs_reduce: Whether there are any ``reductions``.
        searched_modules: The modules that have been searched for ``tensor_attributes``, each after
            its first forward since the program was compiled.
        tensor_attributes: The attributes, by dict and name, in which forward stores tensors on
            modules.
    """

    def __init__(self, group: Any) -> None:
        self.generation = group.plugins.generation
        self.searched_modules: set[nn.Module] = set()
        self.tensor_attributes: list[tuple[dict[str, Any], str]] = []
        params: list[ShardedParam] = group.params
        self.sharded = tuple(param.sharded for param in params)
        self._nones = (None,) * len(params)
        self._local_shards = tuple(param.local for param in params)
        self.version_tensors = (*self.sharded, *self._local_shards)
        self._storage_numbers = _torch.storage_numbers(self.sharded)
        self.requires_grad = tuple(map(_requires_grad, self.sharded))
        self._grad_dtypes = tuple(map(_grad_dtype, self.sharded))
        freeable = [param for param in params if not param.shares_storage]
        self.freeable = tuple(param.unsharded for param in freeable)
        leaves = (leaf for param in freeable for leaf in _torch.leaves(param.unsharded_local))
        self.unsharded_storages = set(map(_torch.storage_number, leaves))
        self._list_slots(params)
        self._prepare_unsharded(group)
        self._compile(group)
        if _torch.has_streams(group.mesh.device):
            self._put_on_streams(group)

    # Guards ---------------------------------------------------------------------------------

    def is_current(self, generation: int, *, is_unsharded_registered: bool) -> bool:
        """Return whether slots, shards, gradient settings and features are unchanged."""
        sharded = self.sharded
        return (
            self.has_slots(generation, is_unsharded_registered=is_unsharded_registered)
            and all(map(is_, _torch.local_tensors(sharded), self._local_shards))
            and _torch.storage_numbers(sharded) == self._storage_numbers
            and tuple(map(_requires_grad, sharded)) == self.requires_grad
            and tuple(map(_grad_dtype, sharded)) == self._grad_dtypes
        )

    def has_slots(self, generation: int, *, is_unsharded_registered: bool) -> bool:
        """Return whether slots and features are unchanged: a cheap part of :meth:`is_current`."""
        registered = self._slots_unsharded if is_unsharded_registered else self._slots_sharded
        return generation == self.generation and all(
            map(is_, map(dict.get, self._holders, self._names), registered)
        )

    def has_shards_of(self, other: Program) -> bool:
        """Return whether both programs gather the same shards, so that versions are comparable."""
        mine, others = self.version_tensors, other.version_tensors
        return len(mine) == len(others) and all(map(is_, mine, others))

    def mode(self) -> Mode:
        """Return the mode of a reduction that starts now."""
        has_no_grads = all(map(is_, map(_grad, self.sharded), self._nones))
        return Mode.FRESH if has_no_grads else Mode.ADDING

    def forget_unsynced(self) -> None:
        """Make the program out of date if it was compiled while there were unsynced gradients."""
        if self._had_unsynced:
            self.generation = -1

    @property
    def would_round(self) -> bool:
        """Whether the dtype of a reduction is too narrow for accumulated gradients."""
        return any(reduction.would_round for reduction in self.reductions)

    def discard(self) -> None:
        """Drop all gradients that are not in ``.grad`` yet, after a failed backward."""
        for reduction in self.reductions:
            reduction.discard()

    # Compile --------------------------------------------------------------------------------

    def _list_slots(self, params: Sequence[ShardedParam]) -> None:
        self.slots = tuple(
            (slot.module._parameters, slot.name, param.sharded, param.unsharded, slot.setter)
            for param in params
            for slot in param.slots
        )
        columns = tuple(zip(*self.slots, strict=True)) or ((), (), (), (), ())
        self._holders, self._names, self._slots_sharded, self._slots_unsharded, _ = columns

    def _prepare_unsharded(self, group: Any) -> None:
        """Copy settings to the unsharded parameters, hook them, and list those to reduce."""
        self.accumulators: list[Node] = []
        reduced = []
        for param, sharded in zip(group.params, self.sharded, strict=True):
            unsharded = param.unsharded
            if param.attributes is None:
                param.attributes = share_attributes(sharded, unsharded)
            else:
                param.attributes.sharded = sharded
            unsharded.requires_grad_(sharded.requires_grad)
            is_wider = reduce_dtype(param).itemsize > unsharded.dtype.itemsize
            if not param.policy.rounds_gradients:  # autograd rounds to ``grad_dtype``, if it is set
                unsharded.grad_dtype = None if is_wider else unsharded.dtype
            if sharded.requires_grad:
                self.accumulators.append(*_torch.accumulate_nodes([unsharded]))
                if not param.is_counted:
                    param.is_counted = True
                    unsharded.register_post_accumulate_grad_hook(group.count_gradient)
            if sharded.requires_grad or param.name in group.unsynced_names:
                reduced.append(param.name)
        self.reduced_names = frozenset(reduced)
        self.needs_reduce = bool(reduced)
        self.attribute_copiers = [p.attributes for p in group.params if p.attributes is not None]

    def _compile(self, group: Any) -> None:
        ops = partial(group.plugins.ops, group)
        self._compile_gather(group, ops)
        self.reductions: list[Reduction] = list(self._plan_reductions(group))
        self._had_unsynced = bool(group.unsynced_names)
        reductions = self.reductions
        self.pre_forward, self.post_forward = ops("pre_forward"), ops("post_forward")
        self.pre_backward, self.post_backward = ops("pre_backward"), ops("post_backward")
        group.program = self  # the ``ops`` of features read it
        launches = (reduction.launch for reduction in reductions)
        launch = (*ops("reduce"), *launches, *ops("reduce_launched"))
        self.reduce: dict[Mode, Ops] = {
            Mode.FRESH: (*(reduction.take_grads for reduction in reductions), *launch),
            Mode.ADDING: (*(reduction.take_with_unsynced for reduction in reductions), *launch),
            Mode.UNSYNCED: (
                *(reduction.accumulate_unsynced for reduction in reductions),
                *ops("accumulated"),
            ),
        }
        self._compile_delivery(group, ops)

    def _compile_gather(self, group: Any, ops: Callable[[Phase], Ops]) -> None:
        """Compile the operations that gather the group from its shards, and from kept parts."""
        settings, reshard_after = group.settings, group.settings.reshard_after_forward
        keeps, regathers = settings.keeps_storage, list[Regather]()
        gathers = [GatherOps((), (), (), ())]  # four columns below, even without buckets
        for bucket in group.buckets:
            channel, shards = group.channels[bucket.mesh], [param.local for param in bucket.params]
            gathers.append(bucket.gather_ops(shards, channel, keeps_storage=keeps))
            if reshard_after is not None and not isinstance(reshard_after, bool):
                regathers.append(Regather(bucket, channel, reshard_after))
        # Only the last launch operation of a bucket launches a collective; flat buckets allocate in
        # the others. So all flat buckets allocate before the first collective.
        allocations = chain.from_iterable(gather.launch[:-1] for gather in gathers)
        launches = (*allocations, *chain.from_iterable(gather.launch[-1:] for gather in gathers))
        _, waits, drops, frees = map(chain.from_iterable, zip(*gathers, strict=True))
        unsharded = tuple(chain.from_iterable(param.all_unsharded() for param in group.params))
        set_version = partial(_set_unsharded_version, group, unsharded)
        freeable = [p.all_unsharded() for p in group.params if not p.shares_storage]
        freed = tuple(chain.from_iterable(freeable))
        mark_freed = partial(_torch.set_versions, freed, (FREED,) * len(freed))
        before_wait, launched = ops("before_wait_for_gather"), ops("gather_launched")
        self.gather = GatherOps(
            (*ops("gather"), *launches, *launched),
            (*before_wait, *waits, set_version, *ops("gather_done")),
            tuple(drops),
            (*ops("free"), mark_freed, *frees, *ops("freed")),
        )
        self.keep: Ops = tuple(regather.keep for regather in regathers)
        regather_waits = (regather.wait for regather in regathers)
        self.regather = GatherOps(
            (*ops("regather"), *(regather.launch for regather in regathers), *launched),
            (*before_wait, *regather_waits, set_version, *ops("gather_done")),
            tuple(regather.drop for regather in regathers),
            tuple(regather.free for regather in regathers),
        )

    def _compile_delivery(self, group: Any, ops: Callable[[Phase], Ops]) -> None:
        """Compile the stages of the delivery, with a reduction over the replicas and without.

        On devices with streams, the reduction over the replicas is launched on a stream of its own,
        right after the reduction over the shards. On the CPU, and for tensor subclasses, it is
        launched when the latter is complete.
        """
        reductions = self.reductions
        hooks: Ops = ops("deliver")
        if group.settings.all_reduce_hook is not None:
            hooks += tuple(each.call_hook for each in reductions)
        average = tuple(each.average for each in reductions if each.scale.after != 1)
        before_wait = ops("before_wait_for_reduction")
        wait = (*before_wait, *(each.wait for each in reductions))
        averaged = (*wait, *average, *ops("averaged"))
        replicated = [each for each in reductions if each.num_replicas > 1]
        self.has_offloaded_replicas = any(each.is_offloaded for each in replicated)
        self.over_replicas: Ops = ()
        if not replicated:
            same = self._with_write((*averaged, *hooks), ops("delivered"))
            self.deliver = {True: same, False: same}
            return
        skips = (each.skip_replicas for each in replicated)
        without = self._with_write((*averaged, *skips), ops("delivered"))
        launches: Ops = tuple(each.launch_over_replicas for each in replicated)
        first = (*averaged, *launches, *ops("reduced_over_shards"), *ops("all_reduce_launched"))
        stream = side_stream(group.mesh.device)
        if stream is not None and all(type(each) is Reduction for each in reductions):
            ordered = tuple(partial(each.order_after_shards, stream) for each in reductions)
            on_side = _within(lambda: _torch.on_stream(stream), (*average, *launches))
            self.over_replicas = (*ordered, *on_side, *ops("all_reduce_launched"))
            wait = (*before_wait, *(each.wait_for_shards for each in reductions))
            first = (*wait, *ops("averaged"), *ops("reduced_over_shards"))
        await_replicas = (each.wait for each in replicated)
        second = (*ops("before_wait_for_all_reduce"), *await_replicas, *hooks)
        written = self._with_write(second, ops("replicas_delivered"))
        self.deliver = {False: without, True: (first, *written)}

    def _with_write(self, ops: Ops, delivered: Ops) -> tuple[Ops, ...]:
        """Add operations that write ``.grad``, in a separate stage if the host must wait first."""
        late = [each for each in self.reductions if each.is_late]
        write = tuple(
            each.download
            if each in late
            else each.write_after_autograd
            if each.waits_for_autograd
            else each.write_grads
            for each in self.reductions
        )
        if not late:
            return ((*ops, *write, *delivered),)
        return (*ops, *write, *delivered), tuple(each.write_downloaded for each in late)

    def _plan_reductions(self, group: Any) -> Sequence[Reduction]:
        reduced = [param for param in group.params if param.name in self.reduced_names]
        return [
            reduction(buckets, params, dtype, group.channels[buckets[0].mesh], group)
            for reduction, buckets, params, dtype in reduced_together(group, reduced)
        ]

    # Streams --------------------------------------------------------------------------------

    def _put_on_streams(self, group: Any) -> None:
        """Run operations on the streams of the memory that they use; see ``UsedStreams``.

        The stream that launched a gather also completes it, and the stream that launched a
        reduction delivers it. Memory is freed on the stream that allocated it. Gradients are
        reduced on the stream that computed them.
        """
        streams: UsedStreams = group.streams
        reduction_stream: list[torch.Stream] = []

        def on_gathering_stream() -> AbstractContextManager[object]:
            return on_side_stream(streams.filling_stream)

        def on_reduction_stream() -> AbstractContextManager[object]:
            return on_side_stream(reduction_stream[0])

        def record_launch() -> None:
            reduction_stream[:] = [_torch.current_stream(group.mesh.device)]

        self.pre_forward = (group.follow_stream, *self.pre_forward, streams.record_use)
        self.pre_backward = (*self.pre_backward, streams.record_use)
        launch, wait, drop, free = self.gather
        freed = () if group.settings.keeps_storage else (streams.record_free,)
        self.gather = GatherOps(
            (streams.record_fill, *launch),
            (*_within(on_gathering_stream, wait), streams.record_use),
            _within(on_gathering_stream, drop),
            (*_within(streams.on_allocating_stream, free), *freed),
        )
        if self.keep:
            launch, wait, drop, free = self.regather
            self.keep = _within(streams.on_allocating_stream, self.keep)
            self.regather = GatherOps(
                _within(streams.on_filling_stream, (streams.record_fill, *launch)),
                (*_within(on_gathering_stream, wait), streams.record_use),
                _within(on_gathering_stream, drop),
                free,
            )
        for mode, ops in self.reduce.items():
            self.reduce[mode] = _within(streams.on_last_user, (*ops, record_launch))
        self.over_replicas = _within(streams.on_last_user, self.over_replicas)
        for has_replicas, stages in self.deliver.items():
            on_stream = tuple(_within(on_reduction_stream, stage) for stage in stages)
            self.deliver[has_replicas] = on_stream


def reduced_together(
    group: Any, reduced: Sequence[ShardedParam]
) -> Iterator[tuple[type[Reduction], list[Bucket], list[ShardedParam], torch.dtype]]:
    """Yield the class of each reduction, and its buckets, parameters and dtype.

    If the parameters have several reduce dtypes, real ones are promoted to one dtype, and complex
    ones to another. Parameters with dtypes without a promotion are reduced apart.
    """
    # A reduced gradient plus unreduced ones must not be rounded.
    unsynced = group.unsynced_names
    wide = {p for p in reduced if p.adds_to_synced and p.name in unsynced}
    dtypes = {p: wide_dtype(p) if p in wide else reduce_dtype(p) for p in reduced}
    widest: dict[bool, torch.dtype] = {}
    for is_complex in (False, True):
        alike = {dtype for dtype in dtypes.values() if dtype.is_complex == is_complex}
        with suppress(RuntimeError, TypeError):  # no promotion (float8), or no such dtypes
            widest[is_complex] = reduce(torch.promote_types, alike)
    planned: dict[tuple[Any, ...], tuple[list[Bucket], list[ShardedParam]]] = {}
    for bucket in group.buckets:
        is_local = bucket.mesh.num_ranks == 1 and group.settings.all_reduce_hook is None
        reduction = LocalReduction if is_local else bucket.reduction or Reduction
        for param in bucket.params:
            if param in dtypes:
                dtype, is_offloaded = dtypes[param], param.offload is not None
                key = bucket.mesh, reduction, widest.get(dtype.is_complex, dtype), is_offloaded
                buckets, params = planned.setdefault(key, ([], []))
                params.append(param)
                if bucket not in buckets:
                    buckets.append(bucket)
    for (_, reduction, dtype, _), (buckets, params) in planned.items():
        yield reduction, buckets, params, dtype


def _within(context: Callable[[], AbstractContextManager[object]], ops: Sequence[Op]) -> Ops:
    """Return one operation that runs others in a context."""

    def run() -> None:
        with context():
            for op in ops:
                op()

    return (run,) if ops else ()


def _set_unsharded_version(group: Any, unsharded: tuple[torch.Tensor, ...]) -> None:
    """Set the version counters of the unsharded parameters; a gather does not bump them."""
    _torch.set_versions(unsharded, (group.unsharded_version,) * len(unsharded))
