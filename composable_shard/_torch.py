"""Every private name of torch that the library uses, each behind a name of its own.

What changes between torch versions is absorbed here; nothing else imports a private name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "DTensorSpec",
    "accumulate_node",
    "all_gather_flat",
    "all_gather_rows",
    "average_is_supported",
    "backend_name",
    "chunk_cat_into",
    "count_as_module_call",
    "current_backward",
    "divide_all_",
    "fresh_storage_view",
    "from_local",
    "from_local_at_start",
    "gradient_hooks",
    "is_wrapper_subclass",
    "leaves",
    "local_tensor",
    "make_spec",
    "module_call_frame",
    "multiply_all_",
    "norms_of_all",
    "on_backward_end",
    "preserved_version",
    "reduce_scatter_flat",
    "set_local_tensor",
    "spec_with_dtype",
    "will_run",
]


# DTensor ------------------------------------------------------------------------------------


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the very local tensor of a DTensor; ``to_local()`` gives a fresh view."""
    return cast(DTensor, tensor)._local_tensor


def set_local_tensor(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor by one of the same shape."""
    cast(DTensor, tensor)._local_tensor = local


def make_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], like: torch.Tensor
) -> DTensorSpec:
    """Describe a DTensor of the global shape, stride and dtype of ``like``."""
    return DTensorSpec(
        mesh, placements, tensor_meta=TensorMeta(like.shape, like.stride(), like.dtype)
    )


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Describe the same DTensor in another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(
        spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype)
    )


def from_local(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap a local tensor without checks, copies or communication (2 us, not 25)."""
    return DTensor(local, spec, requires_grad=False)


def from_local_at_start(tensor: DTensor) -> DTensor:
    """Return a DTensor of the same local tensor that reports storage offset 0."""
    local = tensor._local_tensor
    if local.storage_offset() == 0:
        return tensor
    shape_only = local.as_strided(local.shape, local.stride(), 0)
    wrapped = from_local(shape_only, tensor._spec)
    wrapped._local_tensor = local
    return wrapped


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Tell whether ``tensor`` is a subclass made of inner tensors (``__tensor_flatten__``)."""
    return not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor subclass is made of; of a plain one, itself."""
    if not is_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [leaf for name in names for leaf in leaves(getattr(tensor, name))]


# Autograd -----------------------------------------------------------------------------------


def current_backward() -> int:
    """Return the id of the running backward, -1 outside of one."""
    return torch._C._current_graph_task_id()


def will_run(node: Node) -> bool:
    """Tell whether the running backward will execute ``node``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf of autograd.grad: its gradient is returned, not accumulated
        return False


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has finished; drop it if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def gradient_hooks(param: torch.Tensor) -> Iterable[Any]:
    """Return what is called when a gradient has been accumulated into ``param``."""
    return (param._post_accumulate_grad_hooks or {}).values()


def accumulate_node(param: nn.Parameter) -> Node:
    """Return the node that accumulates into the ``grad`` of a leaf."""
    with torch.inference_mode(False):
        return get_gradient_edge(param).node


# Modules ------------------------------------------------------------------------------------


_call_codes = {nn.Module._call_impl.__code__}


def count_as_module_call(function: Any) -> None:
    """Have the frames of ``function`` found by :func:`module_call_frame`."""
    _call_codes.add(function.__code__)


def module_call_frame() -> FrameType | None:
    """Return the frame of the innermost running ``Module.__call__``, which outlives its hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _call_codes:
        frame = frame.f_back
    return frame


# Tensors ------------------------------------------------------------------------------------


def fresh_storage_view(storage_of: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """View the storage of ``storage_of`` with a version counter of its own.

    Writing the storage through another tensor does not count as a change of this one, so autograd
    accepts saved views of it after they have been freed and gathered again.
    """
    with torch.inference_mode(False), torch.no_grad():
        view = torch.empty(0, dtype=storage_of.dtype, device=storage_of.device)
        stride = torch.empty(shape, device="meta").stride()
        return view.set_(storage_of.untyped_storage(), offset, tuple(shape), stride)


def preserved_version(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Leave the version counter of ``tensor`` as it was, whatever is written in between."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def chunk_cat_into(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Cut each tensor along dim 0 into ``len(out)`` padded chunks; row i gets all chunks i.

    One fused kernel that pads with zeros and casts to the dtype of ``out``.
    """
    torch._chunk_cat(list(tensors), dim=0, num_chunks=out.shape[0], out=out)


def divide_all_(tensors: list[torch.Tensor], divisor: float) -> None:
    """Divide tensors in place, in one kernel where the device has one."""
    torch._foreach_div_(tensors, divisor)


def multiply_all_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place by a scalar tensor, in one kernel where the device has one."""
    torch._foreach_mul_(tensors, factor)


def norms_of_all(
    tensors: list[torch.Tensor], order: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Take the norm of each tensor, computed in ``dtype``, in one kernel where there is one."""
    return list(torch._foreach_norm(tensors, order, dtype))


# c10d ---------------------------------------------------------------------------------------

_ALL_GATHER = (
    "all_gather_single_coalesced"
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
    else "allgather_into_tensor_coalesced"
)
_REDUCE_SCATTER = (
    "reduce_scatter_single_coalesced"
    if hasattr(dist.ProcessGroup, "reduce_scatter_single_coalesced")
    else "reduce_scatter_tensor_coalesced"
)


def all_gather_flat(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """All-gather each input into its output, all in one launch."""
    return cast(dist.Work, getattr(group, _ALL_GATHER)(outputs, inputs))


def all_gather_rows(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``own`` [numel] of all ranks into ``output`` [ranks, numel], and wait for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output.view(-1), own, group=group)


def reduce_scatter_flat(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: dist.ProcessGroup,
    op: Any,
) -> dist.Work:
    """Reduce-scatter each input into its output, all in one launch."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return cast(dist.Work, getattr(group, _REDUCE_SCATTER)(outputs, inputs, options))


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name the backend that serves ``device`` in ``group``: gloo, nccl, fake, threaded, ..."""
    with contextlib.suppress(RuntimeError, AttributeError, TypeError):
        name = group._get_backend(device).name()
        if name not in ("custom", "undefined"):
            return str(name).lower()
    return str(dist.get_backend(group)).lower()


def average_is_supported(backend: str) -> bool:
    """Tell whether ``ReduceOp.AVG`` exists in a backend's reduce-scatter."""
    return backend in ("nccl", "xccl", "threaded", "fake")
