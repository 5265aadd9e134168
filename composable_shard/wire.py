"""What parameters and gradients are on the wire: bf16, fp16, fp8, int8, or a format of the user.

A feature of plain parameters. `plug_in` gives each large parameter of a policy with a format the
class `WireBucket`. Its gather sends encoded shards, and every rank decodes the shards of all ranks,
its own too, so all unsharded parameters are bitwise equal. Its reduction, `WireReduction`, is an
all-to-all of encoded gradients and one sum, as for the gradients that a tensor subclass encodes.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import _torch
from composable_shard.arguments import check_int, check_value, checked_bool
from composable_shard.core.codec import Format, needs_extension
from composable_shard.core.extension import EncodedReduction, GradExtension
from composable_shard.core.layout import BucketLayout
from composable_shard.core.storage import Bucket, FlatBucket, GatherOps, ShardedParam
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import Tensors, WaitThenCall
from composable_shard.core.transport.pending import Pending, Waitable
from composable_shard.policy import WIRE_DTYPES, WireFormat

MIN_NUMEL = 1024
"""A parameter with fewer elements is sent as without a format."""

# Formats ------------------------------------------------------------------------------------------

_SCALE = torch.float32
_SMALLEST_SCALE = torch.finfo(_SCALE).smallest_normal
_EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True)
class _Cast:
    """Sends each element in a narrower floating-point dtype."""

    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, rows: torch.Tensor, seed: int) -> torch.Tensor:
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        return encoded.view(self.dtype)


@dataclass(frozen=True)
class BlockFormat:
    """A format of 8 bits per element, and an fp32 scale per block of elements.

    The scale maps the largest absolute value of a block to the largest value of ``dtype``. A block
    with an infinity or a NaN arrives with infinities and NaNs only. The last block of a row may be
    shorter than the others.

    Args:
        dtype: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        block: The number of elements that share a scale.
        stochastic: Whether to round up or down at random, so that the mean of many roundings is the
            exact value. For ``reduce_wire`` only. The global random state of torch is not used.
        seed: Another seed gives other random numbers. With the same seed, the same program gives
            the same result.

    Raises:
        TypeError: If ``block`` or ``seed`` is not an int.
        ValueError: If ``dtype`` is another dtype, ``block`` or ``seed`` is too small, or
            ``stochastic`` is not a bool.

    Example:
        >>> format, rows = BlockFormat(torch.int8), torch.randn(2, 1000)
        >>> encoded = format.encode(rows)
        >>> encoded.shape, encoded.dtype
        (torch.Size([2, 1016]), torch.uint8)
        >>> (format.decode(encoded, 1000) - rows).abs().max() < rows.abs().max() / 250
        tensor(True)
    """

    dtype: torch.dtype
    block: int = 256
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        known = [dtype for dtype in WIRE_DTYPES if dtype.itemsize == 1]
        what = f"to be one of {', '.join(map(str, known))}"
        check_value("dtype", self.dtype, self.dtype in known, what)
        check_int("block", self.block, 1)
        checked_bool("stochastic", self.stochastic)
        check_int("seed", self.seed, 0)

    def nbytes(self, numel: int) -> int:
        """Return the number of bytes of an encoded row: the scales of its blocks, then codes."""
        return -(-numel // self.block) * _SCALE.itemsize + numel

    def encode(self, rows: torch.Tensor, seed: int = 0) -> torch.Tensor:
        """Return the message as ``uint8``, [num_rows, nbytes(numel)]; see :class:`WireFormat`."""
        numel = rows.shape[1]
        blocks = self._in_blocks(rows.to(_SCALE))
        is_float, top = self.dtype.is_floating_point, self._largest
        # On the CPU, ``aminmax`` takes about ten times as long as ``amax`` and ``amin``.
        largest = blocks.amax(2, keepdim=True).maximum(-blocks.amin(2, keepdim=True))
        # A scale of zero could not divide, and a subnormal one has fewer digits.
        scales = (largest / top).clamp_min_(_SMALLEST_SCALE)
        scaled = blocks / scales
        if self.stochastic:
            scaled = self._rounded_at_random(scaled, hash((self.seed, seed)))
        elif not is_float:
            scaled.round_()
        codes = scaled.clamp_(-top, top).to(self.dtype).view(torch.uint8)
        return torch.cat([scales.flatten(1).view(torch.uint8), codes.flatten(1)[:, :numel]], 1)

    def decode(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the rows in fp32, [num_rows, numel]; see :class:`WireFormat`."""
        scales, codes = encoded.split([encoded.shape[1] - numel, numel], 1)
        values = self._in_blocks(codes).view(self.dtype).to(_SCALE)
        scales = scales.reshape(-1).view(_SCALE).view(len(encoded), -1, 1)
        return values.mul_(scales).flatten(1)[:, :numel]

    @property
    def _largest(self) -> float:
        is_float = self.dtype.is_floating_point
        return torch.finfo(self.dtype).max if is_float else torch.iinfo(self.dtype).max

    def _in_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        padding = -rows.shape[1] % self.block
        rows = nn.functional.pad(rows, (0, padding)) if padding else rows
        return rows.reshape(len(rows), -1, self.block)

    def _rounded_at_random(self, scaled: torch.Tensor, seed: int) -> torch.Tensor:
        """Round to one of the two nearest codes, with the probability that keeps the mean.

        This overwrites ``scaled``.
        """
        words = torch.empty(-(-scaled.numel() // 4), dtype=torch.int64, device=scaled.device)
        generator = torch.Generator(scaled.device).manual_seed(seed)
        words.random_(-(1 << 63), None, generator=generator)  # four numbers each: `rand` is slower
        noise = words.view(torch.int16)[: scaled.numel()].view(scaled.shape).to(_SCALE)
        noise.add_(0.5).div_(1 << 16)  # between -1/2 and 1/2
        if not self.dtype.is_floating_point:
            return scaled.add_(noise).round_()
        finfo = torch.finfo(self.dtype)
        power = (scaled.view(torch.int32) & _EXPONENT_BITS).view(_SCALE)
        step = power.clamp_min_(finfo.smallest_normal).mul_(finfo.eps)  # the distance of two codes
        return scaled.div_(step).add_(noise).round_().mul_(step)


def format_of(wire: torch.dtype | WireFormat) -> WireFormat:
    """Return the format that a policy names."""
    if not isinstance(wire, torch.dtype):
        return wire
    return BlockFormat(wire) if wire.itemsize == 1 else _Cast(wire)


def _encode(format: WireFormat, rows: torch.Tensor, seed: int = 0) -> torch.Tensor:
    encoded = format.encode(rows, seed)
    expected = torch.uint8, (len(rows), format.nbytes(rows.shape[1]))
    _check(format, "encode", (encoded.dtype, tuple(encoded.shape)), expected)
    return encoded


def _decode(format: WireFormat, encoded: torch.Tensor, numel: int) -> torch.Tensor:
    rows = format.decode(encoded.contiguous(), numel)
    _check(format, "decode", tuple(rows.shape), (len(encoded), numel))
    return rows


def _check(format: WireFormat, method: str, got: object, expected: object) -> None:
    if got != expected:
        name = f"{type(format).__name__}.{method}"
        raise ValueError(f"Expected {name} to return {expected}, got {got}")


# The bucket ---------------------------------------------------------------------------------------


def plug_in(planned: Mapping[nn.Parameter, ShardedParam]) -> None:
    """Give the parameters that are sent in a format their class of bucket."""
    for original, param in planned.items():
        part, policy = _torch.local_part(original), param.policy
        is_plain = not needs_extension(part) and _torch.class_in_memory(part) is None
        is_large = len(param.shape) > 1 and param.shape.numel() >= MIN_NUMEL
        has_format = policy.gather_wire is not None or policy.reduce_wire is not None
        if has_format and is_plain and is_large and param.dtype.is_floating_point:
            param.bucket_class = WireBucket


class WireBucket(FlatBucket):
    """A bucket with parameters or gradients that are sent in a format.

    Attributes:
        gather_format: The format of the parameters; ``None`` if they are sent as they are.
    """

    gather_format: WireFormat | None = None

    def __init__(self, params: Sequence[ShardedParam], shards: Sequence[torch.Tensor]) -> None:
        super().__init__(params, shards)
        policy = params[0].policy
        if self.mesh.num_shards == 1:
            return
        if policy.gather_wire is not None:
            self.gather_format, self.input_dtype = format_of(policy.gather_wire), self.dtype
        if policy.reduce_wire is not None:
            self.reduction = WireReduction

    def grad_extension(self, param: ShardedParam, dtype: torch.dtype) -> GradExtension:
        """Return the object that encodes and decodes the gradients of a parameter."""
        wire = param.policy.reduce_wire
        assert wire is not None
        return _WireGradient(param, wire)

    def gather_ops(self, shards: Tensors, channel: Channel, *, keeps_storage: bool) -> GatherOps:
        """Return the operations that gather these shards."""
        if self.gather_format is not None:
            channel = cast(Channel, _EncodedGather(self.gather_format, self.layout, channel))
        return super().gather_ops(shards, channel, keeps_storage=keeps_storage)


# Where each parameter of a message begins, and its number of elements.
_Spans = list[tuple[int, int]]


def _params_of(layout: BucketLayout) -> list[_Spans]:
    """Return the parameters of each message of a gather."""
    numels, num_direct = [param.shard_numel for param in layout.params], layout.num_direct
    starts = [start - layout.packed_offset for start in layout.shard_offsets]
    packed = list(zip(starts[num_direct:], numels[num_direct:], strict=True))
    return [*([(0, numel)] for numel in numels[:num_direct]), *([packed] if packed else [])]


class _EncodedGather:
    """Gathers encoded parameters, in the place of the channel."""

    def __init__(self, format: WireFormat, layout: BucketLayout, channel: Channel) -> None:
        self._format, self._channel = format, channel
        self._spans = _params_of(layout)

    @property
    def gathering(self) -> str:
        return self._channel.gathering

    def gather(self, outputs: Tensors, inputs: Tensors) -> list[Waitable]:
        sent = [
            torch.cat([_encode(self._format, row)[0] for row in _columns(message, spans, 1)])
            for message, spans in zip(inputs, self._spans, strict=True)
        ]
        num_shards, device = self._channel.mesh.num_shards, inputs[0].device
        received = [
            _torch.empty(num_shards * encoded.numel(), dtype=torch.uint8, device=device)
            for encoded in sent
        ]
        works = self._channel.gather(received, sent)
        keep = Pending([], self.gathering, owned=sent)
        return [*works, WaitThenCall(keep, partial(self._decode_all, outputs, received))]

    def _decode_all(self, outputs: Tensors, received: Tensors) -> None:
        num_shards = self._channel.mesh.num_shards
        for output, encoded, spans in zip(outputs, received, self._spans, strict=True):
            nbytes = [self._format.nbytes(numel) for _, numel in spans]
            parts = encoded.view(num_shards, -1).split(nbytes, 1)
            for into, part in zip(_columns(output, spans, num_shards), parts, strict=True):
                into.copy_(_decode(self._format, part, into.shape[1]))


def _columns(message: torch.Tensor, spans: _Spans, num_rows: int) -> Iterator[torch.Tensor]:
    """Yield the part of each parameter in a message, [num_rows, shard_numel]."""
    rows = message.view(num_rows, -1)
    return (rows[:, start : start + numel] for start, numel in spans)


def sent_nbytes(bucket: Bucket) -> list[int] | None:
    """Return the bytes of each message of an encoded gather; ``None`` for any other gather."""
    if not isinstance(bucket, WireBucket) or bucket.gather_format is None:
        return None
    nbytes = bucket.gather_format.nbytes
    return [sum(nbytes(numel) for _, numel in params) for params in _params_of(bucket.layout)]


# The reduction ------------------------------------------------------------------------------------


class WireReduction(EncodedReduction):
    """The reduction of gradients that are sent in a format."""


# Counts the encoded gradients of each parameter, for the seeds.
_counts: weakref.WeakKeyDictionary[ShardedParam, Iterator[int]] = weakref.WeakKeyDictionary()


class _WireGradient(GradExtension):
    """Encodes the gradients of one parameter."""

    def __init__(self, param: ShardedParam, wire: torch.dtype | WireFormat) -> None:
        super().__init__(param)
        self._format, self._count = format_of(wire), _counts.setdefault(param, itertools.count())
        nbytes = self._format.nbytes(param.layout.flat.shard_numel)
        self.formats = (Format(torch.uint8, (param.mesh.num_shards, nbytes)),)

    def encode(self, parts: torch.Tensor) -> list[torch.Tensor]:
        names = dist.get_rank(), self.param.group.name, self.param.name, next(self._count)
        return [_encode(self._format, parts, zlib.crc32(repr(names).encode()))]

    def decode(self, received: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        rows = _decode(self._format, received[0], len(out))
        out.copy_(rows.sum(0, dtype=out.dtype))


def row_nbytes(params: Sequence[ShardedParam]) -> int:
    """Return the bytes that a rank sends each other rank in a reduction, flags included."""
    total = len(params)
    for param in params:
        assert param.policy.reduce_wire is not None
        total += format_of(param.policy.reduce_wire).nbytes(param.layout.flat.shard_numel)
    return total
