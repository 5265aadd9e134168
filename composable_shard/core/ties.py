"""Tied parameters, and the groups that own them. Imports group, storage.

A tied parameter has several slots (modules and names). Its owner is the lowest group that contains
all of them. So the parameter is gathered whenever one of its modules runs, and it has one gradient.
Users call ``fully_shard`` from the bottom up. If a call finds a parameter of an inner group in its
own modules too, its group takes the parameter over. Until a group contains all slots of a
parameter, the parameter has no owner.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from composable_shard.core.storage import ShardedParam, Slot
from composable_shard.errors import ShardError


@dataclass(frozen=True)
class Managed:
    """The parameters that one ``fully_shard`` call shards.

    Attributes:
        modules: The top modules and all modules below them, except those of inner groups.
        slots: The slots (modules and names) of each parameter.
        names: The qualified name of each parameter.
    """

    modules: tuple[nn.Module, ...]
    slots: dict[nn.Parameter, tuple[Slot, ...]]
    names: dict[nn.Parameter, str]


@dataclass
class _Original:
    """An original parameter that is still alive after sharding, or that has no owner yet.

    Attributes:
        original: The parameter.
        slot_refs: Its known slots, as weak references to modules, and names.
        param_ref: A weak reference to its sharded parameter, if a group owns it.
        version: The version of the sharded parameter when it was recorded.
    """

    original: weakref.ref[nn.Parameter]
    slot_refs: list[tuple[weakref.ref[nn.Module], str]]
    param_ref: weakref.ref[ShardedParam] | None = None
    version: int = 0

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots in modules that are still alive."""
        slots = ((module(), name) for module, name in self.slot_refs)
        return tuple(Slot.of(module, name) for module, name in slots if module is not None)

    @property
    def param(self) -> ShardedParam | None:
        """The sharded parameter in its group, if it has an owner."""
        return None if self.param_ref is None else self.param_ref()

    @property
    def is_unchanged(self) -> bool:
        """Whether its group has not been used, and the sharded parameter is as it was made."""
        param = self.param
        return (
            param is not None
            and not param.group.is_compiled
            and all(slot.get() is param.sharded for slot in param.slots)
            and param.version() == self.version
        )


# The originals by id; an entry is removed when its original is freed.
_originals: dict[int, _Original] = {}


@dataclass
class Claims:
    """The changes of ownership of tied parameters by a ``fully_shard`` call.

    Attributes:
        taken_over: Parameters that inner groups lose.
        unowned: Parameters with slots outside of the modules of the call, and all their slots.
    """

    taken_over: list[_Original] = field(default_factory=list)
    unowned: dict[nn.Parameter, tuple[Slot, ...]] = field(default_factory=dict)

    def commit(self) -> None:
        """Register the taken-over originals again, and remove them from their inner groups."""
        for known in self.taken_over:
            original, param = known.original(), known.param
            assert original is not None and param is not None
            param.put(original)
            param.group.remove(param)
            known.param_ref = None
        for original, slots in self.unowned.items():
            record_original(original, slots)


def claim_ties(managed: Managed, modules: Sequence[nn.Module]) -> tuple[Managed, Claims]:
    """Correct the parameters of a call by the ties with parameters of earlier calls.

    A tied parameter belongs to the call if its modules contain all slots of the parameter.

    Raises:
        ValueError: If an inner group would lose a parameter that was used or changed.
    """
    claims = Claims()
    prefixes = {module: name for top in modules for name, module in top.named_modules()}
    slots, names = dict(managed.slots), dict(managed.names)
    for key, known in list(_originals.items()):
        original = known.original()
        if original is None:
            _originals.pop(key, None)
            continue
        managed_slots = managed.slots.get(original, ())
        all_slots = tuple(dict.fromkeys((*known.slots, *managed_slots)))
        inside = [slot for slot in all_slots if slot.module in prefixes]
        if not inside or (not managed_slots and known.param is not None):
            continue
        if known.param is not None:
            if not known.is_unchanged:
                name = managed.names.get(original, inside[0].name)
                raise ValueError(
                    f"Expected parameter '{name}' to be tied before its group was used, got a tie "
                    f"with '{known.param.name}' of a group that was gathered, loaded or changed; "
                    "first apply fully_shard to all modules that share the parameter"
                )
            claims.taken_over.append(known)
        if len(inside) == len(all_slots):
            slots[original] = all_slots
            prefix = prefixes[all_slots[0].module]
            names.setdefault(original, f"{prefix}.{all_slots[0].name}".lstrip("."))
        else:
            slots.pop(original, None)
            claims.unowned[original] = all_slots
    return replace(managed, slots=slots, names=names), claims


def record_original(
    original: nn.Parameter,
    slots: Sequence[Slot],
    param: ShardedParam | None = None,
) -> None:
    """Record the slots and the owner of a parameter, while the original is alive."""
    if id(original) not in _originals:
        weakref.finalize(original, _originals.pop, id(original), None)
    slot_refs = [(weakref.ref(slot.module), slot.name) for slot in slots]
    known = _originals[id(original)] = _Original(weakref.ref(original), slot_refs)
    if param is not None:
        known.param_ref, known.version = weakref.ref(param), param.version()


def num_replaced(ids: set[int]) -> int:
    """Count the originals that ``fully_shard`` has replaced, among live tensors with these ids."""
    return sum(key in ids and known.param is not None for key, known in _originals.items())


def refuse_unowned(modules: Iterable[nn.Module]) -> None:
    """Raise if some of ``modules`` hold a tied parameter that no group owns.

    Raises:
        ShardError: On all ranks, with the slots of the parameter.
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
                f"Expected one group to contain all modules with a tied parameter, got none for "
                f"{places}; apply fully_shard to the module that contains them"
            )
