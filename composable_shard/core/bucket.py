"""The flat buffers in which parameters are stored, travel and compute.

Parameters that are sharded on an inner dim come as shards laid end to end; small ones share a
message. The views are made once; the storage comes with every gather and goes with it.

A bucket holds parameters of one storage dtype and one compute dtype. Its sharded buffer is the
all-gather input; its unsharded buffer receives the gather and IS the unsharded parameters. With
one shard and no cast the two are the same storage and nothing ever moves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from einops import rearrange

from composable_shard import _torch
from composable_shard.core.layout import (
    BucketLayout,
    Packing,
    ParamLayout,
    packing_of,
    plan_bucket,
)
from composable_shard.core.param import Place, ShardedParam
from composable_shard.core.transport.collectives import may_read_padding
from composable_shard.core.transport.host import Lane, copies_beside_compute, pins, upload
from composable_shard.mesh import ShardMesh

# Where shards arrive that do not arrive in place, and how they are copied out ---------------------


class Staging:
    """The messages of one bucket that are copied out on arrival.

    Args:
        layout: Of the bucket.
        regions: By index, where each of those parameters belongs, flat.
        fuses: Whether one kernel copies all packed parameters out, instead of one copy for each.

    Attributes:
        messages: The buffers to receive, in the order of the layout, [num_shards * n] each.
    """

    def __init__(
        self, layout: BucketLayout, regions: Mapping[int, torch.Tensor], *, fuses: bool
    ) -> None:
        like = next(iter(regions.values()))
        self._flat = _torch.empty(layout.staging_numel, dtype=like.dtype, device=like.device)
        self.messages = [self._flat[start : start + numel] for start, numel in layout.staged]
        pieces = [
            piece
            for index, message in zip(layout.permuted, self.messages, strict=False)
            for piece in matching_pieces(layout.params[index], regions[index], message)
        ]
        self._packed: torch.Tensor | None = None
        if layout.packed_numel:
            packed = self.messages[-1].view(layout.num_shards, -1)
            unpacked = [regions[index].view(layout.num_shards, -1) for index in layout.packed]
            if fuses:
                self._split(layout, packed, unpacked)
            else:
                for index, rows in zip(layout.packed, unpacked, strict=True):
                    start = layout.shard_offsets[index] - layout.packed_offset
                    count = layout.params[index].num_nonempty_shards
                    column = packed[:count, start : start + rows.shape[1]]
                    pieces.append((rows[:count], column))
        self._into = [full for full, _ in pieces]
        self._sources = [shards for _, shards in pieces]

    def _split(
        self, layout: BucketLayout, packed: torch.Tensor, unpacked: list[torch.Tensor]
    ) -> None:
        """Plan the one kernel that copies out; it writes all columns, those of padding as well."""
        count = layout.num_packed_shards
        dropped = self._flat[self._flat.numel() - layout.dropped_numel :]
        self._packed = packed[:count]
        self._numels: list[int] = []
        self._unpacked: list[torch.Tensor] = []
        for rows, padding in zip(unpacked, layout.packed_paddings, strict=True):
            for part in (rows[:count], dropped[: count * padding].view(count, padding)):
                if part.numel():
                    self._numels.append(part.shape[1])
                    self._unpacked.append(part)

    def allocate(self) -> None:
        """Have the memory to receive into."""
        _torch.allocate(self._flat)

    def copy_out(self) -> None:
        """Put what has arrived into place."""
        if self._into:
            _torch.copy_all_(self._into, self._sources)
        if self._packed is not None:
            torch.split_with_sizes_copy(self._packed, self._numels, dim=1, out=self._unpacked)

    def free(self) -> None:
        """Free the memory."""
        _torch.free(self._flat)


def fuses_on(device: torch.device) -> bool:
    """Tell whether one kernel copies packed parameters out: where each copy costs a launch."""
    return _torch.has_streams(device)


def packing_over(mesh: ShardMesh) -> Packing:
    """Return how small parameters are packed that the ranks of a mesh send each other."""
    group, device = mesh.shard_group, mesh.device
    backend = None if group is None else _torch.backend_name(group, device)
    return packing_of(backend, is_aligned=_torch.has_streams(device))


def matching_pieces(
    layout: ParamLayout, full: torch.Tensor, shards: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair views of a whole parameter with views of its shards laid end to end.

    Copying one side to the other turns one form into the other, whatever the sharded dim; padding
    is touched by neither.

    Args:
        layout: How the parameter is cut.
        full: The parameter, flat, [numel] or longer.
        shards: Its shards, flat, [num_shards * shard_numel].
    """
    count, rest = layout.num_full_shards, layout.num_remaining_rows
    whole = full[: layout.numel].view(layout.outer, layout.rows, layout.inner)
    stacked = shards.view(layout.num_shards, layout.shard_numel)
    pieces = []
    if count:
        rows = count * layout.rows_per_shard
        pieces.append(
            (
                rearrange(
                    whole[:, :rows], "outer (shard row) inner -> shard outer row inner", shard=count
                ),
                stacked[:count].view(count, layout.outer, layout.rows_per_shard, layout.inner),
            )
        )
    if rest:
        numel = layout.outer * rest * layout.inner
        pieces.append(
            (
                whole[:, layout.rows - rest :],
                stacked[count, :numel].view(layout.outer, rest, layout.inner),
            )
        )
    return pieces


