"""The policies of a ``fully_shard`` call, as frozen dataclasses that check their arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.arguments import call_for_parameter, check_dtype, check_type, check_value

ParamDtypeOverride = Callable[[nn.Parameter], torch.dtype | None]

WIRE_DTYPES = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


@runtime_checkable
class WireFormat(Protocol):
    """Bring your own format for the messages of a gather or of a reduction.

    A format encodes the parameters of a group, or their gradients. These have a row for each rank:
    the shard of that rank, padded with zeros. Each row becomes a row of bytes that can be decoded
    without the others. In a gather, a rank encodes only its own row. Ranks compare the ``repr`` of
    a format before the first gather, unless it contains an address.

    Example:
        >>> class Half:
        ...     def nbytes(self, numels):
        ...         return 2 * sum(numels)
        ...     def encode(self, params, seed):
        ...         return torch.cat(params, 1).half().view(torch.uint8)
        ...     def decode(self, encoded, numels):
        ...         return encoded.view(torch.float16).split(numels, 1)
        >>> policy = MixedPrecisionPolicy(gather_wire=Half())
    """

    def nbytes(self, numels: list[int]) -> int:
        """Return the number of bytes of a row, given the number of elements of each parameter."""

    def encode(self, params: list[torch.Tensor], seed: int) -> torch.Tensor:
        """Return the message as ``uint8``, [num_rows, nbytes(numels)].

        Args:
            params: The elements of each parameter, [num_rows, numel], all in one dtype. They must
                not be changed.
            seed: In a reduction, a number for stochastic rounding, which differs between ranks,
                groups and steps. In a gather, 0, because gathers of the same shards must send the
                same bytes.
        """

    def decode(self, encoded: torch.Tensor, numels: list[int]) -> Sequence[torch.Tensor]:
        """Return each parameter, [num_rows, numel], in any floating-point dtype.

        Encoded zeros must decode to zeros, because a rank without a gradient sends zeros.

        Args:
            encoded: Messages of several ranks, contiguous, [num_rows, nbytes(numels)].
            numels: The number of elements of a row of each parameter.
        """


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Choose the dtypes of compute, reduction, outputs, buffers and gradients.

    Inputs and outputs are cast where a forward begins and ends, and parameters when they are
    gathered. Sharded parameters and optimizer states keep the original dtype.

    Args:
        param_dtype: Dtype of the unsharded parameters, and therefore of compute and of the
            all-gather. ``None`` keeps the original dtype.
        reduce_dtype: Dtype of the gradient reduction and of gradients accumulated without sync.
            ``None`` means the ``grad_dtype`` of each parameter or, if that is not set, the
            parameter's own dtype; ``param_dtype`` has no influence. If these dtypes differ within a
            group, its gradients are reduced in the dtype to which they promote.
        output_dtype: Dtype of floating-point outputs of forward. ``None`` casts nothing.
        cast_forward_inputs: Whether floating-point inputs of forward are cast to ``param_dtype``.
        buffer_dtype: Dtype of floating-point buffers during forward. If forward changes a buffer,
            the change is copied back. ``None`` casts nothing.
        grad_dtype: Dtype of sharded gradients, for parameters without their own ``grad_dtype``.
            ``None`` means the dtype of the parameter.
        param_dtype_override_fn: Called once with each parameter by ``fully_shard``. If it returns
            the parameter's own dtype, the parameter is not cast; ``None`` and ``param_dtype`` mean
            ``param_dtype``. It must return the same on all ranks. Inputs are cast to
            ``param_dtype`` in any case.
        gather_wire: The format of parameters in the messages of the all-gather: ``bfloat16``,
            ``float16``, ``float8_e4m3fn``, ``float8_e5m2``, ``int8``, a :class:`BlockFormat` or
            your own :class:`WireFormat`. The shards are encoded, and all ranks compute with the
            decoded values, in ``param_dtype``. ``None`` sends ``param_dtype``. Parameters with
            fewer than 1,024 elements or fewer than two dims, parameters that are not floating-point
            and tensor subclasses are sent without a format. A single rank sends nothing, so it
            rounds nothing.
        reduce_wire: The format of the gradients of the same parameters in the messages of the
            reduction over the shards. Each rank sums the decoded gradients in fp32 or wider.
            ``None`` sends ``reduce_dtype``.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``, ``cast_forward_inputs`` is not a bool,
            ``param_dtype_override_fn`` is not callable, or a wire argument is not a format.
        ValueError: If a dtype is not floating-point, a wire argument is a dtype that is not listed
            above, or ``gather_wire`` rounds stochastically.

    Source: ``torch.distributed.fsdp.MixedPrecisionPolicy``; ``buffer_dtype``, ``grad_dtype``,
    ``gather_wire`` and ``reduce_wire`` are new.

    Example:
        >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).grad_dtype
    """

    # Whether gradients are rounded to the compute dtype before the reduction, as torch did before
    # 2.15.
    rounds_gradients: ClassVar[bool] = False

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    _: KW_ONLY
    buffer_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    param_dtype_override_fn: ParamDtypeOverride | None = None
    gather_wire: torch.dtype | WireFormat | None = None
    reduce_wire: torch.dtype | WireFormat | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "grad_dtype"):
            check_dtype(name, getattr(self, name))
        casts, override = self.cast_forward_inputs, self.param_dtype_override_fn
        check_type("cast_forward_inputs", casts, isinstance(casts, bool), "a bool")
        is_function = override is None or callable(override)
        check_type("param_dtype_override_fn", override, is_function, "callable or None")
        gather_wire = self.gather_wire
        _check_wire("gather_wire", gather_wire)
        _check_wire("reduce_wire", self.reduce_wire)
        is_repeatable = not getattr(gather_wire, "stochastic", False)
        what = "not to be stochastic: forward and backward must gather the same values"
        check_value("gather_wire", gather_wire, is_repeatable, what)

    def compute_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype of the unsharded parameter; integers are never cast."""
        if self.param_dtype is None or not (original.is_floating_point or original.is_complex):
            return original
        return of_its_kind(self.param_dtype, original)

    def for_parameter(self, name: str, param: nn.Parameter) -> MixedPrecisionPolicy:
        """Return the policy of one parameter, with the override applied.

        Args:
            name: Its name in messages.
            param: The parameter, before it is sharded.

        Raises:
            ValueError: If the override returns anything but an allowed dtype or ``None``. Also if
                ``param_dtype`` would cast a frozen parameter that may hold packed values, and the
                override returns no dtype for it.
        """
        override = self.param_dtype_override_fn
        asked = call_for_parameter("param_dtype_override_fn", override, name, param)
        if asked not in (None, self.param_dtype, param.dtype):
            got = asked if isinstance(asked, torch.dtype) else f"{type(asked).__name__}: {asked!r}"
            raise ValueError(
                f"Expected param_dtype_override_fn to return None, param_dtype ({self.param_dtype})"
                f" or the parameter's own dtype ({param.dtype}) for parameter '{name}', got {got}"
            )
        if asked is None:
            self._check_not_packed(name, param)
        if override is None:
            return self
        is_cast = asked is not None and (asked.is_floating_point or asked.is_complex)
        dtype = asked if is_cast else self.param_dtype
        return replace(self, param_dtype=dtype, param_dtype_override_fn=None)

    def _check_not_packed(self, name: str, param: nn.Parameter) -> None:
        """Raise if a cast would corrupt packed values of a frozen parameter."""
        kind = _torch.class_in_memory(_torch.local_part(param))
        cast = self.compute_dtype(param.dtype)
        if kind is not None and not param.requires_grad and cast != param.dtype:
            raise ValueError(
                f"Expected frozen parameter '{name}' of class {kind.__name__} in {param.dtype}, "
                f"got param_dtype {cast}, and a cast would corrupt packed values; store it in that "
                "dtype, or return its dtype from param_dtype_override_fn"
            )

    def wires(self) -> str:
        """Return the wire formats as text that is the same on all ranks; empty without formats."""
        wires = {"gather_wire": self.gather_wire, "reduce_wire": self.reduce_wire}
        # An address differs between ranks.
        texts = {n: type(w).__name__ if " at 0x" in repr(w) else repr(w) for n, w in wires.items()}
        return "".join(f", {name} {texts[name]}" for name in wires if wires[name] is not None)

    def without_override(self) -> MixedPrecisionPolicy:
        """Return the policy for module inputs and outputs, without the per-parameter override."""
        return replace(self, param_dtype_override_fn=None)

    def reduction_dtype(self, dtype: torch.dtype, asked: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype in which a gradient is summed over ranks and microbatches.

        Args:
            dtype: Dtype of the parameter.
            asked: The ``grad_dtype`` of the parameter, if it is set.
        """
        return of_its_kind(self.reduce_dtype or asked or self.grad_dtype or dtype, dtype)


