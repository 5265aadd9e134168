"""The oracle: the same model, whole on every rank, its gradients averaged by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from heard import from_all_ranks
from torch import nn

from composable_shard import MixedPrecisionPolicy


class Unsharded:
    """A plain copy of a model that trains as the sharded one should.

    Parameters are cast to the compute dtype one by one, and the gradients of all ranks are added
    in the order of ranks and divided, in the dtype of reduction. With one rank nothing is reduced,
    hence nothing rounded to that dtype.

    Args:
        model: The model before it is sharded.
        policy: The policy that the sharded one has, all of it.
        groups: Names of the modules that ``fully_shard`` is applied to: there, inputs and outputs
            are cast.

    Attributes:
        model: The copy; its parameters are what the optimizer sees.
        waiting: By name, this rank's accumulated gradients that are not reduced.
        reduced: By name, the mean gradients over the ranks.
        largest: By name, the largest element of any gradient that went into these, on any rank.
        is_partial: Whether the last backward was not reduced: on all ranks, used or not, reduced
            gradients are then ``Partial`` too.
        has_folded: Whether unreduced gradients were added to reduced ones: the sum of several
            ranks' numbers then depends, in its last bit, on the order of summation.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: MixedPrecisionPolicy | None = None,
        groups: Iterable[str] = ("",),
    ) -> None:
        self.model = copy.deepcopy(model)
        self.policy = policy or MixedPrecisionPolicy()
        self.waiting: dict[str, torch.Tensor] = {}
        self.reduced: dict[str, torch.Tensor] = {}
        self.largest: dict[str, float] = {}
        self.has_folded = self.is_partial = False
        self._means: dict[str, torch.Tensor] = {}
        self._leaves: dict[str, torch.Tensor] = {}
        for name in groups:
            module = self.model.get_submodule(name)
            module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
            module.register_forward_hook(self._cast_output)

    # Compute --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        by_id = {
            id(param): leaf
            for param, leaf in zip(self.model.parameters(), self.leaves().values(), strict=True)
        }
        lent: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for module in self.model.modules():
            for name, param in module._parameters.items():
                if param is not None:
                    lent.append((module._parameters, name, param))
                    module._parameters[name] = by_id[id(param)]  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None and self.policy.buffer_dtype is not None:
                    lent.append((module._buffers, name, buffer))
                    module._buffers[name] = _cast(buffer, self.policy.buffer_dtype)
        try:
            return self.model(*args, **kwargs)
        finally:
            for place, name, own in lent:
                if place[name] is not own and not isinstance(own, nn.Parameter):
                    own.copy_(place[name])
                place[name] = own

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        args = tuple(_cast(arg, dtype) for arg in args)
        return args, {key: _cast(arg, dtype) for key, arg in kwargs.items()}

    def _cast_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else _cast(output, dtype)

    def leaves(self) -> dict[str, torch.Tensor]:
        """Return the parameters in their compute dtype; the same until :meth:`refresh`."""
        if not self._leaves:
            for name, param in self.model.named_parameters():
                leaf = param.detach().to(self.policy.compute_dtype(param.dtype))
                self._leaves[name] = leaf.requires_grad_(param.requires_grad)
        return self._leaves

    # Gradients ------------------------------------------------------------------------------

    def after_backward(self, sync: bool = True) -> None:
        """Take the gradients that a backward has left, and reduce them over the ranks."""
        params = dict(self.model.named_parameters())
        alone = dist.get_world_size() == 1
        for name, leaf in self._leaves.items():
            grad, leaf.grad = leaf.grad, None
            if grad is None:
                continue
            if name not in self.waiting:
                dtype = leaf.dtype if alone else self.policy.reduction_dtype(params[name].dtype)
                self.waiting[name] = grad.to(dtype, copy=True)
            else:
                self.waiting[name] += grad.to(self.waiting[name].dtype)
        self._means, largest = means_over_ranks(self.waiting)
        for name, element in largest.items():
            self.largest[name] = max(element, self.largest.get(name, 0.0))
        self.is_partial = not (sync or alone)
        self.has_folded |= self.is_partial and bool(self.reduced)
        if not self.is_partial:
            self.reduced = self.totals()
            self.waiting, self._means = {}, {}

    @property
    def waits_somewhere(self) -> bool:
        """Whether any rank has gradients that are not reduced, or may have."""
        return bool(self._means) or self.is_partial

    def totals(self, casts: bool = True) -> dict[str, torch.Tensor]:
        """Return what the gradients would be if everything was reduced now.

        Args:
            casts: Whether what waits is cast to the dtype of gradients, as when a backward reduces
                it; it is not where an optimizer takes it as it is.
        """
        totals = {}
        for name, param in self.model.named_parameters():
            mean, reduced = self._means.get(name), self.reduced.get(name)
            if mean is not None and casts:
                mean = mean.to(self.policy.grad_dtype or param.dtype)
            if mean is not None:
                reduced = mean if reduced is None else reduced + mean
            if reduced is not None:
                totals[name] = reduced
        return totals

    def refresh(self) -> None:
        """Compute from now on with the parameters as they are now."""
        self._leaves = {}

    def clear(self) -> None:
        """Drop all gradients."""
        self.waiting, self._means, self.reduced, self.largest = {}, {}, {}, {}
        self.has_folded = self.is_partial = False

    def drop_unreduced(self) -> None:
        """Drop the gradients that are not reduced, with what they were added to."""
        for name in list(self.reduced) if self.is_partial else self.waiting:
            self.reduced.pop(name, None)
        self.waiting, self._means, self.is_partial = {}, {}, False

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer step with the totals."""
        totals = self.totals(casts=False)
        for name, param in self.model.named_parameters():
            param.grad_dtype = None  # any
            param.grad = totals.get(name)
        optimizer.step()
        optimizer.zero_grad()
        self.refresh()

    def placement(self, name: str) -> str | None:
        """Tell how far the gradient of a parameter has come on this rank."""
        if name in self.waiting or (self.is_partial and name in self.reduced):
            return "partial"
        return "shard" if name in self.reduced else None


def means_over_ranks(
    grads: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Average over all ranks, in their order; a rank without a gradient counts as zeros.

    Returns:
        By name, the means, and the largest element of any rank.
    """
    heard = from_all_ranks(grads)
    totals: dict[str, torch.Tensor] = {}
    largest: dict[str, float] = {}
    for said in heard:
        for name, grad in said.items():
            totals[name] = totals[name] + grad if name in totals else grad
            if grad.numel():
                largest[name] = max(grad.abs().max().item(), largest.get(name, 0.0))
    return {name: total / len(heard) for name, total in totals.items()}, largest


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd_foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=0.05),
    "adamw_foreach": partial(torch.optim.AdamW, lr=0.05, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.05, fused=True),
}
