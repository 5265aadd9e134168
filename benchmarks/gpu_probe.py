"""Measures the contestants in one world, in a process that runs nothing else."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from llama import Contestant, Size, build_contestant, make_batch
from rounds import orders
from simulated import world

MEMORY_STEPS = 3
WARMUP_STEPS = 2


class Key(NamedTuple):
    """A way of computing with the stack."""

    name: str
    checkpointing: bool

    def __str__(self) -> str:
        return f"{self.name}+checkpointing" if self.checkpointing else self.name


@dataclass(frozen=True)
class Plan:
    """What to measure in one world."""

    num_ranks: int
    keys: tuple[Key, ...]
    size: Size
    device_type: str
    num_rounds: int
    steps_per_round: int
    host_tokens: int


@dataclass
class Figures:
    """Samples of seconds for each round, and bytes, by contestant.

    Attributes:
        step: The time from the first kernel of a step to the last.
        host: The time of the host for a step in which the device has almost nothing to do.
        allocated: The peak of the memory of tensors; empty on the CPU.
        reserved: The peak of the memory that the allocator reserved; empty on the CPU.
    """

    step: dict[Key, list[float]] = field(default_factory=dict)
    host: dict[Key, list[float]] = field(default_factory=dict)
    allocated: dict[Key, int] = field(default_factory=dict)
    reserved: dict[Key, int] = field(default_factory=dict)


def measure(plan: Plan) -> Figures:
    """Measure memory with each contestant alone, then times with all of them taking turns."""
    figures = Figures()
    device = torch.device("cuda", 0) if plan.device_type == "cuda" else torch.device("cpu")
    with world(plan.num_ranks, plan.device_type):
        if device.type == "cuda":
            torch.cuda.set_device(device)
            peak_bytes(plan.keys[0], replace(plan.size, layers=1), device)  # loads the libraries
            for key in plan.keys:
                figures.allocated[key], figures.reserved[key] = peak_bytes(key, plan.size, device)
        contestants = {key: build(key, plan.size, device) for key in plan.keys}
        gc.collect()
        gc.freeze()  # no contestant pays for looking at the others' objects
        figures.step = rounds_of(contestants, plan, time_step)
        few = replace(plan.size, batch=1, context=min(plan.host_tokens, plan.size.context))
        for contestant in contestants.values():
            contestant.batch = make_batch(few, device)
        figures.host = rounds_of(contestants, plan, time_host)
    return figures


def build(key: Key, size: Size, device: torch.device) -> Contestant:
    """Build a contestant and let it find its buffers and its order."""
    contestant = build_contestant(key.name, size, device, checkpointing=key.checkpointing)
    for _ in range(WARMUP_STEPS):
        contestant.step()
    return contestant


def peak_bytes(key: Key, size: Size, device: torch.device) -> tuple[int, int]:
    """Return the peaks of allocated and reserved memory of a contestant that is alone."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    contestant = build(key, size, device)
    for _ in range(MEMORY_STEPS):
        contestant.step()
    torch.cuda.synchronize()
    return (
        torch.cuda.max_memory_allocated() - allocated,
        torch.cuda.max_memory_reserved() - reserved,
    )


Timer = Callable[[Contestant, int], float]


def rounds_of(
    contestants: dict[Key, Contestant], plan: Plan, timer: Timer
) -> dict[Key, list[float]]:
    """Return the seconds per step of each contestant, one sample for each round."""
    samples: dict[Key, list[float]] = {key: [] for key in contestants}
    keys: Sequence[Key] = list(contestants)
    for order in orders(keys, plan.num_rounds):
        for key in order:
            contestants[key].step()  # untimed: the allocator's blocks are its own again
            samples[key].append(timer(contestants[key], plan.steps_per_round))
    return samples


def time_step(contestant: Contestant, num_steps: int) -> float:
    """Return the seconds per step on the device; on the CPU, in wall time."""
    if contestant.batch.device.type != "cuda":
        return time_host(contestant, num_steps)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(num_steps):
        contestant.step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / num_steps


def time_host(contestant: Contestant, num_steps: int) -> float:
    """Return the seconds per step after which the host is free again."""
    on_cuda = contestant.batch.device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        contestant.step()
    seconds = (time.perf_counter() - start) / num_steps
    if on_cuda:
        torch.cuda.synchronize()
    return seconds
