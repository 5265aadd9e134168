"""The tensors of a model and its optimizers that move, and the part of them on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.core.codec import has_extension, has_grad_extension
from composable_shard.core.extension import build_buckets
from composable_shard.core.group import ON_OTHER_RANKS, ParamGroup
from composable_shard.core.placement import ParamPlacement, plan_tensor
from composable_shard.core.reduction import assign_grad
from composable_shard.core.storage import ShardedParam, Storage
from composable_shard.errors import ShardError
from composable_shard.optim.layouts import LayoutOptimizer
from composable_shard.train.places import (
    Ground,
    Target,
    placements_of,
    whole_on_meta,
)
from composable_shard.train.weights.entries import exchange, register_instead

# Descriptions of tensors --------------------------------------------------------------------------


Key = tuple[str | int, ...]
"""The place of a tensor in a model, the same on all ranks, such as ``("parameter", 3)``."""


class Item(NamedTuple):
    """The description of a tensor that moves.

    Attributes:
        shape: Its global shape.
        stride: Its global strides.
        dtype: Its dtype.
        param: The parameter with the same layout; ``None`` for a tensor that every rank has in
            full.
        dim: The sharded dim; ``None`` if it is not sharded.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    param: int | None = None
    dim: int | None = None


class Told(NamedTuple):
    """The description of a model that its ranks send to the ranks that join.

    Attributes:
        items: The tensors that move.
        values: Numbers among the states of optimizers, and whether each is on the device. They
            travel with the description.
        states: The keys of all states of optimizers, in the order of the optimizers.
        settings: The settings of the parameter groups of each optimizer.
    """

    items: dict[Key, Item]
    values: dict[Key, tuple[Any, bool]]
    states: list[Key]
    settings: list[list[dict[str, Any]]]

    def facts(self) -> list[str]:
        """Describe the properties that must be the same on all ranks with the model."""
        return sorted(f"{key}: {item}" for key, item in self.items.items())


Tensors = dict[Key, torch.Tensor]
"""The tensors of this rank: local shards, or full tensors."""


# This rank's part of a model ----------------------------------------------------------------------


