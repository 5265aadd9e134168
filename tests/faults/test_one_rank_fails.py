"""One rank fails by itself, or does another thing than the others: what each of them sees."""

from __future__ import annotations

import contextlib
import resource
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from near import Apart
from torch import nn

from composable_shard import CommunicationError, _torch
from composable_shard.core.transport import failures as transport_failures
from composable_shard.testing import run_ranks
from faults.breaking import BAD, LIMIT, TIME_OUT, WHEREABOUTS, X, failures, layers, step

pytestmark = pytest.mark.usefixtures("sharing")

BOTH_WAYS = pytest.mark.parametrize("apart", [False, True], ids=["reading", "sending"])
WIDE = 4096
WIDE_NBYTES = (WIDE + 1) * WIDE * 4


def missed(apart: bool) -> str:
    if apart:
        return f"the error 'Timed out waiting {TIME_OUT}000ms for recv operation to complete'"
    return f"no message within the time-out of {TIME_OUT} s"


def silent(rank: int, act: str, apart: bool) -> str:
    return (
        f"CommunicationError: Rank {rank} failed while {act}: Expected rank {BAD} to take part in "
        f"a collective, got {missed(apart)}"
    )


def raises_in_forward() -> None:
    model = layers(3)
    if dist.get_rank() == BAD:

        def fail(*_: object) -> None:
            raise ValueError("a bad sample")

        model[1].register_forward_hook(fail)
    step(model)


@pytest.mark.brief(1)
@BOTH_WAYS
def test_an_exception_on_one_rank_stays_what_it_is_and_the_others_miss_it(apart: bool) -> None:
    """The rank stops after forward has gathered all; backward begins with the first it lacks."""
    said = failures(raises_in_forward, 2, apart=apart)
    assert said == {
        0: silent(0, "gathering group '1'", apart) + WHEREABOUTS,
        BAD: "ValueError: a bad sample",
    }


@contextlib.contextmanager
def little_memory(nbytes: int) -> Iterator[None]:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, before[1]))
    # Memory of ranks that read each other's keeps its addresses, so no limit makes it fail.
    error = RuntimeError(f"can't allocate memory: you tried to allocate {WIDE_NBYTES} bytes")
    try:
        with mock.patch.object(_torch.MappableMemory, "swap", side_effect=error):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def own_failure(act: str) -> str:
    return (
        f"Rank {dist.get_rank()} failed while {act}; on gloo, the ranks that wait for this rank "
        "raise an error that names this rank; on other backends, they time out"
    )


