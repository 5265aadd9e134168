"""The moments: what modules and autograd call, and what it tells the passes.

No arithmetic, no streams, no collectives here.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.calls import Call, Imitated, InputMarker, Substitution, Token
from composable_shard.core.forward import ForwardRun, Graph
from composable_shard.core.group import ParamGroup
from composable_shard.core.nested import (
    CastBuffers,
    Given,
    PreciseNormWeights,
    StoredTensors,
    find_changes,
    map_tensors,
    tensors_in,
)
from composable_shard.core.root import Context, context_of
from composable_shard.core.substituted import find_substitution
from composable_shard.core.transport.failures import announce
from composable_shard.errors import ShardError

# What autograd calls when it has accumulated into an unsharded parameter --------------------------


class AccumulateHook:
    """Told that autograd has accumulated into an unsharded parameter of a group.

    It hangs on the parameter, which the group holds together with the node that accumulates into
    it, a circle that no garbage collection sees. So it does not hold the group: without a graph
    nothing arrives, and a graph holds the groups it goes through.
    """

    __slots__ = ("_group",)

    def __init__(self, group: ParamGroup) -> None:
        self._group = weakref.ref(group)

    def __call__(self, *_: object) -> None:
        group = self._group()
        if group is None:
            return
        if torch.is_grad_enabled():
            raise ShardError(
                f"Expected a backward into the parameters of {group.label} without "
                "create_graph=True, got one with it, whose graph ends where gradients are reduced; "
                "take gradients of inputs by torch.autograd.grad(loss, inputs, create_graph=True)"
            )
        left, backward = group.pending_nodes, _torch.current_backward()
        more = left.get(backward, 0)
        if more > 1:  # as of most: that it is counted is all that happens
            left[backward] = more - 1
            return
        with _torch.apart_from_transforms():
            context_of(group).backward.count(group)


# The moments: what is called by modules and by autograd, and what it tells the passes -------------

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


_HOOKS = "_composable_shard_hooks"
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ParamGroup]] = weakref.WeakKeyDictionary()


def install(group: ParamGroup, managed: Sequence[nn.Module]) -> None:
    """Let the group's modules and its parameters call back.

    Args:
        group: The group.
        managed: Its modules and all below, but those of nested groups.
    """
    hooks = ModuleHooks(group, managed)
    hooks.claim_modules()
    for module in group.modules:
        module.__dict__[_HOOKS] = hooks
        module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.post_forward, always_call=True)
    group.on_gradient = AccumulateHook(group)


def owner_of(module: nn.Module) -> ParamGroup | None:
    """Return the group that holds the parameters of a module that is sharded or inside of one."""
    owner = _owners.get(module)
    return None if owner is None else owner()


def groups_in(modules: Iterable[nn.Module]) -> list[ParamGroup]:
    """Return the groups that own parameters in ``modules``: their own, and outer ones of tied ones.

    A parameter that is tied across groups is registered in modules of groups that do not own it.
    """
    within = dict.fromkeys(modules)  # in an order that is that of all ranks
    own = dict.fromkeys(group for m in within if (group := owner_of(m)) is not None)
    around = dict.fromkeys(one for group in own for one in group.context.groups)
    return [
        group
        for group in around
        if group in own
        or any(slot.module in within for param in group.params for slot in param.slots)
    ]


def hooks_of(module: nn.Module) -> ModuleHooks:
    """Return the hooks of a sharded module."""
    hooks: ModuleHooks = module.__dict__[_HOOKS]
    return hooks


def run_as_forward(
    module: nn.Module, method: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Any:
    """Call ``method`` between the hooks of a sharded module, as its forward is called."""
    hooks = hooks_of(module)
    try:
        args, kwargs = hooks.pre_forward(module, args, kwargs)
        output = method(*args, **kwargs)
    except Exception:
        hooks.leave(module, None, failed=True)
        raise
    return hooks.leave(module, output, failed=False)


_torch.count_as_module_call(run_as_forward)
_torch.keep_from_compiling(__name__.partition(".")[0])


class ModuleHooks:
    """What happens before and after each forward of a group's modules."""

    def __init__(self, group: ParamGroup, managed: Sequence[nn.Module]) -> None:
        self._group = group
        self._managed = list(managed)
        self._buffer_dtype = group.policy.buffer_dtype
        self._watch_modules()

    def _watch_modules(self) -> None:
        buffers = CastBuffers(self._managed, self._buffer_dtype)
        self._substitutes = [
            x for x in (buffers, PreciseNormWeights(self._managed)) if x.may_substitute
        ]
        self._stored = StoredTensors(self._managed)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle whose hooks they are; the group and the modules may come later."""
        names = ("_group", "_managed", "_buffer_dtype")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch_modules()
        self.claim_modules()

    def claim_modules(self) -> None:
        """Have :func:`owner_of` find the group of the modules."""
        owner = weakref.ref(self._group)
        for module in self._managed:
            _owners[module] = owner

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Gather the group; cast inputs; mark where gradients leave it."""
        group = self._group
        if group.is_opened:
            _check_can_run_opened(group)
            return args, kwargs
        call, opens = self._begin(module)
        if call.substitution is Substitution.FULL:
            return args, kwargs
        if opens:
            args, kwargs = self._to_device(call, args, kwargs)
        dtype = group.policy.param_dtype if group.policy.cast_forward_inputs else None
        is_marked = bool(group.params) and torch.is_grad_enabled()
        if is_marked or dtype is not None:
            take_in = partial(self._take_in, call, dtype, is_marked)
            args, kwargs = _map_inputs(take_in, call, args, kwargs)
        return args, kwargs

    @torch.compiler.disable
    def imitate(self, module: nn.Module, imitated: Imitated) -> Call | None:
        """Begin a call that this rank takes part in without computing; :meth:`leave` ends it."""
        if self._group.is_opened:
            _check_can_run_opened(self._group)
            return None
        return self._begin(module, imitated)[0]

    def _begin(self, module: nn.Module, imitated: Imitated | None = None) -> tuple[Call, bool]:
        """Begin a call; return it, and whether that opens a forward pass."""
        group = self._group
        call = Call(
            substitution=group.calls[-1].substitution if group.calls else find_substitution(group),
            handled=sys.exc_info()[1],
            imitated=imitated,
        )
        if call.substitution is Substitution.FULL:
            group.calls.append(call)
            return call, False
        context = context_of(group)
        call.is_again = _torch.current_backward() != -1 and context.is_in_backward(group)
        call.is_observed = _torch.num_modes() > 0 or _torch.current_transform() is not None
        if not call.is_observed:
            opens = self._gather(context, module, call)
        else:  # what the gather makes must outlive the transform
            with _torch.outside_transforms():
                opens = self._gather(context, module, call)
        if call.substitution is Substitution.SHARDED and context.forward.run is not None:
            context.forward.run.frees_all = True  # before functional_call takes them out again
        if self._substitutes and not group.calls:
            self._restore()  # what an interrupt left in their place
            for substitute in self._substitutes:
                substitute.put()
        group.calls.append(call)
        self._join(context, call)
        return call, opens

    def _join(self, context: Context, call: Call) -> None:
        """Note a call that may have a backward in the execution order."""
        run = context.forward.run
        if run is None or run.graph is None or call.is_again:
            return
        call.forward = context.order.forward
        if self._group.params:
            checkpoints = _torch.notes_of_checkpoints(with_graph_around=True)
            if call.imitated is not None:
                checkpoints += call.imitated.notes
            if checkpoints or torch.is_grad_enabled():
                call.interval = context.order.enter(self._group, checkpoints)
            if call.called is not None and checkpoints:
                call.called.checkpoint = None if call.interval is None else call.interval.start
                call.called.has_grad = torch.is_grad_enabled()

    @torch.compiler.disable
    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Free the group; cast outputs; ask to be told when they get a gradient.

        Also called, without output, when forward raised, or could not begin.
        """
        calls = self._group.calls
        raised = sys.exc_info()[1] if output is None else None
        failed = raised is not None and (not calls or raised is not calls[-1].handled)
        return self._leave(module, output, failed=failed)

    @torch.compiler.disable
    def leave(self, module: nn.Module, output: Any, *, failed: bool) -> Any:
        """Do what :meth:`post_forward` does, knowing whether forward raised."""
        return self._leave(module, output, failed=failed)

    def _leave(self, module: nn.Module, output: Any, *, failed: bool) -> Any:
        group, calls = self._group, self._group.calls
        if group.is_opened:
            return output
        # There is none if forward could not begin.
        call = calls.pop() if calls else Call(is_again=_torch.current_backward() != -1)
        if call.substitution is Substitution.FULL:
            return output
        self._mark_written(call)
        written = None if failed else _refused_writes(group, call)
        if self._substitutes and not calls:
            self._restore()
        output, tensors = self._given_out(output)
        if call.given:
            put, lost = find_changes(call.given, group.label)
            tensors += tuple(tensors_in(put))
            written = written or (None if failed else lost)
        context = context_of(group)
        is_watched = torch.is_grad_enabled() and self._watch(context.forward.run, call, tensors)
        if not call.is_again:
            has_failed = failed or written is not None
            if not call.is_observed:
                self._end_call(context, module, call, is_watched=is_watched, failed=has_failed)
            else:
                with _torch.outside_transforms():
                    self._end_call(context, module, call, is_watched=is_watched, failed=has_failed)
        if written is not None:
            raise written
        return output

    def _given_out(self, output: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Cast an output, and copy what of it lies in memory that is freed; return its tensors."""
        dtype, storages = self._group.policy.output_dtype, self._group.units.all.storages
        if dtype is not None:
            output = map_tensors(partial(_cast, dtype), output)
        tensors = tuple(tensors_in(output))
        for tensor in tensors if storages else ():
            if _lies_in(storages, tensor):
                output = map_tensors(partial(_apart_from, storages), output)
                return output, tuple(tensors_in(output))
        return output, tensors

    def _end_call(
        self, context: Context, module: nn.Module, call: Call, *, is_watched: bool, failed: bool
    ) -> None:
        """Note in the execution order that a call has ended; free the group."""
        group = self._group
        # Without grad, a call that is noted lies in a checkpoint, whose outputs may be reached.
        has_backward = is_watched or (call.interval is not None and not torch.is_grad_enabled())
        if call.imitated is not None:
            has_backward = has_backward or call.imitated.is_watched
        if call.called is not None:
            call.called.is_watched = has_backward
        if call.interval is not None:
            trains = group.is_trainable
            context.order.leave(group, call.interval, trains=trains, is_watched=has_backward)
        if context.forward.leave(group, module, has_backward=has_backward):
            context.end_forward(group, failed=failed, has_backward=has_backward)

    def _gather(self, context: Context, module: nn.Module, call: Call) -> bool:
        """Gather the group; return whether that opens a forward pass."""
        group = self._group
        if not call.is_again:
            opens = context.begin_forward(group, module, call)
            call.called = context.forward.enter(group, module)
            call.versions = group.units.all.versions_of_readable()
            return opens
        context.backward.recompute(group)
        group.unshard()
        group.wait_for_unshard()
        return False

    def _restore(self) -> None:
        for substitute in reversed(self._substitutes):
            substitute.restore()

    def _to_device(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        device = self._group.mesh.device
        if not _torch.has_streams(device):
            return args, kwargs
        return _map_inputs(partial(_moved, device), call, args, kwargs)

    def _take_in(
        self, call: Call, dtype: torch.dtype | None, is_marked: bool, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Cast an input, and put an identity before the module, whose backward runs last of all."""
        if dtype is not None:
            tensor = _cast(dtype, tensor)
        if not is_marked or not tensor.requires_grad:
            return tensor
        inner = tensor.view_as(tensor)
        made = inner
        while made.grad_fn is None:  # a transform wraps what comes from outside of it
            made = _torch.inner_value(made)
        node, base = made.grad_fn, tensor if made._base is None else made._base
        node.register_hook(partial(_pass_marker, self._group, self._mark(call, node)))
        call.outer_bases.append((base, base.grad_fn))
        return inner

    def _mark(self, call: Call, node: Node) -> Token:
        """Have backward wait for a node that lies in front of a call."""
        marker = InputMarker(node)
        call.input_markers.append(marker)
        self._group.input_markers.add(marker)
        return marker.token

    def _mark_written(self, call: Call) -> None:
        """Have backward wait for what has made the inputs that the call has written in place.

        The identities before those are in no graph any more.
        """
        made = [node for base, node in call.outer_bases if base.grad_fn is not node]
        for node in dict.fromkeys(made):
            if node is not None:
                node.register_prehook(partial(_pass_marker, self._group, self._mark(call, node)))

    def _watch(self, run: ForwardRun | None, call: Call, outputs: Sequence[torch.Tensor]) -> bool:
        """Ask to be told when an output, or what forward stored away, gets a gradient.

        Returns:
            Whether there is any that may.
        """
        is_watched = False
        graph = None if run is None else run.graph
        version, number = self._group.computed_version, call.forward
        pre_backward = partial(self._pre_backward, number, version, call.input_markers, graph)
        tensors: Iterable[torch.Tensor] = (*outputs, *self._stored.newly())
        if call.is_observed:
            tensors = [level for tensor in tensors for level in _levels(tensor)]
        for tensor in tensors:
            if not tensor.requires_grad:
                continue
            is_watched = True
            if not tensor.is_leaf:  # a parameter lives on, and counts its gradients by itself
                tensor.register_hook(pre_backward)
            base = tensor._base
            if base is None or base.is_leaf or not base.requires_grad:
                continue
            if not call.came_in(base):
                # an in-place op on a view replaces its node, and a hook on the old one never runs
                base.register_hook(pre_backward)
        return is_watched

    def _pre_backward(
        self,
        forward: int | None,
        version: int,
        markers: Sequence[InputMarker],
        graph: Graph | None,
        grad: torch.Tensor,
    ) -> None:
        """Gather the group; the hook that this is keeps the markers and the graph alive."""
        group = self._group
        with _torch.apart_from_transforms():
            backward = context_of(group).backward
            backward.need(group, forward=forward, version=version, is_bounded=bool(markers))
        if graph is not None and not graph.is_reached:
            graph.is_reached = _torch.num_to_run(self._group.units.all.accumulators) > 0

    def come_past(self, forward: int | None, graph: Graph | None, _: torch.Tensor) -> None:
        """Take part in the backward of a call that this rank has not computed."""
        with _torch.apart_from_transforms():
            context_of(self._group).backward.come_past(self._group, forward=forward)
        if graph is not None:
            graph.is_reached = True


def _map_inputs(
    change: Callable[[torch.Tensor], torch.Tensor], call: Call, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Apply ``change`` to every tensor in the inputs of a call; note the containers among them."""
    given: list[Given] = []
    args = map_tensors(change, args, given)
    kwargs = {name: map_tensors(change, kwargs[name], given) for name in kwargs}
    call.given += given
    return args, kwargs


def _levels(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor and what transforms of torch.func have wrapped into it."""
    yield tensor
    while _torch.is_transformed(tensor):
        tensor = _torch.inner_value(tensor)
        yield tensor


def _check_can_run_opened(group: ParamGroup) -> None:
    """Raise if a group that is open cannot run as a plain module."""
    if torch.is_grad_enabled():
        raise ShardError(
            f"Expected no forward of {group.label} with gradients inside of unsharded(), got one; "
            "run it under torch.no_grad(), or after the context"
        )
    for param in group.params:
        if any(isinstance(slot.get(), DTensor) for slot in param.slots):
            raise ShardError(
                f"Expected full parameters in a forward of {group.label} inside of unsharded(), "
                f"got '{param.name}' sharded; open the sharded module itself, on all ranks"
            )


def _refused_writes(group: ParamGroup, call: Call) -> ShardError | None:
    """Return an error if a call has written parameters that are freed, which loses what it wrote.

    Whether it does may depend on a rank's data, so the other ranks are told.
    """
    if call.versions is None or not group.is_unsharded:
        return None
    names = group.units.all.written_since(call.versions)
    if not names:
        return None
    error = ShardError(
        f"Expected a forward that does not write the parameters of {group.label}, got "
        f"{', '.join(repr(name) for name in names)} written in place, which is lost when they are "
        "freed; write the sharded parameters under torch.no_grad(), before forward or after the "
        "optimizer's step (for nn.Embedding, instead of max_norm)"
    )
    channels = (one for member in context_of(group).groups for one in member.channels.values())
    ranks = [ranks for channel in channels for ranks in channel.process_groups]
    announce(ranks, f"running forward of {group.label}", error)
    return error


def _pass_marker(
    group: ParamGroup, token: Token, grads: Sequence[torch.Tensor | None], *_: object
) -> None:
    with _torch.apart_from_transforms():
        context_of(group).backward.pass_marker(group, token)
    if torch.is_grad_enabled():  # with create_graph: a backward may start from these gradients
        for grad in grads:
            for tensor in () if grad is None else _levels(grad):
                _watch_gradient(tensor, partial(_need, group))
                if tensor._base is not None:
                    _watch_gradient(tensor._base, partial(_need, group))


def _watch_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    if tensor.requires_grad:
        tensor.register_hook(hook)


def _need(group: ParamGroup, _: torch.Tensor) -> None:
    with _torch.apart_from_transforms():
        context_of(group).backward.need(group)


def _moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Move an input to the device of compute.

    Hazard: the caller fills pinned memory with the next batch while this one is being copied.
    Guard: it is waited for. Other memory of the host has been read when the copy returns.
    """
    return tensor.to(device, non_blocking=not tensor.is_pinned())


def _apart_from(storages: Container[int], tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor that lies in one of some storages, which are going to be freed."""
    return tensor.clone() if _lies_in(storages, tensor) else tensor


def _lies_in(storages: Container[int], tensor: torch.Tensor) -> bool:
    try:
        return _torch.storage_number(tensor) in storages
    except RuntimeError:  # a sparse one, or one of torch.func, has none
        return False


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


# Methods that are called as a forward is: between the hooks of their module -----------------------


class ForwardMethod:
    """Stands on one module in the place of a method, and runs it as that module's forward.

    It is bound to the module like a function and holds no reference to it, so a deep copy of the
    module has the method bound to the copy.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        functools.update_wrapper(self, getattr(module, name))
        del self.__dict__["__wrapped__"]  # it is bound to this module
        self._bind = _binder(module, name)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_as_forward(module, self._bind(module), args, kwargs)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Run the method ``name`` of a sharded module as its forward; idempotent."""
    present = module.__dict__.get(name)
    if not isinstance(getattr(present, "__func__", None), ForwardMethod):
        module.__dict__[name] = MethodType(ForwardMethod(module, name), module)


def forward_methods(module: nn.Module) -> list[str]:
    """Return the names of the methods that are run as forward of a module."""
    return [
        name
        for name, value in module.__dict__.items()
        if isinstance(getattr(value, "__func__", None), ForwardMethod)
    ]


def _binder(module: nn.Module, name: str) -> Callable[[nn.Module], Callable[..., Any]]:
    """Return what looks the method up for a module, this one or a copy of it."""
    if name in module.__dict__:
        own = module.__dict__[name]
        if isinstance(own, MethodType) and own.__self__ is module:
            return functools.partial(MethodType, own.__func__)
        return lambda _: own
    try:
        found = inspect.getattr_static(type(module), name)
    except AttributeError:  # it comes from __getattr__
        method = getattr(module, name)
        return lambda _: method
    return lambda owner: found.__get__(owner, type(owner))
