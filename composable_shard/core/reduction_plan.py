"""Which gradients are reduced together, by what they are divided, where their shards come out.

The reduced gradient is ``sum over ranks / divisor``, where the divisor is the number of ranks
unless the user chose another. It may be reached in three places, and must be reached exactly once:
before the reduction (keeps half-precision sums in range), by the reduction itself (an average),
or after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, is_
from typing import Any

import torch

from composable_shard import _torch
from composable_shard.core.bucket import packing_over
from composable_shard.core.codec import GRAD_PRE, POST
from composable_shard.core.gradient_bucket import GradBucket
from composable_shard.core.gradient_extension import EncodedBucket, Extensions, GradientCodecs
from composable_shard.core.layout import gaps
from composable_shard.core.param import ShardedParam
from composable_shard.core.transport import host
from composable_shard.core.transport.host import copies_beside_compute
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh

# By what a gradient is multiplied before, by and after its reduction. Pure arithmetic -------------


@dataclass(frozen=True)
class ReductionScale:
    """Divide by ``before``, reduce (averaging if ``averages``), divide by ``after``.

    Attributes:
        total: What a sum that is divided but once is divided by.
    """

    before: float
    averages: bool
    after: float
    total: float


def plan_scale(
    num_ranks: int,
    reduce_dtype: torch.dtype,
    *,
    divisor: float | None = None,
    can_average: bool = True,
    can_divide: bool = False,
) -> ReductionScale:
    """Split the division of a gradient sum between before, during and after the reduction.

    Args:
        num_ranks: Ranks that take part in the reduction.
        reduce_dtype: Dtype in which the sum is taken. ``float16`` sums overflow early, so half of
            the division (about the square root, a power of two) is done beforehand.
        divisor: What to divide the sum by; the number of ranks if absent.
        can_average: Whether the backend averages by itself.
        can_divide: Whether the reduction divides by any number, before it rounds; it then divides
            by ``total``.
    """
    total = float(num_ranks) if divisor is None else float(divisor)
    if can_divide:
        return ReductionScale(1.0, True, 1.0, total)
    if reduce_dtype == torch.float16:
        before = 1.0
        while before * before < total and total % (2 * before) == 0:
            before *= 2
        return ReductionScale(before, False, total / before, total)
    if divisor is None and can_average:
        return ReductionScale(1.0, True, 1.0, total)
    return ReductionScale(1.0, False, total, total)


# Which gradients are reduced together, and where their shards come out: planned once, replayed ----


class ReductionPlan:
    """The way of some plain tensors, gradients or inner tensors of gradients, through one bucket.

    Attributes:
        bucket: Where they are packed.
        members: For each its parameter, and the name of the inner tensor (``None``: all of it).
        params: The parameters, if all members are whole gradients; else ``None``.
        is_on_host: Whether their shards go to the host beside compute.
    """

    def __init__(
        self, bucket: GradBucket, members: Sequence[tuple[int, ShardedParam, str | None]], rank: int
    ) -> None:
        self.bucket = bucket
        self.members = [(param, inner) for _, param, inner in members]
        is_whole = all(inner is None for _, inner in self.members)
        self.params = [param for param, _ in self.members] if is_whole else None
        self._indices = [index for index, _, _ in members]
        self._is_plain = is_whole and all(param.form.is_plain for param, _ in self.members)
        flat = torch.empty(bucket.numel, device="meta")
        starts = bucket.layout.shard_offsets
        shards = [
            param.form.local(flat[start:], rank)
            for (param, _), start in zip(self.members, starts, strict=True)
        ]
        self._places = [(tuple(s.shape), s.stride(), int(s.storage_offset())) for s in shards]
        spans = [(place[2], s.numel()) for place, s in zip(self._places, shards, strict=True)]
        self._gaps = gaps(spans, bucket.numel)
        self._specs: tuple[list[torch.dtype], list[_torch.DTensorSpec]] = ([], [])
        devices = {param.device for param, _ in self.members}
        self._device = devices.pop() if len(devices) == 1 else None
        self.is_on_host = self._device is not None and all(
            copies_beside_compute(param.offload, param.mesh.device) for param, _ in self.members
        )

    def enter(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Pick the members' tensors, as they lie in memory, out of the gradients of all."""
        if self._is_plain:
            return [grads[index] for index in self._indices]
        return [
            None if (grad := grads[index]) is None else param.form.rows(inner_of(grad, name))
            for index, (param, name) in zip(self._indices, self.members, strict=True)
        ]

    def shards(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """View this rank's shard of each member in the flat result of the reduction."""
        return [flat.as_strided(*place) for place in self._places]

    def clear_gaps(self, flat: torch.Tensor) -> None:
        """Zero what of a result is part of no shard, for who looks at it as a whole."""
        _torch.zero_ranges_(flat, self._gaps)

    def grad_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes in which users get the gradients."""
        with _torch.without_overrides():
            return [param.final_grad_dtype(self.bucket.dtype) for param, _ in self.members]

    def specs(self, dtypes: list[torch.dtype]) -> list[_torch.DTensorSpec]:
        """Return what describes the reduced gradients as DTensors of these dtypes."""
        if self._specs[0] != dtypes:
            pairs = zip(self.members, dtypes, strict=True)
            self._specs = dtypes, [p.spec_of_grad("sharded", dtype) for (p, _), dtype in pairs]
        return self._specs[1]

    def converted_shards(self, flat: torch.Tensor, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        """Return the shards on the devices of the parameters, each in its dtype.

        They are converted in one kernel if they all go the same way. They may be under way to the
        host; see :func:`~composable_shard.core.transport.host.settle`.
        """
        if self._device is not None and dtypes.count(dtypes[0]) == len(dtypes):
            flat = flat.to(dtypes[0])
            if self.is_on_host:
                flat = host.download(flat)
            return self.shards(flat.to(self._device))
        return [
            shard.to(param.device, dtype)
            for shard, (param, _), dtype in zip(
                self.shards(flat), self.members, dtypes, strict=True
            )
        ]


def inner_of(grad: torch.Tensor, name: str | None) -> torch.Tensor:
    """Return one inner tensor of a gradient, or, without a name, all of it."""
    inner: torch.Tensor = grad if name is None else attrgetter(name)(grad)
    return inner


def narrowest_itemsize(params: Iterable[ShardedParam], dtype: torch.dtype) -> int:
    """Return the bytes of an element in the narrowest dtype that gradients have on their way.

    Args:
        params: Whose gradients.
        dtype: Dtype of the reduction.
    """
    with _torch.without_overrides():
        finals = [param.final_grad_dtype(dtype) for param in params]
    return min(one.itemsize for one in (dtype, *finals))


# Which gradients go together: sorted by dtype, and by who decides what travels --------------------

_Members = Sequence[tuple[int, ShardedParam, str | None]]

_grad_dtype_of = attrgetter("grad_dtype")


def promoted(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """Return the dtype that all of them promote to; ``None`` for none, or where there is none."""
    known = {dtype for dtype in dtypes if dtype is not None}
    if len(known) < 2:
        return next(iter(known), None)
    try:
        return reduce(torch.promote_types, known)
    except RuntimeError:  # float8 promotes to nothing
        return None


class ReductionPlanner:
    """The plans of gradients over one mesh; planned again only when something has changed.

    Attributes:
        take_any: Which of the parameters are reduced in whatever dtype their gradients have.
        rounded_first: Whose gradients are rounded before they are reduced in a wider dtype.
    """

    def __init__(self, mesh: ShardMesh, codecs: GradientCodecs) -> None:
        self._mesh = mesh
        self._codecs = codecs
        self._buckets: dict[Any, GradBucket] = {}
        self._extensions: Extensions = {}
        self._plans: list[ReductionPlan] = []
        self._are_for: tuple[Any, ...] | None = None
        self._locals: list[torch.Tensor] = []
        self._asked: list[torch.dtype | None] = []
        self._dtypes: list[torch.dtype] = []
        self.take_any: list[int] = []
        self.rounded_first: list[int] = []

    def plans_of(
        self, params: Sequence[ShardedParam], held: Sequence[torch.dtype | None]
    ) -> list[ReductionPlan]:
        """Sort plain gradients, and the inner tensors of others, by the dtype of reduction.

        Those that their tensor types encode go by themselves.

        Args:
            params: The parameters; see :meth:`look_at`.
            held: Dtypes of the gradients that wait for this reduction, which are not narrowed.
        """
        key = held, self._codecs.num_agreed
        if key != self._are_for:
            dtypes = [
                one if waiting is None else torch.promote_types(one, waiting)
                for one, waiting in zip(self._dtypes, held, strict=True)
            ]
            self._plans = self._planned(params, dtypes, [self._encodes(param) for param in params])
            self._are_for = key
        return self._plans

    def look_at(self, params: Sequence[ShardedParam]) -> None:
        """Decide the dtype of each reduction, if parameters or what is asked of them has changed.

        Where the policy has no ``reduce_dtype``, what is asked of one parameter widens them all.
        """
        locals_ = [param.local for param in params]
        with _torch.without_overrides():
            asked = list(map(_grad_dtype_of, [param.sharded for param in params]))
        is_known = len(locals_) == len(self._locals) and all(map(is_, locals_, self._locals))
        if is_known and asked == self._asked:
            return
        self._locals, self._asked, self._are_for = locals_, asked, None
        self.take_any = [index for index, param in enumerate(params) if param.takes_any_grad]
        own = [param.reduction_dtype() for param in params]
        real = promoted(dtype for dtype in own if not dtype.is_complex)
        imaginary = promoted(dtype for dtype in own if dtype.is_complex)
        self._dtypes = [(imaginary if one.is_complex else real) or one for one in own]
        self.rounded_first = [
            index
            for index, (param, dtype) in enumerate(zip(params, own, strict=True))
            if dtype != self._dtypes[index] and dtype.itemsize < param.compute_dtype.itemsize
        ]

    def release(self) -> None:
        """Free what was packed for reductions."""
        for bucket in self._buckets.values():
            bucket.release()

    def _planned(
        self, params: Sequence[ShardedParam], dtypes: list[torch.dtype], encodes: list[bool]
    ) -> list[ReductionPlan]:
        members: dict[tuple[torch.dtype, bool], list[tuple[int, ShardedParam, str | None]]] = {}
        for index, param in enumerate(params):
            codec = self._codecs.of(param)
            if codec is not None and encodes[index]:
                raise ExtensionError(
                    f"Expected a plain gradient of {param.name} to pass to {GRAD_PRE}, got "
                    f"{codec.kind.__name__}; let {POST} return a plain tensor"
                )
            for name in codec.names if codec else (None,):
                key = dtypes[index], encodes[index]
                members.setdefault(key, []).append((index, param, name))
        rank = self._mesh.shard_rank
        return [
            ReductionPlan(self._bucket(*key, some), some, rank) for key, some in members.items()
        ]

    def _encodes(self, param: ShardedParam) -> bool:
        return param.encodes_grad and self._mesh.num_shards > 1 and param.layout.numel > 0

    def _bucket(self, dtype: torch.dtype, encodes: bool, members: _Members) -> GradBucket:
        params = tuple(param for _, param, _ in members)
        layouts = tuple(param.layout for param in params)
        narrowest = narrowest_itemsize(params, dtype)
        key = params if encodes else layouts, dtype, narrowest
        bucket = self._buckets.get(key)
        if bucket is None and encodes:
            bucket = EncodedBucket(params, self._mesh, dtype, narrowest, self._extensions)
        elif bucket is None:
            mesh = self._mesh
            packing = packing_over(mesh)
            bucket = GradBucket(layouts, mesh.num_shards, dtype, mesh.device, packing, narrowest)
        return self._buckets.setdefault(key, bucket)
