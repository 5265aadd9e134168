"""Scripts that run as programs of their own, from an interpreter that has torch already.

A new process imports torch for seconds. One has done it; it forks for each rank of a script. The
child is the main program from there to the end of its interpreter, as if it had been started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 240  # seconds

PROGRAM = """
import atexit, json, os, sys
last = []  # what a script wants done at its very end, when the library has done its part
atexit.register(lambda: [act() for act in last])
import torch, torch.distributed.fsdp, composable_shard.api
for line in sys.stdin:
    job, children = json.loads(line), []
    for variables, output, errors in job["ranks"]:
        child = os.fork()
        if child == 0:
            break
        children.append(child)
    else:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
        continue
    break
else:
    sys.exit()
os.environ.update(variables)
for number, path in ((1, output), (2, errors)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
sys.argv = [job["script"]]
exec(compile(open(job["script"]).read(), job["script"], "exec"))
"""


class Warm:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, folder: Path, script: str, num_ranks: int = 2) -> list[tuple[int, str, str]]:
        """Run a script on ranks, as a launcher would; return exit code, output and errors."""
        (folder / "script.py").write_text(script)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        variables = {
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)},
            **{"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        }
        ranks = [
            (
                {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                *(str(folder / f"{kind}{rank}.txt") for kind in ("output", "errors")),
            )
            for rank in range(num_ranks)
        ]
        assert self._process.stdin is not None and self._process.stdout is not None
        job = json.dumps({"script": str(folder / "script.py"), "ranks": ranks})
        self._process.stdin.write(f"{job}\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], LIMIT)[0]:
            self.stop()
            raise AssertionError(f"Expected an end within {LIMIT} s, got none")
        codes = json.loads(self._process.stdout.readline())
        texts = [[Path(path).read_text() for path in rank[1:]] for rank in ranks]
        return [(code, *text) for code, text in zip(codes, texts, strict=True)]

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    interpreter = Warm()
    yield interpreter
    interpreter.stop()
