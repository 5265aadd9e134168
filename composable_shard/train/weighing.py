"""Means over tokens or samples, of which ranks and microbatches have different numbers."""

from __future__ import annotations

import torch
from torch import nn

from composable_shard.arguments import check_module, checked_number
from composable_shard.core.hooks import groups_in
from composable_shard.core.root import context_of
from composable_shard.core.weighing.microbatches import Weighed, weigh_together
from composable_shard.errors import ShardError


def weigh(
    model: nn.Module, weight: float | torch.Tensor, loss: torch.Tensor | None = None
) -> Weighed:
    """Say what the next backward weighs, whose loss is a sum: how many tokens or samples it has.

    Call it on all ranks, once before the backward of each batch; a rank without a batch weighs 0.
    When gradients are reduced, each is divided once by the sum of all weights since it was cleared:
    those of all ranks, replicas included, and of all microbatches, reduced one by one or together.
    So it is the gradient of the mean over all tokens, however they are spread. If all weights are
    0, gradients are ``None``.

    A weight counts until gradients are cleared, and a backward of which nothing is said counts as
    0 beside others. What is weighed and then not used, as the loss is not finite, say, is dropped
    by ``reset_iter_state()``. Without gradients enabled nothing is weighed.

    Args:
        model: A sharded module, or one with sharded ones inside.
        weight: What this rank's loss is a sum of, such as the number of its tokens: a finite number
            that is not negative, or a tensor of one.
        loss: That loss, to be told the mean of all.

    Returns:
        :class:`Weighed`, whose ``total`` and ``loss`` are known when a backward has reduced.

    Raises:
        TypeError: If ``model`` is no module, or ``weight`` or ``loss`` no number.
        ValueError: If it is a tensor of several, or of complex ones. From the backward that
            reduces: if it is not finite, or negative.
        ShardError: If nothing in ``model`` is sharded, or it is parked or on other ranks; if a
            divide factor is set, or there are hooks on gradients, which would be given sums. From
            the backward that reduces: if another rank's weight is not finite, or negative.
        RankMismatchError: From that backward, if ranks have not weighed equally many times. After
            an error from it, gradients are ``None``.

    Collective: an all-reduce of 56 bytes over all ranks, which the end of the backward waits for;
        without sync, one for all that was weighed until there is sync.

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
    check_module("model", model)
    for name, number in (("weight", weight), ("loss", 0.0 if loss is None else loss)):
        if not isinstance(number, torch.Tensor):  # of one, which is not waited for here
            checked_number(name, number)
    groups = groups_in(model.modules())
    if not groups:
        raise ShardError(
            f"Expected a model with sharded modules, got none in {type(model).__name__}; apply "
            "fully_shard before weigh()"
        )
    for group in groups:
        group.check_awake("to weigh a loss")
    contexts = dict.fromkeys(map(context_of, groups))
    for context in contexts:
        context.clean_up_if_failed()
    if not torch.is_grad_enabled():
        return Weighed()
    return weigh_together([context.reductions for context in contexts]).add(weight, loss)
