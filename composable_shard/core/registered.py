"""Changes by users: tensors that replace sharded parameters, and writes to unsharded ones.

Imports reduction, storage. Before a gather, tensors that have replaced sharded parameters are
adopted, and full tensors of ``torch.func.functional_call`` are found. After a forward, no change of
unsharded parameters may be lost silently: if users clear their gradients, those of the sharded
parameters are cleared too, and a write raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.reduction import clear
from composable_shard.core.storage import USER_GRAD_DTYPE, ShardedParam, user_grad_dtype
from composable_shard.errors import MaterializationError, ShardError

# Before a gather ----------------------------------------------------------------------------------


def is_substituted(
    params: Sequence[ShardedParam], label: str, *, is_unsharded_registered: bool
) -> bool:
    """Return whether ``torch.func.functional_call`` has replaced all parameters by full tensors.

    Args:
        params: The parameters of the group.
        label: The name of the group in messages.
        is_unsharded_registered: Whether the group has registered its unsharded parameters.

    Raises:
        ShardError: If only some are replaced, or outside of ``torch.func.functional_call``, or if
            a gathered parameter was removed. Only on ranks where this happened.
    """
    others, sharded, gone = [], False, []
    for param in params:
        current = param.find_registered()
        if current is param.sharded:
            continue
        if current is None:
            if is_unsharded_registered:  # otherwise `take_over_registered` refuses it
                gone.append(param.name)
            continue
        sharded = sharded or isinstance(current, DTensor)
        if is_unsharded_registered or not isinstance(current, DTensor):
            others.append(param.name)
    if gone:
        raise ShardError(
            f"Expected the parameters of {label} as fully_shard made them, got none for "
            f"{', '.join(map(repr, gone))}; change values by load_state_dict or in place"
        )
    if not others:
        return False
    if not _torch.in_functional_call():
        raise ShardError(
            f"Expected the parameters of {label} as fully_shard made them, got others for "
            f"{others}; change values by load_state_dict or in place"
        )
    if sharded or len(others) < len(params):
        raise ShardError(
            f"Expected torch.func.functional_call to replace all parameters of {label} by "
            f"plain tensors, or none, got {others}; pass all as full tensors, or call reshard() "
            "before passing sharded ones"
        )
    return True


def take_over_registered(params: Sequence[ShardedParam], label: str) -> None:
    """Adopt the sharded parameters that users have registered instead, by a load or a conversion.

    Args:
        params: The parameters of a group.
        label: The name of the group in messages.

    Raises:
        ShardError: If some do not fit; the message lists them, and nothing is adopted.
    """
    found = [param.find_registered() for param in params]
    misfits = [
        text
        for param, tensor in zip(params, found, strict=True)
        if (text := _misfit(param, tensor)) is not None
    ]
    if misfits:
        raise ShardError(
            f"Expected the parameters of {label} as fully_shard made them, got "
            f"{', '.join(misfits)}; change values by load_state_dict or in place"
        )
    for param, tensor in zip(params, found, strict=True):
        assert tensor is not None
        if tensor is not param.sharded:
            carry_over(param.sharded.__dict__, user_grad_dtype(param.sharded), tensor)
            param.put(tensor)
        param.register(tensor)


def carry_over(
    attributes: Mapping[str, Any], asked_of_old: tuple[bool, torch.dtype | None], new: nn.Parameter
) -> None:
    """Give a parameter the attributes and the ``grad_dtype`` of the one that it replaces.

    Args:
        attributes: The attributes of the old parameter.
        asked_of_old: The result of :func:`user_grad_dtype` for the old parameter.
        new: The new parameter.
    """
    has_asked, asked = asked_of_old
    for name, value in attributes.items():
        if name != USER_GRAD_DTYPE:
            new.__dict__.setdefault(name, value)
    fits = new.grad is None or asked in (None, new.grad.dtype)
    if has_asked and new.is_leaf and new.grad_dtype == new.dtype and fits:
        new.grad_dtype = asked


def _misfit(param: ShardedParam, found: torch.Tensor | None) -> str | None:
    """Return how a registered parameter differs from the expected shard, if it does."""
    if found is None:
        return f"none for '{param.name}'"
    if not isinstance(found, DTensor):
        return f"a plain tensor for '{param.name}'"
    expected, spec = _torch.spec_of(param.sharded), _torch.spec_of(found)
    local = _torch.local_tensor(found)
    if local is param.local and _torch.storage_number(found) != param.outer_storage:
        return f"a new .data, which DTensor ignores, for '{param.name}'"
    for kind, got, own in (
        ("shape", list(spec.shape), list(expected.shape)),
        ("placements", spec.placements, expected.placements),
        ("mesh", spec.mesh, expected.mesh),
        ("local shape", list(local.shape), list(param.local.shape)),
    ):
        if got != own:
            return f"one of {kind} {got} for '{param.name}' of {kind} {own}"
    return None


def check_materialized(params: Sequence[ShardedParam], label: str) -> None:
    """Raise ``MaterializationError`` if shards are not where they belong, with the remedy."""
    wrong = [param for param in params if param.local.device != param.device]
    if not wrong:
        return
    place = wrong[0].device
    if any(param.local.is_meta for param in wrong):
        remedy = "call init_sharded(model, seed=...), or load values by load_sharded()"
    elif wrong[0].offload is not None:
        remedy = "leave the module there, since its policy offloads them"
    else:
        remedy = f"call module.to('{place}') before training"
    places = ", ".join(f"{param.name} on {param.local.device}" for param in wrong)
    raise MaterializationError(
        f"Expected the parameters of {label} on {place}, got {places}; {remedy}"
    )


# Unsharded parameters that stay registered after forward ------------------------------------------


class _Content(NamedTuple):
    """A cheap fingerprint of the content of an unsharded parameter.

    Attributes:
        versions: The version counters of the parameter and its parts.
        bits: On the CPU, the sum of this rank's rows, read as integers: writes to ``.data`` bump no
            version counter. On devices 0, because reading the sum would synchronize.
        storage: The id of its storage.
    """

    versions: tuple[int, ...]
    bits: int
    storage: int


class Exposure:
    """The state of unsharded parameters at the end of a forward that leaves them registered.

    If the sharded parameter has a gradient, ``.grad`` of the unsharded one holds a mark, which
    shows whether users clear it: a sparse tensor with one zero, to which autograd may add.

    Attributes:
        has_moved: Whether :meth:`apply_user_changes` has found other memory in a parameter.
    """

    def __init__(self, params: Sequence[ShardedParam], *, has_marks: bool) -> None:
        """Record the content of the parameters; with ``has_marks``, set the marks."""
        self._noted = [
            (param, _content_of(param), _mark(param) if has_marks else None) for param in params
        ]
        self._requires_grad = [param.sharded.requires_grad for param in params]
        self.has_moved = False

    def apply_user_changes(self) -> list[str]:
        """Clear or freeze sharded parameters if users did so to unsharded ones; remove the marks.

        Returns:
            The names of written parameters and gradients, whose new values would be lost.
        """
        lost = []
        for (param, before, mark), was_trained in zip(
            self._noted, self._requires_grad, strict=True
        ):
            leaf = param.unsharded
            if leaf.requires_grad != was_trained:
                param.sharded.requires_grad_(leaf.requires_grad)
            now = _content_of(param)
            self.has_moved = self.has_moved or now.storage != before.storage
            if now != before:
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


def _mark(param: ShardedParam) -> torch.Tensor | None:
    leaf = param.unsharded
    with _torch.without_overrides():
        if not leaf.numel() or leaf.grad is not None or param.sharded.grad is None:
            return None
        index = torch.zeros(leaf.ndim, 1, dtype=torch.long, device=leaf.device)
        zero = torch.zeros(1, dtype=leaf.grad_dtype or leaf.dtype, device=leaf.device)
        mark = torch.sparse_coo_tensor(index, zero, leaf.shape, check_invariants=False)
        leaf.grad = mark
    return mark


def _content_of(param: ShardedParam) -> _Content:
    leaf = param.unsharded
    storage = _torch.storage_number(leaf)
    if param.shares_storage:
        return _Content((), 0, storage)
    versions = tuple(t._version for t in (leaf, *param.parts) if not t.is_inference())
    is_subclass = _torch.is_wrapper_subclass(param.unsharded_local)
    is_fake = not is_subclass and leaf.untyped_storage().device.type == "meta"
    if is_subclass or is_fake or _torch.has_streams(param.mesh.device):
        return _Content(versions, 0, storage)
    part = param.shard_of(leaf)
    real = torch.view_as_real(part) if part.is_complex() else part
    integer = getattr(torch, f"int{8 * real.itemsize}")
    return _Content(versions, int(real.view(integer).sum()), storage)
