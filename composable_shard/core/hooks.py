"""The moments: what is called by modules and by autograd, and what it tells the passes.

No arithmetic, no streams, no collectives here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.backward import Boundary, Token
from composable_shard.core.buffers import CastBuffers
from composable_shard.core.group import ParamGroup
from composable_shard.core.nested import map_tensors, tensors_in

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
GradHook = Callable[[torch.Tensor], None]


_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)


def install(group: ParamGroup, managed: Sequence[nn.Module]) -> None:
    """Let the group's modules and its parameters call back.

    Args:
        group: The group.
        managed: Its modules and all below, but those of nested groups.
    """
    hooks = ModuleHooks(group, managed)
    for module in group.modules:
        module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.post_forward, always_call=True)
    group.on_gradient = partial(_arrive, group)


class ModuleHooks:
    """What happens before and after each forward of a group's modules."""

    def __init__(self, group: ParamGroup, managed: Sequence[nn.Module]) -> None:
        self._group = group
        self._managed = list(managed)
        self._buffers = CastBuffers(managed, group.policy.buffer_dtype)
        self._calls: list[list[Boundary]] = []
        self._stored: dict[int, weakref.ref[torch.Tensor]] = {}

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Gather the group; cast inputs; mark where gradients leave it."""
        group = self._group
        context = group.context
        boundaries: list[Boundary] = []
        self._calls.append(boundaries)
        if _torch.current_backward() != -1:  # recomputation by an activation checkpoint
            group.unshard()
            group.wait_for_unshard()
        elif context.forward.enter(group):
            args, kwargs = self._to_device((args, kwargs))
        self._buffers.cast()
        dtype = group.policy.param_dtype
        if dtype is not None and group.policy.cast_forward_inputs:
            args, kwargs = map_tensors(partial(_cast, dtype), (args, kwargs))
        if torch.is_grad_enabled() and group.params:
            context.backward.join(group)
            put_boundary = partial(self._put_boundary, boundaries)
            args, kwargs = map_tensors(put_boundary, (args, kwargs))
        return args, kwargs

    @torch.compiler.disable
    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Free the group; cast outputs; ask to be told when they get a gradient.

        Also called, without output, when forward raised.
        """
        boundaries = self._calls.pop() if self._calls else []
        self._buffers.restore()
        dtype = self._group.policy.output_dtype
        if dtype is not None:
            output = map_tensors(partial(_cast, dtype), output)
        if torch.is_grad_enabled():
            pre_backward = partial(self._pre_backward, boundaries)
            for tensor in tensors_in(output):
                _watch(tensor, pre_backward)
            self._watch_stored(pre_backward)
        if _torch.current_backward() == -1:
            failed = output is None and sys.exc_info()[0] is not None
            self._group.context.forward.leave(self._group, module, failed=failed)
        return output

    def _to_device(self, inputs: tuple[Args, Kwargs]) -> tuple[Args, Kwargs]:
        device = self._group.mesh.device
        if device.type == "cpu":
            return inputs
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), inputs)

    def _put_boundary(self, boundaries: list[Boundary], tensor: torch.Tensor) -> torch.Tensor:
        """Put an identity before the module, whose backward runs after all of the module's."""
        if not tensor.requires_grad:
            return tensor
        inner = tensor.view_as(tensor)
        node = inner.grad_fn
        assert node is not None
        boundary = Boundary(node)
        node.register_hook(partial(_arrive_at_boundary, self._group, boundary.token))
        boundaries.append(boundary)
        return inner

    def _watch_stored(self, pre_backward: GradHook) -> None:
        """Watch what forward stored away on its modules, such as a loss to be added later."""
        seen, self._stored = self._stored, {}
        for module in self._managed:
            for name, value in module.__dict__.items():
                if name in _MODULE_ATTRIBUTES:
                    continue
                for tensor in tensors_in(value):
                    if tensor.grad_fn is None:
                        continue
                    known = seen.get(id(tensor))
                    if known is None or known() is not tensor:
                        _watch(tensor, pre_backward)
                    self._stored[id(tensor)] = weakref.ref(tensor)

    def _pre_backward(self, boundaries: Sequence[Boundary], grad: torch.Tensor) -> None:
        self._group.context.backward.need(self._group, boundaries)


def _watch(tensor: torch.Tensor, pre_backward: GradHook) -> None:
    """Call ``pre_backward`` before autograd goes on from the gradient of ``tensor``."""
    if not tensor.requires_grad:
        return
    tensor.register_hook(pre_backward)
    base = tensor._base
    if base is not None and base.requires_grad:
        # an in-place op on a view replaces its node, and a hook on the old one never runs
        base.register_hook(pre_backward)


def _arrive(group: ParamGroup, *_: object) -> None:
    group.context.backward.arrive(group)


def _arrive_at_boundary(group: ParamGroup, token: Token, *_: object) -> None:
    group.context.backward.arrive_at_boundary(group, token)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)
