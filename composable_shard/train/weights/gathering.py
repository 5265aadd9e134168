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
from composable_shard.train.full import full_copy
from composable_shard.train.ranks import Together
from composable_shard.train.weights.boxes import Parts, sharded_axes
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

    @property
    def is_copied(self) -> bool:
        """Whether what this rank holds is copied before it is sent from its own memory."""
        plain = self.entry.plain
        if plain is None or plain.dtype != self.dtype or not plain.is_contiguous():
            return True
        return plain.device.type != self.device.type

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
    """The ranks of a mesh over some of whose axes tensors are sharded.

    Attributes:
        own: The coordinate of this rank.
        extents: How many ranks there are along each of the axes, the last axis first.
    """

    def __init__(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> None:
        self._mesh, self._axes = mesh, axes
        self.extents = [mesh.size(axis) for axis in reversed(axes)]
        own = mesh.get_coordinate()
        assert own is not None
        self.own = tuple(own)

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

    @property
    def origin(self) -> tuple[int, ...]:
        """The coordinate of the rank that holds most: the first chunks are the longest."""
        return (0,) * self._mesh.ndim

    def holders(self) -> Iterator[tuple[int, ...]]:
        """Yield the coordinates of the ranks that share tensors with this one, in their order."""
        extents = [
            range(self._mesh.size(axis)) if axis in self._axes else (self.own[axis],)
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
        found = torch.nonzero(self._mesh.mesh == to).tolist()
        if not found:
            return []
        (target,) = found
        others = [axis for axis in range(self._mesh.ndim) if axis not in self._axes]
        if any(self.own[axis] != target[axis] for axis in others):
            return []
        stages = list[tuple[bool, int | None]]()
        for axis in reversed(self._axes):
            stages.append((self.own[axis] == target[axis], target[axis]))
            if self.own[axis] != target[axis]:
                break
        return stages


class Routes:
    """The ways that tensors of one model take, and the memory in which they are on the way.

    Attributes:
        parts: Knows which rank holds what of them.
    """

    def __init__(self) -> None:
        self.parts = Parts()
        self._routes: dict[object, Route] = {}
        self._rooms: dict[object, torch.Tensor] = {}

    def of(self, planned: Planned) -> Route | None:
        """Return which way a tensor takes; ``None`` if this rank has all of it."""
        axes = planned.axes
        if not axes:
            return None
        mesh = cast(DTensor, planned.entry.tensor).device_mesh
        key = mesh, axes
        if key not in self._routes:
            self._routes[key] = Route(mesh, axes)
        return self._routes[key]

    def room(self, key: object, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return bytes to send or to receive: for the same key always the same ones."""
        room = self._rooms.pop(key, None)
        if room is None or len(room) < nbytes:
            room = None  # or both would be held
            room = _torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._rooms[key] = room
        return room[:nbytes]


# On the way ---------------------------------------------------------------------------------------


class GatherCost(NamedTuple):
    """What one gather moves.

    Attributes:
        num_ranks: Among how many ranks.
        inputs: Bytes of each of this rank's messages.
        is_given: Whether this rank is given what the others send.
        is_everyones: Whether all of them are.
    """

    num_ranks: int
    inputs: tuple[int, ...]
    is_given: bool
    is_everyones: bool

    @property
    def sent(self) -> int:
        """Bytes that this rank sends."""
        peers = self.num_ranks - 1 if self.is_everyones else int(not self.is_given)
        return peers * sum(self.inputs)

    @property
    def received(self) -> int:
        """Bytes that this rank receives."""
        return (self.num_ranks - 1) * sum(self.inputs) if self.is_given else 0


class MessageCost(NamedTuple):
    """What of a bucket on one route takes of this rank, in bytes.

    Attributes:
        gathers: What is launched, one after another.
        rooms: What is kept for messages of this kind, by its key.
        direct: Of tensors that arrive in place.
        packed: Of those that are copied out.
        copied: Of shards that are cast, or laid out anew, to be sent from there.
    """

    gathers: tuple[GatherCost, ...]
    rooms: dict[object, int]
    direct: int
    packed: int
    copied: int


class Message:
    """What of a bucket takes one route.

    Args:
        route: The route.
        planned: The tensors.
        routes: All ways, and the memory on them.
        to: The rank that gets them, of the job; all do if ``None``.
    """

    def __init__(
        self, route: Route, planned: Sequence[Planned], routes: Routes, to: int | None
    ) -> None:
        self._route, self._routes, self._parts = route, routes, routes.parts
        self._to = to
        self._stages = route.stages(to)
        self._direct = [one for one in planned if _arrives_in_place(one, route)]
        self._packed = [one for one in planned if not _arrives_in_place(one, route)]
        self._slots: dict[Planned, slice] = {}
        self._packed_nbytes = 0
        for one in self._packed:
            most = routes.parts.shape(cast(DTensor, one.entry.tensor), route.origin)
            if prod(most):
                end = self._packed_nbytes + prod(most) * one.dtype.itemsize
                self._slots[one] = slice(self._packed_nbytes, end)
                self._packed_nbytes = aligned(end, ALIGNMENT_NBYTES)
        self._works: list[Waitable] = []
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[list[torch.Tensor]] = []
        self._whole: dict[Planned, torch.Tensor] = {}

    def prepare(self, *, arrives: bool) -> None:
        """Copy what is sent and have the memory to receive; nothing is launched yet.

        Args:
            arrives: Whether this rank gets the tensors.
        """
        if not self._stages:
            return
        device = self._route.device
        sent = [_contiguous(one.values(), device, one.dtype) for one in self._direct]
        self._inputs = [own.view(-1).view(torch.uint8) for own in sent]
        if arrives:
            self._whole = {one: self._empty(one) for one in self._direct}
        direct = [full.view(-1).view(torch.uint8) for full in self._whole.values()]
        packed = [self._pack()] if self._slots else []
        self._inputs += packed
        for stage, (is_given, _) in enumerate(self._stages):
            outputs: list[torch.Tensor] = []
            if is_given:
                extent = self._route.extents[stage]
                packed = [self._room(stage, extent * len(one)) for one in packed]
                outputs = direct + packed
            self._outputs.append(outputs)
            direct = []

    def launch(self) -> None:
        """Launch the gather along the first axis."""
        if self._inputs:
            self._works = self._launch(0, self._inputs)

    def wait(self) -> None:
        """Wait for what was launched, and gather along further axes."""
        for stage in range(len(self._stages) if self._inputs else 0):
            if stage:
                self._works = self._launch(stage, self._outputs[stage - 1])
            while self._works:
                self._works.pop(0).wait()
        self._inputs = []

    def _launch(self, stage: int, inputs: list[torch.Tensor]) -> list[Waitable]:
        (_, to), outputs = self._stages[stage], self._outputs[stage]
        channel = self._route.channels[stage]
        if to is None:
            return channel.gather(outputs, inputs)
        return channel.gather_to(to, outputs, inputs)

    def cost(self) -> MessageCost:
        """Return what it takes, which follows from shapes. Collective: none."""
        direct = [one.nbytes // self._route.extents[0] for one in self._direct]
        packed = [self._packed_nbytes] if self._slots else []
        gathers, rooms = list[GatherCost](), dict[object, int]()
        inputs = [*direct, *packed] if self._stages else []
        if inputs and packed:
            rooms[self._route, self._to, "sent"] = packed[0]
        for stage, (is_given, to) in enumerate(self._stages if inputs else ()):
            extent = self._route.extents[stage]
            gathers.append(GatherCost(extent, tuple(inputs), is_given, to is None))
            packed = inputs = [extent * nbytes for nbytes in packed]
            if is_given and packed:
                rooms[self._route, self._to, stage] = packed[0]
        return MessageCost(
            tuple(gathers),
            rooms,
            direct=sum(one.nbytes for one in self._direct),
            packed=sum(one.nbytes for one in self._packed),
            copied=sum(own for own, one in zip(direct, self._direct, strict=True) if one.is_copied),
        )

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

    def _room(self, what: object, nbytes: int) -> torch.Tensor:
        """Return bytes that are free again when the message has been copied out.

        Messages to different ranks may be on the way at the same time.
        """
        return self._routes.room((self._route, self._to, what), nbytes, self._route.device)

    # In one message -------------------------------------------------------------------------

    def _slot(self, one: Planned, message: torch.Tensor) -> torch.Tensor:
        """View the place of a tensor in messages, [*, nbytes], as the elements of a shard."""
        place = self._slots[one]
        return message[..., place.start : place.stop].view(one.dtype)

    def _pack(self) -> torch.Tensor:
        message = self._room("sent", self._packed_nbytes)
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
            shape = self._parts.shape(tensor, coordinate)
            held = shard[: prod(shape)].view(shape)
            for box, own in self._parts.boxes(tensor, coordinate):
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
        routes: The ways that they take.
        to: The rank that gets them, of the job; all do if ``None``.

    Attributes:
        arrives: Whether this rank gets them.
    """

    def __init__(self, planned: Sequence[Planned], routes: Routes, to: int | None) -> None:
        self._planned = planned
        self.arrives = to is None or not dist.is_initialized() or to == dist.get_rank()
        by_route: dict[Route, list[Planned]] = {}
        for one in planned:
            route = routes.of(one)
            if route is not None:
                by_route.setdefault(route, []).append(one)
        self._messages = [Message(*taken, routes, to) for taken in by_route.items()]
        self._whole: dict[Planned, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """How many bytes the tensors have as a whole."""
        return sum(one.nbytes for one in self._planned)

    def costs(self) -> list[MessageCost]:
        """Return what each of its messages takes."""
        return [message.cost() for message in self._messages]

    def nbytes_of_others(self) -> int:
        """Return the bytes of tensors that take no route."""
        others = [one for one in self._planned if not one.axes]
        by_class = [one for one in others if one.is_whole_by_class]
        parts = ((one.entry.tensor.numel(), _torch.leaves(one.entry.local)) for one in by_class)
        nbytes = sum(numel * leaf.itemsize for numel, leaves in parts for leaf in leaves)
        return nbytes + sum(one.nbytes for one in others if not one.is_whole_by_class)

    def names_by_class(self) -> list[str]:
        """Return the names of those that only their class makes whole."""
        return [one.name for one in self._planned if one.is_whole_by_class]

    def prepare(self) -> None:
        """Have what it needs on the way."""
        for message in self._messages:
            message.prepare(arrives=self.arrives)

    def launch(self) -> None:
        """Launch what may be waited for later. Collective: a gather for each route."""
        for message in self._messages:
            message.launch()

    def wait(self) -> None:
        """Wait until everything is there.

        Collective: a gather for each further axis of a route; what makes whole the tensors of which
            only their class knows how.
        """
        for message in self._messages:
            message.wait()
        for one in self._planned:
            if one.is_whole_by_class:
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
        for message in self._messages:
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
