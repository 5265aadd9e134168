"""``fully_shard`` and the methods of a sharded module, over the core of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from composable_shard import _torch
from composable_shard.arguments import (
    check_int,
    check_type,
    check_value,
    checked_bool,
    checked_list,
)
from composable_shard.core.transport.collectives import (
    AllGather,
    ReduceScatter,
    backend_memory,
    symmetric_memory,
)
from composable_shard.core.transport.pending import Waitable
from composable_shard.core_next.features.hybrid import AllReduceHook, Replicas
from composable_shard.core_next.group import ParamGroup, State
from composable_shard.core_next.hooks import ModuleHooks
from composable_shard.core_next.reduction import clear, is_partial
from composable_shard.core_next.shard import (
    ShardPlacementFn,
    build_group,
    commit,
    find_managed,
    group_of,
    groups_in,
    plan_params,
    set_group,
    top_modules,
)
from composable_shard.core_next.tree import Tree
from composable_shard.errors import ShardError
from composable_shard.mesh import DataParallelMeshDims, resolve_mesh
from composable_shard.policy import MixedPrecisionPolicy, OffloadPolicy
from composable_shard.train.clip import clip_grad_norm

_Sharded = TypeVar("_Sharded", nn.Module, list[nn.Module])


def fully_shard(
    module: _Sharded,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | Mapping[str, OffloadPolicy] | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> _Sharded:
    """Shard the parameters of a module over a mesh, in place."""
    modules: tuple[nn.Module, ...] = top_modules(module)
    for top in modules:
        if group_of(top) is not None:
            raise ValueError(
                f"Expected a module that is not sharded, got {type(top).__name__}, which "
                "fully_shard was applied to before"
            )
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    is_policy = isinstance(policy, MixedPrecisionPolicy)
    check_type("mp_policy", policy, is_policy, "a composable_shard.MixedPrecisionPolicy")
    if offload_policy is not None or type(reshard_after_forward) is int:
        raise ValueError(
            "Expected neither offload_policy nor a number as reshard_after_forward, which this "
            "core does not have yet; unset COMPOSABLE_SHARD_CORE"
        )
    shard_mesh = resolve_mesh(mesh, dp_mesh_dims)
    managed = find_managed(modules, ignored_params or ())
    params = plan_params(managed, shard_mesh, shard_placement_fn, policy)
    group: ParamGroup = build_group(modules, params, shard_mesh, policy)
    group.settings.reshard_after_forward = reshard_after_forward
    for top in modules:
        top.__class__ = _sharded_class(type(top))
        set_group(top, group)
    commit(group, managed)
    tree = Tree([group, *(inner for inner in groups_in(modules) if inner is not group)])
    if any(mesh.num_replicas > 1 for one in tree.groups for mesh in one.channels):
        tree.plugins.install(_replicas)
    _name_groups(modules)
    ModuleHooks(group)
    return module


_replicas, _all_reduce_hook = Replicas(), AllReduceHook()
_sharded_classes: dict[type, type] = {}
_MISSING = "Expected a call that this core has, got one that it does not have yet"


def _sharded_class(original: type) -> type:
    sharded = _sharded_classes.get(original)
    if sharded is None:
        sharded = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
        sharded.__module__, sharded.__qualname__ = original.__module__, sharded.__name__
        _sharded_classes[original] = sharded
    return sharded


def _name_groups(modules: Sequence[nn.Module]) -> None:
    for root in modules:
        for name, child in root.named_modules():
            group = group_of(child)
            if group is not None:
                group.set_name(name)


class FSDPModule(TorchFSDPModule):
    """What :func:`fully_shard` adds to the class of a module."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class: slicing a sharded container gives a plain one."""
        original = next(
            kind
            for kind in cls.__mro__
            if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule)
        )
        return original(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's own group and register the unsharded parameters."""
        checked_bool("async_op", async_op)
        group = self._group()
        group.refresh()
        group.unshard()
        group.is_held = True
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the unsharded parameters of this module's own group. Collective: none."""
        self._group().reshard()

    def reset_iter_state(self) -> None:
        """Return to the state between iterations and drop every gradient not yet reduced."""
        tree = self._group().tree
        tree.reset()
        for group in tree.groups:
            for param in group.params:
                if is_partial(param.sharded.grad):
                    param.sharded.grad = None

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients over the ranks."""
        checked_bool("requires_gradient_sync", requires_gradient_sync)
        for group in self._groups(recurse):
            group.settings.reduce_grads = requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication within this context."""
        groups = self._groups(recurse=True)
        before = [group.settings.reduce_grads for group in groups]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, value in zip(groups, before, strict=True):
                group.settings.reduce_grads = value

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward goes on to reduce gradients over the replicas of a hybrid mesh."""
        checked_bool("requires_all_reduce", requires_all_reduce)
        for group in self._groups(recurse):
            group.settings.all_reduce_grads = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether the parameters are freed between forward and backward."""
        checked_bool("reshard_after_forward", reshard_after_forward)
        for group in self._groups(recurse):
            group.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether the parameters are freed after backward."""
        checked_bool("reshard_after_backward", reshard_after_backward)
        for group in self._groups(recurse):
            group.settings.reshard_after_backward = reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what the sum of gradients over all ranks is divided by, instead of their number."""
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        check_value("factor", factor, is_number and factor > 0, "to be a positive number")
        self._group().settings.divisor = float(factor)
        self._group().plugins.invalidate_programs()

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives only ever sum, and averages are taken beside them."""
        self._group().settings.sums_only = checked_bool("enable", enable)
        self._group().plugins.invalidate_programs()

    # Setters --------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing but check: every backward leaves complete gradients."""
        checked_bool("is_last_backward", is_last_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's own group."""
        checked_bool("unshard_in_backward", unshard_in_backward)
        self._group().settings.unshard_in_backward = unshard_in_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of unsharded parameters stays allocated between uses."""
        checked_bool("keep", keep)
        for group in self._groups(recurse):
            group.reshard()
            group.settings.keeps_storage = keep
            group.is_compiled = False

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:  # type: ignore[override]
        """Set which modules' groups are gathered early when forward uses this module's own."""
        self._group().settings.forward_prefetch = groups_of("modules", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:  # type: ignore[override]
        """Set which modules' groups are gathered early when backward uses this module's own."""
        self._group().settings.backward_prefetch = groups_of("modules", modules)

    def set_prefetch_depth(self, depth: int, *, recurse: bool = True) -> None:
        """Set how many groups are gathered early."""
        check_int("depth", depth, 0)
        for group in self._groups(recurse):
            group.settings.prefetch_depth = depth

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many reductions may be in flight at once."""
        check_int("max_input_buffers", max_input_buffers, 1)
        for group in self._groups(recurse):
            group.settings.max_reductions = max_input_buffers

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters that no rank used get gradients of zeros."""
        checked_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for group in self._groups(recurse):
            group.settings.zeros_for_unused = reduce_scatter_unused_params
            group.plugins.invalidate_programs()

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object], *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook`` with each flat buffer of reduced gradients before they are handed out."""
        check_type("hook", hook, callable(hook), "callable")
        group = self._group()
        group.settings.all_reduce_hook = hook
        group.plugins.install(_all_reduce_hook)

    def set_post_optim_event(self, event: Waitable | None) -> None:
        """Let the next forward wait for an event instead of the current stream."""
        if event is not None:
            event.wait()

    def set_custom_all_gather(self, comm: AllGather) -> None:  # type: ignore[override]
        """Gather this module's own group by a custom all-gather."""
        _check_comm("all-gather", comm)
        for channel in self._group().channels.values():
            channel.use_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:  # type: ignore[override]
        """Reduce the gradients of this module's own group by a custom reduce-scatter."""
        _check_comm("reduce-scatter", comm)
        for channel in self._group().channels.values():
            channel.use_reduce_scatter(comm)
        self._group().plugins.invalidate_programs()

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether reductions run in a process group of their own."""
        checked_bool("enable", enable)
        for group in self._groups(recurse):
            for channel in group.channels.values():
                channel.separate_reductions(enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether collectives use memory that their backend allocates."""
        checked_bool("enable", enable)
        group = self._group()
        for channel in group.channels.values():
            channel.check_built_in()
            channel.use_memory(backend_memory(channel.mesh, group.label) if enable else None)
        group.plugins.invalidate_programs()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Let collectives use symmetric memory."""
        if backend != "NCCL":
            raise ValueError(f"Expected the symmetric memory of 'NCCL', got {backend!r}")
        group = self._group()
        for channel in group.channels.values():
            channel.check_built_in()
            channel.use_memory(symmetric_memory(channel.mesh, group.label))
        group.plugins.invalidate_programs()

    # Gradients ------------------------------------------------------------------------------

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scale all gradients together so that their norm is at most ``max_norm``."""
        return clip_grad_norm(
            cast(nn.Module, self).parameters(),
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            foreach=foreach,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those that are not reduced yet too, or fill them with zeros."""
        for group in self._groups(recurse=True):
            for param in group.params:
                for tensor in (param.sharded, param.unsharded):
                    if tensor.grad is not None:
                        clear(tensor, to_none=set_to_none)
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Freeze or unfreeze all parameters, in both of their forms."""
        for group in self._groups(recurse=True):
            for param in group.params:
                param.sharded.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)  # type: ignore[misc]

    def synchronize_gradients(self) -> None:
        """Reduce over all ranks what backwards have accumulated, without another backward."""
        group = self._group()
        if not group.tree.is_idle:
            raise ShardError(
                f"Expected synchronize_gradients() of {group.label} outside of forward and "
                "backward, got it within one; call it between iterations"
            )
        group.tree.synchronize_gradients()

    def _group(self) -> ParamGroup:
        group = group_of(cast(nn.Module, self))
        assert group is not None
        return group

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        checked_bool("recurse", recurse)
        return groups_in([cast(nn.Module, self)]) if recurse else [self._group()]


class UnshardHandle:
    """Waits for an ``unshard(async_op=True)``."""

    def __init__(self, group: ParamGroup) -> None:
        self._group: ParamGroup | None = group

    def wait(self) -> None:
        """Wait for the gather and register the unsharded parameters; idempotent."""
        group, self._group = self._group, None
        if group is not None and group.state is not State.SHARDED:
            group.wait()
            group.register_unsharded()


_torch.let_foreach_zero_any_placement()


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Let several roots that train together bound their memory for reductions together."""
    raise ShardError(_MISSING)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather a module's parameters around another method than forward."""
    raise ShardError(_MISSING)


def check_calls(calls: Any) -> None:
    """Raise what one of several calls of ``fully_shard`` would raise, and shard nothing."""


def groups_of(name: str, modules: Sequence[nn.Module]) -> list[ParamGroup]:
    """Return the group of each sharded module."""
    groups = []
    for module in checked_list(name, modules, "sharded modules", "pass a list, also of one"):
        group = group_of(module) if isinstance(module, nn.Module) else None
        if group is None:
            raise ValueError(
                f"Expected sharded modules, got {type(module).__name__}; apply fully_shard to it"
            )
        groups.append(group)
    return groups


def _check_comm(what: str, comm: Any) -> None:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"Expected a custom {what} with allocate and __call__, got {type(comm).__name__}"
        )


class GradientReductionHandle:
    """Waits for a ``finalize_backward(async_op=True)``."""
