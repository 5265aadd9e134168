"""Moving a model to other ranks: shards, gradients and optimizer states, without a disk."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.arguments import check_int, check_module, check_type, listed_optimizers
from composable_shard.core.codec import has_extension, has_grad_extension
from composable_shard.core.extension import build_buckets
from composable_shard.core.group import ON_OTHER_RANKS, ParamGroup
from composable_shard.core.placement import ParamPlacement, plan_placement, plan_tensor
from composable_shard.core.reduction import assign_grad, is_partial
from composable_shard.core.storage import Bucket, ShardedParam, as_sharded
from composable_shard.core.tape import Tape
from composable_shard.core.transport import host
from composable_shard.core.tree import check_at_rest
from composable_shard.errors import ShardError
from composable_shard.mesh import ShardMesh, check_reshard, resolve_mesh
from composable_shard.optim import exchange
from composable_shard.optim.blocks import Box, padded, whole
from composable_shard.optim.layouts import Fits, LayoutOptimizer, does_fit
from composable_shard.train.places import Ground, Piece, pieces_of, rounds_of
from composable_shard.train.ranks import Ranks
from composable_shard.train.uneven import sharded_groups
from composable_shard.train.weights import entries


def _unmovable(what: str, got: str) -> ShardError:
    return ShardError(
        f"Expected {what} to be cut by fully_shard alone, into plain tensors along one axis of a "
        f"mesh, got {got}; save a checkpoint instead"
    )


# Descriptions of tensors --------------------------------------------------------------------------

# The place of a tensor in a model, the same on all ranks: ("parameter", 3), ("gradient", 3),
# ("plain", "norm.weight") or ("state", 0, "parameter", 3, "exp_avg").
Key = tuple[Any, ...]

Tensors = dict[Key, torch.Tensor]  # of this rank: local shards, or full tensors
Meshes = Mapping[Fits, DeviceMesh]  # by patterns of names: the first that fits decides


class Item(NamedTuple):
    """The description of a tensor that moves.

    Attributes:
        shape: Its global shape.
        stride: Its global strides.
        dtype: Its dtype.
        device_type: The type of its device.
        param: The parameter with the same layout; ``None`` for a tensor that every rank has in
            full.
        dim: The sharded dim; ``None`` if it is not sharded.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    param: int | None = None
    dim: int | None = None


# The description of a model that its ranks send to the ranks that join: an Item for each tensor,
# numbers among the states of optimizers, and the settings of their parameter groups.
Description = dict[Key, Any]


def _items(described: Description) -> dict[Key, Item]:
    return {key: entry for key, entry in described.items() if isinstance(entry, Item)}


# This rank's part of a model ----------------------------------------------------------------------


