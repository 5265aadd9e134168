"""What users change on unsharded parameters that stay registered after forward.

Imports reduction, storage. Nothing done to them may be lost without a word: cleared gradients are
cleared on the sharded parameters too, and a write is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from composable_shard import _torch
from composable_shard.core.reduction import clear
from composable_shard.core.storage import ShardedParam


class _Content(NamedTuple):
    """The content of an unsharded parameter, as far as it can be told at little cost.

    Attributes:
        versions: The version counters of the parameter and its parts.
        bits: On the host, the sum of the bits of this rank's rows: writes to ``.data`` bump no
            version. A device would have to be waited for.
        storage: The number of its storage.
    """

    versions: tuple[int, ...]
    bits: int
    storage: int


class Exposure:
    """Unsharded parameters as they were when users got them.

    Where the sharded parameter has a gradient, a mark stands in ``.grad`` of the unsharded one, to
    see whether it is cleared: a sparse tensor of one zero, so that autograd may add to it.

    Attributes:
        has_moved: Whether :meth:`adopt` has seen that users gave a parameter other memory.
    """

    def __init__(self, params: Sequence[ShardedParam], *, has_marks: bool) -> None:
        """Note the content of the parameters; put marks if ``has_marks``."""
        self._noted = [
            (param, _content_of(param), _mark(param) if has_marks else None) for param in params
        ]
        self._requires_grad = [param.sharded.requires_grad for param in params]
        self.has_moved = False

    def adopt(self) -> list[str]:
        """Clear and freeze sharded parameters as users did the unsharded ones; remove the marks.

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
