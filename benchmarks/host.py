"""Host time: the processor time that sharding takes if communication takes none.

Run `python benchmarks/host.py`. One process pretends to be rank 0 of 2, 64, 512 and 4096 by torch's
fake process group; each number of ranks gets a fresh process. Collectives return at once. Those of
the fake process group do not: they copy the input once for every rank, which takes milliseconds at
4096 ranks. `--copying-collectives` uses them all the same. The model has 32 blocks with the 12
parameters of a transformer block (2 LayerNorms, 4 Linears) at width 8, so its arithmetic takes
almost no time. The blocks and a root without parameters are sharded. A figure is the microseconds
of processor time for each of the 32 groups, in forward or in backward; no optimizer steps.

There are two ratios, both computed round by round: of the raw times, and *beyond the plain module*,
after subtracting the plain module's time of the same round from both. The second ratio compares the
time that the two libraries add. Every rank holds at least one padded row of every parameter, so at
4096 ranks a gathered group has a megabyte, and copying it is a part of the time.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from report import load_average, print_load, print_table, write_json
from rounds import orders, quartiles, ratios, spread
from starting import REPOSITORY
from torch import Tensor, nn

WORLD_SIZES = [2, 64, 512, 4096]
NAMES = ("ours", "fsdp2", "single")
PHASES = ("forward", "backward", "step")
NUM_WARMUP_STEPS = 3  # by then orders are recorded and buffers made
MICROSECOND = 1e-6


class HostTime(NamedTuple):
    """Seconds of processor time per group."""

    forward: float
    backward: float

    @property
    def step(self) -> float:
        return self.forward + self.backward


class TinyBlock(nn.Module):
    """The parameters of a transformer block, and as little arithmetic as uses them all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(3 * width, width)
        self.ffn_norm = nn.LayerNorm(width)
        self.ffn_in = nn.Linear(width, 4 * width)
        self.ffn_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [rows, width]
        x = x + self.attention_out(self.qkv(self.attention_norm(x)))
        hidden: Tensor = self.ffn_out(self.ffn_in(self.ffn_norm(x)))
        return x + hidden


def build(name: str, num_blocks: int, width: int, is_low: bool) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(TinyBlock(width) for _ in range(num_blocks)))
    if name == "single":
        return blocks.bfloat16() if is_low else blocks
    shard, policy_of, mesh = sharding(name)
    policy = policy_of(torch.bfloat16, torch.float32) if is_low else policy_of()
    for block in blocks:
        shard(block, mesh=mesh, mp_policy=policy)
    shard(blocks, mesh=mesh, mp_policy=policy)
    return blocks


def sharding(name: str) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if name == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        return fully_shard, MixedPrecisionPolicy, mesh
    from composable_shard import MixedPrecisionPolicy as OurPolicy
    from composable_shard import fully_shard as our_fully_shard

    return our_fully_shard, OurPolicy, mesh


def time_turn(model: nn.Module, num_steps: int, width: int, dtype: torch.dtype) -> HostTime:
    """Return the time of one group of a model, the mean of some steps."""
    x = torch.ones(2, width, dtype=dtype, requires_grad=True)
    num_groups = num_steps * len(list(model.children()))
    forward = backward = 0.0
    gc.collect()
    for _ in range(num_steps):
        start = time.process_time()
        loss = model(x).sum()
        middle = time.process_time()
        loss.backward()
        end = time.process_time()
        forward, backward = forward + middle - start, backward + end - middle
        model.zero_grad(set_to_none=True)
    return HostTime(forward / num_groups, backward / num_groups)


def time_world(
    num_ranks: int,
    num_rounds: int,
    num_steps: int,
    num_blocks: int,
    width: int,
    copies: bool,
    is_low: bool,
) -> dict[str, list[HostTime]]:
    """Be rank 0 of a world and time all contestants, in turns."""
    if REPOSITORY not in sys.path:
        sys.path.append(REPOSITORY)
    from composable_shard.testing import fake_ranks

    torch.set_num_threads(1)
    if not copies:
        let_collectives_return_at_once()
    turns: dict[str, list[HostTime]] = {name: [] for name in NAMES}
    with fake_ranks(num_ranks):
        models = {name: build(name, num_blocks, width, is_low) for name in NAMES}
        dtypes = dict.fromkeys(NAMES, torch.float32)
        dtypes["single"] = torch.bfloat16 if is_low else torch.float32
        for name, model in models.items():
            time_turn(model, NUM_WARMUP_STEPS, width, dtypes[name])
        gc.collect()
        gc.freeze()  # no contestant pays for looking at the others' objects
        for order in orders(NAMES, num_rounds):
            for name in order:
                turns[name].append(time_turn(models[name], num_steps, width, dtypes[name]))
    return turns


class Done:
    """A collective that is over."""

    def wait(self, *_: object) -> bool:
        return True


def let_collectives_return_at_once() -> None:
    """Replace the collectives that the libraries launch, in this process."""
    done = Done()
    for kind in ("all_gather", "allgather", "reduce_scatter"):
        for form in ("single", "into_tensor", "tensor"):
            for name in (f"{kind}_{form}", f"{kind}_{form}_coalesced", f"_{kind}_base"):
                if hasattr(dist.ProcessGroup, name):
                    setattr(dist.ProcessGroup, name, lambda *_, **__: done)


def in_fresh_process(fn: Callable[..., Any], *args: object) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(fn, *args).result()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    load = load_average()
    sizes = options.rounds, options.steps_per_round, options.blocks, options.width
    sizes = *sizes, options.copying_collectives, options.dtype == "bf16"
    worlds = {ranks: in_fresh_process(time_world, ranks, *sizes) for ranks in options.ranks}
    columns = ["ranks", "", "ours us", "FSDP2 us", "plain us", "ours/FSDP2"]
    columns.append("beyond the plain module (quartiles)")
    rows = [row(worlds[ranks], ranks, phase) for ranks in options.ranks for phase in PHASES]
    title = f"processor time per group, {options.dtype}, {options.blocks} groups, "
    title += f"{options.rounds} rounds"
    print_table(title, columns, rows)
    print_load(load)
    if options.json:
        facts = {"blocks": options.blocks, "width": options.width, "dtype": options.dtype}
        write_json(options.json, {**facts, "load": [load, load_average()], "seconds": worlds})
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps-per-round", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=WORLD_SIZES)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16"],
        default="fp32",
        help="bf16 computes in bfloat16 and reduces in float32",
    )
    parser.add_argument(
        "--copying-collectives", action="store_true", help="use those of the fake process group"
    )
    parser.add_argument("--json", metavar="FILE", help="write all samples to this file")
    return parser.parse_args(arguments)


def row(turns: dict[str, list[HostTime]], num_ranks: int, phase: str) -> list[str]:
    ours, fsdp2, plain = ([getattr(turn, phase) for turn in turns[name]] for name in NAMES)
    beyond = ratios(less(ours, plain), less(fsdp2, plain))
    return [
        str(num_ranks),
        phase,
        *(f"{quartiles(times).median / MICROSECOND:.0f}" for times in (ours, fsdp2, plain)),
        f"{ratios(ours, fsdp2).median:.3f}",
        spread(beyond),
    ]


def less(times: Sequence[float], floors: Sequence[float]) -> list[float]:
    return [time - floor for time, floor in zip(times, floors, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
