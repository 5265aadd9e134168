"""Parameters that are stepped as whole blocks, each block by its owner."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.core.codec import codec_of
from composable_shard.errors import ShardError
from composable_shard.optim.blocks import (
    Block,
    Box,
    BucketPlan,
    Parcel,
    Route,
    Spread,
    route_of,
    spread_over,
    whole,
)
from composable_shard.optim.exchange import (
    Exchange,
    Move,
    Ranks,
    arrive,
    launch,
    part_of,
)

Factory = Callable[[list[dict[str, Any]]], Optimizer]
States = dict[str, Any]
Key = tuple[int, int]
"""The numbers of a parameter and of a block in it, see ``Block.key``."""


@dataclass(frozen=True)
class Param:
    """A parameter that is stepped.

    Attributes:
        name: Its name in the model.
        tensor: The sharded form, or a plain parameter.
    """

    name: str
    tensor: torch.Tensor

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh it is sharded over; ``None`` for a plain parameter."""
        return self.tensor.device_mesh if isinstance(self.tensor, DTensor) else None

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Its placements; empty for a plain parameter."""
        return self.tensor.placements if isinstance(self.tensor, DTensor) else ()

    @property
    def dims(self) -> tuple[int | None, ...]:
        """The dim that each axis of its mesh shards."""
        return tuple(getattr(placement, "dim", None) for placement in self.placements)

    @property
    def inner_axes(self) -> tuple[int, ...]:
        """The axes of its mesh that shard the parts left by later axes of the same dim."""
        parts = map(_torch.num_parts_of_strided, self.placements)
        return tuple(axis for axis, num_parts in enumerate(parts) if num_parts is not None)

    @property
    def is_in_boxes(self) -> bool:
        """Whether each rank holds a range of each dim."""
        extents, dims = () if self.mesh is None else self.mesh.shape, self.dims
        for axis, placement in enumerate(self.placements):
            num_parts = _torch.num_parts_of_strided(placement)
            if type(placement) not in (Shard, Replicate) and num_parts is None:
                return False
            later = zip(extents[axis + 1 :], dims[axis + 1 :], strict=True)
            expected = prod(extent for extent, dim in later if dim == dims[axis])
            if num_parts not in (None, expected):
                return False
        return True

    def local(self) -> torch.Tensor:
        """Return this rank's shard."""
        return _local(self.tensor)

    def spread(self, shape: Sequence[int] | None = None) -> Spread:
        """Return its parts on all ranks, or those of a state of another shape, cut by rows."""
        extents = () if self.mesh is None else self.mesh.shape
        if shape is None:
            return spread_over(self.tensor.shape, extents, self.dims, self.inner_axes)
        by_rows = tuple(None if dim is None else 0 for dim in self.dims)
        return spread_over(tuple(shape), extents, by_rows, self.inner_axes)

    def as_sharded(self, local: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Wrap this rank's part of a state that is sharded like it, or by rows."""
        if not isinstance(self.tensor, DTensor):
            return local
        if shape is None:
            return _torch.local_like(self.tensor, local)
        pairs = zip(self.placements, self.dims, strict=True)
        placements = tuple(p if dim is None else _torch.with_dim(p, 0) for p, dim in pairs)
        meta = torch.empty(torch.Size(shape), device="meta")
        tensor_meta = _torch.TensorMeta(meta.shape, meta.stride(), local.dtype)
        spec = _torch.make_spec(self.tensor.device_mesh, placements, tensor_meta)
        return _torch.from_local(local, spec)

    def local_of(self, state: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a state that is sharded like it, or full."""
        if isinstance(self.tensor, DTensor) and not isinstance(state, DTensor):
            return _torch.cut(state, self.tensor.device_mesh, self.placements)
        return _local(state)

    def is_like(self, name: str, state: Any) -> bool:
        """Return whether a state has the shape of the parameter and is no step count."""
        is_alike = isinstance(state, torch.Tensor) and state.shape == self.tensor.shape
        return is_alike and (state.ndim > 0 or name != "step")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return _torch.local_part(tensor).detach()


def reduced_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter, with the placements of the parameter.

    Collective: the reduction of a gradient that was accumulated without sync.
    """
    grad = param.grad
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
        return grad
    if grad.placements == param.placements:
        return grad
    reduced = grad.redistribute(placements=param.placements)
    return _torch.local_like(param, _torch.waited(_torch.local_tensor(reduced)))


def plan_bucket(
    params: Sequence[Param], routes: Sequence[Route], device: torch.device
) -> BucketPlan:
    """Return the messages and the memory of a step in which all trained parameters have gradients.

    Args:
        params: The parameters to which blocks refer.
        routes: The transfers of the blocks.
        device: The device of compute.
    """
    parcels = []
    for route in routes:
        param = params[route.block.param]
        if param.tensor.requires_grad:
            grad = param.tensor.grad
            grad_dtype = param.tensor.grad_dtype if grad is None else grad.dtype
            itemsize = route.block.itemsize if grad_dtype is None else grad_dtype.itemsize
            parcels.append(Parcel(route, itemsize, param.local().device != device))
    return BucketPlan(tuple(parcels))


@dataclass(frozen=True)
class Told:
    """The description of a block's state that its owner sends to the other ranks.

    Attributes:
        shape: The shape of a tensor; ``None`` for a scalar tensor or another value.
        dtype: The dtype of a tensor.
        is_like: Whether the tensor has the shape of the block.
        value: A scalar tensor, on the CPU, or another value.
        refused: The type of a state that cannot be saved in shards.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    is_like: bool = False
    value: Any = None
    refused: str | None = None

    @staticmethod
    def of(state: Any, block: Block) -> Told:
        """Describe a state of a block."""
        if isinstance(state, torch.Tensor):
            if state.ndim:
                shape = tuple(state.shape)
                return Told(shape, state.dtype, shape == block.shape)
            return Told(value=state.cpu().clone())
        if state is None or isinstance(state, (bool, int, float, str)):
            return Told(value=state)
        return Told(refused=type(state).__name__)


AllTold = dict[Key, dict[str, Told]]
"""The descriptions of all states of a rule's blocks, by block and name."""


def shaped_like_blocks(told: AllTold) -> set[tuple[int, str]]:
    """Return the parameter and the name of each state that has the shape of every block."""
    num_blocks = Counter(place for place, _ in told)
    counts = Counter(
        (place, name)
        for (place, _), facts in told.items()
        for name, fact in facts.items()
        if fact.is_like
    )
    return {pair for pair, count in counts.items() if count == num_blocks[pair[0]]}


class OwnedBucket:
    """Blocks that send their values and gradients to their owners in one message.

    Attributes:
        ranks: The ranks that hold them.
        params: The parameters of the rule, to which blocks refer.
        optimizer: The stock optimizer of the blocks that this rank owns.
    """

    def __init__(
        self, params: Sequence[Param], blocks: Sequence[Block], ranks: Ranks, factory: Factory
    ) -> None:
        self.params, self.ranks = params, ranks
        self._routes = {block.key: route_of(block, ranks.rank) for block in blocks}
        self._stand_ins = {
            key: stand_in(params[route.block.param].tensor, route.block.box, ranks.device)
            for key, route in self._routes.items()
            if route.is_owner
        }
        self._owned = {key: tensor.detach() for key, tensor in self._stand_ins.items()}
        self._factory = factory
        self.optimizer = factory([{"params": list(self._owned.values())}])
        self._values: list[Move] = []
        self._grads: list[Move] = []
        self._exchange: Exchange | None = None

    def plan(self) -> BucketPlan:
        """Return the messages and the memory of a step; see :func:`plan_bucket`."""
        return plan_bucket(self.params, list(self._routes.values()), self.ranks.device)

    # A step: ``schedule`` interleaves these methods with those of other buckets ----------------

    def launch(self) -> None:
        """Launch the exchange of values and gradients to the owners."""
        self._values, self._grads = [], []
        places = dict.fromkeys(place for place, _ in self._routes)
        grads = {place: reduced_grad(self.params[place].tensor) for place in places}
        for (place, _), route in self._routes.items():
            grad = grads[place]
            if grad is not None:
                self._values.append(Move(route, self.params[place].local()))
                self._grads.append(Move(route, _local(grad)))
        self._exchange = launch(self.ranks, self._values + self._grads, to_owner=True)

    def arrive(self) -> None:
        """Wait for the exchange; give the owners whole values and gradients."""
        if self._exchange is not None:
            self._exchange.wait()  # frees the sent message before whole blocks are allocated
        values, grads = (list(map(self._with_whole, some)) for some in (self._values, self._grads))
        arrive(self.ranks, self._exchange, values + grads, to_owner=True)
        for value, grad in zip(values, grads, strict=True):
            if value.whole is not None and grad.whole is not None:
                tensor = self._owned[value.route.block.key]
                tensor.data = value.whole
                set_grad(tensor, grad.whole)
        self._exchange, self._grads = None, []

    def compute(self) -> None:
        """Step the blocks that this rank owns, and launch the exchange back to the shards."""
        if self._values:
            self.optimizer.step()
        for tensor in self._owned.values():
            tensor.grad = None
        back = [replace(one, whole=self._owned.get(one.route.block.key)) for one in self._values]
        self._exchange = launch(self.ranks, back, to_owner=False)
        for key, tensor in self._owned.items():
            tensor.data = self._stand_ins[key]

    def finish(self) -> None:
        """Wait for the exchange; update the local shards."""
        arrive(self.ranks, self._exchange, self._values, to_owner=False)
        self._values, self._exchange = [], None

    def _with_whole(self, move: Move) -> Move:
        """Give the owner memory for the whole block, or its shard if that is the whole block."""
        route, local = move.route, move.local
        if not route.is_owner:
            return move
        if route.is_whole and route.held_locally is not None and local.device == self.ranks.device:
            return replace(move, whole=_matrix(part_of(local, route.held_locally)))
        param = self.params[route.block.param].tensor
        shape, strides = route.block.shape, _strides(param.shape, param.stride(), route.block.box)
        whole = torch.empty_strided(shape, strides, dtype=local.dtype, device=self.ranks.device)
        return replace(move, whole=whole)

    # States -----------------------------------------------------------------------------------

    def tell(self) -> AllTold:
        """Describe the states of the blocks that this rank owns."""
        return {
            key: {name: Told.of(state, self._routes[key].block) for name, state in states.items()}
            for key, states in self._states().items()
        }

    def _states(self) -> dict[Key, States]:
        """Return the states of the blocks that this rank owns, as their optimizer saves them."""
        saved = self.optimizer.state_dict()["state"]
        places = enumerate(self._owned)
        return {key: taken_apart(saved[place]) for place, key in places if place in saved}

    def save(self, told: AllTold, like: set[tuple[int, str]], saved: Sequence[States]) -> None:
        """Add the states of the blocks to those of their parameters. Collective: an exchange.

        Args:
            told: The descriptions of all owners.
            like: See :func:`shaped_like_blocks`.
            saved: The states of each parameter of the rule; its blocks may be in many buckets.
        """
        own_states, moves = self._states(), list[Move]()
        for key in sorted(told.keys() & self._routes.keys()):
            place, number = key
            param, states = self.params[place], saved[place]
            for name, fact in sorted(told[key].items()):
                if fact.refused is not None:
                    raise ShardError(
                        f"Expected states of '{param.name}' that are tensors or numbers, got "
                        f"'{name}', a {fact.refused}, which cannot be saved in shards"
                    )
                if fact.shape is None:
                    states[f"{name}[{number}]"] = fact.value
                    continue
                is_like = (place, name) in like
                saved_as = name if is_like else f"{name}[{number}]"
                if saved_as not in states:
                    states[saved_as] = self._new_state(param, fact, is_like)
                route = self._routes[key] if is_like else self._own_route(key, fact.shape)
                state = own_states.get(key, {}).get(name)
                moves.append(Move(route, _local(states[saved_as]), state))
        exchange = launch(self.ranks, moves, to_owner=False)
        arrive(self.ranks, exchange, moves, to_owner=False)

    def load(self, loaded: Sequence[States]) -> None:
        """Load the states that :meth:`save` returned. Collective: an exchange.

        Args:
            loaded: The states of each parameter of the rule.
        """
        moves, found = list[Move](), defaultdict[Key, States](dict)
        for key, route in self._routes.items():
            place, own_number = key
            param = self.params[place]
            for saved_as, state in sorted(loaded[place].items()):
                name, number = _name_and_number(saved_as)
                if number not in (None, own_number):
                    continue
                if number is None and param.is_like(name, state):
                    moves.append(self._with_whole(Move(route, param.local_of(state).clone())))
                elif isinstance(state, torch.Tensor) and state.ndim:
                    moves.append(self._move_of_own_shape(key, state))
                else:
                    found[key][name] = state.clone() if isinstance(state, torch.Tensor) else state
                    continue
                found[key][name] = moves[-1].whole
        exchange = launch(self.ranks, moves, to_owner=True)
        arrive(self.ranks, exchange, moves, to_owner=True)
        states_of = {
            place: put_together(found[key], self._factory, tensor)
            for place, (key, tensor) in enumerate(self._owned.items())
            if key in found
        }
        whole = {**self.optimizer.state_dict(), "state": states_of}
        load_states(self.optimizer.load_state_dict, whole, {})

    def _new_state(self, param: Param, fact: Told, is_like: bool) -> torch.Tensor:
        """Return memory for a state, sharded like the parameter or by rows."""
        if is_like:
            return param.as_sharded(torch.empty_like(param.local(), dtype=fact.dtype))
        assert fact.shape is not None
        sizes = param.spread(fact.shape).boxes[self.ranks.rank].sizes
        local = torch.empty(sizes, dtype=fact.dtype, device=param.local().device)
        return param.as_sharded(local, fact.shape)

    def _move_of_own_shape(self, key: Key, state: torch.Tensor) -> Move:
        route, block = self._own_route(key, state.shape), None
        if route.is_owner:
            block = torch.empty(state.shape, dtype=state.dtype, device=self.ranks.device)
        part = route.block.spread.boxes[self.ranks.rank]
        return Move(
            route, _local(state) if isinstance(state, DTensor) else part_of(state, part), block
        )

    def _own_route(self, key: Key, shape: Sequence[int]) -> Route:
        """Return the transfers of a state with another shape than its block."""
        block = self._routes[key].block
        spread = self.params[block.param].spread(shape)
        return route_of(replace(block, box=whole(shape), spread=spread), self.ranks.rank)


def stand_in(param: torch.Tensor, box: Box, device: torch.device) -> torch.Tensor:
    """Return a tensor of NaN in the shape of a block, which takes no memory."""
    nan = torch.full((), torch.nan, dtype=param.dtype, device=device)
    return nan.expand(box.sizes[-2:])


def _matrix(part: torch.Tensor) -> torch.Tensor:
    """View a part of a stack that is one matrix as a matrix."""
    return part[(0,) * max(0, part.ndim - 2)]


@lru_cache(maxsize=1024)
def _strides(shape: torch.Size, strides: tuple[int, ...], box: Box) -> tuple[int, ...]:
    """Return strides for a block alone, with the dims in the order of its parameter's strides."""
    meta = torch.empty_strided(shape, strides, device="meta")
    return torch.empty_like(_matrix(part_of(meta, box))).stride()


def set_grad(tensor: torch.Tensor, grad: torch.Tensor) -> None:
    """Set the gradient of a tensor, possibly of another dtype."""
    if grad.dtype != tensor.dtype:
        tensor.grad_dtype = None
    tensor.grad = grad


def _name_and_number(key: str) -> tuple[str, int | None]:
    """Return the name of the state saved as ``key``, and its block if it has one."""
    found = re.fullmatch(r"(.*)\[(\d+)\]", key)
    return (key, None) if found is None else (found[1], int(found[2]))


def joined(states: States) -> States:
    """Save a value under its plain name if it is equal for all blocks of the parameter."""
    values = defaultdict[str, States](dict)
    for key, state in states.items():
        if not isinstance(state, torch.Tensor) or not state.ndim:
            values[_name_and_number(key)[0]][key] = state
    for name, several in values.items():
        first, *others = several.values()
        if all(other == first for other in others):
            states = {name if k in several else k: v for k, v in states.items()}
    return states


# States as optimizers save and load them ----------------------------------------------------------


def taken_apart(states: States) -> States:
    """Replace dicts and wrapper subclasses by their contents, under names with dots."""
    found: States = {}
    for name, state in states.items():
        codec = codec_of(state) if isinstance(state, torch.Tensor) else None
        if codec is not None:
            state = dict(zip(codec.names, codec.parts(state), strict=True))
        inner = taken_apart(state) if isinstance(state, dict) else None
        found |= {name: state} if inner is None else {f"{name}.{n}": v for n, v in inner.items()}
    return found


def put_together(parts: States, factory: Factory, like: torch.Tensor) -> States:
    """Undo :func:`taken_apart`; the states of a first step show their structure.

    Args:
        parts: The result of :func:`taken_apart`.
        factory: Makes the optimizer.
        like: A tensor with the shape, dtype and device of the stepped tensor.
    """
    if not any("." in name for name in parts):
        return parts
    first = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    first.grad = torch.zeros_like(first)
    optimizer = factory([{"params": [first]}])
    with torch.random.fork_rng([] if first.device.type == "cpu" else [first.device]):
        optimizer.step()
    return _composed(parts, optimizer.state_dict()["state"][0])


def _composed(parts: States, like: States) -> States:
    found = dict(parts)
    for name, state in like.items():
        codec = codec_of(state) if isinstance(state, torch.Tensor) else None
        begin = f"{name}."
        own = {key.removeprefix(begin): v for key, v in parts.items() if key.startswith(begin)}
        if own and (codec is not None or isinstance(state, dict)):
            found = {key: part for key, part in found.items() if not key.startswith(begin)}
            if codec is None:
                found[name] = _composed(own, state)
            else:
                found[name] = codec.rebuild(own[part] for part in codec.names)
    return found


Counts = dict[torch.Tensor, int]
"""The numbers among states, with their versions."""


def only_makes_states(optimizer: Optimizer) -> bool:
    """Return whether torch takes this step only to create the optimizer's states."""
    groups = optimizer.param_groups
    if optimizer.state or any(group.get("lr", 1) for group in groups):
        return False
    grads = (param.grad for group in groups for param in group["params"])
    return not any(_local(grad).any() for grad in grads if grad is not None)


def _numbers(states: States) -> list[torch.Tensor]:
    return [value for value in states.values() if type(value) is torch.Tensor and not value.ndim]


def counts_of(all_states: Mapping[torch.Tensor, States]) -> Counts:
    """Return the numbers among states as they are now."""
    return {v: v._version for states in all_states.values() for v in _numbers(states)}


def load_states(
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    made: Counts,
) -> None:
    """Load a state dict without changing the dtypes of the states.

    Torch's ``Optimizer`` casts states to the dtypes of the parameters, so it loads all but the
    states here. An optimizer with a ``load_state_dict`` of its own uses that.

    Args:
        load: The method ``load_state_dict`` of an optimizer.
        state_dict: The state dict.
        made: The numbers that a step created for :func:`only_makes_states`. A number that comes
            back unchanged belongs to a parameter for which nothing was loaded; that parameter
            stays without states.
    """
    optimizer: Optimizer = load.__self__  # type: ignore[attr-defined]
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    own = ((group, param) for group in optimizer.param_groups for param in group["params"])
    params = dict(zip(keys, own, strict=False))
    all_states = dict(state_dict["state"])
    for key, states in state_dict["state"].items():
        numbers = _numbers(states)
        if numbers and all(made.get(number) == number._version for number in numbers):
            del all_states[key]
    taken = defaultdict[Any, Any](dict)

    def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        for key, states in given["state"].items():
            group, param = params.get(key, ({}, None))
            if param is None:
                taken[key] = states
                continue
            on_host = () if group.get("fused") or group.get("capturable") else ("step",)
            for name, state in states.items():
                is_moved = isinstance(state, torch.Tensor) and name not in on_host
                taken[param][name] = state.to(param.device) if is_moved else state
        return {**given, "state": {}}

    def put(_: Optimizer) -> None:
        optimizer.__setstate__({"state": taken})

    hooks = []
    if load.__func__ is Optimizer.load_state_dict:  # type: ignore[attr-defined]
        hooks.append(optimizer.register_load_state_dict_pre_hook(take))  # behind those of users
        hooks.append(optimizer.register_load_state_dict_post_hook(put, prepend=True))  # before them
    try:
        load({**state_dict, "state": all_states})
    finally:
        for hook in hooks:
            hook.remove()


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step, with gradients enabled."""
    with torch.enable_grad():
        return None if closure is None else closure()
