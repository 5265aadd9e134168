"""The flat buffers in which gradients are reduced.

A gradient that is dense, evenly sharded and in a dtype that the reduce-scatter takes IS its input.
Everything else is copied into a buffer; small gradients share one (``packing.py``). Behind them
travels one flag for each gradient, set by the ranks that have it: the reduced flag tells every rank
whether anybody did, without another collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from composable_shard import _torch
from composable_shard.core.grads.packing import PackedGrads
from composable_shard.core.params.layout import ParamLayout, plan_bucket
from composable_shard.core.params.staging import matching_pieces


@dataclass
class GradTransfer:
    """One reduce-scatter launch of a bucket.

    Attributes:
        outputs: Views of ``result``, one for each input.
        inputs: Gradients and scratch regions, [num_shards * n] each.
        result: This rank's reduced shards, then the flags.
        present: For each gradient, whether this rank has it.
    """

    result: torch.Tensor
    present: list[bool]
    outputs: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)

    def stay(self) -> None:
        """Let the inputs of one shard be the result, without a collective."""
        for out, full in zip(self.outputs, self.inputs, strict=True):
            out.copy_(full[: out.numel()])


class GradBucket:
    """Gradients that are reduced together, in one dtype.

    Attributes:
        layout: Where the shards of each gradient lie in the result.
        dtype: Dtype of the reduction.
    """

    def __init__(
        self,
        params: Sequence[ParamLayout],
        num_shards: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout = plan_bucket(tuple(params), num_shards, dtype.itemsize)
        self.dtype = dtype
        self._device = device
        fuses = device.type != "cpu" or all(layout.params[i].is_even for i in layout.packed)
        self._packed = PackedGrads(layout, len(params), dtype, device, fuses=fuses)

    def start_reduce(
        self,
        grads: Sequence[torch.Tensor | None],
        *,
        widens: bool = False,
        reads_padding: bool = False,
    ) -> GradTransfer:
        """Turn gradients, ``None`` where this rank has none, into reduce-scatter inputs.

        The gradients are given away: the reduction may overwrite them.

        Args:
            grads: The gradients, in the order of the layout.
            widens: Whether the reduce-scatter casts to the dtype of the reduction by itself.
            reads_padding: Whether it looks at padding, which must be zeros then.
        """
        layout = self.layout
        result = self._empty(layout.shard_numel + len(grads))
        transfer = GradTransfer(result, [grad is not None for grad in grads])
        for index in layout.direct:
            self._add(transfer, index, self._in_order(layout.params[index], grads[index], widens))
        for index in layout.permuted:
            self._add(transfer, index, self._permuted(layout.params[index], grads[index]))
        end = result[layout.packed_offset :] if layout.packed_offset else result
        numels = self._packed.numels
        transfer.outputs += end.split_with_sizes(numels) if len(numels) > 1 else [end]
        transfer.inputs += self._packed.pack(grads, transfer.present, clears=reads_padding)
        return transfer

    def release(self) -> None:
        """Free what was packed, once this rank has its result."""
        self._packed.release()

    def settle(self, transfer: GradTransfer, divisor: float) -> None:
        """Divide what a collective has summed."""
        if divisor != 1:
            transfer.result.div_(divisor)

    @property
    def numel(self) -> int:
        """Elements of a result without its flags."""
        return self.layout.shard_numel

    def flag(self, transfer: GradTransfer, index: int) -> None:
        """Note in a result that there is a gradient, whatever the ranks had."""
        transfer.result[self.numel + index].fill_(1)

    def anybody_has(self, transfer: GradTransfer) -> list[bool]:
        """Tell for each gradient whether any rank had it; reads the flags only if this one did not.

        Hazard: reading a flag waits for the device. Guard: it is read only by a rank that lacks a
        gradient, once the reduction has been waited for.
        """
        if all(transfer.present):
            return transfer.present
        flags = transfer.result[self.layout.shard_numel :].tolist()
        return [flag != 0 for flag in flags]

    def _add(self, transfer: GradTransfer, index: int, full: torch.Tensor) -> None:
        start = self.layout.shard_offsets[index]
        numel = self.layout.params[index].shard_numel
        transfer.outputs.append(transfer.result[start : start + numel])
        transfer.inputs.append(full)

    def _in_order(
        self, param: ParamLayout, grad: torch.Tensor | None, widens: bool = False
    ) -> torch.Tensor:
        """Return [num_shards * shard_numel], without a copy where the gradient allows."""
        if grad is None:
            return self._empty(param.gathered_numel).zero_()
        fits = grad.dtype == self.dtype
        if widens and not fits:
            fits = torch.promote_types(grad.dtype, self.dtype) == self.dtype
        if fits and param.is_even and grad.is_contiguous():
            return grad.view(-1)
        scratch = self._empty(param.gathered_numel)
        scratch[: param.numel].view(param.shape).copy_(grad)
        scratch[param.numel :].zero_()
        return scratch

    def _permuted(self, param: ParamLayout, grad: torch.Tensor | None) -> torch.Tensor:
        scratch = self._empty(param.gathered_numel)
        if grad is None or not param.is_even:
            scratch.zero_()
        if grad is not None:
            for full, shards in matching_pieces(param, grad.reshape(-1), scratch):
                shards.copy_(full)
        return scratch

    def _empty(self, *shape: int) -> torch.Tensor:
        return _torch.empty(*shape, dtype=self.dtype, device=self._device)
