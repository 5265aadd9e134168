"""Parameters that are stepped as whole blocks, each block by its owner."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import prod
from operator import mul
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.core.codec import Codec, codec_of
from composable_shard.errors import ShardError
from composable_shard.optim.blocks import Block, Box, BucketPlan, Sent, Spread, spread_over, whole
from composable_shard.optim.exchange import Exchange, Move, Ranks, arrive, launch, part_of

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
    def extents(self) -> tuple[int, ...]:
        """The number of ranks along each axis of its mesh."""
        return () if self.mesh is None else tuple(self.mesh.shape)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Its placements; empty for a plain parameter."""
        return self.tensor.placements if isinstance(self.tensor, DTensor) else ()

    @property
    def dims(self) -> tuple[int | None, ...]:
        """The dim that each axis of its mesh shards."""
        return tuple(getattr(placement, "dim", None) for placement in self.placements)

    @property
    def is_in_boxes(self) -> bool:
        """Whether each rank holds a range of each dim."""
        pairs = list(zip(self.extents, self.dims, strict=True))
        return all(
            type(placement) in (Shard, Replicate)
            or _torch.num_parts_of_strided(placement)
            == prod(extent for extent, dim in pairs[axis + 1 :] if dim == self.dims[axis])
            for axis, placement in enumerate(self.placements)
        )

    def local(self) -> torch.Tensor:
        """Return this rank's shard."""
        return _local(self.tensor)

    def spread(self, shape: Sequence[int] | None = None) -> Spread:
        """Return its parts on all ranks, or those of a state of another shape, cut by rows."""
        parts = map(_torch.num_parts_of_strided, self.placements)
        inner = tuple(axis for axis, num_parts in enumerate(parts) if num_parts is not None)
        if shape is None:
            return spread_over(self.tensor.shape, self.extents, self.dims, inner)
        by_rows = tuple(None if dim is None else 0 for dim in self.dims)
        return spread_over(tuple(shape), self.extents, by_rows, inner)

    def as_sharded(self, local: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Wrap this rank's part of a state that is sharded like it, or by rows."""
        if self.mesh is None:
            return local
        if shape is None:
            return _torch.local_like(self.tensor, local)
        pairs = zip(self.placements, self.dims, strict=True)
        by_rows = [p if dim is None else _torch.with_dim(p, 0) for p, dim in pairs]
        full = torch.empty(tuple(shape), device="meta")
        return DTensor.from_local(
            local, self.mesh, by_rows, run_check=False, shape=full.shape, stride=full.stride()
        )

    def local_of(self, state: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a state that is sharded like it, or full."""
        if self.mesh is not None and not isinstance(state, DTensor):
            return _torch.cut(state, self.mesh, self.placements)
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
    params: Sequence[Param], blocks: Sequence[Block], rank: int, device: torch.device
) -> BucketPlan:
    """Return the messages and the memory of a step in which all trained parameters have gradients.

    Args:
        params: The parameters to which blocks refer.
        blocks: The blocks.
        rank: The place of the rank that steps.
        device: The device of compute.
    """
    blocks = [block for block in blocks if params[block.param].tensor.requires_grad]
    values, grads, numels = list[int](), list[int](), list[int]()
    for block in blocks:
        param = params[block.param]
        dtype = param.tensor.grad_dtype if param.tensor.grad is None else param.tensor.grad.dtype
        values.append(block.itemsize)
        grads.append(block.itemsize if dtype is None else dtype.itemsize)
        is_in_place = block.is_whole_on(rank) and param.local().device == device
        numels.append(block.box.numel if block.owner == rank and not is_in_place else 0)
    return BucketPlan(
        [block for block in blocks if block.owner == rank],
        Sent.of(blocks * 2, values + grads, rank, to_owner=True),
        Sent.of(blocks, values, rank, to_owner=False),
        sum(map(mul, numels, values)),
        sum(map(mul, numels, grads)),
    )


# The blocks of a bucket ---------------------------------------------------------------------------

Told = dict[Key, States]
"""All states of a rule's blocks, as their owners describe them: meta tensors, and other values."""


class OwnedBucket:
    """Blocks that send their values and gradients to their owners in one message.

    Attributes:
        ranks: The ranks that hold them.
        params: The parameters of the rule, to which blocks refer.
        blocks: The blocks.
        optimizer: The stock optimizer of the blocks that this rank owns.
    """

    def __init__(
        self, params: Sequence[Param], blocks: Sequence[Block], ranks: Ranks, factory: Factory
    ) -> None:
        self.params, self.ranks = params, ranks
        self.blocks = {block.key: block for block in blocks}
        self._stand_ins = {
            key: stand_in(params[block.param].tensor, block.box, ranks.device)
            for key, block in self.blocks.items()
            if block.owner == ranks.rank
        }
        self._owned = {key: tensor.detach() for key, tensor in self._stand_ins.items()}
        self._factory = factory
        self.optimizer = factory([{"params": list(self._owned.values())}])

    def plan(self) -> BucketPlan:
        """Return the messages and the memory of a step; see :func:`plan_bucket`."""
        blocks = list(self.blocks.values())
        return plan_bucket(self.params, blocks, self.ranks.rank, self.ranks.device)

    def step(self) -> Iterator[None]:
        """Step all blocks that have gradients, in the four actions of :func:`schedule`."""
        places = dict.fromkeys(block.param for block in self.blocks.values())
        grads = {place: reduced_grad(self.params[place].tensor) for place in places}
        values, moves = list[Move](), list[Move]()
        for block in self.blocks.values():
            grad = grads[block.param]
            if grad is not None:
                values.append(Move(block, self.params[block.param].local()))
                moves.append(Move(block, _local(grad)))
        exchange = launch(self.ranks, values + moves, to_owner=True)
        del grads, grad
        yield
        self._receive(exchange, values, moves)
        del moves
        yield
        if values:
            self.optimizer.step()
        for tensor in self._owned.values():
            tensor.grad = None
        back = [replace(move, whole=self._owned.get(move.block.key)) for move in values]
        exchange = launch(self.ranks, back, to_owner=False)
        for key, tensor in self._owned.items():
            tensor.data = self._stand_ins[key]
        del back
        yield
        arrive(self.ranks, exchange, values, to_owner=False)

    def _receive(
        self, exchange: Exchange | None, values: Sequence[Move], grads: Sequence[Move]
    ) -> None:
        """Wait for the exchange; give the owners whole values and gradients."""
        if exchange is not None:
            exchange.wait()  # frees the sent message before whole blocks are allocated
        values, grads = (list(map(self._with_whole, some)) for some in (values, grads))
        arrive(self.ranks, exchange, [*values, *grads], to_owner=True)
        for value, grad in zip(values, grads, strict=True):
            if value.whole is not None and grad.whole is not None:
                tensor = self._owned[value.block.key]
                tensor.data = value.whole
                set_grad(tensor, grad.whole)

    def _with_whole(self, move: Move) -> Move:
        """Give the owner memory for the whole block, or its shard if that is the whole block."""
        block, local, rank = move.block, move.local, self.ranks.rank
        if block.owner != rank:
            return move
        if block.is_whole_on(rank) and local.device == self.ranks.device:
            return replace(move, whole=_matrix(move.in_shard(block.box, rank)))
        param = self.params[block.param].tensor
        strides = _strides(param.shape, param.stride(), block.box)
        device = self.ranks.device
        made = torch.empty_strided(block.shape, strides, dtype=local.dtype, device=device)
        return replace(move, whole=made)

    # States -----------------------------------------------------------------------------------

    def tell(self) -> Told:
        """Describe the states of the blocks that this rank owns."""
        return {
            key: {name: self._described(key, name, state) for name, state in states.items()}
            for key, states in self._states().items()
        }

    def _described(self, key: Key, name: str, state: Any) -> Any:
        """Return a meta tensor, a scalar tensor, or another value; an error to raise otherwise."""
        if isinstance(state, torch.Tensor):
            if state.ndim:
                return torch.empty(state.shape, dtype=state.dtype, device="meta")
            return state.cpu().clone()
        if state is None or isinstance(state, (bool, int, float, str)):
            return state
        return ShardError(
            f"Expected states of '{self.params[key[0]].name}' that are tensors or numbers, got "
            f"'{name}', a {type(state).__name__}, which cannot be saved in shards"
        )

    def _states(self) -> dict[Key, States]:
        """Return the states of the blocks that this rank owns, as their optimizer saves them."""
        saved = self.optimizer.state_dict()["state"]
        places = enumerate(self._owned)
        return {key: taken_apart(saved[place]) for place, key in places if place in saved}

    def save(self, told: Told, like: set[tuple[int, str]], saved: Sequence[States]) -> None:
        """Add the states of the blocks to those of their parameters. Collective: an exchange.

        Args:
            told: The descriptions of all owners.
            like: See :func:`shaped_like_blocks`.
            saved: The states of each parameter of the rule; its blocks may be in many buckets.
        """
        own_states, moves = self._states(), list[Move]()
        for key in sorted(told.keys() & self.blocks.keys()):
            place, number = key
            param, states = self.params[place], saved[place]
            for name, state in sorted(told[key].items()):
                if isinstance(state, ShardError):
                    raise state
                is_like = (place, name) in like
                saved_as = name if is_like else f"{name}[{number}]"
                if not isinstance(state, torch.Tensor) or not state.ndim:
                    states[saved_as] = state
                    continue
                if saved_as not in states:
                    states[saved_as] = self._new_state(param, state, is_like)
                block = self.blocks[key] if is_like else self._own_block(key, state.shape)
                whole_state = own_states.get(key, {}).get(name)
                moves.append(Move(block, _local(states[saved_as]), whole_state))
        exchange = launch(self.ranks, moves, to_owner=False)
        arrive(self.ranks, exchange, moves, to_owner=False)

    def load(self, loaded: Sequence[States]) -> None:
        """Load the states that :meth:`save` returned. Collective: an exchange.

        Args:
            loaded: The states of each parameter of the rule.
        """
        moves, found = list[Move](), defaultdict[Key, States](dict)
        for key in self.blocks:
            place, own_number = key
            param = self.params[place]
            for saved_as, state in sorted(loaded[place].items()):
                name, number = _name_and_number(saved_as)
                if number not in (None, own_number):
                    continue
                if number is None and param.is_like(name, state):
                    local = param.local_of(state).clone()
                    moves.append(self._with_whole(Move(self.blocks[key], local)))
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
        whole_dict = {**self.optimizer.state_dict(), "state": states_of}
        load_states(self.optimizer.load_state_dict, whole_dict, {})

    def _new_state(self, param: Param, state: torch.Tensor, is_like: bool) -> torch.Tensor:
        """Return memory for a state, sharded like the parameter or by rows."""
        local = param.local()
        if is_like:
            return param.as_sharded(torch.empty_like(local, dtype=state.dtype))
        sizes = param.spread(state.shape).boxes[self.ranks.rank].sizes
        return param.as_sharded(local.new_empty(sizes, dtype=state.dtype), state.shape)

    def _move_of_own_shape(self, key: Key, state: torch.Tensor) -> Move:
        block, rank = self._own_block(key, state.shape), self.ranks.rank
        is_cut = isinstance(state, DTensor)
        local = _local(state) if is_cut else part_of(state, block.spread.boxes[rank])
        if block.owner != rank:
            return Move(block, local)
        made = torch.empty(state.shape, dtype=state.dtype, device=self.ranks.device)
        return Move(block, local, made)

    def _own_block(self, key: Key, shape: Sequence[int]) -> Block:
        """Return the block of a state with another shape than its block."""
        block = self.blocks[key]
        return replace(block, box=whole(shape), spread=self.params[block.param].spread(shape))


def shaped_like_blocks(told: Told, buckets: Sequence[OwnedBucket]) -> set[tuple[int, str]]:
    """Return the parameter and the name of each state that has the shape of every block.

    Args:
        told: The states of all blocks of a rule.
        buckets: The buckets of the rule.
    """
    shapes = {key: block.shape for bucket in buckets for key, block in bucket.blocks.items()}
    num_blocks = Counter(place for place, _ in told)
    counts = Counter(
        (key[0], name)
        for key, states in told.items()
        for name, state in states.items()
        if isinstance(state, torch.Tensor) and state.is_meta and state.shape == shapes[key]
    )
    return {pair for pair, count in counts.items() if count == num_blocks[pair[0]]}


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


def _codec(state: Any) -> Codec | None:
    return codec_of(state) if isinstance(state, torch.Tensor) else None


def taken_apart(states: States) -> States:
    """Replace dicts and wrapper subclasses by their contents, under names with dots."""
    found: States = {}
    for name, state in states.items():
        codec = _codec(state)
        if codec is not None:
            state = dict(zip(codec.names, codec.inner_tensors(state), strict=True))
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
        codec, begin = _codec(state), f"{name}."
        if codec is None and not isinstance(state, dict):
            continue
        own = {k.removeprefix(begin): found.pop(k) for k in parts if k.startswith(begin)}
        if own and codec is None:
            found[name] = _composed(own, state)
        elif own and codec is not None:
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
    load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any], made: Counts
) -> None:
    """Load a state dict; states keep their dtypes, which torch casts to those of the parameters.

    Args:
        load: The method ``load_state_dict`` of an optimizer.
        state_dict: The state dict.
        made: The numbers that a step created for :func:`only_makes_states`. A number that comes
            back unchanged belongs to a parameter for which nothing was loaded; that parameter
            stays without states.
    """
    optimizer: Optimizer = load.__self__  # type: ignore[attr-defined]
    keys, params = (
        chain.from_iterable(group["params"] for group in groups)
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    )
    params_of, given = dict(zip(keys, params, strict=False)), dict[Any, States]()

    def note(_: Optimizer, passed: dict[str, Any]) -> None:
        given.update(passed["state"])

    def restore(_: Optimizer) -> None:
        for key in given.keys() & params_of.keys():
            now = optimizer.state.get(params_of[key], {})
            for name, state in given[key].items():
                if not isinstance(state, torch.Tensor):
                    now[name] = state
                elif now.get(name, state).dtype != state.dtype:
                    now[name] = state.to(now[name].device)

    hooks = (
        optimizer.register_load_state_dict_pre_hook(note),  # behind those of users
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),  # before them
    )
    all_states = {
        key: states
        for key, states in state_dict["state"].items()
        if not (numbers := _numbers(states)) or any(made.get(n) != n._version for n in numbers)
    }
    try:
        load({**state_dict, "state": all_states})
    finally:
        for hook in hooks:
            hook.remove()


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step, with gradients enabled."""
    with torch.enable_grad():
        return None if closure is None else closure()
