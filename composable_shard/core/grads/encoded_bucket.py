"""The flat buffers of gradients whose tensor types decide what of them travels.

What one rank sends to another is a row of bytes: the tensors of every gradient one after the other,
aligned, then a flag for each gradient that the rank has. A gradient that it lacks is a gap of zero
bytes. Rows are exchanged all to all, and each rank sums what arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from composable_shard import _torch
from composable_shard.core.grads.grad_bucket import GradBucket, GradTransfer
from composable_shard.core.grads.grad_extension import GradExtension, agree_formats, formats_of
from composable_shard.core.params.extension import GRAD_PRE, Format
from composable_shard.core.params.param import ShardedParam
from composable_shard.mesh import ShardMesh

ALIGNMENT_NBYTES = 16
"""Tensors within a row start at a multiple of this many bytes, so that any dtype can be viewed."""

Extensions = dict[tuple[ShardedParam, torch.dtype], GradExtension]
"""The hooks of parameters, for gradients of a dtype."""


class EncodedBucket(GradBucket):
    """Gradients that are encoded, exchanged, decoded and summed.

    Args:
        params: Whose they are.
        mesh: The ranks.
        dtype: Dtype in which the hooks get them.
        known: Shared with the buckets of other selections of the same parameters, so that what
            was agreed and returned outlives a change of what is trainable.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        mesh: ShardMesh,
        dtype: torch.dtype,
        known: Extensions,
    ) -> None:
        layouts = [param.layout for param in params]
        super().__init__(layouts, mesh.num_shards, dtype, mesh.device)
        self._mesh = mesh
        self._extensions = [known.setdefault((p, dtype), GradExtension(p)) for p in params]

    @torch.no_grad()
    def start_reduce(
        self,
        grads: Sequence[torch.Tensor | None],
        *,
        widens: bool = False,
        reads_padding: bool = False,
    ) -> GradTransfer:
        """Encode the gradients; see GradBucket. An input is [num_shards, bytes of a row].

        Collective: see :func:`agree_formats` while the formats of some gradient are not known.
        """
        if all(extension.formats is not None for extension in self._extensions):
            encoded = [self._encode(index, grad) for index, grad in enumerate(grads)]
        else:
            encoded = self._encode_and_agree(grads)
        places, nbytes = self._places()
        rows = torch.zeros(
            self._mesh.num_shards, nbytes, dtype=torch.uint8, device=self._mesh.device
        )
        for tensors, own in zip(encoded, places, strict=True):
            for tensor, place in zip(tensors or (), own, strict=tensors is not None):
                _view(rows, *place).copy_(tensor)
        present = [grad is not None for grad in grads]
        rows[:, nbytes - len(grads) :] = self._packed.flags.rows(torch.uint8, present)
        result = torch.zeros(self.numel + len(grads), dtype=self.dtype, device=self._mesh.device)
        return GradTransfer(result, present, [_torch.empty_like(rows)], [rows])

    @torch.no_grad()
    def settle(self, transfer: GradTransfer, divisor: float) -> None:
        """Sum what has arrived, at the first time, and divide."""
        if not transfer.outputs:
            super().settle(transfer, divisor)
            return
        (rows,) = transfer.outputs
        transfer.outputs = []
        places, nbytes = self._places()
        for index, (extension, own) in enumerate(zip(self._extensions, places, strict=True)):
            if extension.formats is None:  # no rank has ever had this gradient
                continue
            start = self.layout.shard_offsets[index]
            place = transfer.result[start : start + self.layout.params[index].shard_numel]
            total = place.to(torch.promote_types(place.dtype, torch.float32))
            extension.decode(tuple(_view(rows, *wire) for wire in own), total)
            total.div_(divisor)
            if total is not place:
                place.copy_(total)
        num_flags = len(self._extensions)
        transfer.result[self.numel :] = rows[:, nbytes - num_flags :].amax(0)

    def _encode(self, index: int, grad: torch.Tensor | None) -> list[torch.Tensor] | None:
        if grad is None:
            return None
        param = self.layout.params[index]
        as_shards = self._in_order if param.gathers_in_order else self._permuted
        return self._extensions[index].encode(as_shards(param, grad).view(param.num_shards, -1))

    def _encode_and_agree(
        self, grads: Sequence[torch.Tensor | None]
    ) -> list[list[torch.Tensor] | None]:
        encoded, failure, cause = [], None, None
        for index, grad in enumerate(grads):
            try:
                encoded.append(self._encode(index, grad))
            except Exception as error:  # noqa: BLE001 - any failure of user code is told to all
                name = self._extensions[index].param.name
                failure = f"{GRAD_PRE} of {name} failed: {type(error).__name__}: {error}"
                cause = error
                break
        said = [None if tensors is None else formats_of(tensors) for tensors in encoded]
        agree_formats(self._extensions, failure or said, self._mesh, cause)
        return encoded

    def _places(self) -> tuple[list[list[tuple[int, Format]]], int]:
        """Return where in a row the tensors of each gradient lie, and the bytes of a row."""
        places, end = [], 0
        for extension in self._extensions:
            own = []
            for wire in extension.formats or ():
                own.append((end, wire))
                end += -(-_nbytes(wire) // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            places.append(own)
        end += len(self._extensions)
        padded = -(-end // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        return places, padded


def _nbytes(wire: Format) -> int:
    return prod(wire.shape) * wire.dtype.itemsize


def _view(rows: torch.Tensor, start: int, wire: Format) -> torch.Tensor:
    """View a tensor, [num_shards, ...], in rows of bytes."""
    span = rows[:, start : start + _nbytes(wire)]
    return span.view(wire.dtype).view(len(rows), *wire.shape)
