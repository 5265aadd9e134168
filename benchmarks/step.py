"""Time of a training step: this library, torch's FSDP2, DDP, a plain module, and the limit.

Run `python benchmarks/step.py`. `--sweep` goes from small batches, with which a step mostly sends,
to large batches, with which it mostly computes. `--check` compares the losses instead of the times.
The limit is the larger of the compute time and the transfer time of a step, each measured alone;
see `limit.py`. Processor time is that of one rank with all its threads; other load on the machine
disturbs it less than wall time. The limit of the processor time is the sum of the two times,
because a processor does only one of them at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist
from contestants import LABELS, WRAPPERS, Spec, build_contestant
from limit import LIMITS
from report import load_average, print_load, print_table, write_json
from rounds import (
    Turn,
    build_one,
    join_ranks,
    orders,
    quartiles,
    ratios,
    set_batch,
    spread,
    time_round,
)
from starting import end_ranks, first_failure, on_fresh_ranks, on_ranks

SWEPT_BATCHES = [1, 2, 8, 24]
# Losses of ranks that hold the same weights; bf16 keeps 8 bits of them.
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}


@dataclass
class Timing:
    """What was measured at one batch size: every contestant's turns, one each round."""

    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def walls(self, name: str) -> list[float]:
        if name == "limit":
            return [max(pair) for pair in zip(*map(self.walls, LIMITS), strict=True)]
        return [turn.wall for turn in self.turns[name]]

    def processors(self, name: str) -> list[float]:
        if name == "limit":
            return [sum(pair) for pair in zip(*map(self.processors, LIMITS), strict=True)]
        return [turn.processor for turn in self.turns[name]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    batches = [options.batch] if options.sweep is None else options.sweep or SWEPT_BATCHES
    spec = Spec(
        options.layers,
        options.width,
        batches[0],
        options.context,
        options.dtype_policy,
        sharding=options.sharding,
    )
    failures: dict[str, str] = {}
    load = load_average()
    try:
        if options.check:
            return check(options.only, spec, options.ranks, options.check)
        timings = measure(spec, batches, options, failures)
    finally:
        end_ranks()
    if options.sweep is None:
        show_contestants(timings[options.batch], spec, options)
    else:
        show_sweep(timings, spec, options)
    show_failures(failures)
    print_load(load)
    if options.json:
        turns = {batch: timing.turns for batch, timing in timings.items()}
        facts = {"spec": asdict(spec), "ranks": options.ranks, "load": [load, load_average()]}
        write_json(options.json, {**facts, "turns": turns, "failures": failures})
    return 1 if failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, help="default 8, and 4 for each batch of a sweep")
    parser.add_argument("--steps-per-round", type=int, help="default 5, and 1 in a sweep")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument(
        "--context", type=int, help="tokens per sequence; default 128, and 16 in a sweep"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype-policy", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--sharding", default="zero3", help="zero1, zero2 or zero3")
    parser.add_argument("--only", nargs="+", choices=list(WRAPPERS), default=list(WRAPPERS))
    parser.add_argument("--json", metavar="FILE", help="write all samples to this file")
    parser.add_argument(
        "--sweep", nargs="*", type=int, metavar="BATCH", help=f"default {SWEPT_BATCHES}"
    )
    parser.add_argument(
        "--check", nargs="?", type=int, const=5, metavar="STEPS", help="compare the losses"
    )
    options = parser.parse_args(arguments)
    sweeps = options.sweep is not None
    options.rounds = options.rounds or (4 if sweeps else 8)
    options.steps_per_round = options.steps_per_round or (1 if sweeps else 5)
    options.context = options.context or (16 if sweeps else 128)
    return options


