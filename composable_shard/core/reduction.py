"""Reduces gradients, from the unsharded parameters to ``.grad`` of the sharded parameters.

The methods of `Reduction` are operations of the program of a group (`program.py`). The program
launches a reduction when backward finishes the group (phase reduce), and later waits for the
reduction and writes ``.grad`` (phase deliver). The placements of a gradient show its stage
(`GradStage`):

- ``unreduced``: ``Partial`` on all data-parallel axes. It was accumulated without sync.
- ``reduced_over_shards``: ``Partial`` on the replicate axis only.
- ``sharded``: the placements of the parameter. It is completely reduced.

Large gradients are sent in messages of their own, and the others are packed into one message. At
its end, each rank sends a flag for each parameter: 1 if the rank has a gradient, else 0. If the
reduced flag is 0, no rank had a gradient, and ``.grad`` stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.layout import is_packed, plan_messages
from composable_shard.core.placement import GradStage, Placements, TensorLayout, packing_alignment
from composable_shard.core.storage import USER_GRAD_DTYPE, Bucket, ShardedParam, user_grad_dtype
from composable_shard.core.transport import host
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.pending import Pending, launching_stream, on_side_stream
from composable_shard.errors import ShardError
from composable_shard.policy import copies_overlap_compute

_grad = attrgetter("grad")
_dtype = attrgetter("dtype")
_is_sparse = attrgetter("is_sparse")
_flattened = methodcaller("reshape", -1)


# The divisor of a gradient ------------------------------------------------------------------------


@dataclass(frozen=True)
class Division:
    """The division of a sum of gradients, in up to three steps.

    Attributes:
        before: The divisor before the reduction; it keeps sums of float16 in range.
        divisor: The divisor that the collective applies; ``None`` for a sum.
        after: The divisor after the reduction, which `Reduction.average` applies.
    """

    before: float
    divisor: float | None
    after: float


def plan_division(
    total: float, dtype: torch.dtype, *, is_mean: bool, averages: bool, divides: bool
) -> Division:
    """Split the division of a sum of gradients between before, during and after the collective.

    Args:
        total: The divisor of the sum over the ranks.
        dtype: The dtype of the sum. Since ``float16`` overflows early, its gradients are divided
            before the sum, by a power of two that divides ``total`` and is near its square root.
        is_mean: Whether ``total`` is the number of ranks.
        averages: Whether the collective can average.
        divides: Whether the collective can divide by any number, and rounds only afterwards.
    """
    if divides or (is_mean and averages and dtype != torch.float16):
        return Division(1.0, float(total), 1.0)
    before = 1.0
    if dtype == torch.float16:
        while before * before < total and total % (2 * before) == 0:
            before *= 2
    return Division(before, None, total / before)


# The reduction of gradients -----------------------------------------------------------------------


class Reduction:
    """The reduction of the gradients of some parameters over one mesh, in one dtype.

    Attributes:
        dtype: The dtype in which gradients are added.
        reduced: One flat buffer with the reduced shards and flags. It exists from the launch until
            ``.grad`` is written. If :meth:`_allocate` makes the outputs, it exists from the wait,
            and the direct gradients are not in it. `LocalReduction` has a list of gradients.
        num_flags: The number of flags at the end of ``reduced``.
        params: The parameters, in the order of ``reduced``.
        is_offloaded: Whether gradients must be copied to the memory of the host.
        over_replicas: A separate object for the reduction over the replicas (`hybrid.py` sets it);
            ``None`` if this object also does that reduction.
    """

    reduced: Any
    over_replicas: Reduction | None = None
    is_exchanged = False  # True in a class that exchanges encoded gradients, all to all

    def __init__(
        self,
        buckets: Sequence[Bucket],
        params: Sequence[ShardedParam],
        dtype: torch.dtype,
        group: Any,
    ) -> None:
        """Plan the reduction.

        Args:
            buckets: Buckets over one mesh.
            params: The parameters of these buckets that take part in the reduction.
            dtype: The dtype of the reduction.
            group: The group of the parameters, for its settings and channels.
        """
        self.dtype, self._group, self._mesh = dtype, group, buckets[0].mesh
        self._channel: Channel = group.channels[self._mesh]
        self._compute_dtype = buckets[0].compute_dtype
        self._pending: list[Pending] = []  # the oldest first
        self.has_streams = _torch.has_streams(self._mesh.device)
        self._copies_overlap = copies_overlap_compute(params[0].offload, self._mesh.device)
        self.is_offloaded = self._copies_overlap or params[0].device != self._mesh.device
        # A direct gradient has its own message, which is a copy only if it is cast. The others are
        # packed into one message.
        sent_alone = partial(is_direct, dtype, buckets[0].message_cost)
        self.params = sorted(params, key=sent_alone, reverse=True)
        self._num_direct = sum(map(sent_alone, params))
        self._uncast_dtype = sent_dtype(buckets, dtype, self._channel)
        self._unsharded = tuple(param.unsharded for param in self.params)
        # Other parameters may have widened `dtype`. To get the same result as without them, first
        # round each gradient to its own reduce dtype, if that is narrower than the gradient's.
        self._own_dtypes = [reduce_dtype(param) for param in self.params]
        sizes = [param.compute_dtype.itemsize for param in self.params]
        own = enumerate(self._own_dtypes)
        self._to_round = [(i, to) for i, to in own if to != dtype and to.itemsize < sizes[i]]
        self._sharded = tuple(param.sharded for param in self.params)
        self._is_tensor_parallel = any(p.placement.unsharded_spec is not None for p in self.params)
        flat = [param.layout.flat for param in self.params]
        self._may_lack_rows = any(each.num_nonempty < each.num_shards for each in flat)
        self._is_cut_in_rows = all(param.layout.is_cut_in_rows for param in self.params)
        self._plan()
        settings, num_shards = group.settings, self._mesh.num_shards
        # Write gradients that no rank had, too: zeros, or values that the all-reduce hook fills in.
        self._writes_unused = settings.zeros_for_unused or settings.all_reduce_hook is not None
        total = settings.divisor  # for all ranks; the all-reduce already divides by `num_replicas`
        self.num_replicas = self._mesh.num_replicas
        self._divisor = num_shards if total is None else total / self.num_replicas
        self.division = plan_division(
            self._divisor,
            dtype,
            is_mean=total is None,
            averages=self._channel.can_average() and not settings.sums_only,
            divides=num_shards > 1 and self._channel.reduce_scatter.divides,
        )
        if num_shards == 1:  # there is no reduce-scatter
            self.division = Division(1.0, None, self._divisor)

    def _plan(self) -> None:
        """Lay out the messages and the results."""
        device, num_shards = self._mesh.device, self._mesh.num_shards
        self._layouts = [param.grad_layout for param in self.params]
        layouts = [layout.flat for layout in self._layouts]
        self.num_flags = len(layouts)
        self._final_dtypes = [final_grad_dtype(param, self.dtype) for param in self.params]
        self._alignment = packing_alignment((self.dtype, *self._final_dtypes), device)
        self._message_numels, starts = plan_messages(layouts, self._num_direct, self._alignment)
        self._packed_shape = (num_shards, self._message_numels[-1])
        self._numel = sum(self._message_numels)
        flags = num_shards, self.num_flags
        self._all_flags = torch.ones(flags, dtype=self._compute_dtype, device=device)
        packed = layouts[self._num_direct :]
        paddings = [-layout.shard_numel % self._alignment for layout in packed]
        self._paddings = [
            self._all_flags.new_zeros(num_shards * padding) if padding else None
            for layout, padding in zip(packed, paddings, strict=True)
            if layout.numel  # parameters without elements are not sent
        ]
        self._packed_views: list[torch.Tensor] = []  # the place of each gradient in `_packed`
        has_one_row_each = num_shards > 1 and {layout.rows_per_shard for layout in packed} == {1}
        if self._is_cut_in_rows and has_one_row_each and not _torch.aligns(device):
            rows = _torch.empty(*self._packed_shape, dtype=self.dtype, device=device)
            numels = [*(layout.inner for layout in packed), self.num_flags]
            *columns, flags_column = rows.split_with_sizes(numels, 1)
            pairs = zip(columns, packed, strict=True)
            self._packed_views = [
                column[: layout.num_rows].view(layout.shape) for column, layout in pairs
            ]
            self._packed_views.append(flags_column)
            self._packed = rows.view(-1)
            self._allocate_packed, self._free_packed = _torch.memory_ops(self._packed)
            self._free_packed()
        settings, self._is_cast = self._group.settings, {*self._final_dtypes} != {self.dtype}
        is_used_whole = settings.has_flat_grads or settings.all_reduce_hook is not None
        is_moved = self.is_offloaded or self.is_exchanged or self._mesh.num_replicas > 1
        is_late = self._channel.reduce_scatter.allocates_late
        self._is_flat = not is_late or is_used_whole or is_moved or self._is_cast
        if not self._is_flat:  # each direct gradient begins its own output, the others share one
            starts = [max(0, start - self._numel + self._message_numels[-1]) for start in starts]
        flat, rank = torch.empty(self._numel, device="meta"), self._mesh.shard_rank
        at = zip(self._layouts, starts, strict=True)
        shards = [layout.local(flat[start:], rank) for layout, start in at]
        views = [(shard.shape, shard.stride(), shard.storage_offset()) for shard in shards]
        self._view_args = list(zip(*views, strict=True))  # their shapes, strides and starts
        self._specs = self._specs_of("sharded")
        for param, dtype in zip(self.params, self._final_dtypes, strict=True):
            allow_grad_dtype(param.sharded, dtype)

    def _specs_of(self, stage: GradStage) -> list[_torch.DTensorSpec]:
        pairs = zip(self.params, self._final_dtypes, strict=True)
        return [param.spec(stage, dtype) for param, dtype in pairs]

    # Phase reduce ---------------------------------------------------------------------------

    def take_grads(self) -> None:
        """Take the gradients from the unsharded parameters and clear their ``.grad``.

        Collective: under tensor parallelism only, see `ParamPlacement.local_grad`.
        """
        self._grads = list(map(_grad, self._unsharded))
        for param in self._unsharded:
            param.grad = None
        if self._is_tensor_parallel:
            self._grads = [
                None if grad is None else param.placement.local_grad(grad)
                for param, grad in zip(self.params, self._grads, strict=True)
            ]
        for index, dtype in self._to_round:
            grad = self._grads[index]
            self._grads[index] = None if grad is None else grad.to(dtype)

    def add_unsynced(self) -> None:
        """Add unreduced gradients of earlier backwards to the gradients of this backward."""
        for index, param in enumerate(self.params if self._group.unsynced else ()):
            old_grad: Any = redistributed_grad(param)
            grad = self._grads[index]
            if stage_of(param, old_grad) == "unreduced":
                local = _torch.local_tensor(old_grad).to(self._mesh.device)
                factor = self._unreduced_factor()
                local = local if factor == 1 else local / factor
                param.sharded.grad = None
                self._grads[index] = local if grad is None else local + grad.to(local.dtype)

    def launch(self) -> None:
        """Launch the reduce-scatter of the gradients; send zeros where this rank has none."""
        inputs = self._pack()
        device = self._mesh.device
        stream = launching_stream(device) if self.has_streams else None
        if self._mesh.num_shards == 1:  # nothing to scatter: each gradient is one shard
            self.reduced = torch.cat(inputs)
            self._pending = [Pending([] if stream is None else [stream.record_event()])]
            return
        outputs: Any = () if self._is_flat else self._allocate()
        if self._is_flat:
            out = self.reduced = _torch.empty(self._numel, dtype=self.dtype, device=device)
            outputs = out.split_with_sizes(self._message_numels) if self._num_direct else [out]
        works = self._channel.reduce(outputs, inputs, self.dtype, self.division.divisor)
        to_keep = () if self._channel.reduce_scatter.keeps_inputs else inputs
        self._pending = [Pending(works, self._channel.reducing, stream, to_keep)]

    def _allocate(self) -> Iterator[torch.Tensor]:
        """Allocate the outputs one by one, each when it is written.

        The heap of the CPU then has gaps of their sizes, which freed activations have left. One
        buffer for all outputs would make the heap grow.
        """
        empty = partial(_torch.empty, dtype=self.dtype, device=self._mesh.device)
        self._alone = []
        for numel in self._message_numels[:-1]:
            self._alone.append(empty(numel))
            yield self._alone[-1]
        self.reduced = empty(self._message_numels[-1])
        yield self.reduced

    def _pack(self) -> list[torch.Tensor]:
        """Return the messages: one for each large gradient; one for the others and the flags."""
        grads: list[Any] = self._grads
        flags = self._all_flags
        del self._grads
        self._all_have_grads = not any(map(is_, grads, repeat(None)))
        if not self._all_have_grads:
            flags = flags.clone()
            for index, (layout, grad) in enumerate(zip(self._layouts, grads, strict=True)):
                if grad is None:
                    flags[:, index] = 0
                    grads[index] = layout.new_zeros(self._all_flags, self.dtype)
        if any(map(_is_sparse, grads)):
            refuse_sparse(self.params, grads)
        if not self._is_cut_in_rows:
            grads = [  # cut along dim 0: drop leading dims of size 1, or stack the padded shards
                layout.in_memory_order(grad).flatten(0, layout.flat.dim)
                if layout.flat.outer == 1
                else layout.padded_shards(grad)
                for layout, grad in zip(self._layouts, grads, strict=True)
                if layout.flat.numel  # parameters without elements are not sent
            ]
        direct = list(map(_flattened, grads[: self._num_direct]))
        if direct and not all(map(is_, map(_dtype, direct), repeat(self._uncast_dtype))):
            numels, device = [grad.numel() for grad in direct], self._mesh.device
            scratch = _torch.empty(sum(numels), dtype=self.dtype, device=device)
            # Other ranks may send uncast gradients: the collective takes any dtypes then.
            cast = list(scratch.split_with_sizes(numels))
            _torch.copy_all_(cast, direct)  # one call, and one kernel on accelerators
            direct = cast
        to_pack = grads[self._num_direct :]
        if self._alignment > 1:
            padded = chain.from_iterable(zip(to_pack, self._paddings, strict=True))
            to_pack = [tensor for tensor in padded if tensor is not None]
        messages = [*direct, self._pack_shards([*to_pack, flags])]
        if self.division.before != 1:
            _torch.divide_all_(messages, self.division.before)
        return messages

    def _pack_shards(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Cut each tensor along dim 0, pad and cast it; row i has shard i of every tensor.

        On accelerators this is one kernel. On the CPU, copies to ``_packed_views`` are faster, but
        only possible if each shard has one row.
        """
        if self._packed_views:
            self._allocate_packed()
            self._packed.zero_()
            _torch.copy_each_(self._packed_views, tensors)
            return self._packed
        # If all tensors have one dtype, `chunk_cat` casts them.
        if not all(map(is_, map(_dtype, tensors), repeat(tensors[-1].dtype))):
            tensors = [tensor.to(self.dtype) for tensor in tensors]
        packed = _torch.empty(*self._packed_shape, dtype=self.dtype, device=self._mesh.device)
        _torch.chunk_cat(tensors, 0, self._mesh.num_shards, out=packed)
        return packed.view(-1)

    def accumulate_unsynced(self) -> None:
        """Add the gradients to ``.grad`` of the sharded parameters, as ``Partial`` DTensors.

        If there is no ``.grad`` yet, it gets the dtype of :func:`reduce_dtype`, as in FSDP2.
        A reduced ``.grad`` becomes ``Partial`` on every rank, also on ranks that did not use the
        parameter. Each rank keeps its rows, times num_shards, and zeros elsewhere; the mean over
        the ranks is the reduced gradient.
        """
        self.take_grads()
        grads, factor = self._grads, self._unreduced_factor()
        del self._grads
        if self._mesh.num_ranks > 1:
            refuse_sparse(self.params, grads)
        for param, grad, dtype in zip(self.params, grads, self._own_dtypes, strict=True):
            old_grad: Any = redistributed_grad(param)
            stage = self._record_unsynced(param, old_grad)
            if grad is not None:
                grad = grad.to(dtype)
                grad = grad if factor == 1 else grad * factor
            if stage == "unreduced":
                if grad is not None:
                    _torch.local_tensor(old_grad).add_(grad.to(param.local.device))
                continue
            if old_grad is None:
                allow_grad_dtype(param.sharded, dtype)  # all ranks call it, even without a gradient
            else:
                total = self._unreduced_form(param, old_grad)
                grad = total if grad is None else total.add_(grad)
            if grad is not None:
                grad = grad.to(param.local.device)
                spec = param.spec("unreduced", grad.dtype)
                assign_grad(param.sharded, _torch.from_local(grad, spec))

    def _record_unsynced(self, param: ShardedParam, grad: Any) -> GradStage | None:
        """Record in `ParamGroup.unsynced` that gradients are added to ``grad`` without a reduction.

        If ``grad`` is reduced, also record a dtype that does not round the sum.

        Returns:
            The stage of ``grad``, which may be ``None``.
        """
        unsynced, stage = self._group.unsynced, stage_of(param, grad)
        unsynced.setdefault(param.name, None)
        if stage == "sharded":
            unsynced[param.name] = torch.promote_types(self.dtype, grad.dtype)
        return stage

    def _unreduced_factor(self) -> float:
        """Return f such that the mean over ranks of f times a gradient is sum / divisor."""
        divisor = self._group.settings.divisor
        return 1.0 if divisor is None else self._mesh.num_ranks / divisor

    def _unreduced_form(self, param: ShardedParam, grad: torch.Tensor) -> torch.Tensor:
        """Turn a reduced gradient into an unreduced one, whose mean over all ranks is ``grad``."""
        shard = _torch.local_tensor(grad).to(self._mesh.device)
        dtype = torch.promote_types(shard.dtype, self.dtype)
        full = param.layout.new_zeros(shard, dtype)
        # Not `param.layout.shard_of`: `hybrid.py` overrides it to view only this replica's part.
        rows = TensorLayout.shard_of(param.layout, full, self._mesh.shard_rank)
        rows.copy_(shard)
        if param.layout.dim is not None:
            rows.mul_(self._mesh.num_shards)
        return full

    # Phase deliver --------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the oldest pending collectives."""
        self._pending[0].wait()
        del self._pending[0]  # if the wait above fails, `discard` waits for the other works
        if self._packed_views:
            self._free_packed()

    def average(self) -> None:
        """Divide the sum by ``division.after``; a program omits this operation if that is 1."""
        self.reduced.div_(self.division.after)

    def order_after_shards(self, stream: torch.Stream) -> None:
        """Let ``stream``, which reduces over the replicas, wait for the reduce-scatter."""
        self._pending[0].order_before(stream)

    def skip_replicas(self) -> None:
        """Skip the reduction over the replicas; the reduced shards differ between replicas.

        An earlier, reduced ``.grad`` gets the placements of stage ``reduced_over_shards`` on every
        replica. Its values are equal on all replicas, so the later mean keeps them.
        """
        self._specs = self._specs_of("reduced_over_shards")
        for param in self.params:
            grad: Any = redistributed_grad(param)
            if self._record_unsynced(param, grad) == "sharded":
                local = _torch.local_tensor(grad)
                spec = param.spec("reduced_over_shards", local.dtype)
                param.sharded.grad = _torch.from_local(local, spec)

    def launch_over_replicas(self) -> None:
        """Launch the all-reduce, including shards that earlier backwards left in ``.grad``."""
        self._specs = self._specs_of("sharded")
        added = self._add_earlier_shards()
        works = self._channel.all_reduce(self.reduced)
        stream = launching_stream(self._mesh.device)
        self._pending.append(Pending(works, self._channel.reducing, stream, added))

    def _add_earlier_shards(self) -> list[torch.Tensor]:
        """Add the shards that earlier backwards left in ``.grad``, and return them."""
        flags, added = self.reduced[-self.num_flags :], list[torch.Tensor]()
        shards = list(map(self.reduced.as_strided, *self._view_args))
        for index, grad in self._take_reduced_over_shards():
            added.append(grad.to(self.reduced.device))
            shards[index].add_(added[-1])
            flags[index].fill_(1)
        return added

    def _take_reduced_over_shards(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Take the shards in ``.grad`` that are not reduced over the replicas, by index."""
        for index, param in enumerate(self.params):
            grad: Any = param.sharded.grad
            if stage_of(param, grad) == "reduced_over_shards":
                param.sharded.grad = None
                yield index, _torch.local_tensor(grad)

    def download(self) -> None:
        """Launch copies of offloaded gradients or of flags to the host; else write ``.grad``.

        Reading flags from the device would block the host. Flags are not needed if this rank has
        all gradients, or if unused parameters get gradients, too. If users have hooked gradients,
        as for an optimizer in backward, ``.grad`` is written at once, so that the hooks run during
        the backward.
        """
        if self.is_offloaded:
            self.reduced = self._to_host(self.reduced)
        elif self._all_have_grads or self._writes_unused or _torch.has_grad_hooks(*self._sharded):
            self.write_grads()
        else:
            self._flags = host.download(self.reduced[-self.num_flags :])

    def write_downloaded(self) -> None:
        """Wait for the copies and write ``.grad``, unless :meth:`download` has written it."""
        if "reduced" in self.__dict__:
            host.synchronize()
            self.write_grads()

    def _to_host(self, tensor: Any) -> Any:
        return host.download(tensor) if self._copies_overlap else tensor.cpu()

    def call_hook(self) -> None:
        """Call the user's hook with the reduced shards."""
        settings = self._group.settings
        with on_side_stream(settings.hook_stream):
            settings.all_reduce_hook(self.reduced[: -self.num_flags])

    def write_grads(self, *, after_autograd: bool = False) -> None:
        """Write the reduced shards to ``.grad`` of the sharded parameters, or add them to it.

        The loss may have a penalty on the sharded parameters. On a rank without rows, autograd
        cannot add the gradient of this penalty to a ``.grad`` that we wrote. So if autograd has yet
        to write the gradient of the penalty, and ranks may lack rows, this call does nothing, and
        the end of the backward calls again, with ``after_autograd``.
        """
        if self._may_lack_rows and not after_autograd and _torch.current_backward() != -1:
            leaves = _torch.in_graphs(self._sharded)
            if leaves and any(map(_torch.will_run, _torch.accumulate_nodes(leaves))):
                _torch.on_backward_end(partial(self.write_grads, after_autograd=True))
                return
        are_hooked = _torch.has_grad_hooks(*self._sharded)
        results, to_add = list(self._results()), []  # before the context: users' codecs may run
        with _torch.without_overrides():
            for index, shard, spec in results:
                sharded, grad = self._sharded[index], _torch.from_local(shard, spec)
                if are_hooked or sharded.grad is not None:
                    to_add.append((self.params[index], grad))
                else:
                    sharded.grad = grad
        with torch.no_grad():
            for param, grad in to_add:
                add_grad(param, _torch.call_grad_hooks(param.sharded, grad))
                _torch.call_post_accumulate_grad_hooks(param.sharded)

    def _results(self) -> Iterable[tuple[int, torch.Tensor, _torch.DTensorSpec]]:
        """Return the index of each parameter that gets a gradient, with the shard and its spec."""
        reduced = self.reduced
        del self.reduced
        results = zip(range(self.num_flags), self._shards_of(reduced), self._specs, strict=True)
        if self._all_have_grads or self._writes_unused:  # no need to read the flags
            return results
        return compress(results, self.__dict__.pop("_flags", reduced[-self.num_flags :]).tolist())

    def _shards_of(self, reduced: torch.Tensor) -> list[torch.Tensor]:
        """View this rank's shards in the reduced buffer, each in its final dtype."""
        dtypes = self._final_dtypes
        if self._is_cast and dtypes.count(dtypes[0]) == len(dtypes):
            reduced = reduced.to(dtypes[0])
        outputs = chain(self.__dict__.pop("_alone", ()), repeat(reduced))
        with _torch.without_autograd():
            shards = list(map(torch.Tensor.as_strided, outputs, *self._view_args))
        if self._is_cast:
            shards = [shard.to(dtype) for shard, dtype in zip(shards, dtypes, strict=True)]
        return shards

    def discard(self) -> None:
        """Drop all gradients that are not in ``.grad`` yet, after a failed backward."""
        for param in self._unsharded:
            param.grad = None
        while self._pending:
            self._pending.pop().drop()
        if self._packed_views:
            self._free_packed()
        # `extension.py` sets `_received`.
        for name in ("_grads", "_received", "reduced", "_alone", "_flags"):
            self.__dict__.pop(name, None)


class LocalReduction(Reduction):
    """The reduction over a mesh of one rank, without communication."""

    def launch(self) -> None:
        """Keep the gradients: they are the result, and there are no flags to read."""
        self.reduced, self._all_have_grads, self._pending = self._grads, True, [Pending([])]
        del self._grads
        for index, param in enumerate(self.params if self._writes_unused else ()):
            if self.reduced[index] is None:
                self.reduced[index] = param.layout.new_zeros(self._all_flags, self.dtype)

    def average(self) -> None:
        """Divide the gradients by the divisor of the settings; by 1 if there is none."""
        _torch.divide_all_([grad for grad in self.reduced if grad is not None], self._divisor)

    def _to_host(self, grads: Any) -> Any:
        to_host = super()._to_host
        return [None if grad is None else to_host(grad) for grad in grads]

    def _results(self) -> Iterable[tuple[int, torch.Tensor, _torch.DTensorSpec]]:
        columns = range(self.num_flags), self.reduced, self._final_dtypes, self._specs
        del self.reduced
        for index, grad, dtype, spec in zip(*columns, strict=True):
            if grad is not None:
                yield index, grad.to(dtype), spec


def refuse_sparse(params: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]) -> None:
    """Raise if a gradient is sparse: sparse gradients are not reduced over ranks."""
    for param, grad in zip(params, grads, strict=True):
        if grad is not None and grad.is_sparse:
            raise ShardError(
                f"Expected a dense gradient of '{param.name}', got a sparse one; set sparse=False, "
                "or pass it as ignored_params and reduce its gradient yourself"
            )