class _Holder:
    """The model and the optimizers of this rank.

    Attributes:
        groups: The groups of the model.
        params: The parameters of all groups.
        is_empty: Whether it has no values, because they will arrive or have moved to other ranks.
        over: The new data-parallel ranks of each parameter; empty on a rank that leaves.
        placements: The new placements of each parameter; empty on a rank that leaves.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[ParamGroup], optimizers: Sequence[Optimizer]
    ) -> None:
        self.groups = groups
        self.params = [param for group in groups for param in group.params]
        has_gone = any(group.why_absent == ON_OTHER_RANKS for group in groups)
        self.is_empty = has_gone or any(param.local.is_meta for param in self.params)
        self.over: dict[ShardedParam, ShardMesh] = {}
        self.placements: dict[ShardedParam, ParamPlacement] = {}
        self._model, self._optimizers = model, optimizers
        params = enumerate(self.params)
        self._tensors: Tensors = {("parameter", index): param.sharded for index, param in params}
        self._keys = {id(tensor): key for key, tensor in self._tensors.items()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            key = self._keys.setdefault(id(tensor), ("plain", name))
            self._tensors[key] = tensor
        self._states: list[Mapping[torch.Tensor, dict[str, Any]]] = [{} for _ in optimizers]
        self._before = {param: dict(param.__dict__) for param in self.params}
        self._meshes_of_groups: list[ShardMesh] = []
        self._buckets: list[list[Bucket]] = []
        self._locals: dict[ShardedParam, torch.Tensor] = {}

    def check(self) -> None:
        """Raise if the model cannot be moved now."""
        for group in self.groups:
            check_at_rest(group, "move")
            if group.why_absent != ON_OTHER_RANKS:
                group.check_in_memory("to be moved")
            if group.tree.is_reducing:
                raise ShardError(
                    f"Expected no reductions of {group.label} in flight, got some; end backward"
                )
            for param in group.params:
                if param.placement.unsharded_spec is not None:
                    placements = f"tensor parallelism: {param.placement.sharded}"
                    raise _unmovable(f"parameter '{param.name}'", placements)
                if param.name in group.unsynced or is_partial(param.sharded.grad):
                    raise ShardError(
                        f"Expected a reduced gradient of '{param.name}', got one that was "
                        "accumulated without sync; call synchronize_gradients() first"
                    )

    def plan(self, meshes: Meshes) -> list[Ground]:
        """Return the new location of each parameter; nothing on a rank that leaves.

        Raises:
            ValueError: If a parameter has no mesh, or does not fit its mesh.
            ShardError: If this rank is in the meshes of some parameters only.
        """
        self._meshes = self._mesh_of_each(meshes)
        members = {mesh.get_coordinate() is not None for mesh in self._meshes}
        if len(members) > 1:
            raise ShardError("Expected all meshes to include this rank, got some without it")
        if True not in members:
            return []
        for param, mesh in zip(self.params, self._meshes, strict=True):
            dims = param.mesh.dims
            if dims is not None and max(len(dims.shard_names), len(dims.replicate_names)) > 1:
                raise _unmovable(f"parameter '{param.name}'", str(dims))
            over = self.over[param] = resolve_mesh(mesh, dims)
            planned = plan_placement(param.name, _whole_on_meta(param), param.layout.dim, over)
            self.placements[param] = planned
        for group in self.groups:
            of_mesh = [param for param in group.params if param.mesh == group.mesh]
            over = next(self.over[param] for param in (*of_mesh, *group.params, *self.over))
            self._meshes_of_groups.append(over)
            all_over = [over, *(self.over[param] for param in group.params)]
            check_reshard(group.settings.reshard_after_forward, all_over)
        return list(map(Ground.of, self.placements.values()))

    def _mesh_of_each(self, meshes: Meshes) -> list[DeviceMesh]:
        names: dict[torch.Tensor, list[str]] = {}
        for name, registered in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(as_sharded(registered), []).append(name)
        found = []
        for param in self.params:
            aliases = names.get(param.sharded, [param.name])
            fitting = [m for fits, m in meshes.items() if does_fit(fits, aliases, param.sharded)]
            if not fitting:
                raise ValueError(f"Expected a mesh for '{aliases[0]}', got none; add one for '*'")
            found.append(fitting[0])
        return found

    def describe(self, *, has_joining: bool) -> tuple[Description, Tensors]:
        """Describe the values of this rank, and return them.

        Args:
            has_joining: Whether some ranks join, which need the full description.

        Raises:
            ShardError: If a tensor cannot be moved.

        Collective: for optimizers of ``with_layout``, see ``LayoutOptimizer.state_dict``.
        """
        described, tensors = Description(), Tensors()

        def add(key: Key, what: str, value: Any, param: int | None = None) -> None:
            if isinstance(value, torch.Tensor):
                tensors[key] = _torch.local_part(value).detach()
                value = self._described(what, value, param)
            described[key] = value

        for (kind, name), tensor in self._tensors.items():
            if kind == "parameter":
                what = f"parameter '{self.params[name].name}'"
                add(("parameter", name), what, tensor, name)
                if tensor.grad is not None:
                    add(("gradient", name), f"the gradient of {what}", tensor.grad, name)
            elif not isinstance(tensor, DTensor):
                add(("plain", name), f"'{name}'", tensor)
            elif has_joining:
                raise _unmovable(f"'{name}'", f"a DTensor of {tensor.placements}")
        for place, optimizer in enumerate(self._optimizers):
            known: Mapping[torch.Tensor, dict[str, Any]] = optimizer.state
            if isinstance(optimizer, LayoutOptimizer):
                known = optimizer.sharded_states()
            self._states[place] = known
            for stepped, states in known.items():
                owner = self._keys.get(id(stepped), ())
                moved = owner[1] if owner[:1] == ("parameter",) else None
                of = "" if moved is None else f" of '{self.params[moved].name}'"
                for name, value in states.items() if owner else ():
                    if moved is not None or not isinstance(value, DTensor):
                        add(("state", place, *owner, name), f"state '{name}'{of}", value, moved)
            described["settings", place] = [{**g, "params": []} for g in optimizer.param_groups]
        return described, tensors

    def _described(self, what: str, tensor: torch.Tensor, param: int | None) -> Item:
        local = _torch.local_part(tensor)
        if _torch.is_subclass(local) or has_extension(local) or has_grad_extension(local):
            raise _unmovable(what, f"a subclass or all-gather hooks: {type(local).__name__}")
        item = Item(tuple(tensor.shape), tensor.stride(), tensor.dtype, local.device.type)
        if param is None or not isinstance(tensor, DTensor):
            return item
        dims = [cut.dim for cut in tensor.placements if isinstance(cut, Shard)]
        item = item._replace(param=param, dim=dims[0] if dims else None)
        sizes, own, spec = self._box(item).sizes, _torch.spec_of(tensor), self._spec(item)
        if (own.mesh, own.placements) != (spec.mesh, spec.placements) or sizes != local.shape:
            got = f"{list(local.shape)} of {list(sizes)}, {own.placements} on {own.mesh}"
            raise _unmovable(what, got)
        return item

    def _box(self, item: Item) -> Box:
        """Return this rank's part of a tensor, on the ranks for which parameters are planned."""
        if item.param is None:
            return whole(item.shape)
        return Ground.of(self.params[item.param].placement).box(item.shape, item.dim)

    def _spec(self, item: Item) -> _torch.DTensorSpec:
        """Return the spec of a tensor that has the layout of a parameter."""
        assert item.param is not None
        placement = self.params[item.param].placement
        cut: Placement = Replicate() if item.dim is None else Shard(item.dim)
        placements = tuple(cut if role == "shard" else Replicate() for _, role in placement.axes)
        meta = _torch.TensorMeta(torch.Size(item.shape), item.stride, item.dtype)
        return _torch.make_spec(placement.mesh, placements, meta)

    # Memory for the new values ----------------------------------------------------------------

    def make_room(self, described: Description) -> Tensors:
        """Return memory for the new values; the current values stay until :meth:`settle`."""
        items, found = _items(described), Tensors()
        for group in self.groups:
            shards = [self._new_shard(param, items) for param in group.params]
            self._buckets.append(build_buckets(group.params, shards))
            for bucket in self._buckets[-1]:
                self._locals.update(zip(bucket.params, bucket.locals, strict=True))
        for key, item in items.items():
            if item.param is None and not self.is_empty:
                continue  # this rank has it
            box, known = self._box(item), self._tensors.get(key)
            if key[0] == "parameter":
                known = self._locals[self.params[key[1]]]
            if known is not None and not known.is_meta:
                found[key] = known.detach().view(box.sizes)
                continue
            full = torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device="meta")
            device = "cpu" if item.device_type == "cpu" else self.groups[0].mesh.device
            part = exchange.part_of(full, box)
            found[key] = _torch.poison_uninitialized(torch.empty_like(part, device=device))
        return found

    def _new_shard(self, param: ShardedParam, items: Mapping[Key, Item]) -> torch.Tensor:
        """Return a local shard without memory of its own, as its bucket has the memory.

        The parameter is planned for its new ranks; the DTensor is left as it is.
        """
        mesh, placement = self.over[param], self.placements[param]
        param.layout = plan_tensor(_whole_on_meta(param), param.layout.dim, mesh.num_shards)
        param.mesh, param.placement, param.flat_position = mesh, placement, None
        param.device = torch.device("cpu") if param.offload is not None else mesh.device
        param.forget_unsharded()
        dtype = items[self._keys[id(param.sharded)]].dtype
        numel = prod(param.layout.flat.local_shape(mesh.shard_rank))
        buffer = torch.zeros((), dtype=dtype, device=param.device).expand(numel)
        return param.layout.local(buffer, mesh.shard_rank)

    def stay(self) -> None:
        """Discard the plan for the new ranks, and restore the current one."""
        for param, before in self._before.items():
            param.__dict__.clear()
            param.__dict__.update(before)

    # Here or elsewhere ------------------------------------------------------------------------

    def settle(self, described: Description, tensors: Tensors) -> None:
        """Put the model on the new ranks, on a rank that is one of them.

        Args:
            described: The description of the model.
            tensors: The tensors that :meth:`make_room` returned, filled.

        Collective: for optimizers of ``with_layout``, see ``LayoutOptimizer``.
        """
        for param, local in self._locals.items():
            spec = param.spec("sharded", local.dtype)
            if _torch.local_tensor(param.sharded).is_meta:
                # It gets new memory, and stays the same object.
                made = _torch.from_local(local, spec)
                entries.register_instead(self._model, param.sharded, made)
            _torch.relocate(param.sharded, local, spec)
            param.set_local(local)
        places = zip(self.groups, self._buckets, self._meshes_of_groups, strict=True)
        for group, buckets, mesh in places:
            moved = [(self._before[param]["mesh"], param.mesh) for param in group.params]
            meshes = [(group.mesh, mesh), *moved]
            chosen = {new: group.channels[before].saved() for before, new in meshes}
            group.place(mesh, buckets)
            for new, collectives in chosen.items():
                group.channels[new].restore(*collectives)
            # Forget the recorded forwards: ranks that have just been added have recorded none.
            group.tree.tape, group.tree.is_agreed = Tape(), False
        for key, item in _items(described).items():
            if key[0] == "gradient":
                sharded = self.params[key[1]].sharded
                shard = self._shown(item, tensors[key], sharded.grad)
                if sharded.grad is not shard:
                    assign_grad(sharded, shard)
            elif key[0] == "plain" and self.is_empty and self._tensors[key].is_meta:
                entries.register_instead(self._model, self._tensors[key], tensors[key])
        for place, optimizer in enumerate(self._optimizers):
            self._settle_states(place, optimizer, described, tensors)

    def _settle_states(
        self, place: int, optimizer: Optimizer, described: Description, tensors: Tensors
    ) -> None:
        before = self._states[place]
        states = {param: dict(before[param]) for param in self._tensors.values() if param in before}
        for key, entry in described.items():
            if key[:2] == ("state", place) and (self.is_empty or key in tensors):
                owner, name = key[2:-1], key[-1]
                param_states = states.setdefault(self._tensors[owner], {})
                if isinstance(entry, Item):
                    entry = self._shown(entry, tensors[key], param_states.get(name))
                param_states[name] = entry
        if self.is_empty:
            settings = described["settings", place]
            for group, given in zip(optimizer.param_groups, settings, strict=True):
                group.update({**given, "params": group["params"]})
        if isinstance(optimizer, LayoutOptimizer):
            optimizer.choose_owners()
            optimizer.take_states(states)
            return
        for param, param_states in states.items():
            optimizer.state[param].update(param_states)

    def _shown(self, item: Item, local: torch.Tensor, before: Any) -> torch.Tensor:
        """Return a gradient or a state as users see it: the previous object, if there was one."""
        if item.param is None:
            return local
        if not isinstance(before, DTensor):
            return _torch.from_local(local, self._spec(item))
        _torch.relocate(before, local, self._spec(item))
        return before

    def leave(self) -> None:
        """Leave the model to other ranks: this rank keeps no shards.

        Torch does not slice a mesh on a rank that is not in it, so the mesh of a parameter may have
        more axes here than on the other ranks.
        """
        for optimizer in self._optimizers:
            if isinstance(optimizer, LayoutOptimizer):
                optimizer.forget_owners()
            for param in self._tensors.values():
                optimizer.state.pop(param, None)
        for sharded, mesh in zip(self.params, self._meshes, strict=True):
            cuts = [cut for cut in sharded.placement.sharded if not cut.is_replicate()]
            placements = (*[Replicate()] * (mesh.ndim - 1), *(cuts or [Replicate()])[:1])
            nothing = torch.empty(0, dtype=sharded.local.dtype, device=sharded.local.device)
            meta = _torch.spec_of(sharded.sharded).tensor_meta
            assert meta is not None
            sharded.sharded.grad = None
            sharded.forget_unsharded()
            _torch.relocate(sharded.sharded, nothing, _torch.make_spec(mesh, placements, meta))
            sharded.local, sharded.flat_position = nothing, None
        for group in self.groups:
            group.buckets, group.why_absent, group.is_compiled = [], ON_OTHER_RANKS, False


