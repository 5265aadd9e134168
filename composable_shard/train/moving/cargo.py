"""What of a model and its optimizers moves to other ranks, and what becomes of this rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.core.codec import (
    Codec,
    carry_hooks,
    codec_of,
    has_extension,
    has_grad_extension,
    needs_extension,
)
from composable_shard.core.group import ON_OTHER_RANKS, ParamGroup
from composable_shard.core.reduction import assign_grad
from composable_shard.core.storage import ShardedParam
from composable_shard.errors import ShardError
from composable_shard.optim.layouts import LayoutOptimizer
from composable_shard.train.moving import relocation
from composable_shard.train.moving.ground import Cut, Ground, cut_of
from composable_shard.train.moving.target import Target

# What tensors are made of: tensor subclasses move as the plain tensors in them --------------------


class Composition(NamedTuple):
    """Of what a tensor is made.

    Attributes:
        codec: How its class takes it apart and makes it again; ``None`` for a plain tensor.
    """

    codec: Codec | None = None

    @classmethod
    def of(cls, what: str, tensor: torch.Tensor) -> Composition:
        """Return of what a tensor is made.

        Raises:
            ShardError: If it is not plain, or made of plain tensors of its shape.
        """
        codec = codec_of(tensor)
        leaves = [tensor] if codec is None else codec.parts(tensor)
        for leaf in leaves:
            brings_hooks = has_extension(leaf) or has_grad_extension(leaf)
            if _torch.is_subclass(leaf) or (brings_hooks and type(leaf) is not torch.Tensor):
                raise ShardError(
                    f"Expected {what} to be a plain tensor or made of such (__tensor_flatten__), "
                    f"got {type(leaf).__name__}; such a model is moved by a checkpoint"
                )
        if any(leaf.shape != tensor.shape for leaf in leaves):
            raise ShardError(
                f"Expected the inner tensors of {what}, a {type(tensor).__name__}, to have its "
                f"shape {list(tensor.shape)}, got {[list(leaf.shape) for leaf in leaves]}; such a "
                "model is moved by a checkpoint"
            )
        return cls(codec)

    def made_of(self, what: str, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make a tensor of plain ones, as ``_torch.leaves`` names them.

        Raises:
            ShardError: If the class makes something else of them.
        """
        if self.codec is None:
            return leaves[0]
        made = self.codec.rebuild(dict(zip(self.codec.names, leaves, strict=True)))
        like = leaves[0]
        if type(made) is not self.codec.kind or made.shape != like.shape:
            raise ShardError(
                f"Expected {self.codec.kind.__name__} of {what} to be made of inner tensors of "
                f"shape {list(like.shape)}, got {type(made).__name__} of shape "
                f"{list(made.shape)}; such a model is moved by a checkpoint"
            )
        return made


# What the ranks tell each other -------------------------------------------------------------------


Key = tuple[str | int, ...]
"""What a tensor is of a model, alike on all ranks: ``("parameter", 3)``, say."""