# The gradient of a sharded parameter --------------------------------------------------------------


def is_partial(grad: torch.Tensor | None) -> TypeGuard[DTensor]:
    """Return whether a gradient is still to be averaged over some ranks."""
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)


def stage_of(param: ShardedParam, grad: Any) -> GradStage | None:
    """Return how far the reduction of a gradient has come; ``None`` if there is no gradient."""
    if grad is None:
        return None
    if not is_partial(grad):
        return "sharded"
    is_unreduced = grad.placements == param.placement.unreduced
    return "unreduced" if is_unreduced else "reduced_over_shards"


def is_direct(dtype: torch.dtype, cost: int | None, param: ShardedParam) -> bool:
    """Return whether a gradient has its own message: it is large, and needs no padding."""
    flat = param.layout.flat
    return flat.is_even and not is_packed(flat, dtype.itemsize, cost)


def sent_dtype(buckets: Sequence[Bucket], summed: torch.dtype, channel: Channel) -> torch.dtype:
    """Return the dtype that gradients with their own message may have when they are sent."""
    dtypes = {bucket.compute_dtype for bucket in buckets}
    dtype = dtypes.pop()
    fits = not dtypes and torch.promote_types(dtype, summed) == summed
    return dtype if fits and channel.reduce_scatter.widens else summed


