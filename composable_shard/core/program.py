"""Compiles the steady-state step of one group into tuples of operations.

An operation is a callable without arguments; features are optional parts that add operations (see
`plugins.py`). A group is the parameters of one ``fully_shard`` call (`group.py`). Slots are the
names under which modules hold parameters; buckets are their flat buffers (`storage.py`).
A rare event, such as a load or a new setting, makes the program out of date, and the group
compiles a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial, reduce
from itertools import chain
from operator import attrgetter, is_, setitem
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from composable_shard import _torch
from composable_shard.core.codec import share_attributes
from composable_shard.core.plugins import Op, Phase
from composable_shard.core.reduction import LocalReduction, Reduction, reduce_dtype
from composable_shard.core.storage import Bucket, GatherOps, Regather, ShardedParam, Slot
from composable_shard.core.transport import pending

Ops = tuple[Op, ...]

FREED = 1_000_000_000
"""The version of unsharded parameters without memory, so that autograd refuses to read them."""

grad_settings_of = attrgetter("requires_grad", "grad_dtype")


class Program:
    """The compiled steady-state step of one group, and the guards that keep it current.

    Attributes:
        generation: ``Tree.generation`` at compile time; -1 if the program is out of date.
        gather: Operations that gather the parameters, and free them.
        keep: If ``reshard_after_forward`` is a number of ranks, operations that keep this rank's
            part of the unsharded memory before it is freed.
        regather: Operations that gather the kept parts of neighbouring ranks, or free this rank's.
        pre_forward, post_forward, pre_backward, post_backward: Operations of features; on devices
            with streams, the two ``pre`` tuples also have operations that track the streams.
        accumulate: Operations that accumulate gradients without sync.
        stages: A dict. ``True`` has the stages of a reduction that includes the replicas, ``False``
            those of a reduction without them. Each stage is a tuple of operations. Stage 0 launches
            the reduction. Each later stage begins with a wait, and by the end of the last one,
            ``.grad`` is written.
        has_offloaded_replicas: Whether a reduction over the replicas is followed by a copy to the
            host.
        version_tensors: Tensors with version counters that grow when the shards change.
        registered: Returns what each slot holds now.
        slots_sharded, slots_unsharded: The sharded and the unsharded parameter of each slot.
        slots: Returns a tuple for each slot: the slot, and its sharded and unsharded parameter.
        put_all: Puts a parameter into each slot, one at each step of the returned iterator.
        attribute_copiers: The copiers of user attributes, for parameters with separate ``__dict__``
            objects for the sharded and the unsharded form.
        sharded: The sharded parameters that were registered at compile time.
        grad_settings: ``requires_grad`` and ``grad_dtype`` of each of ``sharded`` at compile time.
        stream: The id of the current stream at compile time.
        freeable: The unsharded parameters with memory that is freed between uses.
        unsharded_storages: The ids of the storages of ``freeable``; see ``_torch.storage_number``.
        accumulators: The autograd nodes that accumulate into the trainable parameters.
        had_unsynced: Whether there were unsynced gradients at compile time.
        reductions: A reduction for each combination of mesh, subclass of `Reduction`, dtype and
            offloading; see `reduced_together`.
        searched_modules: The modules that have been searched for ``tensor_attributes``, each after
            its first forward since the program was compiled (`hooks.py` searches them).
        tensor_attributes: The module attributes in which forward stores tensors, each as the
            module's ``__dict__`` and a name.
    """

    def __init__(self, group: Any) -> None:
        self.generation = group.tree.generation
        self.stream = pending.compute_stream_id(group.mesh.device)
        self.searched_modules: set[nn.Module] = set()
        self.tensor_attributes: list[tuple[dict[str, Any], str]] = []
        params: list[ShardedParam] = group.params
        self.sharded = tuple(param.sharded for param in params)
        local_shards = tuple(param.local for param in params)
        self.version_tensors = (*self.sharded, *local_shards)
        self._memory = (*local_shards, *_torch.storages_of(self.sharded))
        freeable = [param for param in params if not param.shares_storage]
        self.freeable = tuple(param.unsharded for param in freeable)
        leaves = (leaf for param in freeable for leaf in _torch.leaves(param.unsharded_local))
        self.unsharded_storages = set(map(_torch.storage_number, leaves))
        self._list_slots(params)
        self._compile(group, self._prepare_unsharded(group))
        # `Reduction` may have set some ``grad_dtype``.
        self.grad_settings = list(map(grad_settings_of, self.sharded))
        if _torch.has_streams(group.mesh.device):
            self._put_on_streams(group)

    # Guards ---------------------------------------------------------------------------------

    def is_current(self, generation: int, *, is_unsharded_registered: bool) -> bool:
        """Return whether the program still fits: slots, shards, settings and features.

        ``requires_grad`` and ``grad_dtype`` of the sharded parameters must be unchanged, too.
        """
        sharded = self.sharded
        with _torch.without_overrides():
            memory = chain(_torch.local_tensors(sharded), _torch.storages_of(sharded))
            return (
                self.has_same_slots(generation, is_unsharded_registered=is_unsharded_registered)
                and all(map(is_, memory, self._memory))
                and list(map(grad_settings_of, sharded)) == self.grad_settings
            )

    def has_same_slots(self, generation: int, *, is_unsharded_registered: bool) -> bool:
        """Return whether slots, settings and features are unchanged; cheaper than `is_current`."""
        expected = self.slots_unsharded if is_unsharded_registered else self.slots_sharded
        return generation == self.generation and all(map(is_, self.registered(), expected))

    def has_shards_of(self, other: Program) -> bool:
        """Return whether both programs gather the same shards, so that versions are comparable."""
        mine, others = self.version_tensors, other.version_tensors
        return len(mine) == len(others) and all(map(is_, mine, others))

    def would_round(self, unsynced: Mapping[str, torch.dtype | None]) -> bool:
        """Return whether a reduction has a narrower dtype than `ParamGroup.unsynced` requires."""
        reductions = self.reductions
        pairs = ((each.dtype, unsynced.get(p.name)) for each in reductions for p in each.params)
        return any(wide and torch.promote_types(wide, dtype) != dtype for dtype, wide in pairs)

    def has_unsharded_grads(self) -> bool:
        """Return whether any unsharded parameter has a gradient."""
        params = chain.from_iterable(each.params for each in self.reductions)
        return any(param.unsharded.grad is not None for param in params)

    def discard(self) -> None:
        """Drop all gradients that are not in ``.grad`` yet, after a failed backward."""
        for reduction in self.reductions:
            reduction.discard()

    # Compile --------------------------------------------------------------------------------

    def _list_slots(self, params: Sequence[ShardedParam]) -> None:
        slots = [slot for param in params for slot in param.slots]
        owners = [param for param in params for _ in param.slots]
        holders, names = [slot.module._parameters for slot in slots], [slot.name for slot in slots]
        self.registered = partial(map, dict.get, holders, names)
        self.slots_sharded = [param.sharded for param in owners]
        self.slots_unsharded = [param.unsharded for param in owners]
        self.slots = partial(zip, slots, self.slots_sharded, self.slots_unsharded)
        plain = partial(map, setitem, holders, names)  # builtins are faster
        are_plain = all(slot.is_plain for slot in slots)
        self.put_all = plain if are_plain else partial(map, Slot.put, slots)

    def _prepare_unsharded(self, group: Any) -> list[ShardedParam]:
        """Set ``requires_grad`` and ``grad_dtype`` of unsharded parameters, and add their hooks.

        Returns:
            The parameters with gradients to reduce: trainable ones, and frozen ones that still have
            unsynced gradients.
        """
        # Each step of the iterator appends the current graph task; builtins make a faster hook.
        count = map(group.finished_nodes.append, iter(_torch.current_backward, None))
        self.accumulators: list[Node] = []
        reduced: list[ShardedParam] = []
        for param, sharded in zip(group.params, self.sharded, strict=True):
            unsharded = param.unsharded
            if param.attributes is None:
                param.attributes = share_attributes(sharded, unsharded)
            else:
                param.attributes.sharded = sharded
            unsharded.requires_grad_(sharded.requires_grad)
            is_wider = reduce_dtype(param).itemsize > unsharded.dtype.itemsize
            # With None, autograd does not round a gradient before the reduction in a wider dtype.
            if not param.policy.rounds_gradients:
                unsharded.grad_dtype = None if is_wider else unsharded.dtype
            if sharded.requires_grad:
                self.accumulators.append(*_torch.accumulate_nodes([unsharded]))
                if not param.is_counted:
                    param.is_counted = True
                    unsharded.register_post_accumulate_grad_hook(partial(next, count))
            if sharded.requires_grad or param.name in group.unsynced:
                reduced.append(param)
        self.attribute_copiers = [p.attributes for p in group.params if p.attributes is not None]
        return reduced

    def _compile(self, group: Any, reduced: Sequence[ShardedParam]) -> None:
        ops = partial(group.tree.ops, group)
        self._compile_gather(group, ops)
        self.had_unsynced = bool(group.unsynced)
        self.reductions: list[Reduction] = [
            reduction(buckets, params, dtype, group)
            for reduction, buckets, params, dtype in reduced_together(group, reduced)
        ]
        self.pre_forward, self.post_forward = ops("pre_forward"), ops("post_forward")
        self.pre_backward, self.post_backward = ops("pre_backward"), ops("post_backward")
        group.program = self  # `ops` of features may read it from here on
        accumulate = (each.accumulate_unsynced for each in self.reductions)
        self.accumulate: Ops = (*accumulate, *ops("accumulated"))
        self._compile_reduction(group, ops)

    def _compile_gather(self, group: Any, ops: Callable[[Phase], Ops]) -> None:
        """Compile the operations that gather the group from its shards, and from kept parts."""
        reshard_after, keeps = group.settings.reshard_after_forward, group.settings.keeps_storage
        gathers, regathers = list[GatherOps](), list[Regather]()
        for bucket in group.buckets:
            channel, shards = group.channels[bucket.mesh], [param.local for param in bucket.params]
            gathers.append(bucket.gather_ops(shards, channel, keeps_storage=keeps))
            if reshard_after is not None and not isinstance(reshard_after, bool):
                regathers.append(Regather(bucket, channel, reshard_after))
        unsharded = tuple(chain.from_iterable(param.all_unsharded() for param in group.params))

        def set_version() -> None:  # a gather does not bump version counters
            _torch.set_versions(unsharded, (group.unsharded_version,) * len(unsharded))

        freeable = (param for param in group.params if not param.shares_storage)
        freed = tuple(chain.from_iterable(param.all_unsharded() for param in freeable))
        mark_freed = partial(_torch.set_versions, freed, (FREED,) * len(freed))

        def joined(phase: Phase, parts: Sequence[GatherOps]) -> GatherOps:
            # The last launch operation of a bucket launches its collective. The others, such as
            # allocations, run before the first collective of any bucket. Without parts, `zip` would
            # return nothing, so an empty GatherOps is first.
            launches, *columns = zip(GatherOps((), (), (), ()), *parts, strict=True)
            allocations = chain.from_iterable(launch[:-1] for launch in launches)
            launch = chain(allocations, *(launch[-1:] for launch in launches))
            wait, drop, free = map(chain.from_iterable, columns)
            return GatherOps(
                (*ops(phase), *launch, *ops("gather_launched")),
                (*ops("before_wait_for_gather"), *wait, set_version, *ops("gather_done")),
                tuple(drop),
                tuple(free),
            )

        gather = joined("gather", gathers)
        self.gather = gather._replace(free=(*ops("free"), mark_freed, *gather.free, *ops("freed")))
        self.keep: Ops = tuple(each.keep for each in regathers)
        parts = [GatherOps([r.launch], [r.wait], [r.drop], [r.free]) for r in regathers]
        self.regather = joined("regather", parts)

    def _compile_reduction(self, group: Any, ops: Callable[[Phase], Ops]) -> None:
        """Compile the stages of a reduction, with a reduction over the replicas and without.

        On devices with streams, the reduction over the replicas is launched on a stream of its own,
        right after the reduction over the shards. On the CPU, and for subclasses of `Reduction`,
        the reduction over the replicas is launched when the one over the shards is complete.
        """
        reductions = self.reductions
        launch: Ops = (
            *(each.take_grads for each in reductions),
            *(each.add_unsynced for each in reductions),
            *ops("reduce"),
            *(each.launch for each in reductions),
            *ops("reduce_launched"),
        )
        final_reductions = [each.over_replicas or each for each in reductions]
        hooks: Ops = ops("deliver")
        if group.settings.all_reduce_hook is not None:
            hooks += tuple(each.call_hook for each in final_reductions)
        average = tuple(each.average for each in reductions if each.division.after != 1)
        before_wait = ops("before_wait_for_reduction")
        wait = (*before_wait, *(each.wait for each in reductions))
        averaged = (*wait, *average, *ops("averaged"))
        replicated = [each for each in reductions if each.num_replicas > 1]
        self.has_offloaded_replicas = any(each.is_offloaded for each in replicated)
        if not replicated:
            stages = (launch, *self._with_write((*averaged, *hooks), ops("delivered"), reductions))
            self.stages = {True: stages, False: stages}
            return
        skips = (each.skip_replicas for each in replicated)
        after_launch = self._with_write((*averaged, *skips), ops("delivered"), reductions)
        self.stages = {False: (launch, *after_launch)}
        launches: Ops = tuple(each.launch_over_replicas for each in replicated)
        stage_1 = (*averaged, *launches, *ops("reduced_over_shards"), *ops("all_reduce_launched"))
        stream = pending.side_stream(group.mesh.device)
        if stream is not None and all(type(each) is Reduction for each in reductions):
            order_ops = tuple(partial(each.order_after_shards, stream) for each in reductions)
            on_side = _within(lambda: _torch.on_stream(stream), (*average, *launches))
            launch = (*launch, *order_ops, *on_side, *ops("all_reduce_launched"))
            stage_1 = (*wait, *ops("averaged"), *ops("reduced_over_shards"))
        await_replicas = ((each.over_replicas or each).wait for each in replicated)
        stage_2 = (*ops("before_wait_for_all_reduce"), *await_replicas, *hooks)
        written = self._with_write(stage_2, ops("replicas_delivered"), final_reductions)
        self.stages[True] = (launch, stage_1, *written)

    def _with_write(self, ops: Ops, delivered: Ops, final: Sequence[Reduction]) -> tuple[Ops, ...]:
        """Add operations that write ``.grad``.

        On devices with streams, or with offloaded gradients, `Reduction.download` copies gradients
        or flags (see `reduction.py`) to the host, and the next stage waits for the copies and
        writes ``.grad``. If no copy is needed, `Reduction.download` itself writes ``.grad``.
        """
        if any(each.has_streams or each.is_offloaded for each in final):
            download = (each.download for each in final)
            written = tuple(each.write_downloaded for each in final)
            return (*ops, *download, *delivered), written
        write = (each.write_grads for each in final)
        return ((*ops, *write, *delivered),)

    # Streams --------------------------------------------------------------------------------

    def _put_on_streams(self, group: Any) -> None:
        """Run each operation on a stream that uses its memory; see ``UsedStreams``.

        The stream that launched a gather also completes it, and the stream that launched a
        reduction delivers it. The stream that filled the memory launches a regather. Memory is
        freed on the stream that allocated it. Gradients are reduced on the stream that computed
        them.
        """
        streams: pending.UsedStreams = group.streams
        reduction_stream: list[torch.Stream] = []

        def on_gathering_stream() -> AbstractContextManager[object]:
            return pending.on_side_stream(streams.filling_stream)

        def on_reduction_stream() -> AbstractContextManager[object]:
            return pending.on_side_stream(reduction_stream[0])

        def record_launch() -> None:
            reduction_stream[:] = [_torch.current_stream(group.mesh.device)]

        self.pre_forward = (group.follow_stream, *self.pre_forward, streams.record_use)
        self.pre_backward = (*self.pre_backward, streams.record_use)

        def placed(ops: GatherOps) -> GatherOps:
            wait = (*_within(on_gathering_stream, ops.wait), streams.record_use)
            drop = _within(on_gathering_stream, ops.drop)
            return GatherOps((streams.record_fill, *ops.launch), wait, drop, ops.free)

        gather, regather = placed(self.gather), placed(self.regather)
        freed = () if group.settings.keeps_storage else (streams.record_free,)
        free = (*_within(streams.on_allocating_stream, gather.free), *freed)
        self.gather = gather._replace(free=free)
        self.keep = _within(streams.on_allocating_stream, self.keep)
        launch = _within(streams.on_filling_stream, regather.launch)
        self.regather = regather._replace(launch=launch)
        self.accumulate = _within(streams.on_last_user, self.accumulate)
        for all_reduces, (launch, *stages) in self.stages.items():
            launch = _within(streams.on_last_user, (*launch, record_launch))
            on_stream = (_within(on_reduction_stream, stage) for stage in stages)
            self.stages[all_reduces] = (launch, *on_stream)


def reduced_together(
    group: Any, reduced: Sequence[ShardedParam]
) -> Iterator[tuple[type[Reduction], list[Bucket], list[ShardedParam], torch.dtype]]:
    """Yield the class of each reduction, and its buckets, parameters and dtype.

    If the parameters have several reduce dtypes, the real ones are promoted to one dtype, and the
    complex ones to another. If no promotion exists, each dtype has a separate reduction.
    """
    dtypes = {param: group.unsynced.get(param.name) or reduce_dtype(param) for param in reduced}
    widest: dict[bool, torch.dtype] = {}
    for is_complex in (False, True):
        alike = {dtype for dtype in dtypes.values() if dtype.is_complex == is_complex}
        with suppress(RuntimeError, TypeError):  # no promotion (float8), or `alike` is empty
            widest[is_complex] = reduce(torch.promote_types, alike)
    planned: dict[tuple[Any, ...], dict[Bucket, list[ShardedParam]]] = {}
    for bucket in group.buckets:
        is_local = bucket.mesh.num_ranks == 1 and group.settings.all_reduce_hook is None
        reduction = LocalReduction if is_local else bucket.reduction or Reduction
        for param in bucket.params:
            if param in dtypes:
                dtype, is_offloaded = dtypes[param], param.offload is not None
                key = bucket.mesh, reduction, widest.get(dtype.is_complex, dtype), is_offloaded
                planned.setdefault(key, {}).setdefault(bucket, []).append(param)
    for (_, reduction, dtype, _), params in planned.items():
        yield reduction, list(params), list(chain.from_iterable(params.values())), dtype


def _within(context: Callable[[], AbstractContextManager[object]], ops: Sequence[Op]) -> Ops:
    """Return one operation that runs ``ops`` in a context, or none if there are no ``ops``."""

    def run() -> None:
        with context():
            for op in ops:
                op()

    return (run,) if ops else ()
