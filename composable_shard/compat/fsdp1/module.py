"""The wrapper: ``fully_shard`` with the arguments and methods of FSDP1."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import FSDPModule, ShardError, _torch, clip_grad_norm_, unsharded
from composable_shard.arguments import check_module, check_value
from composable_shard.compat.fsdp1 import construction, options, state_dicts
from composable_shard.core.group import ParamGroup, group_of
from composable_shard.core.nested import InputContainer, find_changes, map_tensors
from composable_shard.train.wrap import inside_out

# Before and after a forward -----------------------------------------------------------------------

_EVAL_VARIABLE = "FSDP_USE_FULL_PREC_IN_EVAL"


def step_and_clear(param: torch.Tensor) -> None:
    """Step the optimizers of a parameter as soon as its gradient is reduced, and drop it."""
    for optimizer in _torch.optimizers_in_backward(param):
        optimizer.step()
    param.grad = None


@contextlib.contextmanager
def precision(wrapper: FullyShardedDataParallel) -> Iterator[torch.dtype | None]:
    """Compute in the dtype of the policy, and yield it.

    In evaluation with full precision, gather and register full parameters in their own dtype, and
    yield ``None``.

    Raises:
        ShardError: If gradients are enabled in a forward with full parameters.
    """
    dtype = wrapper.mixed_precision.param_dtype
    lowers = wrapper.module.training or not wrapper.fsdp_full_precision_in_eval
    if dtype is None or lowers:
        yield dtype
        return
    if torch.is_grad_enabled():
        raise ShardError(
            "Expected torch.no_grad() around a forward in evaluation with full precision, got "
            f"gradients enabled; or unset {_EVAL_VARIABLE}"
        )
    with unsharded(wrapper.module, recurse=False, writeback=False):
        yield None


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# The wrapper --------------------------------------------------------------------------------------


class FullyShardedDataParallel(state_dicts.Wrapper):
    """Wrap a module and shard its parameters.

    A thin layer: the wrapped module is sharded by :func:`composable_shard.fully_shard`, and the
    wrapper uses its public interface only. Names of parameters, buffers and modules are those of
    the plain model. ``docs/from_fsdp1.md`` lists the differences to torch's class.

    Args:
        module: The module. Modules below it may be wrapped already.
        process_group: The ranks, all of them if absent; for hybrid strategies a pair
            ``(shard, replicate)``.
        sharding_strategy: Which ranks share parameters, and when they free unsharded ones;
            ``FULL_SHARD`` if absent.
        cpu_offload: Whether shards are kept on the CPU.
        auto_wrap_policy: Selects modules below to wrap with the same arguments.
        backward_prefetch: Accepted without effect: the order is recorded.
        mixed_precision: Dtypes of compute and reduction.
        ignored_modules: Modules to leave alone, with all modules below them.
        param_init_fn: Called with each module if some are on the meta device; they are initialized
            by their ``reset_parameters()`` if absent.
        device_id: Device of compute, to which a module on the CPU is moved.
        sync_module_states: Whether all ranks start from the values of the first.
        forward_prefetch: Accepted without effect.
        limit_all_gathers: Accepted without effect.
        use_orig_params: Accepted; parameters always keep their shapes and names. ``False`` refuses
            optimizers in backward.
        ignored_states: Modules or parameters to leave alone.
        device_mesh: The ranks in another form, instead of ``process_group``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If arguments, the module and the current device conflict, or the module is
            already sharded.
        RuntimeError: If parameters lie on several devices.
        MaterializationError: If a module on the meta device cannot be initialized.

    Collective: none but those of ``sync_module_states``, and of process groups for hybrid
        strategies.
    Source: ``torch.distributed.fsdp.FullyShardedDataParallel``.

    Example:
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)), device_id="cpu")
        ...     [(name, param.to_local().shape) for name, param in model.named_parameters()]
        [('0.weight', torch.Size([2, 4])), ('0.bias', torch.Size([2]))]
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: options.ProcessGroups = None,
        sharding_strategy: options.ShardingStrategy | None = None,
        cpu_offload: options.CPUOffload | None = None,
        auto_wrap_policy: options.AutoWrapPolicy | None = None,
        backward_prefetch: options.BackwardPrefetch | None = options.BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: options.MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        check_module("module", module)
        if isinstance(module, FSDPModule):
            kind = type(module).__name__
            raise ValueError(f"Expected a module that is not sharded, got {kind}; use it as is")
        plan = construction.Plan(module, locals())
        plan.check()
        self.fsdp_wrap(plan)

    def fsdp_wrap(self, plan: construction.Plan) -> FullyShardedDataParallel:
        """Wrap and shard the modules below, then shard the module; return the wrapper."""
        super().__init__()
        choices = plan.choices
        self.fsdp_use_orig_params = choices.use_orig_params
        self.fsdp_limit_all_gathers = choices.limit_all_gathers
        self.mixed_precision = choices.mixed_precision or options.MixedPrecision()
        self.fsdp_full_precision_in_eval = os.environ.get(_EVAL_VARIABLE) == "1"
        self.compute_device, self.sharding_strategy = plan.device, plan.layout.strategy
        self._is_checked = False
        wrapper = FullyShardedDataParallel
        plan.wrap_below(lambda inner: wrapper.__new__(wrapper).fsdp_wrap(inner))
        self._tops = plan.shard()
        self._fsdp_wrapped_module = plan.module
        self.training = plan.module.training
        return self

    # The wrapped module ---------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module, which ``fully_shard`` was applied to."""
        return self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module" or name.startswith("__"):
                raise  # the wrapped module must not define how the wrapper is copied
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the wrapper, then the wrapped module under the same name, then those below.

        Parameters and buffers thus have the names that they have in the plain model.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the attribute that ``torch.distributed.checkpoint`` leaves out of names."""
        return {"": "_fsdp_wrapped_module"}

    def apply(self, fn: Callable[[nn.Module], object]) -> FullyShardedDataParallel:
        """Call ``fn`` with each module from the inside out, while parameters are full.

        Its changes are written to the shards; all ranks must make the same changes.
        Collective: see :meth:`summon_full_params`.
        """
        with self.summon_full_params(self):
            for module in inside_out(self, set()):
                fn(module)
        return self

    # Groups ---------------------------------------------------------------------------------

    def fsdp_groups(self) -> list[ParamGroup]:
        """Return the group of the wrapped module, none for an empty container."""
        found = (group_of(top) for top in self._tops)
        return list(dict.fromkeys(group for group in found if group is not None))

    def check_is_root(self) -> bool:
        """Return whether no wrapper is around this one."""
        return all(group.tree.root is group for group in self.fsdp_groups())

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks over which parameters are sharded, or replicated for ``NO_SHARD``."""
        for group in self.fsdp_groups():
            return group.mesh.shard_group or group.mesh.replica_group
        return None

    @property
    def rank(self) -> int:
        """The place of this rank in :attr:`process_group`."""
        return dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """The number of ranks in :attr:`process_group`."""
        return dist.get_world_size(self.process_group)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers in a module, itself included.

        Args:
            module: Any module.
            root_only: Whether to leave out wrappers inside other wrappers.
        """
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if m.check_is_root()] if root_only else found

    # Training -------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; its hooks gather and free its parameters.

        Raises:
            ValueError: At the first forward of the root, if nested wrappers disagree on
                ``use_orig_params``, ``limit_all_gathers`` or full precision in evaluation.
            RuntimeError: For an optimizer in backward without ``use_orig_params``.
        """
        is_root = self.check_is_root()
        if is_root:
            self._check_tree()
        given: list[InputContainer] = []
        with precision(self) as dtype:
            policy = self.mixed_precision
            casts = policy.cast_root_forward_inputs if is_root else policy.cast_forward_inputs
            if casts and dtype is not None:
                args, kwargs = map_tensors(partial(_cast, dtype), (args, kwargs), given)
            output = self._fsdp_wrapped_module(*args, **kwargs)
        _, lost = find_changes(given, type(self.module).__name__)
        if lost is not None:
            raise lost
        return output

    def _check_tree(self) -> None:
        """Check all wrappers below, once; install the hooks of optimizers in backward."""
        if not self._is_checked:
            wrappers = self.fsdp_modules(self)
            for name in ("use_orig_params", "limit_all_gathers", "full_precision_in_eval"):
                values = sorted({getattr(wrapper, f"fsdp_{name}") for wrapper in wrappers})
                what = f"for {name} in nested wrappers"
                check_value("one homogeneous value", values, len(values) < 2, what)
            self._is_checked = True
        trees = [group.tree for group in self.fsdp_groups() if torch.is_grad_enabled()]
        for group in (member for tree in trees for member in tree.groups):
            for param in group.params:
                if not _torch.optimizers_in_backward(param.sharded):
                    continue
                if not self.fsdp_use_orig_params:
                    raise RuntimeError(
                        f"Expected no optimizer in backward, got one for '{param.name}' of "
                        f"{group.label}, which is only supported with use_orig_params=True"
                    )
                if step_and_clear not in _torch.gradient_hooks(param.sharded):
                    param.sharded.register_post_accumulate_grad_hook(step_and_clear)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication within this context; nests."""
        with contextlib.ExitStack() as stack:
            for top in self._tops:
                stack.enter_context(cast(FSDPModule, top).no_sync())
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients below so that their norm is at most ``max_norm``.

        Args:
            max_norm: The largest norm after scaling.
            norm_type: Order of the norm; ``float("inf")`` for the largest absolute value.

        Returns:
            The norm before scaling, the same on all ranks.

        Collective: one all-gather of a few scalars for each mesh axis gradients are sharded on.
        """
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Refuse: methods of the wrapped module set custom communication.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"Expected no communication hook on {type(self).__name__}, got {hook!r}; call "
            "set_all_reduce_hook, set_custom_reduce_scatter or set_custom_all_gather of .module"
        )

    # Full parameters and state dicts --------------------------------------------------------

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Let a module hold full parameters within this context: :func:`unsharded`.

        Args:
            module: A wrapper, or a module with wrappers below.
            recurse: Whether wrappers below have full parameters too.
            writeback: Whether edits are written to the shards.
            rank0_only: Whether only the first rank has full parameters.
            offload_to_cpu: Whether full parameters are on the CPU.
            with_grads: Whether full parameters have full gradients.

        Raises:
            ShardError: As :func:`composable_shard.unsharded`.

        Collective: one all-gather of each parameter, and of each gradient with ``with_grads``.
        """
        inner = module.module if isinstance(module, FullyShardedDataParallel) else module
        return unsharded(
            inner,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    set_state_dict_type = staticmethod(state_dicts.set_state_dict_type)
    get_state_dict_type = staticmethod(state_dicts.get_state_dict_type)
    state_dict_type = staticmethod(state_dicts.state_dict_type)
    optim_state_dict = staticmethod(state_dicts.optim_state_dict)
    optim_state_dict_to_load = staticmethod(state_dicts.optim_state_dict_to_load)
