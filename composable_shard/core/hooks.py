"""The hooks that modules and autograd call.

A hook inspects tensors and calls the tree (all groups of one root module; see `tree.py`), which
decides when to gather and free groups. A forward hook passes each input that needs a gradient
through an input marker. A marker is an identity; its backward runs after that of the module.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.nested import ForwardCasts, find_changes, map_tensors, tensors_in
from composable_shard.core.tree import Call
from composable_shard.errors import ShardError

_HOOKS = "_composable_shard_hooks"  # the attribute of a sharded module that holds its hooks

# The group of every module that is sharded or inside a sharded module.
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ParamGroup]] = weakref.WeakKeyDictionary()


def owner_of(module: nn.Module) -> ParamGroup | None:
    """Return the group of a module: its own, or that of the nearest sharded module around it."""
    owner = _owners.get(module)
    return None if owner is None else owner()


def groups_in(modules: Iterable[nn.Module]) -> list[ParamGroup]:
    """Return the groups of ``modules``, and the groups that own tied parameters of ``modules``.

    A tied parameter may also be registered in modules of groups that do not own the parameter.
    """
    within = dict.fromkeys(modules)
    owners = dict.fromkeys(group for m in within if (group := owner_of(m)) is not None)
    in_trees = dict.fromkeys(group for owner in owners for group in owner.tree.groups)
    return [
        group
        for group in in_trees
        if group in owners
        or any(slot.module in within for param in group.params for slot in param.slots)
    ]


def record_owners(group: ParamGroup) -> None:
    """Record a group as the owner of its modules and submodules, except those of inner groups."""
    owned = list(group.modules)
    for module in owned:
        _owners[module] = weakref.ref(group)
        owned += [child for child in module.children() if group_of(child) is None]


def install(group: ParamGroup, managed: Iterable[nn.Module]) -> None:
    """Register the forward hooks of the modules of a group.

    Args:
        group: The group.
        managed: Its modules and all of their submodules, except those of inner groups.
    """
    hooks = ModuleHooks(group, list(managed))
    record_owners(group)
    for module in group.modules:
        module.__dict__[_HOOKS] = hooks
        module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.post_forward, always_call=True)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make each call of the method ``name`` run the forward hooks of its module; idempotent."""
    method = getattr(module, name)
    if not (isinstance(method, partial) and method.func is run_as_forward):
        # A partial is copied and pickled with its module, so a copied module calls its own method.
        registered = update_wrapper(partial(run_as_forward, module, method), method)
        vars(registered)["__self__"] = module  # as bound methods have it
        module.__dict__[name] = registered


