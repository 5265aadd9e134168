"""Means over tokens or samples, for ranks and microbatches with different numbers of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.arguments import check_module, check_type, checked_number
from composable_shard.core.group import ParamGroup
from composable_shard.core.transport.process_groups import SmallAllReduce
from composable_shard.errors import ShardError
from composable_shard.mesh import largest_of
from composable_shard.train.clip import alike
from composable_shard.train.uneven import sharded_groups

_open: WeakSet[ParamGroup] = WeakSet()  # the groups in scopes

_EXPECTED = (
    "weights in weigh() that are finite and not negative",
    "no optimizer step and no other mesh or divide factor inside weigh(), where gradients are sums",
    "finished reductions at the end of weigh(); set_is_last_backward(True) or finalize_backward()",
    "a weight above 0 on any rank inside of weigh(), since without tokens there is no mean",
)


class Weighing:
    """A scope of :func:`weigh`: the weights of its microbatches, and their losses.

    Attributes:
        is_over: Whether no microbatch can be added any more.
    """

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._mesh = largest_of(group.mesh for group in groups)
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._mesh.device)
        self.is_over = False
        self._known: tuple[float, float] | None = None
        self._before = self._settings()

    @property
    def total(self) -> float:
        """The sum of the weights of all ranks and microbatches; known after the scope."""
        return self._get()[0]

    @property
    def loss(self) -> float:
        """The mean loss over all tokens of all ranks and microbatches; known after the scope."""
        return self._get()[1]

    def add(self, num_tokens: float | torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Add a microbatch; call backward on the result only.

        Args:
            num_tokens: The number of tokens or samples in the mean ``loss``, 0 if this rank has
                none: finite, not negative, possibly fractional; or a tensor of one number.
            loss: The mean loss over them, a tensor of one real number.

        Returns:
            ``loss * num_tokens``, the sum of their losses.

        Raises:
            TypeError: If ``num_tokens`` is no number, or ``loss`` no tensor.
            ValueError: If a tensor is not one real number.
            ShardError: If the scope has ended.

        Collective: none. A weight that is negative or not finite is an error on all ranks at the
            end of the scope.
        """
        if self.is_over:
            raise ShardError("Expected add() inside of `with weigh(model)`, got it after the end")
        check_type("loss", loss, isinstance(loss, torch.Tensor), "a tensor")
        mean = _as_scalar("loss", loss)
        if isinstance(num_tokens, torch.Tensor):
            num_tokens = _as_scalar("num_tokens", num_tokens).to(loss.device, copy=True)
        else:
            num_tokens = checked_number("num_tokens", num_tokens)
        weight = torch.as_tensor(num_tokens, dtype=torch.float64).to(self._sums.device)
        summed = (weight * mean.to(weight)).where(weight != 0, 0.0)
        is_bad = ~weight.isfinite() | (weight < 0)
        self._sums += torch.stack([weight.where(~is_bad, 0.0), summed, is_bad.to(weight)])
        return loss * num_tokens

    def begin(self) -> None:
        """Refuse existing gradients. Collective: an all-reduce of 16 bytes."""
        params = [param for group in self._groups for param in group.params]
        places = [i for i, param in enumerate(params) if not _is_zero(param.sharded.grad)]
        word = torch.tensor([places[-1] + 1 if places else 0, self._is_unfinished()])
        largest: Any = dist.ReduceOp.MAX
        place, is_unfinished = SmallAllReduce(word, largest, self._mesh, "beginning weigh()").wait()
        if place or is_unfinished:
            got = f"one of '{params[place - 1].name}'" if place else "reductions in flight"
            raise ShardError(
                f"Expected no gradients at the start of weigh(), got {got}; call zero_grad() first"
            )

    def end(self) -> None:
        """Divide the gradients. Collective: an all-reduce of 40 bytes."""
        has_changed = self._before != self._settings()
        flags = self._sums.new_tensor([has_changed, self._is_unfinished()])
        add: Any = dist.ReduceOp.SUM
        sums = SmallAllReduce(torch.cat([self._sums, flags]), add, self._mesh, "ending weigh()")
        total, loss, *problems = sums.wait()
        for num_wrong, expected in zip([*problems, not total], _EXPECTED, strict=True):
            if num_wrong:
                raise ShardError(f"Expected {expected}; got others on some rank. {_UNDIVIDED}")
        self._divide(total)
        self._known = total, loss / total

    @torch.no_grad()
    def _divide(self, total: float) -> None:
        """Divide by ``total``, and undo the divide factor, by default the number of ranks."""
        grads: dict[float, list[torch.Tensor]] = {}
        for group in self._groups:
            factor = group.settings.divisor
            for param in group.params:
                if param.sharded.grad is not None:
                    divisor = total / (param.mesh.num_ranks if factor is None else factor)
                    local = _torch.local_part(param.sharded.grad)
                    grads.setdefault(divisor, []).append(local)
        for divisor, locals_ in grads.items():
            for some in alike(locals_).values():
                _torch.divide_all_(some, divisor)

    def _settings(self) -> list[Any]:
        """Return the settings that must not change in the scope."""
        groups = self._groups
        return [(g.num_optimizer_steps, g.mesh, g.settings.divisor, g.why_absent) for g in groups]

    def _is_unfinished(self) -> bool:
        """Whether gradients of a backward are not yet reduced."""
        return any(group.tree.is_reducing for group in self._groups)

    def _get(self) -> tuple[float, float]:
        if self._known is None:
            raise ShardError(
                "Expected total and loss to be read after weigh(), got it open or ended by an error"
            )
        return self._known


