"""Moving a model to other ranks: shards, gradients and optimizer states, without a disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from composable_shard import _torch
from composable_shard.core.codec import needs_extension
from composable_shard.core.gradient import is_partial
from composable_shard.core.group import ON_OTHER_RANKS, ParamGroup, check_reshard
from composable_shard.core.hooks import groups_in
from composable_shard.core.optimizers import watch_optimizer_steps
from composable_shard.core.param import ShardedParam
from composable_shard.core.root import check_at_rest, context_of
from composable_shard.core.transport import host
from composable_shard.core.transport.process_groups import raise_first_difference
from composable_shard.errors import ShardError
from composable_shard.mesh import ShardMesh, resolve_mesh
from composable_shard.optim import exchange
from composable_shard.optim.blocks import Box
from composable_shard.optim.exchange import part_of
from composable_shard.train.moving.cargo import Ground, Item, Possession, Tensors, Told
from composable_shard.train.moving.plan import Piece, pieces_of, rounds_of
from composable_shard.train.optimizers import listed
from composable_shard.train.ranks import Ranks

DEFAULT_BUCKET_NBYTES = 64 * 2**20


# Whether it can be moved --------------------------------------------------------------------------


def _check_group(group: ParamGroup, over: ShardMesh | None) -> None:
    """Raise if a group cannot be moved, or not to the ranks ``over``."""
    check_at_rest(group, "move")
    if group.absence != ON_OTHER_RANKS:
        group.check_awake("to be moved")
    reductions = context_of(group).reductions
    flying = reductions.in_flight
    if flying.groups or flying.all_reducing or reductions.handle is not None:
        raise ShardError(
            f"Expected the gradients of {group.label} before it is moved, got some that are being "
            "reduced; end the backward first"
        )
    if over is not None:
        check_reshard(group.settings.reshard_after_forward, [over])
    for param in group.params:
        _check_param(group, param)


def _check_param(group: ParamGroup, param: ShardedParam) -> None:
    if param.mesh != group.mesh or param.mesh.dims is not None or param.placement.model is not None:
        raise ShardError(
            f"Expected parameter '{param.name}' to be sharded over the mesh of {group.label} "
            "alone, got one of its own, or tensor parallelism; such a model is moved by a "
            "checkpoint"
        )
    if needs_extension(param.local):
        raise ShardError(
            f"Expected parameter '{param.name}' to be a plain tensor, got "
            f"{type(param.local).__name__}; such a model is moved by a checkpoint"
        )
    grad = param.sharded.grad
    if param.is_unsynced or is_partial(grad):
        raise ShardError(
            f"Expected a reduced gradient of '{param.name}', got one that was accumulated without "
            "sync; call synchronize_gradients() first"
        )


def _check_order(mesh: DeviceMesh) -> None:
    """Raise if ranks have other places in process groups, which sort them, than in the mesh."""
    for axis in range(mesh.mesh.ndim):
        if not bool((mesh.mesh.diff(dim=axis) > 0).all()):
            raise ShardError(
                f"Expected a mesh whose ranks ascend along each axis, got {mesh.mesh.tolist()}"
            )


def _check_meshes(owner: Possession) -> None:
    if not owner.groups:
        raise ShardError("Expected a model with sharded modules, got none; apply fully_shard to it")
    if len({group.mesh.mesh for group in owner.groups}) > 1:
        raise ShardError(
            "Expected all groups of the model on one mesh, got several; move its parts one by one"
        )


# All together -------------------------------------------------------------------------------------


class _Move:
    """A model on its way.

    Args:
        owner: What this rank has.
        mesh: Where to.
        ranks: All that take part.
    """

    def __init__(self, owner: Possession, mesh: DeviceMesh, ranks: Ranks) -> None:
        self._owner, self._mesh, self._ranks = owner, mesh, ranks
        self._target = Ground.of(mesh)
        self._over: ShardMesh | None = None

    def check(self) -> Ground:
        """Return the ranks that have the model, on which all agree.

        Raises:
            ShardError: On all ranks, if one of them cannot move it.
        """
        origin, names = None, list[str]()
        with self._ranks.noting_failure():
            _check_order(self._mesh)
            if dist.get_rank() in self._target.ranks:
                self._over = resolve_mesh(self._mesh)
            for group in self._owner.groups:
                _check_group(group, self._over)
            _check_meshes(self._owner)
            origin = self._owner.ground()
            names = [f"'{param.name}', {list(param.shape)}" for param in self._owner.params]
        self._agree([str(self._target), *names], "model and the same mesh to move it to")
        origins = dict(zip(self._ranks.numbers, self._ranks.gather(origin), strict=True))
        known = {ground for ground in origins.values() if ground is not None}
        having = {rank for rank, ground in origins.items() if ground is not None}
        if len(known) != 1 or having != set(next(iter(known)).ranks):
            raise ShardError(
                "Expected the model on all ranks of one mesh, and without values on the others, "
                f"got it on {sorted(having)} of meshes {sorted(known)}"
            )
        missing = sorted(set(self._target.ranks) - set(origins))
        if missing:
            raise ShardError(
                f"Expected all ranks of the mesh to call move(), got none of {missing}"
            )
        return known.pop()

    def tell(self, origin: Ground) -> tuple[Told, Tensors]:
        """Return what moves, as all ranks know it, and what of it this one has."""
        own: Told | None = None
        tensors, text = Tensors(), ""
        if dist.get_rank() in origin.ranks:
            with self._ranks.noting_failure():
                own, tensors = self._owner.told()
                text = hashlib.sha256(repr(own.items).encode()).hexdigest()
        is_first = dist.get_rank() == origin.ranks[0]
        heard = self._ranks.gather((self._ranks.failure, text, own if is_first else None))
        for rank, (failure, _, _) in zip(self._ranks.numbers, heard, strict=True):
            if failure is not None:
                raise ShardError(
                    f"Expected all ranks to move the model, got on rank {rank}: {failure}"
                )
        if len({theirs for _, theirs, _ in heard if theirs}) > 1:
            facts = self._ranks.gather(None if own is None else own.facts())
            known = [(r, f) for r, f in zip(self._ranks.numbers, facts, strict=True) if f]
            raise_first_difference([f for _, f in known], [r for r, _ in known], "state")
        told = next(theirs for _, _, theirs in heard if theirs is not None)
        return told, tensors

    def go(self, bucket_nbytes: int) -> None:
        """Move everything, or nothing."""
        origin = self.check()
        told, before = self.tell(origin)
        after = Tensors()
        try:
            with self._ranks.noting_failure():
                if self._over is not None:
                    after = self._owner.make_room(told, self._target, self._over)
            self._agree([], "model")
            self._send(origin, told, before, after, bucket_nbytes)
            self._agree([], "model")
        except BaseException:
            self._owner.stay()
            raise
        before.clear()
        if self._over is not None:
            self._owner.settle(told, after, self._target, self._over)
        else:
            self._owner.leave(self._mesh, self._target)

    def _agree(self, facts: Sequence[str], what: str) -> None:
        failure = self._ranks.agree(facts, what)
        if failure is not None:
            raise ShardError(f"Expected all ranks to move the model, got {failure}")

    # The way ----------------------------------------------------------------------------------

    def _send(
        self, origin: Ground, told: Told, before: Tensors, after: Tensors, bucket_nbytes: int
    ) -> None:
        """Fill what is to be had. Collective: an all-to-all for each bucket."""
        items, rank = list(told.items.values()), dist.get_rank()
        keys = list(told.items)
        pieces = [p for i, item in enumerate(items) for p in self._pieces(i, item, origin)]
        parts = _Parts(
            [before.get(key) for key in keys],
            [after.get(key) for key in keys],
            [origin.holding(item.shape, item.dim).box(rank) for item in items],
            [self._target.holding(item.shape, item.dim).box(rank) for item in items],
        )
        stays = [piece for piece in pieces if piece.source == piece.target]
        for piece in stays:
            if piece.target == rank:
                parts.into(piece).copy_(parts.out_of(piece))
        goes = [piece for piece in pieces if piece.source != piece.target]
        itemsizes = [item.dtype.itemsize for item in items]
        for some in rounds_of(goes, itemsizes, bucket_nbytes):
            self._exchange(some, parts)

    def _pieces(self, index: int, item: Item, origin: Ground) -> list[Piece]:
        """Return what moves of an item; who has a copy of what is not sharded keeps it."""
        before = origin.holding(item.shape, item.dim)
        pieces = pieces_of(index, before, self._target.holding(item.shape, item.dim))
        if item.is_sharded:
            return pieces
        return [piece for piece in pieces if piece.target not in origin.ranks]

    def _exchange(self, pieces: Sequence[Piece], parts: _Parts) -> None:
        group, rank = self._ranks.group, dist.get_rank()
        assert group is not None
        places = {number: place for place, number in enumerate(self._ranks.numbers)}
        out: list[list[torch.Tensor]] = [[] for _ in places]
        into: list[list[torch.Tensor]] = [[] for _ in places]
        for piece in pieces:
            if piece.source == rank:
                out[places[piece.target]].append(parts.out_of(piece))
            if piece.target == rank:
                into[places[piece.source]].append(parts.into(piece))
        device = _torch.device_for(group, torch.device(self._mesh.device_type))
        over = exchange.Ranks(group, places[rank], tuple(range(len(places))), device)
        nbytes = [sum(tensor.nbytes for tensor in tensors) for tensors in into]
        exchanged = exchange.Exchange(over, out, nbytes, self._ranks.doing)
        exchanged.wait()
        exchanged.write(into)


class _Parts:
    """What pieces are parts of, on this rank."""

    def __init__(
        self,
        before: Sequence[torch.Tensor | None],
        after: Sequence[torch.Tensor | None],
        boxes_before: Sequence[Box | None],
        boxes_after: Sequence[Box | None],
    ) -> None:
        self._before, self._after = before, after
        self._boxes_before, self._boxes_after = boxes_before, boxes_after

    def out_of(self, piece: Piece) -> torch.Tensor:
        """View a piece where it is."""
        return _part(self._before[piece.tensor], self._boxes_before[piece.tensor], piece)

    def into(self, piece: Piece) -> torch.Tensor:
        """View a piece where it is to be."""
        return _part(self._after[piece.tensor], self._boxes_after[piece.tensor], piece)


def _part(tensor: torch.Tensor | None, box: Box | None, piece: Piece) -> torch.Tensor:
    assert tensor is not None and box is not None
    return part_of(tensor, piece.box.within(box))


def move(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    mesh: DeviceMesh,
    *,
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Let a sharded model lie on another mesh from now on: fewer ranks, more, or hybrid ones.

    Shards, reduced gradients and the states of optimizers are cut anew, as a checkpoint would cut
    them; every rank is given what it lacks by those that have it. Parameters are the same objects
    as before, with their hooks and attributes, so optimizers go on with them, those of
    ``composable_shard.optim`` too. So are gradients and states on ranks that stay. What users set
    on modules stays as well.

    A rank that is not in ``mesh`` has nothing of what is sharded afterwards: its parameters are
    empty DTensors on that mesh, and to use the model there is an error, until a later call moves it
    to a mesh with this rank. One that has never had the model joins with one on the meta device
    that was sharded over ``mesh`` before; it is given parameters, buffers, states, and the settings
    of parameter groups. What is not sharded stays as it is on ranks that have it.

    Args:
        model: A model of which all sharded modules are on one mesh.
        optimizer: Its optimizer, or several, or none, ``()``; in the same order on all ranks.
        mesh: 1-D, or 2-D ``(replicate, shard)`` with names, as for :func:`fully_shard`. All ranks
            pass it, those that are not in it too.
        bucket_nbytes: How many bytes of messages a rank has at a time.
        process_group: The ranks of both meshes, which all call this; all ranks if absent.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``bucket_nbytes`` is not positive.
        RankMismatchError: On all ranks, if models, optimizers or meshes differ between them.
        ShardError: On all ranks, if one of them cannot move; everything is as it was then. In a
            forward or backward, within :func:`unsharded` and :func:`parked`; for gradients that are
            not reduced, tensor subclasses, tensor parallelism, and parameters on a mesh of their
            own.

    Collective: an all-to-all for each bucket, and a few all-gathers of small objects; with
        :func:`with_layout`, those of its ``state_dict`` and ``load_state_dict``.
    Memory: both layouts and one bucket. States that lie with owners are sharded in between.

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
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected model to be an nn.Module, got {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"Expected mesh to be a DeviceMesh, got {type(mesh).__name__}")
    if bucket_nbytes < 1:
        raise ValueError(f"Expected bucket_nbytes of at least 1, got {bucket_nbytes}")
    optimizers, groups = listed(optimizer), groups_in(model.modules())
    ranks = Ranks(process_group, f"moving {type(model).__name__}")
    for group in groups:
        if not context_of(group).is_computing:
            group.reshard()
        watch_optimizer_steps(group)
    host.settle()
    with torch.inference_mode(False), torch.no_grad():
        _Move(Possession(model, groups, optimizers), mesh, ranks).go(bucket_nbytes)
