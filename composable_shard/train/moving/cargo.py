"""What of a model and its optimizers moves to other ranks, and what becomes of this rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.core.bucket import GatherUnit
from composable_shard.core.gradient import assign_grad
from composable_shard.core.group import ON_OTHER_RANKS, ParamGroup
from composable_shard.core.units import build_units
from composable_shard.errors import ShardError
from composable_shard.mesh import ShardMesh
from composable_shard.optim.blocks import spread_over
from composable_shard.optim.layouts import LayoutOptimizer
from composable_shard.train.moving.plan import Holding

# What the ranks tell each other -------------------------------------------------------------------


class Ground(NamedTuple):
    """The ranks that a model lies on, and how many there are along each axis of their mesh.

    Attributes:
        ranks: Their numbers in the job, along the last axis first.
        extents: ``(shards,)``, or ``(replicas, shards)``.
    """

    ranks: tuple[int, ...]
    extents: tuple[int, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ground:
        """Return the ranks of a mesh."""
        return cls(tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape))

    def holding(self, shape: Sequence[int], dim: int | None) -> Holding:
        """Return how a tensor lies there that is sharded on ``dim``, or on none."""
        return Holding(self.ranks, spread_over(shape, self.extents, self.over_axes(dim)))

    def over_axes(self, dim: int | None) -> tuple[int | None, ...]:
        """Return which dim each axis shards."""
        return (dim,) if len(self.extents) == 1 else (None, dim)

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """Return how a DTensor lies there that is sharded on ``dim``."""
        return tuple(Replicate() if d is None else Shard(d) for d in self.over_axes(dim))


Key = tuple[str | int, ...]
"""What a tensor is of a model, alike on all ranks: ``("parameter", 3)``, say."""


class Item(NamedTuple):
    """A tensor that moves, as a rank describes it to one that is to have it.

    Attributes:
        shape: Its global shape.
        stride: Its global strides.
        dtype: Its dtype.
        dim: The dim on which it is sharded, ``None`` for one that every rank has.
        is_sharded: Whether it is a DTensor.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    is_sharded: bool


class Told(NamedTuple):
    """What a rank that has a model tells one that is to have it.

    Attributes:
        items: What moves.
        values: Numbers among the states of optimizers, which are told and not sent, and whether
            they lie on the device.
        settings: Those of the parameter groups of each optimizer.
    """

    items: dict[Key, Item]
    values: dict[Key, tuple[Any, bool]]
    settings: list[list[dict[str, Any]]]

    def facts(self) -> list[str]:
        """Describe what must be the same on all ranks that have the model."""
        return [f"{key}: {item}" for key, item in self.items.items()]


Tensors = dict[Key, torch.Tensor]
"""Plain tensors of this rank by key: local shards, or whole ones."""


# This rank's part of a model ----------------------------------------------------------------------


