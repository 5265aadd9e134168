"""Clipping gradients by their norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from composable_shard.core.grad_norm import clip_grad_norm


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that the norm of all of them together is at most ``max_norm``.

    The norm is that of the whole model, as if its gradients were one vector, whatever meshes they
    lie on: what is sharded is taken over the ranks, what is replicated counts once. Plain gradients
    are taken to be the same on all ranks. Gradients whose reduction is still pending (``Partial``,
    accumulated without sync) count as what they stand for, which costs reducing each of them once;
    all ranks must have the same ones then.

    Args:
        parameters: Parameters, or a single one; those without a gradient are passed over.
        max_norm: The norm to scale down to; smaller gradients stay as they are.
        norm_type: Order of the norm; ``float("inf")`` for the largest absolute value. 0 counts
            the gradients that are not all zero, as in torch.
        error_if_nonfinite: Whether to raise if the norm is infinite or NaN, before anything is
            scaled; reads the norm on the host.
        foreach: ``False`` to treat gradients one by one; otherwise those of one device and dtype
            are treated together.

    Returns:
        The norm before, a scalar tensor of the dtype of the gradients, bitwise the same on all
        ranks; 0 if there are no gradients. It is taken in float32 at least, so that half
        precision overflows in the result at most.

    Raises:
        ShardError: On all ranks, if the norm is not finite and ``error_if_nonfinite``.
        ValueError: If a gradient is ``Partial`` with a reduction that cannot be scaled (product),
            or this rank is not on the mesh of one.
        TypeError: If a gradient is a tensor subclass whose norm is not a plain tensor.

    Collective: for each mesh axis on which gradients are sharded, one all-gather of one scalar
        for each combination of axes; a reduction of each ``Partial`` gradient.
    Memory: a few scalars; one reduced gradient at a time where some are ``Partial``.
    Source: ``torch.nn.utils.clip_grad_norm_``.

    Example:
        >>> from torch import nn
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def step():
        ...     layer = nn.Linear(2, 2, bias=False)
        ...     nn.init.ones_(layer.weight)
        ...     fully_shard(layer)
        ...     layer(torch.ones(1, 2)).sum().backward()
        ...     norm = clip_grad_norm_(layer.parameters(), max_norm=1.0)
        ...     return norm, layer.weight.grad.to_local()
        >>> run_threads(step, 2)
        [(tensor(2.0000), tensor([[0.5000, 0.5000]])), (tensor(2.0000), tensor([[0.5000, 0.5000]]))]
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return clip_grad_norm(
        params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach
    )
