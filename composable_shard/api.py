"""The functions ``fully_shard``, ``share_comm_ctx`` and ``register_fsdp_forward_method``.

Source: ``torch.distributed.fsdp`` (FSDP2), with the same names, arguments and defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, Literal, NamedTuple, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.arguments import check_module, check_type
from composable_shard.core import optimizers, shard  # noqa: F401 - registers optimizer hooks
from composable_shard.core.agreement import record_ignored
from composable_shard.core.group import group_of
from composable_shard.core.hooks import install, register_forward_method
from composable_shard.core.state_dict import install_state_dict_hooks
from composable_shard.core.tree import join_tree
from composable_shard.hybrid import split_shards
from composable_shard.insight import events  # noqa: F401 - registers the order check
from composable_shard.mesh import (
    DataParallelMeshDims,
    ShardMesh,
    ShardPlacementFn,
    check_reshard,
    resolve_mesh,
)
from composable_shard.module import check_class, computes_later, groups_of, make_sharded
from composable_shard.policy import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    Sharding,
    check_policies,
    checked_sharding,
)
from composable_shard.wire import plug_in

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
    sharding: Literal["zero1", "zero2", "zero3", "hybrid"] | Sharding | None = None,
) -> _Sharded:
    """Shard the parameters of a module over a mesh, in place.

    Each parameter becomes a DTensor that is sharded on dim 0. The parameters of one call form one
    group. They are gathered together before forward and backward and freed afterwards, and their
    gradients are reduced together. Call ``fully_shard`` on submodules first and on the root last.
    Parameters that are already in a group stay in that group.

    Args:
        module: A module, or a list of modules that form one group.
        mesh: A 1-D mesh to shard over, or a 2-D mesh with named axes ``(replicate, shard)``, in
            which the ranks of each row hold all shards. By default, all ranks, on the current
            accelerator or, if there is none, on the CPU. For the default mesh, ``fully_shard`` also
            starts the default process group from the environment, unless there is one. Without a
            launcher, this process is then the only rank, and a warning says so.
        reshard_after_forward: Whether unsharded parameters are freed after forward and gathered
            again for backward. ``None`` means ``True``, but ``False`` for the root, because
            backward needs its parameters first. An int keeps the parameters sharded over that many
            neighbouring ranks after forward, so the gather for backward is cheaper. It must divide
            the number of shards.
        shard_placement_fn: Called with each parameter. It returns ``Shard(dim)`` to shard another
            dim, a mesh for this parameter, both as a :class:`ShardPlacementResult`, or ``None`` for
            the defaults. The dim may be negative, and ranks may get different numbers of rows.
        mp_policy: Dtypes of compute and reduction; see :class:`MixedPrecisionPolicy`.
        offload_policy: :class:`CPUOffloadPolicy` keeps shards, gradients and optimizer states on
            the CPU. A mapping from parameter names to policies offloads only these parameters.
        ignored_params: Parameters that are not sharded.
        dp_mesh_dims: The data-parallel axes of ``mesh``. Pass them if the parameters are DTensors
            on all axes of ``mesh``, including those for tensor parallelism. Omit them if ``mesh``
            has only data-parallel axes, and the parameters are DTensors on other axes of the same
            root mesh. Plain parameters are allowed if all axes are data-parallel.
        sharding: When the parameters of this call are gathered and their gradients reduced, as the
            name of a preset or as a :class:`Sharding`. By default, each forward and backward
            gathers and reduces (ZeRO-3). The other presets need more memory and communicate less.
            ``"hybrid"`` shards the optimizer states over both axes of a mesh.

    Returns:
        The argument. Its modules are now instances of :class:`FSDPModule`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a module or parameter cannot be sharded. The module is then unchanged.
        ExtensionError: On all ranks, if a tensor subclass cannot be split on some rank.

    Collective: none, except that it makes process groups for flattened axes. For tensor subclasses,
        an all-gather of a small object over each axis, so that all ranks raise if one rank cannot
        split the tensor. For an int ``reshard_after_forward``, the first forward makes process
        groups.
    Memory: this rank's shards. The module drops its references to the full parameters.

    Example:
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(4):
        ...     model = fully_shard(nn.Linear(8, 8, bias=False))
        ...     model.weight.to_local().shape
        torch.Size([2, 8])
    """
    stages = checked_sharding(sharding, reshard_after_forward)
    plan = _planned(
        module,
        mesh=mesh,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
    )
    splits = stages.replicas == "shard"
    shard_mesh = split_shards(plan.params, plan.mesh) if splits else plan.mesh
    group = shard.build_group(plan.modules, plan.params, shard_mesh, plan.policy)
    group.settings.reshard_after_forward = check_reshard(reshard_after_forward, group.channels)
    group.settings.gathers_once_a_step = stages.gather == "step"
    group.settings.reduces_each_step = stages.reduce == "step" or splits
    group.settings.reduce_grads = stages.reduce == "backward"
    group.settings.all_reduce_grads = not splits or plan.mesh.num_replicas == 1
    record_ignored(plan.managed.modules, ignored_params or ())
    for top in group.modules:
        check_class(top)
    # All arguments are checked. From here on, the module changes.
    shard.commit(group, plan.managed, plan.params)
    install(group, plan.managed.modules)
    install_state_dict_hooks(group)
    for top in group.modules:
        make_sharded(top, group)
    join_tree(group)
    return module


class _Plan(NamedTuple):
    """The plan of a ``fully_shard`` call, made before the module changes."""

    modules: tuple[nn.Module, ...]
    managed: shard.Managed
    params: shard.Planned
    mesh: ShardMesh
    policy: MixedPrecisionPolicy


def _planned(
    module: object,
    *,
    mesh: DeviceMesh | None,
    shard_placement_fn: ShardPlacementFn | None,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | Mapping[str, OffloadPolicy] | None,
    ignored_params: set[nn.Parameter] | None,
    dp_mesh_dims: DataParallelMeshDims | None,
    before: Collection[nn.Module] = (),
) -> _Plan:
    """Plan a call of ``fully_shard``; ``before``: the modules that earlier calls would shard."""
    modules = shard.top_modules(module)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    shard.check_not_parallelized(modules)
    check_policies(policy, offload_policy)
    ignored = set() if ignored_params is None else ignored_params
    check_type("ignored_params", ignored, isinstance(ignored, (set, frozenset)), "a set")
    for param in ignored:
        name, remedy = "each of ignored_params", "pass {module.weight}, not its name"
        check_type(name, param, isinstance(param, nn.Parameter), "a parameter", remedy)
    fits = shard_placement_fn is None or callable(shard_placement_fn)
    what, remedy = "a function of a parameter or None", "pass lambda param: Shard(1), say"
    check_type("shard_placement_fn", shard_placement_fn, fits, what, remedy)
    shard_mesh = resolve_mesh(mesh, dp_mesh_dims)
    managed = shard.find_managed(modules, ignored, before)
    params = shard.plan_params(managed, shard_mesh, shard_placement_fn, policy, offload_policy)
    plug_in(params)
    return _Plan(modules, managed, params, shard_mesh, policy)


def check_calls(calls: Iterable[tuple[object, Mapping[str, Any]]]) -> None:
    """Raise the first error that several calls of ``fully_shard`` would raise; shard nothing.

    Args:
        calls: Modules, and arguments by name; inner modules first.

    Collective: that of ``fully_shard`` for tensor subclasses.
    """
    before = set[nn.Module]()
    for module, arguments in calls:
        bound = signature(fully_shard).bind(module, **arguments)
        bound.apply_defaults()
        reshards = bound.arguments.pop("reshard_after_forward")
        stages = checked_sharding(bound.arguments.pop("sharding"), reshards)
        plan = _planned(**bound.arguments, before=before)
        if stages.replicas == "shard":
            split_shards(plan.params, plan.mesh)
        if reshards != 1:  # for 1, `check_reshard` warns, but the call itself will warn
            check_reshard(reshards, [plan.mesh, *(param.mesh for param in plan.params.values())])
        shard.check_subclasses(plan.params)
        for top in plan.modules:
            check_class(top)
        before.update(plan.modules)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Share the limit on pending reductions between several roots that train together.

    A pending reduction keeps the unsharded gradients of its group in memory, so each root limits
    the number of pending reductions (see ``set_reduce_scatter_max_input_buffers``). By default,
    each root counts its own. After this call, the roots count all their reductions together. Before
    a root launches a reduction beyond the limit, it waits for the oldest pending reduction of all
    roots. The roots share nothing else. Call this function with the same modules on all ranks, at
    any time after the last ``fully_shard``.

    Args:
        modules: The roots, or other sharded modules below them. If they all have the same root,
            nothing changes.

    Raises:
        TypeError: If ``modules`` is one module instead of several.
        ValueError: If a module is not sharded.

    Collective: none.
    Source: ``torch.distributed.fsdp.share_comm_ctx``, which shares streams.

    Example:
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     share_comm_ctx([fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))])
    """
    trees = list(dict.fromkeys(group.tree for group in groups_of("modules", modules)))
    for tree in trees[1:]:
        tree.in_flight.finish()
        tree.in_flight = trees[0].in_flight


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make another method of a sharded module act like its forward.

    As in a call of the module itself, the parameters of its group are gathered before the method
    runs and freed afterwards. Inputs and outputs are cast by the policy, and a backward through the
    outputs reduces the gradients. The user's forward hooks do not run.

    Args:
        module: A module. If it is not sharded, nothing happens.
        method_name: The name of the method, such as ``"generate"`` or ``"encode"``.

    Raises:
        TypeError: If ``module`` is not a module, or ``method_name`` is not a string.
        ValueError: If the module is sharded and has no such method, or the method is a generator or
            a coroutine, which would compute after the parameters are freed.

    Collective: none here; those of a forward when the method is called.
    Source: ``torch.distributed.fsdp.register_fsdp_forward_method``.

    Example:
        >>> import torch
        >>> from composable_shard.testing import fake_ranks
        >>> class Encoder(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(8, 8)
        ...     def encode(self, x):
        ...         return self.layer(x)
        ...     def forward(self, x):
        ...         return self.encode(x).sum()
        >>> with fake_ranks(4):
        ...     encoder = fully_shard(Encoder())
        ...     register_fsdp_forward_method(encoder, "encode")
        ...     encoder.encode(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """
    check_module("module", module)
    is_name = isinstance(method_name, str)
    check_type("method_name", method_name, is_name, "the name of a method")
    if group_of(module) is None:
        return
    kind = type(module).__name__
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"Expected {kind} to have a method '{method_name}', got none")
    if computes_later(getattr(module, method_name)):
        raise ValueError(
            f"Expected method '{method_name}' of {kind} to return its result, got a generator or "
            "coroutine, which computes only after the parameters have been freed; register the "
            "method that it calls for each item"
        )
    register_forward_method(module, method_name)
