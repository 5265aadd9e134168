"""Two nodes train together; one of them is killed and joins again; the losses are the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from composable_shard.testing import run_ranks
from many_machines.nodes import Node, namespaces, reason_against_namespaces, this_machine_twice
from many_machines.runs import Run, losses, train

STEPS, EVERY = 10, 3
OPTIONS = ["--steps", str(STEPS), "--checkpoint-every", str(EVERY)]


def check(nodes: list[Node], folder: Path) -> None:
    """Kill the second node when there is a checkpoint, and start it again."""
    uninterrupted = folder / "uninterrupted"
    run_ranks(train, 2, [*OPTIONS, "--checkpoint-dir", str(uninterrupted)])
    assert [one["step"] for one in losses(uninterrupted)] == list(range(1, STEPS + 1))

    with Run(nodes, folder, {"NODES": "2"}, *OPTIONS, "--pause", "0.1") as run:
        run.start(0, "first")
        run.start(1, "second")
        run.wait_for(lambda: len(run.losses) > EVERY + 1)
        run.kill("second")
        run.start(1, "again")
        run.finish()
    assert run.losses == losses(uninterrupted)
    starts = {name: [start for start, _ in run.starts(name)] for name in run.names}
    (resumed,) = starts["again"]
    assert resumed in (EVERY, 2 * EVERY, 3 * EVERY)
    assert starts == {"first": [0, resumed], "second": [0], "again": [resumed]}


@cache
def why_not() -> str | None:
    return reason_against_namespaces()


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_a_node_in_its_own_network_is_killed_and_joins_again(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"{reason}; the next test has two nodes on this machine instead")
    with namespaces() as nodes:
        check(nodes, tmp_path)


@pytest.mark.timeout(600)
def test_a_node_on_this_machine_is_killed_and_joins_again(tmp_path: Path) -> None:
    if why_not() is None:
        pytest.skip("the test before has done the same with networks apart")
    check(this_machine_twice(), tmp_path)
