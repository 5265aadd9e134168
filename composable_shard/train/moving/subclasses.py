"""Tensor subclasses as the plain tensors that they are made of, which move one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from composable_shard import _torch
from composable_shard.core.codec import Codec, codec_of, has_extension, has_grad_extension
from composable_shard.errors import ShardError


class Composition(NamedTuple):
    """Of what a tensor is made.

    Attributes:
        codec: How its class takes it apart and makes it again; ``None`` for a plain tensor.
    """

    codec: Codec | None = None

    @classmethod
    def of(cls, what: str, tensor: torch.Tensor) -> Composition:
        """Return of what a tensor is made.

        Raises:
            ShardError: If it is not plain, or made of plain tensors of its shape.
        """
        codec = codec_of(tensor)
        leaves = [tensor] if codec is None else codec.parts(tensor)
        for leaf in leaves:
            brings_hooks = has_extension(leaf) or has_grad_extension(leaf)
            if _torch.is_subclass(leaf) or (brings_hooks and type(leaf) is not torch.Tensor):
                raise ShardError(
                    f"Expected {what} to be a plain tensor or made of such (__tensor_flatten__), "
                    f"got {type(leaf).__name__}; such a model is moved by a checkpoint"
                )
        if any(leaf.shape != tensor.shape for leaf in leaves):
            raise ShardError(
                f"Expected the inner tensors of {what}, a {type(tensor).__name__}, to have its "
                f"shape {list(tensor.shape)}, got {[list(leaf.shape) for leaf in leaves]}; such a "
                "model is moved by a checkpoint"
            )
        return cls(codec)

    def made_of(self, what: str, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make a tensor of plain ones, as ``_torch.leaves`` names them.

        Raises:
            ShardError: If the class makes something else of them.
        """
        if self.codec is None:
            return leaves[0]
        made = self.codec.rebuild(dict(zip(self.codec.names, leaves, strict=True)))
        like = leaves[0]
        if type(made) is not self.codec.kind or made.shape != like.shape:
            raise ShardError(
                f"Expected {self.codec.kind.__name__} of {what} to be made of inner tensors of "
                f"shape {list(like.shape)}, got {type(made).__name__} of shape "
                f"{list(made.shape)}; such a model is moved by a checkpoint"
            )
        return made
