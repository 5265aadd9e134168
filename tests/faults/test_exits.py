"""Scripts that end without ``destroy_process_group``: how their processes end, and what is left."""

from __future__ import annotations

import os
import signal
import threading
import zlib
from pathlib import Path

import pytest
from warm import Warm, warm

from composable_shard import _torch

__all__ = ["warm"]

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


HOT = """
sys.setswitchinterval(1000)  # nobody is given the interpreter's lock that does not wait for it
total = torch.ones(3)
dist.barrier()
dist.all_reduce(total, async_op=True)  # a worker has the last reference to the work
end = time.perf_counter() + 2
while time.perf_counter() < end:
    pass
"""


@pytest.mark.matrix
def test_a_worker_that_lets_go_of_tensors_while_the_interpreter_ends(
    warm: Warm, tmp_path: Path
) -> None:
    """It needs the interpreter's lock for that; without, 'terminate called' and exit code -6."""
    for code, output, errors in warm.run(tmp_path, LAST + TRAIN + HOT):
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
    warm: Warm, tmp_path: Path
) -> None:
    for code, output, errors in warm.run(tmp_path, MADE):
        assert (code, output) == (0, "[2, 2]\n")
        assert "terminate" not in errors


@pytest.mark.brief(2)
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
    how: str, code: int, left: bool, warm: Warm, tmp_path: Path
) -> None:
    """It ends as it would without the library; the other one says at what it was missed."""
    script = f"""
if rank == 1:
    {how}
model(torch.ones(2, 8)).sum().backward()
"""
    first, second = warm.run(tmp_path, LAST + TRAIN + script)
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
    _torch.wait_for_idle_threads(0.2)
    assert thread.is_alive()
    stop.set()
    thread.join()
