"""The hooks for gradients by themselves: what they are promised, what they must return.

As in ``protocol.py``, ranks are threads that show each other what they would send.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from composable_shard.core.grads.grad_extension import GradExtension, formats_of
from composable_shard.core.params.extension import (
    GRAD_POST,
    GRAD_PRE,
    Format,
    has_grad_extension,
)
from composable_shard.core.params.layout import ParamLayout
from composable_shard.errors import ExtensionError
from composable_shard.module import group_of
from composable_shard.testing.extension_kit.protocol import Show
from composable_shard.testing.extension_kit.report import Broken
from composable_shard.testing.extension_kit.subject import Shape, Subject

NUM_STEPS = 8
"""Reductions of the same gradient: what one of them loses has to come with the others."""


class Reductions:
    """The reductions of one weight's gradient, one after the other, through its hooks."""

    def __init__(self, subject: Subject, shape: Shape, show: Show) -> None:
        self._show = show
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._numel = ParamLayout(shape, 0, self._num_ranks).shard_numel
        self._model = subject.sharded(shape)
        group = group_of(self._model[0])
        assert group is not None
        self._hooks = GradExtension(group.params[0])

    def parts(self) -> torch.Tensor:
        """Return the gradient of this rank, [num_shards, shard_numel]; another on each."""
        generator = torch.Generator().manual_seed(self._rank)
        return torch.randn(self._num_ranks, self._numel, generator=generator)

    def encode(self) -> list[torch.Tensor]:
        """Return what this rank sends."""
        try:
            return self._hooks.encode(self.parts())
        except ExtensionError as error:
            raise Broken(str(error)) from error

    def decode(self, sent: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return what this rank makes of what all have sent."""
        received = tuple(
            torch.stack([rows[self._rank] for rows in of_all]) for of_all in zip(*sent, strict=True)
        )
        out = torch.full((self._numel,), torch.nan)
        self._hooks.decode(received, out)
        if out.isnan().any():
            raise Broken(
                f"Expected {GRAD_POST} to fill out, {self._numel} elements, got some that it left; "
                "write into it"
            )
        return out

    def reduce(self) -> torch.Tensor:
        """Return this rank's part of the sum."""
        return self.decode(self._show(self.encode()))

    def exact(self) -> torch.Tensor:
        """Return what that sum is."""
        parts: list[torch.Tensor] = self._show(self.parts())
        return torch.stack([one[self._rank] for one in parts]).sum(0)


def gradient_sent(subject: Subject, shape: Shape, show: Show) -> None:
    """What is sent for a gradient has a row for each rank, alike on all ranks and each time."""
    reductions = Reductions(subject, shape, show)
    for _ in range(2):
        formats = show(formats_of(reductions.encode()))
        for rank, theirs in enumerate(formats):
            if theirs != formats[0]:
                raise Broken(
                    f"Expected {GRAD_PRE} to return the same dtypes and shapes on all ranks and "
                    f"each time, got {in_words(formats[0])} on rank 0 and {in_words(theirs)} on "
                    f"rank {rank}"
                )


def gradient_summed(subject: Subject, shape: Shape, show: Show) -> None:
    """The sum of what ranks send is, in the mean over steps, that of their gradients."""
    reductions = Reductions(subject, shape, show)
    exact = reductions.exact()
    mean = torch.stack([reductions.reduce() for _ in range(NUM_STEPS)]).mean(0)
    if exact.numel():
        what = f"the mean of {NUM_STEPS} reductions to be the sum over ranks"
        subject.expect_alike([mean], [exact], what)


def no_gradient(subject: Subject, shape: Shape, show: Show) -> None:
    """Zero bytes, which a rank without a gradient sends, stand for a gradient of zeros."""
    reductions = Reductions(subject, shape, show)
    zeros = [torch.zeros_like(tensor) for tensor in reductions.encode()]
    total = reductions.decode(show(zeros))
    if total.any():
        raise Broken(
            f"Expected {GRAD_POST} to make zeros of zero bytes, got values up to "
            f"{total.abs().max().item():.3g}; a rank without a gradient sends zero bytes"
        )


def in_words(formats: Sequence[Format]) -> str:
    """Name dtypes and shapes."""
    return f"[{', '.join(map(str, formats))}]"


def has_gradient_hooks(subject: Subject, shape: Shape) -> bool:
    """Tell whether the tensor decides what its gradient is on the wire."""
    return has_grad_extension(subject.tensor(shape))


GRADIENT_CHECKS = (gradient_sent, gradient_summed, no_gradient)
