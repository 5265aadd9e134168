"""Simulated ranks and memory: fake tensors, dispatch modes, process groups in one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Running a model without memory -------------------------------------------------------------------

DispatchMode = TorchDispatchMode
"""Base class of contexts that intercept every operation below autograd."""

ReadsValues = DataDependentOutputException
"""Raised if code reads the value of a fake tensor."""


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which tensors have no memory; real inputs are converted to fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def tensors_of(*values: Any) -> list[torch.Tensor]:
    """Return the tensors within nested containers."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Replace each tensor in nested containers by the result of a function."""
    return tree_map_only(torch.Tensor, function, values)


def without_memory(values: Any) -> Any:
    """Replace each tensor in nested containers by an uninitialized one; for fake tensors."""
    return tree_map_only(torch.Tensor, _like, values)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return made.requires_grad_(tensor.requires_grad)


def reads_a_value(func: Any) -> bool:
    """Return whether an operation reads a tensor's value as a Python number."""
    return func is torch.ops.aten._local_scalar_dense.default


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Count the floating-point operations of a matrix product, convolution or attention; else 0."""
    from torch.utils.flop_counter import flop_registry  # late: it reports a missing triton

    packet = func.overloadpacket
    if "attention_for_cpu" in packet.__name__:  # which torch before 2.15 does not count
        packet = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""), packet)
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


# Process groups within one process: of threads, and of simulated ranks ----------------------------


@contextlib.contextmanager
def threaded_world() -> Iterator[Callable[[BaseException], None]]:
    """Give each thread a process group of its own; yield a function that wakes waiting threads."""
    # Imported late, since only tests with threads need this module.
    from torch.testing._internal.distributed import multi_threaded_pg

    backend: Any = multi_threaded_pg  # neither module is typed
    bindings: Any = torch._C._distributed_c10d
    if not hasattr(backend.ThreadLocalWorld, "comms"):  # torch 2.11 reads it and lacks it
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

    Hazard: with a CUDA build of torch and no device, the first entry replaces torch's device guard.
    Several threads that do this at once, in their first DTensor operations, crash the process.
    Guard: the first entry happens before the threads start. Test: all of ``run_threads``, with a
    CUDA build on a machine without a device.
    """
    with fake_tensors():
        pass


def fake_store() -> dist.Store:
    """Register the backend ``fake``; return its store."""
    from torch.testing._internal.distributed import fake_pg

    return cast(dist.Store, fake_pg.FakeStore())
