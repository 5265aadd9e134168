"""Parameters that are registered in modules of several groups: which group owns them.

The owner is the lowest group whose modules hold all places of the parameter, so that it is
gathered whenever one of them runs, and has one gradient. Groups are made from the bottom up: a
group that finds one of its parameters in an outer module gives it back, and until a call contains
all places nobody owns it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

from torch import nn

from composable_shard.core.group import ParamGroup
from composable_shard.core.param import ShardedParam, Slot
from composable_shard.errors import ShardError


@dataclass(frozen=True)
class Managed:
    """What one ``fully_shard`` call takes charge of.

    Attributes:
        modules: All modules below, but those of nested groups.
        params: Each parameter with the places where it is registered.
        names: The name of each parameter, from its module down.
    """

    modules: tuple[nn.Module, ...]
    params: dict[nn.Parameter, tuple[Slot, ...]]
    names: dict[nn.Parameter, str]


@dataclass
class _Known:
    """An original parameter that is alive after it was sharded, or waits for an owner.

    Attributes:
        original: The parameter.
        registered: Where it is, as far as calls have seen.
        owner: Its group, and what it is there.
        version: The version of the sharded parameter when it was made.
    """

    original: weakref.ref[nn.Parameter]
    registered: list[tuple[weakref.ref[nn.Module], str]]
    owner: tuple[weakref.ref[ParamGroup], weakref.ref[ShardedParam]] | None = None
    version: int = 0

    @property
    def places(self) -> tuple[Slot, ...]:
        """Where it is registered in modules that are alive."""
        found = ((module(), attribute) for module, attribute in self.registered)
        return tuple(
            Slot.of(module, attribute) for module, attribute in found if module is not None
        )

    @property
    def param(self) -> ShardedParam | None:
        """What it is in the group that owns it, if one does."""
        return None if self.owner is None else self.owner[1]()

    @property
    def is_unchanged(self) -> bool:
        """Whether its owner has it as when it was sharded, neither gathered, loaded nor changed."""
        param = self.param
        return (
            param is not None
            and param.is_intact()
            and param.unsharded is None
            and param.version() == self.version
        )


_known: dict[int, _Known] = {}

_sharded: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()
"""By id, the sharded parameters; an id may have passed to another tensor since."""


@dataclass
class Claims:
    """What a call changes about who owns tied parameters.

    Attributes:
        given_back: Parameters that inner groups give back.
        unowned: Parameters with places outside of the call's modules, and all known places.
    """

    given_back: list[_Known] = field(default_factory=list)
    unowned: dict[nn.Parameter, tuple[Slot, ...]] = field(default_factory=dict)

    def commit(self) -> None:
        """Put back the originals and forget that they were sharded."""
        for known in self.given_back:
            original, param, owner = known.original(), known.param, known.owner
            assert original is not None and param is not None and owner is not None
            for slot in param.slots:
                slot.put(original)
            group = owner[0]()
            if group is not None:
                _give_back(group, param)
            known.owner = None
        for original, places in self.unowned.items():
            remember(original, places)


def claim_ties(managed: Managed, modules: Sequence[nn.Module]) -> tuple[Managed, Claims]:
    """Add to what a call manages the tied parameters it owns, and take away those it does not.

    Raises:
        ValueError: If an inner group would have to give back a parameter that was changed since.
    """
    claims = Claims()
    names = {
        module: name for top in modules for name, module in top.named_modules(remove_duplicate=True)
    }
    params, named = dict(managed.params), dict(managed.names)
    for key, known in list(_known.items()):
        original = known.original()
        if original is None:
            _known.pop(key, None)  # unless its finalizer has, in a garbage collection just now
            continue
        own = managed.params.get(original, ())
        places = tuple(dict.fromkeys((*known.places, *own)))
        inside = [place for place in places if place.module in names]
        if not inside or (not own and known.param is not None):
            continue
        if known.param is not None:
            _check_unchanged(known, managed.names.get(original, inside[0].attribute))
            claims.given_back.append(known)
        if len(inside) == len(places):
            params[original] = places
            prefix = names[places[0].module]
            named.setdefault(original, f"{prefix}.{places[0].attribute}".lstrip("."))
        else:
            params.pop(original, None)
            claims.unowned[original] = places
    return replace(managed, params=params, names=named), claims


def _give_back(group: ParamGroup, param: ShardedParam) -> None:
    """Let a group let go of a parameter; those that stay move, which is no change by the user."""
    stay = [
        known
        for known in _known.values()
        if known.owner is not None and known.owner[0]() is group and known.is_unchanged
    ]
    group.give_back(param)
    for known in stay:
        if known.param is not None:
            known.version = known.param.version()


def _check_unchanged(known: _Known, name: str) -> None:
    if known.is_unchanged:
        return
    param = known.param
    assert param is not None
    raise ValueError(
        f"Expected parameter '{name}' to be tied before its group was used, got one that is tied "
        f"to '{param.name}' of a group that was gathered, loaded or changed; apply fully_shard to "
        "all modules that share it before"
    )


def remember(
    original: nn.Parameter,
    places: tuple[Slot, ...],
    group: ParamGroup | None = None,
    param: ShardedParam | None = None,
) -> None:
    """Note where a parameter is registered and who owns it, while the original is alive."""
    if id(original) not in _known:
        weakref.finalize(original, _known.pop, id(original), None)
    registered = [(weakref.ref(place.module), place.attribute) for place in places]
    known = _known[id(original)] = _Known(weakref.ref(original), registered)
    if group is not None and param is not None:
        remember_owner(param)
        known.owner, known.version = (weakref.ref(group), weakref.ref(param)), param.version()


def remember_owner(param: ShardedParam) -> None:
    """Have :func:`owner_of_sharded` find whose sharded form it is."""
    _sharded[id(param.sharded)] = param


def owner_of_sharded(tensor: nn.Parameter) -> ShardedParam | None:
    """Return whose sharded form ``tensor`` is, ``None`` if it is an original."""
    param = _sharded.get(id(tensor))
    return param if param is not None and param.sharded is tensor else None


def num_replaced(ids: Set[int]) -> int:
    """Count the originals whose places sharded parameters have taken, of tensors of these ids."""
    if ids.isdisjoint(_known):
        return 0
    known = map(_known.get, ids)
    return sum(one is not None and one.param is not None for one in known)


def refuse_unowned(modules: Iterable[nn.Module]) -> None:
    """Raise if some of ``modules`` hold a tied parameter that no group owns.

    Raises:
        ShardError: On all ranks, with the names of its places.
    """
    unowned = [known for known in _known.values() if known.param is None]
    if not unowned:
        return
    within = set(modules)
    for known in unowned:
        if any(place.module in within for place in known.places):
            places = ", ".join(
                f"'{place.attribute}' of {type(place.module).__name__}" for place in known.places
            )
            raise ShardError(
                f"Expected a group that contains all places of a tied parameter, got none for "
                f"{places}; apply fully_shard to the module that contains them"
            )
