"""Time of an optimizer step over shards: a stock optimizer over DTensors, and `flat` over flat
buffers.

Run `python benchmarks/optimizer.py`. One process is rank 0 of 64, and its collectives do nothing.
The model has 300 small parameters in 30 groups, so their arithmetic takes almost no time. The
benchmark measures host time, in milliseconds of processor time. With `--width 1024`, the parameters
are large, there are 2 ranks, and the benchmark measures the time of a step. Both optimizers step
the same parameters in turn. The lower bound is a stock optimizer over as many plain tensors as
`flat` has.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from report import load_average, print_load, print_table, write_json
from rounds import quartiles, ratios, spread
from torch import nn

from composable_shard import fully_shard
from composable_shard.optim import flat
from composable_shard.testing import fake_ranks

MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "SGD, momentum, foreach": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True),
}
NUM_GROUPS = 30
NUM_LAYERS = 5
MILLISECOND = 1e-3


def build(width: int) -> nn.Module:
    """Return 30 groups of 5 linear layers, sharded, with gradients."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))
        for _ in range(NUM_GROUPS if width < 256 else 4)
    ]
    model = nn.Sequential(*blocks)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model(torch.randn(4, width)).sum().backward()
    return model


def plain_tensors(model: nn.Module, count: int) -> list[nn.Parameter]:
    """Return as many plain tensors, of as many elements in all as the shards have."""
    numel = sum(param.to_local().numel() for param in model.parameters()) // count
    tensors = [nn.Parameter(torch.zeros(numel)) for _ in range(count)]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    return tensors


def measure(model: nn.Module, make: Callable[..., Any], num_rounds: int) -> dict[str, list[float]]:
    """Return the processor time of each step: stock, flat, stock over plain tensors, in turn."""
    optimizers = {"stock": make(model.parameters()), "flat": flat(make(model.parameters()))}
    optimizers["plain"] = make(plain_tensors(model, sum(optimizers["flat"].num_tensors())))
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(num_rounds + 2):
        names = list(optimizers) if number % 2 else list(reversed(optimizers))
        for name in names:
            begin = time.process_time()
            optimizers[name].step()
            if number >= 2:  # states are made in the first
                times[name].append(time.process_time() - begin)
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--ranks", type=int, help="default 64, and 2 for large parameters")
    parser.add_argument("--json", metavar="PATH", help="also write the figures there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load = load_average()
    num_ranks = options.ranks or (64 if options.width < 256 else 2)
    with fake_ranks(num_ranks):
        model = build(options.width)
        found = {name: measure(model, make, options.rounds) for name, make in MAKES.items()}
        num_params = len(list(model.parameters()))
    rows = []
    for name, times in found.items():
        medians = [f"{quartiles(each).median / MILLISECOND:.2f}" for each in times.values()]
        rows.append([name, *medians, spread(ratios(times["flat"], times["stock"]))])
    title = f"ms of a step, {num_params} parameters of width {options.width}, {num_ranks} ranks"
    print_table(title, ["", "stock", "flat", "plain", "flat/stock (quartiles)"], rows)
    print_load(load)
    if options.json:
        write_json(options.json, {"seconds": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
