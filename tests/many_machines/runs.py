"""The programs of ``examples/launch``, and a training on several nodes that may be killed."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from many_machines.nodes import Agent, Node

FOLDER = Path(__file__).parents[2] / "examples" / "launch"
VARIABLES = {"RANKS": "1", "PATIENCE": "3", "RESTARTS": "3"}
START = re.compile(r"^rank \d of (\d) on \S+: from step (\d+)$", re.MULTILINE)


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"launched_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(arguments: list[str]) -> None:
    program("train").main(arguments)


def losses(folder: Path) -> list[dict[str, float]]:
    file = folder / "losses.jsonl"
    if not file.exists():
        return []
    whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


class Run:
    """A training of which each node is started, and maybe killed, by name.

    ``variables`` are told to ``torchrun.sh`` besides ``VARIABLES``; ``options`` to ``train.py``.
    """

    def __init__(
        self, nodes: list[Node], folder: Path, variables: dict[str, str], *options: str
    ) -> None:
        self._nodes, self._folder = nodes, folder
        self._variables = VARIABLES | variables
        self._options = [*options, "--checkpoint-dir", str(folder / "run")]
        self._agents: dict[str, Agent] = {}
        self._killed: set[str] = set()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents.values():
            agent.kill()

    @property
    def names(self) -> list[str]:
        return list(self._agents)

    @property
    def losses(self) -> list[dict[str, float]]:
        return losses(self._folder / "run")

    def start(self, node: int, name: str) -> None:
        log = self._folder / f"{name}.log"
        self._agents[name] = Agent(self._nodes[node], log, self._variables, *self._options)

    def kill(self, name: str) -> None:
        self._killed.add(name)
        self._agents[name].kill()

    def starts(self, name: str) -> list[tuple[int, int]]:
        """Return for each time that the rank of a node was started from which step, of how many."""
        printed = START.findall(self._agents[name].printed)
        return [(int(step), int(num_ranks)) for num_ranks, step in printed]

    def wait_for(self, holds: Callable[[], bool], timeout: float = 240) -> None:
        deadline = time.monotonic() + timeout
        while not holds():
            alive = [a for name, a in self._agents.items() if name not in self._killed]
            told = "\n".join(agent.printed[-3000:] for agent in alive)
            assert time.monotonic() < deadline, told
            assert all(agent.is_running for agent in alive), told
            time.sleep(0.05)

    def finish(self, timeout: float = 240) -> None:
        for name, agent in self._agents.items():
            if name not in self._killed:
                assert agent.wait(timeout) == 0, agent.printed[-5000:]
