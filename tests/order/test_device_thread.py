"""What a device changes: hooks run on its own thread, and nothing may wait for it.

On a simulated accelerator, see ``device_thread.py``; the values are compared on the CPU and, where
there is one, on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from order.device_thread import CASES

TESTS = Path(__file__).parents[1]
PLACEMENTS = {
    "without sync": ["(Partial(avg),)"],
    "inner dim": ["(Shard(dim=0),)", "(Shard(dim=1),)"],
    "replicas": ["(Replicate(), Shard(dim=0))"],
}


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    ours = [item for item in request.session.items if item.path == request.path]
    cases = dict.fromkeys(item.callspec.params["case"] for item in ours)  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, str(TESTS / "order" / "device_thread.py"), *cases],
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def without_all_reduces(events: list[list[str]]) -> list[list[str]]:
    return [event for event in events if event[0] != "all_reduce"]


@pytest.mark.brief(4)
@pytest.mark.parametrize("case", CASES)
def test_a_step_on_a_device_is_that_of_the_cpu_on_another_thread(
    seen: dict[str, Any], case: str
) -> None:
    there, here = seen[case]["simulated"], seen[case]["cpu"]
    assert (there["in main thread"], here["in main thread"]) == ([False], [True])
    assert without_all_reduces(there["events"]) == without_all_reduces(here["events"])
    assert len(there["events"]) > 10
    launched = [index for index, (event, _) in enumerate(there["events"]) if event == "all_reduce"]
    for index in launched:  # right behind the reduction over the shards, on another stream
        assert there["events"][index - 1] == ["reduce_scatter", there["events"][index][1]]
    assert bool(launched) == (case == "replicas")
    assert there["placements"] == here["placements"]
    assert there["placements"] == PLACEMENTS.get(case, ["(Shard(dim=0),)"])


@pytest.mark.brief(4)
@pytest.mark.parametrize("case", CASES)
def test_a_step_moves_nothing_between_host_and_device_but_what_is_offloaded(
    seen: dict[str, Any], case: str
) -> None:
    found = seen[case]["simulated"]
    if case == "offloaded":
        assert found["transfers"] == ["cpu to simulated", "simulated to cpu"]
        assert found["gradients on"] == ["cpu"]
    else:
        assert (found["transfers"], found["gradients on"]) == ([], ["simulated"])
