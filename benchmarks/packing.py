"""The size up to which packing parameters into one message is faster than sending each by itself.

Run `python benchmarks/packing.py`. The ranks are processes on this machine, on its accelerators if
there are enough, otherwise on the CPU, with the backend that torch chooses for them. For each size
of a parameter, the benchmark shards two groups of equal parameters: one as if messages cost
nothing, so that each parameter has its own message, and one as if messages cost everything, so that
all parameters share one message and are copied out of it. A step gathers a group and reduces its
gradients, without compute. Both groups share the processes and take turns.

The size at which packed / own passes 1 is the cost of a message, in bytes of copying:
`MESSAGE_COSTS` in `composable_shard/core/layout.py`. `--ranks` shows whether the cost grows with
the number of peers.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from report import load_average, print_load, print_table, write_json
from rounds import orders, quartiles, ratios, spread
from starting import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

KIBIBYTE = 1024
SIZES = [4 << step for step in range(11)]  # KiB, up to 4 MiB
NAMES = ("packed", "own")
NUM_WARMUP_STEPS = 3
MILLISECOND = 1e-3
EVERYTHING = 1 << 60  # bytes

Turns = dict[str, list[float]]


class Used(torch.autograd.Function):
    """Uses parameters without computing anything, and has a gradient for each."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ones_like(param) for param in ctx.saved_tensors)


class Params(nn.Module):
    """Some parameters of one size."""

    def __init__(self, num_params: int, numel: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(numel) for _ in range(num_params))

    def forward(self) -> Tensor:
        used: Tensor = Used.apply(*self.params)
        return used


# On a rank --------------------------------------------------------------------------------------


def device_type_for(num_ranks: int) -> str:
    """Return the type of the devices of the ranks on this machine."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or torch.accelerator.device_count() < num_ranks:
        return "cpu"
    return accelerator.type


def make_mesh(device_type: str) -> DeviceMesh:
    if device_type != "cpu":
        torch.accelerator.set_device_index(dist.get_rank())
    backend = dist.get_default_backend_for_device(device_type)
    group = dist.new_group(backend=backend)
    return DeviceMesh.from_group(group, device_type)


def build(name: str, backend: str, mesh: DeviceMesh, num_params: int, numel: int) -> nn.Module:
    """Shard a group, and let it make its buffers, as if messages cost everything or nothing."""
    from composable_shard import fully_shard
    from composable_shard.core.layout import MESSAGE_COSTS

    before = MESSAGE_COSTS.get(backend)
    MESSAGE_COSTS[backend] = (EVERYTHING if name == "packed" else 0, 0)
    try:
        with torch.device(mesh.device_type):
            model = fully_shard(Params(num_params, numel), mesh=mesh)
        time_turn(model, mesh.device_type, NUM_WARMUP_STEPS)
    finally:
        del MESSAGE_COSTS[backend]
        if before is not None:
            MESSAGE_COSTS[backend] = before
    return model


def time_turn(model: nn.Module, device_type: str, num_steps: int) -> float:
    """Return this rank's seconds per step."""
    finish(device_type)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        model().backward()
        model.zero_grad()
    finish(device_type)
    return (time.perf_counter() - start) / num_steps


def finish(device_type: str) -> None:
    if device_type != "cpu":
        torch.accelerator.synchronize()


def time_size(numel: int, num_params: int, num_rounds: int, num_steps: int) -> tuple[str, Turns]:
    """Time both ways for one size of a parameter; return the backend's name and the seconds."""
    mesh = make_mesh(device_type_for(dist.get_world_size()))
    backend, kind = str(dist.get_backend(mesh.get_group())), mesh.device_type
    models = {name: build(name, backend, mesh, num_params, numel) for name in NAMES}
    gc.collect()
    turns: Turns = {name: [] for name in NAMES}
    for order in orders(NAMES, num_rounds):
        for name in order:
            time_turn(models[name], kind, 1)  # untimed: brings its memory back into the caches
            turns[name].append(time_turn(models[name], kind, num_steps))
    return backend, turns


# The program ------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    load = load_average()
    sizes: dict[int, Turns] = {}
    backend = ""
    for size in options.sizes:
        numel = size * KIBIBYTE // torch.float32.itemsize
        how = options.params, options.rounds, options.steps_per_round
        told = on_ranks(time_size, options.ranks, numel, *how)
        backend, _ = told[0]
        sizes[size] = slowest([turns for _, turns in told])
    title = (
        f"{backend}, {options.ranks} ranks, {options.params} parameters, {options.rounds} rounds"
    )
    columns = ["KiB of a parameter", "packed ms", "own ms", "packed / own (quartiles)"]
    print_table(title, columns, [row(size, turns) for size, turns in sizes.items()])
    print(f"packed is as fast up to {threshold(sizes)} KiB of a parameter")
    print_load(load)
    if options.json:
        facts = {"backend": backend, "ranks": options.ranks, "load": [load, load_average()]}
        write_json(options.json, {**facts, "threshold": threshold(sizes), "seconds": sizes})
    return 0


def slowest(ranks: Sequence[Turns]) -> Turns:
    """Return the times of the slowest rank, turn by turn: a step has ended when it has on all.

    >>> slowest([{"own": [1.0, 4.0]}, {"own": [2.0, 3.0]}])
    {'own': [2.0, 4.0]}
    """
    return {
        name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def threshold(sizes: dict[int, Turns]) -> int:
    """Return the largest size below which packed is nowhere slower, by medians; 0 if none.

    >>> threshold({4: {"packed": [1.0], "own": [2.0]}, 8: {"packed": [3.0], "own": [2.0]}})
    4
    """

    def is_worth_it(size: int) -> bool:
        return ratios(sizes[size]["packed"], sizes[size]["own"]).median <= 1

    return max(takewhile(is_worth_it, sorted(sizes)), default=0)


def row(size: int, turns: Turns) -> list[str]:
    packed, own = (turns[name] for name in NAMES)
    times = [f"{quartiles(sample).median / MILLISECOND:.2f}" for sample in (packed, own)]
    return [str(size), *times, spread(ratios(packed, own))]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="KiB of a parameter")
    parser.add_argument("--params", type=int, default=16, help="how many in a group")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps-per-round", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write all samples to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
