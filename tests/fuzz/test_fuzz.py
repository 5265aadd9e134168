"""Random programs, and whether the fuzzer would find what goes wrong.

`PARITY_EXAMPLES=100 pytest tests/fuzz` looks for more than the short run does, among new cases.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fuzz.compare import run
from fuzz.generate import FAMILIES, generate
from fuzz.model import Block, Call
from fuzz.oracle import Invalid
from fuzz.program import Case, Op, shown, shrunk
from fuzz.ranks import Seen, Sharded, run_case

TIMES = int(os.environ.get("PARITY_EXAMPLES", "1"))
# The same cases in every short run, others in every long one.
START = 0 if TIMES == 1 else int(time.time()) * 1000
# With what ranks whose losses reach other parts differ yet; the set is to be empty.
BROKEN = {"reentrant", "reentrant_nests", "inner"}


def first_find(family: str, count: int, *, without: set[str]) -> str:
    """Return what is found first, made smaller, as text."""
    ran = 0
    for seed in range(START, START + count * TIMES):
        case = generate(seed, FAMILIES[family] - without)
        try:
            find = run(case)
        except Invalid:
            continue
        ran += 1
        if find is not None:
            smaller = shrunk(case, functools.partial(fails_so, find.kind), max_runs=30)
            return f"seed {seed} of {family}, {find.kind}\n{shown(smaller)}\n{find.text}"
    assert ran > count / 2
    return ""


def fails_so(kind: str, case: Case) -> bool:
    try:
        find = run(case, timeout=5.0)
    except (Invalid, LookupError, StopIteration):  # steps name parts that were left out
        return False
    return find is not None and find.kind == kind


def test_programs_that_are_alike_on_all_ranks_train_as_one_whole_model() -> None:
    assert first_find("alike", 12, without=set()) == ""


def test_ranks_whose_losses_reach_other_parts_train_as_one_whole_model() -> None:
    assert first_find("reach", 12, without=BROKEN) == ""


# Planted faults -----------------------------------------------------------------------------

STEPS = (Op("optimize"), Op("train", (Call(),)), Op("step"), Op("train", (Call(),)))
PLAIN = Case(1, (Block("a", "mlp"), Block("b", "many")), STEPS, own="before")


def _gather_once_more(sharded: Sharded) -> None:
    if sharded.rank:
        sharded.model.unshard()
        sharded.model.reshard()


def _scale_a_gradient(sharded: Sharded) -> None:
    sharded.held["before"].grad.to_local().mul_(1.0 + 1e-6 * sharded.rank)


FAULTS: dict[str, tuple[str, Callable[[Sharded], object]]] = {
    "grad": ("train", _scale_a_gradient),
    "grad kind": ("train", lambda s: setattr(s.held["before"], "grad", None)),
    "param": ("step", lambda s: s.held["before"].data.to_local().mul_(1 + s.rank)),
    "CommunicationError": ("step", _gather_once_more),
    "hang": ("step", lambda s: dist.barrier() if s.rank else None),
}
"""By what is found: after which steps a rank does what else."""


@dataclass(frozen=True)
class Following:
    kind: str

    def __call__(self, case: Case) -> list[Seen]:
        name, more = FAULTS[self.kind]
        plain = getattr(Sharded, name)

        def step(self: Sharded, op: Op) -> None:
            plain(self, op)
            with torch.no_grad():
                more(self)

        with mock.patch.object(Sharded, name, step):
            return run_case(case)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", FAULTS)
def test_planted_faults_are_found(kind: str) -> None:
    assert run(PLAIN) is None
    find = run(PLAIN, 5.0 if kind == "hang" else 60.0, Following(kind))
    assert find is not None and find.kind.partition(" Rank ")[0] == kind


def test_one_integer_gives_one_case() -> None:
    for family, features in FAMILIES.items():
        cases = [generate(seed, features) for seed in range(40)]
        assert cases == [generate(seed, features) for seed in range(40)], family
        assert len({shown(case) for case in cases}) == 40
