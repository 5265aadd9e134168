"""Gradients of tensor subclasses: what of them travels, and how they are rebuilt.

``fsdp_pre_reduce_scatter`` of the local shard turns the parts of a gradient, one for each rank,
into the tensors that travel; ``fsdp_post_reduce_scatter`` sums those that arrive.

Which inner tensors there are is known where there is a gradient; the ranks without one are told.

What one rank sends to another is a row of bytes: the tensors of every gradient one after the other,
aligned, then a flag for each gradient that the rank has. A gradient that it lacks is a gap of zero
bytes. Rows are exchanged all to all, and each rank sums what arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from composable_shard import _torch
from composable_shard.core.bucket import packing_over
from composable_shard.core.codec import (
    GRAD_POST,
    GRAD_PRE,
    Codec,
    Format,
    Formats,
    bound_hook,
    codec_of,
    in_words,
)
from composable_shard.core.gradient import unreplicated
from composable_shard.core.gradient_bucket import Flags, GradBucket, GradTransfer
from composable_shard.core.param import ShardedParam
from composable_shard.core.transport.process_groups import agree
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh

# The hooks by which a tensor type says what the gradient of its parameter is on the wire ----------


class GradExtension:
    """The hooks of one parameter, and what they return for gradients of one dtype.

    Attributes:
        param: The parameter.
        formats: What one rank sends another; agreed once some rank has had a gradient.
    """

    def __init__(self, param: ShardedParam) -> None:
        self.param = param
        self.formats: Formats | None = None
        self._metadata: Any = None

    def encode(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Call the first hook; return what travels, a row for each rank.

        Args:
            parts: What of the gradient goes to each rank, [num_shards, shard_numel].
        """
        result = self._hook(GRAD_PRE)(parts, self.param.mesh.shard_axis)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise self._broken(GRAD_PRE, "(tensors, metadata)", type(result).__name__)
        tensors, self._metadata = result
        if not isinstance(tensors, tuple) or not all(map(torch.is_tensor, tensors)):
            raise self._broken(GRAD_PRE, "a tuple of tensors and metadata", type(tensors).__name__)
        shapes = [list(tensor.shape) for tensor in tensors]
        if any(shape[:1] != [len(parts)] for shape in shapes):
            raise self._broken(
                GRAD_PRE, f"tensors with a row for each of {len(parts)} ranks", shapes
            )
        formats = formats_of(tensors)
        if self.formats not in (None, formats):
            assert self.formats is not None
            raise self._broken(GRAD_PRE, f"{in_words(self.formats)} as before", in_words(formats))
        return list(tensors)

    def decode(self, received: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Call the second hook, which fills ``out``, [shard_numel], with the sum over all ranks.

        Args:
            received: What all ranks sent here, a row from each.
            out: What to fill.
        """
        self._hook(GRAD_POST)(received, self._metadata, out)

    def _hook(self, name: str) -> Any:
        local = self.param.local
        return bound_hook(getattr(local, name), local)

    def _broken(self, hook: str, expected: str, got: object) -> ExtensionError:
        return ExtensionError(
            f"Expected {hook} of {self.param.name} to return {expected}, got {got}"
        )


def formats_of(tensors: Sequence[torch.Tensor]) -> Formats:
    """Return what of ``tensors`` one rank gets."""
    return tuple(Format(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors)


def agree_formats(
    extensions: Sequence[GradExtension],
    said: list[Formats | None] | str,
    mesh: ShardMesh,
    cause: Exception | None = None,
) -> None:
    """Exchange what the hooks returned where it is not known yet.

    Args:
        extensions: The hooks of some parameters.
        said: What those of this rank returned, ``None`` where it has no gradient; or how one
            failed.
        mesh: The ranks.
        cause: What one raised on this rank, for the traceback.

    Raises:
        ExtensionError: On all ranks, if a hook failed on one, or returned something else than on
            another.

    Collective: one all-gather of a small object over the shards, and one over the replicas.
    """
    op = "agreeing on what gradients are on the wire"
    said = agree(said, mesh, partial(_merged, extensions), op)
    if isinstance(said, str):
        raise ExtensionError(said) from cause
    for extension, formats in zip(extensions, said, strict=True):
        if formats is not None:  # else no rank has the gradient this time
            extension.formats = formats


def _merged(
    extensions: Sequence[GradExtension], heard: dict[int, list[Formats | None] | str]
) -> list[Formats | None] | str:
    """Return what the ranks said together: how they failed or differ, else all that is known."""
    failures = [text for text in heard.values() if isinstance(text, str)]
    if failures:
        return "; ".join(dict.fromkeys(failures))
    merged: list[Formats | None] = []
    for index, extension in enumerate(extensions):
        said = [(rank, one[index]) for rank, one in heard.items() if not isinstance(one, str)]
        known = [(rank, formats) for rank, formats in said if formats is not None]
        for rank, formats in known:
            if formats != known[0][1]:
                return (
                    f"Expected {GRAD_PRE} of {extension.param.name} to return the same on all "
                    f"ranks, got {in_words(known[0][1])} on rank {known[0][0]} and "
                    f"{in_words(formats)} on rank {rank}"
                )
        merged.append(known[0][1] if known else None)
    return merged


# Gradients that are tensor subclasses: taken apart, reduced inner tensor by inner tensor, rebuilt


_PLAIN = Codec(torch.Tensor, None, ())


class GradientCodecs:
    """The codecs of some parameters, on which their ranks have agreed."""

    def __init__(self, mesh: ShardMesh) -> None:
        self._mesh = mesh
        self._codecs: dict[ShardedParam, Codec | None] = {}

    def of(self, param: ShardedParam) -> Codec | None:
        """Return how the gradient of ``param`` is rebuilt, ``None`` for a plain one."""
        return self._codecs.get(param)

    def know(self, param: ShardedParam) -> bool:
        """Tell whether it is known what the gradient of ``param`` is made of."""
        return not param.is_subclass or param in self._codecs

    @property
    def num_agreed(self) -> int:
        """Of how many parameters it is known; never falls."""
        return len(self._codecs)

    def agree(self, params: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]) -> None:
        """Agree once which gradients are tensor subclasses, made of which inner tensors.

        Collective: one all-gather of a small object for each parameter whose unsharded form is a
        subclass, until some rank had a gradient for it.
        """
        for param, grad in zip(params, grads, strict=True):
            if not param.is_subclass or param in self._codecs:
                continue
            op = "agreeing on what gradients are made of"
            own = unreplicated(param) if grad is None else grad
            said = agree(_codec_of_grad(own), self._mesh, _first_known, op)
            if said is not None:
                self._codecs[param] = said if said.inner else None


def _first_known(heard: dict[int, Codec | None]) -> Codec | None:
    return next((codec for codec in heard.values() if codec is not None), None)


def _codec_of_grad(grad: torch.Tensor | None) -> Codec | None:
    """Describe a gradient's inner tensors (none for a plain one); ``None`` if there is none."""
    return None if grad is None else codec_of(grad) or _PLAIN


# The flat buffers of gradients whose tensor types decide what of them travels ---------------------

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
        narrowest_itemsize: See :func:`~composable_shard.core.layout.plan_bucket`.
        known: Shared with the buckets of other selections of the same parameters, so that what
            was agreed and returned outlives a change of what is trainable.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        mesh: ShardMesh,
        dtype: torch.dtype,
        narrowest_itemsize: int,
        known: Extensions,
    ) -> None:
        layouts, packing = [param.layout for param in params], packing_over(mesh)
        super().__init__(layouts, mesh.num_shards, dtype, mesh.device, packing, narrowest_itemsize)
        self._mesh = mesh
        self._flags = Flags(mesh.num_shards, len(layouts), mesh.device)
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
        rows[:, nbytes - len(grads) :] = self._flags.rows(torch.uint8, present)
        result = torch.zeros(self.numel + len(grads), dtype=self.dtype, device=self._mesh.device)
        return GradTransfer(result, present, [_torch.empty_like(rows)], [rows])

    @torch.no_grad()
    def divide(self, transfer: GradTransfer, divisor: float) -> None:
        """Sum what has arrived, at the first time, and divide."""
        if not transfer.outputs:
            super().divide(transfer, divisor)
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
        full = self._as_it_is(index, grad, widens=False)
        if full is None:
            ((_, full),) = self._copied({index: grad}, clears=True).items()
        return self._extensions[index].encode(full.view(self.layout.num_shards, -1))

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
