"""Running a model without memory: fake tensors, and watching what operations would do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DispatchMode = TorchDispatchMode
"""A context that sees every operation, below autograd."""

ReadsValues = DataDependentOutputException
"""Raised where code asks a fake tensor for its value."""

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which tensors have no memory; real ones that get in are taken as fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def tensors_of(*values: Any) -> list[torch.Tensor]:
    """Return the tensors within nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def without_memory(values: Any) -> Any:
    """Return nested containers with an uninitialized tensor for each; for use among fake ones."""
    return tree_map_only(torch.Tensor, _like, values)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return made.requires_grad_(tensor.requires_grad)


def reads_a_value(func: Any) -> bool:
    """Tell whether an operation gives a Python number."""
    return func is torch.ops.aten._local_scalar_dense.default


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the floating-point operations of a matrix product, convolution or attention, or 0."""
    # Imported late: where triton is missing, it says so.
    from torch.utils.flop_counter import (
        flop_registry,
        sdpa_backward_flop_count,
        sdpa_flop_count,
    )

    packet = func.overloadpacket
    if packet is _ATTENTION:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet is _ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def is_on_distributed_tensors(types: Sequence[type]) -> bool:
    """Tell whether an operation comes back as operations on local tensors."""
    from torch.distributed.tensor import DTensor

    return any(issubclass(kind, DTensor) for kind in types)
