"""Scripts that end without ``destroy_process_group``: how their processes end, and what is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
from docs.pages import Page

from composable_shard import _torch

ROOT = Path(__file__).parents[2]
LIMIT = 240  # seconds
README = next(block.source for block in Page(ROOT / "README.md").programs)

END = "dist.destroy_process_group()"

# What runs last says which process groups are left: it was registered before the library's own.
LAST = """
import atexit, torch.distributed as dist
atexit.register(lambda: print("left:", dist.is_initialized(), flush=True))
"""
TRAIN = """
import sys, time, torch
from torch import nn
from composable_shard import fully_shard
model = fully_shard(nn.Linear(8, 8))
model(torch.ones(2, 8)).sum().backward()
rank = dist.get_rank()
"""


def ends(tmp_path: Path, script: str) -> list[tuple[int, str, str]]:
    """Run a script on two ranks; return exit code, output and errors of each."""
    (tmp_path / "script.py").write_text(script)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"},
        **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py")],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *text) for rank, text in zip(ranks, texts, strict=True)]


@pytest.mark.parametrize("end", [END, ""], ids=["destroys", "leaves"])
def test_the_example_of_the_readme_ends_cleanly_and_leaves_no_process_group(
    end: str, tmp_path: Path
) -> None:
    """``benchmarks/exits.py`` does it as often as one likes."""
    assert README.count(END) == 1
    program = README.replace(END, end)
    for rank, (code, output, errors) in enumerate(ends(tmp_path, LAST + program)):
        *losses, last = output.splitlines()
        assert (code, len(losses), last, errors) == (0, 10 if rank == 0 else 0, "left: False", "")


HOT = """
sys.setswitchinterval(1000)  # nobody is given the interpreter's lock that does not wait for it
total = torch.ones(3)
dist.barrier()
dist.all_reduce(total, async_op=True)  # a worker has the last reference to the work
end = time.perf_counter() + 4
while time.perf_counter() < end:
    pass
"""


def test_a_worker_that_lets_go_of_tensors_while_the_interpreter_ends(tmp_path: Path) -> None:
    """It needs the interpreter's lock for that; without, 'terminate called' and exit code -6."""
    for code, output, errors in ends(tmp_path, LAST + TRAIN + HOT):
        assert (code, output, errors) == (0, "left: False\n", "")


MADE = """
import atexit, torch.distributed as dist
from torch.distributed.distributed_c10d import _world
atexit.register(lambda: print(sorted(group.size() for group in _world.pg_map), flush=True))
import torch
from torch import nn
from composable_shard import fully_shard
dist.init_process_group("gloo")
own = dist.new_group([0, 1])
model = fully_shard(nn.Linear(8, 8))
model.set_separate_reduce_scatter_group(True)
model(torch.ones(2, 8)).sum().backward()
assert len(_world.pg_map) == 3
"""


def test_of_the_users_process_groups_none_is_ended_and_all_that_were_made_from_them(
    tmp_path: Path,
) -> None:
    for code, output, errors in ends(tmp_path, MADE):
        assert (code, output) == (0, "[2, 2]\n")
        assert "terminate" not in errors


@pytest.mark.parametrize(
    ("how", "code", "left"),
    [
        ("raise ValueError('a bad sample')", 1, True),
        ("raise KeyboardInterrupt", -signal.SIGINT, True),
        ("sys.exit(3)", 3, False),
        ("raise SystemExit(0)", 0, False),
    ],
)
def test_one_rank_leaves_while_the_other_trains_on(
    how: str, code: int, left: bool, tmp_path: Path
) -> None:
    """It ends as it would without the library; the other one says at what it was missed."""
    script = f"""
if rank == 1:
    {how}
model(torch.ones(2, 8)).sum().backward()
"""
    first, second = ends(tmp_path, LAST + TRAIN + script)
    assert second[:2] == (code, f"left: {left}\n")
    assert "terminate" not in second[2] and "terminate" not in first[2]
    assert first[:2] == (1, "left: True\n")
    assert "CommunicationError: Rank 0 failed while " in first[2]


def test_threads_that_run_are_waited_for() -> None:
    """They hold no lock of the interpreter meanwhile, as a worker of gloo that ends a work."""
    ended = []

    def work() -> None:
        for _ in range(20):
            zlib.compress(os.urandom(1 << 20))
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    _torch.wait_for_idle_threads(60)
    assert ended == [True]
    thread.join()


def test_threads_that_never_sleep_are_not_waited_for_long() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            zlib.compress(bytes(1 << 20))

    thread = threading.Thread(target=spin)
    thread.start()
    start = time.monotonic()
    _torch.wait_for_idle_threads(0.2)
    stop.set()
    thread.join()
    assert time.monotonic() - start < 30
