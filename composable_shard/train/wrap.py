"""Applying ``fully_shard`` to many modules at once, by a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import nn

from composable_shard.api import check_calls, fully_shard
from composable_shard.arguments import check_int, check_module, check_type
from composable_shard.core.shard import is_parallelized, top_modules

Policy = (
    int
    | type[nn.Module]
    | set[type[nn.Module]]
    | frozenset[type[nn.Module]]
    | tuple[type[nn.Module], ...]
    | Callable[[nn.Module], bool | dict[str, Any]]
)


def apply_fully_shard(module: nn.Module, policy: Policy, **kwargs: Any) -> nn.Module:
    """Apply ``fully_shard`` to the submodules that a policy picks, then to the module itself.

    Inner modules come before outer ones, and the module itself last. Modules that are already
    sharded do not change, a module that is registered several times counts once, and containers
    without a forward (``ModuleList``, ``ModuleDict``) are never picked. If a module cannot be
    sharded, none is: the plan is checked first, which also calls functions of a parameter.

    Args:
        module: The root.
        policy: Picks the modules that get their own group. One of

            - a module class, or a set or tuple of classes: their instances;
            - a function of a module: those for which it returns ``True``, or a dict of arguments
              for ``fully_shard`` that replace ``kwargs`` there. A dict for the root counts too;
            - an int, the number of parameter elements a group should have at least: modules are
              collected from the inside out, siblings together, until they have as many. A group has
              fewer than twice as many, unless a single module has more; the remaining modules
              belong to the module around them, and finally to the root. A module that is registered
              in several others gets its own group.
        kwargs: Arguments for every ``fully_shard``.

    Returns:
        The module.

    Raises:
        TypeError: If ``policy`` or the result of its function has another type; or from
            ``fully_shard``.
        ValueError: If classes or a function pick no module, or the budget is not positive; or from
            ``fully_shard``.

    Collective: none.
    Memory: that of ``fully_shard`` for one group at a time.
    Source: the wrap policies of FSDP1 (``torch.distributed.fsdp.wrap``).

    Example:
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        ...     _ = apply_fully_shard(model, nn.Linear)
        ...     [type(part).__name__ for part in model.modules()]
        ['FSDPSequential', 'FSDPLinear', 'FSDPLinear', 'FSDPLinear']
    """
    check_module("module", module)
    top_modules(module)  # refuse a root that cannot be sharded before sharding anything
    if isinstance(policy, int) and not isinstance(policy, bool):
        ignored = {id(param) for param in kwargs.get("ignored_params") or ()}
        picked = [(group, kwargs) for group in _plan_groups(module, policy, ignored)]
        of_root = kwargs
    else:
        chosen = _choose(module, _as_function(policy))
        of_root = {**kwargs, **chosen.pop(module, {})}
        picked = [([inner], {**kwargs, **changed}) for inner, changed in chosen.items()]
    calls = [*picked, ([module], of_root)]
    check_calls(calls)
    for modules, arguments in calls:
        fully_shard(modules, **arguments)
    return module


# By class or function -------------------------------------------------------------------------


def _as_function(policy: object) -> Callable[[nn.Module], object]:
    classes = policy if isinstance(policy, (set, frozenset, tuple)) else (policy,)
    if classes and all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        return lambda module: isinstance(module, tuple(classes))
    is_function = callable(policy) and not isinstance(policy, type)
    what = "module classes, a function of a module or a number of elements"
    check_type("policy", policy, is_function, what)
    return cast(Callable[[nn.Module], object], policy)


def _choose(
    module: nn.Module, policy: Callable[[nn.Module], object]
) -> dict[nn.Module, dict[str, Any]]:
    """Return the picked modules, inner modules first, with their arguments."""
    chosen: dict[nn.Module, dict[str, Any]] = {}
    for inner in inside_out(module, set(filter(is_parallelized, module.modules()))):
        answer = policy(inner)
        if not isinstance(answer, (bool, dict)):
            got = f"{type(answer).__name__} for {type(inner).__name__}"
            raise TypeError(f"Expected policy to return a bool or a dict of arguments, got {got}")
        if answer is not False and has_forward(inner):
            chosen[inner] = answer if isinstance(answer, dict) else {}
    if not chosen and not any(map(is_parallelized, module.modules())):
        classes = ", ".join(dict.fromkeys(type(inner).__name__ for inner in module.modules()))
        raise ValueError(
            f"Expected policy to pick one of {classes}, got none; call fully_shard for one group"
        )
    return chosen


def inside_out(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield all modules, children before parents, each once, without ``seen`` and modules below."""
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from inside_out(child, seen)
    yield module


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; containers cannot."""
    return type(module).forward is not nn.Module.forward


# By number of elements ------------------------------------------------------------------------


def _plan_groups(module: nn.Module, budget: int, ignored: set[int]) -> list[list[nn.Module]]:
    """Return the groups inside of a module, inner groups first; the module takes the rest."""
    check_int("the number of elements in policy", budget, 1)
    num_places = Counter(child for parent in module.modules() for child in parent.children())
    groups: list[list[nn.Module]] = []
    counted, seen = {*ignored}, set[nn.Module]()

    def visit(inner: nn.Module) -> tuple[list[tuple[nn.Module, int]], int]:
        """Return modules that may join a group, and the elements left for the module around."""
        if inner in seen or is_parallelized(inner):
            return [], 0
        seen.add(inner)
        visited = [visit(child) for child in inner.children()]
        pieces = [piece for below, _ in visited for piece in below]
        own = {id(p): p.numel() for p in inner.parameters(recurse=False) if id(p) not in counted}
        counted.update(own)  # each parameter counts once
        loose = sum(own.values()) + sum(more for _, more in visited)
        is_shared = num_places[inner] > 1
        if inner is not module and not has_forward(inner):
            if is_shared:
                groups.extend([piece] for piece, _ in pieces)
            return [] if is_shared else pieces, loose
        numel = loose + sum(count for _, count in pieces)
        if numel >= 2 * budget:  # groups of siblings that reach the budget
            group, numel = list[nn.Module](), 0
            for piece, count in pieces:
                group, numel = [*group, piece], numel + count
                if numel >= budget:
                    groups.append(group)
                    group, numel = [], 0
            numel += loose
        if inner is not module and (numel >= budget or (numel and is_shared)):
            groups.append([inner])
            numel = 0
        return [(inner, numel)] if numel else [], 0

    visit(module)
    return groups
