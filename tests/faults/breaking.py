"""Models over a process group with a short time-out, and what breaks their ranks."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from near import Apart
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard import fully_shard
from composable_shard.core.transport.channel import Channel
from composable_shard.testing import RankError, RankTimeout, run_ranks

TIME_OUT = 2  # seconds of the process group
LIMIT = 120  # seconds of the call: what takes so long hangs
BAD = 1  # the rank on which a fault is
WIDTH = 8
X = torch.ones(2, WIDTH)
ALL_RANKS = (
    "All ranks must run evaluation, generation, saving and the same branches; docs/hangs.md says "
    "how to find the rank that runs other code"
)
AWAY = (
    "; rank {} waits in no collective of the library: it may be in another (dist.barrier(), "
    "full_tensor(), a full state dict), be busy, or have stopped; if ranks have different "
    "numbers of batches, iterate with composable_shard.uneven(). " + ALL_RANKS
)
WHEREABOUTS = AWAY.format(BAD)


def mesh_over(ranks: dist.ProcessGroup) -> DeviceMesh:
    """Return a mesh over a process group that is going to be lost.

    Its name is its own: torch takes equal meshes for one, and later tests would meet in this group.
    """
    return DeviceMesh.from_group(ranks, "cpu", mesh_dim_names=(f"group{ranks.group_name}",))


def mesh_of_its_own() -> DeviceMesh:
    """Return a mesh over a new process group with a short time-out.

    Within it the ranks have to connect, too: none of them begins before all are here.
    """
    dist.barrier()
    return mesh_over(dist.new_group(timeout=datetime.timedelta(seconds=TIME_OUT)))


def layers(count: int, width: int = WIDTH) -> nn.Sequential:
    """Return a model that has trained a step: groups '0', '1', ... below a root without any."""
    mesh = mesh_of_its_own()
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step(model, torch.ones(2, width))
    return model


def step(model: nn.Module, x: torch.Tensor = X) -> None:
    model(x).square().sum().backward()


def kill_this_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_this_rank_once_sent() -> None:
    """Let go through the sockets what this rank has sent before."""
    time.sleep(0.3)
    kill_this_rank()


def stop_this_rank() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_too_long() -> None:
    time.sleep(TIME_OUT + 1)


class End:
    """The end of the bad rank's process, for which the others may wait. Collective: once."""

    def __init__(self) -> None:
        heard: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(heard, os.getpid())
        self._process = os.pidfd_open(heard[BAD])

    def wait(self) -> None:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        poll.poll()


@contextlib.contextmanager
def at_launch(
    act: str, before: Callable[[], object] = bool, after: Callable[[], object] = bool
) -> Iterator[None]:
    """Do something around the launch of one collective, "gathering group '1'" for example."""
    with contextlib.ExitStack() as stack:
        for method in ("gather", "reduce", "exchange"):
            original = getattr(Channel, method)

            def launch(
                self: Channel, *args: Any, _call: Any = original, _name: str = method, **kwargs: Any
            ) -> Any:
                is_it = act == (self.gathering if _name == "gather" else self.reducing)
                if is_it:
                    before()
                works = _call(self, *args, **kwargs)
                if is_it:
                    after()
                return works

            stack.enter_context(mock.patch.object(Channel, method, launch))
        yield


def failures(fn: Callable[..., object], num_ranks: int, *args: Any, apart: bool) -> dict[int, str]:
    """Run `fn` on ranks some of which fail; return types and texts of the errors, by rank."""
    try:
        run_ranks(Apart(fn) if apart else fn, num_ranks, *args, timeout=LIMIT)
    except RankTimeout as error:
        raise AssertionError("Expected an error within the time-out, got a hang") from error
    except RankError as error:
        return {
            failure.rank: f"{failure.type_name}: {steady(failure.message)}"
            for failure in error.failures
        }
    raise AssertionError("Expected a failure, got none")


def steady(text: str) -> str:
    """Leave out what differs from run to run: processes, ports, places in the source of gloo."""
    text = re.sub(r"process \d+", "process P", text)
    return re.sub(r"'\[.*?/gloo/.*?\] (.*)'", _gloo, text, flags=re.DOTALL)


def _gloo(found: re.Match[str]) -> str:
    return "'" + re.sub(r"\[[\d.:a-f]+\](:\d+)?", "ADDRESS", found.group(1)) + "'"
