"""The public interface: ``fully_shard`` and what a sharded module can do.

Source: ``torch.distributed.fsdp.fully_shard`` (FSDP2), whose names, arguments and defaults it
keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import Shard

from composable_shard.core.context import join_tree
from composable_shard.core.convert import (
    Managed,
    build_group,
    commit,
    find_managed,
    plan_params,
    top_modules,
)
from composable_shard.core.gradients import is_partial
from composable_shard.core.group import ParamGroup
from composable_shard.core.hooks import install
from composable_shard.core.state_dicts import install_state_dict_hooks
from composable_shard.errors import ShardError
from composable_shard.mesh import ShardMesh, resolve_mesh
from composable_shard.policy import MixedPrecisionPolicy, OffloadPolicy

_GROUP = "_composable_shard_group"
_sharded_classes: dict[type, type] = {}

_Sharded = TypeVar("_Sharded", nn.Module, list[nn.Module])


def fully_shard(
    module: _Sharded,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> _Sharded:
    """Shard the parameters of a module over a mesh, in place.

    Each parameter becomes a DTensor sharded on dim 0. The parameters of one call form one group:
    gathered together before forward and backward, freed after them, their gradients reduced
    together. Call it on submodules first and on the root last; parameters that are already in a
    group stay there.

    Args:
        module: A module, or a list of modules that form one group.
        mesh: 1-D mesh to shard over; all ranks if absent, on the current accelerator or else the
            CPU. Starts the default process group from the environment if there is none.
        reshard_after_forward: Whether unsharded parameters are freed after forward and gathered
            again for backward. ``None`` means ``True`` but for the root, whose parameters are
            needed at once.
        shard_placement_fn: Returns the dim to shard a parameter on, ``Shard(dim)``, or ``None``
            for ``Shard(0)``. Uneven and negative dims are allowed.
        mp_policy: Dtypes of compute and reduction; see :class:`MixedPrecisionPolicy`.
        offload_policy: Only the default, no offloading.
        ignored_params: Parameters to leave as they are.

    Returns:
        The argument, whose modules are now :class:`FSDPModule`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a module or parameter cannot be sharded. The module is then as it was.

    Collective: none.
    Memory: this rank's shards; the full parameters are let go.

    Example:
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(4):
        ...     model = fully_shard(nn.Linear(8, 8, bias=False))
        ...     model.weight.to_local().shape
        torch.Size([2, 8])
    """
    modules = top_modules(module)
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    _check_arguments(modules, reshard_after_forward, policy, offload_policy, ignored_params)
    shard_mesh = resolve_mesh(mesh)
    managed = find_managed(modules, ignored_params or (), lambda m: group_of(m) is not None)
    planned = plan_params(managed, shard_mesh, shard_placement_fn)
    group = build_group(modules, managed, planned, shard_mesh, policy)
    group.settings.reshard_after_forward = reshard_after_forward
    _adopt(group, managed)
    return module


def _check_arguments(
    modules: Sequence[nn.Module],
    reshard_after_forward: object,
    policy: object,
    offload_policy: object,
    ignored_params: object,
) -> None:
    for module in modules:
        if group_of(module) is not None:
            raise ValueError(
                f"Expected a module that is not sharded, got {type(module).__name__}, which "
                "fully_shard was applied to before"
            )
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ValueError(
            "Expected reshard_after_forward to be True, False or None, got "
            f"{type(reshard_after_forward).__name__}: {reshard_after_forward!r}"
        )
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            "Expected mp_policy to be a composable_shard.MixedPrecisionPolicy, got "
            f"{type(policy).__module__}.{type(policy).__name__}"
        )
    if offload_policy is not None and type(offload_policy) is not OffloadPolicy:
        raise TypeError(
            "Expected offload_policy to be a composable_shard.OffloadPolicy, got "
            f"{type(offload_policy).__module__}.{type(offload_policy).__name__}"
        )
    if ignored_params is not None and not isinstance(ignored_params, (set, frozenset)):
        raise TypeError(f"Expected ignored_params to be a set, got {type(ignored_params).__name__}")


def _adopt(group: ParamGroup, managed: Managed) -> None:
    """Turn the modules into sharded ones. Nothing here can fail for a reason the user gave."""
    commit(group, managed)
    install(group, managed.modules)
    install_state_dict_hooks(group)
    for module in group.modules:
        module.__dict__[_GROUP] = group
        module.__class__ = _sharded_class(type(module))
    join_tree(group, group_of)


def _sharded_class(original: type) -> type:
    sharded = _sharded_classes.get(original)
    if sharded is None:
        sharded = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
        sharded.__module__, sharded.__qualname__ = original.__module__, sharded.__name__
        _sharded_classes[original] = sharded
    return sharded


def group_of(module: nn.Module) -> ParamGroup | None:
    """Return the group of a sharded module, ``None`` for any other."""
    return module.__dict__.get(_GROUP)


class FSDPModule(TorchFSDPModule):
    """What :func:`fully_shard` adds to the class of a module.

    All settings act from the next forward or backward on, whenever they are called.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class: slicing a sharded container gives a plain one."""
        original = next(c for c in cls.__mro__ if not issubclass(c, TorchFSDPModule))
        return original(*args, **kwargs)

    # Moments --------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's own group and register the unsharded parameters.

        Args:
            async_op: Return a handle instead of waiting; forward waits by itself.

        Collective: one all-gather of the group's bytes, none if it is unsharded already.
        """
        group = self._group()
        group.unshard()
        if async_op:
            return UnshardHandle(group)
        group.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Free the unsharded parameters of this module's own group. Collective: none."""
        self._group().reshard()

    def reset_iter_state(self) -> None:
        """Return to the state between iterations and drop every gradient not yet reduced.

        Never needed after an exception, which the next forward of the root cleans up after; this
        does it at once, and drops accumulated gradients (``Partial`` ones) too. Harmless at any
        time outside of a forward or backward, also before the first forward.

        Collective: none, but waits for launched ones.
        """
        context = self._group().context
        context.clean_up()
        for group in context.groups:
            group.gradients.discard_partial()

    # Settings -------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the end of a backward waits for its reductions.

        ``False`` lets the last reductions of a microbatch overlap with the next one; gradients
        are complete after a backward for which it is ``True``. Acts on the whole tree.
        """
        self._group().context.backward.is_last = _checked_bool("is_last_backward", is_last_backward)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients over the ranks.

        Without, gradients are accumulated unsharded, visible as ``Partial`` DTensors in ``.grad``,
        and reduced by the next backward with it.

        Args:
            requires_gradient_sync: The choice.
            recurse: Whether to set it for all sharded modules below, the default.
        """
        _checked_bool("requires_gradient_sync", requires_gradient_sync)
        for group in self._groups(recurse):
            group.settings.requires_gradient_sync = requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication within this context.

        Nests, and restores what was set before. Acts on this module and all below.
        """
        groups = self._groups(recurse=True)
        before = [group.settings.requires_gradient_sync for group in groups]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, value in zip(groups, before, strict=True):
                group.settings.requires_gradient_sync = value

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether unsharded parameters are freed after forward.

        Args:
            reshard_after_forward: The choice; also for a root, which has no say of its own then.
            recurse: Whether to set it for all sharded modules below, the default.
        """
        _checked_bool("reshard_after_forward", reshard_after_forward)
        for group in self._groups(recurse):
            group.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether unsharded parameters are freed after backward.

        ``False`` saves the gather of the next microbatch; after an optimizer step the parameters
        are gathered again all the same.

        Args:
            reshard_after_backward: The choice.
            recurse: Whether to set it for all sharded modules below, the default.
        """
        _checked_bool("reshard_after_backward", reshard_after_backward)
        for group in self._groups(recurse):
            group.settings.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:  # type: ignore[override]
        """Gather these modules' groups when this one runs forward, instead of the recorded next.

        Args:
            modules: Sharded modules, in the order to gather them; empty for the recorded order.

        Raises:
            ValueError: If one of them is not sharded.
        """
        self._group().settings.forward_prefetch = _groups_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:  # type: ignore[override]
        """Gather these modules' groups when this one runs backward, instead of the recorded next.

        Args:
            modules: Sharded modules, in the order to gather them; empty for the recorded order.

        Raises:
            ValueError: If one of them is not sharded.
        """
        self._group().settings.backward_prefetch = _groups_of(modules)

    # nn.Module ------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients below: reduced, accumulated, and under way.

        Args:
            set_to_none: Whether to drop them (the default) or fill reduced ones with zeros;
                accumulated ones are dropped in any case.
        """
        for group in self._groups(recurse=True):
            group.gradients.discard()
            for param in group.params:
                grad = param.sharded.grad
                if grad is None:
                    continue
                if set_to_none or is_partial(grad):
                    param.sharded.grad = None
                else:
                    param.sharded.grad = torch.zeros_like(grad)
        super(TorchFSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        return super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ShardError(
            f"Expected to deepcopy a module that is not sharded, got {type(self).__name__}; "
            "copy its state_dict(), or deepcopy before fully_shard"
        )

    def _get_fsdp_state(self) -> Any:
        """Answer what torch's own methods ask for first, where this class does not override one."""
        raise ShardError(
            f"Expected a method that composable_shard offers, got one of torch's FSDPModule on "
            f"{type(self).__name__}; see composable_shard.FSDPModule for those there are"
        )

    def _group(self) -> ParamGroup:
        group = group_of(cast(nn.Module, self))
        assert group is not None
        return group

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        if not recurse:
            return [self._group()]
        modules = cast(nn.Module, self).modules()
        return list(dict.fromkeys(g for m in modules if (g := group_of(m)) is not None))


class UnshardHandle:
    """Waits for an ``unshard(async_op=True)``."""

    def __init__(self, group: ParamGroup) -> None:
        self._group: ParamGroup | None = group

    def wait(self) -> None:
        """Wait for the gather and register the unsharded parameters; idempotent."""
        if self._group is not None:
            self._group.wait_for_unshard()
            self._group = None


def _groups_of(modules: Sequence[FSDPModule]) -> list[ParamGroup]:
    groups = []
    for module in modules:
        group = group_of(module) if isinstance(module, nn.Module) else None
        if group is None:
            raise ValueError(
                f"Expected sharded modules, got {type(module).__name__}; apply fully_shard to it"
            )
        groups.append(group)
    return groups


def _checked_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"Expected {name} to be a bool, got {type(value).__name__}: {value!r}")
    return value


__all__ = ["FSDPModule", "ShardMesh", "UnshardHandle", "fully_shard"]
