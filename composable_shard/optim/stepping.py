"""Parameters that are stepped as whole blocks, each by the rank that owns it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.errors import ShardError
from composable_shard.optim.blocks import Block, Box, Route, Spread, route_of, spread_over, whole
from composable_shard.optim.exchange import (
    Exchange,
    Move,
    Ranks,
    arrive_at_owners,
    arrive_at_shards,
    launch_to_owners,
    launch_to_shards,
    part_of,
)
from composable_shard.optim.plan import BucketPlan, Parcel

Factory = Callable[[list[dict[str, Any]]], Optimizer]
States = dict[str, Any]


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
    def is_trained(self) -> bool:
        """Whether it has gradients."""
        return self.tensor.requires_grad

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh it is sharded over; ``None`` for a plain parameter."""
        return self.tensor.device_mesh if isinstance(self.tensor, DTensor) else None

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How it lies on its mesh."""
        return self.tensor.placements if isinstance(self.tensor, DTensor) else ()

    @property
    def dims(self) -> tuple[int | None, ...]:
        """The dim that each axis of its mesh shards."""
        return tuple(getattr(placement, "dim", None) for placement in self.placements)

    @property
    def inner_axes(self) -> list[int]:
        """The axes of its mesh that shard what later ones have left of the same dim."""
        parts = map(_torch.num_parts_of_strided, self.placements)
        return [axis for axis, num_parts in enumerate(parts) if num_parts is not None]

    @property
    def is_in_boxes(self) -> bool:
        """Whether each rank holds a range of each dim."""
        for axis, placement in enumerate(self.placements):
            num_parts, dim = _torch.num_parts_of_strided(placement), self.dims[axis]
            if type(placement) not in (Shard, Replicate) and num_parts is None:
                return False
            later = range(axis + 1, len(self.placements))
            extents = [self.extent(other) for other in later if self.dims[other] == dim]
            if num_parts not in (None, prod(extents)):
                return False
        return True

    def extent(self, axis: int) -> int:
        """Return how many ranks an axis of its mesh has."""
        return 1 if self.mesh is None else self.mesh.size(axis)

    def local(self) -> torch.Tensor:
        """Return what this rank holds of it."""
        return _local(self.tensor)

    def sharded_grad(self) -> torch.Tensor | None:
        """Return its gradient, which lies as it does.

        Collective: the reduction of a gradient that was accumulated without sync.
        """
        grad = self.tensor.grad
        if isinstance(grad, DTensor) and grad.placements != self.placements:
            return grad.redistribute(placements=self.placements)
        return grad

    def local_grad(self) -> torch.Tensor | None:
        """Return what this rank holds of its gradient; see :meth:`sharded_grad`."""
        grad = self.sharded_grad()
        return None if grad is None else _local(grad)

    def spread(self, shape: Sequence[int] | None = None) -> Spread:
        """Return how it lies on its ranks, or a state of another shape, which is cut by rows."""
        extents = () if self.mesh is None else self.mesh.shape
        if shape is None:
            return spread_over(self.tensor.shape, extents, self.dims, self.inner_axes)
        by_rows = [None if dim is None else 0 for dim in self.dims]
        return spread_over(shape, extents, by_rows, self.inner_axes)

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
        """Tell whether a state has an element for each of the parameter's: no count of steps."""
        is_alike = isinstance(state, torch.Tensor) and state.shape == self.tensor.shape
        return is_alike and (state.ndim > 0 or name != "step")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return _torch.local_part(tensor).detach()


def plan_bucket(
    params: Sequence[Param], routes: Sequence[Route], device: torch.device
) -> BucketPlan:
    """Return what a step sends and occupies, if all that is trained has a gradient.

    Args:
        params: Those to which blocks refer.
        routes: The blocks.
        device: Where they are computed.
    """
    parcels = []
    for route in routes:
        param = params[route.block.param]
        if param.is_trained:
            local, grad = param.local(), param.tensor.grad
            grad_dtype = param.tensor.grad_dtype if grad is None else grad.dtype
            grad_itemsize = local.itemsize if grad_dtype is None else grad_dtype.itemsize
            is_away = local.device != device
            parcels.append(Parcel(route, local.itemsize, grad_itemsize, is_away))
    return BucketPlan(tuple(parcels))