def run_as_forward(
    module: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call ``method`` between the forward hooks of a sharded module."""
    hooks: ModuleHooks = module.__dict__[_HOOKS]
    try:
        args, kwargs = hooks.pre_forward(module, args, kwargs)
        output = method(*args, **kwargs)
    except Exception:
        hooks.post_forward(module, args, None)
        raise
    return hooks.post_forward(module, args, output)


_torch.count_as_module_call(run_as_forward)
_torch.keep_from_compiling(__name__.partition(".")[0])


class ModuleHooks:
    """The forward hooks of a group's modules."""

    def __init__(self, group: ParamGroup, managed: Sequence[nn.Module]) -> None:
        self._group = group
        policy = group.policy
        self._casts = ForwardCasts(managed, policy.buffer_dtype)
        self._has_streams = _torch.has_streams(group.mesh.device)
        self._input_dtype = policy.param_dtype if policy.cast_forward_inputs else None

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the group, cast the inputs and add input markers."""
        if _torch.current_compiler() is not None:
            with _torch.uncompiled():
                return self.pre_forward(module, args, kwargs)
        group = self._group
        if group.is_in_unsharded_context:
            _check_can_run_plain(group)
            return args, kwargs
        call = group.tree.enter(group, module)
        if call.is_substituted:
            return args, kwargs
        if self._casts.is_needed:
            self._casts.restore()  # in case an interrupt has ended the last forward
            self._casts.put()
        moves_inputs = self._has_streams and len(group.tree.call_stack) == 1
        adds_markers = bool(group.params) and torch.is_grad_enabled()
        if moves_inputs or adds_markers or self._input_dtype is not None:
            prepare = partial(self._prepare_input, call, moves_inputs, adds_markers)
            args = tuple(map(partial(map_tensors, prepare, seen=call.containers), args))
            if kwargs:
                kwargs = {key: map_tensors(prepare, kwargs[key], call.containers) for key in kwargs}
        if call.markers:
            group.calls.append(weakref.ref(call, group.calls.remove))
        return args, kwargs

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """End the call; hook, cast and return the output, and copy views of parameters in it.

        The hook of an output gathers the group when autograd has the gradient of the output. After
        an exception in forward, PyTorch calls this method with ``output=None``. A forward may also
        return ``None``, or run while another exception is being handled. So the call has failed
        only if the current exception differs from the exception on entry.
        """
        if _torch.current_compiler() is not None:
            with _torch.uncompiled():
                return self.post_forward(module, args, output)
        group, tree = self._group, self._group.tree
        call = tree.call_stack[-1] if tree.call_stack else None
        if call is None or call.group is not group:  # pre_forward raised or began no call
            return output
        has_failed = output is None and sys.exc_info()[1] is not call.exception_on_entry
        if call.is_substituted:
            tree.call_stack.pop()
            return output
        if self._casts.is_needed:
            self._casts.restore()
        if not has_failed and group.params:
            if not call.is_recomputed:
                group.refuse_writes(call.version_sum)
            output = map_tensors(partial(self._unalias, call.markers), output)
        # Hook the tensors in the output, in items that forward has added to containers among its
        # inputs, and in module attributes where forward has stored tensors.
        added, error = find_changes(call.containers, group.label) if call.containers else ((), None)
        adds_hooks = bool(group.params) and torch.is_grad_enabled() and not has_failed
        if adds_hooks and call.module not in group.program.searched_modules:
            _find_tensor_attributes(call)
        stored = _stored_tensors(group) if adds_hooks and group.program.tensor_attributes else ()
        to_hook = (output, added, stored) if added or stored else output
        needs_grad = adds_hooks and _hook_outputs(call, to_hook)
        # After an inner backward (one inside this forward), `Tree._end_forward` must know whether
        # outputs need gradients, even if this group has no parameters and hooks nothing.
        if tree.has_inner_backward and not needs_grad and torch.is_grad_enabled():
            needs_grad = any(tensor.requires_grad for tensor in tensors_in(output))
        output_dtype = group.policy.output_dtype
        if output_dtype is not None and not has_failed:
            output = map_tensors(partial(_cast, output_dtype), output)
        leave = tree.leave
        if _torch.current_transform() is not None:
            leave = _torch.outside_transforms()(leave)
        leave(call, needs_grad=needs_grad, has_failed=has_failed)
        if error is not None and not has_failed:
            raise error
        return output

    def _unalias(self, markers: Sequence[Node], tensor: Tensor) -> Tensor:
        """Copy an output that is a view of an unsharded parameter: the parameter will be freed.

        If forward returns an input unchanged, the output gets a new autograd node, because a hook
        on the node of the input marker would make a reference cycle with the call.
        """
        if tensor.grad_fn in markers:
            return tensor.view_as(tensor)
        try:
            will_be_freed = _torch.storage_number(tensor) in self._group.program.unsharded_storages
        except RuntimeError:  # sparse tensors and the wrappers of torch.func have no storage
            return tensor
        return tensor.clone() if will_be_freed else tensor

    def _prepare_input(self, call: Call, moves: bool, adds_markers: bool, tensor: Tensor) -> Tensor:
        """Move and cast an input, and pass it through an input marker, which is an identity.

        The backward of the marker runs after the backward of the module.
        """
        if moves:
            # A copy from pinned memory must block: the caller may refill the source at once. A
            # non-blocking copy from pageable memory has read its source when it returns.
            tensor = tensor.to(self._group.mesh.device, non_blocking=not tensor.is_pinned())
        dtype = self._input_dtype
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        if not adds_markers or not tensor.requires_grad:
            return tensor
        tensor = tensor.view_as(tensor)
        inner = tensor
        while inner.grad_fn is None:  # a transform of torch.func has wrapped the tensor
            inner = _torch.inner_value(inner)
        node: Any = inner.grad_fn
        node.register_hook(partial(self._on_marker, weakref.ref(call)))
        call.markers.append(node)
        return tensor

    def _on_marker(self, call: weakref.ref[Call], grads: Sequence[Tensor | None], _: Any) -> None:
        # A strong reference would make a cycle: call, marker, this hook, call.
        group = self._group
        if torch.is_grad_enabled():  # a double backward may need the parameters again
            for grad in _all_levels(grad for grad in grads if grad is not None):
                # An in-place op on a view replaces the node of the view: hook the base, too.
                for tensor in (grad, grad._base):
                    if tensor is not None and tensor.requires_grad:
                        tensor.register_hook(self._gather_again)
        with _torch.apart_from_transforms():
            backward = group.tree.begin_backward()
            # `Backward._ensure_progress` counts only markers of calls that still exist.
            if call() is not None:
                backward.count_marker(group)

    def _gather_again(self, _: Tensor) -> None:
        """Gather the group for a double backward."""
        group = self._group
        with _torch.apart_from_transforms():
            group.tree.begin_backward().gather_for_backward(group, has_input_markers=True)


def _check_can_run_plain(group: ParamGroup) -> None:
    """Raise if a group inside of ``unsharded()`` cannot run as a plain module."""
    if torch.is_grad_enabled():
        raise ShardError(
            f"Expected no forward of {group.label} with gradients inside of unsharded(), got one; "
            "run it under torch.no_grad(), or after the context"
        )
    for param in group.params:
        if any(isinstance(slot.get(), DTensor) for slot in param.slots):
            raise ShardError(
                f"Expected full parameters in a forward of {group.label} inside of unsharded(), "
                f"got '{param.name}' sharded; call unsharded() on the sharded module, on all ranks"
            )


def _hook_outputs(call: Call, output: Any) -> bool:
    """Hook the outputs that need gradients, or their autograd nodes; return whether any do."""
    has_hooked = False
    nodes: dict[Node, None] = {}
    tensors: Iterable[Tensor] = (output,) if isinstance(output, Tensor) else tensors_in(output)
    is_transformed = _torch.current_transform() is not None
    for tensor in _all_levels(tensors) if is_transformed else tensors:
        if tensor.grad_fn is not None:
            if is_transformed:
                nodes[tensor.grad_fn] = None
            else:
                tensor.register_hook(call.on_output_gradient)
                has_hooked = True
            base = tensor._base  # an in-place op on a view replaces the view's node
            if base is not None and base.grad_fn is not None and _is_inside(call, base.grad_fn):
                nodes[base.grad_fn] = None
    for node in nodes:
        node.register_prehook(call.on_output_gradient)
    return has_hooked or bool(nodes)


def _find_tensor_attributes(call: Call) -> None:
    """Record the attributes of modules in which the forward has stored tensors."""
    program = call.group.program
    program.searched_modules.add(call.module)
    program.tensor_attributes = [
        (module.__dict__, name)
        for module in call.group.all_modules()
        if owner_of(module) is call.group
        for name, value in module.__dict__.items()
        if any(tensor.grad_fn is not None for tensor in tensors_in(value))
    ]


def _stored_tensors(group: ParamGroup) -> list[Tensor]:
    """Return the tensors in module attributes that no call of the group has hooked.

    A loss may use such a tensor without using any output.
    """
    values = [attributes.get(name) for attributes, name in group.program.tensor_attributes]
    return [tensor for tensor in tensors_in(values) if not _is_hooked_for(group, tensor)]


def _is_hooked_for(group: ParamGroup, tensor: Tensor) -> bool:
    """Return whether a call of the group has hooked a tensor already."""
    calls = (getattr(hook, "__self__", None) for hook in _torch.hooks_of_tensor(tensor))
    return any(isinstance(call, Call) and call.group is group for call in calls)


def _all_levels(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor and, under transforms of torch.func, the tensors that it wraps."""
    for tensor in tensors:
        yield tensor
        while _torch.is_transformed(tensor):
            tensor = _torch.inner_value(tensor)
            yield tensor


def _is_inside(call: Call, node: Any) -> bool:
    """Return whether the call made ``node``: then the node is younger than the input markers.

    An output may be a view of an input. The node of the input is older than the markers.
    """
    number = _torch.sequence_number  # younger nodes have larger numbers
    return not call.markers or number(node) > number(call.markers[0])


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