def measure(
    spec: Spec, batches: Sequence[int], options: argparse.Namespace, failures: dict[str, str]
) -> dict[int, Timing]:
    """Time all contestants and both sides of the limit in shared processes, batch by batch."""
    names = build_those_that_can([*options.only, *LIMITS], spec, options.ranks, failures)
    timings = {}
    for batch in batches:
        on_ranks(set_batch, options.ranks, batch)
        timing = timings[batch] = Timing({name: [] for name in names})
        for index, order in enumerate(orders(names, options.rounds), start=1):
            turns = on_ranks(time_round, options.ranks, order, options.steps_per_round)
            for name, turn in join_ranks(turns).items():
                timing.turns[name].append(turn)
            show_progress(f"batch {batch}, round {index} of {options.rounds}")
    show_progress("done\n")
    return timings


def build_those_that_can(
    names: Sequence[str], spec: Spec, num_ranks: int, failures: dict[str, str]
) -> list[str]:
    """Build the contestants, without those that fail; those are noted in ``failures``."""
    for name in names:
        try:
            on_ranks(build_one, num_ranks, name, spec)
        except RuntimeError as error:
            failures[name] = first_failure(error)
            end_ranks()  # a failure may leave collectives half done
            others = [other for other in names if other != name]
            return build_those_that_can(others, spec, num_ranks, failures)
    return list(names)


def show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}", end="", file=sys.stderr, flush=True)


def show_contestants(timing: Timing, spec: Spec, options: argparse.Namespace) -> None:
    base = base_of(timing)
    ratio = f"{base}/other (quartiles)"
    columns = ["", "step ms", ratio, "step/limit", "processor ms", ratio]
    rows = [row(timing, name, base) for name in [*options.only, *LIMITS, "limit"]]
    print_table(f"{title(spec, options)}, {spec.batch} x {spec.context} tokens", columns, rows)


def show_sweep(timings: Mapping[int, Timing], spec: Spec, options: argparse.Namespace) -> None:
    first = next(iter(timings.values()))
    base = base_of(first)
    others = [name for name in [*first.turns, "limit"] if name not in (base, *LIMITS)]
    by_processor = [name for name in others if name in ("fsdp2", "limit")]
    columns = ["batch", f"{base} ms", *(f"{base}/{name}" for name in others), "limit is"]
    columns += [f"proc. /{name}" for name in by_processor]
    rows = []
    for batch, timing in timings.items():
        rows.append([str(batch), milliseconds(timing.walls(base))])
        rows[-1] += [median_ratio(timing.walls, base, name) for name in others]
        rows[-1] += [max(LIMITS, key=lambda side: quartiles(timing.walls(side)).median)]
        rows[-1] += [median_ratio(timing.processors, base, name) for name in by_processor]
    print_table(f"{title(spec, options)}, batches of {spec.context} tokens", columns, rows)


def median_ratio(times_of: Callable[[str], list[float]], base: str, other: str) -> str:
    return f"{ratios(times_of(base), times_of(other)).median:.3f}"


def base_of(timing: Timing) -> str:
    return "ours" if "ours" in timing.turns else next(iter(timing.turns))


def title(spec: Spec, options: argparse.Namespace) -> str:
    size = f"{spec.layers} layers, width {spec.width}, {spec.dtype_policy}"
    return f"{options.ranks} ranks, {options.rounds} rounds, {size}"


def row(timing: Timing, name: str, base: str) -> list[str]:
    label = label_of(name)
    if name != "limit" and name not in timing.turns:
        return [label, "failed", *[""] * 4]
    walls, processors = timing.walls(name), timing.processors(name)
    return [
        label,
        milliseconds(walls),
        spread(ratios(timing.walls(base), walls)),
        median_ratio(timing.walls, name, "limit"),
        milliseconds(processors),
        spread(ratios(timing.processors(base), processors)),
    ]


def label_of(name: str) -> str:
    return {**LABELS, **LIMITS}.get(name, name)


def milliseconds(sample: Sequence[float]) -> str:
    return f"{quartiles(sample).median * 1e3:.1f}"


def show_failures(failures: Mapping[str, str]) -> None:
    for name, failure in failures.items():
        print(f"{label_of(name)} failed. {failure}", file=sys.stderr)


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