def _whole_on_meta(param: ShardedParam) -> torch.Tensor:
    """Return a meta tensor like the full parameter."""
    return param.layout.whole(torch.empty(param.layout.flat.numel, device="meta"))


# The move, on all ranks ---------------------------------------------------------------------------

# By rank, the current or the new location of each parameter; without ranks that hold nothing.
Places = dict[int, list[Ground]]


class _Move:
    """The move of a model.

    Args:
        holder: The model on this rank.
        ranks: All ranks that take part.
    """

    def __init__(self, holder: _Holder, ranks: Ranks) -> None:
        self._holder, self._ranks = holder, ranks
        self._rank = dist.get_rank()

    def go(self, meshes: Meshes, bucket_nbytes: int) -> None:
        """Move everything, or nothing."""
        holder = self._holder
        self._locate(meshes, bucket_nbytes)
        described, before = self._describe()
        after = Tensors()
        try:
            with self._ranks.noting_failure():
                if self._rank in self._after:
                    after = holder.make_room(described)
            self._ranks.agree()
            self._send(_items(described), before, after, bucket_nbytes)
            self._ranks.agree()
        except BaseException:
            holder.stay()
            raise
        before.clear()
        if self._rank in self._after:
            holder.settle(described, after)
        else:
            holder.leave()

    def _locate(self, meshes: Meshes, bucket_nbytes: int) -> None:
        """Exchange where the model is and where it moves, and check that all ranks agree.

        Raises:
            ShardError: On all ranks, if a rank cannot move it.
        """
        holder, ranks = self._holder, self._ranks
        locations: tuple[list[Ground], list[Ground]] = [], []
        facts = [f"bucket_nbytes {bucket_nbytes}"]
        with ranks.noting_failure():
            holder.check()
            planned = holder.plan(meshes)
            known = [] if holder.is_empty else holder.params
            locations = [Ground.of(param.placement) for param in known], planned
            facts += [f"'{param.name}', {list(param.shape)}" for param in holder.params]
        ranks.agree(*facts, what="model")
        both = ranks.gather(locations)
        self._before: Places = {rank: before for rank, (before, _) in both.items() if before}
        self._after: Places = {rank: after for rank, (_, after) in both.items() if after}
        names = [param.name for param in holder.params]
        of_model = "the model on all ranks of its meshes, and without values on the others"
        before = _by_param(self._before, names, of_model)
        after = _by_param(self._after, names, "all ranks of the mesh to call move() with it")
        self._ways = list(map(_ways_of, names, before, after))  # of each parameter

    def _joining(self) -> list[int]:
        """Return the ranks that will have values and have none yet."""
        return sorted(self._after.keys() - self._before.keys())

    def _describe(self) -> tuple[Description, Tensors]:
        """Return the description of the model, the same on all ranks, and the values of this rank.

        The ranks that have the model agree on it; the first of them sends it to the others.
        """
        own, tensors, sent, first = Description(), Tensors(), b"", next(iter(self._before))
        if self._rank in self._before:
            with self._ranks.noting_failure():
                own, tensors = self._holder.describe(has_joining=bool(self._joining()))
                sent = pickle.dumps(own) if self._rank == first else b""
        self._ranks.agree()
        described: Description = pickle.loads(self._ranks.from_one(sent, first))
        facts = [f"{key}: {item}" for key, item in _items(own or described).items()]
        self._ranks.agree(*sorted(facts), what="state")
        return described, tensors

    # The transfers ----------------------------------------------------------------------------

    def _send(
        self, items: Mapping[Key, Item], before: Tensors, after: Tensors, bucket_nbytes: int
    ) -> None:
        """Fill the new tensors. Collective: an all-to-all for each bucket."""
        rank, keys = self._rank, list(items)

        def view(piece: Piece, tensors: Tensors, places: Places) -> torch.Tensor:
            key = keys[piece.tensor]
            item = items[key]
            held = whole(item.shape)
            if item.param is not None:
                held = places[rank][item.param].box(item.shape, item.dim)
            return exchange.part_of(tensors[key], piece.box.within(held))

        source = partial(view, tensors=before, places=self._before)
        target = partial(view, tensors=after, places=self._after)
        pieces = [piece for n, key in enumerate(keys) for piece in self._pieces(n, items[key])]
        for piece in pieces:
            if piece.source == piece.target == rank:
                target(piece).copy_(source(piece))
        group = self._ranks.group
        assert group is not None
        places = {number: place for place, number in enumerate(self._ranks.numbers)}
        device = _torch.device_for(group, self._holder.groups[0].mesh.device)
        over = exchange.Ranks(group, places[rank], tuple(range(len(places))), device)
        away = [piece for piece in pieces if piece.source != piece.target]
        itemsizes = [item.dtype.itemsize for item in items.values()]
        for some in rounds_of(away, itemsizes, bucket_nbytes):
            sent: list[list[torch.Tensor]] = [[] for _ in places]
            received: list[list[torch.Tensor]] = [[] for _ in places]
            for piece in some:
                if piece.source == rank:
                    sent[places[piece.target]].append(source(piece))
                elif piece.target == rank:
                    received[places[piece.source]].append(target(piece))
            nbytes = [sum(padded(tensor.nbytes) for tensor in tensors) for tensors in received]
            exchange.Exchange(over, sent, nbytes, self._ranks.doing).write(received)

    def _pieces(self, number: int, item: Item) -> Iterator[Piece]:
        """Yield the pieces of an item that move; ranks keep full tensors that they have.

        A rank that joins gets full tensors from a rank that shares all of its meshes, if there is
        one, and else from the first rank.
        """
        if item.param is not None:
            for way in self._ways[item.param]:
                yield from pieces_of(number, item.shape, item.dim, *way)
            return
        for rank in self._joining():
            meshes = [ground.ranks for ground in self._after[rank]]
            near = [one for one in self._before if all(one in ranks for ranks in meshes)]
            yield Piece(number, [*near, *self._before][0], rank, whole(item.shape))


