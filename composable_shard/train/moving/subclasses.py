"""Tensor subclasses as the plain tensors that they are made of, which move one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from composable_shard import _torch
from composable_shard.core.codec import Codec, codec_of, has_extension, has_grad_extension
from composable_shard.errors import ShardError


class Composition(NamedTuple):
    """Of what a tensor is made.

    Attributes:
        codec: How its class takes it apart and makes it again; ``None`` for a plain tensor.
        inner: The same of its inner tensors.
    """

    codec: Codec | None = None
    inner: tuple[Composition, ...] = ()

    @classmethod
    def of(cls, what: str, tensor: torch.Tensor) -> Composition:
        """Return of what a tensor is made.

        Raises:
            ShardError: If it is not plain, or made of plain tensors of its shape.
        """
        codec = codec_of(tensor)
        if codec is None:
            brings_hooks = has_extension(tensor) or has_grad_extension(tensor)
            if _torch.is_subclass(tensor) or (brings_hooks and type(tensor) is not torch.Tensor):
                raise ShardError(
                    f"Expected {what} to be a plain tensor or made of such (__tensor_flatten__), "
                    f"got {type(tensor).__name__}; such a model is moved by a checkpoint"
                )
            return cls()
        parts = codec.parts(tensor)
        if any(part.shape != tensor.shape for part in parts):
            raise ShardError(
                f"Expected the inner tensors of {what}, a {type(tensor).__name__}, to have its "
                f"shape {list(tensor.shape)}, got {[list(part.shape) for part in parts]}; such a "
                "model is moved by a checkpoint"
            )
        return cls(codec, tuple(cls.of(what, part) for part in parts))

    def made_of(self, what: str, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make a tensor of plain ones, as ``_torch.leaves`` names them.

        Raises:
            ShardError: If the class makes something else of them.
        """
        if self.codec is None:
            return leaves[0]
        made, like = self.make(iter(leaves)), leaves[0]
        if type(made) is not self.codec.kind or made.shape != like.shape:
            raise ShardError(
                f"Expected {self.codec.kind.__name__} of {what} to be made of inner tensors of "
                f"shape {list(like.shape)}, got {type(made).__name__} of shape "
                f"{list(made.shape)}; such a model is moved by a checkpoint"
            )
        return made

    def make(self, leaves: Iterator[torch.Tensor]) -> torch.Tensor:
        """Make a tensor of the next plain ones."""
        if self.codec is None:
            return next(leaves)
        parts = [inner.make(leaves) for inner in self.inner]
        return self.codec.rebuild(dict(zip(self.codec.names, parts, strict=True)))