_UNDIVIDED = "The gradients are sums; clear them by zero_grad()"


@contextlib.contextmanager
def weigh(model: nn.Module) -> Iterator[Weighing]:
    """Compute the gradients of the mean over all tokens of all ranks and microbatches.

    Open the scope on all ranks around the microbatches of a step. For each microbatch call
    ``add(num_tokens, loss)`` with the mean loss over its tokens or samples, and call backward on
    the result. The end of the scope adds up the tokens of all ranks, replicas included, and divides
    all gradients of the model once. Clip and step after it.

    Gradients of plain parameters, which ``fully_shard`` leaves alone, are not divided. Gradients
    accumulated without sync are divided, and stay ``Partial``.

    Args:
        model: A sharded module, or a module with sharded modules inside.

    Yields: :class:`Weighing`; its ``total`` and ``loss`` are known after the scope.

    Raises:
        TypeError: If ``model`` is no module.
        ShardError: If nothing in ``model`` is sharded, if it is parked, on other ranks or in
            another scope, or if it has hooks on its gradients, which would see sums. At the begin,
            on all ranks, if a rank has a gradient that is not zero. At the end, on all ranks, if no
            rank has added any tokens; if a weight is negative or not finite; if reductions are in
            flight, or if an optimizer has stepped or a divide factor or mesh has changed in the
            scope. After any error in the scope, gradients are sums.

    Collective: an all-reduce of 16 bytes at the begin and one of 40 bytes at the end, over all
        ranks that train the model.
    Memory: a few scalars.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(1):
        ...     model = fully_shard(nn.Linear(2, 1, bias=False))
        ...     with weigh(model) as weighing:
        ...         for count, value in ((3, 1.0), (1, 5.0)):
        ...             loss = model(torch.full((count, 2), value)).mean()
        ...             weighing.add(count, loss).backward()
        >>> weighing.total, model.weight.grad.to_local()
        (4.0, tensor([[2., 2.]]))
    """
    check_module("model", model)
    groups = sharded_groups(model, "weigh()")
    _check(groups)
    weighing = Weighing(groups)
    weighing.begin()
    _open.update(groups)
    try:
        yield weighing
        weighing.is_over = True
        weighing.end()
    except BaseException as error:
        if not weighing.is_over:
            error.add_note(f"It has left weigh() before its end. {_UNDIVIDED}.")
        raise
    finally:
        weighing.is_over = True
        _open.difference_update(groups)


def _check(groups: Sequence[ParamGroup]) -> None:
    """Raise ``ShardError`` if gradients of ``groups`` cannot be divided after they are reduced."""
    for group in groups:
        group.check_in_memory("to weigh a loss")
        if group in _open:
            raise ShardError(
                f"Expected one weigh() at a time, got {group.label} in another; add losses there"
            )
        hooked = [f"'{p.name}'" for p in group.params if _torch.has_grad_hooks(p.sharded)]
        if group.settings.all_reduce_hook is not None:
            hooked.append(f"the reductions of {group.label}")
        if hooked:
            raise ShardError(
                f"Expected no gradient hooks in weigh(): they get sums; got one on {hooked[0]}"
            )
    for context in dict.fromkeys(group.tree for group in groups):
        context.clean_up_if_failed()


def _as_scalar(name: str, given: torch.Tensor) -> torch.Tensor:
    number = given.full_tensor() if isinstance(given, DTensor) else given
    if number.numel() != 1 or number.is_complex():
        got = f"{number.dtype} of shape {list(number.shape)}"
        raise ValueError(f"Expected {name} to be one real number, got {got}")
    if _torch.is_wrapper_subclass(number):
        return torch.tensor(float(number), dtype=torch.float64)
    return number.detach().reshape(())


def _is_zero(grad: torch.Tensor | None) -> bool:
    if grad is None:
        return True
    local = _torch.local_part(grad)
    return not local.is_sparse and not any(bool(leaf.any()) for leaf in _torch.leaves(local))
