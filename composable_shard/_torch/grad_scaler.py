"""The grad scaler of torch, with public names for what a subclass of ours replaces or reads."""

from __future__ import annotations

import torch

from composable_shard._torch.tensors import carried


class GradScalerBase(torch.amp.GradScaler):
    """A scaler whose subclasses say how the gradients of an optimizer are unscaled."""

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, found_inf: torch.Tensor
    ) -> None:
        """Multiply all gradients by ``inverse``; set ``found_inf`` to 1 if one is not finite.

        Called once for each step, whether from ``unscale_``, from ``step``, or for an optimizer
        that unscales in its own kernel; then ``inverse`` is 1.
        """

    def scale_on(self, device: torch.device) -> torch.Tensor:
        """Return the scale, a float32 scalar, on ``device``; the first call decides where it is."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return carried(self._scale, device)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        self.unscale_gradients(optimizer, inv_scale, found_inf)
        return {found_inf.device: found_inf}
