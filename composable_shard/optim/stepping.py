"""Parameters that are stepped as whole blocks, each block by its owner."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from composable_shard.core.transport.process_groups import gather_objects
from composable_shard.errors import ShardError
from composable_shard.optim.blocks import Block, Box, Sent, Spread, spread_over, whole
from composable_shard.optim.exchange import Exchange, Move, Ranks, arrive, launch, part_of

Factory = Callable[[list[dict[str, Any]]], Optimizer]
States = dict[str, Any]
Key = tuple[str, int]
"""The name of a parameter, and the number of a block in it."""


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


# The blocks of a bucket ---------------------------------------------------------------------------

Told = dict[Key, States]
"""The states of blocks, as their owners describe them: meta tensors, and other values."""

Saved = defaultdict[torch.Tensor, States]
"""The states of each parameter, sharded like it."""


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
        self.blocks = {(params[block.param].name, block.number): block for block in blocks}
        self._stand_ins = {
            block: stand_in(block.shape, params[block.param].tensor.dtype, ranks.device)
            for block in blocks
            if block.owner == ranks.rank
        }
        self._owned = {block: tensor.detach() for block, tensor in self._stand_ins.items()}
        self._factory = factory
        self.optimizer = factory([{"params": list(self._owned.values())}])

    def plan(self) -> tuple[int, list[Sent]]:
        """Return how many blocks this rank steps, and what it sends, if no gradient is missing."""
        pairs = [(block, self.params[block.param].tensor) for block in self.blocks.values()]
        pairs = [(block, tensor) for block, tensor in pairs if tensor.requires_grad]
        blocks, rank = [block for block, _ in pairs], self.ranks.rank
        values, grads = [block.itemsize for block in blocks], list[int]()
        for block, tensor in pairs:
            dtype = tensor.grad_dtype if tensor.grad is None else tensor.grad.dtype
            grads.append(block.itemsize if dtype is None else dtype.itemsize)
        to_owners = Sent.of(blocks * 2, values + grads, rank, to_owner=True)
        to_shards = Sent.of(blocks, values, rank, to_owner=False)
        return sum(block.owner == rank for block in blocks), [to_owners, to_shards]

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
        back = [replace(move, whole=self._owned.get(move.block)) for move in values]
        exchange = launch(self.ranks, back, to_owner=False)
        for block, tensor in self._owned.items():
            tensor.data = self._stand_ins[block]
        del back
        yield
        arrive(self.ranks, exchange, values, to_owner=False)

    def _receive(self, exchange: Exchange | None, values: list[Move], grads: list[Move]) -> None:
        """Wait for the exchange; give the owners whole values and gradients."""
        if exchange is not None:
            exchange.wait()  # frees the sent message before whole blocks are allocated
        values, grads = (list(map(self._with_whole, some)) for some in (values, grads))
        arrive(self.ranks, exchange, [*values, *grads], to_owner=True)
        for value, grad in zip(values, grads, strict=True):
            if value.whole is not None and grad.whole is not None:
                tensor = self._owned[value.block]
                tensor.data = value.whole
                set_grad(tensor, grad.whole)

    def _with_whole(self, move: Move) -> Move:
        """Give the owner memory for the whole block, or its shard if that is the whole block."""
        block, local, rank = move.block, move.local, self.ranks.rank
        if block.owner == rank and block.is_whole_on(rank) and local.device == self.ranks.device:
            return replace(move, whole=_matrix(move.in_shard(block.box, rank)))
        return replace(move, whole=self._new_whole(block, local.dtype))

    def _new_whole(self, block: Block, dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory for a whole block on its owner, with the order of the parameter's dims."""
        if block.owner != self.ranks.rank:
            return None
        param, device = self.params[block.param].tensor, self.ranks.device
        if block not in self._owned:  # of a state
            return torch.empty(block.box.sizes, dtype=dtype, device=device)
        strides = _strides(param.shape, param.stride(), block.box)
        return torch.empty_strided(block.shape, strides, dtype=dtype, device=device)

    # States -----------------------------------------------------------------------------------

    def tell(self) -> Told:
        """Describe the states of the blocks that this rank owns."""
        states = self._states()
        return {
            key: {name: _described(key[0], name, s) for name, s in states[block].items()}
            for key, block in self.blocks.items()
            if block in states
        }

    def _states(self) -> dict[Block, States]:
        """Return the states of the blocks that this rank owns, as their optimizer saves them."""
        saved = self.optimizer.state_dict()["state"]
        places = enumerate(self._owned)
        return {block: taken_apart(saved[place]) for place, block in places if place in saved}

    def save(self, told: Told, shared: Mapping[str, set[str]], saved: Saved) -> None:
        """Add the states of the blocks to those of their parameters. Collective: an exchange.

        Args:
            told: The descriptions of all owners.
            shared: See :func:`shared_names`.
            saved: The states of each parameter; its blocks may be in many buckets.
        """
        own_states, moves = self._states(), list[Move]()
        for key, block in self.blocks.items():
            param = self.params[block.param]
            states = saved[param.tensor]
            for name, state in sorted(told.get(key, {}).items()):
                if isinstance(state, ShardError):
                    raise state
                is_shared = name in shared[param.name]
                saved_as = name if is_shared else f"{name}[{block.number}]"
                if not _has_dims(state):
                    states[saved_as] = state
                    continue
                of_state = block if is_shared else self._block_of_state(block, state.shape)
                if saved_as not in states:
                    local = torch.empty_like(param.local(), dtype=state.dtype)
                    if not is_shared:
                        local = local.new_empty(of_state.spread.boxes[self.ranks.rank].sizes)
                    states[saved_as] = param.as_sharded(local, None if is_shared else state.shape)
                whole_state = own_states.get(block, {}).get(name)
                moves.append(Move(of_state, _local(states[saved_as]), whole_state))
        exchange = launch(self.ranks, moves, to_owner=False)
        arrive(self.ranks, exchange, moves, to_owner=False)

    def load(self, loaded: Mapping[torch.Tensor, States]) -> None:
        """Load the states that :meth:`save` returned. Collective: an exchange."""
        moves, found = list[Move](), defaultdict[Block, States](dict)
        for block in self.blocks.values():
            param = self.params[block.param].tensor
            for saved_as, state in sorted(loaded.get(param, {}).items()):
                name, number = _name_and_number(saved_as)
                if number not in (None, block.number):
                    continue
                if not _has_dims(state):
                    is_tensor = isinstance(state, torch.Tensor)
                    found[block][name] = _local(state).clone() if is_tensor else state
                    continue
                is_like = number is None and state.shape == param.shape
                of_state = block if is_like else self._block_of_state(block, state.shape)
                part = of_state.spread.boxes[self.ranks.rank]
                local = _local(state) if isinstance(state, DTensor) else part_of(state, part)
                moves.append(Move(of_state, local, self._new_whole(of_state, state.dtype)))
                found[block][name] = moves[-1].whole
        exchange = launch(self.ranks, moves, to_owner=True)
        arrive(self.ranks, exchange, moves, to_owner=True)
        states_of = {
            place: put_together(found[block], self._factory, tensor)
            for place, (block, tensor) in enumerate(self._owned.items())
            if block in found
        }
        whole_dict = {**self.optimizer.state_dict(), "state": states_of}
        load_states(self.optimizer.load_state_dict, whole_dict, {})

    def _block_of_state(self, block: Block, shape: Sequence[int]) -> Block:
        """Return the block of a state with another shape than its block."""
        return replace(block, box=whole(shape), spread=self.params[block.param].spread(shape))


