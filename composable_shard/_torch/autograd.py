"""Autograd and torch.func: what is running, what will run, hooks on leaves."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _pop_mode, _push_mode
from torch.utils.checkpoint import (
    CheckpointFunction,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    _checkpoint_hook,
)

# The transforms of torch.func: whether one runs, and what it wraps --------------------------------

num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns how many modes look at each operation: of a selective checkpoint, of fake tensors, ..."""

_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Make a context in which none of the running transforms acts, and no selective checkpoint.

    A selective checkpoint counts the operations of forward, and those of its recomputation.
    """
    modes = [_pop_mode() for _ in range(num_modes())][::-1]
    others = [mode for mode in modes if not isinstance(mode, _SELECTIVE)]
    for mode in others:
        _push_mode(mode)
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


_NOTHING = contextlib.nullcontext()


current_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
"""Returns the innermost transform that runs, ``None`` if none does."""


_current_compiler: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Returns what ``torch.compile`` has put in the way of calls, ``None`` outside of its functions."""


def apart_from_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no transform acts and nothing is compiled.

    It costs next to nothing where neither goes on.
    """
    if current_transform() is not None:
        return outside_transforms()
    return _NOTHING if _current_compiler() is None else _uncompiled()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    before = torch._C._dynamo.eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Tell whether a transform has wrapped ``tensor``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def inner_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the innermost transform has wrapped into ``tensor``."""
    return torch._C._functorch.get_unwrapped(tensor)


# Autograd: what is running, what will run, hooks on leaves ----------------------------------------

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the running backward, -1 outside of one."""


def will_run(node: Node) -> bool:
    """Tell whether the running backward will execute ``node``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf of autograd.grad: its gradient is returned, not accumulated
        return False


def num_to_run(nodes: Sequence[Node], on_leaves: Callable[[], object] = bool) -> int:
    """Count those of ``nodes`` that the running backward will execute.

    Args:
        nodes: What to count.
        on_leaves: Called if some are leaves of ``autograd.grad``, which returns their gradients.
    """
    try:
        return sum(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        on_leaves()
        return sum(map(will_run, nodes))


def is_ahead(nodes: Iterable[Node], *, before: Iterable[Node]) -> bool:
    """Tell whether the graph of the node that is running leads to one of ``nodes``.

    Args:
        nodes: What to look for, whether or not the backward will execute it.
        before: Nodes behind which nobody looks.
    """
    targets, seen = set(nodes), set(before)
    ahead: list[Node | None] = [torch._C._current_autograd_node()]
    while ahead:
        node = ahead.pop()
        if node in targets:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [after for after, _ in node.next_functions]
    return False


sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
"""Returns a number that is greater for nodes that this thread has made later."""


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has finished; drop it if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def notes_of_checkpoints(*, with_graph_around: bool) -> list[dict[Any, Any]]:
    """Return a dict for each kind of checkpoint around the running forward, to keep notes with it.

    Of those within each other, the outermost of a kind: it computes all of them again in backward.

    Args:
        with_graph_around: Whether gradients are enabled outside of the checkpoints. Where that is
            not known, a reentrant one counts if it has an input that needs a gradient.
    """
    if torch.is_grad_enabled() and _autograd._top_saved_tensors_default_hooks(False) is None:
        return []
    of_checkpoints, hooks = CheckpointFunction.__module__, _saved_tensors_hooks()
    found: list[Any] = [pack for pack, _ in hooks if pack.__module__ == of_checkpoints][:1]
    if not torch.is_grad_enabled():
        outermost: Any = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is CheckpointFunction.forward.__code__:
                outermost = frame.f_locals["ctx"]
            frame = frame.f_back
        if outermost is not None and (with_graph_around or any(outermost.needs_input_grad)):
            found.append(outermost)
    for holder in found:
        if not hasattr(holder, _NOTES):
            setattr(holder, _NOTES, {})
    return [getattr(holder, _NOTES) for holder in found]


def is_in_checkpoint() -> bool:
    """Tell whether a checkpoint will compute in backward what is computed now."""
    if not torch.is_grad_enabled():
        return True
    names = (getattr(pack, "__qualname__", "") for pack, _ in _saved_tensors_hooks())
    return any(name.startswith(_checkpoint_hook.__qualname__) for name in names)


_NOTES = "_composable_shard_notes"
_autograd = torch._C._autograd


def _saved_tensors_hooks() -> list[tuple[Any, Any]]:
    """Return the hooks for saved tensors that are in force, the outermost first."""
    hooks: list[tuple[Any, Any]] = []
    while (top := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.insert(0, top)
        _autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in hooks:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    return hooks


def gradient_hooks(param: torch.Tensor) -> Iterable[Any]:
    """Return what is called when a gradient has been accumulated into ``param``."""
    return (param._post_accumulate_grad_hooks or {}).values()


def call_hooks_of_steps(optimizer: torch.optim.Optimizer) -> None:
    """Have steps of an optimizer call its hooks, after it was given another class."""
    optimizer._patch_step_function()


def is_counted(step: Any, of: Any) -> bool:
    """Tell whether a step is that which schedulers put before ``of``, to know of steps."""
    return hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is of


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Have steps of an optimizer tell its schedulers, after it was given another class."""
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        of: Any = reference()
        of._opt_called = True
        return type(of).step(of, *args, **kwargs)

    vars(counted)["_wrapped_by_lr_sched"] = True
    vars(optimizer)["step"] = counted


def optimizers_in_backward(param: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Return the optimizers that ``_apply_optimizer_in_backward`` made for a parameter."""
    return getattr(param, "_in_backward_optimizers", [])


def accumulate_node(param: nn.Parameter) -> Node:
    """Return the node that accumulates into the ``grad`` of a leaf."""
    return accumulate_nodes([param])[0]


def accumulate_nodes(params: Sequence[nn.Parameter]) -> list[Node]:
    """Return the nodes that accumulate into the ``grad`` of leaves."""
    with torch.inference_mode(False), torch.enable_grad():
        reached: Any = _Reached.apply(*params)
        return [node for node, _ in reached.grad_fn.next_functions]


_use_count = methodcaller("_use_count")


def in_graphs(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the leaves that something refers to besides Python, as graphs do."""
    if max(map(_use_count, params), default=0) == 1:
        return []
    return [param for param in params if _use_count(param) > 1]


class _Reached(torch.autograd.Function):
    """Leads to the node of a leaf without an op on it; subclasses may not know even a view."""

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        """Return anything that has a graph."""
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        """Pass nothing on; it never runs."""


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let the hooks of a leaf, and the handles that remove them, act on another leaf too."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def has_grad_hooks(param: torch.Tensor) -> bool:
    """Tell whether users put hooks for its gradient on a leaf."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    """Return the functions that ``Tensor.register_hook`` has put on a tensor."""
    return list((tensor._backward_hooks or {}).values())


def call_grad_hooks(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Pass a gradient through what ``register_hook`` put on a leaf; return what comes out."""
    for hook in hooks_of_tensor(param):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def call_post_accumulate_grad_hooks(param: torch.Tensor) -> None:
    """Call what ``register_post_accumulate_grad_hook`` put on a leaf."""
    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
        hook(param)