class Item(NamedTuple):
    """A tensor that moves, as a rank describes it to one that is to have it.

    Attributes:
        shape: Its global shape.
        stride: Its global strides.
        dtype: Its dtype.
        dtypes: Those of the plain tensors that it is made of.
        param: The parameter that it is cut like; ``None`` for what every rank has as a whole.
        cut: How it is cut, if it is.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    dtypes: tuple[torch.dtype, ...]
    param: int | None = None
    cut: Cut = Cut()


class Told(NamedTuple):
    """What a rank that has a model tells one that is to have it.

    Attributes:
        items: What moves.
        values: Numbers among the states of optimizers, which are told and not sent, and whether
            they lie on the device.
        settings: Those of the parameter groups of each optimizer.
        compositions: Of what the items are made that are tensor subclasses.
        orders: For each optimizer its parameters that have states, by their numbers in it, and the
            names of these, as they follow each other there.
    """

    items: dict[Key, Item]
    values: dict[Key, tuple[Any, bool]]
    settings: list[list[dict[str, Any]]]
    compositions: dict[Key, Composition]
    orders: list[dict[int, list[str]]]

    def facts(self) -> list[str]:
        """Describe what must be the same on all ranks that have the model."""
        return [f"{key}: {item}" for key, item in self.items.items()]


Tensors = dict[Key, list[torch.Tensor]]
"""The plain tensors that those of this rank are made of: of local shards, or whole ones."""


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
        self._meshes = {id(param): param.mesh for param in self.params}
        self._units: list[list[Any]] = []
        self._locals: list[torch.Tensor] = []

    @property
    def is_empty(self) -> bool:
        """Whether it has no values: they are to come, or have gone to other ranks."""
        has_gone = any(group.absence == ON_OTHER_RANKS for group in self.groups)
        return has_gone or any(param.local.is_meta for param in self.params)

    def grounds(self) -> list[Ground]:
        """Return where each parameter lies; nothing if this rank has no values."""
        if self.is_empty:
            return []
        places = (param.placement for param in self.params)
        return [Ground.of(place.mesh, place.roles) for place in places]

    def told(self) -> tuple[Told, Tensors]:
        """Describe what this rank has, and return it.

        Raises:
            ShardError: If something of it cannot be moved.

        Collective: of optimizers whose states lie with owners, see ``LayoutOptimizer.state_dict``.
        """
        told, tensors = Told({}, {}, [], {}, []), Tensors()

        def add(key: Key, value: Any, param: int | None = None) -> None:
            if isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.ndim):
                item, composition = self._described(key, value, param)
                told.items[key], told.compositions[key] = item, composition
                leaves = _torch.leaves(_torch.local_part(value))
                tensors[key] = [leaf.detach() for leaf in leaves]
            elif isinstance(value, torch.Tensor):
                told.values[key] = value.cpu(), value.device.type != "cpu"
            else:
                told.values[key] = value, False

        for index, param in enumerate(self.params):
            add(("parameter", index), param.sharded, index)
            if param.sharded.grad is not None:
                add(("gradient", index), param.sharded.grad, index)
        for name, tensor in self._plain().items():
            if not isinstance(tensor, DTensor):
                add(("plain", name), tensor[None] if not tensor.ndim else tensor)
        for place, optimizer in enumerate(self._optimizers):
            states = _states_of(optimizer)
            self._states.append(states)
            told.orders.append(self._order(self._stepped[place], states))
            for index, stepped in self._stepped[place].items():
                for name in sorted(told.orders[place].get(index, ())):
                    value = states[stepped][name]
                    add(("state", place, index, name), value, self._indices.get(id(stepped)))
            settings = [dict(group) for group in optimizer.param_groups]
            told.settings.append([{**group, "params": []} for group in settings])
        return told, tensors

    def _order(
        self, stepped: Mapping[int, torch.Tensor], states: Mapping[torch.Tensor, dict[str, Any]]
    ) -> dict[int, list[str]]:
        """Return which states of an optimizer are told, in their order; see :class:`Told`."""
        numbers = {id(param): index for index, param in stepped.items()}
        order: dict[int, list[str]] = {}
        for param, own in states.items():
            if id(param) in numbers:
                is_moved = id(param) in self._indices  # one that is not keeps its DTensors
                order[numbers[id(param)]] = [
                    name
                    for name, value in own.items()
                    if is_moved or not isinstance(value, DTensor)
                ]
        return order

    def check_joining(self) -> None:
        """Raise ``ShardError`` if something of this rank could not be given to one that joins."""
        for name, tensor in self._plain().items():
            if isinstance(tensor, DTensor):
                raise ShardError(
                    f"Expected '{name}', a DTensor, to be sharded by fully_shard for the model to "
                    "move to more ranks, got one that is not; such a model is moved by a checkpoint"
                )

    def _described(
        self, key: Key, tensor: torch.Tensor, param: int | None
    ) -> tuple[Item, Composition]:
        local = _torch.local_part(tensor)
        composition = Composition.of(self._what(key), local)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        dtypes = tuple(leaf.dtype for leaf in _torch.leaves(local))
        item = Item(shape, stride, tensor.dtype, dtypes)
        if param is None or not isinstance(tensor, DTensor):
            return item, composition
        placement = self.params[param].placement
        cut = cut_of(self._what(key), tensor, placement)
        box = Ground.of(placement.mesh, placement.roles).holding(shape, cut).box(dist.get_rank())
        assert box is not None
        if box.sizes != local.shape:
            raise ShardError(
                f"Expected shape {list(box.sizes)} of {self._what(key)} on this rank, got "
                f"{list(local.shape)}; such a model is moved by a checkpoint"
            )
        return item._replace(param=param, cut=cut), composition

    def _what(self, key: Key) -> str:
        """Return what messages call a tensor."""
        if key[0] in ("parameter", "gradient"):
            name = self.params[int(key[1])].name
            return f"{key[0]} '{name}'" if key[0] == "parameter" else f"the gradient of '{name}'"
        if key[0] == "plain":
            return f"'{key[1]}'"
        stepped = self._stepped[int(key[1])][int(key[2])]
        index = self._indices.get(id(stepped))
        of = f" of '{self.params[index].name}'" if index is not None else ""
        return f"state '{key[3]}'{of}"

    def _plain(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers that are not sharded, by name."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor for name, tensor in named if id(tensor) not in self._indices}

    def _stepped_by(self, optimizer: Optimizer) -> dict[int, torch.Tensor]:
        """Return the parameters of an optimizer that are the model's, by their numbers in it."""
        own = {*self._indices, *map(id, self._plain().values())}
        stepped = (param for group in optimizer.param_groups for param in group["params"])
        return {index: param for index, param in enumerate(stepped) if id(param) in own}

    # Memory for what is to come ---------------------------------------------------------------

    def make_room(self, told: Told, target: Target) -> Tensors:
        """Return memory for what this rank is to have; what it has stays until :meth:`settle`.

        Args:
            told: What moves.
            target: Where to.

        Raises:
            ShardError: If a tensor subclass cannot be made anew.
        """
        is_new, plain = self.is_empty, self._plain()
        self._locals = self._new_shards(told, target)
        found = Tensors()
        for key, item in told.items.items():
            if key[0] == "parameter":
                leaves = _torch.leaves(self._locals[int(key[1])])
                found[key] = [leaf.detach() for leaf in leaves]
            elif key[0] == "plain" and is_new:
                values = plain[str(key[1])].detach()
                if values.is_meta:
                    values = _torch.empty_like(values, device=self._device)
                found[key] = [leaf.view(item.shape) for leaf in _torch.leaves(values)]
            elif key[0] != "plain" and (item.param is not None or is_new):
                like = _torch.leaves(self._like(key))[0]
                sizes = self._sizes(item, target)
                if like.shape != sizes:
                    like = like.new_zeros(()).expand(sizes)
                device = self._device if like.is_meta else like.device
                found[key] = [
                    _torch.without_values(torch.empty_like(like, dtype=dtype, device=device))
                    for dtype in item.dtypes
                ]
        return found

    @property
    def _device(self) -> torch.device:
        return self.groups[0].mesh.device

    def _sizes(self, item: Item, target: Target) -> tuple[int, ...]:
        """Return the shape of what this rank is to have."""
        if item.param is None:
            return item.shape
        placement = target.placements[item.param]
        ground = Ground.of(placement.mesh, placement.roles)
        box = ground.holding(item.shape, item.cut).box(dist.get_rank())
        assert box is not None
        return box.sizes

    def _new_shards(self, told: Told, target: Target) -> list[torch.Tensor]:
        """Plan all parameters for other ranks, and return memory for their local shards."""
        found: list[torch.Tensor] = []
        for group in self.groups:
            shards: list[torch.Tensor] = []
            for param in group.params:
                index = len(found) + len(shards)
                local, key = param.local, ("parameter", index)
                relocation.replan(param, target.over[index], target.placements[index])
                item, composition = told.items[key], told.compositions[key]
                shards.append(self._new_shard(param, local, item, composition))
            with torch.inference_mode(False):
                units, locals_ = relocation.build(group.params, shards)
            self._units.append(units)
            found += locals_
        return found

    def _new_shard(
        self, param: ShardedParam, local: torch.Tensor, item: Item, composition: Composition
    ) -> torch.Tensor:
        """Return a local shard: of a plain tensor without memory, which its bucket has."""
        like = relocation.local_shard_on_meta(param)
        if composition.codec is None and not needs_extension(local):
            return torch.zeros((), dtype=item.dtype, device=param.device).expand(like.shape)
        leaves = [
            _torch.without_values(torch.empty_like(like, dtype=dtype, device=param.device))
            for dtype in item.dtypes
        ]
        made = composition.made_of(f"parameter '{param.name}'", leaves)
        carry_hooks(local, made)
        return made

    def _like(self, key: Key) -> torch.Tensor:
        """Return the tensor beside which a gradient or a state lies."""
        if key[0] == "gradient":
            return self._locals[int(key[1])]
        stepped = self._stepped[int(key[1])][int(key[2])]
        index = self._indices.get(id(stepped))
        return stepped if index is None else self._locals[index]

    def stay(self) -> None:
        """Forget what was planned: everything is as it was."""
        for param, before in zip(self.params, self._before, strict=True):
            param.__dict__.clear()
            param.__dict__.update(before)

    # What becomes of it -----------------------------------------------------------------------

    def settle(self, told: Told, tensors: Tensors, target: Target) -> None:
        """Let the model lie on other ranks, of which this is one.

        Args:
            told: What has moved.
            tensors: What :meth:`make_room` returned, filled.
            target: Where to.

        Collective: of optimizers whose states lie with owners, see ``LayoutOptimizer``.
        """
        is_new = self.is_empty
        for param, local in zip(self.params, self._locals, strict=True):
            relocation.settle_param(param, local)
        for group, units in zip(self.groups, self._units, strict=True):
            pairs = [(self._meshes[id(param)], param.mesh) for param in group.params]
            pairs = [(group.mesh, target.of_group(group)), *pairs]
            group.relocate(units, pairs[0][1], dict.fromkeys(pairs))
            group.tree.forget_forwards()
        for key in told.items:
            if key[0] == "gradient":
                param = self.params[int(key[1])]
                shard = self._shown(key, told, tensors, param.sharded.grad)
                if param.sharded.grad is not shard:
                    assign_grad(param.sharded, shard)
            elif key[0] == "plain" and is_new:
                values = told.compositions[key].made_of(self._what(key), tensors[key])
                self._put_plain(str(key[1]), values)
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
        if is_new:  # in the order of the others: full checkpoints gather one after the other
            for index, names in told.orders[place].items():
                states[stepped[index]] = dict.fromkeys(names)
        for key in told.items:
            if key[:2] == ("state", place) and key in tensors:
                own, name = states[stepped[int(key[2])]], str(key[3])
                own[name] = self._shown(key, told, tensors, own.get(name))
        for key, (value, is_on_device) in told.values.items():
            if key[:2] == ("state", place) and is_new:
                own = states[stepped[int(key[2])]]
                own[str(key[3])] = value.to(self._device) if is_on_device else value
        if is_new:
            for group, settings in zip(optimizer.param_groups, told.settings[place], strict=True):
                group.update({k: v for k, v in settings.items() if k != "params"})
        if isinstance(optimizer, LayoutOptimizer):
            optimizer.choose_owners()
            optimizer.take_states(states)
            return
        for param, own in states.items():
            optimizer.state[param].update(own)

    def _shown(self, key: Key, told: Told, tensors: Tensors, before: Any) -> torch.Tensor:
        """Return a gradient or a state as users see it: the object of before, if there was one."""
        item = told.items[key]
        local = told.compositions[key].made_of(self._what(key), tensors[key])
        if item.param is None:
            return local
        placement = self.params[item.param].placement
        meta = _torch.TensorMeta(torch.Size(item.shape), item.stride, item.dtype)
        spec = _torch.make_spec(placement.mesh, item.cut.placements(placement.roles), meta)
        if not isinstance(before, DTensor):
            return _torch.from_local(local, spec)
        _torch.relocate(before, local, spec)
        return before

    def _put_plain(self, name: str, values: torch.Tensor) -> None:
        """Register a buffer, or give a parameter memory, that had none."""
        tensor = self._plain()[name]
        if not tensor.is_meta:
            return
        whole = values.view(tensor.shape)
        if isinstance(tensor, nn.Parameter):
            relocation.exchange(tensor, nn.Parameter(whole, requires_grad=tensor.requires_grad))
            return
        for module in self.model.modules():
            for attribute, buffer in module._buffers.items():
                if buffer is tensor:
                    module._buffers[attribute] = whole

    def leave(self, target: Target) -> None:
        """Let the model lie on other ranks alone: this one has nothing of what is sharded."""
        for optimizer, stepped in zip(self._optimizers, self._stepped, strict=True):
            if isinstance(optimizer, LayoutOptimizer):
                optimizer.forget_owners()
            for param in stepped.values():
                optimizer.state.pop(param, None)
        for index, sharded in enumerate(self.params):
            nothing = torch.empty(0, dtype=sharded.local.dtype, device=sharded.local.device)
            carry_hooks(sharded.local, nothing)
            meta = _torch.spec_of(sharded.sharded).tensor_meta
            assert meta is not None
            spec = _torch.make_spec(*target.elsewhere(index), meta)
            relocation.leave_param(sharded, nothing, spec)
        for group in self.groups:
            group.leave()


def _states_of(optimizer: Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
    if isinstance(optimizer, LayoutOptimizer):
        return optimizer.sharded_states()
    return optimizer.state
