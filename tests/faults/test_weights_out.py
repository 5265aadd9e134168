"""Consumers of full weights that leave, raise, are slow or are killed."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import ShardError, fully_shard, iter_full, unsharded
from composable_shard.testing import run_ranks
from composable_shard.train.weights.gathering import Message

WIDTH, NUM_LAYERS = 4, 5
ONE = WIDTH * WIDTH * 4  # bytes of a layer, which is a bucket by itself here
Left = tuple[int, str | None, bool]


def build() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def is_usable(model: nn.Module) -> bool:
    weights = dict(iter_full(model, bucket_bytes=ONE))
    model(torch.ones(1, WIDTH)).sum().backward()
    same = [torch.equal(full, model.get_parameter(n).full_tensor()) for n, full in weights.items()]
    return len(same) == NUM_LAYERS and all(same)


def stream(on_arrival: Callable[[int], bool], rank0_only: bool = False) -> Left:
    """Return how many tensors came, what was raised, and whether all is well afterwards."""
    model, count, said = build(), 0, None
    arriving = iter_full(model, bucket_bytes=ONE, rank0_only=rank0_only)
    try:
        for _ in arriving:
            count += 1
            if not on_arrival(count):
                break
    except (ShardError, KeyError) as error:
        said = str(error)
    arriving.close()  # kept in a variable, it is not left before
    return count, said, is_usable(model)


def leave(after: dict[int, int], raises: bool = False, rank0_only: bool = False) -> Left:
    def goes_on(count: int) -> bool:
        is_last = count == after.get(dist.get_rank())
        if is_last and raises:
            raise KeyError("consumer")
        return not is_last

    return stream(goes_on, rank0_only)


EXPECTED = "Expected no failure while gathering full weights, got on rank "


@pytest.mark.parametrize("raises", [False, True])
def test_one_rank_leaves(raises: bool) -> None:
    left = (2, f"{EXPECTED}1: it was left after '1.weight'", True)
    found = run_ranks(leave, 3, {1: 2}, raises, timeout=60)
    assert found == [left, (2, "'consumer'" if raises else None, True), left]


@pytest.mark.parametrize("count", [1, 2, NUM_LAYERS - 1, NUM_LAYERS])
def test_all_ranks_leave_at_the_same_place(count: int) -> None:
    found = run_ranks(leave, 2, {0: count, 1: count}, timeout=60)
    assert found == [(count, None, True)] * 2


def test_the_only_rank_that_gets_anything_leaves() -> None:
    left = f"{EXPECTED}0: it was left after '1.weight'"
    found = run_ranks(leave, 2, {0: 2}, False, True, timeout=60)
    assert found == [(2, None, True), (0, left, True)]


def runs_out_of_memory() -> Left:
    """Fail on rank 1 when it is to have memory for the third bucket."""
    prepare, calls = Message.prepare, [0]

    def failing(self: Message) -> None:
        calls[0] += 1
        if calls[0] == 3 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("no memory")
        prepare(self)

    with mock.patch.object(Message, "prepare", failing):
        return stream(lambda _: True)


def test_a_rank_without_memory_is_an_error_on_all() -> None:
    said = f"{EXPECTED}1: OutOfMemoryError: no memory"
    assert run_ranks(runs_out_of_memory, 2, timeout=60) == [(1, said, True)] * 2


@on_ranks(3)
def test_a_consumer_communicates_in_between() -> None:
    """Use the same process group for every tensor, one rank being slow."""
    same = []
    for index, (_, full) in enumerate(iter_full(build(), bucket_bytes=2 * ONE)):
        if dist.get_rank() == index % 3:
            time.sleep(0.05)
        summed = full.clone()
        dist.all_reduce(summed)
        dist.barrier()
        same.append(torch.equal(summed, full + full + full))
    assert same == [True] * NUM_LAYERS


def is_killed(folder: Path) -> None:
    """Kill rank 1 in the middle; what the others hear is left in files."""
    rank, start = dist.get_rank(), time.monotonic()
    count = 0
    try:
        for _ in iter_full(build(), bucket_bytes=ONE):
            count += 1
            if rank == 1 and count == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    except ShardError as error:
        seconds = time.monotonic() - start
        (folder / str(rank)).write_text(f"{count} {seconds:.0f} {type(error).__name__} {error}")
        raise


def test_a_rank_is_killed_in_the_middle(tmp_path: Path) -> None:
    with contextlib.suppress(Exception):
        run_ranks(is_killed, 3, tmp_path, timeout=60)
    for rank in (0, 2):
        count, seconds, kind, *said = (tmp_path / str(rank)).read_text().split()
        assert int(count) in (2, 3) and int(seconds) < 30
        assert kind == "CommunicationError"
        assert " ".join(said).startswith(f"Rank {rank} failed while gathering full weights: ")


def leave_unsharded(leaving: int, mesh_shape: tuple[int, ...]) -> tuple[str | None, bool]:
    """Edit on the first rank, and raise on one; return what was raised, and whether all is well."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    torch.manual_seed(1)
    model, said = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=mesh), None
    before = model.weight.full_tensor().clone()
    try:
        with unsharded(model, rank0_only=True), torch.no_grad():
            if dist.get_rank() == 0:
                model.weight.add_(1)
            if dist.get_rank() == leaving:
                raise OSError(28, "No space left on device")
    except (ShardError, OSError) as error:
        said = str(error)
    is_whole = torch.equal(model.weight.full_tensor(), before)
    with unsharded(model, rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            model.weight.add_(1)
    return said, is_whole and torch.equal(model.weight.full_tensor(), before + 1)


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_one_rank_leaves_unsharded(leaving: int, mesh_shape: tuple[int, ...]) -> None:
    """As the first one does whose disk is full; the others wait for its edits then."""
    heard = [
        f"Expected no failure while writing back the edits of unsharded(), got on rank {leaving}: "
        "OSError: [Errno 28] No space left on device"
    ] * math.prod(mesh_shape)
    heard[leaving] = "[Errno 28] No space left on device"
    found = run_ranks(leave_unsharded, len(heard), leaving, mesh_shape, timeout=60)
    assert found == [(said, True) for said in heard]
