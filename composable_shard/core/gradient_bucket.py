"""The flat buffers in which gradients are reduced.

A gradient that is dense, evenly sharded and in a dtype that the reduce-scatter takes IS its input.
Everything else is copied into a buffer; small gradients share one. Behind them
travels one flag for each gradient, set by the ranks that have it: the reduced flag tells every rank
whether anybody did, without another collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch

from composable_shard import _torch
from composable_shard.core.bucket import matching_pieces
from composable_shard.core.layout import (
    BucketLayout,
    Packing,
    ParamLayout,
    end_to_end,
    own_step,
    plan_bucket,
)

# Which ranks have which gradients: a number for each, 1 or 0, that travels behind them ------------


class Flags:
    """Makes the flags of some gradients, once for each shard.

    They are repeated in memory: the fused kernels take no tensor that overlaps with itself.

    Args:
        num_shards: How many rows of flags to make.
        num_columns: How long each is; what is behind the flags is zeros.
        device: Where.
    """

    def __init__(self, num_shards: int, num_columns: int, device: torch.device) -> None:
        self._shape = num_shards, num_columns
        self._device = device
        self._kept: dict[tuple[torch.dtype, bool], tuple[list[bool], torch.Tensor]] = {}

    def rows(self, dtype: torch.dtype, present: list[bool]) -> torch.Tensor:
        """Return [num_shards, num_columns], made on the device.

        Those of a full set are kept; where each operation is a launch, the latest of another one,
        too: the same may be missing again.
        """
        key = dtype, all(present)
        known, flags = self._kept.get(key, (None, None))
        if flags is not None and known == present:
            return flags
        flags = torch.ones(*self._shape, dtype=dtype, device=self._device)
        padding = [False] * (self._shape[1] - len(present))
        start = 0
        for is_present, run in groupby([*present, *padding]):
            stop = start + len(list(run))
            if not is_present:
                flags[:, start:stop].zero_()
            start = stop
        if key[1] or _torch.has_streams(self._device):
            self._kept[key] = list(present), flags
        return flags


# Small gradients side by side, one row for each shard, with the flags behind them -----------------


def flags_travel_alone(layout: BucketLayout, num_flags: int, itemsize: int) -> bool:
    """Decide whether flags get a message of their own: where one costs less than copying them."""
    return layout.num_shards * num_flags * itemsize > layout.packing.cost_nbytes(1)


def packed_numels(layout: BucketLayout, num_flags: int, itemsize: int) -> list[int]:
    """Return the elements for each rank of the last messages: small gradients, and the flags.

    Padding is included.
    """
    numels = [layout.packed_numel, layout.aligned(num_flags)]
    if flags_travel_alone(layout, num_flags, itemsize):
        return [numel for numel in numels if numel]
    return [sum(numels)]


def goes_as_it_is(
    layout: ParamLayout, grad_dtype: torch.dtype, dtype: torch.dtype, *, widens: bool
) -> bool:
    """Tell whether a contiguous gradient is sent from where autograd left it.

    Args:
        layout: How it is cut; it has a message of its own.
        grad_dtype: Its dtype.
        dtype: That of the reduction.
        widens: Whether the reduce-scatter casts to that by itself.
    """
    fits = grad_dtype == dtype
    if widens and not fits:
        fits = torch.promote_types(grad_dtype, dtype) == dtype
    return fits and layout.is_even


class PackedGrads:
    """Packs gradients of one bucket for one message, and the flags with them or for another.

    Args:
        layout: Where they lie.
        num_flags: How many flags travel with them.
        dtype: Dtype of the message.
        device: Where it is made.
        fuses: Whether one kernel packs all; if not, what is there is copied one by one. A copy
            costs a launch on a device. On the CPU the kernel is the slower one where it pads.

    Attributes:
        numels: Elements of each message for each rank, padding included.
    """

    def __init__(
        self,
        layout: BucketLayout,
        num_flags: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fuses: bool,
    ) -> None:
        self._layout = layout
        self._flags = Flags(layout.num_shards, layout.aligned(num_flags), device)
        self._flags_are_alone = flags_travel_alone(layout, num_flags, dtype.itemsize)
        self.numels = packed_numels(layout, num_flags, dtype.itemsize)
        self._indices = [i for i in layout.packed if layout.params[i].numel]
        self._shape = (layout.num_shards, self.numels[0])
        self._dtype = dtype
        self._device = device
        self._fuses = fuses
        self._rows: _Rows | None = None
        paddings = dict(zip(layout.packed, layout.packed_paddings, strict=True))
        self._paddings = [paddings[index] for index in self._indices]
        self._zeros: dict[torch.dtype, torch.Tensor] = {}
        starts = [layout.shard_offsets[index] - layout.packed_offset for index in self._indices]
        self._places = [
            _place(layout.params[index], start, self._shape[1])
            for index, start in zip(self._indices, starts, strict=True)
        ]

    def pack(
        self, grads: Sequence[torch.Tensor | None], present: list[bool], *, clears: bool = False
    ) -> list[torch.Tensor]:
        """Return the messages, [num_shards * numel] each.

        Args:
            grads: The gradients of the bucket; ``None`` counts as zeros.
            present: Which flags to set.
            clears: Whether padding is zeros; it may be anything if not. One kernel that packs all
                makes it zeros whatever is asked.
        """
        members = [grads[index] for index in self._indices]
        if not self._flags_are_alone:
            return [self._packed(members, present, clears)]
        flags = self._flags.rows(self._dtype, present)
        if self._dtype == torch.float16:  # in which messages are divided before they are summed
            flags = flags.clone()
        packed = [self._packed(members, [], clears)] if members else []
        return [*packed, flags.view(-1)]

    def release(self) -> None:
        """Free the memory, or leave it to who still reads it; the views stay."""
        if self._rows is not None and self._rows.is_in_use:
            self._rows = None
        if self._rows is not None:
            _torch.free(self._rows.flat)

    def _packed(
        self, members: list[torch.Tensor | None], present: list[bool], clears: bool
    ) -> torch.Tensor:
        dtypes = {grad.dtype for grad in members if grad is not None}
        is_alike = len(dtypes) == 1
        if self._fuses and (is_alike or _torch.has_streams(self._device)):
            return self._fused(members, present, dtypes.pop() if is_alike else self._dtype)
        return self._copied(members, present, clears)

    def _copied(
        self, members: list[torch.Tensor | None], present: list[bool], clears: bool
    ) -> torch.Tensor:
        """Copy what is there and leave the padding alone, or clear it."""
        rows = self._allocated()
        if clears:
            rows.flat.zero_()
        into, sources = [], []
        if present:
            into, sources = [rows.flags], [self._flags.rows(self._dtype, present)]
        for place, regions, grad in zip(self._places, rows.regions, members, strict=True):
            if grad is None:
                for region in regions:
                    region.zero_()
            else:
                into += regions
                sources += place.cut(grad)
        if into:
            _torch.copy_all_(into, sources)
        return rows.flat.view(-1)

    def _allocated(self) -> _Rows:
        """Return memory that nobody else uses."""
        rows = self._rows
        if rows is None or rows.is_in_use:
            with torch.inference_mode(False):
                flat = _torch.empty(prod(self._shape), dtype=self._dtype, device=self._device)
                rows = _Rows(flat, self._shape, self._layout.packed_numel, self._places)
            self._rows = rows
        else:
            _torch.allocate(rows.flat)
        return rows

    def _fused(
        self, members: list[torch.Tensor | None], present: list[bool], dtype: torch.dtype
    ) -> torch.Tensor:
        """Pad, cast from ``dtype`` and pack in one kernel, which takes one dtype alone."""
        rows = _torch.empty(*self._shape, dtype=self._dtype, device=self._device)
        parts = []
        for index, grad, padding in zip(self._indices, members, self._paddings, strict=True):
            parts.append(self._as_rows(self._layout.params[index], grad, dtype))
            if padding:
                parts.append(self._padding(padding, dtype))
        if present:
            parts.append(self._flags.rows(dtype, present))
        _torch.chunk_cat_into(rows, parts)
        return rows.view(-1)

    def _padding(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros, [num_shards, numel], fewer than the alignment in a row."""
        num_shards, zeros = self._shape[0], self._zeros.get(dtype)
        if zeros is None:
            most = num_shards * self._layout.alignment
            zeros = torch.zeros(most, dtype=dtype, device=self._device)
            self._zeros[dtype] = zeros
        return zeros[: num_shards * numel].view(num_shards, numel)

    def _as_rows(
        self, param: ParamLayout, grad: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a packed gradient, cut along dim 0 whatever its other dims."""
        if grad is None:
            return torch.zeros(param.rows, param.inner, dtype=dtype, device=self._device)
        if grad.dtype != dtype:
            grad = grad.to(dtype)
        return grad if param.dim == 0 else grad.reshape(param.rows, param.inner)


_Region = tuple[tuple[int, ...], tuple[int, ...], int]


class _Place(NamedTuple):
    """Where one gradient lies in the rows.

    Attributes:
        regions: Shape, strides and offset of its elements there, without padding.
        numels: Elements of each region, if the gradient has to be cut for them.
    """

    regions: list[_Region]
    numels: list[int]

    def cut(self, grad: torch.Tensor) -> list[torch.Tensor]:
        """View a gradient as the regions are shaped."""
        if not self.numels:
            return [grad]
        if len(self.numels) == 1:
            return [grad.reshape(self.regions[0][0])]
        parts = grad.reshape(-1).split_with_sizes(self.numels)
        return [part.view(region[0]) for part, region in zip(parts, self.regions, strict=True)]


class _Rows:
    """Memory for the rows of one reduction; its views cost more to make than it.

    Attributes:
        flat: All of it.
        regions: Views of it where each gradient lies.
        flags: Where the flags lie, [num_shards, num_flags].
    """

    def __init__(
        self,
        flat: torch.Tensor,
        shape: tuple[int, int],
        packed_numel: int,
        places: Sequence[_Place],
    ) -> None:
        self.flat = flat
        self.flags = flat.view(shape)[:, packed_numel:]
        self.regions = [[flat.as_strided(*one) for one in place.regions] for place in places]
        self._num_uses = _torch.num_uses(self.flat)

    @property
    def is_in_use(self) -> bool:
        """Whether somebody else has a view of it, such as a message that is being sent."""
        return _torch.num_uses(self.flat) > self._num_uses


def _place(layout: ParamLayout, start: int, width: int) -> _Place:
    """Plan where a gradient lies in rows of ``width`` elements, in each of them from ``start``.

    One row of the gradient in each row is the gradient as it is. Otherwise it is cut into the rows
    that are full and the rest.
    """
    if layout.rows_per_shard == 1:
        strides = list(torch.empty(layout.shape, device="meta").stride())
        strides[layout.dim] = width
        return _Place([(layout.shape, tuple(strides), start)], [])
    count, rest = layout.num_full_shards, layout.num_remaining_rows * layout.inner
    regions: list[_Region] = []
    if count:
        regions.append(((count, layout.shard_numel), (width, 1), start))
    if rest:
        regions.append(((rest,), (1,), count * width + start))
    return _Place(regions, [prod(shape) for shape, _, _ in regions])


# The flat buffers in which gradients are reduced --------------------------------------------------


@dataclass
class GradTransfer:
    """One reduce-scatter launch of a bucket.

    Attributes:
        outputs: Views of ``result``, one for each input.
        inputs: Gradients and scratch regions, [num_shards * n] each.
        result: This rank's reduced shards, then the flags, then padding.
        present: For each gradient, whether this rank has it.
    """

    result: torch.Tensor
    present: list[bool]
    outputs: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)

    def stay(self) -> None:
        """Let the inputs of one shard be the result, without a collective."""
        for out, full in zip(self.outputs, self.inputs, strict=True):
            out.copy_(full[: out.numel()])


def scratch_places(params: Sequence[ParamLayout], itemsize: int) -> tuple[list[int], int]:
    """Return where gradients that are copied to be sent start in a scratch, and where it ends.

    Args:
        params: How they are cut; each has a message of its own.
        itemsize: Bytes of an element of the scratch.
    """
    return end_to_end([param.gathered_numel for param in params], own_step(itemsize))


class _Copies:
    """Copies to make in one call.

    Torch makes them in one kernel where all sources are of one dtype and each is laid out as what
    it is copied into; a single one that is not lets all go one by one.
    """

    def __init__(self) -> None:
        self._into: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self._into.append(into)
        self._sources.append(source)

    def make(self) -> None:
        if self._into:
            _torch.copy_all_(self._into, self._sources)


class GradBucket:
    """Gradients that are reduced together, in one dtype.

    Attributes:
        layout: Where the shards of each gradient lie in the result.
        dtype: Dtype of the reduction.
    """

    def __init__(
        self,
        params: Sequence[ParamLayout],
        num_shards: int,
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing,
        narrowest_itemsize: int | None = None,
    ) -> None:
        self.layout = layout = plan_bucket(
            tuple(params), num_shards, dtype.itemsize, packing, narrowest_itemsize
        )
        self.dtype = dtype
        self._device = device
        fuses = _torch.has_streams(device) or all(layout.params[i].is_even for i in layout.packed)
        self._packed = PackedGrads(layout, len(params), dtype, device, fuses=fuses)

    def start_reduce(
        self,
        grads: Sequence[torch.Tensor | None],
        *,
        widens: bool = False,
        reads_padding: bool = False,
    ) -> GradTransfer:
        """Turn gradients, ``None`` where this rank has none, into reduce-scatter inputs.

        The gradients are given away: the reduction may overwrite them.

        Args:
            grads: The gradients, in the order of the layout.
            widens: Whether the reduce-scatter casts to the dtype of the reduction by itself.
            reads_padding: Whether it looks at padding, which must be zeros then.
        """
        layout = self.layout
        result = self._empty(layout.shard_numel + layout.aligned(len(grads)))
        transfer = GradTransfer(result, [grad is not None for grad in grads])
        own = (*layout.direct, *layout.permuted)
        fulls = {index: self._as_it_is(index, grads[index], widens=widens) for index in own}
        rest = {index: grads[index] for index, full in fulls.items() if full is None}
        copied = self._copied(rest, clears=reads_padding) if rest else {}
        for index, full in fulls.items():
            start = layout.shard_offsets[index]
            transfer.outputs.append(result[start : start + layout.params[index].shard_numel])
            transfer.inputs.append(copied[index] if full is None else full)
        end = result[layout.packed_offset :] if layout.packed_offset else result
        numels = self._packed.numels
        transfer.outputs += end.split_with_sizes(numels) if len(numels) > 1 else [end]
        transfer.inputs += self._packed.pack(grads, transfer.present, clears=reads_padding)
        return transfer

    def release(self) -> None:
        """Free what was packed, once it is sent."""
        self._packed.release()

    def divide(self, transfer: GradTransfer, divisor: float) -> None:
        """Divide what a collective has summed."""
        if divisor != 1:
            transfer.result.div_(divisor)

    @property
    def numel(self) -> int:
        """Elements of a result without its flags."""
        return self.layout.shard_numel

    def flag(self, transfer: GradTransfer, index: int) -> None:
        """Note in a result that there is a gradient, whatever the ranks had."""
        transfer.result[self.numel + index].fill_(1)

    def anybody_has(self, transfer: GradTransfer) -> torch.Tensor | None:
        """Return for each gradient if any rank had it, or zero; ``None`` if this one has them all.

        Hazard: reading a flag waits for the device. Guard: it is copied to the host beside compute,
        and read at the end of the backward.
        """
        if all(transfer.present):
            return None
        start, num_flags = self.numel, len(transfer.present)
        return transfer.result[start : start + num_flags]

    def _as_it_is(
        self, index: int, grad: torch.Tensor | None, *, widens: bool
    ) -> torch.Tensor | None:
        """View a gradient as [num_shards * shard_numel]; ``None`` if it has to be copied for it."""
        param = self.layout.params[index]
        if grad is None or not param.gathers_in_order or not grad.is_contiguous():
            return None
        goes = goes_as_it_is(param, grad.dtype, self.dtype, widens=widens)
        return grad.view(-1) if goes else None

    def _copied(
        self, grads: Mapping[int, torch.Tensor | None], *, clears: bool
    ) -> dict[int, torch.Tensor]:
        """Copy gradients as shards laid end to end, and cast them, into one scratch.

        Args:
            grads: By index; ``None`` counts as zeros.
            clears: Whether padding is zeros; it may be anything if not.

        Returns:
            The shards of each, [num_shards * shard_numel].
        """
        params = [self.layout.params[index] for index in grads]
        starts, end = scratch_places(params, self.dtype.itemsize)
        scratch = self._empty(end)
        parts, blank, alike, others = [], [], _Copies(), _Copies()
        for start, param, grad in zip(starts, params, grads.values(), strict=True):
            part = scratch[start : start + param.gathered_numel]
            parts.append(part)
            if grad is None:
                blank.append(part)
                continue
            if clears and not param.is_even:
                blank.append(part[param.numel :] if param.gathers_in_order else part)
            if not param.gathers_in_order:
                for full, shards in matching_pieces(param, grad.reshape(-1), part):
                    others.add(shards, full)
            else:
                copies = alike if grad.is_contiguous() else others
                copies.add(part[: param.numel].view(param.shape), grad)
        _torch.zero_all_(blank)
        alike.make()
        others.make()
        return dict(zip(grads, parts, strict=True))

    def _empty(self, *shape: int) -> torch.Tensor:
        return _torch.with_pages(_torch.empty(*shape, dtype=self.dtype, device=self._device))
