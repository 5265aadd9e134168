"""What stands in ``.grad`` of a sharded parameter, and what is not reduced yet.

A gradient's placements are its state: ``None``; averaged over no axis yet (accumulated without
sync); averaged over the shards but not the replicas; or reduced, with the parameter's placements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import attrgetter, is_not
from typing import TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.param import LIFTED, ShardedParam
from composable_shard.errors import ShardError
from composable_shard.mesh import ShardMesh

# How they are reduced -----------------------------------------------------------------------------

AllReduceHook = Callable[[torch.Tensor], object]


@dataclass
class ReductionSettings:
    """How gradients are reduced.

    Attributes:
        divisor: What the sum over all ranks is divided by; their number if ``None``.
        sums_only: Whether collectives only ever sum, and division is done beside them.
        all_reduces: Whether a reduction goes on over the replicas.
        fills_unused: Whether parameters that no rank used get a gradient of zeros.
        hook: Called with each flat buffer of reduced gradients.
        hook_stream: Where the hook runs; on the compute stream if ``None``.
    """

    divisor: float | None = None
    sums_only: bool = False
    all_reduces: bool = True
    fills_unused: bool = False
    hook: AllReduceHook | None = None
    hook_stream: torch.Stream | None = None


# What stands in ``.grad`` of a sharded parameter --------------------------------------------------

_grad_of = attrgetter("grad")
_requires_grad = attrgetter("requires_grad")
_grad_dtype_of = attrgetter("grad_dtype")
_lacks_rows = attrgetter("form.layout.lacks_rows")
_is_something = partial(is_not, None)


def is_partial(grad: torch.Tensor | None) -> TypeGuard[DTensor]:
    """Tell whether a gradient still has to be averaged over some ranks."""
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)


def settled(param: ShardedParam, *, keeps_partial: bool = True) -> torch.Tensor | None:
    """Return the gradient; redistribute one of placements that autograd has chosen.

    A penalty on sharded parameters may leave a gradient that is replicated, or partial.

    Args:
        param: The parameter.
        keeps_partial: Whether one that still has to be averaged stays as it is.

    Collective: none, but that of DTensor for a partial gradient of autograd's.
    """
    grad, placement = param.sharded.grad, param.placement
    if not isinstance(grad, DTensor) or grad.placements == placement.sharded:
        return grad
    if keeps_partial and grad.placements in (placement.unreduced, placement.unreplicated):
        return grad
    with torch.no_grad():
        grad = grad.redistribute(placements=placement.sharded)
    assign_grad(param.sharded, grad)
    return grad


def unreduced(param: ShardedParam) -> torch.Tensor | None:
    """Return the local sum of a gradient that is not reduced at all, if that is what there is."""
    grad = settled(param)
    if not is_partial(grad) or _is_unreplicated(param, grad):
        return None
    return _torch.local_tensor(grad)


def unreplicated(param: ShardedParam) -> torch.Tensor | None:
    """Return the local shard of a gradient that is not yet averaged over the replicas."""
    grad = settled(param)
    if not is_partial(grad) or not _is_unreplicated(param, grad):
        return None
    return _torch.local_tensor(grad)


def reduced(param: ShardedParam) -> torch.Tensor | None:
    """Return the local shard of a gradient that is reduced."""
    grad = settled(param)
    return None if grad is None or is_partial(grad) else _torch.local_tensor(grad)


def set_unreduced(param: ShardedParam, total: torch.Tensor) -> None:
    """Let ``total``, this rank's sum of the shape of the parameter, be the gradient."""
    spec = param.spec_of_grad("unreduced", total.dtype)
    assign(param, _torch.from_local(total.to(param.device), spec))


def set_unreplicated(param: ShardedParam, shard: torch.Tensor) -> None:
    """Let ``shard``, averaged over the ranks that share the parameter, be the gradient."""
    spec = param.spec_of_grad("unreplicated", shard.dtype)
    assign(param, _torch.from_local(shard.to(param.device), spec))


def note_unsynced(param: ShardedParam) -> None:
    """Note that a gradient is left to a later reduction, which all ranks tell alike."""
    if param.sharded.grad is None:
        param.adds_to_synced = False
    elif not param.is_unsynced:
        param.adds_to_synced = True
    param.is_unsynced = True


def hold_for_replicas(param: ShardedParam) -> None:
    """Turn a reduced gradient into one to be averaged over the replicas: they all have the same."""
    shard = reduced(param)
    if shard is not None:
        set_unreplicated(param, shard)


def to_reduce(params: Sequence[ShardedParam]) -> list[ShardedParam]:
    """Return the parameters that a reduction takes in now, which all ranks tell alike.

    They are those that are trained, and frozen ones of which any rank may have accumulated some.
    """
    return [param for param in params if param.is_unsynced or param.sharded.requires_grad]


