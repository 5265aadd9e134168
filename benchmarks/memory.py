"""Peak memory of a training step, compared with the minimum that the arithmetic allows.

Run `python benchmarks/memory.py`. For each contestant it prints three peaks, in MB for each rank:

- live: bytes of tensor storage that are alive at once, between the steps and at the peak of a step.
  This is exact except for allocations inside of an operation (`live_storage.py`). Gloo's
  reduce-scatter, which FSDP2 uses, copies its input inside; resident memory includes this copy.
- resident: the growth of the resident memory of a process, including gaps in the C library's heap
  (`memory_probe.py`). This is the memory that a user sees.
- no gaps: the same, with each large tensor in a memory mapping of its own.

The minimum for N ranks, of parameters with P elements:

    shards                  4 P / N
  + optimizer state         8 P / N, the two moments of AdamW
  + two unsharded groups    the largest two, in the dtype of compute: one computes, one arrives
  + one unsharded gradient  of the largest group, in the dtype of compute
  + the larger of           the activations, all there when backward begins, and
                            4 P / N, the sharded gradients, all there when it ends

The activations are measured: the rise of live bytes in a forward of the plain module with its
parameters in the dtype of compute. DDP and the plain module keep whole parameters, so the benchmark
compares them with 4 P + 8 P + the larger of the activations and 4 P.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from contestants import LABELS, WRAPPERS, Spec, build_contestant, build_floor
from limit import groups_of
from live_storage import LiveStorage
from memory_probe import peak_growth, warm_up
from report import MEGABYTE, load_average, print_load, print_table, write_json
from starting import end_ranks, first_failure, on_fresh_ranks, on_ranks

NUM_LIVE_STEPS = 4
NUM_UNCOUNTED_STEPS = 2  # in the first one the optimizer makes its state
SHARDED = ("ours", "fsdp2")
NUM_MOMENTS = 2


@dataclass
class Terms:
    """What the minimum is made of, in bytes."""

    parameters: int
    optimizer_state: int
    unsharded_groups: int
    unsharded_gradients: int
    activations: int
    gradients: int

    def total(self) -> int:
        *kept, activations, gradients = astuple(self)
        return sum(kept) + max(activations, gradients)


@dataclass
class Figures:
    """The results: bytes by contestant, and why a contestant is missing."""

    activations: int = 0
    between: dict[str, int] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=dict)
    resident: dict[str, int] = field(default_factory=dict)
    no_gaps: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def terms(spec: Spec, num_ranks: int, activations: int, *, sharded: bool) -> Terms:
    """Return the minimum for contestants that shard, or for those that keep everything whole."""
    groups = sorted(groups_of(spec), key=lambda group: group.numel, reverse=True)
    num_shards = num_ranks if sharded else 1
    shard = sum(group.nbytes(torch.float32) for group in groups) // num_shards
    return Terms(
        parameters=shard,
        optimizer_state=NUM_MOMENTS * shard,
        unsharded_groups=sum(g.nbytes(spec.compute_dtype) for g in groups[:2]) if sharded else 0,
        unsharded_gradients=groups[0].nbytes(spec.compute_dtype) if sharded else 0,
        activations=activations,
        gradients=shard,
    )


def live_bytes(name: str, spec: Spec) -> tuple[int, int]:
    """Train a contestant; return the live bytes between steps and at the peak of a step."""
    warm_up(name)
    with LiveStorage() as live:
        contestant = build_contestant(name, spec)
        for step in range(NUM_UNCOUNTED_STEPS):
            contestant.step(step)
        gc.collect()
        dist.barrier()  # the backend's threads release the sent tensors
        live.reset_peak()
        between = live.live()
        for step in range(NUM_UNCOUNTED_STEPS, NUM_LIVE_STEPS):
            contestant.step(step)
    return between, live.peak


def activation_bytes(spec: Spec) -> int:
    """Return how far a forward of the floor raises the live bytes."""
    with LiveStorage() as live:
        floor = build_floor(spec)
        live.reset_peak()
        before = live.live()
        floor.forward(0)
    return live.peak - before


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    spec = Spec(options.layers, options.width, options.batch, options.context, options.dtype_policy)
    load = load_average()
    try:
        figures = measure(spec, options)
    finally:
        end_ranks()
    minima = {
        sharded: terms(spec, options.ranks, figures.activations, sharded=sharded)
        for sharded in (True, False)
    }
    show(figures, minima, spec, options)
    print_load(load)
    if options.json:
        least = {"sharded": asdict(minima[True]), "whole": asdict(minima[False])}
        facts = {"spec": asdict(spec), "ranks": options.ranks, "load": [load, load_average()]}
        write_json(options.json, {**facts, "minimum": least, **asdict(figures)})
    return 1 if figures.failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--rounds", type=int, default=6, help="steps of the resident peak; gaps grow for about 6"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype-policy", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--only", nargs="+", choices=list(WRAPPERS), default=list(WRAPPERS))
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    return parser.parse_args(arguments)


def measure(spec: Spec, options: argparse.Namespace) -> Figures:
    """Measure live bytes, then resident ones in processes of their own.

    The rank that needs most counts.
    """
    figures = Figures(activations=max(on_ranks(activation_bytes, options.ranks, spec)))
    for measured in (measure_live, measure_resident):
        for name in options.only:
            if name in figures.failures:
                continue
            try:
                measured(figures, name, spec, options)
            except RuntimeError as error:
                figures.failures[name] = first_failure(error)
                end_ranks()  # a failure may leave collectives half done
    return figures


def measure_live(figures: Figures, name: str, spec: Spec, options: argparse.Namespace) -> None:
    ranks = on_ranks(live_bytes, options.ranks, name, spec)
    figures.between[name], figures.live[name] = map(max, zip(*ranks, strict=True))


def measure_resident(figures: Figures, name: str, spec: Spec, options: argparse.Namespace) -> None:
    for growths, gaps in ((figures.resident, True), (figures.no_gaps, False)):
        probe = partial(peak_growth, gaps=gaps)
        growths[name] = max(on_fresh_ranks(probe, options.ranks, name, spec, options.rounds))


def show(
    figures: Figures, minima: Mapping[bool, Terms], spec: Spec, options: argparse.Namespace
) -> None:
    size = f"{spec.layers} layers, width {spec.width}, {spec.batch} x {spec.context} tokens"
    title = f"MB a rank, {options.ranks} ranks, {size}, {spec.dtype_policy}"
    columns = ["minimum", "params", "state", "2 groups", "gradients of 1", "activations"]
    columns += ["all gradients", "in all"]
    least = [
        [label, *map(megabytes, astuple(minima[sharded])), megabytes(minima[sharded].total())]
        for label, sharded in (("sharded", True), ("whole", False))
    ]
    print_table(title, columns, least)
    names = [name for name in options.only if name not in figures.failures]
    base = "ours" if "ours" in names else next(iter(names), "")
    ratio = f"{base}/other"
    columns = ["", "between steps", "live peak", "/minimum", ratio, "resident", ratio]
    columns += ["no gaps", ratio]
    rows = [row(figures, name, base, minima[name in SHARDED].total()) for name in names]
    print_table(title, columns, rows)
    for name, failure in figures.failures.items():
        print(f"{LABELS[name]} failed. {failure}", file=sys.stderr)


def row(figures: Figures, name: str, base: str, minimum: int) -> list[str]:
    cells = [LABELS[name], megabytes(figures.between[name]), megabytes(figures.live[name])]
    cells += [f"{figures.live[name] / minimum:.3f}", ratio_cell(figures.live, name, base)]
    for growths in (figures.resident, figures.no_gaps):
        cells += [megabytes(growths[name]), ratio_cell(growths, name, base)]
    return cells


def ratio_cell(sizes: Mapping[str, int], name: str, base: str) -> str:
    if not sizes[name]:  # a tiny model may fit into gaps that the heap had before
        return "-"
    return f"{sizes[base] / sizes[name]:.3f}"


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / MEGABYTE:.1f}"


if __name__ == "__main__":
    sys.exit(main())
