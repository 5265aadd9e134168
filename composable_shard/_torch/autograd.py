"""Autograd and torch.func: running transforms and backwards, pending nodes, hooks on leaves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import Node
from torch.utils import checkpoint
from torch.utils._python_dispatch import _pop_mode, _push_mode

from composable_shard._torch.tensors import without_overrides

# Transforms of torch.func, and the tensors that they wrap -----------------------------------------

num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes, such as those of selective checkpoints or fake tensors."""

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Make a context that suspends the running transforms and selective checkpoints.

    A selective checkpoint matches the operations of its recomputation to those of forward by their
    number. It must not count ours.
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
"""Returns the innermost running transform; ``None`` if there is none."""


current_compiler: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Returns the callback of ``torch.compile`` for calls; ``None`` outside of compiled functions."""


def apart_from_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a context that suspends transforms and ``torch.compile``.

    It costs next to nothing if neither is active.
    """
    if current_transform() is not None:
        return outside_transforms()
    return _NOTHING if current_compiler() is None else uncompiled()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Suspend ``torch.compile``.

    It skips functions of this package, but would compile the Python functions that they call, up
    to its limit of recompilations.
    """
    before = torch._C._dynamo.eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)


is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Returns whether a transform has wrapped a tensor."""


inner_value: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped
"""Returns the tensor that the innermost transform has wrapped into a tensor."""


# Autograd: the running backward, pending nodes, hooks on leaves -----------------------------------

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the running backward, -1 outside of one."""


def will_run(node: Node) -> bool:
    """Return whether the running backward will execute ``node``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf of autograd.grad: its gradient is returned, not accumulated
        return False


def num_to_run(nodes: Sequence[Node], on_autograd_grad: Callable[[], object] = bool) -> int:
    """Count the nodes that the running backward will execute.

    Args:
        nodes: The nodes.
        on_autograd_grad: Called if ``autograd.grad`` returns the gradients of some of these nodes.
    """
    try:
        return sum(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        on_autograd_grad()
        return sum(map(will_run, nodes))


def is_reachable(nodes: Iterable[Node], *, stop_at: Iterable[Node]) -> bool:
    """Return whether any of ``nodes`` can be reached in the graph from the running node.

    Args:
        nodes: The nodes to look for, whether or not the backward will execute them.
        stop_at: The search does not go beyond these nodes.
    """
    targets, seen = set(nodes), set(stop_at)
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
"""Returns a number that grows with each node that this thread makes."""


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has finished; drop it if the backward fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def dicts_of_checkpoints(*, grad_enabled_around: bool) -> list[dict[Any, Any]]:
    """Return a dict for each kind of checkpoint (reentrant or not) around this forward.

    The caller may store anything in it. It belongs to the outermost checkpoint of its kind, which
    recomputes all nested ones in backward.

    Args:
        grad_enabled_around: Whether gradients are known to be enabled outside of the checkpoints.
            If not, a reentrant checkpoint counts if one of its inputs needs a gradient.
    """
    if torch.is_grad_enabled() and _autograd._top_saved_tensors_default_hooks(False) is None:
        return []
    of_checkpoints, hooks = checkpoint.__name__, _saved_tensors_hooks()
    found: list[Any] = [pack for pack, _ in hooks if pack.__module__ == of_checkpoints][:1]
    if not torch.is_grad_enabled():
        outermost: Any = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
                outermost = frame.f_locals["ctx"]
            frame = frame.f_back
        if outermost is not None and (grad_enabled_around or any(outermost.needs_input_grad)):
            found.append(outermost)
    return [vars(holder).setdefault("_composable_shard_notes", {}) for holder in found]


def is_in_checkpoint() -> bool:
    """Return whether a checkpoint will recompute the running operations in backward."""
    if not torch.is_grad_enabled():
        return True
    names = (getattr(pack, "__qualname__", "") for pack, _ in _saved_tensors_hooks())
    return any(name.startswith(checkpoint._checkpoint_hook.__qualname__) for name in names)


_autograd = torch._C._autograd


def _saved_tensors_hooks() -> list[tuple[Any, Any]]:
    """Return the active hooks for saved tensors, the outermost first."""
    hooks: list[tuple[Any, Any]] = []
    while (top := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.insert(0, top)
        _autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in hooks:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    return hooks


def gradient_hooks(param: torch.Tensor) -> Iterable[Any]:
    """Return the post-accumulate hooks of ``param``."""
    return (param._post_accumulate_grad_hooks or {}).values()


def call_hooks_of_steps(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer call its step hooks, after a change of its class."""
    optimizer._patch_step_function()


def is_counted(step: Any, of: Any) -> bool:
    """Return whether ``step`` is the wrapper of schedulers around ``of``, which records steps."""
    return hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is of


def optimizers_in_backward(param: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Return the optimizers that ``_apply_optimizer_in_backward`` has made for a parameter."""
    return getattr(param, "_in_backward_optimizers", [])


def accumulate_nodes(params: Sequence[nn.Parameter]) -> list[Node]:
    """Return the nodes that accumulate into the ``grad`` of leaves."""
    with torch.inference_mode(False), torch.enable_grad():
        reached: Any = _Reached.apply(*params)
        return [node for node, _ in reached.grad_fn.next_functions]


_use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]


def in_graphs(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the leaves that C++ refers to as well as Python, as autograd graphs do."""
    with without_overrides():
        return list(compress(params, map((1).__lt__, map(_use_count, params))))


class _Reached(torch.autograd.Function):
    """Reaches the node of a leaf without an op on it; a subclass may not even support views."""

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        """Return a tensor with a graph."""
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        """Do nothing; autograd never runs it."""


def share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Share the hooks of one leaf with another; a removed hook is removed from both."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(source, name):
            setattr(target, name, getattr(source, name))


_hooks_before = attrgetter("_backward_hooks")
_hooks_after = attrgetter("_post_accumulate_grad_hooks")


def has_grad_hooks(*params: torch.Tensor) -> bool:
    """Return whether any of the leaves has gradient hooks of the user."""
    with without_overrides():
        return any(map(_hooks_before, params)) or any(map(_hooks_after, params))


def hooks_of_tensor(tensor: torch.Tensor) -> list[Any]:
    """Return the functions that ``Tensor.register_hook`` has registered on a tensor."""
    return list((tensor._backward_hooks or {}).values())


def call_grad_hooks(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Call the hooks of ``register_hook`` on a leaf; return the gradient that they return."""
    for hook in hooks_of_tensor(param):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def call_post_accumulate_grad_hooks(param: torch.Tensor) -> None:
    """Call the hooks of ``register_post_accumulate_grad_hook`` on a leaf."""
    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
        hook(param)
