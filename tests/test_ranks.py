"""Running a function on several ranks: results, failures and time-outs reach the caller."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable_shard.core.transport.failures import missing_rank
from composable_shard.testing import (
    RankError,
    RankTimeout,
    fake_ranks,
    run_ranks,
    run_threads,
    stop_ranks,
)


class OddRankError(ValueError):
    """An error that only this module knows."""


def summed_ranks(offset: float = 0.0) -> torch.Tensor:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return total


def fail_on(failing: tuple[int, ...], text: str) -> int:
    if dist.get_rank() in failing:
        raise OddRankError(text)
    return dist.get_rank()


def fail_while_others_wait() -> None:
    if dist.get_rank() == 0:
        raise OddRankError("first")
    dist.barrier()


def hang_on(hanging: int) -> None:
    if dist.get_rank() == hanging:
        sleep_for_ever()


def sleep_for_ever() -> None:
    time.sleep(1000)


def wait_alone() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def leave_collective_open() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def die_on(dying: int) -> None:
    if dist.get_rank() == dying:
        os.kill(os.getpid(), signal.SIGKILL)


def surroundings() -> tuple[int, str, str]:
    return torch.get_num_threads(), os.environ["RANK"], os.environ["WORLD_SIZE"]


def lambda_result() -> object:
    return lambda: None


def lose_the_group() -> int:
    group = dist.group.WORLD
    assert group is not None
    missing_rank(group, 1 - dist.get_rank(), "a test")
    return os.getpid()


@pytest.mark.parametrize(
    "num_ranks", [1, 3, *(pytest.param(count, marks=pytest.mark.matrix) for count in (2, 4))]
)
def test_results_come_in_rank_order(num_ranks: int) -> None:
    assert run_ranks(dist.get_rank, num_ranks) == list(range(num_ranks))


def test_arguments_reach_every_rank() -> None:
    results = run_ranks(summed_ranks, 2, 0.5)
    assert results == run_ranks(summed_ranks, 2, offset=0.5)
    assert results == run_ranks(partial(summed_ranks, 0.5), 2)
    assert [result.item() for result in results] == [2.0, 2.0]


def test_processes_are_kept_between_calls() -> None:
    first = run_ranks(os.getpid, 2)
    assert run_ranks(os.getpid, 2) == first
    assert os.getpid() not in first


def surroundings_and_number() -> tuple[int, str, str, float]:
    return (*surroundings(), torch.rand(()).item())


def test_a_rank_has_one_thread_knows_its_place_and_starts_from_the_same_random_state() -> None:
    torch.manual_seed(0)
    number = torch.rand(()).item()
    for _ in range(2):
        found = run_ranks(surroundings_and_number, 2)
        assert found == [(1, "0", "2", number), (1, "1", "2", number)]


def test_stopped_ranks_are_gone_and_start_again() -> None:
    before = run_ranks(os.getpid, 2)
    stop_ranks()
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert set(run_ranks(os.getpid, 2)).isdisjoint(before)


def test_one_failing_rank_is_named_with_its_traceback() -> None:
    before = run_ranks(os.getpid, 2)
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on, 2, (1,), "odd one")
    error = caught.value
    assert not isinstance(error, RankTimeout)
    (failure,) = error.failures
    assert (failure.rank, failure.exception_type, failure.message) == (1, OddRankError, "odd one")
    assert "in fail_on" in failure.traceback
    assert str(error).startswith("1 of 2 ranks failed:\n[rank 1] OddRankError: odd one\n")
    with pytest.raises(AssertionError, match="Expected one error on all ranks"):
        error.agreed()
    assert set(run_ranks(os.getpid, 2)).isdisjoint(before)


def test_the_same_failure_on_all_ranks_keeps_the_processes() -> None:
    before = run_ranks(os.getpid, 2)
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on, 2, (0, 1), "both")
    assert [failure.rank for failure in caught.value.failures] == [0, 1]
    assert caught.value.agreed().exception_type is OddRankError
    assert caught.value.agreed().message == "both"
    assert run_ranks(os.getpid, 2) == before


def test_a_failure_does_not_wait_for_ranks_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("composable_shard.testing.ranks.GRACE", 0.5)
    with pytest.raises(RankError) as caught:
        run_ranks(fail_while_others_wait, 2)
    assert not isinstance(caught.value, RankTimeout)
    assert caught.value.failures[0].message == "first"
    assert caught.value.unfinished == (1,)
    assert "in fail_while_others_wait" in caught.value.stacks[1]
    assert run_ranks(dist.get_rank, 2) == [0, 1]


@pytest.mark.parametrize("fn", [partial(hang_on, 0), wait_alone])
def test_a_hanging_rank_is_killed_and_shown(fn: partial[None]) -> None:
    before = run_ranks(os.getpid, 2)
    with pytest.raises(RankTimeout, match=r"took more than 0.5 s") as caught:
        run_ranks(fn, 2, timeout=0.5)
    assert caught.value.unfinished == (0,)
    assert caught.value.failures == ()
    assert "test_ranks.py" in caught.value.stacks[0]
    assert "had not finished: [0]" in str(caught.value)
    after = run_ranks(os.getpid, 2)
    assert set(after).isdisjoint(before)


def test_a_collective_left_open_is_blamed_on_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composable_shard.testing.ranks.SETTLE_TIMEOUT", 0.5)
    with pytest.raises(RankTimeout, match="a collective of it is still open"):
        run_ranks(leave_collective_open, 2)
    assert run_ranks(dist.get_rank, 2) == [0, 1]


def test_a_rank_that_dies_is_an_error() -> None:
    with pytest.raises(RankError, match=r"\[rank 1\] .* ended during the call, exit code -9"):
        run_ranks(die_on, 2, 1)
    assert run_ranks(dist.get_rank, 2) == [0, 1]


def lose_the_group_and_fail() -> None:
    lose_the_group()
    raise ValueError("alike")


def test_ranks_whose_group_is_lost_are_not_used_again_nor_if_the_call_failed_alike() -> None:
    first = run_ranks(lose_the_group, 2)
    second = run_ranks(os.getpid, 2)
    assert not {*first} & {*second}
    with pytest.raises(RankError, match="alike"):
        run_ranks(lose_the_group_and_fail, 2)
    assert not {*second} & {*run_ranks(os.getpid, 2)}


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="Expected a module-level function"):
        run_ranks(lambda: None, 2)
    with pytest.raises(RankError) as caught:
        run_ranks(lambda_result, 2)
    assert "pickle" in caught.value.agreed().message


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks of at least 1, got 0"):
        run_ranks(dist.get_rank, 0)
    with pytest.raises(ValueError, match="num_ranks of at least 1, got 0"):
        run_threads(dist.get_rank, 0)
    with pytest.raises(ValueError, match="more than 0 s, got -1"):
        run_ranks(dist.get_rank, 1, timeout=-1)
    with pytest.raises(ValueError, match="rank from 0 to 1, got 2"), fake_ranks(2, rank=2):
        pass


def tell_and_hang(told: Path) -> None:
    (told / str(dist.get_rank())).write_text(f"{os.getpid()}\n")
    sleep_for_ever()


def test_ranks_do_not_outlive_their_parent(tmp_path: Path) -> None:
    forks = multiprocessing.get_context("forkserver")  # has torch loaded
    parent = forks.Process(target=run_ranks, args=(tell_and_hang, 2, tmp_path))
    parent.start()
    files = [tmp_path / str(rank) for rank in range(2)]
    wait_until(lambda: all(f.exists() and f.read_text().endswith("\n") for f in files), 60)
    pids = [int(file.read_text()) for file in files]
    assert all(map(_is_running, pids))
    parent.kill()
    parent.join()
    wait_until(lambda: not any(map(_is_running, pids)), 20)


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_threads_reduce_and_answer_in_rank_order() -> None:
    results = run_threads(lambda: (dist.get_rank(), summed_ranks().item()), 3)
    assert results == [(0, 3.0), (1, 3.0), (2, 3.0)]
    assert not dist.is_initialized()


def test_a_failing_thread_wakes_the_others() -> None:
    with pytest.raises(RankError) as caught:
        run_threads(fail_while_others_wait, 3)
    assert [failure.rank for failure in caught.value.failures] == [0]
    assert caught.value.unfinished == (1, 2)
    with pytest.raises(RankError) as caught:
        run_threads(fail_on, 2, (0, 1), "both")
    assert caught.value.agreed().exception_type is OddRankError
    assert run_threads(dist.get_rank, 2) == [0, 1]


def test_fake_ranks_shard_as_real_ones_would() -> None:
    with fake_ranks(512, rank=3):
        mesh = init_device_mesh("cpu", (512,))
        sharded = distribute_tensor(torch.zeros(1024, 2), mesh, [Shard(0)])
        assert sharded.to_local().shape == (2, 2)
        assert (dist.get_rank(), dist.get_world_size()) == (3, 512)
        with pytest.raises(RuntimeError, match="Expected no process group"), fake_ranks(2):
            pass
    assert not dist.is_initialized()
