"""The methods of a sharded module: ``fully_shard`` adds the base class ``FSDPModule`` to it."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial, wraps
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.arguments import check_int, check_type, check_value, checked_bool
from composable_shard.compat.torch_state import TorchState, answer_torch, torch_state
from composable_shard.core.copying import SavedModule, copy_sharded, restore_module, save_module
from composable_shard.core.group import ParamGroup, State, group_of, set_group
from composable_shard.core.hooks import groups_in
from composable_shard.core.reduction import assign_grad, clear_grad, is_partial
from composable_shard.core.storage import ShardedParam
from composable_shard.core.transport import collectives
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.pending import Waitable
from composable_shard.core.tree import Tree
from composable_shard.core.user_changes import carry_over
from composable_shard.errors import ShardError
from composable_shard.mesh import ShardMesh, check_reshard
from composable_shard.train.clip import clip_grad_norm_


def make_sharded(module: nn.Module, group: ParamGroup) -> None:
    """Give a module its group, and a class that also inherits from :class:`FSDPModule`."""
    set_group(module, group)
    answer_torch(module, group)
    original: Any = type(module)
    module.__class__ = _sharded_class(original)


def check_class(module: nn.Module) -> None:
    """Check that a module can get its new class, before anything is changed.

    Raises:
        Exception: Any exception that the module's class raises when it is subclassed.
        TypeError: If the class of the module cannot be changed.
    """
    original: Any = type(module)
    module.__class__ = _sharded_class(original)
    module.__class__ = original


@cache
def _sharded_class(original: type) -> type:
    methods = ((name, inspect.getattr_static(original, name, None)) for name in dir(original))
    explained = {name: _explained(name, m) for name, m in methods if _is_own(name, m)}
    sharded = type(f"FSDP{original.__name__}", (FSDPModule, original), explained)
    sharded.__module__, sharded.__qualname__ = original.__module__, sharded.__name__
    return sharded


def computes_later(method: Callable[..., Any]) -> bool:
    """Return whether a method is a generator or a coroutine, which computes after it returns."""
    is_generator = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
    return is_generator or inspect.iscoroutinefunction(method)


def _is_own(name: str, method: object) -> bool:
    """Return whether a method is public, and neither of ``nn.Module`` nor of ``FSDPModule``."""
    is_other = name.startswith("_") or hasattr(FSDPModule, name) or hasattr(nn.Module, name)
    return not is_other and inspect.isfunction(method) and not computes_later(method)


def _explained(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it raises a helpful error if it computes with sharded parameters."""

    @wraps(method)
    def call(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            group = self._group()
            is_mixed = "mixed torch.Tensor and DTensor" in str(error)
            if not is_mixed or isinstance(error, ShardError) or group.is_unsharded_registered:
                raise
            raise ShardError(
                f"Expected '{name}' of {group.label} to be called while the parameters are "
                "gathered, got a call outside of forward; call the module, or call "
                f"register_fsdp_forward_method(module, '{name}') once"
            ) from error

    return call


def _original_class(sharded: type) -> type:
    classes = (kind for kind in sharded.__mro__ if issubclass(kind, nn.Module))
    return next(kind for kind in classes if not issubclass(kind, FSDPModule))


def _new_sharded(original: type) -> nn.Module:
    """Return an empty sharded module, for unpickling; see ``FSDPModule.__reduce_ex__``."""
    module: nn.Module = object.__new__(_sharded_class(original))
    return module


def groups_of(name: str, modules: Iterable[nn.Module]) -> list[ParamGroup]:
    """Return the group of each sharded module.

    Raises:
        TypeError: If ``modules`` is one module instead of several; the message names it ``name``.
        ValueError: If a module is not sharded.
    """
    is_list = isinstance(modules, Iterable)
    check_type(name, modules, is_list, "sharded modules", "pass a list, also of one")
    groups = []
    for module in modules:
        group = group_of(module) if isinstance(module, nn.Module) else None
        if group is None:
            kind = type(module).__name__
            raise ValueError(f"Expected sharded modules, got {kind}; apply fully_shard to it")
        groups.append(group)
    return groups


def _check_comm(what: str, comm: Any) -> None:
    fits = callable(comm) and callable(getattr(comm, "allocate", None))
    check_type("comm", comm, fits, f"a custom {what} with allocate and __call__")


_Conversion = Callable[[torch.Tensor], torch.Tensor]


def _convert(modules: list[nn.Module], fn: _Conversion, apply: Callable[[Any], Any]) -> None:
    """Convert parameters, their gradients and buffers; all of them or, after a failure, none.

    All tensors are converted before any is replaced. When torch replaces a DTensor, ``grad_dtype``
    returns to its default, and torch refuses a gradient of another dtype. So gradients are removed
    before the replacement and assigned after it.

    Args:
        modules: The modules.
        fn: Converts one tensor.
        apply: Replaces each parameter and buffer of the modules by the result of a function.

    Memory: the tensors before and after the conversion.
    """
    groups = groups_in(modules)
    for group in groups:
        group.reshard()
    held = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    buffers = [(module, dict(module._buffers)) for module in modules]
    tensors = [*held.values(), *(param.grad for param in held.values())]
    tensors += [buffer for _, named in buffers for buffer in named.values()]
    with torch.no_grad():
        converted = {id(t): (t, fn(t)) for t in tensors if t is not None}
    before = [(p, p.detach(), _torch.local_part(p)) for p in held.values()]
    kept = []
    for param in (p for group in groups for p in group.params if id(p.sharded) in held):
        sharded, grad = param.sharded, param.sharded.grad
        new = None if grad is None else converted[id(grad)][1]
        if grad is not None and new is not None and grad.dtype not in (sharded.dtype, new.dtype):
            new = grad.to(new.device)  # the gradient keeps its own dtype
        param.record_user_state()
        kept.append((param, grad, new))
        sharded.grad = None
    is_converted = False
    try:
        apply(lambda t: converted[id(t)][1] if id(t) in converted else fn(t))
        is_converted = True
    except BaseException:
        for tensor, value, local in before:
            if not isinstance(tensor, DTensor):
                tensor.data = value
            elif _torch.local_part(tensor) is not local:
                torch.utils.swap_tensors(tensor, nn.Parameter(value, tensor.requires_grad))
        for module, present in buffers:
            module._buffers.update(present)
        raise
    finally:
        for param, grad_before, converted_grad in kept:
            now, grad = param.find_registered(), converted_grad if is_converted else grad_before
            if now is not None:
                carry_over(param, now)
            if now is not None and grad is not None:
                assign_grad(now, grad)


class FSDPModule(TorchFSDPModule):
    """The methods that :func:`fully_shard` adds to a module.

    The methods named ``set_...`` are settings. They take effect at the next forward or backward,
    and raise ``ValueError`` for a flag that is not a bool. A *tree* is a root (the outermost
    sharded module) with all sharded modules below it. In the examples, ``model`` is a
    sharded ``nn.Sequential`` of two sharded layers, on one of two ranks, and ``x`` is a batch.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class, so that a slice of a sharded container is not sharded."""
        return _original_class(cls)(*args, **kwargs)

    # Actions --------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's own group and register the unsharded parameters.

        They stay registered until :meth:`reshard`, or until a forward, a backward or an optimizer
        step registers the sharded parameters again. The next forward uses them without another
        gather, unless a shard was changed in place in between.

        Args:
            async_op: Whether to return a handle instead of waiting. A forward waits by itself.

        Raises:
            ValueError: If ``async_op`` is not a bool.
            ShardError: If called inside :func:`composable_shard.unsharded`.

        Collective: one all-gather of the group's bytes; none if the group is already unsharded.

        Example:
            >>> handle = model[0].unshard(async_op=True)
            >>> handle.wait()
            >>> hasattr(model[0].weight, "to_local")
            False
        """
        checked_bool("async_op", async_op)
        group = self._group()
        if group.is_in_unsharded_context:
            raise ShardError(f"Expected no unshard() of {group.label} inside unsharded(), got one")
        if not group.tree.call_stack:
            group.tree.prepare_gather()
        group.refresh()
        group.unshard()
        group.is_kept_by_user = True
        handle = UnshardHandle(group)
        if not async_op:
            handle.wait()
        return handle if async_op else None

    def reshard(self) -> None:
        """Free the unsharded parameters of this module's own group. Collective: none.

        Example:
            >>> model[0].unshard()
            >>> model[0].reshard()
            >>> model[0].weight.placements
            (Shard(dim=0),)
        """
        self._group().reshard()

    def reset_iter_state(self) -> None:
        """Return to the state between iterations, and drop all gradients that are not reduced yet.

        You need not call it after an exception, because the next forward of the root cleans up.
        This method cleans up at once, and also drops gradients that were accumulated without sync
        (``Partial`` DTensors). You may call it at any time outside a forward or backward, also
        before the first forward.

        Collective: none, but it waits for collectives that have been launched.

        Example:
            >>> with model.no_sync():
            ...     model(x).sum().backward()
            >>> model.reset_iter_state()
            >>> model[0].weight.grad is None
            True
        """
        tree = self._group().tree
        tree.reset(drops_earlier=True)
        for group in tree.groups:
            for param in group.params:
                if is_partial(param.sharded.grad):
                    param.sharded.grad = None

    def synchronize_gradients(self) -> None:
        """Reduce accumulated gradients over all ranks, without another backward.

        This finishes the reductions that :meth:`no_sync`, ``set_requires_gradient_sync(False)``,
        ``set_requires_all_reduce(False)`` and ``set_is_last_backward(False)`` have deferred, in the
        whole tree and whatever the present settings are. Call it on all ranks, outside forward and
        backward. If a backward has failed, its pending reductions are dropped.

        Raises:
            ShardError: If called in a forward or backward.

        Collective: the deferred reductions.

        Example:
            >>> from composable_shard import fully_shard
            >>> from composable_shard.testing import run_threads
            >>> def accumulate():
            ...     model = fully_shard(nn.Linear(2, 1, bias=False))
            ...     with model.no_sync():
            ...         model(torch.ones(1, 2)).sum().backward()
            ...     before = model.weight.grad.placements
            ...     model.synchronize_gradients()
            ...     return before, model.weight.grad.placements
            >>> run_threads(accumulate, 2)[0]
            ((Partial(avg),), (Shard(dim=0),))
        """
        self._between_iterations("synchronize_gradients").synchronize_gradients()

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Finish the backwards of an iteration, after ``set_manual_backward_finalization(True)``.

        Call it on the root, on all ranks, after all backwards of an iteration. The settings at this
        time decide what it reduces: with gradient sync, also gradients that were accumulated
        without sync; with all-reduce, also gradients that were reduced over the shards only. Before
        the first forward it does nothing.

        Args:
            async_op: Whether to return a handle instead of waiting. Call the handle's ``wait``
                before you use the gradients, and before the next forward.

        Raises:
            ValueError: If ``async_op`` is not a bool.
            ShardError: If called in a forward or backward, on a module below the root, without
                manual finalization, or before the wait for an earlier handle.

        Collective: the reductions that the backwards have not finished.

        Example:
            >>> model.set_manual_backward_finalization(True)
            >>> with model.no_sync():
            ...     model(x).sum().backward()
            >>> handle = model.finalize_backward(async_op=True)
            >>> handle.wait()
            >>> model[0].weight.grad.placements
            (Shard(dim=0),)
            >>> model.set_manual_backward_finalization(False)
        """
        checked_bool("async_op", async_op)
        tree = self._between_iterations("finalize_backward")
        self._check_is_root("finalize_backward")
        if not tree.tape.last_calls:
            return GradientReductionHandle(None) if async_op else None
        tree.finalization.check_waited()
        if not tree.finalization.is_manual:
            raise ShardError(
                "Expected finalize_backward() with manual finalization, got a root that finalizes "
                "at the end of backward; call set_manual_backward_finalization(True) first"
            )
        handle = GradientReductionHandle(tree)
        tree.finalization.start(handle)
        if not async_op:
            handle.wait()
        return handle if async_op else None

    def _between_iterations(self, method: str) -> Tree:
        """Return the tree, cleaned up after a failure; raise in a forward or backward.

        Raises:
            ShardError: In a forward or backward.
        """
        group = self._group()
        tree: Tree = group.tree
        if tree.is_computing:
            raise ShardError(
                f"Expected {method}() of {group.label} between iterations, got it within one"
            )
        tree.clean_up_if_failed()
        return tree

    def _check_is_root(self, method: str) -> None:
        group = self._group()
        if group is not group.tree.root:
            raise ShardError(
                f"Expected {method}() on the root, got it on {group.label}; call it on the "
                "outermost sharded module"
            )

    # Training -------------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scale the gradients of all parameters so that their norm is at most ``max_norm``.

        The same as :func:`composable_shard.clip_grad_norm_` of ``self.parameters()``.

        Args:
            max_norm: The norm to scale down to.
            norm_type: Order of the norm; ``float("inf")`` for the largest absolute value.
            error_if_nonfinite: Whether to raise if the norm is infinite or NaN.
            foreach: Accepted as in torch, without effect.

        Returns:
            The norm before scaling, a scalar tensor that is bitwise the same on all ranks.

        Raises:
            TypeError: If ``max_norm`` or ``norm_type`` is not a number.
            ValueError: If ``max_norm`` is negative or NaN, or a flag is not a bool.
            ShardError: On all ranks, if the norm is not finite and ``error_if_nonfinite``.

        Collective: one all-gather of a few scalars for each mesh axis that shards gradients.

        Example:
            >>> model(x).sum().backward()
            >>> model.clip_grad_norm_(1.0).ndim
            0
        """
        params = cast(nn.Module, self).parameters()
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)

    # nn.Module ------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters: reduced, accumulated, and pending.

        Args:
            set_to_none: Whether to drop gradients (the default) or fill them with zeros.

        Example:
            >>> model(x).sum().backward()
            >>> model.zero_grad()
            >>> model[0].weight.grad is None
            True
        """
        for group in self._groups(recurse=True):
            if group.is_compiled:
                group.program.discard()
        for param in self._params():
            clear_grad(param.sharded, to_none=set_to_none)
        super(TorchFSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set whether all parameters, sharded or unsharded at the moment, get gradients.

        Args:
            requires_grad: The choice.

        Returns:
            The module.

        Example:
            >>> output = model(x)
            >>> _ = model.requires_grad_(False)
            >>> output.sum().backward()
            >>> all(p.grad is None and not p.requires_grad for p in model.parameters())
            True
        """
        for param in self._params():
            param.sharded.requires_grad_(requires_grad)
        return super(TorchFSDPModule, self).requires_grad_(requires_grad)  # type: ignore[misc]

    def _apply(self, fn: _Conversion, recurse: bool = True) -> Any:
        module = cast(nn.Module, self)
        apply = super(TorchFSDPModule, self)._apply  # type: ignore[misc]
        modules = list(module.modules()) if recurse else [module]
        _convert(modules, fn, partial(apply, recurse=recurse))
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a sharded copy with its own shards, groups and settings; without gradients."""
        return copy_sharded(cast(nn.Module, self), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle this rank's shards and the sharding; see ``docs/checkpoints.md``.

        The same rank must load the pickle, over a mesh of the same ranks. The pickle leaves out
        gradients (as that of any module does), streams, events, and memory of a backend.
        """
        return _new_sharded, (_original_class(type(self)),), save_module(cast(nn.Module, self))

    def __setstate__(self, state: Any) -> None:
        saved = state if isinstance(state, SavedModule) else None
        attributes = state if saved is None else saved.attributes
        super(TorchFSDPModule, self).__setstate__(attributes)  # type: ignore[misc]
        if saved is not None:
            answer_torch(cast(nn.Module, self), restore_module(cast(nn.Module, self), saved))

    def _get_fsdp_state(self) -> TorchState:  # type: ignore[override]
        """Return a read-only view for code that reads torch's private state."""
        return torch_state(cast(nn.Module, self))

    # Reshard and prefetch -------------------------------------------------------------------

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Set whether unsharded parameters are freed after forward.

        Args:
            reshard_after_forward: The choice, as for :func:`fully_shard`; it also overrides the
                default of a root. ``False`` keeps the parameters until backward, but a forward
                without gradients still frees them.
            recurse: Whether to set it for all sharded modules below.

        Raises:
            ValueError: If the choice is neither a bool nor an int that divides the number of
                shards.

        Example:
            >>> model.set_reshard_after_forward(False)
            >>> output = model(x)
            >>> tuple(model[0].weight.shape), hasattr(model[0].weight, "to_local")
            ((4, 4), False)
        """
        choice: object = reshard_after_forward  # only fully_shard accepts None
        what = "to be True, False or a number of ranks"
        check_value("reshard_after_forward", choice, choice is not None, what)
        groups = self._groups(recurse)
        checked = {group: check_reshard(reshard_after_forward, group.channels) for group in groups}
        for group, choice in checked.items():
            group.settings.reshard_after_forward = choice
            group.settings.gathers_once_a_step = False
            group.tree.invalidate_programs()

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether unsharded parameters are freed after backward.

        ``False`` saves the gather for the next microbatch, as long as gradients are accumulated
        without sync or ``set_is_last_backward(False)`` is set. Between microbatches, the sharded
        parameters are registered, so you may change them and their gradients.

        Args:
            reshard_after_backward: The choice.
            recurse: Whether to set it for all sharded modules below.

        Example:
            >>> model.set_reshard_after_backward(False)
            >>> with model.no_sync():
            ...     model(x).sum().backward()
            >>> with record_events(model, "all_gather") as events:
            ...     output = model(x)
            >>> events
            []
        """
        flag = checked_bool("reshard_after_backward", reshard_after_backward)
        self._set(recurse, reshard_after_backward=flag)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of unsharded parameters stays allocated after a reshard.

        With ``True``, every gather fills the same memory, which a captured CUDA graph needs. If
        parameters are replaced (by loading with ``assign=True`` or by moving the module), they get
        new memory.

        Args:
            keep: The choice. ``False`` frees the memory of resharded parameters at once.
            recurse: Whether to set it for all sharded modules below.

        Memory: with ``True``, all unsharded parameters of these modules.

        Example:
            >>> model[0].set_keep_unsharded_storage(True)
            >>> places = []
            >>> for _ in range(2):
            ...     model[0].unshard()
            ...     places.append(model[0].weight.data_ptr())
            ...     model[0].reshard()
            >>> places[0] == places[1]
            True
        """
        checked_bool("keep", keep)
        for group in self._groups(recurse):
            group.reshard()
            group.settings.keeps_storage = keep
            if not keep:
                for bucket in group.buckets:
                    bucket.free()
            group.is_compiled = False

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's own group.

        Set ``False`` if backward does not read the parameters, as in an embedding.

        Args:
            unshard_in_backward: The choice.

        Example:
            >>> model[0].set_unshard_in_backward(False)
            >>> model(x).sum().backward()
            >>> model[0].bias.grad.placements
            (Shard(dim=0),)
        """
        flag = checked_bool("unshard_in_backward", unshard_in_backward)
        self._set(False, unshard_in_backward=flag)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:  # type: ignore[override]
        """Set the modules that this module's forward prefetches, instead of the recorded next one.

        Copies and pickles of the model prefetch in the recorded order.

        Args:
            modules: Sharded modules, in the order to gather them; empty for the recorded order.

        Raises:
            TypeError: If ``modules`` is one module instead of several.
            ValueError: If a module is not sharded.

        Example:
            >>> model.set_modules_to_forward_prefetch([model[0], model[1]])
            >>> with record_events(model, "all_gather") as events:
            ...     output = model(x)
            >>> events
            [('all_gather', '0'), ('all_gather', '1')]
        """
        self._group().settings.forward_prefetch = groups_of("modules", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:  # type: ignore[override]
        """Set the modules that this module's backward prefetches, instead of the recorded next one.

        Copies and pickles of the model prefetch in the recorded order.

        Args:
            modules: Sharded modules, in the order to gather them; empty for the recorded order.

        Raises:
            TypeError: If ``modules`` is one module instead of several.
            ValueError: If a module is not sharded.

        Example:
            >>> model[1].set_modules_to_backward_prefetch([model[0]])
            >>> model(x).sum().backward()
        """
        self._group().settings.backward_prefetch = groups_of("modules", modules)

    def set_prefetch_depth(self, depth: int, *, recurse: bool = True) -> None:
        """Set how many groups are prefetched while one computes, in the recorded execution order.

        The default, 1, hides a gather that takes no longer than the compute of one group. Each
        additional group needs memory for its unsharded parameters.

        Args:
            depth: The number of groups; 0 turns prefetching off.
            recurse: Whether to set it for all sharded modules below.

        Raises:
            TypeError: If ``depth`` is not an int.
            ValueError: If ``depth`` is negative.

        Example:
            >>> model.set_prefetch_depth(2)
            >>> model(x).sum().backward()
        """
        check_int("depth", depth, 0)
        self._set(recurse, prefetch_depth=depth)

    def set_post_optim_event(self, event: Waitable | None) -> None:
        """Make the next gather wait for ``event``, such as the end of an optimizer step.

        Use it if the optimizer steps on a separate stream or in a separate thread.

        Args:
            event: Any object with a ``wait`` method: a ``torch.Event``, an event of a backend such
                as ``torch.cuda.Event``, or a ``threading.Event``. ``wait()`` is called once, before
                the next gather is launched. ``None``, which ``record_event`` of a CPU stream
                returns, means to wait for nothing.

        Raises:
            TypeError: If ``event`` has no ``wait``.

        Example:
            >>> import torch
            >>> model.set_post_optim_event(torch.Event("cpu"))
            >>> output = model(x)
        """
        fits = event is None or callable(getattr(event, "wait", None))
        check_type("event", event, fits, "an object with a method wait, such as a torch.Event")
        self._group().tree.post_optim_event = event

    # When gradients are reduced -------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the end of a backward waits for its reductions.

        With ``False``, the last reductions of a microbatch overlap with the next microbatch.
        Gradients are complete after a backward with ``True``. The setting acts on the whole tree.

        Args:
            is_last_backward: The choice.

        Example:
            >>> model.set_is_last_backward(False)
            >>> model(x).sum().backward()
            >>> model.set_is_last_backward(True)
            >>> model(x).sum().backward()
            >>> model[0].weight.grad.placements
            (Shard(dim=0),)
        """
        tree: Tree = self._group().tree
        tree.is_last_backward = checked_bool("is_last_backward", is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether you finish reductions by calling :meth:`FSDPModule.finalize_backward`.

        With ``True``, the end of a backward never waits for its reductions, whatever
        ``set_is_last_backward`` has set. The settings at the time of ``finalize_backward`` decide
        which gradients it reduces and whether it frees parameters. Call this method on the root,
        between iterations. If a root with this setting becomes part of an outer model, the outer
        model has the setting.

        Args:
            enabled: The choice.

        Raises:
            ValueError: If ``enabled`` is not a bool.
            ShardError: If called on a module below the root, during a backward, or before an
                earlier backward is finalized.

        Example:
            >>> model.set_manual_backward_finalization(True)
            >>> model(x).sum().backward()
            >>> model.finalize_backward()
            >>> model[0].weight.grad.placements
            (Shard(dim=0),)
            >>> model.set_manual_backward_finalization(False)
        """
        checked_bool("enabled", enabled)
        method = "set_manual_backward_finalization"
        self._check_is_root(method)
        self._between_iterations(method).finalization.set_manual(enabled)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients over the ranks.

        With ``False``, unsharded gradients are accumulated. ``.grad`` shows them as ``Partial``
        DTensors. The next backward with ``True`` reduces them.

        Args:
            requires_gradient_sync: The choice.
            recurse: Whether to set it for all sharded modules below.

        Example:
            >>> model.set_requires_gradient_sync(False)
            >>> model(x).sum().backward()
            >>> model[0].weight.grad.placements
            (Partial(avg),)
        """
        flag = checked_bool("requires_gradient_sync", requires_gradient_sync)
        self._set(recurse, reduce_grads=flag)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication inside this context.

        The context acts on this module and all modules below. Contexts may be nested; each restores
        the previous setting.

        Example:
            >>> with model.no_sync():
            ...     model(x).sum().backward()
            >>> model[0].weight.grad.placements
            (Partial(avg),)
        """
        groups = self._groups(recurse=True)
        before = [group.settings.reduce_grads for group in groups]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, value in zip(groups, before, strict=True):
                group.settings.reduce_grads = value

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward also reduces gradients over the replicas of a hybrid mesh.

        With ``False``, gradients are reduced over the shards only. ``.grad`` shows them as
        ``(Partial, Shard)`` DTensors. The next backward with ``True`` reduces them over the
        replicas.

        Args:
            requires_all_reduce: The choice; it has no effect on other meshes.
            recurse: Whether to set it for all sharded modules below.

        Example:
            >>> model.set_requires_all_reduce(False)
            >>> model(x).sum().backward()
        """
        flag = checked_bool("requires_all_reduce", requires_all_reduce)
        self._set(recurse, all_reduce_grads=flag)

    # How gradients are reduced --------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the number that divides the sum of gradients; the default is the number of ranks.

        Args:
            factor: A positive number. It also divides gradients that were accumulated without sync,
                when they are reduced.

        Raises:
            ValueError: If ``factor`` is not a positive number.
            ShardError: On all ranks, if gradients were accumulated without sync on top of reduced
                gradients, because these are already divided.

        Example:
            >>> model[0].set_gradient_divide_factor(1.0)
            >>> model(x).sum().backward()
        """
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        check_value("factor", factor, is_number and factor > 0, "to be a positive number")
        self._group().divide_by(float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`; this is its deprecated name."""
        text = "set_reduce_scatter_divide_factor is deprecated; call set_gradient_divide_factor"
        warnings.warn(text, FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives always sum gradients, so that the library divides the result.

        Args:
            enable: The choice. Use ``True`` if the backend sums faster than it averages.

        Example:
            >>> model[0].set_force_sum_reduction_for_comms(True)
            >>> model(x).sum().backward()
        """
        self._set(False, recompiles=True, sums_only=checked_bool("enable", enable))

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether trainable parameters that no rank used get gradients of zeros.

        By default, their gradient stays ``None`` and the optimizer skips them. With zeros, as in
        FSDP2, the optimizer steps them, so AdamW decays them, for example. In both cases, ranks may
        use different parameters. Parameters that were never gathered, and wrapper subclasses, get
        no zeros.

        Args:
            reduce_scatter_unused_params: The choice.
            recurse: Whether to set it for all sharded modules below.

        Memory: an unsharded gradient for each unused parameter while its group is reduced.

        Example:
            >>> model.set_reduce_scatter_unused_params(True)
            >>> model(x).sum().backward()
        """
        flag = checked_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        self._set(recurse, recompiles=True, zeros_for_unused=flag)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many reductions may be pending; the largest limit in a tree counts.

        Each pending reduction keeps its unsharded gradients in memory. The default is 1. A higher
        limit helps if a reduction takes longer than the compute that overlaps with it.

        Args:
            max_input_buffers: The limit, at least 1.
            recurse: Whether to set it for all sharded modules below.

        Raises:
            TypeError: If the limit is not an int.
            ValueError: If the limit is less than 1.

        Example:
            >>> model.set_reduce_scatter_max_input_buffers(2)
            >>> model(x).sum().backward()
        """
        check_int("max_input_buffers", max_input_buffers, 1)
        self._set(recurse, max_reductions=max_input_buffers)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object], *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook`` with each flat buffer of reduced gradients, before ``.grad`` is written.

        With a hook, a parameter without a gradient on any rank gets zeros instead of ``None``,
        because the hook may reduce over further ranks that have a gradient.

        Args:
            hook: Gets a 1-D tensor of gradients, reduced over shards and replicas. It may change
                the tensor in place.
            stream: The stream on which the hook runs. Not allowed with a hybrid mesh, because the
                hook then runs after the reduction over replicas. It has no effect on the CPU.

        Raises:
            TypeError: If ``hook`` is not callable, or ``stream`` is not a stream.
            ValueError: If ``stream`` is given for a hybrid mesh.

        Example:
            >>> sums = []
            >>> model[0].set_all_reduce_hook(lambda grads: sums.append(grads.shape))
            >>> model(x).sum().backward()
            >>> sums
            [torch.Size([10])]
        """
        check_type("hook", hook, callable(hook), "callable")
        group = self._group()
        has_streams = _torch.has_streams(group.mesh.device)
        needed = "stream_id" if has_streams else "wait_stream"  # a torch.cpu.Stream has no id
        is_stream = stream is None or hasattr(stream, needed)
        check_type("stream", stream, is_stream, "a torch.Stream or None")
        if stream is not None and any(mesh.num_replicas > 1 for mesh in group.channels):
            raise ValueError(f"Expected no stream for {group.label} with replicas, got one")
        used_stream = stream if has_streams else None
        self._set(False, recompiles=True, all_reduce_hook=hook, hook_stream=used_stream)

    # Communication --------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: collectives.AllGather) -> None:  # type: ignore[override]
        """Gather this module's own group by a custom all-gather.

        Args:
            comm: A custom all-gather. Each gather calls it with flat tensors, once for each mesh
                and dtype of the group. Shards are copied into the input tensor, and parameters out
                of the output tensor.

        Raises:
            TypeError: If ``comm`` has no ``allocate`` or is not callable.

        Example:
            >>> from composable_shard import AllGather
            >>> class Plain(AllGather):
            ...     def allocate(self, size, *, dtype, device):
            ...         return torch.empty(size, dtype=dtype, device=device)
            ...     def __call__(self, output_tensor, input_tensor, group, async_op=False):
            ...         output_tensor.copy_(input_tensor.repeat(group.size()))
            >>> model[0].set_custom_all_gather(Plain())
            >>> output = model(x)
        """
        _check_comm("all-gather", comm)
        self._set_channels(lambda channel: channel.use_all_gather(comm))

    def set_custom_reduce_scatter(self, comm: collectives.ReduceScatter) -> None:  # type: ignore[override]
        """Reduce the gradients of this module's own group by a custom reduce-scatter.

        Args:
            comm: A custom reduce-scatter. Each reduction calls it with flat tensors, once for each
                mesh and dtype of the group. Gradients are copied into the input tensor, and sharded
                gradients out of the output tensor.

        Raises:
            TypeError: If ``comm`` has no ``allocate`` or is not callable.

        Example:
            >>> from composable_shard import ReduceScatter
            >>> class First(ReduceScatter):
            ...     def allocate(self, size, *, dtype, device):
            ...         return torch.empty(size, dtype=dtype, device=device)
            ...     def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            ...         output_tensor.copy_(input_tensor.chunk(group.size())[0])
            >>> model[0].set_custom_reduce_scatter(First())
            >>> model(x).sum().backward()
        """
        _check_comm("reduce-scatter", comm)
        self._set_channels(lambda channel: channel.use_reduce_scatter(comm))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether collectives use memory that their backend allocates.

        Args:
            enable: The choice. With ``False``, collectives use the memory of parameters and
                gradients again.

        Raises:
            ShardError: If the backend allocates no memory, or custom collectives are set.

        Example:
            >>> model[0].set_allocate_memory_from_process_group_for_comm(False)
        """
        checked_bool("enable", enable)
        self._use_memory(collectives.backend_memory if enable else lambda *_: None)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Make collectives use symmetric memory.

        Args:
            backend: The backend of the memory; must be ``"NCCL"``.

        Raises:
            ValueError: If ``backend`` is not ``"NCCL"``.
            ShardError: If the process group does not use NCCL, or custom collectives are set.

        Example:
            >>> model[0].set_symm_mem_for_comm("NCCL")
            Traceback (most recent call last):
            composable_shard.errors.ShardError: Expected group '0' on NCCL, ...
        """
        check_value("the symmetric memory", backend, backend == "NCCL", "of 'NCCL'")
        self._use_memory(collectives.symmetric_memory)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether reductions use a separate process group, so that they overlap with gathers.

        Args:
            enable: The choice.
            recurse: Whether to set it for all sharded modules below.

        Collective: makes a process group for each set of ranks, once.

        Example:
            >>> model.set_separate_reduce_scatter_group()
            >>> model(x).sum().backward()
        """
        checked_bool("enable", enable)
        self._set_channels(lambda channel: channel.separate_reductions(enable), recurse)

    # Groups ---------------------------------------------------------------------------------

    def _set(self, recurse: bool, *, recompiles: bool = False, **settings: Any) -> None:
        for group in self._groups(recurse):
            vars(group.settings).update(settings)
            if recompiles:
                group.tree.invalidate_programs()

    def _set_channels(self, change: Callable[[Channel], None], recurse: bool = False) -> None:
        for group in self._groups(recurse):
            for channel in group.channels.values():
                change(channel)
            group.tree.invalidate_programs()

    def _use_memory(self, memory_of: Callable[[ShardMesh, str], Any]) -> None:
        group = self._group()
        for channel in group.channels.values():
            channel.check_built_in()
            channel.use_memory(memory_of(channel.mesh, group.label))
        group.tree.invalidate_programs()

    def _group(self) -> ParamGroup:
        group = group_of(cast(nn.Module, self))
        assert group is not None
        return group

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        if not checked_bool("recurse", recurse):
            return [self._group()]
        modules = cast(nn.Module, self).modules()
        return list(dict.fromkeys(g for m in modules if (g := group_of(m)) is not None))

    def _params(self) -> list[ShardedParam]:
        """Return the parameters of this module, without those of other modules in its groups."""
        below = set(cast(nn.Module, self).modules())
        params = (param for group in self._groups(recurse=True) for param in group.params)
        return [param for param in params if any(slot.module in below for slot in param.slots)]


class GradientReductionHandle:
    """The handle that ``finalize_backward(async_op=True)`` returns.

    Example:
        >>> model.set_manual_backward_finalization(True)
        >>> with model.no_sync():
        ...     model(x).sum().backward()
        >>> handle = model.finalize_backward(async_op=True)
        >>> handle.wait()  # other work goes here, before the wait
        >>> model[0].weight.grad.placements
        (Shard(dim=0),)
    """

    def __init__(self, tree: Tree | None) -> None:
        self._tree = tree

    def wait(self) -> None:
        """Wait until the gradients are reduced; further calls do nothing.

        On a device, the stream waits; the host waits only for results that are copied to the host.

        Collective: on the CPU, the all-reduces over the replicas, if there are any.

        Raises:
            ShardError: If ``reset_iter_state``, or the cleanup after a failure, has dropped the
                reductions.
        """
        tree = self._tree
        if tree is None:
            return
        if tree.finalization.handle is not self:
            raise ShardError(
                "Expected the reductions that finalize_backward() launched, got none, since they "
                "were dropped by reset_iter_state() or after a failure; run the iteration again"
            )
        tree.finalization.end()
        self._tree = None


class UnshardHandle:
    """The handle that ``unshard(async_op=True)`` returns."""

    def __init__(self, group: ParamGroup) -> None:
        self._group: ParamGroup | None = group

    def wait(self) -> None:
        """Wait for the gather and register the unsharded parameters; further calls do nothing."""
        group = self._group
        if group is not None and group.state is not State.SHARDED:
            group.wait()
            group.register_unsharded()
            group.take_snapshot()
        self._group = None


_torch.let_foreach_zero_any_placement()
