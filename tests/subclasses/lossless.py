"""A tensor type that encodes its gradients and loses nothing, and what travels of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from composable_shard.testing.programs import Tree, shard_tree
from int8_gradients import Int8Gradients

PRE, POST = "fsdp_pre_reduce_scatter", "fsdp_post_reduce_scatter"


class Lossless(Int8Gradients):
    """Sends every other element in a tensor of its own; counts calls in its metadata."""

    num_calls = 0

    def fsdp_pre_reduce_scatter(self, grad: torch.Tensor, mesh: Any) -> Any:
        assert grad.ndim == 2 and len(grad) == mesh.size(mesh.ndim - 1)
        self.num_calls += 1
        return (grad[:, ::2], grad[:, 1::2].double()), self.num_calls

    def fsdp_post_reduce_scatter(self, received: Any, metadata: Any, out: torch.Tensor) -> None:
        assert metadata == (self.num_calls or None)
        even, odd = received
        out[::2], out[1::2] = even.sum(0, dtype=out.dtype), odd.sum(0)


def as_type(model: nn.Module, kind: type[Int8Gradients]) -> nn.Module:
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(kind(param.detach())))
    return model


@contextmanager
def wire() -> Iterator[list[int]]:
    """Count the bytes that this rank sends all to all, and refuse every reduce-scatter."""
    nbytes: list[int] = []
    send = dist.all_to_all_single

    def count(output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
        nbytes.append(source.nbytes)
        return send(output, source, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", count):
        yield nbytes


class Contiguous(Lossless):
    """Is multiplied in the order in which the unsharded weight is, whatever dim is sharded."""

    def fsdp_post_all_gather(
        self, arrived: Any, metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        (full,) = arrived
        if out is not None:
            return out.copy_(full)
        out = full.to(dtype, copy=True, memory_format=torch.contiguous_format)
        return out, (out,)


def shard_encoded(model: Tree, **options: Any) -> Tree:
    """Shard a tree of which every trainable parameter but scalars encodes its gradient."""
    encoded: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not param.requires_grad or not param.ndim:
                continue
            if param not in encoded:
                encoded[param] = nn.Parameter(Contiguous(param.detach()))
            setattr(module, name, encoded[param])
    return shard_tree(model, **options)
