"""Which modules below get a wrapper of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn


class ModuleWrapPolicy:
    """Wrap the instances of some classes.

    Args:
        module_classes: The classes.

    Source: ``torch.distributed.fsdp.wrap.ModuleWrapPolicy``.

    Example:
        >>> ModuleWrapPolicy({nn.Linear})(nn.Linear(1, 1), recurse=False)
        True
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = tuple(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Answer as a function policy does."""
        return recurse or isinstance(module, self.module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({sorted(c.__name__ for c in self.module_classes)})"


class CustomPolicy:
    """Wrap the modules that a function picks.

    Args:
        lambda_fn: Returns for a module whether to wrap it, or a dict of arguments that replace
            those of the root there.

    Source: ``torch.distributed.fsdp.wrap.CustomPolicy``.

    Example:
        >>> policy = CustomPolicy(lambda module: isinstance(module, nn.Linear))
        >>> policy.arguments_for(nn.Linear(1, 1))
        {}
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self.lambda_fn = lambda_fn

    def arguments_for(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the arguments of the wrapper for a module, ``None`` if it gets none.

        Raises:
            ValueError: If the function returns something else.
        """
        answer = self.lambda_fn(module)
        if not isinstance(answer, (bool, dict)):
            raise ValueError(
                "Expected lambda_fn to return a bool or a dict of arguments, got "
                f"{type(answer).__name__} for {type(module).__name__}"
            )
        if isinstance(answer, dict):
            return answer
        return {} if answer else None


AutoWrapPolicy = Callable[..., bool] | ModuleWrapPolicy | CustomPolicy


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module that has a forward.

    Source: ``torch.distributed.fsdp.wrap.always_wrap_policy``.

    Example:
        >>> always_wrap_policy(nn.ReLU(), recurse=False, nonwrapped_numel=0)
        True
    """
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the modules for which ``lambda_fn`` returns ``True``.

    Source: ``torch.distributed.fsdp.wrap.lambda_auto_wrap_policy``.

    Example:
        >>> lambda_auto_wrap_policy(nn.ReLU(), False, 0, lambda m: isinstance(m, nn.Linear))
        False
    """
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wrap the instances of some classes; bind them by ``functools.partial``.

    Source: ``torch.distributed.fsdp.wrap.transformer_auto_wrap_policy``.

    Example:
        >>> transformer_auto_wrap_policy(nn.Linear(1, 1), False, 2, {nn.Linear})
        True
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Collection[type[nn.Module]] = (nn.MultiheadAttention,),
    exclude_wrap_modules: Collection[type[nn.Module]] = (nn.ModuleList, nn.ModuleDict),
) -> bool:
    """Wrap modules with many parameter elements that no wrapper below has taken.

    Args:
        module: The module.
        recurse: Whether the question is if to look below, not if to wrap.
        nonwrapped_numel: Its elements that are not wrapped.
        min_num_params: How many are many.
        force_leaf_modules: Classes below whose instances nothing is wrapped.
        exclude_wrap_modules: Classes whose instances are not wrapped.

    Source: ``torch.distributed.fsdp.wrap.size_based_auto_wrap_policy``.

    Example:
        >>> size_based_auto_wrap_policy(nn.Linear(9, 9), False, 90, min_num_params=50)
        True
    """
    unfit = force_leaf_modules if recurse else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(unfit))


# Choosing ---------------------------------------------------------------------------------------


def choose(
    root: nn.Module,
    policy: object,
    left_alone: Collection[nn.Module],
    ignored: Collection[nn.Parameter],
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules below ``root`` to wrap, inner ones first, with their own arguments.

    Args:
        root: The module that is being wrapped; never among them.
        policy: A policy object or function.
        left_alone: Modules that are ignored or wrapped, not looked into.
        ignored: Parameters that do not count.

    Raises:
        TypeError: If ``policy`` is neither.
    """
    if isinstance(policy, CustomPolicy):
        answers = ((m, policy.arguments_for(m)) for m in _inside_out(root, set(left_alone)))
        return {m: own for m, own in answers if own is not None and m is not root}
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            "Expected auto_wrap_policy to be a function, a ModuleWrapPolicy or a CustomPolicy of "
            f"composable_shard.compat.fsdp1, got {type(policy).__name__}"
        )
    chooser = _Chooser(policy, set(left_alone), {id(param) for param in ignored})
    chooser.visit(root, is_root=True)
    return {module: {} for module in chooser.chosen}


def in_order(
    root: nn.Module, chosen: dict[nn.Module, dict[str, Any]]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return what is chosen, inner modules first, without containers that have no forward."""
    return [
        (module, chosen[module])
        for module in _inside_out(root, set())
        if module in chosen and type(module).forward is not nn.Module.forward
    ]


def _inside_out(module: nn.Module, seen: set[nn.Module]) -> Iterable[nn.Module]:
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _inside_out(child, seen)
    yield module


class _Chooser:
    """Asks a function policy on the way down and on the way up."""

    def __init__(
        self, policy: Callable[..., bool], left_alone: set[nn.Module], ignored: set[int]
    ) -> None:
        self.chosen: list[nn.Module] = []
        self._policy = policy
        self._seen = left_alone
        self._ignored = ignored

    def visit(self, module: nn.Module, *, is_root: bool = False) -> int:
        """Return the elements that are wrapped below or with a module."""
        if module in self._seen:
            return 0
        self._seen.add(module)
        numel = sum(p.numel() for p in module.parameters() if id(p) not in self._ignored)
        if not self._policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(self.visit(child) for child in module.children())
        left = numel - wrapped
        if is_root or not self._policy(module=module, recurse=False, nonwrapped_numel=left):
            return wrapped
        self.chosen.append(module)
        return numel