class Possession:
    """The model and the optimizers of this rank.

    Args:
        model: The model.
        groups: All of its groups.
        optimizers: Its optimizers.

    Attributes:
        model: The model.
        groups: Its groups.
        params: The parameters of all groups.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[ParamGroup], optimizers: Sequence[Optimizer]
    ) -> None:
        self.groups = groups
        self.params = [param for group in groups for param in group.params]
        self.model, self._optimizers = model, optimizers
        self._indices = {id(param.sharded): index for index, param in enumerate(self.params)}
        self._stepped = [self._stepped_by(optimizer) for optimizer in optimizers]
        self._states: list[Mapping[torch.Tensor, dict[str, Any]]] = []
        self._before = [dict(param.__dict__) for param in self.params]
        self._buckets: list[list[Storage]] = []
        self._locals: list[torch.Tensor] = []

    @property
    def is_empty(self) -> bool:
        """Whether it has no values, because they will arrive or have moved to other ranks."""
        has_gone = any(group.absence == ON_OTHER_RANKS for group in self.groups)
        return has_gone or any(param.local.is_meta for param in self.params)

    def grounds(self) -> list[Ground]:
        """Return the location of each parameter; nothing if this rank has no values."""
        if self.is_empty:
            return []
        places = (param.placement for param in self.params)
        return [Ground.of(place.mesh, place.roles) for place in places]

    def told(self, *, has_joining: bool) -> tuple[Told, Tensors]:
        """Describe the values of this rank, and return them.

        Args:
            has_joining: Whether some ranks join, which need the full description.

        Raises:
            ShardError: If a tensor cannot be moved.

        Collective: for optimizers of ``with_layout``, see ``LayoutOptimizer.state_dict``.
        """
        told, tensors = Told({}, {}, [], []), Tensors()

        def add(key: Key, what: str, value: Any, param: int | None = None) -> None:
            if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.ndim):
                told.items[key] = self._described(what, value, param)
                tensors[key] = _torch.local_part(value).detach()
            elif isinstance(value, torch.Tensor):
                told.values[key] = value.cpu(), value.device.type != "cpu"
            else:
                told.values[key] = value, False

        for index, param in enumerate(self.params):
            add(("parameter", index), f"parameter '{param.name}'", param.sharded, index)
            if param.sharded.grad is not None:
                what = f"the gradient of '{param.name}'"
                add(("gradient", index), what, param.sharded.grad, index)
        for name, tensor in self._plain().items():
            if has_joining and isinstance(tensor, DTensor):
                raise ShardError(
                    f"Expected '{name}', a DTensor, to be sharded by fully_shard for the model to "
                    "move to more ranks, got one that is not; such a model is moved by a checkpoint"
                )
            if not isinstance(tensor, DTensor):
                add(("plain", name), f"'{name}'", tensor[None] if not tensor.ndim else tensor)
        for place, optimizer in enumerate(self._optimizers):
            numbers = {id(param): index for index, param in self._stepped[place].items()}
            known = optimizer.state
            if isinstance(optimizer, LayoutOptimizer):
                known = optimizer.sharded_states()
            self._states.append(known)
            for stepped, param_states in known.items():
                moved = self._indices.get(id(stepped))
                of = "" if moved is None else f" of '{self.params[moved].name}'"
                for name, value in param_states.items() if id(stepped) in numbers else ():
                    if moved is not None or not isinstance(value, DTensor):
                        key = ("state", place, numbers[id(stepped)], name)
                        add(key, f"state '{name}'{of}", value, moved)
                        told.states.append(key)
            told.settings.append([{**group, "params": []} for group in optimizer.param_groups])
        return told, tensors

    def _described(self, what: str, tensor: torch.Tensor, param: int | None) -> Item:
        local = _torch.local_part(tensor)
        if _torch.is_subclass(local) or has_extension(local) or has_grad_extension(local):
            raise ShardError(
                f"Expected {what} to be a plain tensor without all-gather hooks, got "
                f"{type(local).__name__}; such a model is moved by a checkpoint"
            )
        item = Item(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        if param is None or not isinstance(tensor, DTensor):
            return item
        placement = self.params[param].placement
        dims = [cut.dim for cut in tensor.placements if isinstance(cut, Shard)]
        item = item._replace(param=param, dim=dims[0] if dims else None)
        laid = placement.mesh, placements_of(placement.roles, item.dim)
        sizes = _sizes(item, placement)
        if (tensor.device_mesh, tensor.placements) != laid or sizes != local.shape:
            raise ShardError(
                f"Expected {what} to be cut by Shard over axes of the mesh of the parameter, of "
                f"shape {list(sizes)} on this rank, got shape {list(local.shape)}, "
                f"{tensor.placements} on {tensor.device_mesh}; such a model is moved by a "
                "checkpoint"
            )
        return item

    def _plain(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers that are not sharded, by name."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor for name, tensor in named if id(tensor) not in self._indices}

    def _stepped_by(self, optimizer: Optimizer) -> dict[int, torch.Tensor]:
        """Return the optimizer's parameters that belong to the model, by their indices in it."""
        known = {*self._indices, *map(id, self._plain().values())}
        stepped = (param for group in optimizer.param_groups for param in group["params"])
        return {index: param for index, param in enumerate(stepped) if id(param) in known}

    # Memory for the new values ----------------------------------------------------------------

    def make_room(self, told: Told, target: Target) -> Tensors:
        """Return memory for the new values; the current values stay until :meth:`settle`."""
        is_new, plain, found = self.is_empty, self._plain(), Tensors()
        self._locals = self._new_shards(told, target)
        for key, item in told.items.items():
            if key[0] == "parameter":
                found[key] = self._locals[int(key[1])].detach()
            elif key[0] == "plain" and is_new:
                values = plain[str(key[1])].detach()
                if values.is_meta:
                    values = _torch.empty_like(values, device=self._device)
                found[key] = values.view(item.shape)
            elif key[0] != "plain" and (item.param is not None or is_new):
                like, sizes = self._like(key), item.shape
                if item.param is not None:
                    sizes = _sizes(item, target.placements[item.param])
                if like.shape != sizes:
                    like = like.new_zeros(()).expand(sizes)
                device = self._device if like.is_meta else like.device
                found[key] = _torch.without_values(
                    torch.empty_like(like, dtype=item.dtype, device=device, requires_grad=False)
                )
        return found

    @property
    def _device(self) -> torch.device:
        return self.groups[0].mesh.device

    def _new_shards(self, told: Told, target: Target) -> list[torch.Tensor]:
        """Plan all parameters for other ranks, and return memory for their local shards."""
        found = list[torch.Tensor]()
        for group in self.groups:
            shards = [self._new_shard(param, told, target) for param in group.params]
            with torch.inference_mode(False):
                buckets = build_buckets(group.params, shards)
            self._buckets.append(buckets)
            pairs = [pair for b in buckets for pair in zip(b.params, b.locals, strict=True)]
            locals_ = {id(param): local for param, local in pairs}
            found += [locals_[id(param)] for param in group.params]
        return found

    def _new_shard(self, param: ShardedParam, told: Told, target: Target) -> torch.Tensor:
        """Return a local shard without memory of its own, as its bucket has the memory.

        The parameter is planned for its new ranks; the DTensor is left as it is.
        """
        index = self._indices[id(param.sharded)]
        mesh, item = target.over[param], told.items["parameter", index]
        param.layout = plan_tensor(whole_on_meta(param), param.layout.dim, mesh.num_shards)
        param.mesh, param.placement, param.place = mesh, target.placements[index], None
        param.device = torch.device("cpu") if param.offload is not None else mesh.device
        param.forget_unsharded()
        numel = param.layout.param.local_numel(mesh.shard_rank)
        like = param.layout.local(torch.empty(numel, device="meta"), mesh.shard_rank)
        return torch.zeros((), dtype=item.dtype, device=param.device).expand(like.shape)

    def _like(self, key: Key) -> torch.Tensor:
        """Return the parameter of a gradient or a state."""
        if key[0] == "gradient":
            return self._locals[int(key[1])]
        stepped = self._stepped[int(key[1])][int(key[2])]
        index = self._indices.get(id(stepped))
        return stepped if index is None else self._locals[index]

    def stay(self) -> None:
        """Discard the plan for the new ranks, and restore the current one."""
        for param, before in zip(self.params, self._before, strict=True):
            param.__dict__.clear()
            param.__dict__.update(before)

    # Here or elsewhere ------------------------------------------------------------------------

    def settle(self, told: Told, tensors: Tensors, target: Target) -> None:
        """Put the model on the new ranks, on a rank that is one of them.

        Args:
            told: The description of the model.
            tensors: The tensors that :meth:`make_room` returned, filled.
            target: The new meshes.

        Collective: for optimizers of ``with_layout``, see ``LayoutOptimizer``.
        """
        is_new = self.is_empty
        for param, local in zip(self.params, self._locals, strict=True):
            spec = _torch.spec_with_dtype(param.sharded_spec, local.dtype)
            if _torch.local_tensor(param.sharded).is_meta:
                # It gets new memory, and stays the same object.
                made = _torch.from_local(local, spec)
                exchange(param.sharded, _torch.parameter_of(made, param.sharded.requires_grad))
            _torch.relocate(param.sharded, local, spec)
            param.hold(local)
        meshes = {id(p): plan["mesh"] for p, plan in zip(self.params, self._before, strict=True)}
        for group, buckets in zip(self.groups, self._buckets, strict=True):
            pairs = [(group.mesh, target.of_group(group))]
            pairs += [(meshes[id(param)], param.mesh) for param in group.params]
            group.relocate(buckets, pairs[0][1], dict.fromkeys(pairs))
            group.tree.forget_forwards()
        for key in told.items:
            if key[0] == "gradient":
                param = self.params[int(key[1])]
                shard = self._shown(key, told, tensors, param.sharded.grad)
                if param.sharded.grad is not shard:
                    assign_grad(param.sharded, shard)
            elif key[0] == "plain" and is_new:
                tensor = self._plain()[str(key[1])]
                if tensor.is_meta:
                    register_instead(self.model, tensor, tensors[key].view(tensor.shape))
        for place, optimizer in enumerate(self._optimizers):
            self._settle_states(place, optimizer, told, tensors)

    def _settle_states(
        self, place: int, optimizer: Optimizer, told: Told, tensors: Tensors
    ) -> None:
        is_new, stepped = not self._states, self._stepped[place]
        before = {} if is_new else self._states[place]
        states: dict[torch.Tensor, dict[str, Any]] = {
            param: dict(before.get(param, {})) for param in stepped.values() if param in before
        }
        for key in told.states:  # in the order in which full checkpoints gather
            if key[1] != place or not (is_new or key in tensors):
                continue
            param_states, name = states.setdefault(stepped[int(key[2])], {}), str(key[3])
            if key in tensors:
                param_states[name] = self._shown(key, told, tensors, param_states.get(name))
            else:
                value, is_on_device = told.values[key]
                param_states[name] = value.to(self._device) if is_on_device else value
        if is_new:
            for group, settings in zip(optimizer.param_groups, told.settings[place], strict=True):
                group.update({k: v for k, v in settings.items() if k != "params"})
        if isinstance(optimizer, LayoutOptimizer):
            optimizer.choose_owners()
            optimizer.take_states(states)
            return
        for param, param_states in states.items():
            optimizer.state[param].update(param_states)

    def _shown(self, key: Key, told: Told, tensors: Tensors, before: Any) -> torch.Tensor:
        """Return a gradient or a state as users see it: the previous object, if there was one."""
        item, local = told.items[key], tensors[key]
        if item.param is None:
            return local
        placement = self.params[item.param].placement
        meta = _torch.TensorMeta(torch.Size(item.shape), item.stride, item.dtype)
        spec = _torch.make_spec(placement.mesh, placements_of(placement.roles, item.dim), meta)
        if not isinstance(before, DTensor):
            return _torch.from_local(local, spec)
        _torch.relocate(before, local, spec)
        return before

    def leave(self, target: Target) -> None:
        """Leave the model to other ranks: this rank keeps no shards."""
        for optimizer, stepped in zip(self._optimizers, self._stepped, strict=True):
            if isinstance(optimizer, LayoutOptimizer):
                optimizer.forget_owners()
            for param in stepped.values():
                optimizer.state.pop(param, None)
        for index, sharded in enumerate(self.params):
            nothing = torch.empty(0, dtype=sharded.local.dtype, device=sharded.local.device)
            meta = _torch.spec_of(sharded.sharded).tensor_meta
            assert meta is not None
            spec = _torch.make_spec(*target.elsewhere(index), meta)
            sharded.sharded.grad = None
            sharded.forget_unsharded()
            _torch.relocate(sharded.sharded, nothing, spec)
            sharded.local, sharded.place = nothing, None
        for group in self.groups:
            group.leave()


def _sizes(item: Item, placement: ParamPlacement) -> tuple[int, ...]:
    """Return this rank's local shape of a tensor that is sharded like a parameter."""
    ground = Ground.of(placement.mesh, placement.roles)
    box, _ = ground.holding(item.shape, item.dim)[dist.get_rank()]
    return box.sizes
