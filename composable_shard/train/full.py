"""A tensor in parts on several ranks: the part of each rank, the full tensor, and its changes."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise, product
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from composable_shard import _torch
from composable_shard.errors import ExtensionError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NUM_FACTORS = 2**18  # numbers that a digest reads at a time: few enough for a cache
_FACTOR_OF_PIECES = 0x9E3779B97F4A7C15

# The part of a tensor that a rank holds -----------------------------------------------------------

Box = tuple[slice, ...]  # a range of each dim


def boxes_of(
    tensor: torch.Tensor, coordinate: Sequence[int] | None = None
) -> Iterator[tuple[Box, Box]]:
    """Yield the ranges of a full tensor that a rank holds, and where each is in its local part.

    Usually there is one range. There are several if the rank's rows are not contiguous, and none if
    the rank holds nothing.

    Args:
        tensor: A DTensor, or a plain tensor that each rank has in full.
        coordinate: The coordinate of the rank in the mesh; by default that of this rank.
    """
    if tensor.numel():
        for runs in product(*_runs_by_dim(tensor, coordinate)):
            yield tuple(full for full, _ in runs), tuple(own for _, own in runs)


def shape_of(tensor: torch.Tensor, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Return the local shape of a tensor on a rank."""
    runs_by_dim = _runs_by_dim(tensor, coordinate)
    return tuple(runs[-1][1].stop if runs else 0 for runs in runs_by_dim)


def sharded_axes(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the axes of a mesh over which a tensor is sharded."""
    cuts = enumerate(placements)
    return tuple(axis for axis, p in cuts if not p.is_replicate() and mesh.size(axis) > 1)


_Runs = tuple[tuple[slice, slice], ...]


def _runs_by_dim(tensor: torch.Tensor, coordinate: Sequence[int] | None) -> list[_Runs]:
    """Return a rank's rows of each dim. Each placement cuts one dim, so it holds their product."""
    if not isinstance(tensor, DTensor):
        return [_runs((), length) for length in tensor.shape]
    mesh = tensor.device_mesh
    place = mesh.get_coordinate() if coordinate is None else coordinate
    assert place is not None
    cuts = list(zip(tensor.placements, mesh.shape, place, strict=True))
    return [
        _runs(tuple(cut for cut in cuts if _torch.shards_dim(cut[0], dim)), length)
        for dim, length in enumerate(tensor.shape)
    ]


@lru_cache(maxsize=4096)
def _runs(cuts: tuple[tuple[Placement, int, int], ...], length: int) -> _Runs:
    """Return the runs of contiguous rows of a dim that a rank holds after all cuts.

    The placements cut the numbers of the rows, so this holds for shards that are uneven, or cut by
    several axes of a mesh in whatever order.
    """
    if not cuts:
        return ((slice(0, length), slice(0, length)),)
    rows = torch.arange(length, device="cpu")
    for placement, num_parts, place in cuts:
        rows = _torch.split(rows, _torch.with_dim(placement, 0), num_parts)[place]
    if not len(rows):
        return ()
    breaks = (torch.nonzero(rows.diff() != 1).flatten() + 1).tolist()
    return tuple(
        (slice(first := int(rows[start]), first + end - start), slice(start, end))
        for start, end in pairwise([0, *breaks, len(rows)])
    )


# The full tensor ----------------------------------------------------------------------------------


def full_copy(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the full values of a DTensor in new memory, on the device of compute.

    Args:
        tensor: The DTensor; a plain tensor is copied.
        name: Its name in messages.

    Raises:
        ExtensionError: If its class cannot be gathered, or would change.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    mesh, placements, local = tensor.device_mesh, tensor.placements, _torch.local_tensor(tensor)
    whole = cast(DTensor, tensor.detach())
    if local.device.type != mesh.device_type:
        whole = _torch.local_like(tensor, local.detach().to(mesh.device_type))
    kind, is_of_user = type(local), _torch.is_user_subclass(local)
    try:
        full = whole.full_tensor()
        if is_of_user and not isinstance(full, kind):
            raise TypeError(f"a {type(full).__name__}")
    except Exception as error:
        if not is_of_user:
            raise
        raise ExtensionError(
            f"Expected {name}, a {kind.__name__}, to have the ops by which DTensor makes a full "
            f"tensor of its shards, got {type(error).__name__}: {error}; its hooks gather it for "
            "forward alone, as module.unshard() does"
        ) from error
    # The inner tensors of a subclass may still be in flight: copying waits for them.
    is_shared = not sharded_axes(mesh, placements) or _torch.is_wrapper_subclass(full)
    return full.clone() if is_shared else full


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits, also for NaN and -0."""
    pairs = zip(_torch.leaves(one), _torch.leaves(other), strict=True)
    return all(torch.equal(as_bytes(mine), as_bytes(theirs)) for mine, theirs in pairs)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor, [nbytes]; a view if it is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


# Changes, the same on all ranks -------------------------------------------------------------------


def count_write(tensor: torch.Tensor) -> None:
    """Increase the version counter of a tensor for a write.

    Hazard: a rank that holds none of the written rows sees no change, and gathers in a backward
    that the other ranks refuse. Guard: all ranks count a write of any rank.
    Test: ``tests/faults/test_written_between.py``.
    """
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def digest(tensor: torch.Tensor) -> list[int]:
    """Return 64-bit digests by which a full tensor can be compared with an earlier one.

    There is one for each of its plain tensors. Digests compare only with those of the same device;
    all ranks that have the tensor then find the same result.
    """
    return [_digest_of_plain(leaf.detach()) for leaf in _torch.leaves(tensor)]


def _digest_of_plain(tensor: torch.Tensor) -> int:
    tensor = tensor.contiguous()
    if tensor.device.type == "cpu":  # ten times as fast as the code below
        held = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        return zlib.crc32(held) << 32 | zlib.adler32(held)
    return _sum_of_products(tensor)


def _sum_of_products(tensor: torch.Tensor) -> int:
    """Multiply the bits of a tensor by fixed odd factors of 64 bits, and add up, on its device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    numbers = tensor.view(-1)
    # Split 64-bit numbers into halves: a write may change only their highest bits, and a product
    # modulo 2**64 would keep little of these.
    numbers = numbers.view(_INTEGERS[min(numbers.itemsize, 4)])
    factors = _factors(tensor.device)
    sums = [(piece * factors[: len(piece)]).sum() for piece in numbers.split(_NUM_FACTORS)]
    found = 0
    for term in torch.stack(sums).tolist():
        found = (found * _FACTOR_OF_PIECES + term) % 2**64
    return found


@cache
def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape, bounds = (_NUM_FACTORS,), (-(2**63), 2**63 - 1)
    return (torch.randint(*bounds, shape, generator=generator, device="cpu") | 1).to(device)
