"""Time and memory of a training step: this library, torch's FSDP2, DDP, a plain module.

Run `python benchmarks/step.py`; `--check` compares the losses instead of the times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch.distributed as dist
from contestants import WRAPPERS, Spec, build_contestant
from launch import end_ranks, first_failure, on_fresh_ranks, on_ranks
from memory_probe import peak_growth
from report import print_table, write_json
from rounds import build_all, orders, quartiles, ratios, slowest_rank, time_round

LABELS = {
    "ours": "composable_shard",
    "fsdp2": "torch FSDP2",
    "ddp": "torch DDP",
    "single": "plain module",
}
MEMORY_STEPS = 6  # the heap's gaps have stopped growing by then
MEGABYTE = 1e6
# Losses of ranks that hold the same weights; bf16 keeps 8 bits of them.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}


@dataclass
class Figures:
    """What was measured: bytes and seconds by contestant, and why one is missing."""

    peak_growth: dict[str, int] = field(default_factory=dict)
    peak_growth_without_gaps: dict[str, int] = field(default_factory=dict)
    step_times: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    spec = Spec(options.layers, options.width, options.batch, options.context, options.dtype_policy)
    try:
        if options.check:
            return check(options.only, spec, options.ranks, options.check)
        figures = measure(spec, options)
    finally:
        end_ranks()
    show(figures, options.only, spec, options.ranks)
    if options.json:
        facts = {"spec": asdict(spec), "ranks": options.ranks, **asdict(figures)}
        write_json(options.json, facts)
    return 1 if figures.failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps-per-round", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype-policy", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--only", nargs="+", choices=list(WRAPPERS), default=list(WRAPPERS))
    parser.add_argument("--json", metavar="FILE", help="write all samples to this file")
    parser.add_argument(
        "--check", nargs="?", type=int, const=5, metavar="STEPS", help="compare the losses"
    )
    return parser.parse_args(arguments)


def measure(spec: Spec, options: argparse.Namespace) -> Figures:
    """Measure memory in processes of their own, then time in shared ones.

    A contestant that fails the first is reported and takes no part in the second.
    """
    figures = Figures()
    for name in options.only:
        arguments = (name, spec, MEMORY_STEPS)
        try:
            growths = [
                max(on_fresh_ranks(partial(peak_growth, gaps=gaps), options.ranks, *arguments))
                for gaps in (True, False)
            ]
            figures.peak_growth[name], figures.peak_growth_without_gaps[name] = growths
        except RuntimeError as error:
            figures.failures[name] = first_failure(error)
    names = list(figures.peak_growth)
    if not names:
        return figures
    on_ranks(build_all, options.ranks, names, spec)
    figures.step_times = {name: [] for name in names}
    for index, order in enumerate(orders(names, options.rounds)):
        show_progress(index, options.rounds)
        times = on_ranks(time_round, options.ranks, order, options.steps_per_round)
        for name, seconds in slowest_rank(times).items():
            figures.step_times[name].append(seconds)
    show_progress(options.rounds, options.rounds)
    return figures


def show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rround {done} of {total}", end=end, file=sys.stderr, flush=True)


def show(figures: Figures, names: Sequence[str], spec: Spec, num_ranks: int) -> None:
    measured = list(figures.step_times)
    base = "ours" if "ours" in measured else next(iter(measured), "")
    ratio = f"{base}/other"
    columns = ["", "step ms", f"{ratio} (quartiles)", "peak MB", ratio, "no gaps MB", ratio]
    rows = [row(figures, name, base) for name in names]
    title = (
        f"{num_ranks} ranks, {spec.layers} layers, width {spec.width}, "
        f"{spec.batch} x {spec.context} tokens per rank, {spec.dtype_policy}"
    )
    print_table(title, columns, rows)
    show_failures(figures.failures)


def show_failures(failures: Mapping[str, str]) -> None:
    for name, failure in failures.items():
        print(f"{LABELS[name]} failed. {failure}", file=sys.stderr)


def row(figures: Figures, name: str, base: str) -> list[str]:
    if name not in figures.step_times:
        return [LABELS[name], "failed", *[""] * 5]
    times = figures.step_times[name]
    ratio = ratios(figures.step_times[base], times)
    return [
        LABELS[name],
        f"{quartiles(times).median * 1e3:.1f}",
        f"{ratio.median:.3f} ({ratio.lower:.3f} - {ratio.upper:.3f})",
        *memory_cells(figures.peak_growth, name, base),
        *memory_cells(figures.peak_growth_without_gaps, name, base),
    ]


def memory_cells(growth: Mapping[str, int], name: str, base: str) -> list[str]:
    return [f"{growth[name] / MEGABYTE:.0f}", f"{growth[base] / growth[name]:.3f}"]


def check(names: Sequence[str], spec: Spec, num_ranks: int, num_steps: int) -> int:
    """Compare the ranks' mean losses of all contestants that train on all ranks' data.

    By plain gradient descent: AdamW would hide a gradient that is wrong by a factor.
    """
    spec = replace(spec, optimizer="sgd")
    losses: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    for name in (name for name in names if name != "single"):
        try:
            losses[name] = on_fresh_ranks(train, num_ranks, name, spec, num_steps)[0]
        except RuntimeError as error:
            failures[name] = first_failure(error)
    rows = [[LABELS[name], *(f"{loss:.7f}" for loss in losses[name])] for name in losses]
    print_table("mean loss by step", ["", *map(str, range(num_steps))], rows)
    show_failures(failures)
    largest = max((max(step) - min(step) for step in zip(*losses.values(), strict=True)), default=0)
    tolerance = TOLERANCES[spec.dtype_policy]
    print(f"largest difference {largest:.2e}, allowed {tolerance:.0e}")
    return 1 if failures or not largest <= tolerance else 0


def train(name: str, spec: Spec, num_steps: int) -> list[float]:
    contestant = build_contestant(name, spec)
    losses = []
    for step in range(num_steps):
        loss = contestant.step(step)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


if __name__ == "__main__":
    sys.exit(main())
