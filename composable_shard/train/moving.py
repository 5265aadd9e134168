"""Moving a model to other ranks: shards, gradients and optimizer states, without a disk."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.arguments import check_int, check_module, check_type, listed_optimizers
from composable_shard.core.group import ON_OTHER_RANKS, ParamGroup
from composable_shard.core.hooks import groups_in
from composable_shard.core.reduction import is_partial
from composable_shard.core.transport import host
from composable_shard.core.tree import check_at_rest
from composable_shard.errors import ShardError
from composable_shard.mesh import check_reshard
from composable_shard.optim import exchange
from composable_shard.optim.blocks import Box, padded, whole
from composable_shard.optim.exchange import part_of
from composable_shard.optim.layouts import Fits
from composable_shard.train.cargo import Item, Possession, Tensors, Told
from composable_shard.train.places import Ground, Meshes, Piece, Target, pieces_of, rounds_of
from composable_shard.train.ranks import Ranks

DEFAULT_BUCKET_NBYTES = 64 * 2**20


# Whether it can be moved --------------------------------------------------------------------------


def _check_group(group: ParamGroup) -> None:
    """Raise if a group cannot be moved."""
    check_at_rest(group, "move")
    if group.absence != ON_OTHER_RANKS:
        group.check_in_memory("to be moved")
    if group.tree.is_reducing:
        raise ShardError(
            f"Expected the gradients of {group.label} before it is moved, got some that are being "
            "reduced; end the backward first"
        )
    for param in group.params:
        if param.placement.model is not None:
            raise ShardError(
                f"Expected parameter '{param.name}' to be sharded by fully_shard alone for a model "
                "to move, got one under tensor parallelism; such a model is moved by a checkpoint"
            )
        if param.name in group.unsynced_names or is_partial(param.sharded.grad):
            raise ShardError(
                f"Expected a reduced gradient of '{param.name}', got one that was accumulated "
                "without sync; call synchronize_gradients() first"
            )


# The move, on all ranks ---------------------------------------------------------------------------

Places = dict[int, tuple[Ground, ...]]
"""By rank, the current or the new location of each parameter; without ranks that hold nothing."""


class _Move:
    """The move of a model.

    Args:
        owner: The model on this rank.
        meshes: The new meshes.
        ranks: All ranks that take part.
    """

    def __init__(self, owner: Possession, meshes: Meshes, ranks: Ranks) -> None:
        self._owner, self._meshes, self._ranks = owner, meshes, ranks
        self._before, self._after = Places(), Places()
        self._ways: list[list[tuple[Ground, Ground]]] = []  # from and to, for each parameter
        self._agree = partial(ranks.agree, expected="all ranks to move the model")

    def go(self, bucket_nbytes: int) -> None:
        """Move everything, or nothing."""
        self._check(bucket_nbytes)
        told, before = self._tell()
        after = Tensors()
        try:
            with self._ranks.noting_failure():
                if self._target.is_member:
                    after = self._owner.make_room(told, self._target)
            self._agree([], "model")
            self._send(told, before, after, bucket_nbytes)
            self._agree([], "model")
        except BaseException:
            self._owner.stay()
            raise
        before.clear()
        if self._target.is_member:
            self._owner.settle(told, after, self._target)
        else:
            self._owner.leave(self._target)

    def _check(self, bucket_nbytes: int) -> None:
        """Exchange where the model is and where it moves, and check that all ranks agree.

        Raises:
            ShardError: On all ranks, if a rank cannot move it.
        """
        locations: tuple[list[Ground], list[Ground]] = [], []
        facts = [f"bucket_nbytes {bucket_nbytes}"]
        with self._ranks.noting_failure():
            locations = self._own_places()
            facts += [f"'{param.name}', {list(param.shape)}" for param in self._owner.params]
        self._agree(facts, "model")
        for rank, both in zip(self._ranks.numbers, self._ranks.gather(locations), strict=True):
            for places, grounds in zip((self._before, self._after), both, strict=True):
                if grounds:
                    places[rank] = tuple(grounds)
        self._check_complete()
        with self._ranks.noting_failure():
            for index, param in enumerate(self._owner.params):
                self._ways.append(self._ways_of(param.name, index))
        self._agree([], "model")

    def _joining(self) -> list[int]:
        """Return the ranks that will have values and have none yet."""
        return sorted(self._after.keys() - self._before.keys())

    def _own_places(self) -> tuple[list[Ground], list[Ground]]:
        owner = self._owner
        for group in owner.groups:
            _check_group(group)
        if not owner.groups:
            raise ShardError(
                "Expected a model with sharded modules, got none; apply fully_shard to it"
            )
        self._target = target = Target(owner.model, owner.params, self._meshes)
        if target.is_member:
            for group in owner.groups:
                over = [target.of_group(group), *(target.over[param] for param in group.params)]
                check_reshard(group.settings.reshard_after_forward, over)
        return owner.grounds(), target.grounds()

    def _check_complete(self) -> None:
        """Raise if ranks of the old or new meshes are missing, or differ."""
        needed, wanted = (
            {rank for grounds in places.values() for ground in grounds for rank in ground.ranks}
            for places in (self._before, self._after)
        )
        if not self._before or needed != self._before.keys():
            raise ShardError(
                "Expected the model on all ranks of its meshes, and without values on the others, "
                f"got it on ranks {[*self._before]} and meshes of ranks {sorted(needed)}"
            )
        missing = sorted(wanted - self._after.keys())
        if missing or not self._after:
            raise ShardError(
                "Expected all ranks of the mesh to call move() with it, got none of "
                f"{missing or 'them'}"
            )
        for places in (self._before, self._after):
            for index, param in enumerate(self._owner.params):
                for ground in dict.fromkeys(grounds[index] for grounds in places.values()):
                    others = [rank for rank in ground.ranks if places[rank][index] != ground]
                    if others:
                        raise ShardError(
                            f"Expected parameter '{param.name}' on the same mesh on all of its "
                            f"ranks, got {places[others[0]][index]} on rank {others[0]}, of "
                            f"{ground}"
                        )

    def _ways_of(self, name: str, index: int) -> list[tuple[Ground, Ground]]:
        """Return the old and the new location of a parameter, for each of its meshes.

        The source is the one mesh that shares ranks with the new mesh, or the only mesh.
        """
        before = list(dict.fromkeys(grounds[index] for grounds in self._before.values()))
        found = []
        for after in dict.fromkeys(grounds[index] for grounds in self._after.values()):
            near = [ground for ground in before if not {*ground.ranks}.isdisjoint(after.ranks)]
            sources = near or before
            if len(sources) > 1:
                raise ShardError(
                    f"Expected parameter '{name}' of ranks {list(after.ranks)} to come from one "
                    f"mesh, got meshes of ranks {[list(ground.ranks) for ground in sources]}, "
                    "which may have other values"
                )
            found.append((sources[0], after))
        return found

    def _tell(self) -> tuple[Told, Tensors]:
        """Return the description of the model, the same on all ranks, and the values of this rank.

        The ranks that have the model agree on it; the first of them sends it to the others.
        """
        own: Told | None = None
        tensors, sent = Tensors(), b""
        first = next(iter(self._before))
        if dist.get_rank() in self._before:
            with self._ranks.noting_failure():
                own, tensors = self._owner.told(has_joining=bool(self._joining()))
                sent = pickle.dumps(own) if dist.get_rank() == first else b""
        self._agree([], "model")
        told: Told = pickle.loads(self._ranks.from_one(sent, first))
        self._agree((own or told).facts(), "state")
        return told, tensors

    # The transfers ----------------------------------------------------------------------------

    def _send(self, told: Told, before: Tensors, after: Tensors, bucket_nbytes: int) -> None:
        """Fill the new tensors. Collective: an all-to-all for each bucket."""
        pieces, itemsizes = list[Piece](), list[int]()
        out, into = list[_Part](), list[_Part]()
        for key, item in told.items.items():
            out.append((before.get(key), self._box(item, self._before)))
            into.append((after.get(key), self._box(item, self._after)))
            pieces += self._pieces(len(itemsizes), item)
            itemsizes.append(item.dtype.itemsize)
        rank = dist.get_rank()
        for piece in pieces:
            if piece.source == piece.target == rank:
                _part(into, piece).copy_(_part(out, piece))
        goes = [piece for piece in pieces if piece.source != piece.target]
        for some in rounds_of(goes, itemsizes, bucket_nbytes):
            self._exchange(some, out, into)

    def _box(self, item: Item, places: Places) -> Box | None:
        """Return this rank's part of an item; ``None`` if it has no part of the model."""
        rank = dist.get_rank()
        if rank not in places or item.param is None:
            return whole(item.shape) if rank in places else None
        return places[rank][item.param].holding(item.shape, item.dim)[rank][0]

    def _pieces(self, number: int, item: Item) -> list[Piece]:
        """Return the pieces of an item that move; ranks keep full tensors that they have."""
        found = list[Piece]()
        if item.param is not None:
            for ground in self._ways[item.param]:
                found += pieces_of(number, *(one.holding(item.shape, item.dim) for one in ground))
            return found
        for place, rank in enumerate(self._joining()):
            grounds = self._after[rank]  # with ranks of all of them it shares everything
            near = [one for one in self._before if all(one in ground.ranks for ground in grounds)]
            sources = near or [*self._before]
            found.append(Piece(number, sources[place % len(sources)], rank, whole(item.shape)))
        return found

    def _exchange(
        self, pieces: Sequence[Piece], out: Sequence[_Part], into: Sequence[_Part]
    ) -> None:
        group, rank = self._ranks.group, dist.get_rank()
        assert group is not None
        places = {number: place for place, number in enumerate(self._ranks.numbers)}
        sent: list[list[torch.Tensor]] = [[] for _ in places]
        received: list[list[torch.Tensor]] = [[] for _ in places]
        for piece in pieces:
            if piece.source == rank:
                sent[places[piece.target]].append(_part(out, piece))
            if piece.target == rank:
                received[places[piece.source]].append(_part(into, piece))
        device = _torch.device_for(group, self._owner.groups[0].mesh.device)
        over = exchange.Ranks(group, places[rank], tuple(range(len(places))), device)
        nbytes = [sum(padded(tensor.nbytes) for tensor in tensors) for tensors in received]
        exchange.Exchange(over, sent, nbytes, self._ranks.doing).write(received)


_Part = tuple[torch.Tensor | None, Box | None]
"""A tensor of this rank, and its range in the full tensor."""


def _part(tensors: Sequence[_Part], piece: Piece) -> torch.Tensor:
    """View a piece in the tensor that contains it."""
    tensor, box = tensors[piece.tensor]
    assert tensor is not None and box is not None
    return part_of(tensor, piece.box.within(box))


def move(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    mesh: DeviceMesh | Mapping[Fits, DeviceMesh],
    *,
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
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
    ranks = Ranks(process_group, f"moving {type(model).__name__}")
    with ranks.checking():
        check_module("model", model)
        for target in mesh.values() if isinstance(mesh, Mapping) else (mesh,):
            check_type("mesh", target, isinstance(target, DeviceMesh), "a DeviceMesh")
        check_int("bucket_nbytes", bucket_nbytes, 1)
        optimizers, groups = listed_optimizers(optimizer), groups_in(model.modules())
    for group in groups:
        if not group.tree.is_computing:
            group.reshard()
        group.register_params()
    host.settle()
    with torch.inference_mode(False), torch.no_grad():
        _Move(Possession(model, groups, optimizers), mesh, ranks).go(bucket_nbytes)
