"""Random programs, and whether the fuzzer would find what goes wrong.

`python -m tests.fuzz --minutes 30 --out runs/finds` looks for more than these tests do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fuzz.compare import rehearse, run
from fuzz.generate import FAMILIES, generate
from fuzz.model import Block, Call
from fuzz.oracle import Invalid
from fuzz.program import Case, Find, Op, shown
from fuzz.ranks import Seen, Sharded, run_case

TIMES = int(os.environ.get("PARITY_EXAMPLES", "1"))
# The same cases in every short run, others in every long one.
START = 0 if TIMES == 1 else int(time.time()) * 1000
# With what ranks whose losses reach other parts differ yet; the set is to be empty.
BROKEN = {"reentrant", "reentrant_nests", "inner"}


def first_find(
    family: str, count: int, attempt: Callable[[Case], Find | None], *, without: set[str]
) -> str:
    """Return what is found first, as text."""
    ran = 0
    for seed in range(START, START + count * TIMES):
        case = generate(seed, FAMILIES[family] - without)
        try:
            find = attempt(case)
        except Invalid:
            continue
        ran += 1
        if find is not None:
            return f"seed {seed} of {family}, {find.kind}\n{shown(case)}\n{find.text}\n{case!r}"
    assert ran > count / 2
    return ""


def test_programs_that_are_alike_on_all_ranks_train_as_one_whole_model() -> None:
    assert first_find("alike", 12, run, without=set()) == ""


def test_ranks_whose_losses_reach_other_parts_launch_the_same_collectives() -> None:
    assert first_find("reach", 40, rehearse, without=BROKEN) == ""


# Planted faults -----------------------------------------------------------------------------

STEPS = (Op("optimize"), Op("train", (Call(),)), Op("step"), Op("train", (Call(),)))
PLAIN = Case(1, (Block("a", "mlp"), Block("b", "many")), STEPS, own="before")


def scale_a_gradient(case: Case) -> list[Seen]:
    return _with(case, "train", lambda s: _grad(s).mul_(1.0 + 1e-6 * s.rank))


def lose_a_gradient(case: Case) -> list[Seen]:
    return _with(case, "train", lambda s: setattr(s.held["before"], "grad", None))


def change_a_parameter(case: Case) -> list[Seen]:
    return _with(case, "step", lambda s: s.held["before"].data.to_local().mul_(1 + s.rank))


def keep_a_tensor(case: Case) -> list[Seen]:
    return _with(case, "train", lambda s: KEPT.append(torch.ones(1)))


def gather_once_more(case: Case) -> list[Seen]:
    return _with(case, "step", _gather_once_more)


def stop_on_one_rank(case: Case) -> list[Seen]:
    return _with(case, "step", _wait_alone)


KEPT: list[torch.Tensor] = []


def _gather_once_more(sharded: Sharded) -> None:
    if sharded.rank:
        sharded.model.unshard()
        sharded.model.reshard()


def _wait_alone(sharded: Sharded) -> None:
    if sharded.rank:
        dist.barrier()


def _grad(sharded: Sharded) -> torch.Tensor:
    return sharded.held["before"].grad.to_local()


def _with(case: Case, name: str, more: Callable[[Sharded], object]) -> list[Seen]:
    """Follow a case; do more after the steps of one name."""
    plain = getattr(Sharded, name)

    def step(self: Sharded, op: Op) -> None:
        plain(self, op)
        with torch.no_grad():
            more(self)

    setattr(Sharded, name, step)
    try:
        return run_case(case)
    finally:
        setattr(Sharded, name, plain)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("follow", "kind"),
    [
        (scale_a_gradient, "grad"),
        (lose_a_gradient, "grad kind"),
        (change_a_parameter, "param"),
        (keep_a_tensor, "growth"),
        (gather_once_more, "CommunicationError"),
        (stop_on_one_rank, "hang"),
    ],
)
def test_planted_faults_are_found(follow: Callable[[Case], list[Seen]], kind: str) -> None:
    case = Case(**{**vars(PLAIN), "checks_growth": follow is keep_a_tensor})
    assert run(case) is None
    find = run(case, 5.0 if kind == "hang" else 60.0, follow)
    assert find is not None and find.kind.partition(" Rank ")[0] == kind


def test_ranks_that_launch_other_collectives_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rehearse(PLAIN) is None
    monkeypatch.setattr(Sharded, "step", lambda self, op: _gather_once_more(self))
    find = rehearse(PLAIN)
    assert find is not None
    assert find.text.startswith(
        "launch 8: rank 0 step 3 all_gather root, rank 1 step 2 all_gather root"
    )


def test_one_integer_gives_one_case() -> None:
    for family, features in FAMILIES.items():
        cases = [generate(seed, features) for seed in range(40)]
        assert cases == [generate(seed, features) for seed in range(40)], family
        assert len({shown(case) for case in cases}) == 40