class Possession:
    """The model and the optimizers of this rank.

    Args:
        model: The model.
        groups: All of its groups.
        optimizers: Its optimizers.

    Attributes:
        params: The parameters of all groups.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[ParamGroup], optimizers: Sequence[Optimizer]
    ) -> None:
        self.groups = groups
        self.params = [param for group in groups for param in group.params]
        self._model, self._optimizers = model, optimizers
        self._indices = {id(param.sharded): index for index, param in enumerate(self.params)}
        self._states: list[Mapping[torch.Tensor, dict[str, Any]]] = []
        self._before = [dict(param.__dict__) for param in self.params]
        self._units: list[list[GatherUnit]] = []

    @property
    def is_empty(self) -> bool:
        """Whether it has no values: they are to come, or have gone to other ranks."""
        has_gone = any(group.absence == ON_OTHER_RANKS for group in self.groups)
        return has_gone or any(param.local.is_meta for param in self.params)

    def ground(self) -> Ground | None:
        """Return the ranks that the model lies on; ``None`` if this one has no values."""
        return None if self.is_empty else Ground.of(self.groups[0].mesh.mesh)

    def told(self) -> tuple[Told, Tensors]:
        """Describe what this rank has, and return it.

        Collective: of optimizers whose states lie with owners, see ``LayoutOptimizer.state_dict``.
        """
        told, tensors = Told({}, {}, []), Tensors()

        def add(key: Key, value: Any) -> None:
            if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.ndim):
                told.items[key] = _item(key, value)
                tensors[key] = _torch.local_part(value).detach()
            elif isinstance(value, torch.Tensor):
                told.values[key] = value.cpu(), value.device.type != "cpu"
            else:
                told.values[key] = value, False

        for index, param in enumerate(self.params):
            add(("parameter", index), param.sharded)
            if param.sharded.grad is not None:
                add(("gradient", index), param.sharded.grad)
        for name, tensor in self._plain().items():
            add(("plain", name), tensor[None] if not tensor.ndim else tensor)
        for place, optimizer in enumerate(self._optimizers):
            self._states.append(_states_of(optimizer))
            for index, stepped in self._stepped(optimizer):
                for name, value in self._states[place].get(stepped, {}).items():
                    add(("state", place, index, name), value)
            settings = [dict(group) for group in optimizer.param_groups]
            told.settings.append([{**group, "params": []} for group in settings])
        return told, tensors

    def _plain(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers that are not sharded, by name."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {name: tensor for name, tensor in named if id(tensor) not in self._indices}

    def _stepped(self, optimizer: Optimizer) -> list[tuple[int, torch.Tensor]]:
        """Return the parameters of an optimizer that are the model's, with their numbers in it."""
        own = {*self._indices, *map(id, self._plain().values())}
        stepped = (param for group in optimizer.param_groups for param in group["params"])
        return [(index, param) for index, param in enumerate(stepped) if id(param) in own]

    # Memory for what is to come ---------------------------------------------------------------

    def make_room(self, told: Told, ground: Ground, mesh: ShardMesh) -> Tensors:
        """Return memory for what this rank is to have; what it has stays until :meth:`settle`.

        Args:
            told: What moves.
            ground: Where to.
            mesh: The same, of this rank.
        """
        locals_ = self._new_shards(ground, mesh)
        found, plain, is_new = Tensors(), self._plain(), self.is_empty
        for key, item in told.items.items():
            box = ground.holding(item.shape, item.dim).box(dist.get_rank())
            assert box is not None
            if key[0] == "parameter":
                found[key] = locals_[int(key[1])]
            elif key[0] == "plain" and is_new:
                found[key] = _with_values(plain[str(key[1])], mesh.device).view(item.shape)
            elif key[0] != "plain" and (item.is_sharded or is_new):
                like = self._like(key, locals_)
                if like.shape != box.sizes:
                    like = like.new_zeros(()).expand(box.sizes)
                device, dtype = mesh.device if like.is_meta else like.device, item.dtype
                found[key] = _torch.without_values(
                    torch.empty_like(like, dtype=dtype, device=device, requires_grad=False)
                )
        return found

    def _new_shards(self, ground: Ground, mesh: ShardMesh) -> list[torch.Tensor]:
        """Plan all parameters for other ranks, and return memory for their local shards."""
        found: list[torch.Tensor] = []
        for group in self.groups:
            shards = []
            for param in group.params:
                dtype = param.local.dtype
                param.replan(mesh)
                box = ground.holding(param.shape, param.form.dim).box(dist.get_rank())
                assert box is not None
                shards.append(torch.zeros((), dtype=dtype, device=param.device).expand(box.sizes))
            with torch.inference_mode(False):
                units, locals_ = build_units(group.params, shards)
            self._units.append(units)
            found += locals_
        return found

    def _like(self, key: Key, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor beside which a gradient or a state lies."""
        if key[0] == "gradient":
            return locals_[int(key[1])]
        stepped = dict(self._stepped(self._optimizers[int(key[1])]))[int(key[2])]
        index = self._indices.get(id(stepped))
        return stepped if index is None else locals_[index]

    def stay(self) -> None:
        """Forget what was planned: everything is as it was."""
        for param, before in zip(self.params, self._before, strict=True):
            param.__dict__.clear()
            param.__dict__.update(before)

    # What becomes of it -----------------------------------------------------------------------

    def settle(self, told: Told, tensors: Tensors, ground: Ground, mesh: ShardMesh) -> None:
        """Let the model lie on other ranks, of which this is one.

        Args:
            told: What has moved.
            tensors: What :meth:`make_room` returned, filled.
            ground: Where to.
            mesh: The same, of this rank.

        Collective: of optimizers whose states lie with owners, see ``LayoutOptimizer``.
        """
        is_new = self.is_empty
        for index, param in enumerate(self.params):
            local = tensors["parameter", index]
            if _torch.local_tensor(param.sharded).is_meta:
                _materialize(param.sharded, local, param.spec)
                param.hold(param.sharded)
            _torch.relocate(param.sharded, local, param.spec)
            param.adopt_local(local)
        for group, units in zip(self.groups, self._units, strict=True):
            group.relocate(units, mesh)
        for key, item in told.items.items():
            if key[0] == "gradient":
                param = self.params[int(key[1])]
                shard = _shown(item, tensors[key], ground, mesh.mesh, param.sharded.grad)
                if param.sharded.grad is not shard:
                    assign_grad(param.sharded, shard)
            elif key[0] == "plain" and is_new:
                self._put_plain(str(key[1]), tensors[key])
        for place, optimizer in enumerate(self._optimizers):
            self._settle_states(place, optimizer, told, tensors, ground, mesh)

    def _settle_states(
        self,
        place: int,
        optimizer: Optimizer,
        told: Told,
        tensors: Tensors,
        ground: Ground,
        mesh: ShardMesh,
    ) -> None:
        is_new, stepped = not self._states, dict(self._stepped(optimizer))
        before = {} if is_new else self._states[place]
        states: dict[torch.Tensor, dict[str, Any]] = {
            param: dict(before.get(param, {})) for param in stepped.values() if param in before
        }
        for key, item in told.items.items():
            if key[:2] == ("state", place) and key in tensors:
                own = states.setdefault(stepped[int(key[2])], {})
                name = str(key[3])
                own[name] = _shown(item, tensors[key], ground, mesh.mesh, own.get(name))
        for key, (value, is_on_device) in told.values.items():
            if key[:2] == ("state", place) and is_new:
                own = states.setdefault(stepped[int(key[2])], {})
                own[str(key[3])] = value.to(mesh.device) if is_on_device else value
        if is_new:
            for group, settings in zip(optimizer.param_groups, told.settings[place], strict=True):
                group.update({k: v for k, v in settings.items() if k != "params"})
        if isinstance(optimizer, LayoutOptimizer):
            optimizer.choose_owners()
            optimizer.take_states(states)
            return
        for param, own in states.items():
            optimizer.state[param].update(own)

    def _put_plain(self, name: str, values: torch.Tensor) -> None:
        """Register a buffer, or give a parameter memory, that had none."""
        tensor = self._plain()[name]
        if not tensor.is_meta:
            return
        whole = values.view(tensor.shape)
        if isinstance(tensor, nn.Parameter):
            _exchange(tensor, nn.Parameter(whole, requires_grad=tensor.requires_grad))
            return
        for module in self._model.modules():
            for attribute, buffer in module._buffers.items():
                if buffer is tensor:
                    module._buffers[attribute] = whole

    def leave(self, mesh: DeviceMesh, ground: Ground) -> None:
        """Let the model lie on other ranks alone: this one has nothing of what is sharded."""
        for optimizer in self._optimizers:
            stepped = self._stepped(optimizer)
            if isinstance(optimizer, LayoutOptimizer):
                optimizer.forget_owners()
            for _, one in stepped:
                optimizer.state.pop(one, None)
        for param in self.params:
            nothing = torch.empty(0, dtype=param.local.dtype, device=param.local.device)
            meta = param.spec.tensor_meta
            assert meta is not None
            spec = _torch.make_spec(mesh, ground.placements(param.form.dim), meta)
            param.sharded.grad = None
            param.forget_unsharded()
            _torch.relocate(param.sharded, nothing, spec)
            param.local, param.place, param.spec = nothing, None, spec
        for group in self.groups:
            group.leave()


def _states_of(optimizer: Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
    if isinstance(optimizer, LayoutOptimizer):
        return optimizer.sharded_states()
    return optimizer.state


def _item(key: Key, tensor: torch.Tensor) -> Item:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not isinstance(tensor, DTensor):
        return Item(shape, stride, tensor.dtype, None, is_sharded=False)
    *replicas, last = tensor.placements
    if not all(p.is_replicate() for p in replicas) or type(last) not in (Shard, Replicate):
        raise ShardError(
            f"Expected {' '.join(map(str, key))} to be cut by Shard over the last axis alone, got "
            f"{tensor.placements}; such a model is moved by a checkpoint"
        )
    dim = last.dim if isinstance(last, Shard) else None
    return Item(shape, stride, tensor.dtype, dim, is_sharded=True)


def _with_values(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory for a plain tensor: its own, or new if it has none."""
    if not tensor.is_meta:
        return tensor.detach()
    return _torch.empty_like(tensor.detach(), device=device)


def _shown(
    item: Item, local: torch.Tensor, ground: Ground, mesh: DeviceMesh, before: Any
) -> torch.Tensor:
    """Return a gradient or a state as users see it: the same object as before, if there was one."""
    if not item.is_sharded:
        return local
    shape, stride = torch.Size(item.shape), item.stride
    meta = _torch.TensorMeta(shape, stride, item.dtype)
    spec = _torch.make_spec(mesh, ground.placements(item.dim), meta)
    if not isinstance(before, DTensor):
        return _torch.from_local(local, spec)
    _torch.relocate(before, local, spec)
    return before


def _materialize(param: nn.Parameter, local: torch.Tensor, spec: _torch.DTensorSpec) -> None:
    """Give a sharded parameter of the meta device memory; it stays the object that it is."""
    _exchange(param, _torch.parameter_of(_torch.from_local(local, spec), param.requires_grad))


def _exchange(old: nn.Parameter, new: nn.Parameter) -> None:
    _torch.share_hooks(old, new)
    new.__dict__.update(old.__dict__)
    torch.utils.swap_tensors(old, new)