# The flat buffers in which parameters are stored, travel and compute ------------------------------


@dataclass
class Transfer:
    """What one unit puts into a collective launch: pairs of buffers, [num_ranks * n] and [n].

    Attributes:
        outputs: What to receive.
        inputs: What to send.
        lane: What brings the inputs from the host, or the output where nothing is sent, if any.
        buffer: What the outputs are parts of, if it has no memory yet: the gather gives it some, or
            it is allocated.
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    lane: Lane | None = None
    buffer: torch.Tensor | None = None


class GatherUnit(Protocol):
    """What a group gathers as a whole: a flat bucket or one parameter of a tensor subclass.

    Attributes:
        mesh: Over which ranks.
    """

    mesh: ShardMesh

    def start_gather(self) -> Transfer:
        """Allocate the unsharded storage and name the buffers to gather."""

    def finish_gather(self, transfer: Transfer) -> None:
        """Make the unsharded parameters valid after the collective."""

    def free(self) -> None:
        """Free the unsharded storage."""

    def keep(self, part: int, num_parts: int) -> list[torch.Tensor]:
        """Copy one of ``num_parts`` equal parts of what was gathered, to regather it from."""

    def start_regather(self, kept: list[torch.Tensor], num_parts: int) -> Transfer:
        """Allocate the unsharded storage and name the buffers to gather from kept parts."""

    def finish_regather(self, transfer: Transfer) -> None:
        """Make the unsharded parameters valid again after the collective."""


class ParamBucket:
    """Parameters that are stored in one flat buffer and gathered together.

    Attributes:
        params: The parameters, in the order of the layout.
        layout: Where each lies.
        sharded: This rank's shards, [layout.shard_numel], in the storage dtype.
        unsharded: All parameters, [layout.unsharded_numel], in the compute dtype; its storage is
            empty while the group is sharded.
        shares_storage: Whether ``unsharded`` is ``sharded`` itself.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.params = list(params)
        self.mesh = mesh = params[0].mesh
        self.layout = plan_bucket(
            tuple(param.layout for param in params),
            mesh.num_shards,
            compute_dtype.itemsize,
            packing_over(mesh),
            min(dtype.itemsize, compute_dtype.itemsize),
        )
        offload = params[0].offload
        is_pinned = device.type == "cpu" and offload is not None and pins(offload)
        self._is_on_host = device.type == "cpu" and copies_beside_compute(offload, mesh.device)
        is_there = device == mesh.device and not self._is_on_host
        self.shares_storage = mesh.num_shards == 1 and dtype == compute_dtype and is_there
        for param in self.params:
            param.shares_storage = self.shares_storage
        with torch.inference_mode(False):
            self.sharded = _torch.poison_when_unused(
                torch.zeros(
                    self.layout.shard_numel, dtype=dtype, device=device, pin_memory=is_pinned
                )
            )
        starts = sorted(self.layout.shard_offsets)
        for param, start in zip(self.params, self.layout.shard_offsets, strict=True):
            following = bisect_right(starts, start)
            param.place = Place(
                self.sharded, start, starts[following] if following < len(starts) else None
            )
        self.unsharded: torch.Tensor | None = self.sharded if self.shares_storage else None
        self._compute_dtype = compute_dtype
        self._inputs = [] if mesh.num_shards == 1 else self._messages(self.sharded)
        self._staging: Staging | None = None
        self._outputs: list[torch.Tensor] = []
        self._takes_memory = False
        self._needs_own_memory = True  # until it has been freed once

    def local_view(self, index: int) -> torch.Tensor:
        """Return the place of a parameter's local shard in the sharded buffer.

        A DTensor reports the storage offset of its local tensor as its own, and what copies and
        saves tensors takes one with an offset for a tensor with data of its own. So the shard has a
        storage object of its own that begins where it does, in the same memory.
        """
        start = self.layout.shard_offsets[index]
        shard = self.params[index].form.local(self.sharded[start:], self.mesh.shard_rank)
        return _torch.with_own_storage(shard)

    def start_gather(self) -> Transfer:
        if self.unsharded is None:
            self._create_unsharded()
        assert self.unsharded is not None
        layout = self.layout
        if not self._takes_memory or self._needs_own_memory:
            _torch.allocate(self.unsharded)
        if self._staging is not None:
            self._staging.allocate()
        if self.mesh.num_shards == 1:
            return self._fill(self.unsharded)
        if self._is_on_host:
            source = _torch.empty(
                layout.shard_numel, dtype=self._compute_dtype, device=self.mesh.device
            )
            lane = upload(self.sharded, source)
            return Transfer(self._outputs, self._messages(source), lane)
        source = self.sharded.to(self.mesh.device).to(self._compute_dtype)
        inputs = self._inputs if source is self.sharded else self._messages(source)
        buffer = self.unsharded if self._takes_memory else None
        return Transfer(self._outputs, inputs, buffer=buffer)

    def _fill(self, unsharded: torch.Tensor) -> Transfer:
        """Bring the parameters of one shard; nothing is sent."""
        if self.shares_storage:
            return Transfer()
        source = self.sharded[: unsharded.numel()]
        if self._is_on_host:
            return Transfer(lane=upload(source, unsharded))
        unsharded.copy_(source)
        return Transfer()

    def finish_gather(self, transfer: Transfer) -> None:
        if self._staging is not None:
            self._staging.copy_out()
            self._staging.free()

    def own_memory(self) -> None:
        """Have unsharded storage of this rank's own from now on, with what was gathered."""
        if self.unsharded is not None:
            _torch.own(self.unsharded)

    def free(self) -> None:
        """Free the unsharded storage.

        Hazard: a NumPy array of an unsharded parameter outlives it, and would show what is gathered
        next in shared memory. Guard: memory of its own tells that there are arrays, and the first
        gather has such; who makes arrays later on is not seen (``docs/design.md``). Test:
        ``test_memory_that_an_array_shares_is_kept``.
        """
        if (
            self.unsharded is not None
            and not self.shares_storage
            and _torch.has_memory(self.unsharded)
        ):
            self._needs_own_memory = not _torch.free(self.unsharded)
        if self._staging is not None:
            self._staging.free()

    def keep(self, part: int, num_parts: int) -> list[torch.Tensor]:
        assert self.unsharded is not None
        if may_read_padding(self.mesh.device):
            _torch.zero_ranges_(self.unsharded, self.layout.unwritten)
        return [_torch.poison_when_unused(self.unsharded.view(num_parts, -1)[part].clone())]

    def start_regather(self, kept: list[torch.Tensor], num_parts: int) -> Transfer:
        assert self.unsharded is not None
        _torch.allocate(self.unsharded)
        return Transfer([self.unsharded], kept)

    def finish_regather(self, transfer: Transfer) -> None:
        """Nothing is left to do: everything arrived in place."""

    def _messages(self, source: torch.Tensor) -> list[torch.Tensor]:
        return [source[start : start + numel] for start, numel in self.layout.messages]

    def _create_unsharded(self) -> None:
        layout = self.layout
        with torch.inference_mode(False):
            self.unsharded = _torch.empty(
                layout.unsharded_numel, dtype=self._compute_dtype, device=self.mesh.device
            )
            self._outputs = [self._unsharded_region(index) for index in layout.direct]
            in_place = sum(out.numel() for out in self._outputs)  # what is copied out costs more
            is_of_host = self.mesh.device.type == "cpu" and not self._is_on_host
            if layout.num_shards > 1 and is_of_host and 2 * in_place >= layout.unsharded_numel:
                self._takes_memory = _torch.is_big(self.unsharded)
            if layout.staging_numel:
                regions = {i: self._unsharded_region(i) for i in layout.permuted + layout.packed}
                self._staging = Staging(layout, regions, fuses=fuses_on(self.mesh.device))
                self._outputs += self._staging.messages

    def create_unsharded_params(self) -> None:
        """Make the unsharded parameters as views of the unsharded storage."""
        assert self.unsharded is not None
        for param, offset in zip(self.params, self.layout.unsharded_offsets, strict=True):
            flat = torch.empty(param.layout.gathered_numel, device="meta")
            param.create_unsharded(
                _torch.fresh_storage_view(self.unsharded, offset, param.form.whole(flat))
            )

    def _unsharded_region(self, index: int) -> torch.Tensor:
        assert self.unsharded is not None
        start = self.layout.unsharded_offsets[index]
        param = self.layout.params[index]
        permuted = index in self.layout.permuted
        numel = param.numel if permuted else param.gathered_numel
        return self.unsharded[start : start + numel]
