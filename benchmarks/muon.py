"""The cost of a step of Muon on whole matrices, compared with other ways to step them.

Run `python benchmarks/muon.py`. The parameters are the matrices of some transformer layers with a
fused weight of queries, keys and values, sharded over ranks on the CPU; gradients are drawn once,
and a step is a step of the optimizer alone. Contestants share the processes and take turns:

    ours        `with_layout`, whole matrices on their owners
    dtensor     `torch.optim.Muon` on the DTensors of torch's FSDP2
    full        each gradient gathered by `full_tensor`, and every rank steps every matrix
    unsharded   `torch.optim.Muon` on plain parameters, on one rank's processor

Bars: ours is at most 0.4 of dtensor and 0.6 of full.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from report import load_average, print_load, print_table, write_json
from rounds import orders, quartiles, ratios, spread
from starting import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.optim import Muon

MILLISECOND = 1e-3
NAMES = ("ours", "dtensor", "full", "unsharded")
BARS = {"dtensor": 0.4, "full": 0.6}

Turns = dict[str, list[float]]
muon = partial(Muon, lr=1e-3)


class Layers(nn.Module):
    """The matrices of some transformer layers."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(shape, generator=generator) for _ in range(num_layers) for shape in shapes
        )

    def forward(self) -> Tensor:
        return sum(weight.sum() for weight in self.weights)


# On a rank --------------------------------------------------------------------------------------


class Contestant:
    """One way to step the same parameters."""

    def __init__(self, name: str, num_layers: int, width: int) -> None:
        self.name = name
        self.model = Layers(num_layers, width)
        if name == "ours":
            from composable_shard import fully_shard
            from composable_shard.optim import Owned, with_layout

            fully_shard(self.model)
            self.optimizer = with_layout(self.model, {"*": Owned(muon)})
        elif name == "unsharded":
            self.optimizer = muon(self.model.parameters())
        else:
            from torch.distributed.fsdp import fully_shard as torch_fully_shard

            torch_fully_shard(self.model)
            self.optimizer = muon(self.model.parameters())
        if name == "full":
            self.whole = [nn.Parameter(param.full_tensor()) for param in self.model.parameters()]
            self.optimizer = muon(self.whole)
        generator = torch.Generator().manual_seed(1)
        for param in self.model.parameters():
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad if name == "unsharded" else self.cut(grad, param)

    def cut(self, full: Tensor, param: Tensor) -> Tensor:
        return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)

    def step(self) -> None:
        if self.name != "full":
            self.optimizer.step()
            return
        for param, whole in zip(self.model.parameters(), self.whole, strict=True):
            whole.grad = param.grad.full_tensor()
        self.optimizer.step()
        with torch.no_grad():
            for param, whole in zip(self.model.parameters(), self.whole, strict=True):
                param.copy_(self.cut(whole, param))


def time_all(num_layers: int, width: int, num_rounds: int, num_steps: int) -> tuple[Turns, float]:
    """Return seconds per step, and how far the contestants are apart after as many steps."""
    contestants = {name: Contestant(name, num_layers, width) for name in NAMES}
    turns: Turns = {name: [] for name in NAMES}
    for order in orders(NAMES, num_rounds):
        for name in order:
            contestants[name].step()  # untimed: brings its memory back into the caches
            dist.barrier()
            start = time.perf_counter()
            for _ in range(num_steps):
                contestants[name].step()
            turns[name].append((time.perf_counter() - start) / num_steps)
    return turns, difference(contestants["ours"].model, contestants["unsharded"].model)


def difference(sharded: nn.Module, plain: nn.Module) -> float:
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return max((param.full_tensor() - other).abs().max().item() for param, other in pairs)


# The program ------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    load = load_average()
    how = options.layers, options.width, options.rounds, options.steps_per_round
    told = on_ranks(time_all, options.ranks, *how)
    turns = slowest([turns for turns, _ in told])
    apart = max(far for _, far in told)
    rows = []
    for name, seconds in turns.items():
        bar = f"{BARS[name]}" if name in BARS else ""
        beside = "" if name == "ours" else spread(ratios(turns["ours"], seconds))
        rows.append([name, f"{quartiles(seconds).median / MILLISECOND:.1f}", beside, bar])
    title = f"{options.ranks} ranks, {options.layers} layers of width {options.width}"
    print_table(title, ["", "ms of a step", "ours / it (quartiles)", "bar"], rows)
    print(f"ours and unsharded differ by {apart}")
    print_load(load)
    if options.json:
        facts = {"ranks": options.ranks, "load": [load, load_average()], "difference": apart}
        write_json(options.json, {**facts, "seconds": turns})
    return 0 if apart == 0 else 1


def slowest(ranks: Sequence[Turns]) -> Turns:
    """Return the times of the slowest rank, turn by turn: a step has ended when it has on all.

    >>> slowest([{"ours": [1.0, 4.0]}, {"ours": [2.0, 3.0]}])
    {'ours': [2.0, 4.0]}
    """
    return {
        name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps-per-round", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write all samples to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