@dataclass(frozen=True)
class Told:
    """What the owner of a block tells the other ranks about a state of it.

    Attributes:
        shape: Its shape; ``None`` for what is no tensor, or a scalar one.
        dtype: Its dtype.
        value: What is no tensor, or a scalar on the CPU.
        is_on_host: Whether a scalar is on the CPU.
        refused: The type of what cannot be saved in shards.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    value: Any = None
    is_on_host: bool = True
    refused: str | None = None

    @staticmethod
    def of(state: Any) -> Told:
        """Describe a state."""
        if isinstance(state, torch.Tensor):
            if state.ndim:
                return Told(tuple(state.shape), state.dtype)
            return Told(value=state.cpu().clone(), is_on_host=state.device.type == "cpu")
        if state is None or isinstance(state, (bool, int, float, str)):
            return Told(value=state)
        return Told(refused=type(state).__name__)


class OwnedBucket:
    """Blocks whose gradients travel to their owners in one message.

    Attributes:
        ranks: Over which they lie.
        params: Those of the rule, to which blocks refer.
        optimizer: The stock optimizer of the blocks that this rank owns.
    """

    def __init__(
        self, params: Sequence[Param], blocks: Sequence[Block], ranks: Ranks, factory: Factory
    ) -> None:
        self.params, self.ranks = params, ranks
        self._routes = [route_of(block, ranks.rank) for block in blocks]
        self._stand_ins = {
            index: stand_in(params[route.block.param].tensor, route.block.box, ranks.device)
            for index, route in enumerate(self._routes)
            if route.is_owner
        }
        self._owned = {index: tensor.detach() for index, tensor in self._stand_ins.items()}
        self._strides = {
            index: _strides(params[self._routes[index].block.param].tensor, self._routes[index])
            for index in self._owned
        }
        self.optimizer = factory([{"params": list(self._owned.values())}])
        self._values: list[tuple[int, Move]] = []
        self._grads: list[Move] = []
        self._exchange: Exchange | None = None

    def plan(self) -> BucketPlan:
        """Return what a step sends and occupies, if all of its parameters have a gradient."""
        return plan_bucket(self.params, self._routes, self.ranks.device)

    # A step: see ``schedule`` for what of other buckets is done in between ---------------------

    def launch(self) -> None:
        """Begin to make values and gradients whole at their owners; see ``launch_to_owners``."""
        self._values, self._grads = [], []
        local_grads = {
            place: self.params[place].local_grad()
            for place in dict.fromkeys(route.block.param for route in self._routes)
        }
        for index, route in enumerate(self._routes):
            grad = local_grads[route.block.param]
            if grad is not None:
                local = self.params[route.block.param].local()
                self._values.append((index, Move(route, local)))
                self._grads.append(Move(route, grad))
        values = [move for _, move in self._values]
        self._exchange = launch_to_owners(self.ranks, values + self._grads)

    def arrive(self) -> None:
        """Have values and gradients whole at their owners."""
        _wait(self._exchange)
        values = [(index, self._with_whole(index, move)) for index, move in self._values]
        pairs = zip(self._values, self._grads, strict=True)
        grads = [self._with_whole(index, move) for (index, _), move in pairs]
        arrive_at_owners(self.ranks, self._exchange, [move for _, move in values] + grads)
        for (index, value), grad in zip(values, grads, strict=True):
            if value.whole is not None and grad.whole is not None:
                self._owned[index].data = value.whole
                _set_grad(self._owned[index], grad.whole)
        self._exchange, self._grads = None, []

    def compute(self) -> None:
        """Step the blocks that this rank owns, and begin to send them back."""
        if self._values:
            self.optimizer.step()
        for tensor in self._owned.values():
            tensor.grad = None
        back = [replace(move, whole=self._owned.get(index)) for index, move in self._values]
        self._exchange = launch_to_shards(self.ranks, back)
        for index, tensor in self._owned.items():
            tensor.data = self._stand_ins[index]

    def finish(self) -> None:
        """Have the updated rows in the local shards."""
        _wait(self._exchange)
        arrive_at_shards(self.ranks, self._exchange, [move for _, move in self._values])
        self._values, self._exchange = [], None

    def _with_whole(self, index: int, move: Move) -> Move:
        """Give a tensor that lies like the parameter room to be whole, or where it is so."""
        route, local = move.route, move.local
        if not route.is_owner:
            return move
        if route.is_whole and route.held_locally is not None and local.device == self.ranks.device:
            return replace(move, whole=_matrix(part_of(local, route.held_locally)))
        shape, strides = route.block.shape, self._strides[index]
        whole = torch.empty_strided(shape, strides, dtype=local.dtype, device=self.ranks.device)
        return replace(move, whole=whole)

    # States -----------------------------------------------------------------------------------

    def tell(self) -> dict[int, dict[str, Told]]:
        """Return what this rank has to tell the others of the states of its blocks."""
        return {
            index: {name: Told.of(state) for name, state in self.optimizer.state[tensor].items()}
            for index, tensor in self._owned.items()
            if tensor in self.optimizer.state
        }

    def unlike(self, told: dict[int, dict[str, Told]]) -> set[tuple[int, str]]:
        """Return the states of parameters that have another shape than a block, by name."""
        return {
            (self._routes[index].block.param, name)
            for index, facts in told.items()
            for name, fact in facts.items()
            if fact.shape != self._routes[index].block.shape
        }

    def save(
        self,
        told: dict[int, dict[str, Told]],
        unlike: set[tuple[int, str]],
        saved: Sequence[States],
    ) -> None:
        """Add the states of the blocks to those of their parameters; see ``launch_to_shards``.

        Args:
            told: What all owners tell.
            unlike: See the method, of all buckets of the rule.
            saved: The states of each parameter of the rule, whose blocks may be in many buckets.
        """
        moves: list[Move] = []
        for index in sorted(told):
            block = self._routes[index].block
            param, states = self.params[block.param], saved[block.param]
            for name, fact in sorted(told[index].items()):
                if fact.refused is not None:
                    raise ShardError(
                        f"Expected states of '{param.name}' that are tensors or numbers, got "
                        f"'{name}', a {fact.refused}, which cannot be saved in shards"
                    )
                if fact.shape is None:
                    states[f"{name}[{block.number}]"] = _value(fact, self.ranks.device)
                    continue
                state, is_like = self._state(index, name), (block.param, name) not in unlike
                key = name if is_like else f"{name}[{block.number}]"
                if key not in states:
                    states[key] = self._new_state(param, fact, is_like)
                route = self._routes[index] if is_like else self._own_route(index, fact.shape)
                moves.append(Move(route, _local(states[key]), state))
        exchange = launch_to_shards(self.ranks, moves)
        _wait(exchange)
        arrive_at_shards(self.ranks, exchange, moves)

    def load(self, loaded: Sequence[States]) -> None:
        """Take states as :meth:`save` returns them; see ``launch_to_owners``.

        Args:
            loaded: Of each parameter of the rule.
        """
        self.optimizer.state.clear()
        moves = []
        for index, route in enumerate(self._routes):
            param, states = self.params[route.block.param], loaded[route.block.param]
            found: States = {}
            for key, state in sorted(states.items()):
                name, number = _name_and_number(key)
                if number not in (None, route.block.number):
                    continue
                if number is None and param.is_like(name, state):
                    move = self._with_whole(index, Move(route, param.local_of(state).clone()))
                elif isinstance(state, torch.Tensor) and state.ndim:
                    move = self._move_of_own_shape(index, state)
                else:
                    found[name] = state.clone() if isinstance(state, torch.Tensor) else state
                    continue
                found[name] = move.whole
                moves.append(move)
            if route.is_owner and states:
                self.optimizer.state[self._owned[index]] = found
        exchange = launch_to_owners(self.ranks, moves)
        _wait(exchange)
        arrive_at_owners(self.ranks, exchange, moves)

    def _new_state(self, param: Param, fact: Told, is_like: bool) -> torch.Tensor:
        """Return what the ranks are about to have of a state, sharded like the parameter."""
        if is_like:
            return param.as_sharded(torch.empty_like(param.local(), dtype=fact.dtype))
        assert fact.shape is not None
        sizes = param.spread(fact.shape).boxes[self.ranks.rank].sizes
        local = torch.empty(sizes, dtype=fact.dtype, device=param.local().device)
        return param.as_sharded(local, fact.shape)

    def _move_of_own_shape(self, index: int, state: torch.Tensor) -> Move:
        route, block = self._own_route(index, state.shape), None
        if route.is_owner:
            block = torch.empty(state.shape, dtype=state.dtype, device=self.ranks.device)
        if not isinstance(state, DTensor):
            return Move(route, part_of(state, route.block.spread.boxes[self.ranks.rank]), block)
        return Move(route, _local(state), block)

    def _state(self, index: int, name: str) -> torch.Tensor | None:
        owned = self._owned.get(index)
        return None if owned is None else self.optimizer.state[owned][name]

    def _own_route(self, index: int, shape: Sequence[int]) -> Route:
        """Return how a state of another shape than its block's travels: a tensor of its own."""
        block = self._routes[index].block
        spread = self.params[block.param].spread(shape)
        return route_of(replace(block, box=whole(shape), spread=spread), self.ranks.rank)