def _has_dims(state: Any) -> bool:
    """Return whether a state is a tensor, not a number, so that it travels."""
    return isinstance(state, torch.Tensor) and state.ndim > 0


def _described(param: str, name: str, state: Any) -> Any:
    """Return a meta tensor, a scalar tensor, or another value; an error to raise otherwise."""
    if _has_dims(state):
        return torch.empty(state.shape, dtype=state.dtype, device="meta")
    if isinstance(state, torch.Tensor):
        return state.cpu().clone()
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    return ShardError(
        f"Expected states of '{param}' that are tensors or numbers, got '{name}', a "
        f"{type(state).__name__}, which cannot be saved in shards"
    )


def save_states(buckets: Sequence[OwnedBucket], saved: Saved) -> None:
    """Add the states of all blocks to those of their parameters.

    Collective: an all-gather of descriptions for each mesh, and an exchange for each bucket.
    """
    told = described_by_owners(buckets)
    shared = shared_names(told, dict(chain.from_iterable(b.blocks.items() for b in buckets)))
    for bucket in buckets:
        bucket.save(told, shared, saved)


def described_by_owners(buckets: Sequence[OwnedBucket]) -> Told:
    """Return the descriptions of the states of all blocks. Collective: see :func:`save_states`."""
    told = Told()
    for ranks in dict.fromkeys(bucket.ranks for bucket in buckets):
        described = (bucket.tell().items() for bucket in buckets if bucket.ranks == ranks)
        own = dict(chain.from_iterable(described))
        gathered = [own]
        if ranks.group is not None:
            gathered = gather_objects(own, ranks.group, "describing optimizer states")
        for of_rank in gathered:
            told.update(of_rank)
    return told


def shared_names(told: Told, blocks: Mapping[Key, Block]) -> dict[str, set[str]]:
    """Return, for each parameter, the names of the states that all of its blocks share.

    These are tensors that have the shape of every block, and values that are equal for all blocks.

    Args:
        told: The states of all blocks.
        blocks: All blocks.
    """
    first, shared = dict[str, States](), dict[str, set[str]]()
    for key, states in told.items():
        param, others = key[0], first.setdefault(key[0], states)
        names = {
            name
            for name, state in states.items()
            if (state.shape == blocks[key].shape if _has_dims(state) else state == others.get(name))
        }
        shared[param] = shared.get(param, names) & names
    return shared


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of NaN in the shape of a block, which takes no memory."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(tuple(shape))


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


# States as optimizers save and load them ----------------------------------------------------------


def _mapped(name: str, state: Any, function: Callable[[str, Any], Any]) -> Any:
    """Replace each plain value of a state by the result of a function of its name and itself.

    The contents of dicts and of wrapper subclasses have names with dots.
    """
    codec = codec_of(state) if isinstance(state, torch.Tensor) else None
    if codec is not None and codec.kind is not None:
        inner = zip(codec.names, codec.inner_tensors(state), strict=True)
        return codec.rebuild(function(f"{name}.{part}", tensor) for part, tensor in inner)
    if isinstance(state, dict):
        return {key: _mapped(f"{name}.{key}", value, function) for key, value in state.items()}
    return function(name, state)


def taken_apart(states: States) -> States:
    """Replace dicts and wrapper subclasses by their contents, under names with dots."""
    found: States = {}
    for name, state in states.items():
        _mapped(name, state, found.setdefault)
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
    rest, roots = dict(parts), {name.partition(".")[0] for name in parts}
    made = optimizer.state_dict()["state"][0].items()
    found = {name: _mapped(name, s, lambda n, _: rest.pop(n)) for name, s in made if name in roots}
    return {**found, **rest}


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
