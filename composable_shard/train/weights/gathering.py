"""Full tensors out of the shards of all ranks: what travels together, and how it becomes whole.

The tensors of a model are cut into buckets, in their order. What of a bucket is sharded over the
same ranks travels in one launch for each axis of the mesh that cuts it: the last axis first, so
that every byte is sent once to each rank that gets it. A shard is cast before it is sent.

Three tensors over 2 ranks; A is large and its rows are even, so that it arrives in place::

    rank 0   | A0 |   | b0 c0 |      gathered   | A0 A1 |   | b0 c0 | b1 c1 |
    rank 1   | A1 |   | b1 c1 |                  in place    copied out
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from composable_shard import _torch
from composable_shard.core.layout import ParamLayout, aligned
from composable_shard.core.placement import matching_pieces
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.pending import Waitable
from composable_shard.mesh import axis_of
from composable_shard.train.full import boxes_of, full_copy, shape_of, sharded_axes
from composable_shard.train.ranks import Together
from composable_shard.train.weights.entries import Entry

MIN_DIRECT_NBYTES = 1 << 16
"""Bytes of a shard from which on it travels in a message of its own, straight into place."""

ALIGNMENT_NBYTES = 16
"""What shards in one message are aligned to: the widest element."""


MakePlain = Callable[[torch.Tensor], torch.Tensor]


# What travels together ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Planned:
    """A tensor that is to be made whole.

    Attributes:
        names: Under which names it is given away.
        entry: What it is in the model.
        dtype: In what dtype.
        make_plain: Makes a plain tensor of a shard that is a tensor subclass of several tensors;
            ``None`` to leave such ones in their own form.
    """

    names: tuple[str, ...]
    entry: Entry
    dtype: torch.dtype
    make_plain: MakePlain | None

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """How many bytes it has as a whole."""
        return self.entry.tensor.numel() * self.dtype.itemsize

    @cached_property
    def is_whole_by_class(self) -> bool:
        """Whether only DTensor and its own class know how it becomes whole."""
        tensor = self.entry.tensor
        if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
            return True
        return _torch.is_subclass(self.entry.local) and self.make_plain is None

    @property
    def device(self) -> torch.device:
        """Where it is made whole."""
        tensor = self.entry.tensor
        if isinstance(tensor, DTensor):
            return torch.device(tensor.device_mesh.device_type)
        return tensor.device

    @property
    def axes(self) -> tuple[int, ...]:
        """Over which axes of its mesh it is to be gathered."""
        tensor = self.entry.tensor
        if self.is_whole_by_class or not isinstance(tensor, DTensor):
            return ()
        return sharded_axes(tensor.device_mesh, tensor.placements)

    def values(self) -> torch.Tensor:
        """Return what this rank holds, as a plain tensor in whatever dtype."""
        plain = self.entry.plain
        if plain is not None:
            return plain.detach()
        assert self.make_plain is not None
        subclass = self.entry.local.detach()
        made = self.make_plain(subclass)
        if _torch.is_subclass(made) or made.shape != subclass.shape:
            raise TypeError(
                f"Expected a plain tensor of shape {list(subclass.shape)} of the "
                f"{type(subclass).__name__} '{self.entry.names[0]}', got a {type(made).__name__} "
                f"of shape {list(made.shape)}"
            )
        return made


def runs_within(planned: Sequence[Planned], limit: int | None) -> list[list[Planned]]:
    """Cut tensors into runs of at most some bytes, in their order.

    Args:
        planned: The tensors.
        limit: Bytes of a run, but for one that has a larger tensor alone; ``None`` for a single
            run.
    """
    runs: list[list[Planned]] = [[]]
    nbytes = 0
    for one in planned:
        if limit is not None and runs[-1] and nbytes + one.nbytes > limit:
            runs.append([])
            nbytes = 0
        runs[-1].append(one)
        nbytes += one.nbytes
    return runs


# From whom to whom --------------------------------------------------------------------------------


class Route:
    """The ranks of a mesh over some of whose axes tensors are sharded, and memory for messages.

    Attributes:
        extents: How many ranks there are along each of the axes, the last axis first.
    """

    def __init__(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> None:
        self._mesh, self._axes = mesh, axes
        self.extents = [mesh.size(axis) for axis in reversed(axes)]
        own = mesh.get_coordinate()
        assert own is not None
        self._own = tuple(own)
        self._rooms: dict[object, torch.Tensor] = {}

    @cached_property
    def channels(self) -> list[Channel]:
        """The collectives along each of the axes, the last axis first."""
        channels = [Channel(axis_of(self._mesh, axis)) for axis in reversed(self._axes)]
        for channel in channels:
            channel.set_label("full weights")
        return channels

    @property
    def device(self) -> torch.device:
        """Where messages are."""
        return self.channels[0].mesh.device

    def most_of(self, tensor: torch.Tensor) -> int:
        """Return the most elements of a tensor that a rank holds: first chunks are longest."""
        return prod(shape_of(tensor, (0,) * self._mesh.ndim))

    def holders(self) -> Iterator[tuple[int, ...]]:
        """Yield the coordinates of the ranks that share tensors with this one, in their order."""
        extents = [
            range(self._mesh.size(axis)) if axis in self._axes else (self._own[axis],)
            for axis in range(self._mesh.ndim)
        ]
        yield from product(*extents)

    def stages(self, to: int | None) -> list[tuple[bool, int | None]]:
        """Return of the gathers in which this rank takes part whether it is given the tensors.

        And to whose place on the axis all of them go, if not to everybody.

        Args:
            to: The rank that gets the tensors, of the job; all get them if ``None``.
        """
        if to is None:
            return [(True, None)] * len(self.extents)
        (target,) = torch.nonzero(self._mesh.mesh == to).tolist() or [None]
        others = [axis for axis in range(self._mesh.ndim) if axis not in self._axes]
        if target is None or any(self._own[axis] != target[axis] for axis in others):
            return []
        stages = list[tuple[bool, int | None]]()
        for axis in reversed(self._axes):
            stages.append((self._own[axis] == target[axis], target[axis]))
            if self._own[axis] != target[axis]:
                break
        return stages

    def room(self, key: object, nbytes: int) -> torch.Tensor:
        """Return bytes to send or to receive: for the same key always the same ones.

        They are free again when a message has been copied out. Messages to different ranks may be
        on the way at the same time.
        """
        room = self._rooms.pop(key, None)
        if room is None or len(room) < nbytes:
            room = None  # or both would be held
            room = _torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._rooms[key] = room
        return room[:nbytes]


Routes = dict[object, Route]
"""The ways that tensors of one model take."""


def route_of(planned: Planned, routes: Routes) -> Route | None:
    """Return which way a tensor takes; ``None`` if this rank has all of it."""
    if not planned.axes:
        return None
    key = mesh, axes = cast(DTensor, planned.entry.tensor).device_mesh, planned.axes
    if key not in routes:
        routes[key] = Route(mesh, axes)
    return routes[key]


# On the way ---------------------------------------------------------------------------------------


class Gather(NamedTuple):
    """A gather along one axis.

    Attributes:
        num_ranks: Among how many ranks.
        inputs: Bytes of each of this rank's messages.
        is_given: Whether this rank is given what the others send.
        to: To whose place on the axis everything goes; ``None`` for all of them.
    """

    num_ranks: int
    inputs: tuple[int, ...]
    is_given: bool
    to: int | None


class Message:
    """What of a bucket takes one route.

    Args:
        route: The route.
        planned: The tensors.
        to: The rank that gets them, of the job; all do if ``None``.

    Attributes:
        gathers: What is launched, one after another. Large tensors arrive in place; all others
            travel in one message.
    """

    def __init__(self, route: Route, planned: Sequence[Planned], to: int | None) -> None:
        self._route, self._to = route, to
        self._direct = [one for one in planned if _arrives_in_place(one, route)]
        self._packed = [one for one in planned if not _arrives_in_place(one, route)]
        self._slots: dict[Planned, slice] = {}
        self._packed_nbytes = 0
        for one in self._packed:
            if most := route.most_of(one.entry.tensor):
                end = self._packed_nbytes + most * one.dtype.itemsize
                self._slots[one] = slice(self._packed_nbytes, end)
                self._packed_nbytes = aligned(end, ALIGNMENT_NBYTES)
        self.gathers: list[Gather] = []
        packed = (self._packed_nbytes,) if self._slots else ()
        inputs = (*(one.nbytes // route.extents[0] for one in self._direct), *packed)
        stages = route.stages(to) if inputs else ()
        for extent, (is_given, place) in zip(route.extents, stages, strict=False):
            self.gathers.append(Gather(extent, inputs, is_given, place))
            packed = inputs = tuple(extent * nbytes for nbytes in packed)
        self._works: list[Waitable] = []
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[list[torch.Tensor]] = []
        self._whole: dict[Planned, torch.Tensor] = {}

    def prepare(self, *, arrives: bool) -> None:
        """Copy what is sent and have the memory to receive; nothing is launched yet.

        Args:
            arrives: Whether this rank gets the tensors.
        """
        if not self.gathers:
            return
        sent = [_contiguous(one.values(), self._route.device, one.dtype) for one in self._direct]
        self._inputs = [own.view(-1).view(torch.uint8) for own in sent]
        if self._slots:
            self._inputs.append(self._pack())
        if arrives:
            self._whole = {one: self._empty(one) for one in self._direct}
        outputs = [full.view(-1).view(torch.uint8) for full in self._whole.values()]
        for place, gather in enumerate(self.gathers):
            if self._slots and gather.is_given:
                nbytes = gather.num_ranks * gather.inputs[-1]
                outputs.append(self._route.room((self._to, place), nbytes))
            self._outputs.append(outputs)
            outputs = []

    def launch(self) -> None:
        """Launch the gather along the first axis."""
        if self._inputs:
            self._works = self._launch(0, self._inputs)

    def wait(self) -> None:
        """Wait for what was launched, and gather along further axes."""
        for place in range(len(self._outputs)):
            if place:
                self._works = self._launch(place, self._outputs[place - 1])
            while self._works:
                self._works.pop(0).wait()
        self._inputs = []

    def _launch(self, place: int, inputs: list[torch.Tensor]) -> list[Waitable]:
        channel, to = self._route.channels[place], self.gathers[place].to
        if to is None:
            return channel.gather(self._outputs[place], inputs)
        return channel.gather_to(to, self._outputs[place], inputs)

    def copy_out(self) -> dict[Planned, torch.Tensor]:
        """Return the whole tensors, on a rank that gets them."""
        whole, self._whole = self._whole, {}
        whole |= {one: self._empty(one) for one in self._packed}
        outputs, self._outputs = self._outputs, []
        if self._slots:
            rows = outputs[-1][-1].view(-1, self._packed_nbytes)
            pairs = [pair for one in self._slots for pair in self._pieces(one, whole[one], rows)]
            _torch.copy_all_([full for full, _ in pairs], [held for _, held in pairs])
        return whole

    def _empty(self, one: Planned) -> torch.Tensor:
        shape = tuple(one.entry.tensor.shape)
        return _torch.empty(*shape, dtype=one.dtype, device=self._route.device)

    # In one message -------------------------------------------------------------------------

    def _slot(self, one: Planned, message: torch.Tensor) -> torch.Tensor:
        """View the place of a tensor in messages, [*, nbytes], as the elements of a shard."""
        place = self._slots[one]
        return message[..., place.start : place.stop].view(one.dtype)

    def _pack(self) -> torch.Tensor:
        message = self._route.room((self._to, "sent"), self._packed_nbytes)
        into, values = list[torch.Tensor](), list[torch.Tensor]()
        for one in self._slots:
            own = one.values()
            if own.numel():
                into.append(self._slot(one, message)[: own.numel()].view(own.shape))
                values.append(own)
        _torch.copy_all_(into, values)
        return message

    def _pieces(
        self, one: Planned, whole: torch.Tensor, rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair views of a whole tensor with views of what all ranks have sent of it."""
        tensor, shards = cast(DTensor, one.entry.tensor), self._slot(one, rows)
        placement = tensor.placements[one.axes[0]]
        if len(one.axes) == 1 and type(placement) is Shard:
            layout = ParamLayout(tuple(tensor.shape), placement.dim, len(rows))
            yield from matching_pieces(layout, whole.view(-1), shards)
            return
        for coordinate, shard in zip(self._route.holders(), shards, strict=True):
            shape = shape_of(tensor, coordinate)
            held = shard[: prod(shape)].view(shape)
            for box, own in boxes_of(tensor, coordinate):
                yield whole[box], held[own]