def reduce_dtype(param: ShardedParam) -> torch.dtype:
    """Return the dtype in which a gradient would be reduced if it were the only one."""
    # Users may set ``grad_dtype`` to ``None``, which allows any dtype.
    is_set, user_dtype = user_grad_dtype(param.sharded)
    if is_set and user_dtype is None and param.policy.reduce_dtype is None:
        return param.compute_dtype
    return param.policy.reduction_dtype(param.dtype, user_dtype)


def final_grad_dtype(param: ShardedParam, reduced: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter's reduced gradient in ``.grad``."""
    is_set, user_dtype = user_grad_dtype(param.sharded)
    if is_set and user_dtype is None:
        return reduced
    return user_dtype or param.policy.grad_dtype or param.dtype


def allow_grad_dtype(sharded: nn.Parameter, dtype: torch.dtype) -> None:
    """Let ``.grad`` have a dtype that torch would refuse.

    A change makes the program out of date, so all ranks must call this function, or none.
    """
    allowed = sharded.grad_dtype
    if allowed is not None and allowed != dtype:
        is_default = allowed == sharded.dtype
        sharded.__dict__[USER_GRAD_DTYPE] = (False, None) if is_default else (True, allowed)
        sharded.grad_dtype = None


def assign_grad(sharded: nn.Parameter, grad: torch.Tensor) -> None:
    """Set ``.grad``, even if torch would refuse its dtype."""
    allow_grad_dtype(sharded, grad.dtype)
    sharded.grad = grad


def redistributed_grad(param: ShardedParam, *allowed: Placements) -> Any:
    """Return ``.grad`` of a sharded parameter, redistributed if autograd has written it.

    A loss on the sharded parameters, such as a penalty, gives gradients with other placements.

    Args:
        param: The parameter.
        allowed: The allowed placements, by default those of all stages. A gradient with others is
            redistributed to the first.

    Collective: the redistribution, if the placements are not allowed.
    """
    grad: Any = param.sharded.grad
    place = param.placement
    allowed = allowed or (place.sharded, place.reduced_over_shards, place.unreduced)
    if grad is not None and grad.placements not in allowed:
        with torch.no_grad():
            grad = param.sharded.grad = grad.redistribute(placements=allowed[0])
    return grad


def add_grad(param: ShardedParam, grad: Any) -> None:
    """Add a reduced gradient to ``.grad``; raise if ``.grad`` does not have this rank's rows.

    Collective: see :func:`redistributed_grad`.
    """
    old_grad = redistributed_grad(param, grad.placements, param.placement.sharded)
    if old_grad is None:
        assign_grad(param.sharded, grad)
        return
    local, old_local = _torch.local_tensor(grad), _torch.local_tensor(old_grad)
    if local.shape != old_local.shape:
        raise ShardError(
            f"Expected a gradient of local shape {list(local.shape)} in .grad of '{param.name}', "
            f"got {list(old_local.shape)}; assign one with the rows of this rank"
        )
    # A reduced ``old_grad`` is equal on all replicas, so the next mean over them keeps its value.
    if old_grad.placements != grad.placements:
        spec = _torch.spec_with_dtype(_torch.spec_of(grad), old_local.dtype)
        param.sharded.grad = _torch.from_local(old_local, spec)
    old_local.add_(local)


def clear_grad(leaf: torch.Tensor, *, to_none: bool) -> None:
    """Drop the gradient of a parameter, or fill it with zeros."""
    grad = leaf.grad
    if grad is None or to_none:
        leaf.grad = None
    elif is_partial(grad):
        _torch.local_tensor(grad).zero_()
    else:
        leaf.grad = torch.zeros_like(grad)
