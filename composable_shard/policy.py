"""What the user decides once for each ``fully_shard`` call: frozen, validated values."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Choose the dtypes of compute, reduction, outputs, buffers and gradients.

    Casting happens at module boundaries and on whole buckets; sharded parameters and the
    optimizer keep the original dtype.

    Args:
        param_dtype: Dtype of the unsharded parameters, hence of compute and of the all-gather.
            ``None`` keeps the original dtype.
        reduce_dtype: Dtype of the gradient reduction and of gradients accumulated without sync.
            ``None`` means the dtype of compute.
        output_dtype: Dtype that floating-point outputs of forward are cast to. ``None`` keeps.
        cast_forward_inputs: Whether floating-point inputs of forward are cast to ``param_dtype``.
        buffer_dtype: Dtype that floating-point buffers have during forward; changes made to them
            are copied back. ``None`` keeps.
        grad_dtype: Dtype of the sharded gradients. ``None`` means the dtype of the parameter.

    Raises:
        TypeError: If a dtype is not a ``torch.dtype``, or ``cast_forward_inputs`` not a bool.
        ValueError: If a dtype is not floating-point.

    Source: ``torch.distributed.fsdp.MixedPrecisionPolicy``; the keyword-only fields are new.

    Example:
        >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).grad_dtype
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    _: KW_ONLY
    buffer_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(
                    f"Expected {name} to be a torch.dtype or None, got "
                    f"{type(dtype).__name__}: {dtype!r}"
                )
            if not (dtype.is_floating_point or dtype.is_complex):
                raise ValueError(f"Expected {name} to be a floating-point dtype, got {dtype}")
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                "Expected cast_forward_inputs to be a bool, got "
                f"{type(self.cast_forward_inputs).__name__}: {self.cast_forward_inputs!r}"
            )

    def compute_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype of the unsharded parameter; integers are never cast."""
        if self.param_dtype is None or not (original.is_floating_point or original.is_complex):
            return original
        return self.param_dtype

    def reduction_dtype(self, original: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are summed over ranks and microbatches."""
        return self.reduce_dtype or self.compute_dtype(original)


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep sharded parameters, gradients and optimizer states on the device of compute.

    Source: ``torch.distributed.fsdp.OffloadPolicy``.

    Example:
        >>> OffloadPolicy()
        OffloadPolicy()
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients and optimizer states on the CPU.

    Shards are copied to the device of compute before they are gathered, reduced gradients back
    after; the optimizer steps on the CPU.

    Args:
        pin_memory: Whether the shards lie in pinned memory, which copies faster and beside compute
            but cannot be swapped out. Skipped, with one warning, where there is no accelerator.

    Raises:
        TypeError: If ``pin_memory`` is not a bool.

    Source: ``torch.distributed.fsdp.CPUOffloadPolicy``.

    Example:
        >>> CPUOffloadPolicy(pin_memory=False)
        CPUOffloadPolicy(pin_memory=False)
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise TypeError(
                "Expected pin_memory to be a bool, got "
                f"{type(self.pin_memory).__name__}: {self.pin_memory!r}"
            )
