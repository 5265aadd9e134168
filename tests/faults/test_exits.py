"""Scripts that end without ``destroy_process_group``: how their processes end, and what is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from warm import Warm

# What runs last says which process groups are left.
LAST = """
import torch.distributed as dist
last.append(lambda: print("left:", dist.is_initialized(), flush=True))
"""
TRAIN = """
import sys, time, torch
from torch import nn
from composable_shard import fully_shard
model = fully_shard(nn.Linear(8, 8))
model(torch.ones(2, 8)).sum().backward()
rank = dist.get_rank()
"""


LATE = """
class Late:
    def __del__(self, sleep=time.sleep):  # when the interpreter has begun to end
        sleep(0.5)

late, kept = Late(), dist.group.WORLD
totals = [torch.ones(1) for _ in range(40_000)]
sys.setswitchinterval(1000)  # nobody is given the interpreter's lock by one that does not wait
kept.allreduce_coalesced(totals).wait()
"""


@pytest.mark.brief(1)
@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"], ids=["left", "destroyed"])
def test_workers_let_go_of_tensors_before_the_end(end: str, warm: Warm, tmp_path: Path) -> None:
    """A worker of gloo needs the lock for each; too late, 'terminate called' and exit code -6.

    A process group that the user has destroyed goes on with its threads while something refers to
    it, as a mesh or a module in a cycle does.
    """
    started = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    for code, output, errors in warm.run(tmp_path, started + TRAIN + LATE + end):
        assert (code, output, errors) == (0, "", "")


GATHER = """
import torch, torch.distributed as dist
from torch import nn
from composable_shard import fully_shard
dist.init_process_group("gloo")
model = fully_shard(nn.Linear(8, 8))
model(torch.ones(2, 8)).sum().backward()
whole = model.weight.full_tensor()
"""


@pytest.mark.matrix
@pytest.mark.parametrize("attempt", range(10))
def test_a_script_that_ends_right_behind_full_tensor_ends_well(
    attempt: int, warm: Warm, tmp_path: Path
) -> None:
    """Its process group is not destroyed; under torch's fully_shard one such run in five aborts."""
    assert [code for code, _, _ in warm.run(tmp_path, GATHER)] == [0, 0]


MADE = """
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
last.append(lambda: print(sorted(group.size() for group in _world.pg_map), flush=True))
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


ALONE = """
import copy, os, torch
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
from torch import nn
from composable_shard import fully_shard
model = nn.Linear(8, 8)
sharded = fully_shard(copy.deepcopy(model))
for one in (model, sharded):
    one(torch.arange(16.0).view(2, 8)).square().sum().backward()
assert torch.equal(sharded.weight.grad.full_tensor(), model.weight.grad)
"""


def test_a_process_without_a_launcher_trains_alone(warm: Warm, tmp_path: Path) -> None:
    ((code, _, errors),) = warm.run(tmp_path, ALONE, 1)
    assert code == 0
    assert "got a process without RANK and WORLD_SIZE, which trains on one rank; " in errors