def to_reduce_and_held(
    params: Sequence[ShardedParam],
) -> tuple[list[ShardedParam], list[torch.dtype | None]]:
    """Return the parameters that a reduction takes in, and the dtypes of what waits for it.

    A dtype is ``None`` where nothing waits.
    """
    leaves = [param.sharded for param in params]
    with _torch.without_overrides():
        is_trained = list(map(_requires_grad, leaves))
        grads = list(map(_grad_of, leaves))
        if all(is_trained) and not any(map(_is_something, grads)):
            return list(params), [None] * len(params)
    grads = [settled(param) for param in params]
    held = [g.dtype if g is not None and is_partial(g) else None for g in grads]
    takes_in = [one or param.is_unsynced for one, param in zip(is_trained, params, strict=True)]
    return list(compress(params, takes_in)), list(compress(held, takes_in))


def has_hooks(param: ShardedParam) -> bool:
    """Tell whether the user put hooks on the sharded parameter."""
    return _torch.has_grad_hooks(param.sharded)


def deliver(param: ShardedParam, shard: torch.Tensor) -> None:
    """Make ``shard`` the reduced gradient, or add it to the one there; call the user's hooks.

    Args:
        param: The parameter.
        shard: On its device, in the dtype that was asked of its gradients.
    """
    if _comes_before_autograd(param):
        _torch.on_backward_end(partial(_deliver, param, shard))
    else:
        _deliver(param, shard)


def _comes_before_autograd(param: ShardedParam) -> bool:
    """Tell whether this backward is still to write a gradient of its own, such as of a penalty.

    Where a rank has no rows, DTensor cannot add that to a reduced one; the other way round it can.
    """
    return (
        param.layout.lacks_rows
        and param.sharded.grad is None
        and _torch.current_backward() != -1
        and _torch.will_run(_torch.accumulate_node(param.sharded))
    )


def _deliver(param: ShardedParam, shard: torch.Tensor) -> None:
    sharded, present = param.sharded, settled(param, keeps_partial=False)
    if present is not None and _torch.local_part(present).shape != shard.shape:
        raise ShardError(
            f"Expected a gradient of local shape {list(shard.shape)} in .grad of '{param.name}', "
            f"got {list(_torch.local_part(present).shape)}; assign what has the rows of this rank"
        )
    grad: torch.Tensor = _torch.from_local(shard, param.spec_of_grad("sharded", shard.dtype))
    if not _torch.has_grad_hooks(sharded):
        _add(sharded, grad)
        return
    with torch.no_grad():
        grad = _torch.call_grad_hooks(sharded, grad)
        _add(sharded, grad)
        _torch.call_post_accumulate_grad_hooks(sharded)


def deliver_all(
    params: Sequence[ShardedParam],
    shards: Sequence[torch.Tensor],
    specs: Sequence[_torch.DTensorSpec],
) -> None:
    """Deliver several; in half the time where there are neither hooks nor gradients yet.

    Args:
        params: The parameters.
        shards: See :func:`deliver`.
        specs: What describes each as a reduced gradient.
    """
    leaves = [param.sharded for param in params]
    with _torch.without_overrides():
        if not any(map(_lacks_rows, params)) and _are_bare(leaves, [s.dtype for s in shards]):
            for leaf, shard, spec in zip(leaves, shards, specs, strict=True):
                leaf.grad = _torch.from_local(shard, spec)
            return
    for param, shard in zip(params, shards, strict=True):
        deliver(param, shard)


def _are_bare(leaves: Sequence[torch.Tensor], dtypes: list[torch.dtype]) -> bool:
    """Tell whether leaves have neither gradients nor hooks, and take gradients of ``dtypes``."""
    return (
        not any(map(_is_something, map(_grad_of, leaves)))
        and not any(map(_torch.has_grad_hooks, leaves))
        and list(map(_grad_dtype_of, leaves)) == dtypes
    )


def _add(param: nn.Parameter, grad: torch.Tensor) -> None:
    present = param.grad
    if present is None:
        assign_grad(param, grad)
    else:
        with torch.no_grad():
            _torch.local_tensor(present).add_(_torch.local_tensor(grad))


def clear(leaf: torch.Tensor, *, to_none: bool) -> None:
    """Drop what stands in ``.grad`` of a sharded parameter, or fill it with zeros."""
    grad = leaf.grad
    if grad is None or to_none:
        leaf.grad = None
    elif is_partial(grad):
        _torch.local_tensor(grad).zero_()
    else:
        leaf.grad = torch.zeros_like(grad)


def assign(param: ShardedParam, grad: torch.Tensor) -> None:
    """Set the gradient, of whatever dtype; remember which dtype the user asked for."""
    param.remember_grad_dtype()
    assign_grad(param.sharded, grad)


def assign_grad(param: nn.Parameter, grad: torch.Tensor) -> None:
    """Set ``param.grad``, also to a dtype that torch would refuse by itself."""
    asked = param.grad_dtype
    if asked is not None and asked != grad.dtype:
        param.grad = None
        param.grad_dtype = None
        param.__dict__[LIFTED] = True
    param.grad = grad


