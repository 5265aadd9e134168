"""Gradients of tensor subclasses: reduced inner tensor by inner tensor, or encoded by their class.

`SplitReduction` takes gradients that are wrapper subclasses apart and rebuilds the reduced ones.

`EncodedReduction` calls ``fsdp_pre_reduce_scatter`` of the local shard, which turns the parts of a
gradient, one for each rank, into the tensors to send, and ``fsdp_post_reduce_scatter``, which sums
the received ones. One rank sends another a row of bytes: the tensors of every gradient one after
the other, aligned, then a flag for each gradient that the rank has. The bytes of a gradient that it
lacks are zero.

Only a rank with a gradient knows its inner tensors or encoded formats. It tells the other ranks,
once in the life of the parameter. Imports reduction.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.codec import (
    GRAD_POST,
    GRAD_PRE,
    POST,
    Codec,
    Format,
    Formats,
    bound_hook,
    codec_of,
    has_grad_extension,
    in_words,
)
from composable_shard.core.reduction import Reduction, refuse_sparse, stage_of
from composable_shard.core.storage import ShardedParam
from composable_shard.core.transport.pending import Pending, launching_stream
from composable_shard.core.transport.process_groups import agree
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh


def reduction_of(param: ShardedParam) -> type[Reduction]:
    """Return how the gradient of a parameter with its own bucket is reduced."""
    is_shared = param.mesh.num_shards > 1 and param.layout.param.numel > 0
    if is_shared and has_grad_extension(param.local):
        return EncodedReduction
    return SplitReduction


# Gradients that are tensor subclasses -------------------------------------------------------------

_PLAIN = Codec(torch.Tensor, None, ())

_codecs: weakref.WeakKeyDictionary[ShardedParam, Codec | None] = weakref.WeakKeyDictionary()
"""How the gradients of parameters are rebuilt; ``None`` for plain ones."""


def _is_unknown(param: ShardedParam) -> bool:
    """Return whether no rank has had a gradient yet that shows what it is made of."""
    return param not in _codecs and _torch.is_wrapper_subclass(param.unsharded_local)


def num_tensors(param: ShardedParam) -> int:
    """Return how many tensors a gradient consists of; 1 if that is not known yet."""
    codec = _codecs.get(param)
    return 1 if codec is None else len(codec.names)


def agree_on_codecs(params: Sequence[ShardedParam], grads: Sequence[Any], mesh: ShardMesh) -> None:
    """Find out what gradients are made of, from a rank that has one.

    Collective: one all-gather of a small object for each mesh axis, unless all are known.
    """
    unknown = [pair for pair in zip(params, grads, strict=True) if _is_unknown(pair[0])]
    if not unknown:
        return
    said: list[Codec | None] = []
    for param, grad in unknown:
        waiting: Any = param.sharded.grad
        if grad is None and stage_of(param, waiting) == "unreplicated":
            grad = _torch.local_tensor(waiting)
        said.append(None if grad is None else codec_of(grad) or _PLAIN)
    said = agree(said, mesh, _first_known, "agreeing on what gradients are made of")
    for (param, _), codec in zip(unknown, said, strict=True):
        if codec is not None:
            _codecs[param] = codec if codec.inner else None


def _first_known(heard: dict[int, list[Codec | None]]) -> list[Codec | None]:
    return [
        next((codec for codec in said if codec is not None), None)
        for said in zip(*heard.values(), strict=True)
    ]


class SplitReduction(Reduction):
    """The reduction of gradients that may be tensor subclasses, of parameters of several buckets.

    Each inner tensor travels like the gradient of a parameter of its own.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._plan_members()

    def _plan_members(self) -> None:
        self._spans, self._all_known = [], not any(map(_is_unknown, self.params))
        self.members = []
        for param in self.params:
            codec = _codecs.get(param)
            start = len(self.members)
            self.members += [param] * num_tensors(param)
            self._spans.append((param, codec, slice(start, len(self.members))))
        self._plan_messages()
        self._plan_results()

    def launch(self) -> None:
        """Launch the reduce-scatter of all inner tensors.

        Collective: it, and before it that of :func:`agree_on_codecs`.
        """
        if not self._all_known:
            agree_on_codecs(self.params, self._grads, self._mesh)
            self._plan_members()
        parts: list[torch.Tensor | None] = []
        for (_, codec, span), grad in zip(self._spans, self._grads, strict=True):
            if grad is None:
                parts += [None] * (span.stop - span.start)
            else:
                parts += [grad] if codec is None else codec.parts(grad)
        self._grads = parts
        super().launch()

    def _take_unreplicated(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index, grad in super()._take_unreplicated():
            _, codec, span = self._spans[index]
            parts = [grad] if codec is None else codec.parts(grad)
            yield from zip(range(span.start, span.stop), parts, strict=True)

    def _results(self) -> Iterable[tuple[nn.Parameter, torch.Tensor, _torch.DTensorSpec, bool]]:
        shards = self._shards_of(self.reduced)
        flags = [1.0] * len(self.members)
        if not (self._all_have_grads or self._gives_zeros):
            flags = self.reduced[-self.num_flags :].tolist()
        del self.reduced
        for param, codec, span in self._spans:
            if not flags[span.start] or _is_unknown(param):
                continue
            grad = shards[span.start]
            if codec is not None:  # classes may demand equal storage offsets
                parts = zip(codec.names, map(torch.clone, shards[span]), strict=True)
                grad = codec.rebuild(dict(parts)).to(self._final_dtypes[span.start])
            yield param.sharded, grad, self._specs[span.start], self._are_lifted[span.start]


# Gradients that their class encodes ---------------------------------------------------------------


class GradExtension:
    """The hooks of one parameter, and what they return for gradients of one dtype.

    Attributes:
        formats: The tensors that one rank sends another; agreed once some rank has had a gradient.
    """

    def __init__(self, param: ShardedParam) -> None:
        self.param: ShardedParam = weakref.proxy(param)  # the key of what holds this
        self.formats: Formats | None = None
        self._metadata: Any = None

    def encode(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Call the first hook; return the tensors to send, with a row for each rank.

        Args:
            parts: The part of the gradient that each rank needs, [num_shards, shard_numel].
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
        if self.formats is not None and self.formats != formats:
            raise self._broken(GRAD_PRE, f"{in_words(self.formats)} as before", in_words(formats))
        return list(tensors)

    def decode(self, received: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Call the second hook, which fills ``out``, [shard_numel], with the sum over all ranks.

        Args:
            received: The tensors that all ranks sent to this one, a row from each.
            out: The tensor to fill.
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
    """Return the formats of the rows that one rank gets of ``tensors``."""
    return tuple(Format(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors)


_extensions: weakref.WeakKeyDictionary[ShardedParam, dict[torch.dtype, GradExtension]]
_extensions = weakref.WeakKeyDictionary()
"""The hooks of each parameter, for gradients of each dtype."""

_ALIGNMENT_NBYTES = 16
"""Tensors within a row start at a multiple of this, so that any dtype can be viewed."""


class EncodedReduction(Reduction):
    """The reduction of encoded gradients: exchanged all to all, decoded and summed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._extensions = [
            _extensions.setdefault(param, {}).setdefault(self._dtype, GradExtension(param))
            for param in self.params
        ]

    @torch.no_grad()
    def launch(self) -> None:
        """Encode the gradients, and send each rank its parts.

        Collective: an all-to-all; before it those of :func:`agree_on_codecs` and of
        :func:`_agree_on_formats` for gradients that no rank has had yet.
        """
        grads = self._grads
        del self._grads
        refuse_sparse(self.params, grads)
        self._refuse_subclasses(grads)
        if all(one.formats is not None for one in self._extensions):
            encoded = [self._encode(*pair) for pair in enumerate(grads)]
        else:
            encoded = self._encode_and_agree(grads)
        self._plan_rows()
        sizes = self._mesh.num_shards, self._row_nbytes
        rows = torch.zeros(*sizes, dtype=torch.uint8, device=self._mesh.device)
        for tensors, places in zip(encoded, self._row_places, strict=True):
            for tensor, place in zip(tensors or (), places, strict=tensors is not None):
                _view(rows, *place).copy_(tensor)
        has_grad = [grad is not None for grad in grads]
        self._all_have_grads = all(has_grad)
        rows[:, self._row_nbytes - self.num_flags :] = rows.new_tensor(has_grad)
        self._received = _torch.empty_like(rows)
        works = self._channel.exchange(self._received, rows)
        stream = launching_stream(rows.device)
        self._pending = Pending(works, self._channel.reducing, stream, [rows])

    def _refuse_subclasses(self, grads: Sequence[torch.Tensor | None]) -> None:
        agree_on_codecs(self.params, grads, self._mesh)
        for param in self.params:
            codec = _codecs.get(param)
            if codec is not None:
                raise ExtensionError(
                    f"Expected a plain gradient of {param.name} to pass to {GRAD_PRE}, got "
                    f"{codec.kind.__name__}; let {POST} return a plain tensor"
                )

    def _encode(self, index: int, grad: torch.Tensor | None) -> list[torch.Tensor] | None:
        if grad is None:
            return None
        layout = self.params[index].layout
        return self._extensions[index].encode(layout.stacked(grad.to(self._dtype)))

    def _encode_and_agree(
        self, grads: Sequence[torch.Tensor | None]
    ) -> list[list[torch.Tensor] | None]:
        """Encode, and exchange the formats of the encoded tensors.

        Raises:
            ExtensionError: On all ranks, if a hook failed on one, or formats differ.
        """
        encoded, failure, cause = [], None, None
        for index, grad in enumerate(grads):
            try:
                encoded.append(self._encode(index, grad))
            except Exception as error:  # noqa: BLE001 - any failure of user code is told to all
                name = self.params[index].name
                failure = f"{GRAD_PRE} of {name} failed: {type(error).__name__}: {error}"
                cause = error
                break
        said: Any = [None if tensors is None else formats_of(tensors) for tensors in encoded]
        op = "agreeing on the formats of encoded gradients"
        said = agree(failure or said, self._mesh, partial(_merged, self.params), op)
        if isinstance(said, str):
            raise ExtensionError(said) from cause
        for extension, formats in zip(self._extensions, said, strict=True):
            if formats is not None:
                extension.formats = formats
        return encoded

    def _plan_rows(self) -> None:
        """Plan the offsets of all tensors in a row, and the bytes of a row."""
        self._row_places, end = [], 0
        for extension in self._extensions:
            places = []
            for one in extension.formats or ():
                places.append((end, one))
                end += _aligned(_nbytes(one))
            self._row_places.append(places)
        self._row_nbytes = _aligned(end + self.num_flags)

    @torch.no_grad()
    def wait_and_average(self) -> None:
        """Wait for the encoded parts of all ranks, sum and divide them."""
        self._pending.wait()
        rows = self._received
        del self._pending, self._received
        self.reduced = rows.new_zeros(self._numel, dtype=self._dtype)
        for param, start, extension, places in zip(
            self.params, self._starts, self._extensions, self._row_places, strict=True
        ):
            part = self.reduced[start : start + param.layout.param.shard_numel]
            if extension.formats is not None:
                total = part.to(torch.promote_types(part.dtype, torch.float32))
                extension.decode(tuple(_view(rows, *place) for place in places), total)
                part.copy_(total.div_(self._divisor))
        self.reduced[-self.num_flags :] = rows[:, self._row_nbytes - self.num_flags :].amax(0)

    def discard(self) -> None:
        """Drop all gradients that are not in ``.grad`` yet."""
        super().discard()
        self.__dict__.pop("_received", None)


def _merged(
    params: Sequence[ShardedParam], heard: dict[int, list[Formats | None] | str]
) -> list[Formats | None] | str:
    """Return all known formats; or, as text, how hooks failed or the ranks differ."""
    failures = [text for text in heard.values() if isinstance(text, str)]
    if failures:
        return "; ".join(dict.fromkeys(failures))
    merged: list[Formats | None] = []
    for index, param in enumerate(params):
        said = [(rank, one[index]) for rank, one in heard.items() if not isinstance(one, str)]
        known = [(rank, formats) for rank, formats in said if formats is not None]
        for rank, formats in known:
            if formats != known[0][1]:
                return (
                    f"Expected {GRAD_PRE} of {param.name} to return the same on all ranks, got "
                    f"{in_words(known[0][1])} on rank {known[0][0]} and {in_words(formats)} on "
                    f"rank {rank}"
                )
        merged.append(known[0][1] if known else None)
    return merged


def _nbytes(one: Format) -> int:
    return prod(one.shape) * one.dtype.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


def _view(rows: torch.Tensor, start: int, one: Format) -> torch.Tensor:
    """View a tensor, [num_shards, ...], in rows of bytes."""
    span = rows[:, start : start + _nbytes(one)]
    return span.view(one.dtype).view(len(rows), *one.shape)