def _by_param(places: Places, names: Sequence[str], expected: str) -> list[list[Ground]]:
    """Return the different locations of each parameter.

    Raises:
        ShardError: If ranks of a location are missing, or have another one.
    """
    wanted = {rank for grounds in places.values() for one in grounds for rank in one.ranks}
    if not places or wanted != places.keys():
        got = f"ranks {[*places]} and meshes of ranks {sorted(wanted)}"
        raise ShardError(f"Expected {expected}, got {got}")
    found = [list(dict.fromkeys(grounds)) for grounds in zip(*places.values(), strict=True)]
    for index, grounds in enumerate(found):
        for ground in grounds:
            others = [other for rank in ground.ranks if (other := places[rank][index]) != ground]
            if others:
                raise ShardError(
                    f"Expected parameter '{names[index]}' on the same mesh on all of its ranks, "
                    f"got {ground} and {others[0]}"
                )
    return found


def _ways_of(
    name: str, before: Sequence[Ground], after: Sequence[Ground]
) -> list[tuple[Ground, Ground]]:
    """Return the old and the new location of a parameter, for each of its new meshes.

    The source is the one mesh that shares ranks with the new mesh, or the only mesh.
    """
    found = []
    for target in after:
        near = [ground for ground in before if not {*ground.ranks}.isdisjoint(target.ranks)]
        source, *others = near or before
        if others:
            raise ShardError(
                f"Expected '{name}' of ranks {list(target.ranks)} to come from one mesh, got "
                f"meshes of ranks {[list(ground.ranks) for ground in near or before]}"
            )
        found.append((source, target))
    return found


