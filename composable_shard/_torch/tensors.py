"""Storages, version counters, fused kernels, and the base of our grad scaler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from composable_shard._torch import streams

# Storages, version counters and fused kernels -----------------------------------------------------

# A context that disables `__torch_function__` of tensor subclasses, which halves the time to read
# their attributes. No code of the user may run inside.
without_overrides = torch._C.DisableTorchFunctionSubclass
# A context in which ops record no graph and views have version counters of their own, which takes
# less than half of the time. For tensors that need no gradients.
without_autograd = torch._C._AutoDispatchBelowADInplaceOrView


def fresh_storage_view(view: Tensor) -> Tensor:
    """Return the same view of a storage, with a version counter of its own.

    A write through another tensor does not bump this counter. So autograd accepts saved views of
    the result after the memory was freed and gathered again.
    """
    with torch.inference_mode(False), torch.no_grad():
        fresh = torch.empty(0, dtype=view.dtype, device=view.device)
        offset = int(view.storage_offset())
        return fresh.set_(view.untyped_storage(), offset, view.shape, view.stride())


def with_own_storage(view: Tensor) -> Tensor:
    """Return a tensor in the memory of ``view``, with a storage that covers just this tensor."""
    if view.untyped_storage().device.type == "meta":  # fake tensors, too
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
    begin = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[begin : begin + view.numel() * view.itemsize]
    tensor = torch.empty(0, dtype=view.dtype, device=view.device)
    return tensor.set_(storage, 0, view.shape, view.stride())


def preserved_versions(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return a context that keeps version counters, whatever is written inside."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


set_versions = torch._C._autograd._unsafe_set_version_counter
"""Sets the version counters of a tuple of tensors; autograd checks those of saved tensors."""


chunk_cat: Callable[..., Tensor] = torch._chunk_cat
"""Cuts each tensor along dim 0 into ``num_chunks`` padded chunks; row i of ``out`` gets chunks i.

One fused kernel that pads with zeros and casts to the dtype of ``out``.
"""


copy_each_: Callable[..., object] = torch._foreach_copy_
"""Copies one or more tensors into others of the same shapes, in one call; casts."""


def copy_all_(into: list[Tensor], sources: list[Tensor]) -> None:
    """Copy any number of tensors into others of the same shapes, in one call; cast."""
    if into:
        copy_each_(into, sources)


divide_all_: Callable[[list[Tensor], float], object] = torch._foreach_div_
"""Divides tensors in place, in one kernel where the device has one."""


multiply_all_: Callable[[list[Tensor], Tensor], object] = torch._foreach_mul_
"""Multiplies tensors in place by a scalar tensor, in one kernel where the device has one."""


norms_of_all: Callable[..., Sequence[Tensor]] = torch._foreach_norm
"""Takes the norm of each tensor, of an order and in a dtype, in one kernel where there is one."""


unscale_all_: Callable[..., object] = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiplies tensors of one device and dtype in place by a scalar tensor, in one kernel.

Takes the tensors, ``found_inf``, and the scalar. Sets ``found_inf``, of one element, to 1 if any
element of the tensors is infinite or NaN.
"""


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a sparse tensor without a copy, coalesced or not."""
    return tensor._values()


def carried(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to another device; it is safe to read there.

    Hazard: the host reads an asynchronous copy before it is complete. Guard: only copies to a
    device, which runs its work in order, are asynchronous.
    """
    return tensor.to(device, non_blocking=streams.has_streams(device))


# The grad scaler of torch, with public names for the methods that our subclass overrides ----------


class GradScalerBase(torch.amp.GradScaler):
    """Base of a grad scaler; the subclass defines :meth:`unscale_gradients`."""

    def unscale_gradients(self, optimizer: Optimizer, inverse: Tensor, found_inf: Tensor) -> None:
        """Multiply all gradients by ``inverse``; set ``found_inf`` to 1 if one is not finite.

        Called once for each step, by ``unscale_`` or by ``step``. For an optimizer that unscales in
        its own kernel, ``inverse`` is 1.
        """

    def scale_on(self, device: torch.device) -> Tensor:
        """Return the scale, a float32 scalar, on ``device``; the first call creates it there."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return carried(self._scale, device)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        self.unscale_gradients(optimizer, inv_scale, found_inf)
        return {found_inf.device: found_inf}