def no_memory_on_one() -> str:
    model, x = layers(1, WIDE), torch.ones(1, WIDE)
    if dist.get_rank() == BAD:
        with little_memory(WIDE_NBYTES // 2), pytest.raises(RuntimeError) as caught:
            model(x)
        assert caught.value.__notes__ == [own_failure("gathering group '0'")]
        return str(caught.value)
    with pytest.raises(CommunicationError) as missing:
        model(x)
    return f"CommunicationError: {missing.value}"


@pytest.mark.brief(1)
@BOTH_WAYS
def test_no_memory_to_gather_into_on_one_rank(apart: bool) -> None:
    fn = Apart(no_memory_on_one) if apart else no_memory_on_one
    first, second = run_ranks(fn, 2, timeout=LIMIT)
    why = f"can't allocate memory: you tried to allocate {WIDE_NBYTES} bytes"
    assert why in second
    # Told by the rank itself, and once.
    act = "Rank 0 failed while gathering group '0': Expected rank 1 to take part in a collective"
    assert first.startswith(f"CommunicationError: {act}, got ")
    told = "rank 1 failed while gathering group '0': RuntimeError: "
    assert first.count(told) == first.count(why) == 1


def no_memory_on_all() -> tuple[bool, int]:
    """Go on after all ranks had no memory to gather into; nobody was waited for."""
    model, x = layers(1, WIDE), torch.ones(1, WIDE)
    with torch.no_grad():
        expected = model(x)
    model.reshard()
    with little_memory(WIDE_NBYTES // 2), pytest.raises(RuntimeError) as caught:
        model(x)
    assert "can't allocate memory" in str(caught.value)
    dist.barrier()
    with torch.no_grad():
        return torch.equal(model(x), expected), len(caught.value.__notes__)


@BOTH_WAYS
def test_no_memory_on_all_ranks_alike_is_got_over(apart: bool) -> None:
    fn = Apart(no_memory_on_all) if apart else no_memory_on_all
    assert run_ranks(fn, 2, timeout=LIMIT) == [(True, 1)] * 2


def no_memory_to_reduce() -> tuple[str, bool]:
    model = layers(1)
    loss = model(X).sum()

    def none(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory left")

    empty = mock.patch.object(_torch, "empty", none)
    with empty, pytest.raises(torch.OutOfMemoryError) as caught:
        loss.backward()
    assert str(caught.value) == "no memory left"
    printed = "".join(traceback.format_exception(caught.value))
    model.zero_grad()
    step(model)
    expected = [param.grad.full_tensor() for param in model.parameters()]  # type: ignore[union-attr]
    plain = nn.Linear(8, 8)
    plain.load_state_dict({n: t.full_tensor() for n, t in model[0].state_dict().items()})
    step(plain)
    return printed.splitlines()[-1], all(
        torch.equal(got, param.grad)  # type: ignore[arg-type]
        for got, param in zip(expected, plain.parameters(), strict=True)
    )


def test_no_memory_to_reduce_into_keeps_its_type_and_is_got_over() -> None:
    assert run_ranks(no_memory_to_reduce, 2, timeout=LIMIT) == [
        (
            f"Rank {rank} failed while reducing the gradients of group '0'; on gloo, the ranks "
            "that wait for this rank raise an error that names this rank; on other backends, they "
            "time out",
            True,
        )
        for rank in range(2)
    ]


class Branches(nn.Module):
    """Runs one branch after the first, another one on each rank."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.layers = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        return others[dist.get_rank() % 2](first(x))  # type: ignore[no-any-return]


def runs_another_branch() -> None:
    model = Branches(layers(3))
    with torch.no_grad():
        model(X)


@pytest.mark.brief(1)
@BOTH_WAYS
def test_ranks_that_gather_different_groups_name_theirs(apart: bool) -> None:
    """Together the errors tell what diverged; ``COMPOSABLE_SHARD_CHECK=1`` tells each rank."""
    said = failures(runs_another_branch, 2, apart=apart)
    assert said[0].startswith("CommunicationError: Rank 0 failed while gathering group '1': ")
    assert said[1].startswith("CommunicationError: Rank 1 failed while gathering group '2': ")
    parted = "got rank 0 gathering group '1' and rank 1 gathering group '2'; "
    assert all(parted in text for text in said.values())


def converted_on_one() -> None:
    """Convert the parameters on one rank when the ranks have long agreed on their dtypes."""
    model = layers(1, 64)
    if dist.get_rank() == BAD:
        model.to(torch.float64)
    with torch.no_grad():
        model(torch.ones(1, 64, dtype=model[0].weight.dtype))


MISMATCH = (
    "RankMismatchError: Rank {} failed while gathering group '0': Expected {} elements of {} from "
    "rank {} as on this rank, got {} elements of {}; has a parameter been replaced or converted on "
    "one of the two ranks only?"
)


def test_parameters_that_were_converted_on_one_rank_are_not_misread() -> None:
    said = failures(converted_on_one, 2, apart=False)
    numels, single, double = [2080], [torch.float32], [torch.float64]
    assert said == {
        0: MISMATCH.format(0, numels, single, 1, numels, double),
        1: MISMATCH.format(1, numels, double, 0, numels, single),
    }


def test_a_wait_that_ends_while_another_rank_reads_it_does_not_block_the_reader() -> None:
    class Withdrawing:
        """Ends the wait of rank 1 between a look for the key and the look at its value."""

        def check(self, keys: list[str]) -> bool:
            found: bool = store.check(keys)
            if keys == ["waits 1"]:
                statuses[1].withdraw("waits")
            return found

        def get(self, key: str) -> bytes:
            value: bytes = store.get(key)
            return value

    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    statuses = [object.__new__(transport_failures._GroupStatus) for _ in range(2)]
    for rank, status in enumerate(statuses):
        status.ranks, status._group_rank, status._store = [0, 1], rank, store
    statuses[1].publish("waits", "text")
    assert statuses[0]._published("waits") == {1: "text"}
    statuses[0]._store = Withdrawing()
    assert statuses[0]._published("waits") == {}