def _check_wire(name: str, wire: object) -> None:
    """Raise unless a format is one of ``WIRE_DTYPES``, a :class:`WireFormat` or ``None``."""
    if isinstance(wire, torch.dtype):
        known = ", ".join(map(str, WIRE_DTYPES))
        check_value(name, wire, wire in WIRE_DTYPES, f"to be one of {known}")
        return
    fits = wire is None or (isinstance(wire, WireFormat) and not isinstance(wire, type))
    what = "a torch.dtype, an object with nbytes, encode and decode, or None"
    check_type(name, wire, fits, what)


def of_its_kind(dtype: torch.dtype, original: torch.dtype) -> torch.dtype:
    """Return ``dtype`` for tensors of dtype ``original``; its complex form for complex tensors."""
    if original.is_complex and not dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    return dtype


@dataclass(frozen=True)
class Sharding:
    """When the ranks communicate: for each use of the parameters, or once in a step.

    The optimizer always has shards. The presets of ``fully_shard(sharding=...)`` are:

    - ``"zero3"``: ``Sharding()``, the least memory.
    - ``"zero2"``: ``Sharding(gather="step")``. The whole parameters stay in memory.
    - ``"zero1"``: ``Sharding(gather="step", reduce="step")``. The whole gradients stay, too.
    - ``"hybrid"``: ``Sharding(replicas="shard")``, on a mesh ``(replicate, shard)``. The optimizer
      states are sharded over all ranks. Most traffic stays within the shards.

    Args:
        gather: ``"use"`` gathers the parameters for each forward and each backward. ``"step"``
            keeps them gathered until an optimizer has stepped, or a shard was written.
        reduce: ``"backward"`` reduces the gradients in each backward. ``"step"`` accumulates them
            without sync; an optimizer reduces them before it steps.
        replicas: ``"copy"``: each replica of a hybrid mesh has all shards. ``"shard"``: replicas
            have different parts of each shard. The first forward of a step, and an evaluation,
            gathers these parts, and each rank keeps the shard. Each backward reduces gradients over
            the shards only; an optimizer reduces them over the replicas before it steps.

    Raises:
        ValueError: If a choice is none of these.

    Example:
        >>> Sharding(gather="step")
        Sharding(gather='step', reduce='backward', replicas='copy')
    """

    gather: Literal["use", "step"] = "use"
    reduce: Literal["backward", "step"] = "backward"
    replicas: Literal["copy", "shard"] = "copy"

    def __post_init__(self) -> None:
        fits = self.gather in ("use", "step")
        check_value("gather", self.gather, fits, "to be 'use' or 'step'")
        fits = self.reduce in ("backward", "step")
        check_value("reduce", self.reduce, fits, "to be 'backward' or 'step'")
        fits = self.replicas in ("copy", "shard")
        check_value("replicas", self.replicas, fits, "to be 'copy' or 'shard'")


