"""What a sharded module can do: the class that ``fully_shard`` mixes into a module's own."""

from __future__ import annotations

from typing import Any, Literal, cast, overload

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from composable_shard import _torch
from composable_shard.core.copying import (
    SavedModule,
    copy_sharded,
    restore_module,
    save_module,
)
from composable_shard.core.grad_norm import clip_grad_norm
from composable_shard.core.grads.sharded_grad import is_partial
from composable_shard.core.group import ParamGroup, group_of, set_group
from composable_shard.core.passes.context import Context
from composable_shard.core.passes.torch_state import TorchState, answer_torch, torch_state
from composable_shard.errors import ShardError
from composable_shard.module_communication import ModuleCommunication
from composable_shard.module_settings import ModuleSettings

__all__ = ["FSDPModule", "GradientReductionHandle", "UnshardHandle", "group_of", "make_sharded"]

_sharded_classes: dict[type, type] = {}


def make_sharded(module: nn.Module, group: ParamGroup) -> None:
    """Give a module its group and mix :class:`FSDPModule` into its class."""
    set_group(module, group)
    answer_torch(module, group)
    module.__class__ = _sharded_class(type(module))


def _sharded_class(original: type) -> type:
    sharded = _sharded_classes.get(original)
    if sharded is None:
        sharded = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
        sharded.__module__, sharded.__qualname__ = original.__module__, sharded.__name__
        _sharded_classes[original] = sharded
    return sharded


def _original_class(sharded: type) -> type:
    return next(
        c for c in sharded.__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule)
    )


def _new_sharded(original: type) -> nn.Module:
    """Return what unpickling makes a sharded module of; see ``FSDPModule.__reduce_ex__``."""
    module: nn.Module = object.__new__(_sharded_class(original))
    return module


