"""Many iterations of random programs, and what the process holds on to meanwhile."""

from __future__ import annotations

import gc
import os
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed import distributed_c10d

from composable_shard.testing import STEPS, ParamSpec, Step, TreeLoss, TreeSpec, shard_tree
from composable_shard.testing.training import Plan, Rehearsal

PLAIN: list[Step] = ["backward", "step", "zero_grad"]
NUM_LOOKS = 5
NAP = 0.02  # seconds

TREE = TreeSpec(
    (ParamSpec((3,)), ParamSpec((4, 2))),
    (
        TreeSpec((ParamSpec((5, 2)), ParamSpec((257, 193)))),
        TreeSpec((ParamSpec((3, 5), dim=1), ParamSpec((4,), trainable=False), ParamSpec(()))),
        TreeSpec((ParamSpec((4, 2), tied=True),)),
    ),
)


VARYING = ("Slab", "_Published", "Entry", "_Piece", "c_ubyte_Array", "Called")


@dataclass(frozen=True)
class Held:
    """What a process holds.

    Attributes:
        resident_nbytes: Its resident memory.
        open_files: Its file descriptors.
        process_groups: The process groups that it has made.
        own_objects: Instances of classes of the package, but what is published, which depends on
            how far ranks are apart, and what is known of the calls in the last forward of each
            kind, which depends on that forward.
        tensors: Tensors that Python knows of.
    """

    resident_nbytes: int
    open_files: int
    process_groups: int
    own_objects: int
    tensors: int


def held() -> Held:
    gc.collect()
    return Held(
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        len(distributed_c10d._world.pg_map),
        sum(kind.__module__.startswith("composable_shard.") for kind in kinds_alive())
        - sum(kind.__name__.startswith(VARYING) for kind in kinds_alive()),
        min(num_tensors() for _ in range(NUM_LOOKS)),
    )


def kinds_alive() -> list[type]:
    # Objects that stand for others (mocks, weak proxies) may raise when asked what they are.
    return [type(one) for one in gc.get_objects()]


def num_tensors() -> int:
    """Count tensors, after a nap: gloo's thread holds those of a collective that is over."""
    time.sleep(NAP)
    return sum(issubclass(kind, torch.Tensor) for kind in kinds_alive())


def random_program(chooser: random.Random) -> list[Step]:
    """A program that reduces what it accumulates and ends as a training step does."""
    steps = chooser.choices(STEPS, k=chooser.randint(0, 4))
    steps = [step for step in steps if step != "step"]
    return [*steps, *PLAIN]


def iterate(num_iterations: int, measure_at: tuple[int, ...]) -> tuple[list[str], list[Held]]:
    """Follow random programs on one model; return differences, and results of ``held()``."""
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.5)
    rehearsal = Rehearsal(Plan(TREE, shard_tree, TreeLoss(), sgd))
    chooser = random.Random(0)
    found: list[str] = []
    seen = []
    for iteration in range(1, num_iterations + 1):
        program = random_program(chooser)
        if iteration in measure_at:
            gc.collect()  # ranks tell each other in the next pass what dropped models do not read
            program = PLAIN
        for step in program:
            found += [f"iteration {iteration}, {step}: {text}" for text in rehearsal.do(step)]
        if iteration in measure_at:
            seen.append(held())
    return found[:5], seen