_SHARDINGS = {
    "zero1": Sharding(gather="step", reduce="step"),
    "zero2": Sharding(gather="step"),
    "zero3": Sharding(),
    "hybrid": Sharding(replicas="shard"),
}


def checked_sharding(sharding: object, reshard_after_forward: object) -> Sharding:
    """Return the `Sharding` that ``fully_shard(sharding=...)`` selects; by default, ZeRO-3."""
    if isinstance(sharding, Sharding):
        found = sharding
    else:
        name = "zero3" if sharding is None else sharding
        fits = isinstance(name, str) and name in _SHARDINGS
        names = ", ".join(map(repr, _SHARDINGS))
        check_value("sharding", sharding, fits, f"to be one of {names} or a Sharding")
        found = _SHARDINGS[str(name)]
    if found.gather == "step" and reshard_after_forward is not None:
        raise ValueError(
            f"Expected no reshard_after_forward with {found}, which keeps the parameters until the "
            f"optimizer has stepped, got {reshard_after_forward!r}; leave out one of them"
        )
    return found


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep sharded parameters, gradients and optimizer states on the compute device.

    Source: ``torch.distributed.fsdp.OffloadPolicy``.

    Example:
        >>> OffloadPolicy()
        OffloadPolicy()
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients and optimizer states on the CPU.

    Shards are copied to the compute device before each gather, and reduced gradients are copied
    back. The optimizer steps on the CPU.

    Args:
        pin_memory: Whether shards and gradients are in pinned memory. Copies are then faster and
            overlap with compute, but pinned memory cannot be swapped out. Without an accelerator,
            ``True`` has no effect, and a warning says so once.

    Raises:
        TypeError: If ``pin_memory`` is not a bool.

    Source: ``torch.distributed.fsdp.CPUOffloadPolicy``.

    Example:
        >>> CPUOffloadPolicy(pin_memory=False)
        CPUOffloadPolicy(pin_memory=False)
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_type("pin_memory", self.pin_memory, isinstance(self.pin_memory, bool), "a bool")