def move(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    mesh: DeviceMesh | Mapping[Fits, DeviceMesh],
    *,
    bucket_nbytes: int = 64 * 2**20,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Move a sharded model to another mesh: to fewer or more ranks, or to hybrid sharding.

    Shards, reduced gradients and optimizer states are resharded, as a checkpoint would reshard
    them; every rank receives the parts that it lacks. Parameters stay the same objects, with their
    hooks and attributes, so optimizers keep working, including those of ``composable_shard.optim``.
    On ranks that stay, gradients and states are also the same objects. Settings of modules stay.

    A rank outside of ``mesh`` then holds no shards: its parameters are empty DTensors on that mesh,
    and using the model there is an error, until a later call moves it to a mesh with this rank. A
    rank that never had the model joins with a model on the meta device, sharded over ``mesh`` or
    over the rank alone; it receives parameters, buffers, states, and the settings of parameter
    groups. Unsharded tensors do not change on ranks that have them.

    Args:
        model: A model with sharded modules.
        optimizer: Its optimizer, or several, or none, ``()``; in the same order on all ranks.
        mesh: 1-D, or 2-D ``(replicate, shard)`` with names, as for :func:`fully_shard`; or a
            mapping to meshes from patterns of names (``"*.experts.*"``) or functions of a name and
            a parameter: the first that fits a parameter decides. All ranks pass it, including ranks
            outside of it.
        bucket_nbytes: The bytes of messages that a rank holds at a time.
        process_group: The ranks of both meshes, which all call this; all ranks if absent.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``bucket_nbytes`` is not positive.
        RankMismatchError: On all ranks, if models, optimizers or meshes differ.
        ShardError: On all ranks, if an argument is wrong on some ranks, or a rank cannot move; the
            model is then unchanged. In a forward or backward, within :func:`unsharded` and
            :func:`parked`; for gradients that are not reduced; for tensor subclasses and tensor
            parallelism; for parameters on different meshes of different ranks that would move to
            one mesh; for a mesh without a parameter.

    Collective: an all-to-all for each bucket, and a few all-gathers of small objects; with
        :func:`with_layout`, those of its ``state_dict`` and ``load_state_dict``.
    Memory: both layouts and one bucket. States that owners hold are sharded in between.

    Example:
        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def go_hybrid():
        ...     model = fully_shard(nn.Linear(2, 4, bias=False))
        ...     pairs = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        ...     move(model, (), pairs)
        ...     return model.weight.placements, tuple(model.weight.to_local().shape)
        >>> run_threads(go_hybrid, 2)[0]
        ((Replicate(), Shard(dim=0)), (4, 2))
    """
    ranks = Ranks(process_group, "moving a model")
    with ranks.checking():
        check_module("model", model)
        meshes: Meshes = mesh if isinstance(mesh, Mapping) else {"*": mesh}
        for target in meshes.values():
            check_type("mesh", target, isinstance(target, DeviceMesh), "a DeviceMesh")
        check_int("bucket_nbytes", bucket_nbytes, 1)
        optimizers, groups = listed_optimizers(optimizer), sharded_groups(model, "move()")
    for group in groups:
        if not group.tree.is_computing:
            group.reshard()
    host.synchronize()
    with torch.inference_mode(False), torch.no_grad():
        _Move(_Holder(model, groups, optimizers), ranks).go(meshes, bucket_nbytes)
