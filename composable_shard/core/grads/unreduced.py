"""Gradients that stay on this rank until a later backward reduces them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from composable_shard.core.grads.sharded_grad import (
    hold_for_replicas,
    reduced,
    set_unreduced,
    to_reduce,
    unreduced,
    unreplicated,
)
from composable_shard.core.params.param import ShardedParam
from composable_shard.core.settings import ReductionSettings
from composable_shard.mesh import ShardMesh


class UnreducedGradients:
    """Accumulates the gradients of some parameters on the sharded parameters, unsharded.

    What stands there is averaged over all ranks by a DTensor that is asked for it. With a divisor
    other than their number it is scaled to make that average the gradient.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        mesh: ShardMesh,
        settings: ReductionSettings,
    ) -> None:
        self._params = list(params)
        self._mesh = mesh
        self._settings = settings

    def accumulate(self) -> None:
        """Add the unsharded gradients to what is not yet reduced. Collective: none."""
        params = to_reduce(self._params)
        for param in params:
            param.is_unsynced = True
            if self._mesh.num_replicas > 1:
                hold_for_replicas(param)  # whether or not this rank adds to it: others may
        for param in params:  # one after the other: each is freed when it has been added
            (grad,) = take_all_unsharded([param])
            if grad is None:
                continue
            grad = narrowed(param, grad)
            if self._factor != 1:
                grad = grad * self._factor
            total = self._total(param)
            if total is None:
                set_unreduced(param, grad.to(_wide_enough(param, param.reduction_dtype(), grad)))
            elif total.dtype == _wide_enough(param, total.dtype, grad):
                total.add_(grad.to(total.device))
            else:
                set_unreduced(param, total + grad.to(total.device))
        self._fold_alike(params)

    def with_earlier(self, param: ShardedParam, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Take away what earlier microbatches left; return the sum with ``grad``."""
        total = unreduced(param)
        if total is None:
            return grad
        param.sharded.grad = None
        total = total.to(self._mesh.device)
        if self._factor != 1:
            total.div_(self._factor)
        if grad is None:
            return total
        grad = narrowed(param, grad)
        is_wide = total.dtype == _wide_enough(param, total.dtype, grad)
        return total.add_(grad) if is_wide else total + grad

    @property
    def _factor(self) -> float:
        divisor = self._settings.divisor
        return 1.0 if divisor is None else self._mesh.num_ranks / divisor

    def _total(self, param: ShardedParam) -> torch.Tensor | None:
        """Return the unsharded sum to add to; one that is reduced is turned into one."""
        if param.sharded.grad is None:
            return None
        if unreduced(param) is None:
            self._fold(param)
        return unreduced(param)

    def _fold(self, param: ShardedParam) -> None:
        """Express a gradient that is reduced over the shards as one that is not.

        The mean over ranks of "N times my rows, zero elsewhere" is the reduced gradient. It keeps
        its dtype if that is the wider one, and the next reduction is taken in it.
        """
        shard = unreplicated(param)
        if shard is None:
            shard = reduced(param)
        assert shard is not None
        dtype = torch.promote_types(shard.dtype, param.reduction_dtype())
        full = param.form.new_zeros(shard, dtype)
        place = param.form.shard_of(full, self._mesh.shard_rank)
        place.copy_(shard)
        if not param.form.is_replicated:
            place.mul_(self._mesh.num_shards)
        set_unreduced(param, full)

    def _fold_alike(self, params: Sequence[ShardedParam]) -> None:
        """Fold the reduced gradients that all ranks must fold, or none.

        Which parameters a rank used may differ between ranks; the dtype of the next reduction must
        not, so what it would round is folded whether or not this rank added to it. So is what every
        rank has all of, as the mean over ranks would miss those that had not folded.
        """
        for param in params:
            shard = reduced(param)
            if param.form.is_replicated:
                folds = shard is not None or unreplicated(param) is not None
            else:
                folds = shard is not None and param.reduction_dtype() != shard.dtype
            if folds:
                self._fold(param)


def narrowed(param: ShardedParam, grad: torch.Tensor) -> torch.Tensor:
    """Round a gradient to its parameter's own dtype of reduction, as it is of each microbatch."""
    dtype = param.reduction_dtype()
    is_wider = grad.dtype.itemsize > dtype.itemsize and not param.takes_any_grad
    return grad.to(dtype) if is_wider else grad


def _wide_enough(param: ShardedParam, dtype: torch.dtype, grad: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a gradient is added to a sum that would be of ``dtype``."""
    return torch.promote_types(dtype, grad.dtype) if param.takes_any_grad else dtype


def take_all_unsharded(params: Sequence[ShardedParam]) -> list[torch.Tensor | None]:
    """Take away what autograd accumulated on the unsharded parameters: this rank's part of it."""
    grads: list[torch.Tensor | None] = []
    for param in params:
        unsharded = param.unsharded
        grad = None if unsharded is None else unsharded.grad
        if grad is not None:
            assert unsharded is not None
            unsharded.grad = None
            if param.placement.model is not None:
                grad = param.placement.model_local_grad(grad)
        grads.append(grad)
    return grads
