"""The moments: what is called by modules and by autograd, and what it tells the passes.

No arithmetic, no streams, no collectives here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from composable_shard import _torch
from composable_shard.core.buffers import CastBuffers
from composable_shard.core.group import ParamGroup
from composable_shard.core.nested import map_tensors, tensors_in

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


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
        self._stored: dict[int, weakref.ref[torch.Tensor]] = {}

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Gather the group; cast inputs; mark where gradients leave it."""
        group = self._group
        context = group.context
        if _torch.current_backward() != -1:  # recomputation by an activation checkpoint
            group.unshard()
            group.wait_for_unshard()
        elif context.forward.enter(group):
            args, kwargs = self._to_device((args, kwargs))
        self._buffers.cast()
        dtype = group.policy.param_dtype
        if dtype is not None and group.policy.cast_forward_inputs:
            args, kwargs = map_tensors(partial(_cast, dtype), (args, kwargs))
        if torch.is_grad_enabled() and group.is_trainable:
            context.backward.join(group)
            args, kwargs = map_tensors(self._boundary, (args, kwargs))
        return args, kwargs

    @torch.compiler.disable
    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Free the group; cast outputs; ask to be told when they get a gradient.

        Also called, without output, when forward raised.
        """
        self._buffers.restore()
        dtype = self._group.policy.output_dtype
        if dtype is not None:
            output = map_tensors(partial(_cast, dtype), output)
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                self._watch_output(tensor)
            self._watch_stored()
        if _torch.current_backward() == -1:
            self._group.context.forward.leave(self._group, module)
        return output

    def _to_device(self, inputs: tuple[Args, Kwargs]) -> tuple[Args, Kwargs]:
        device = self._group.mesh.device
        if device.type == "cpu":
            return inputs
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), inputs)

    def _boundary(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put an identity before the module, whose backward runs after all of the module's."""
        if not tensor.requires_grad:
            return tensor
        group = self._group
        inner = tensor.view_as(tensor)
        node = inner.grad_fn
        assert node is not None
        node.register_hook(partial(_arrive, group))
        group.context.backward.add_boundary(group, node)
        return inner

    def _watch_stored(self) -> None:
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
                        self._watch_output(tensor)
                    self._stored[id(tensor)] = weakref.ref(tensor)

    def _watch_output(self, tensor: torch.Tensor) -> None:
        if not tensor.requires_grad:
            return
        tensor.register_hook(self._pre_backward)
        base = tensor._base
        if base is not None and base.requires_grad:
            # an in-place op on a view replaces its node, and a hook on the old one never runs
            base.register_hook(self._pre_backward)

    def _pre_backward(self, grad: torch.Tensor) -> None:
        self._group.context.backward.need(self._group)


def _arrive(group: ParamGroup, *_: object) -> None:
    group.context.backward.arrive(group)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)
