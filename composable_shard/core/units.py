"""The parameters of one group as a set, and sorted into what is gathered as a whole.

A parameter by itself (``param.py``) costs some calls for each question. Asked of plain lists, which
change only when a tensor is replaced, the same costs a loop or two for the whole group.

Plain parameters live in flat buckets, tensor subclasses by themselves. Loading, moving or extending
parameters replaces tensors behind the group's back; that is noticed before the next gather, and the
units are built anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_

import torch
from torch import nn
from torch.autograd.graph import Node

from composable_shard import _torch
from composable_shard.core.bucket import GatherUnit, ParamBucket, Transfer
from composable_shard.core.codec import has_grad_extension, needs_extension
from composable_shard.core.gather_extension import ExtensionGather, agree_formats
from composable_shard.core.param import ShardedParam, Slot
from composable_shard.errors import MaterializationError, ShardError, StaleParameterError
from composable_shard.mesh import ShardMesh

# All parameters of a group at once: what every forward and backward asks of each of them ----------

VERSION_OF_FREED = 1_000_000_000
"""What a version counter shows while the parameter is freed; no parameter is changed so often."""

Versions = tuple[tuple[torch.Tensor, ...], tuple[int, ...]]
"""Tensors and what their version counters showed."""

_version_of = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")


class ParamSet:
    """The parameters of one group, taken together.

    Attributes:
        accumulators: The nodes that accumulate into the unsharded parameters, but frozen ones.
        readable: What is freed: unsharded parameters, and parts of those that are subclasses, whose
            version counters autograd compares.
        storages: The numbers of those of unsharded parameters that are freed.
        is_created: Whether the unsharded parameters have been made, by a first gather.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        self.accumulators: list[Node] = []
        self.readable: tuple[torch.Tensor, ...] = ()
        self._forbidden: tuple[()] | Versions = ()
        self.look_again()

    def look_again(self) -> None:
        """Notice which tensors the parameters are now; needed whenever one was replaced."""
        params = self._params
        for param in params:
            param.encodes_grad = has_grad_extension(param.local)
        self._sharded = [param.sharded for param in params]
        self._locals = [param.local for param in params]
        counted = (*self._sharded, *self._locals)
        self._counted = [tensor for tensor in counted if not tensor.is_inference()]
        self._unsharded = [p.unsharded for p in params if p.unsharded is not None]
        self._in_memory = (*self._sharded, *self._unsharded)
        self._places = _torch.storage_numbers(self._in_memory)
        freed = [param for param in params if not param.shares_storage]
        readable: list[torch.Tensor] = [
            param.unsharded for param in freed if param.unsharded is not None
        ]
        readable += [part for param in freed for part in param.parts]
        self.storages = {
            _torch.storage_number(leaf) for tensor in readable for leaf in _torch.leaves(tensor)
        }
        self.readable = tuple([tensor for tensor in readable if not tensor.is_inference()])
        self.is_created = len(self._unsharded) == len(params)
        self._put_sharded = _pairs(params, self._sharded)
        self._put_unsharded = _pairs(params, self._unsharded) if self.is_created else []
        both = (param.attributes for param in params)
        self._apart = [one for one in both if one is not None and not one.are_shared]
        self._followed: list[bool] | None = None
        self._note_accumulators()

    @property
    def is_trainable(self) -> bool:
        """Whether any of them is."""
        return any(map(_requires_grad, self._sharded))

    def version(self) -> int:
        """Return a number that grows when sharded values change in place."""
        with _torch.without_overrides():
            return sum(map(_version_of, self._counted))

    def forbid_reading(self) -> None:
        """Let autograd refuse the unsharded parameters, whose memory is freed."""
        if self.readable and not self._forbidden:
            self._forbidden = self.readable, tuple(map(_version_of, self.readable))
            _torch.set_versions(self.readable, (VERSION_OF_FREED,) * len(self.readable))

    def allow_reading(self) -> None:
        """Let autograd read the unsharded parameters again."""
        if self._forbidden:
            _torch.set_versions(*self._forbidden)
            self._forbidden = ()

    def versions_of_readable(self) -> Versions:
        """Return the version counters of what is freed; to be compared by ``written_since``."""
        return self.readable, tuple(map(_version_of, self.readable))

    def written_since(self, noted: Versions) -> list[str]:
        """Return the names of the parameters that were written in place, and will be freed."""
        tensors, versions = noted
        now = tuple(map(_version_of, tensors))
        if now == versions:
            return []
        written = {id(t) for t, was, is_ in zip(tensors, versions, now, strict=True) if was != is_}
        return [
            param.name
            for param in self._params
            if not written.isdisjoint(map(id, (param.unsharded, *param.parts)))
        ]

    def are_registered(self, *, unsharded: bool) -> bool:
        """Tell whether the parameters, in the form asked for, stand in their first places."""
        put = self._put_unsharded if unsharded else self._put_sharded
        return all([slot[0]._parameters.get(slot[1]) is tensor for slot, tensor in put])

    def are_intact(self) -> bool:
        """Tell whether modules and DTensors still hold what was put there, in the same memory.

        While they are registered, ``param.data = ...``, or a conversion of a module in which they
        are, gives them other memory.
        """
        locals_ = _torch.local_tensors(self._sharded)
        is_there = self.are_registered(unsharded=False) and all(map(is_, locals_, self._locals))
        return is_there and _torch.storage_numbers(self._in_memory) == self._places

    def with_other_data(self) -> list[str]:
        """Return the names of those to whose sharded form ``param.data = ...`` was done."""
        return [
            param.name
            for param, place in zip(self._params, self._places, strict=False)
            if _torch.storage_number(param.sharded) != place and param.is_intact()
        ]

    def register_sharded(self) -> None:
        """Put the sharded parameters into their modules."""
        _put(self._put_sharded)
        for attributes in self._apart:
            attributes.take()

    def register_unsharded(self) -> None:
        """Put the unsharded parameters into their modules."""
        assert self.is_created
        _put(self._put_unsharded)
        for attributes in self._apart:
            attributes.give()

    def follow_requires_grad(self, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Give the unsharded parameters the ``requires_grad`` of the sharded ones.

        Args:
            on_gradient: Called whenever a backward has accumulated into one of them.
        """
        with _torch.without_overrides():
            wanted = list(map(_requires_grad, self._sharded))
        if wanted != self._followed:
            for param in self._params:
                param.follow_requires_grad(on_gradient)
            self._followed = wanted
            self._note_accumulators()

    def adopt_requires_grad(self) -> None:
        """Give the sharded parameters what users have set on the unsharded ones."""
        followed = self._followed
        if followed is None:
            return
        with _torch.without_overrides():
            asked = list(map(_requires_grad, self._unsharded))
        if asked != followed:
            for param, is_asked, was in zip(self._params, asked, followed, strict=True):
                if is_asked != was:
                    param.sharded.requires_grad_(is_asked)

    def renew_accumulators(self) -> None:
        """Make other nodes that accumulate, at the next ``follow_requires_grad``."""
        for param in self._params:
            param.accumulator = None
        self.accumulators = []  # a tensor makes another node once nobody holds the last
        self._followed = None

    def _note_accumulators(self) -> None:
        nodes = (param.accumulator for param in self._params)
        self.accumulators = [node for node in nodes if node is not None]


def _pairs(
    params: Sequence[ShardedParam], tensors: Sequence[nn.Parameter]
) -> list[tuple[Slot, nn.Parameter]]:
    return [
        (slot, tensor)
        for param, tensor in zip(params, tensors, strict=True)
        for slot in param.slots
    ]


def _put(pairs: list[tuple[Slot, nn.Parameter]]) -> None:
    for (module, attribute, calls_setattr), tensor in pairs:
        if calls_setattr:
            setattr(module, attribute, tensor)
        else:
            module._parameters[attribute] = tensor


# The units of one group: its parameters, sorted into what is gathered as a whole ------------------

Transfers = tuple[tuple[ShardMesh, Transfer], ...]
"""What the units of a group send and receive, each over its mesh."""

Kept = list[list[torch.Tensor]]
"""For each unit, this rank's part of what was gathered."""

_BucketKey = tuple[ShardMesh, torch.dtype, torch.dtype, torch.device]


class GroupUnits:
    """The buckets and subclass parameters of one group.

    Attributes:
        params: The parameters.
        all: The parameters, taken together.
        share_storage: Whether some unsharded parameters are the shards themselves.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        units: list[GatherUnit],
    ) -> None:
        self.params = list(params)
        self.all = ParamSet(self.params)
        self._was_refreshed = False
        self._set_units(units)

    def _set_units(self, units: list[GatherUnit]) -> None:
        self._units = units
        self._extensions: dict[ShardMesh, list[ExtensionGather]] = {}
        for unit in units:
            if isinstance(unit, ExtensionGather):
                self._extensions.setdefault(unit.mesh, []).append(unit)
        self.share_storage = any(param.shares_storage for param in self.params)

    @property
    def members(self) -> Sequence[GatherUnit]:
        """The units, in the order in which they are sent."""
        return self._units

    def start_gather(self) -> Transfers:
        """Allocate the unsharded storage and name what is sent and received.

        Collective: one all-gather of a small object at the first gather of tensor subclasses.
        """
        for gathers in self._extensions.values():
            agree_formats(gathers)
        return tuple([(unit.mesh, unit.start_gather()) for unit in self._units])

    def finish_gather(self, transfers: Transfers) -> None:
        """Make the unsharded parameters valid; creates them at the first time."""
        for unit, (_, transfer) in zip(self._units, transfers, strict=True):
            unit.finish_gather(transfer)
            if isinstance(unit, ParamBucket) and unit.params[0].unsharded is None:
                unit.create_unsharded_params()
        if not self.all.is_created:
            self.all.look_again()

    def own_memory(self) -> None:
        """Have unsharded storage of this rank's own, with what was gathered."""
        for unit in self._units:
            if isinstance(unit, ParamBucket):
                unit.own_memory()

    def keep(self, num_parts: int) -> Kept:
        """Copy this rank's part, of ``num_parts`` equal ones, of the unsharded storage."""
        return [unit.keep(unit.mesh.shard_rank % num_parts, num_parts) for unit in self._units]

    def start_regather(self, kept: Kept, num_parts: int) -> Transfers:
        """Allocate the unsharded storage and name what of the kept parts is sent."""
        return tuple(
            (unit.mesh, unit.start_regather(parts, num_parts))
            for unit, parts in zip(self._units, kept, strict=True)
        )

    def finish_regather(self, transfers: Transfers) -> None:
        """Make the unsharded parameters valid again."""
        for unit, (_, transfer) in zip(self._units, transfers, strict=True):
            unit.finish_regather(transfer)

    def free(self) -> None:
        """Free the unsharded storage."""
        for unit in self._units:
            unit.free()

    def refresh(self, label: str) -> bool:
        """Take over what was loaded, moved or extended since the last gather.

        Args:
            label: What messages call the group.

        Returns:
            Whether anything may have changed.

        Raises:
            StaleParameterError: If parameters were replaced between forward and backward.
            ShardError: If what replaced some is no shard of them. Nothing is taken over then.
            MaterializationError: If parameters are not on the device of compute.
        """
        intact = self.all.are_intact()
        if self._was_refreshed and intact:
            return False
        if self._was_refreshed and _torch.current_backward() != -1:
            raise StaleParameterError(
                f"Expected the parameters of {label} in backward as they were in "
                "forward, got replaced ones; run backward before replacing them"
            )
        if not intact:
            self._check_replaced(label)
            for param in self.params:
                param.recover()
        self._check_materialized(label)
        if not intact or self._extended_since_built():
            self._rebuild()
        self.all.look_again()
        self._was_refreshed = True
        return True

    def give_back(self, param: ShardedParam) -> None:
        """Let go of a parameter."""
        self.params.remove(param)
        param.slots = ()
        self._rebuild()

    def _extended_since_built(self) -> bool:
        bucketed = [p for u in self._units if isinstance(u, ParamBucket) for p in u.params]
        return any(needs_extension(param.local) for param in bucketed)

    def _rebuild(self) -> None:
        units, locals_ = build_units(self.params, [param.local for param in self.params])
        for param, local in zip(self.params, locals_, strict=True):
            param.adopt_local(local)
            param.forget_unsharded()
        self._set_units(units)
        self.all.look_again()

    def _check_replaced(self, label: str) -> None:
        misfits = [text for param in self.params if (text := param.misfit()) is not None]
        misfits += [
            f"a new .data, which DTensor ignores, for '{n}'" for n in self.all.with_other_data()
        ]
        if misfits:
            raise ShardError(
                f"Expected the parameters of {label} as fully_shard made them, got "
                f"{', '.join(misfits)}; change values by load_state_dict or in place"
            )

    def _check_materialized(self, label: str) -> None:
        wrong = [param for param in self.params if param.local.device != param.device]
        if not wrong:
            return
        place = wrong[0].device
        if any(param.local.is_meta for param in wrong):
            remedy = "call init_sharded(model, seed=...), or load values by load_sharded()"
        elif wrong[0].offload is not None:
            remedy = "leave the module there, since its policy offloads them"
        else:
            remedy = f"call module.to('{place}') before training"
        places = ", ".join(f"{param.name} on {param.local.device}" for param in wrong)
        raise MaterializationError(
            f"Expected the parameters of {label} on {place}, got {places}; {remedy}"
        )


def build_units(
    params: Sequence[ShardedParam],
    shards: Sequence[torch.Tensor],
) -> tuple[list[GatherUnit], list[torch.Tensor]]:
    """Sort parameters into flat buckets, and tensor subclasses by themselves.

    Args:
        params: The parameters.
        shards: Values of the local shard of each; copied into the buckets.

    Returns:
        The units, and for each parameter the tensor that is its local shard from now on.
    """
    units: list[GatherUnit] = []
    locals_: list[torch.Tensor] = list(shards)
    keyed: dict[_BucketKey, list[int]] = {}
    for index, (param, shard) in enumerate(zip(params, shards, strict=True)):
        if needs_extension(shard):
            param.local, param.shares_storage = shard, False
            units.append(ExtensionGather(param, param.mesh.device))
        else:
            dtypes = (shard.dtype, param.policy.compute_dtype(shard.dtype))
            keyed.setdefault((param.mesh, *dtypes, shard.device), []).append(index)
    for (_, dtype, compute_dtype, device), indices in keyed.items():
        bucket = ParamBucket([params[i] for i in indices], dtype, compute_dtype, device)
        for place, index in enumerate(indices):
            locals_[index] = bucket.local_view(place)
            if device.type != "meta":
                locals_[index].copy_(shards[index])
        units.append(bucket)
    return units, locals_