Offload = OffloadPolicy | Mapping[str, OffloadPolicy] | None


def offload_of(name: str, policy: Offload) -> CPUOffloadPolicy | None:
    """Return the offload policy of the parameter ``name``; ``None`` if it is not offloaded."""
    if isinstance(policy, Mapping):
        policy = policy.get(name)
    return policy if isinstance(policy, CPUOffloadPolicy) else None


def check_policies(mp_policy: object, offload_policy: object) -> None:
    """Raise ``TypeError`` unless the arguments of ``fully_shard`` are policies.

    Args:
        mp_policy: The policy of dtypes.
        offload_policy: An offload policy, a mapping of them by parameter name, or ``None``.
    """
    _check_own_class("mp_policy", mp_policy, MixedPrecisionPolicy)
    is_one = not isinstance(offload_policy, Mapping)
    members: Any = {"": offload_policy} if is_one else offload_policy
    for name, member in members.items():
        if member is not None:
            place = f" for '{name}'" if name else ""
            _check_own_class("offload_policy", member, OffloadPolicy, place)


def _check_own_class(name: str, value: object, kind: type, place: str = "") -> None:
    """Raise ``TypeError`` unless a value has our class; torch has a class of the same name."""
    if not isinstance(value, kind):
        raise TypeError(
            f"Expected {name} to be a composable_shard.{kind.__name__}{place}, got "
            f"{type(value).__module__}.{type(value).__name__}"
        )


def check_names(policy: Offload, names: set[str]) -> None:
    """Raise ``ValueError`` if a mapping of policies names a parameter that does not exist."""
    unknown = sorted(set(policy) - names) if isinstance(policy, Mapping) else []
    what = f"to name parameters out of {sorted(names)}"
    check_value("offload_policy", unknown, not unknown, what)


def pins(policy: CPUOffloadPolicy) -> bool:
    """Return whether memory is pinned for ``policy``; warn once if it cannot be."""
    if policy.pin_memory and not _torch.pins_memory():
        _warn_not_pinned()
    return policy.pin_memory and _torch.pins_memory()


def copies_overlap_compute(policy: CPUOffloadPolicy | None, device: torch.device) -> bool:
    """Return whether copies of offloaded tensors overlap with compute on ``device``.

    They do so only from and to pinned memory; other copies block.
    """
    return _torch.has_streams(device) and policy is not None and pins(policy)


@cache
def _warn_not_pinned() -> None:
    warnings.warn(
        "CPUOffloadPolicy(pin_memory=True) pins no memory: there is no accelerator to copy to; "
        "pass pin_memory=False to silence this warning",
        stacklevel=2,
    )