def _wait(exchange: Exchange | None) -> None:
    if exchange is not None:
        exchange.wait()


def stand_in(param: torch.Tensor, box: Box, device: torch.device) -> torch.Tensor:
    """Return a tensor of the shape of a block, of NaN and without memory of its own."""
    nan = torch.full((), torch.nan, dtype=param.dtype, device=device)
    return nan.expand(box.sizes[-2:])


def _matrix(part: torch.Tensor) -> torch.Tensor:
    """View a part of a stack that is one matrix as a matrix."""
    return part[(0,) * max(0, part.ndim - 2)]


def _strides(param: torch.Tensor, route: Route) -> tuple[int, ...]:
    """Return the strides of a block by itself, in the order of those of the parameter."""
    meta = torch.empty_strided(param.shape, param.stride(), device="meta")
    return torch.empty_like(_matrix(part_of(meta, route.block.box))).stride()


def _set_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    if grad is not None and grad.dtype != tensor.dtype:
        tensor.grad_dtype = None
    tensor.grad = grad


def _name_and_number(key: str) -> tuple[str, int | None]:
    """Tell which state is saved as ``key``, and of which block if it is of one alone."""
    found = re.fullmatch(r"(.*)\[(\d+)\]", key)
    return (key, None) if found is None else (found[1], int(found[2]))


def joined(states: States) -> States:
    """Give a value that is the same for all blocks of a parameter its plain name."""
    found: States = {}
    for key, state in states.items():
        name, number = _name_and_number(key)
        is_value = not isinstance(state, torch.Tensor) or not state.ndim
        if number is None or not is_value:
            found[key] = state
            continue
        others = [other for k, other in states.items() if _name_and_number(k)[0] == name]
        found[name if all(other == state for other in others) else key] = state
    return found


def _value(fact: Told, device: torch.device) -> Any:
    if isinstance(fact.value, torch.Tensor) and not fact.is_on_host:
        return fact.value.to(device)
    return fact.value