def _is_unreplicated(param: ShardedParam, grad: DTensor) -> bool:
    placement = param.placement
    if placement.unreplicated == placement.unreduced:  # no axis shards
        return False
    return grad.placements == placement.unreplicated


# What users do to unsharded parameters that stay registered after forward ------------------------


class Exposure:
    """Notes how unsharded parameters are when users get them, to tell what they have changed.

    Where the sharded form has a gradient, a mark stands in ``.grad`` of the unsharded one. It is
    sparse, of one zero, so that it takes no memory and autograd may add to it.

    Args:
        params: The parameters.
        has_marks: Whether there are marks.
    """

    def __init__(self, params: Sequence[ShardedParam], *, has_marks: bool) -> None:
        self._noted = [
            (param, leaf, _content_of(param, leaf), _mark(param, leaf) if has_marks else None)
            for param in params
            if (leaf := param.unsharded) is not None
        ]

    def adopt(self) -> list[str]:
        """Clear the gradients of sharded parameters whose marks were cleared; remove the others.

        Returns:
            The names of what was written, which the sharded form misses.
        """
        lost = []
        for param, leaf, (content, storage), mark in self._noted:
            now, place = _content_of(param, leaf)
            if now != content or (place != storage and not _agrees(param, leaf)):
                lost.append(param.name)
            if mark is None:
                continue
            if leaf.grad is None or not _torch.sparse_values(mark).numel():
                clear(param.sharded, to_none=leaf.grad is None)
            elif mark._version:
                lost.append(f"{param.name}.grad")
            if leaf.grad is mark:
                leaf.grad = None
        return lost


def _mark(param: ShardedParam, leaf: nn.Parameter) -> torch.Tensor | None:
    with _torch.without_overrides():
        if not leaf.numel() or leaf.grad is not None or param.sharded.grad is None:
            return None
        index = torch.zeros(leaf.ndim, 1, dtype=torch.long, device=leaf.device)
        zero = torch.zeros(1, dtype=leaf.grad_dtype or leaf.dtype, device=leaf.device)
        mark = torch.sparse_coo_tensor(index, zero, leaf.shape, check_invariants=False)
        leaf.grad = mark
    return mark


def _content_of(param: ShardedParam, leaf: nn.Parameter) -> tuple[object, list[int]]:
    """Return counters, on the CPU a sum of the bits of this rank's part, and which storage it is.

    Writes to ``.data`` move no counter. The host would wait for a sum on a device.
    """
    storage = _torch.storage_numbers([leaf])
    if param.shares_storage:
        return None, storage
    counters = [t._version for t in (leaf, *param.parts) if not t.is_inference()]
    is_fake = not param.is_subclass and leaf.untyped_storage().device.type == "meta"
    if param.is_subclass or is_fake or _torch.has_streams(param.mesh.device):
        return counters, storage
    part = param.shard_of(leaf)
    real = torch.view_as_real(part) if part.is_complex() else part
    return (counters, int(real.view(getattr(torch, f"int{8 * real.itemsize}")).sum())), storage


def _agrees(param: ShardedParam, leaf: nn.Parameter) -> bool:
    """Tell whether a parameter that was given other memory is what the shards say."""
    part = param.shard_of(leaf)
    return not param.is_subclass and torch.equal(part, param.local.to(part))


# Gradients that stay on this rank until a later backward reduces them -----------------------------


class UnreducedGradients:
    """Accumulates the gradients of parameters on the sharded parameters, unsharded.

    What stands there is averaged over all ranks by a DTensor that is asked for it. With a divisor
    other than their number it is scaled to make that average the gradient.
    """

    def __init__(self, mesh: ShardMesh, settings: ReductionSettings) -> None:
        self._mesh = mesh
        self._settings = settings

    def accumulate(self, params: Sequence[ShardedParam]) -> None:
        """Add the unsharded gradients of some to what is not yet reduced. Collective: none."""
        params = to_reduce(params)
        for param in params:
            note_unsynced(param)
            if self._mesh.num_replicas > 1:
                hold_for_replicas(param)  # whether or not this rank adds to it: others may
        for param in params:  # one after the other: each is freed when it has been added
            (grad,) = take_all_unsharded([param])
            if grad is None:
                continue
            if self._mesh.num_ranks > 1:
                refuse_sparse([param], [grad])
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


def refuse_sparse(params: Sequence[ShardedParam], grads: Sequence[torch.Tensor | None]) -> None:
    """Raise ``ShardError`` if a gradient that ranks are to reduce is sparse."""
    for param, grad in zip(params, grads, strict=True):
        if grad is not None and grad.is_sparse:
            raise ShardError(
                f"Expected a dense gradient of '{param.name}', got a sparse one, which is not "
                "reduced over ranks; set sparse=False on its nn.Embedding or nn.EmbeddingBag, or "
                "pass it as ignored_params and reduce its gradient yourself"
            )


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
