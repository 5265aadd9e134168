"""Gathering full tensors from the shards of all ranks, bucket by bucket.

The tensors of a model are cut into buckets, in their order. The tensors of a bucket that are
sharded over the same ranks travel in one launch for each mesh axis that shards them: the last axis
first, so that every byte is sent once to each receiver. Shards are cast before they are sent.

Two tensors over 2 ranks. A has an even number of rows, so it arrives in place. B has 3 rows, so
they are padded::

    rank 0   | A0 |   | b0 b1 |      gathered   | A0 A1 |   | b0 b1 | b2 -- |   | B0 B1 B2 |
    rank 1   | A1 |   | b2 -- |                  in place                       copied out

Before a bucket is launched, each rank sends a word to all others: it has received the previous
bucket and continues, or it has left or failed. So no bucket is launched without all of its ranks,
and the loss of a rank is an error on the others at their next bucket, not a hang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from composable_shard import _torch
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.pending import Waitable
from composable_shard.mesh import shard_mesh_of
from composable_shard.train.full import as_bytes, boxes_of, full_copy, shape_of, sharded_axes
from composable_shard.train.ranks import Ranks, naming_failures
from composable_shard.train.weights.entries import Entry

_LABEL = "full weights"

MakePlain = Callable[[torch.Tensor], torch.Tensor]


# Tensors to gather --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Planned:
    """A tensor to be gathered.

    Attributes:
        names: The names to yield it under.
        entry: The tensor in the model.
        dtype: The dtype of the full tensor.
        make_plain: Makes a plain tensor from a shard that is a tensor subclass of several tensors;
            ``None`` keeps such a shard in its own form.
        to: The global rank that receives the full tensor; all ranks if ``None``.
    """

    names: tuple[str, ...]
    entry: Entry
    dtype: torch.dtype
    make_plain: MakePlain | None = None
    to: int | None = None

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """The bytes of the full tensor."""
        return self.entry.tensor.numel() * self.dtype.itemsize

    @cached_property
    def is_whole_by_class(self) -> bool:
        """Whether only DTensor and its own class can make the full tensor."""
        tensor = self.entry.tensor
        is_partial = isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements)
        return is_partial or (_torch.is_subclass(self.entry.local) and self.make_plain is None)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes of its mesh to gather it over; none if this rank has the full tensor."""
        tensor = self.entry.tensor
        if self.is_whole_by_class or not isinstance(tensor, DTensor) or not tensor.numel():
            return ()
        return sharded_axes(tensor.device_mesh, tensor.placements)

    @property
    def arrives_in_place(self) -> bool:
        """Whether the concatenated shards of all ranks are the tensor."""
        tensor = cast(DTensor, self.entry.tensor)
        (axis, *others), mesh = self.axes, tensor.device_mesh
        placement = tensor.placements[axis]
        is_in_order = not others and type(placement) is Shard and placement.dim == 0
        return is_in_order and tensor.shape[0] % mesh.size(axis) == 0

    def values(self) -> torch.Tensor:
        """Return this rank's part, as a plain tensor of any dtype."""
        plain = self.entry.plain
        if plain is not None:
            return plain.detach().resolve_conj().resolve_neg()
        assert self.make_plain is not None
        subclass = self.entry.local.detach()
        made = self.make_plain(subclass)
        if _torch.is_subclass(made) or made.shape != subclass.shape:
            raise TypeError(
                f"Expected a plain tensor of shape {list(subclass.shape)} for "
                f"'{self.entry.names[0]}', got {type(made).__name__} of shape {list(made.shape)}"
            )
        return made

    def new_full(self, device: torch.device | None) -> torch.Tensor:
        """Return memory for the full tensor, by default on the device of its mesh, or its own."""
        tensor = self.entry.tensor
        home = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device
        return _torch.empty(*tensor.shape, dtype=self.dtype, device=device or torch.device(home))


Sized = TypeVar("Sized", Planned, torch.Tensor)


def runs_within(tensors: Sequence[Sized], limit: float) -> list[list[Sized]]:
    """Cut tensors into runs of at most ``limit`` bytes, in order; a larger tensor is alone."""
    runs: list[list[Sized]] = [[]]
    nbytes = 0
    for item in tensors:
        if runs[-1] and nbytes + item.nbytes > limit:
            runs.append([])
            nbytes = 0
        runs[-1].append(item)
        nbytes += item.nbytes
    return runs


# Messages and buckets -----------------------------------------------------------------------------