class FSDPModule(ModuleSettings, ModuleCommunication, TorchFSDPModule):  # type: ignore[misc]
    """What :func:`fully_shard` adds to the class of a module.

    Settings act from the next forward or backward on, whenever they are called. In the examples of
    the methods, ``model`` is an ``nn.Sequential`` of two sharded layers, sharded itself, on one of
    two ranks, and ``x`` a batch.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class: slicing a sharded container gives a plain one."""
        return _original_class(cls)(*args, **kwargs)

    # Moments --------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's own group and register the unsharded parameters.

        They stay registered until :meth:`reshard`, or until a forward, a backward or an optimizer
        step that goes on to show the sharded ones. A forward trusts them meanwhile, but for
        changes that move a version counter.

        Args:
            async_op: Return a handle instead of waiting; forward waits by itself.

        Raises:
            ShardError: If called inside of :func:`composable_shard.unsharded`.

        Collective: one all-gather of the group's bytes, none if it is unsharded already.

        Example:
            >>> handle = model[0].unshard(async_op=True)
            >>> handle.wait()
            >>> hasattr(model[0].weight, "to_local")
            False
        """
        group = self._group()
        if group in group.context.opened:
            raise ShardError(
                f"Expected unshard() of {group.label} outside of unsharded(), got it inside, where "
                "the parameters are full"
            )
        group.context.free_unless_trusted(group)
        group.unshard()
        group.is_held = group.is_exposed = True
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

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
        """Return to the state between iterations and drop every gradient not yet reduced.

        Never needed after an exception, which the next forward of the root cleans up after; this
        does it at once, and drops accumulated gradients (``Partial`` ones) too. Harmless at any
        time outside of a forward or backward, also before the first forward.

        Collective: none, but waits for launched ones.

        Example:
            >>> with model.no_sync():
            ...     model(x).sum().backward()
            >>> model.reset_iter_state()
            >>> model[0].weight.grad is None
            True
        """
        context = self._group().context
        context.clean_up()
        for group in context.groups:
            group.gradients.discard_partial()

    def synchronize_gradients(self) -> None:
        """Reduce over all ranks what backwards have accumulated, without another backward.

        Finishes what :meth:`no_sync`, ``set_requires_gradient_sync(False)``,
        ``set_requires_all_reduce(False)`` and ``set_is_last_backward(False)`` have deferred, in the
        whole tree and whatever is set now. Call it on all ranks, outside of forward and backward.
        What a backward that failed had under way is dropped.

        Raises:
            ShardError: In a forward or backward.

        Collective: the reductions of the groups that owe some.

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
        self._between_iterations("synchronize_gradients")
        self._group().context.backward.synchronize()

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what backwards have left, after ``set_manual_backward_finalization(True)``.

        What is reduced and freed is what is set now: with gradient sync all that was accumulated
        without, and over the replicas what was reduced over the shards alone. Call it on the root,
        on all ranks, when all backwards of an iteration have run. Nothing happens before the first
        forward.

        Args:
            async_op: Return a handle instead of waiting. Wait by it before the gradients are used,
                and before the next forward.

        Raises:
            ShardError: In a forward or backward; below the root; if the end of a backward does it;
                if an earlier one was not waited for. After a pipeline schedule that splits
                backward into inputs and weights and has lost gradients.

        Collective: the reductions of the groups that owe some.

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
        context = self._between_iterations("finalize_backward")
        group = self._group()
        if group is not context.root:
            raise ShardError(
                f"Expected finalize_backward() of the root, got it of {group.label}; call it on "
                "the outermost sharded module"
            )
        if not context.has_run:
            return GradientReductionHandle(None) if async_op else None
        context.backward.check_finalized()
        if not group.settings.finalizes_by_hand:
            raise ShardError(
                "Expected finalize_backward() where backward is finalized by hand, got a root that "
                "does it at the end of backward; call set_manual_backward_finalization(True) first"
            )
        handle = GradientReductionHandle(group)
        context.backward.start_finalization(handle)
        if async_op:
            return handle
        handle.wait()
        return None

    def _between_iterations(self, method: str) -> Context:
        """Return what the tree shares; raise in a forward or backward, and forget one that failed.

        Raises:
            ShardError: In a forward or backward.
        """
        group = self._group()
        context = group.context
        if context.forward.is_running or _torch.current_backward() != -1:
            raise ShardError(
                f"Expected {method}() of {group.label} outside of forward and backward, got it "
                "within one; call it between iterations"
            )
        if context.backward.was_aborted:
            context.clean_up()
        return context

    # Training -------------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scale all gradients below so that their norm is at most ``max_norm``.

        What :func:`composable_shard.clip_grad_norm_` does with ``self.parameters()``.

        Args:
            max_norm: The norm to scale down to.
            norm_type: Order of the norm; ``float("inf")`` for the largest absolute value.
            error_if_nonfinite: Whether to raise if the norm is infinite or NaN.
            foreach: ``False`` to treat gradients one by one.

        Returns:
            The norm before, a scalar tensor that is bitwise the same on all ranks.

        Raises:
            ShardError: On all ranks, if the norm is not finite and ``error_if_nonfinite``.

        Collective: one all-gather of a few scalars for each mesh axis gradients are sharded on.

        Example:
            >>> model(x).sum().backward()
            >>> model.clip_grad_norm_(1.0).ndim
            0
        """
        return clip_grad_norm(
            cast(nn.Module, self).parameters(),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            foreach=foreach,
        )

    # nn.Module ------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients below: reduced, accumulated, and under way.

        Args:
            set_to_none: Whether to drop them (the default) or fill them with zeros.

        Example:
            >>> model(x).sum().backward()
            >>> model.zero_grad()
            >>> model[0].weight.grad is None
            True
        """
        for group in self._groups(recurse=True):
            group.gradients.discard()
            for param in group.params:
                grad = param.sharded.grad
                if grad is None:
                    continue
                if set_to_none:
                    param.sharded.grad = None
                elif is_partial(grad):
                    _torch.local_tensor(grad).zero_()
                else:
                    param.sharded.grad = torch.zeros_like(grad)
        super(TorchFSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set whether the parameters below get gradients, in whatever form they are registered.

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
        super(TorchFSDPModule, self).requires_grad_(requires_grad)  # type: ignore[misc]
        for group in self._groups(recurse=True):
            group.agree_on_requires_grad()
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        applied = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for param in self._group().params:
            param.keep_attributes(param.sharded)
        return applied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a sharded copy with shards, groups and settings of its own; without gradients."""
        return copy_sharded(cast(nn.Module, self), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle this rank's shards, and how they are sharded; see ``docs/checkpoints.md``.

        To be loaded by the same rank, over a mesh of the same ranks. Left out is what belongs to a
        process: gradients (as of any module), streams, events, and memory of a backend.
        """
        return _new_sharded, (_original_class(type(self)),), save_module(cast(nn.Module, self))

    def __setstate__(self, state: Any) -> None:
        saved = state if isinstance(state, SavedModule) else None
        attributes = state if saved is None else saved.attributes
        super(TorchFSDPModule, self).__setstate__(attributes)  # type: ignore[misc]
        if saved is not None:
            restore_module(cast(nn.Module, self), saved)

    def _get_fsdp_state(self) -> TorchState:  # type: ignore[override]
        """Answer those that read torch's private state; it cannot be written to."""
        return torch_state(cast(nn.Module, self))


class GradientReductionHandle:
    """Waits for a ``finalize_backward(async_op=True)``.

    Example:
        >>> model.set_manual_backward_finalization(True)
        >>> with model.no_sync():
        ...     model(x).sum().backward()
        >>> handle = model.finalize_backward(async_op=True)
        >>> handle.wait()  # other work goes here, before the wait
        >>> model[0].weight.grad.placements
        (Shard(dim=0),)
    """

    def __init__(self, root: ParamGroup | None) -> None:
        self._root = root

    def wait(self) -> None:
        """Wait until the gradients are reduced, on the device's own time; idempotent.

        Raises:
            ShardError: If ``reset_iter_state``, or cleaning up after a failure, has dropped them.
        """
        if self._root is None:
            return
        backward = self._root.context.backward
        if backward.finalization is not self:
            raise ShardError(
                "Expected the reductions that finalize_backward() launched, got none, since they "
                "were dropped by reset_iter_state() or after a failure; run the iteration again"
            )
        backward.end_finalization()
        self._root = None


class UnshardHandle:
    """Waits for an ``unshard(async_op=True)``."""

    def __init__(self, group: ParamGroup) -> None:
        self._group: ParamGroup | None = group

    def wait(self) -> None:
        """Wait for the gather and register the unsharded parameters; idempotent."""
        if self._group is not None:
            self._group.wait_for_unshard()
            self._group.context.wait_until_read()
            self._group = None
