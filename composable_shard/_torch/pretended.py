"""Ranks and memory that are not there: fake tensors, watched operations, groups in one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Running a model without memory -------------------------------------------------------------------

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


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Return nested containers with another tensor in the place of each."""
    return tree_map_only(torch.Tensor, function, values)


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


# Process groups within one process: of threads, and of ranks that are not there -------------------


@contextlib.contextmanager
def threaded_world() -> Iterator[Callable[[BaseException], None]]:
    """Give each thread a process group of its own; yield what wakes threads that wait."""
    # Imported late: only those who test with threads depend on them.
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed import multi_threaded_pg

    backend: Any = multi_threaded_pg  # neither module is typed
    bindings: Any = _distributed_c10d
    if not hasattr(backend.ThreadLocalWorld, "comms"):  # torch 2.11 looks for it and has none
        backend.ThreadLocalWorld.comms = []
    _enter_fake_mode()
    bindings._set_thread_isolation_mode(True)
    backend._install_threaded_pg()
    try:
        yield backend.ProcessLocalGroup.exception_handle
    finally:
        backend.ProcessLocalGroup.reset()
        backend._uninstall_threaded_pg()
        bindings._set_thread_isolation_mode(False)


@functools.cache
def _enter_fake_mode() -> None:
    """Enter torch's fake mode once, in one thread.

    Hazard: where torch is built for CUDA and there is no device, the first entry replaces what
    guards devices; several threads that do so at once, in the first operations on DTensors, crash
    the process. Guard: the first entry is before them. Test: all of ``run_threads``, on a machine
    without a device, with a torch that is built for one.
    """
    with fake_tensors():
        pass


def fake_store() -> dist.Store:
    """Return the store of the backend ``fake``, which this registers."""
    from torch.testing._internal.distributed import fake_pg

    store: dist.Store = fake_pg.FakeStore()
    return store