def _contiguous(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor laid out row by row: itself if it is what is asked for, or one copy."""
    if tensor.is_contiguous() and tensor.device == device and tensor.dtype == dtype:
        return tensor
    return _torch.empty(*tensor.shape, dtype=dtype, device=device).copy_(tensor)


def _arrives_in_place(one: Planned, route: Route) -> bool:
    """Tell whether the shards of a tensor, laid end to end, are the tensor, and large."""
    if len(route.extents) > 1:
        return False
    tensor, (axis,) = cast(DTensor, one.entry.tensor), one.axes
    placement, num_shards = tensor.placements[axis], route.extents[0]
    is_in_order = type(placement) is Shard and placement.dim == 0
    is_large = one.nbytes // num_shards >= MIN_DIRECT_NBYTES
    return is_in_order and is_large and tensor.shape[0] % num_shards == 0


class Bucket:
    """Tensors that become whole together.

    Args:
        planned: The tensors, in their order.
        routes: The ways that they take; added to.
        to: The rank that gets them, of the job; all do if ``None``.

    Attributes:
        arrives: Whether this rank gets them.
        nbytes: How many bytes the tensors have as a whole.
        messages: What is sent.
        by_class: Those that only their class makes whole.
    """

    def __init__(self, planned: Sequence[Planned], routes: Routes, to: int | None) -> None:
        self._planned = planned
        self.arrives = to is None or not dist.is_initialized() or to == dist.get_rank()
        self.nbytes = sum(one.nbytes for one in planned)
        by_route: dict[Route, list[Planned]] = {}
        for one in planned:
            route = route_of(one, routes)
            if route is not None:
                by_route.setdefault(route, []).append(one)
        self.messages = [Message(*taken, to) for taken in by_route.items()]
        self.by_class = [one for one in planned if one.is_whole_by_class]
        self._whole: dict[Planned, torch.Tensor] = {}

    def prepare(self) -> None:
        """Have what it needs on the way."""
        for message in self.messages:
            message.prepare(arrives=self.arrives)

    def launch(self) -> None:
        """Launch what may be waited for later. Collective: a gather for each route."""
        for message in self.messages:
            message.launch()

    def wait(self) -> None:
        """Wait until everything is there.

        Collective: a gather for each further axis of a route; what makes whole the tensors of which
            only their class knows how.
        """
        for message in self.messages:
            message.wait()
        for one in self.by_class:
            full = full_copy(one.entry.tensor, one.name)
            if self.arrives:
                self._whole[one] = full

    def whole(self, device: torch.device | None) -> deque[tuple[Planned, torch.Tensor]]:
        """Return the tensors in memory of their own, where this rank gets them. Collective: none.

        Args:
            device: Where they are to be; where messages are if absent.
        """
        found, self._whole = self._whole, {}
        tensors: deque[tuple[Planned, torch.Tensor]] = deque()
        if not self.arrives:
            return tensors
        for message in self.messages:
            found |= message.copy_out()
        for one in self._planned:
            full = found.pop(one, None)
            if full is None:  # all of it is here
                values, place = one.values(), device or one.device
                full = _torch.empty(*values.shape, dtype=one.dtype, device=place).copy_(values)
            tensors.append((one, full if device is None else full.to(device)))
        return tensors


# Whole tensors all at once ------------------------------------------------------------------------

BUCKET_NBYTES = 64 * 2**20
"""How many bytes of full tensors are gathered at once where all of them are kept."""


def full_copies(
    tensors: Sequence[DTensor],
    names: Sequence[str],
    *,
    first_only: bool = False,
    device: torch.device | None = None,
) -> list[torch.Tensor | None]:
    """Return full tensors in memory of their own, in the order of their DTensors.

    Args:
        tensors: The DTensors; all ranks of their meshes give the same ones.
        names: What messages call them.
        first_only: Whether only the first rank of each mesh gets them; the others get ``None``.
        device: Where they are to be; that of the mesh if absent.

    Collective: for each bucket a gather over the axes that shard; what tensor subclasses and
        ``Partial`` placements need; with ``first_only`` 8 bytes along each axis before each bucket.
    Memory: all of them where they are kept; besides, a bucket on its way.
    """
    planned = [
        Planned((name,), Entry((name,), tensor), tensor.dtype, make_plain=None)
        for name, tensor in zip(names, tensors, strict=True)
    ]
    routes, found = Routes(), dict[Planned, torch.Tensor]()
    meshes = [tensor.device_mesh for tensor in tensors] if first_only else []
    together = Together(meshes, "gathering full tensors")
    for run in runs_within(planned, BUCKET_NBYTES):
        by_target: dict[int | None, list[Planned]] = {}
        for one in run:
            ranks = cast(DTensor, one.entry.tensor).device_mesh.mesh
            to = int(ranks.flatten()[0]) if first_only else None
            by_target.setdefault(to, []).append(one)
        for to, several in by_target.items():
            bucket = Bucket(several, routes, to)
            with together.noting_failure():
                bucket.prepare()
            together.go_on()
            bucket.launch()
            bucket.wait()
            with together.noting_failure():
                found |= bucket.whole(device)
    together.go_on()
    return [found.get(one) for one in planned]
