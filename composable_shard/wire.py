"""Formats of parameters and gradients in messages: bf16, fp16, fp8, int8, or a user's own format.

Only plain parameters can have a format. `plug_in` puts each large parameter with a format into a
`WireBucket`. The gather of that bucket sends encoded shards. Every rank decodes the shards of all
ranks, including its own, so unsharded parameters are bitwise equal on all ranks. The reduction,
`WireReduction`, is an all-to-all of encoded gradients and one sum, as for the gradients that a
tensor subclass encodes.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import _torch
from composable_shard.arguments import check_int, check_value, checked_bool
from composable_shard.core.codec import needs_extension
from composable_shard.core.extension import ExchangedReduction
from composable_shard.core.layout import BucketLayout
from composable_shard.core.storage import Bucket, FlatBucket, GatherOps, ShardedParam
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import Tensors, WaitThenCall
from composable_shard.core.transport.pending import Pending, Waitable
from composable_shard.policy import WIRE_DTYPES, WireFormat

MIN_NUMEL = 1024
"""A parameter with fewer elements is sent without a format."""

# Formats ------------------------------------------------------------------------------------------

_SCALE = torch.float32
_SMALLEST_SCALE = torch.finfo(_SCALE).smallest_normal
_EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True)
class _Cast:
    """Sends each element in a narrower floating-point dtype."""

    dtype: torch.dtype

    def nbytes(self, numels: list[int]) -> int:
        return sum(numels) * self.dtype.itemsize

    def encode(self, params: list[torch.Tensor], seed: int) -> torch.Tensor:
        return torch.cat(params, 1).to(self.dtype).view(torch.uint8)

    def decode(self, encoded: torch.Tensor, numels: list[int]) -> Sequence[torch.Tensor]:
        return encoded.view(self.dtype).split(numels, 1)


@dataclass(frozen=True)
class BlockFormat:
    """A format of 8 bits per element, and an fp32 scale per block of elements.

    The scale maps the largest absolute value of a block to the largest value of ``dtype``. A block
    with an infinity or a NaN arrives with infinities and NaNs only. Parameters share no block: the
    last block of a parameter may be shorter than the others.

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
        >>> format, param = BlockFormat(torch.int8), torch.randn(2, 1000)
        >>> encoded = format.encode([param])
        >>> encoded.shape, encoded.dtype
        (torch.Size([2, 1016]), torch.uint8)
        >>> (decoded,) = format.decode(encoded, [1000])
        >>> (decoded - param).abs().max() < param.abs().max() / 250
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

    def nbytes(self, numels: list[int]) -> int:
        """Return the number of bytes of a row: the scales of all blocks, then the codes."""
        return self._scales_nbytes(numels) + sum(numels)

    def encode(self, params: list[torch.Tensor], seed: int = 0) -> torch.Tensor:
        """Return the message as ``uint8``, [num_rows, nbytes(numels)]; see :class:`WireFormat`."""
        blocks = self._in_blocks(params).to(_SCALE)
        is_float, top = self.dtype.is_floating_point, self._largest
        # On the CPU, ``aminmax`` takes about ten times as long as ``amax`` and ``amin``.
        largest = blocks.amax(2, keepdim=True).maximum(-blocks.amin(2, keepdim=True))
        # Division by a scale of zero would give NaN, and a subnormal scale has fewer digits.
        scales = (largest / top).clamp_min_(_SMALLEST_SCALE)
        scaled = blocks.div_(scales)  # in place: `_in_blocks` has made a copy
        if self.stochastic:
            scaled = self._rounded_at_random(scaled, hash((self.seed, seed)))
        elif not is_float:
            scaled.round_()
        codes = scaled.clamp_(-top, top).to(self.dtype).view(torch.uint8)
        numels = [param.shape[1] for param in params]
        return torch.cat([scales.flatten(1).view(torch.uint8), *self._split(codes, numels)], 1)

    def decode(self, encoded: torch.Tensor, numels: list[int]) -> list[torch.Tensor]:
        """Return each parameter in fp32, [num_rows, numel]; see :class:`WireFormat`."""
        scales, *codes = encoded.split([self._scales_nbytes(numels), *numels], 1)
        values = self._in_blocks(codes).view(self.dtype).to(_SCALE)
        scales = scales.reshape(-1).view(_SCALE).view(len(encoded), -1, 1)
        return self._split(values.mul_(scales), numels)

    @property
    def _largest(self) -> float:
        is_float = self.dtype.is_floating_point
        return torch.finfo(self.dtype).max if is_float else torch.iinfo(self.dtype).max

    def _scales_nbytes(self, numels: list[int]) -> int:
        return sum(-(-numel // self.block) for numel in numels) * _SCALE.itemsize

    def _in_blocks(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lay parameters end to end, each padded to whole blocks: [num_rows, num_blocks, block]."""
        padded = [
            nn.functional.pad(param, (0, padding)) if padding else param
            for param, padding in ((param, -param.shape[1] % self.block) for param in params)
        ]
        return torch.cat(padded, 1).view(len(params[0]), -1, self.block)

    def _split(self, blocks: torch.Tensor, numels: list[int]) -> list[torch.Tensor]:
        """Return the rows of each parameter, without its padding."""
        sizes = chain.from_iterable((numel, -numel % self.block) for numel in numels)
        return list(blocks.flatten(1).split(list(sizes), 1)[::2])

    def _rounded_at_random(self, scaled: torch.Tensor, seed: int) -> torch.Tensor:
        """Round to one of the two nearest codes, with the probability that keeps the mean.

        This overwrites ``scaled``.
        """
        words = torch.empty(-(-scaled.numel() // 4), dtype=torch.int64, device=scaled.device)
        generator = torch.Generator(scaled.device).manual_seed(seed)
        # Each word holds four random numbers. `rand` would be slower.
        words.random_(-(1 << 63), None, generator=generator)
        noise = words.view(torch.int16)[: scaled.numel()].view(scaled.shape).to(_SCALE)
        noise.add_(0.5).div_(1 << 16)  # between -1/2 and 1/2
        if not self.dtype.is_floating_point:
            return scaled.add_(noise).round_()
        finfo = torch.finfo(self.dtype)
        power = (scaled.view(torch.int32) & _EXPONENT_BITS).view(_SCALE)
        step = power.clamp_min_(finfo.smallest_normal).mul_(finfo.eps)  # between two codes
        return scaled.div_(step).add_(noise).round_().mul_(step)


def format_of(wire: torch.dtype | WireFormat) -> WireFormat:
    """Return the format that a policy names."""
    if not isinstance(wire, torch.dtype):
        return wire
    return BlockFormat(wire) if wire.itemsize == 1 else _Cast(wire)


def _encode(format: WireFormat, params: list[torch.Tensor], seed: int = 0) -> torch.Tensor:
    encoded, numels = format.encode(params, seed), [param.shape[1] for param in params]
    expected = torch.uint8, (len(params[0]), format.nbytes(numels))
    _check(format, "encode", (encoded.dtype, tuple(encoded.shape)), expected)
    return encoded


def _decode(format: WireFormat, encoded: torch.Tensor, numels: list[int]) -> list[torch.Tensor]:
    params = list(format.decode(encoded, numels))
    shapes = [tuple(param.shape) for param in params]
    _check(format, "decode", shapes, [(len(encoded), numel) for numel in numels])
    return params


def _check(format: WireFormat, method: str, got: object, expected: object) -> None:
    if got != expected:
        name = f"{type(format).__name__}.{method}"
        raise ValueError(f"Expected {name} to return {expected}, got {got}")


# The bucket ---------------------------------------------------------------------------------------


def plug_in(planned: Mapping[nn.Parameter, ShardedParam]) -> None:
    """Choose the class `WireBucket` for parameters that are sent in a format."""
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
        gather_format: The format of the parameters; ``None`` if they are sent without a format.
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

    def gather_ops(self, shards: Tensors, channel: Channel, *, keeps_storage: bool) -> GatherOps:
        """Return the operations that gather these shards."""
        if self.gather_format is not None:
            channel = cast(Channel, _EncodedGather(self.gather_format, self.layout, channel))
        return super().gather_ops(shards, channel, keeps_storage=keeps_storage)


class _EncodedGather:
    """Gathers encoded parameters in one message; the bucket uses it in place of its channel."""

    def __init__(self, format: WireFormat, layout: BucketLayout, channel: Channel) -> None:
        self._format, self._channel = format, channel
        self._numels = [param.shard_numel for param in layout.params]
        starts = (start - layout.packed_offset for start in layout.shard_offsets)
        self._num_direct, spans = layout.num_direct, zip(starts, self._numels, strict=True)
        self._packed = list(spans)[self._num_direct :]

    @property
    def gathering(self) -> str:
        return self._channel.gathering

    def gather(self, outputs: Tensors, inputs: Tensors) -> list[Waitable]:
        sent = _encode(self._format, self._params(inputs, 1))
        shape = self._channel.mesh.num_shards, sent.shape[1]
        received = _torch.empty(*shape, dtype=torch.uint8, device=sent.device)
        works = self._channel.gather([received.view(-1)], [sent.view(-1)])
        keep = Pending([], self.gathering, owned=[sent])
        return [*works, WaitThenCall(keep, partial(self._decode_all, outputs, received))]

    def _decode_all(self, outputs: Tensors, received: torch.Tensor) -> None:
        decoded = _decode(self._format, received, self._numels)
        _torch.copy_all_(self._params(outputs, len(received)), decoded)

    def _params(self, messages: Tensors, num_rows: int) -> list[torch.Tensor]:
        """View each parameter in the messages, [num_rows, shard_numel]."""
        rows = [message.view(num_rows, -1) for message in messages]
        packed = [rows[-1].narrow(1, *span) for span in self._packed]
        return rows[: self._num_direct] + packed


def sent_nbytes(bucket: Bucket) -> list[int] | None:
    """Return the bytes of each message of an encoded gather; ``None`` for any other gather."""
    if not isinstance(bucket, WireBucket) or bucket.gather_format is None:
        return None
    return [bucket.gather_format.nbytes([param.shard_numel for param in bucket.layout.params])]


# The reduction ------------------------------------------------------------------------------------


# For each encoded reduction, by its first parameter: a counter of its runs, for their seeds.
_counts: weakref.WeakKeyDictionary[ShardedParam, Iterator[int]] = weakref.WeakKeyDictionary()


class WireReduction(ExchangedReduction):
    """The reduction of gradients that are sent in a format."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._format, self._numels = _format_and_numels(self.params)
        self._count = _counts.setdefault(self.params[0], count())

    def encode(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Encode all gradients; zeros are sent for gradients that this rank does not have."""
        shards = []
        for param, grad in zip(self.params, grads, strict=True):
            whole = param.layout.new_zeros(self._all_flags, self.dtype) if grad is None else grad
            shards.append(param.layout.padded_shards(whole.to(self.dtype)))
        names = dist.get_rank(), self._group.name, self.params[0].name, next(self._count)
        return [_encode(self._format, shards, zlib.crc32(repr(names).encode()))]

    def decode(self, rows: torch.Tensor, shards: Tensors) -> None:
        """Decode and add the gradients; on the CPU one rank at a time, which takes less memory."""
        for part in rows.split(1 if rows.is_cpu else len(rows)):
            part = part.clone(memory_format=torch.contiguous_format)  # at aligned addresses
            decoded = _decode(self._format, part, self._numels)
            for shard, each in zip(shards, decoded, strict=True):
                shard.add_(each[0] if len(each) == 1 else each.sum(0, dtype=shard.dtype))


def row_nbytes(params: Sequence[ShardedParam]) -> int:
    """Return the bytes, including flags, that a rank sends to each other rank in a reduction."""
    format, numels = _format_and_numels(params)
    return len(params) + format.nbytes(numels)


def _format_and_numels(params: Sequence[ShardedParam]) -> tuple[WireFormat, list[int]]:
    wire = params[0].policy.reduce_wire
    assert wire is not None
    return format_of(wire), [param.layout.flat.shard_numel for param in params]
