"""Making all ranks start from the values of one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.arguments import check_flags, check_int, check_module, check_value
from composable_shard.core.hooks import groups_in
from composable_shard.errors import MaterializationError, ShardError
from composable_shard.mesh import start_process_group
from composable_shard.train.full import repeated_dims, unrepeated
from composable_shard.train.ranks import Ranks

DEFAULT_BUCKET_NBYTES = 32 * 2**20


class _State(NamedTuple):
    name: str
    tensor: torch.Tensor


@torch.no_grad()
def sync_module_states(
    module: nn.Module,
    *,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
    keep_shards: bool = False,
    bucket_nbytes: int = DEFAULT_BUCKET_NBYTES,
) -> None:
    """Overwrite the parameters and buffers of a module by those of one rank, in place.

    Call it before ``fully_shard``, which keeps each rank's own rows of its own values. A module
    that some ranks built on the meta device is made real there first, by ``to_empty``.

    What is sharded already cannot be had from one rank: the rows it gave away are gone. That is
    refused, unless ``keep_shards`` says that shards are right as they are; then buffers, plain
    parameters, and shards of which there are replicas are synchronized.

    Args:
        module: The module, the same on all ranks but for its values.
        src_rank: The global rank whose values win; among replicas of a shard, the first does.
        process_group: The ranks to synchronize; all of them if absent. As in ``fully_shard``, the
            default process group is then started from the environment if there is none.
        keep_shards: Whether sharded parameters keep their rows.
        bucket_nbytes: How many bytes are sent at a time, and what is needed for that.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``src_rank`` is not in the group, ``bucket_nbytes`` is not positive, or
            ``keep_shards`` is no bool.
        MaterializationError: On all ranks, if something is on the meta device on one.
        RankMismatchError: On all ranks, if names, shapes, dtypes or arguments differ between them.
        ShardError: On all ranks, if a parameter is sharded and ``keep_shards`` is not set, if an
            argument is wrong on some of them, or the module is parked or on other ranks.

    Collective: broadcasts of all bytes, in buckets; before, two all-gathers of a small object.
    Memory: one bucket; besides, the largest tensor that is not contiguous.
    Source: ``sync_module_states`` of ``FullyShardedDataParallel`` (FSDP1).

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def start():
        ...     layer = nn.Linear(2, 2, bias=False)
        ...     nn.init.constant_(layer.weight, dist.get_rank() + 1)
        ...     sync_module_states(layer)
        ...     return fully_shard(layer).weight.to_local().tolist()
        >>> run_threads(start, 2)
        [[[1.0, 1.0]], [[1.0, 1.0]]]
    """
    if process_group is None and "RANK" in os.environ:  # else this process may be alone
        start_process_group()
    members = Ranks(process_group, f"synchronizing {type(module).__name__}")
    ranks = members.numbers
    with members.checking():
        check_module("module", module)
        check_int("src_rank", src_rank, 0)
        check_value("src_rank", src_rank, src_rank in ranks, f"to be one of the ranks {ranks}")
        check_flags(keep_shards=keep_shards)
        check_int("bucket_nbytes", bucket_nbytes, 1)
        groups = groups_in(module.modules())
        for owner in groups:
            owner.check_awake("for sync_module_states()")
        for owner in groups:
            owner.reshard()
    said = f"src_rank {src_rank}, keep_shards {keep_shards}, bucket_nbytes {bucket_nbytes}"
    members.agree([said], "arguments of sync_module_states()", "")
    plain, sharded = _states(module)
    _agree(module, [*plain, *sharded], keep_shards, members)
    if members.group is not None and len(ranks) > 1:
        tensors = [state.tensor for state in plain]
        _broadcast(tensors, members.group, ranks.index(src_rank), bucket_nbytes)
    for state in sharded:
        _sync_replicas(state.tensor, bucket_nbytes)


def _states(module: nn.Module) -> tuple[list[_State], list[_State]]:
    """Return parameters and buffers, each once: plain ones, and DTensors."""
    found = [*module.named_parameters(), *module.named_buffers()]
    states = [_State(name, tensor) for name, tensor in found]
    return (
        [state for state in states if not isinstance(state.tensor, DTensor)],
        [state for state in states if isinstance(state.tensor, DTensor)],
    )


def _sync_replicas(tensor: torch.Tensor, bucket_nbytes: int) -> None:
    """Give all replicas of a shard the values of the first. Collective: over their axes."""
    assert isinstance(tensor, DTensor)
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate() and tensor.device_mesh.size(axis) > 1:
            group = tensor.device_mesh.get_group(axis)
            _broadcast([_torch.local_tensor(tensor)], group, 0, bucket_nbytes)


# Agreement ------------------------------------------------------------------------------------


def _agree(module: nn.Module, states: Sequence[_State], keep_shards: bool, members: Ranks) -> None:
    """Raise the same error on all ranks if the states of one cannot be synchronized."""
    facts = [_fact(state) for state in states]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    own = (digest, _first(states, _is_sharded), _first(states, _is_meta))
    heard = members.gather(own)
    for rank, (_, sharded, on_meta) in zip(members.numbers, heard, strict=True):
        if sharded is not None and not keep_shards:
            raise ShardError(
                f"Expected {type(module).__name__} before it is sharded, got '{sharded}' sharded "
                f"on rank {rank}; call sync_module_states before fully_shard, or set "
                "keep_shards=True to synchronize only what is not sharded"
            )
        if on_meta is not None:
            raise MaterializationError(
                f"Expected materialized parameters and buffers on all ranks, got '{on_meta}' on "
                f"the meta device on rank {rank}; call module.to_empty(device=...) there first"
            )
    if len({said for said, *_ in heard}) > 1:
        members.raise_first_difference(facts, "parameters and buffers")


def _first(states: Sequence[_State], what: Callable[[torch.Tensor], bool]) -> str | None:
    return next((state.name for state in states if what(state.tensor)), None)


def _fact(state: _State) -> str:
    tensor = state.tensor
    kind = f", {tensor.placements}" if isinstance(tensor, DTensor) else ""
    repeated = [dim for leaf in _leaves(tensor) for dim in repeated_dims(leaf)]
    repeats = f", repeated along {repeated}" if repeated else ""
    return f"'{state.name}' of shape {list(tensor.shape)}, {tensor.dtype}{kind}{repeats}"


def _is_sharded(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    mesh, placements = tensor.device_mesh, tensor.placements
    return any(mesh.size(axis) > 1 and not p.is_replicate() for axis, p in enumerate(placements))


def _is_meta(tensor: torch.Tensor) -> bool:
    return any(leaf.is_meta for leaf in _leaves(tensor))


def _leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    local = _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    return _torch.leaves(local)


# Buckets --------------------------------------------------------------------------------------


def _broadcast(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int, bucket_nbytes: int
) -> None:
    """Send the bytes of tensors in buckets; what fills one by itself is sent in place."""
    for pieces in _buckets(tensors, bucket_nbytes):
        device = _torch.device_for(group, pieces[0].device)
        if len(pieces) == 1 and pieces[0].device == device:
            dist.broadcast(pieces[0], group=group, group_src=source)
            continue
        bucket = torch.cat([piece.to(device) for piece in pieces])
        dist.broadcast(bucket, group=group, group_src=source)
        for piece, sent in zip(pieces, bucket.split([len(p) for p in pieces]), strict=True):
            piece.copy_(sent)


def _buckets(tensors: Sequence[torch.Tensor], bucket_nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield lists of byte views, of one device and ``bucket_nbytes`` at most.

    A tensor whose bytes do not lie as its values do (of other strides, conjugate or negative views)
    is copied, and written when its last bytes have come; of an expanded one, what it repeats.
    """
    bucket: list[torch.Tensor] = []
    numel = 0
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for expanded in [leaf for tensor in tensors for leaf in _leaves(tensor)]:
        leaf = unrepeated(expanded, repeated_dims(expanded))
        flat = leaf.resolve_conj().resolve_neg().contiguous()
        if flat.data_ptr() != leaf.data_ptr():
            copies.append((leaf, flat))
        left = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
        if bucket and bucket[0].device != left.device:
            yield bucket
            bucket, numel = [], 0
        while len(left):
            piece, left = left[: bucket_nbytes - numel], left[bucket_nbytes - numel :]
            bucket.append(piece)
            numel += len(piece)
            if numel == bucket_nbytes:
                yield bucket
                bucket, numel = [], 0
                _write(copies, flat if len(left) else None)
    if bucket:
        yield bucket
    _write(copies, None)


def _write(
    copies: list[tuple[torch.Tensor, torch.Tensor]], unfinished: torch.Tensor | None
) -> None:
    """Write the copies whose bytes have all come, and let go of them."""
    kept = [(leaf, flat) for leaf, flat in copies if flat is unfinished]
    for leaf, flat in copies:
        if flat is not unfinished:
            leaf.copy_(flat)
    copies[:] = kept
