"""Nodes to start torchrun on: network namespaces of this machine, or the machine itself twice."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "launch" / "torchrun.sh"


@dataclass(frozen=True)
class Node:
    """Where an agent runs: what enters it stands before a command; ``variables`` are its own."""

    enter: list[str]
    variables: dict[str, str]


def descendants(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    children: dict[int, list[int]] = {}
    for line in listed.stdout.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


class Agent:
    """A torchrun on a node, which prints to ``log``; ``options`` are those of ``train.py``."""

    def __init__(self, node: Node, log: Path, variables: dict[str, str], *options: str) -> None:
        self._log = log
        self._opened = log.open("w")
        self._process = subprocess.Popen(
            [*node.enter, "bash", str(SCRIPT), *options],
            env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
            | {"OMP_NUM_THREADS": "1"}
            | variables
            | node.variables,
            cwd=ROOT,
            stdout=self._opened,
            stderr=subprocess.STDOUT,
        )

    @property
    def printed(self) -> str:
        """What it and its ranks have printed."""
        return self._log.read_text()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it and its ranks as the loss of the node would: they get no chance to say a word."""
        for pid in descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._opened.close()

    def wait(self, timeout: float) -> int:
        """Return its exit status."""
        return self._process.wait(timeout)


# Network namespaces -------------------------------------------------------------------------------

NAMESPACE = ["unshare", "--user", "--map-root-user", "--net", "sleep", "1000"]


def enter(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--user", "--net", "--preserve-credentials"]


def reason_against_namespaces() -> str | None:
    """Return why this system has no two network namespaces for us, if it has not."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    try:
        with namespaces():
            return None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or b"").decode().strip()
        return f"network namespaces are not allowed: {said or error}"


@contextlib.contextmanager
def namespaces() -> Iterator[list[Node]]:
    """Make two nodes that see each other, each with a network of its own."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_sleeping(NAMESPACE))
        # A child of the first one, as only its owner may give a namespace one end of a cable.
        second = stack.enter_context(
            _sleeping([*enter(first), "unshare", "--net", "sleep", "1000"])
        )
        run(first, "ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        run(first, "ip", "link", "set", "cable1", "netns", str(second))
        nodes = []
        for number, pid in enumerate((first, second)):
            cable, address = f"cable{number}", f"10.77.0.{number + 1}"
            run(pid, "ip", "address", "add", f"{address}/24", "dev", cable)
            run(pid, "ip", "link", "set", cable, "up")
            run(pid, "ip", "link", "set", "lo", "up")
            variables = {"ADDRESS": address, "HEAD": "10.77.0.1", "GLOO_SOCKET_IFNAME": cable}
            # They cannot share memory across namespaces, and would warn that they run on one host.
            variables["COMPOSABLE_SHARD_SHARED_MEMORY"] = "0"
            nodes.append(Node(enter(pid), variables))
        yield nodes


def run(pid: int, *command: str) -> None:
    subprocess.run([*enter(pid), *command], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def _sleeping(command: list[str]) -> Iterator[int]:
    """Start what becomes a process that sleeps, and return its number once it does."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if process.poll() is not None:
                assert process.stderr is not None
                raise subprocess.CalledProcessError(
                    process.returncode, command, stderr=process.stderr.read()
                )
            if Path(f"/proc/{process.pid}/comm").read_text().strip() == "sleep":
                break
            time.sleep(0.01)
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def this_machine_twice() -> list[Node]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"ADDRESS": "127.0.0.1", "HEAD": "localhost", "PORT": str(port)}
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface
    return [Node([], variables), Node([], variables)]