class Message:
    """The tensors of a bucket that are sharded over the same axes of a mesh.

    Args:
        mesh: The mesh.
        axes: The axes.
        to: The global rank that receives them; all ranks if ``None``.
        planned: The tensors.

    Attributes:
        sent: The bytes of each tensor that a rank sends first, padding included.
    """

    def __init__(
        self, mesh: DeviceMesh, axes: tuple[int, ...], to: int | None, planned: Sequence[Planned]
    ) -> None:
        self._mesh, self._axes, self._to, self._planned = mesh, axes[::-1], to, planned
        self._coordinate = tuple(mesh.get_coordinate() or ())
        first = (0,) * mesh.ndim  # the first chunks are the longest
        self.sent = {
            item: prod(shape_of(item.entry.tensor, first)) * item.dtype.itemsize for item in planned
        }
        self._launches: deque[Callable[[], list[Waitable]]] = deque()
        self._works: list[Waitable] = []
        self._full: dict[Planned, torch.Tensor] = {}
        self._rows: dict[Planned, torch.Tensor] = {}

    @cached_property
    def _channels(self) -> list[Channel]:
        """The collectives along each of the axes, the last axis first."""
        channels = [Channel(shard_mesh_of(self._mesh, axis)) for axis in self._axes]
        for channel in channels:
            channel.set_label(_LABEL)
        return channels

    def _receivers(self) -> list[tuple[int | None, bool]]:
        """Return for each gather its receiver on the axis, and whether this rank receives."""
        if self._to is None:
            return [(None, True)] * len(self._axes)
        (target,) = torch.nonzero(self._mesh.mesh == self._to).tolist() or [None]
        if target is None or not self._coordinate:
            return []
        differs = {axis for axis, place in enumerate(self._coordinate) if place != target[axis]}
        if not differs <= {*self._axes}:
            return []
        # This rank takes part until it has sent its values to another rank.
        last = next((n for n, axis in enumerate(self._axes) if axis in differs), len(self._axes))
        return [(target[axis], axis not in differs) for axis in self._axes[: last + 1]]

    def prepare(self) -> None:
        """Copy the input and allocate the output of each gather; nothing is launched yet."""
        device = self._channels[0].mesh.device
        inputs = [self._padded(item, nbytes) for item, nbytes in self.sent.items()]
        is_receiver = arrives(self._to)
        in_place = [item for item in self.sent if is_receiver and item.arrives_in_place]
        self._full = {item: item.new_full(device) for item in in_place}
        for channel, (to, receives) in zip(self._channels, self._receivers(), strict=False):
            num_ranks = channel.mesh.num_shards
            outputs = [
                as_bytes(self._full[item])
                if item in self._full
                else _torch.empty(num_ranks * len(message), dtype=torch.uint8, device=device)
                for item, message in zip(self.sent if receives else (), inputs, strict=False)
            ]
            gather = channel.gather if to is None else partial(channel.gather_to, to)
            self._launches.append(partial(gather, outputs, inputs))
            inputs = outputs
        if is_receiver:
            self._rows = dict(zip(self.sent, inputs, strict=True))

    def _padded(self, item: Planned, nbytes: int) -> torch.Tensor:
        """Return the padded bytes of this rank's part of a tensor: a view, or one copy."""
        part, device = item.values(), self._channels[0].mesh.device
        is_ready = part.is_contiguous() and part.device == device and part.dtype == item.dtype
        if is_ready and part.nbytes == nbytes:
            return as_bytes(part)
        padded = _torch.empty(nbytes, dtype=torch.uint8, device=device)
        padded[: part.numel() * item.dtype.itemsize].view(item.dtype).view(part.shape).copy_(part)
        return padded

    def launch(self) -> None:
        """Launch the next gather; keep its tensors until it has been waited for."""
        if self._launches:
            self._works = self._launches[0]()

    def wait(self) -> None:
        """Wait for the gather in flight, then launch and wait for gathers over further axes."""
        while self._launches:
            while self._works:
                self._works.pop(0).wait()
            self._launches.popleft()
            self.launch()

    def copy_out(self) -> dict[Planned, torch.Tensor]:
        """Return the full tensors, on a rank that receives them."""
        if not arrives(self._to):
            return {}
        found, self._full = self._full, {}
        rows, self._rows = self._rows, {}
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for item in self._planned:
            if item not in found:
                found[item] = item.new_full(self._channels[0].mesh.device)
                pairs += self._pieces(item, found[item], rows[item])
        _torch.copy_all_([full for full, _ in pairs], [held for _, held in pairs])
        return found

    def _pieces(
        self, item: Planned, full: torch.Tensor, rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair views of a full tensor with views of the shards of all ranks."""
        tensor, shards = item.entry.tensor, rows.view(-1, self.sent[item]).view(item.dtype)
        extents = [
            range(self._mesh.size(axis)) if axis in self._axes else (place,)
            for axis, place in enumerate(self._coordinate)
        ]
        for coordinate, shard in zip(product(*extents), shards, strict=True):
            shape = shape_of(tensor, coordinate)
            held = shard[: prod(shape)].view(shape)
            for box, local in boxes_of(tensor, coordinate):
                yield full[box], held[local]


def arrives(to: int | None) -> bool:
    """Return whether this rank receives what goes to a global rank, or to all."""
    return to is None or not dist.is_initialized() or to == dist.get_rank()


class Bucket:
    """Tensors that are gathered together.

    Args:
        planned: The tensors, in their order.

    Attributes:
        nbytes: The bytes of the full tensors.
        messages: The messages, one for each set of axes and receiver.
        by_class: The tensors that only their class can gather.
    """

    def __init__(self, planned: Iterable[Planned]) -> None:
        self._planned = list(planned)
        self.nbytes = sum(item.nbytes for item in self._planned)
        by_axes: dict[tuple[DeviceMesh, tuple[int, ...], int | None], list[Planned]] = {}
        for item in self._planned:
            if item.axes:
                mesh = cast(DTensor, item.entry.tensor).device_mesh
                by_axes.setdefault((mesh, item.axes, item.to), []).append(item)
        self.messages = [Message(*where, together) for where, together in by_axes.items()]
        self.by_class = [item for item in self._planned if item.is_whole_by_class]
        self._full: dict[Planned, torch.Tensor] = {}

    def prepare(self) -> None:
        """Copy and allocate everything that the launch needs."""
        for message in self.messages:
            message.prepare()

    def wait(self) -> None:
        """Wait until all full tensors have arrived.

        Collective: a gather for each further axis of a message; those of DTensor for tensors that
            only their class can gather.
        """
        for message in self.messages:
            message.wait()
        for item in self.by_class:
            with naming_failures(f"gathering {_LABEL}"):
                full = full_copy(item.entry.tensor, item.name)
            if arrives(item.to):
                self._full[item] = full

    def take(self, device: torch.device | None) -> deque[tuple[Planned, torch.Tensor]]:
        """Return the full tensors that this rank receives, in new memory.

        Args:
            device: Their device; that of the messages if absent.
        """
        found, self._full = self._full, {}
        tensors: deque[tuple[Planned, torch.Tensor]] = deque()
        for message in self.messages:
            found |= message.copy_out()
        for item in [item for item in self._planned if arrives(item.to)]:
            full = found.pop(item, None)
            if full is None:
                full = item.new_full(device)
                if full.numel():  # this rank has the full tensor
                    full.copy_(item.values())
            tensors.append((item, full if device is None else full.to(device)))
        return tensors


def stream(
    buckets: Sequence[Bucket],
    ranks: Ranks | None,
    device: torch.device | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Generator[tuple[Planned, torch.Tensor]]:
    """Gather buckets; while the tensors of one bucket are used, the next one is in flight.

    Args:
        buckets: The buckets, the same on all ranks.
        ranks: The ranks that take part. A failure that is noted there ends the stream on all ranks.
            With ``None``, they exchange no words, and a failure is an error on its rank alone.
        device: The device of the tensors; that of the messages if absent.
        advance: Called with the number of bytes that have arrived.

    Yields: The tensors that this rank receives.

    Raises:
        ShardError: On all ranks, if a rank has left or failed.
        CommunicationError: If a rank has ended or does not answer within the time-out.

    Collective: those of the buckets; 8 bytes before each bucket, and after the last one.
    """
    under_way, last = Bucket(()), "nothing"
    noting_failure = nullcontext if ranks is None else ranks.noting_failure
    for bucket in (*buckets, None):
        arrived: deque[tuple[Planned, torch.Tensor]] = deque()
        with torch.no_grad():
            under_way.wait()
            with noting_failure():
                arrived = under_way.take(device)
                if bucket is not None:
                    bucket.prepare()
        if ranks is not None:
            ranks.go_on()
        advance(under_way.nbytes)
        under_way = bucket or Bucket(())
        for message in under_way.messages:
            message.launch()
        try:
            while arrived:
                last = f"'{arrived[0][0].name}'"
                yield arrived.popleft()
        except BaseException:
            under_way.wait()
            if bucket is not None and ranks is not None:  # otherwise no rank waits for a word
                ranks.leave(f"it was left after {last}")
            raise


# Full tensors all at once -------------------------------------------------------------------------

BUCKET_NBYTES = 64 * 2**20  # gathered at once if all full tensors are kept


def full_copies(
    tensors: Sequence[DTensor],
    names: Sequence[str],
    *,
    first_only: bool = False,
    device: torch.device | None = None,
) -> list[torch.Tensor | None]:
    """Return full tensors in new memory, in the order of their DTensors.

    Args:
        tensors: The DTensors; all ranks of their meshes pass the same.
        names: Their names in messages.
        first_only: Whether only the first rank of each mesh gets full tensors; others get ``None``.
        device: Their device; that of the mesh if absent.

    Collective: for each bucket a gather over the axes that shard; the collectives of tensor
        subclasses and ``Partial`` placements; with ``first_only`` 8 bytes along each axis before
        each bucket.
    Memory: all full tensors on the ranks that get them; besides, a bucket in flight.
    """
    planned, meshes = list[Planned](), [tensor.device_mesh for tensor in tensors]
    for name, tensor, mesh in zip(names, tensors, meshes, strict=True):
        to = int(mesh.mesh.flatten()[0]) if first_only else None
        planned.append(Planned((name,), Entry((name,), tensor), tensor.dtype, to=to))
    buckets = list(map(Bucket, runs_within(planned, BUCKET_NBYTES)))
    together = Ranks(None, f"gathering {_LABEL}", meshes) if first_only else None
    found = dict(stream(buckets, together, device))
    return [found.get(item) for item in planned]
