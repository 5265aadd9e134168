"""Means over tokens or samples, of which ranks and microbatches have different numbers."""

from __future__ import annotations

import torch
from torch import nn

from composable_shard.core.hooks import groups_in
from composable_shard.core.root import context_of
from composable_shard.core.weights import Weighed, weigh_together
from composable_shard.errors import ShardError


def weigh(
    model: nn.Module, weight: float | torch.Tensor, loss: torch.Tensor | None = None
) -> Weighed:
    """Say what the next backward weighs, whose loss is a sum: how many tokens or samples it has.

    Call it on all ranks before each backward. When gradients are reduced they are divided once, by
    the sum of all weights: those of all ranks, replicas included, and of all microbatches since
    gradients were cleared, reduced one by one or together. So the gradient is that of the mean over
    all tokens, however they are spread. A rank without a batch weighs 0, as does a backward of
    which nothing is said beside others. If all weights are 0, gradients are ``None``.

    Args:
        model: A sharded module, or one with sharded ones inside.
        weight: What this rank's loss is a sum of, such as the number of its tokens; any finite
            number that is not negative.
        loss: That loss, to be told the mean of all.

    Returns:
        :class:`Weighed`, whose ``total`` and ``loss`` are known when a backward has reduced.

    Raises:
        ShardError: If nothing in ``model`` is sharded; if a divide factor is set, or a gradient has
            hooks, which would be given sums. From the backward that reduces, if a weight of
            another rank is not finite, or negative.
        ValueError: From that backward, on the rank that has such a weight.
        RankMismatchError: From that backward, on all ranks, if one has left out a microbatch. After
            an error from it, gradients are ``None``.

    Collective: none; in each backward that reduces an all-reduce of 56 bytes, which is waited for
        at its end.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(1):
        ...     model = fully_shard(nn.Linear(2, 1, bias=False))
        ...     loss = model(torch.ones(3, 2)).sum()
        ...     weighed = weigh(model, 3, loss)
        ...     loss.backward()
        >>> weighed.total, model.weight.grad.to_local()
        (3.0, tensor([[1., 1.]]))
    """
    groups = groups_in(model.modules())
    if not groups:
        raise ShardError(
            f"Expected a model to weigh that fully_shard has sharded, or a part of one, got "
            f"{type(model).__name__} without"
        )
    contexts = dict.fromkeys(map(context_of, groups))
    for context in contexts:
        context.clean_up_if_failed()
    if not torch.is_grad_enabled():
        return Weighed()
    return weigh_together([context.reductions for context in contexts]).add(weight, loss)
