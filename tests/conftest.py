"""What every test needs: one thread, the same random state, and no process left behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# Read when the library is imported, here and in the ranks and programs that tests start: what is
# read before it was written or after it was freed is NaN then. Tests that count bytes, time or
# copies turn it off for themselves.
os.environ.setdefault("COMPOSABLE_SHARD_POISON_MEMORY", "1")

from near import sharing
from warm import warm

from composable_shard.testing import stop_ranks
from composable_shard.testing.ranks import same_random_state

__all__ = ["sharing", "warm"]

# These are programs: they import each other by name, and ranks import them from there too.
for folder in ("benchmarks", "examples"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

# Few and long tests, which start programs, compile, or wait. What comes last should be short, so
# that no worker is left alone with it.
FIRST = (
    *("faults/test_lost_ranks.py", "many_machines/test_torchrun.py"),
    *("uneven/test_programs.py", "test_programs.py"),
    *("compile/test_blocks.py", "compat/test_torch_dropin.py"),
)

STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--brief",
        action="store_true",
        help="of each test with many cases, run as few as hold every value of every parameter, or "
        "as many as its mark says; leave out what is marked as matrix, and most examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the other tests expect the CPU by default
    if config.getoption("brief"):
        os.environ["BRIEF_EXAMPLES"] = "1"  # read where examples are generated
        settings.register_profile("brief", max_examples=15)
        settings.load_profile("brief")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest for their number of tests; leave out if asked to."""
    places = {Path(__file__).parent / file: place for place, file in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
    if config.getoption("brief"):
        kept = set(_covering([item for item in items if not item.get_closest_marker("matrix")]))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print how long the tests took, as a multiple that other machines can compare."""
    if not hasattr(config, "workerinput"):
        from measured import calibration_seconds

        ratio = (time.monotonic() - STARTED) / calibration_seconds()
        terminalreporter.write_line(f"{ratio:.0f} times the loop of tests/measured.py")


def _covering(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that have a value of a parameter that none before has, test by test.

    Those with many such values come first, so that few hold them all; a test marked as ``brief``
    says after how many it is enough.
    """
    cases: dict[str, list[tuple[set[tuple[int, str]], pytest.Item]]] = {}
    for item in items:
        # One name for each ``parametrize``, whose values belong together.
        names = item.callspec._idlist if hasattr(item, "callspec") else [""]
        test = item.nodeid.partition("[")[0]
        cases.setdefault(test, []).append((set(enumerate(names)), item))
    for some in cases.values():
        seen: set[tuple[int, str]] = set()
        mark = some[0][1].get_closest_marker("brief")
        for _ in range(mark.args[0] if mark else len(some)):
            values, item = max(some, key=lambda case: len(case[0] - seen))
            if values <= seen:
                break
            seen |= values
            yield item


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    # Ranks are processes of one thread each; so is the process that compares with them.
    torch.set_num_threads(1)
    yield
    stop_ranks()


@pytest.fixture(autouse=True)
def _same_random_state() -> None:
    same_random_state()
