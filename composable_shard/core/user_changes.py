"""Changes by users: tensors in place of sharded parameters, and writes to unsharded parameters.

Before a gather, if tensors have replaced sharded parameters, `adopt_registered` makes them the
sharded parameters. `is_substituted` finds full tensors of ``torch.func.functional_call``. After
a forward, no change of unsharded parameters may be lost silently. So `UnshardedSnapshot` finds
writes, which raise an error. If users clear the gradient of an unsharded parameter, the snapshot
also clears the gradient of the sharded parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.reduction import clear_grad
from composable_shard.core.storage import USER_GRAD_DTYPE, ShardedParam
from composable_shard.errors import MaterializationError, ShardError

# Before a gather ----------------------------------------------------------------------------------


def is_substituted(
    params: Sequence[ShardedParam], label: str, *, is_unsharded_registered: bool
) -> bool:
    """Return whether ``torch.func.functional_call`` has replaced all parameters by full tensors.

    Args:
        params: The parameters of the group.
        label: The name of the group in error messages.
        is_unsharded_registered: Whether the group has registered its unsharded parameters.

    Raises:
        ShardError: If only some parameters are replaced, or if some are replaced by sharded tensors
            while the unsharded parameters are registered. Raised on this rank only.
    """
    registered = ((param, param.find_registered()) for param in params)
    replaced = {
        param.name: tensor
        for param, tensor in registered
        if tensor is not None and tensor is not param.sharded
        if is_unsharded_registered or not isinstance(tensor, DTensor)
    }
    if not replaced or not _torch.in_functional_call():
        return False
    if len(replaced) < len(params) or any(isinstance(t, DTensor) for t in replaced.values()):
        raise ShardError(
            f"Expected torch.func.functional_call to replace all parameters of {label} by full "
            f"tensors, or none, got {list(replaced)}; call reshard() before you pass sharded ones"
        )
    return True


def adopt_registered(params: Sequence[ShardedParam], label: str) -> None:
    """Adopt the parameters that a user's load or conversion has registered in place of ours.

    Args:
        params: The parameters of a group.
        label: The name of the group in error messages.

    Raises:
        ShardError: If some parameters do not fit; the message lists them, and none is adopted.
    """
    pairs = [(param, param.find_registered()) for param in params]
    misfits = [text for pair in pairs if (text := _misfit(*pair)) is not None]
    if misfits:
        raise ShardError(
            f"Expected the parameters of {label} as fully_shard made them, got "
            f"{', '.join(misfits)}; change values by load_state_dict or in place"
        )
    for param, tensor in pairs:
        assert tensor is not None
        if tensor is not param.sharded:
            param.record_user_state()
            param.put(tensor)
        # A conversion may keep the object, and replace its local tensor and attributes.
        if tensor is not param.sharded or _torch.local_tensor(tensor) is not param.local:
            carry_over(param, tensor)
        param.set_sharded(tensor)


def carry_over(param: ShardedParam, new: nn.Parameter) -> None:
    """Give a new sharded parameter the recorded attributes and ``grad_dtype`` of the old one."""
    attributes, (has_grad_dtype, grad_dtype) = param.user_state
    for name, value in attributes.items():
        if name != USER_GRAD_DTYPE:
            new.__dict__.setdefault(name, value)
    grad_fits = new.grad is None or grad_dtype in (None, new.grad.dtype)
    # A `grad_dtype` that somebody has set on `new` stays; the default is the dtype of `new`.
    if has_grad_dtype and new.is_leaf and new.grad_dtype == new.dtype and grad_fits:
        new.grad_dtype = grad_dtype


def _misfit(param: ShardedParam, registered: torch.Tensor | None) -> str | None:
    """Describe why a registered tensor cannot be the sharded parameter; ``None`` if it can."""
    if registered is None:
        return f"no tensor for '{param.name}'"
    if not isinstance(registered, DTensor):
        return f"a plain tensor for '{param.name}'"
    old, new = _torch.spec_of(param.sharded), _torch.spec_of(registered)
    local = _torch.local_tensor(registered)
    # An assignment to ``.data`` changes the storage of the DTensor, but not its local tensor.
    if local is param.local and _torch.storage_number(registered) != param.outer_storage:
        return f"a new .data, which DTensor ignores, for '{param.name}'"
    for kind, got, expected in (
        ("shape", list(new.shape), list(old.shape)),
        ("placements", new.placements, old.placements),
        ("mesh", new.mesh, old.mesh),
        ("local shape", list(local.shape), list(param.local.shape)),
    ):
        if got != expected:
            return f"{kind} {got} for '{param.name}', which has {kind} {expected}"
    return None


def check_materialized(params: Sequence[ShardedParam], label: str) -> None:
    """Raise ``MaterializationError`` if shards are on another device than they should be."""
    elsewhere = [param for param in params if param.local.device != param.device]
    if not elsewhere:
        return
    device = elsewhere[0].device
    if any(param.local.is_meta for param in elsewhere):
        remedy = "call init_sharded(model, seed=...), or load values by load_sharded()"
    elif elsewhere[0].offload is not None:
        remedy = f"leave the module on {device}, because its policy offloads it"
    else:
        remedy = f"call module.to('{device}') before training"
    names = ", ".join(f"{param.name} on {param.local.device}" for param in elsewhere)
    raise MaterializationError(
        f"Expected the parameters of {label} on {device}, got {names}; {remedy}"
    )


# Unsharded parameters that stay registered after forward ------------------------------------------


class UnshardedSnapshot:
    """The content of unsharded parameters at the end of a forward that leaves them registered.

    If only the sharded parameter has a gradient, ``.grad`` of the unsharded parameter gets a mark:
    a sparse tensor with one zero, which shows later what has changed ``.grad``. ``zero_grad``
    removes the mark, or leaves it without elements; autograd replaces it by a sum; a write by a
    user bumps its version.
    """

    def __init__(self, params: Sequence[ShardedParam], *, has_marks: bool) -> None:
        """Record the content of the parameters; with ``has_marks``, set the marks."""
        make_mark = _mark if has_marks else lambda _: None
        self._recorded = [
            (param, param.sharded.requires_grad, _content_of(param), make_mark(param))
            for param in params
        ]

    def apply_user_changes(self) -> list[str]:
        """Apply cleared ``.grad`` and ``requires_grad`` to sharded parameters; remove the marks.

        Returns:
            The names of the parameters and gradients that users have written: the new values would
            be lost.
        """
        lost = []
        for param, was_trained, before, mark in self._recorded:
            leaf = param.unsharded
            if leaf.requires_grad != was_trained:
                param.sharded.requires_grad_(leaf.requires_grad)
            if _content_of(param) != before:
                lost.append(param.name)
            if mark is None:
                continue
            if leaf.grad is None or not _torch.sparse_values(mark).numel():
                clear_grad(param.sharded, to_none=leaf.grad is None)
            elif mark._version:
                lost.append(f"{param.name}.grad")
            if leaf.grad is mark:
                leaf.grad = None
        return lost


def _mark(param: ShardedParam) -> torch.Tensor | None:
    """Set a mark as ``.grad`` of an unsharded parameter, if only the sharded one has a gradient."""
    leaf = param.unsharded
    with _torch.without_overrides():
        if not leaf.numel() or leaf.grad is not None or param.sharded.grad is None:
            return None
        index = torch.zeros(leaf.ndim, 1, dtype=torch.long, device=leaf.device)
        zero = torch.zeros(1, dtype=leaf.grad_dtype or leaf.dtype, device=leaf.device)
        mark = leaf.grad = torch.sparse_coo_tensor(index, zero, leaf.shape, check_invariants=False)
    return mark


def _content_of(param: ShardedParam) -> tuple[int, ...]:
    """Return a cheap fingerprint of the content of an unsharded parameter.

    The fingerprint consists of the id of the storage and the version counters. On the CPU, it also
    has the sum of this rank's rows, read as integers, because writes to ``.data`` bump no version
    counter. On other devices, the host would have to wait for the sum.
    """
    leaf = param.unsharded
    storage = _torch.storage_number(leaf)
    if param.shares_storage:  # a write reaches the shard, so it is not lost
        return (storage,)
    versions = tuple(t._version for t in (leaf, *param.freed_inner) if not t.is_inference())
    is_subclass = _torch.is_wrapper_subclass(param.unsharded_local)
    is_fake = not is_subclass and leaf.untyped_storage().device.type == "meta"
    if is_subclass or is_fake or _torch.has_streams(param.mesh.device):
        return storage, *versions
    part = param.shard_of(leaf)
    real = torch.view_as_real(part) if part.is_complex() else part
    integer = getattr(torch, f"int{8 * real.itemsize}")
    return storage, *versions, int(real.view(integer).sum())
