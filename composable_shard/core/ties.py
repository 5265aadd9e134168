"""Parameters that several groups use, and which group owns a parameter. Imports group, storage.

The owner of a tied parameter is the lowest group whose modules contain all of its places. So it is
gathered whenever one of them runs, and has one gradient. Groups are made from the bottom up: a call
that finds a parameter of an inner group in its own modules takes it over, and a parameter whose
places no call contains yet has no owner.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from composable_shard.core.group import ParamGroup
from composable_shard.core.storage import ShardedParam, Slot
from composable_shard.errors import ShardError


@dataclass(frozen=True)
class Managed:
    """The parameters that one ``fully_shard`` call shards.

    Attributes:
        modules: All modules below the top modules, except those of inner groups.
        slots: Each parameter with the modules and names that hold it.
        names: The qualified name of each parameter.
    """

    modules: tuple[nn.Module, ...]
    slots: dict[nn.Parameter, tuple[Slot, ...]]
    names: dict[nn.Parameter, str]


@dataclass
class _Original:
    """An original parameter that is still alive after it was sharded, or that waits for an owner.

    Attributes:
        original: The parameter.
        registered: The modules and names that hold it, as far as calls have seen.
        owner: Its group, and the parameter there.
        version: The version of the shard when it was made.
    """

    original: weakref.ref[nn.Parameter]
    registered: list[tuple[weakref.ref[nn.Module], str]]
    owner: tuple[weakref.ref[ParamGroup], weakref.ref[ShardedParam]] | None = None
    version: int = 0

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The modules and names that hold it, of modules that are alive."""
        found = ((module(), name) for module, name in self.registered)
        return tuple(Slot.of(module, name) for module, name in found if module is not None)

    @property
    def param(self) -> ShardedParam | None:
        """The parameter in the group that owns it, if one does."""
        return None if self.owner is None else self.owner[1]()

    @property
    def is_unchanged(self) -> bool:
        """Whether its group has neither been used nor changed."""
        group = None if self.owner is None else self.owner[0]()
        param = self.param
        return (
            group is not None
            and param is not None
            and not group.is_compiled
            and all(slot.get() is param.sharded for slot in param.slots)
            and param.version() == self.version
        )


_originals: dict[int, _Original] = {}
"""By id; an entry is removed when its original dies."""

_sharded: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()
"""By id, the sharded parameters; an id may have passed to another tensor since."""


@dataclass
class Claims:
    """How a call changes the owners of tied parameters.

    Attributes:
        taken_over: Parameters that inner groups lose.
        unowned: Parameters that modules outside the call hold too, with all known places.
    """

    taken_over: list[_Original] = field(default_factory=list)
    unowned: dict[nn.Parameter, tuple[Slot, ...]] = field(default_factory=dict)

    def commit(self) -> None:
        """Register the originals again, and remove them from their groups."""
        for known in self.taken_over:
            original, param, owner = known.original(), known.param, known.owner
            assert original is not None and param is not None and owner is not None
            param.put(original)
            group = owner[0]()
            if group is not None:
                _remove(group, param)
            known.owner = None
        for original, slots in self.unowned.items():
            remember(original, slots)


def claim_ties(managed: Managed, modules: Sequence[nn.Module]) -> tuple[Managed, Claims]:
    """Add the tied parameters that a call owns to those it shards, and remove all others.

    Raises:
        ValueError: If an inner group would lose a parameter that was changed since.
    """
    claims = Claims()
    prefixes = {module: name for top in modules for name, module in top.named_modules()}
    slots, names = dict(managed.slots), dict(managed.names)
    for key, known in list(_originals.items()):
        original = known.original()
        if original is None:
            _originals.pop(key, None)
            continue
        own = managed.slots.get(original, ())
        places = tuple(dict.fromkeys((*known.slots, *own)))
        inside = [slot for slot in places if slot.module in prefixes]
        if not inside or (not own and known.param is not None):
            continue
        if known.param is not None:
            if not known.is_unchanged:
                name = managed.names.get(original, inside[0].name)
                raise ValueError(
                    f"Expected parameter '{name}' to be tied before its group was used, got one "
                    f"that is tied to '{known.param.name}' of a group that was gathered, loaded or "
                    "changed; apply fully_shard to all modules that share it before"
                )
            claims.taken_over.append(known)
        if len(inside) == len(places):
            slots[original] = places
            prefix = prefixes[places[0].module]
            names.setdefault(original, f"{prefix}.{places[0].name}".lstrip("."))
        else:
            slots.pop(original, None)
            claims.unowned[original] = places
    return replace(managed, slots=slots, names=names), claims


def _remove(group: ParamGroup, param: ShardedParam) -> None:
    """Remove a parameter from a group; the shards of the others move, which is no change."""
    unchanged = [
        known
        for known in _originals.values()
        if known.owner is not None and known.owner[0]() is group and known.is_unchanged
    ]
    group.remove(param)
    for known in unchanged:
        if known.param is not None:
            known.version = known.param.version()


def remember(
    original: nn.Parameter,
    slots: Sequence[Slot],
    group: ParamGroup | None = None,
    param: ShardedParam | None = None,
) -> None:
    """Note where a parameter is registered and who owns it, while the original is alive."""
    if id(original) not in _originals:
        weakref.finalize(original, _originals.pop, id(original), None)
    registered = [(weakref.ref(slot.module), slot.name) for slot in slots]
    known = _originals[id(original)] = _Original(weakref.ref(original), registered)
    if group is not None and param is not None:
        _sharded[id(param.sharded)] = param
        known.owner, known.version = (weakref.ref(group), weakref.ref(param)), param.version()


def owner_of_sharded(tensor: nn.Parameter) -> ShardedParam | None:
    """Return the parameter whose sharded form ``tensor`` is; ``None`` if it is an original."""
    param = _sharded.get(id(tensor))
    return param if param is not None and param.sharded is tensor else None


def num_replaced(ids: set[int]) -> int:
    """Count the originals, of tensors with these ids, that ``fully_shard`` has replaced."""
    return sum(key in ids and known.param is not None for key, known in _originals.items())


def refuse_unowned(modules: Iterable[nn.Module]) -> None:
    """Raise if some of ``modules`` hold a tied parameter that no group owns.

    Raises:
        ShardError: On all ranks, with the names of its places.
    """
    unowned = [known for known in _originals.values() if known.param is None]
    if not unowned:
        return
    within = set(modules)
    for known in unowned:
        if any(slot.module in within for slot in known.slots):
            places = ", ".join(
                f"'{slot.name}' of {type(slot.module).__name__}" for slot in known.slots
            )
            raise ShardError(
                f"Expected a group that contains all places of a tied parameter, got none for "
                f"{places}; apply fully_shard to the module that contains them"
            )
