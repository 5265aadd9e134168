"""Two nodes train together; one of them is killed and joins again; the losses are the same."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from composable_shard.testing import run_ranks
from many_machines.nodes import (
    Agent,
    Node,
    namespaces,
    reason_against_namespaces,
    this_machine_twice,
)
from many_machines.programs import train

STEPS, EVERY = 10, 3
OPTIONS = ["--steps", str(STEPS), "--checkpoint-every", str(EVERY)]
VARIABLES = {"NODES": "2", "RANKS": "1", "PATIENCE": "3", "RESTARTS": "3"}


def losses(folder: Path) -> list[dict[str, float]]:
    file = folder / "losses.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(holds: Callable[[], bool], agents: list[Agent]) -> None:
    deadline = time.monotonic() + 240
    while not holds():
        told = "\n".join(agent.printed[-3000:] for agent in agents)
        assert time.monotonic() < deadline, told
        assert all(agent.is_running for agent in agents), told
        time.sleep(0.05)


def lose_a_node_and_start_it_again(nodes: list[Node], folder: Path) -> list[str]:
    """Kill the second node when there is a checkpoint; return what each torchrun has printed."""
    run = folder / "run"
    options = [*OPTIONS, "--checkpoint-dir", str(run), "--pause", "0.1"]

    def start(number: int, name: str) -> Agent:
        return Agent(nodes[number], folder / f"{name}.log", VARIABLES, *options)

    agents = [start(0, "first")]
    try:
        agents.append(start(1, "second"))
        wait_until(lambda: len(losses(run)) > EVERY + 1, agents)
        agents[1].kill()
        agents[1] = start(1, "again")
        for agent in agents:
            assert agent.wait(timeout=240) == 0, agent.printed[-5000:]
        return [agent.printed for agent in agents]
    finally:
        for agent in agents:
            agent.kill()


def check(nodes: list[Node], folder: Path) -> None:
    uninterrupted = folder / "uninterrupted"
    run_ranks(train, 2, [*OPTIONS, "--checkpoint-dir", str(uninterrupted)])
    first, again = lose_a_node_and_start_it_again(nodes, folder)
    assert [one["step"] for one in losses(uninterrupted)] == list(range(1, STEPS + 1))
    assert losses(folder / "run") == losses(uninterrupted)
    host, resumed = socket.gethostname(), losses_before_the_kill(folder)
    assert f"of 2 on {host}: from step 0\n" in first and "from step 0" not in again
    assert f"of 2 on {host}: from step {resumed}\n" in first
    assert f"of 2 on {host}: from step {resumed}\n" in again


def losses_before_the_kill(folder: Path) -> int:
    """Return the step that was resumed from: that of a checkpoint, as the survivor says."""
    told = (folder / "first.log").read_text().split("from step ")
    step = int(told[-1].split()[0])
    assert step in (EVERY, 2 * EVERY, 3 * EVERY), told
    return step


@cache
def why_not() -> str | None:
    return reason_against_namespaces()


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check(this_machine_twice(port), tmp_path)
