"""Step time, host time and memory on one GPU: this library, torch's FSDP2, the plain module.

Run `python benchmarks/cuda.py` on a machine with a GPU; elsewhere it says so and measures nothing.
One process is the only rank of NCCL, and rank 0 of 8, 64 and 512 ranks whose collectives take no
time. So a step shows the cost of a library apart from communication: copies, casts, and a device
that waits for the host. The column "beyond" is the step time minus that of the plain module in
bf16.

Host time is the time of a step with so few tokens that the device is always done first. Memory is
measured with one contestant alone: its parameters, activations, gradients, and the buffers of the
library. Simulated ranks gather garbage; no figure depends on the values (`llama.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from typing import Any

import torch
from gpu_probe import Figures, Key, Plan, measure
from llama import LABELS, Size
from report import print_table, write_json
from rounds import quartiles, ratios
from starting import REPOSITORY

MEGABYTE = 1e6
COLUMNS = [
    *("ranks", "step ms", "beyond", "ours/other (quartiles)"),
    *("host ms", "ours/other", "peak MB", "reserved"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device: nothing was measured.")
        return 0
    if REPOSITORY not in sys.path:
        sys.path.append(REPOSITORY)  # processes that are spawned have the same path
    size = Size(**{one.name: getattr(options, one.name) for one in fields(Size)})
    worlds: dict[int, Figures] = {}
    failures: dict[int, str] = {}
    for num_ranks in options.ranks:
        try:
            worlds[num_ranks] = in_fresh_process(plan_for(num_ranks, size, options))
        except Exception as error:  # noqa: BLE001 - the other worlds can be measured all the same
            failures[num_ranks] = f"{type(error).__name__}: {error}"
    rows = [row for num_ranks, figures in worlds.items() for row in rows_of(num_ranks, figures)]
    print_table(title(size, options), COLUMNS, rows)
    for num_ranks, failure in failures.items():
        print(f"{num_ranks} ranks failed. {failure}", file=sys.stderr)
    if options.json:
        write_json(options.json, facts(worlds, failures, size, options))
    return 1 if failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps-per-round", type=int, default=3)
    for one in fields(Size):
        flag = "--" + one.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=one.default)
    parser.add_argument("--host-tokens", type=int, default=16, help="tokens for the host's time")
    parser.add_argument("--only", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument(
        "--checkpointing", choices=["both", "on", "off"], default="both", help="of activations"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu is for tests"
    )
    parser.add_argument("--json", metavar="FILE", help="write all samples to this file")
    return parser.parse_args(arguments)


def plan_for(num_ranks: int, size: Size, options: argparse.Namespace) -> Plan:
    choices = {"both": (False, True), "on": (True,), "off": (False,)}[options.checkpointing]
    return Plan(
        num_ranks=num_ranks,
        keys=tuple(Key(name, choice) for choice in choices for name in options.only),
        size=size,
        device_type=options.device,
        num_rounds=options.rounds,
        steps_per_round=options.steps_per_round,
        host_tokens=options.host_tokens,
    )


def in_fresh_process(plan: Plan) -> Figures:
    """Measure a world where no other one has left memory or a process group."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(measure, plan).result()


def title(size: Size, options: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return (
        f"{device}, {size.layers} layers, width {size.width}, {size.ffn_width} hidden, "
        f"{size.batch} x {size.context} tokens, bf16, reduced in fp32; torch {torch.__version__}"
    )


def rows_of(num_ranks: int, figures: Figures) -> list[list[str]]:
    return [row(num_ranks, figures, key) for key in figures.step]


def row(num_ranks: int, figures: Figures, key: Key) -> list[str]:
    steps = figures.step[key]
    plain, ours = (Key(name, key.checkpointing) for name in ("plain", "ours"))
    cells = [label(num_ranks, key), f"{milliseconds(steps):.2f}"]
    if plain in figures.step:
        cells.append(f"{milliseconds(beyond(steps, figures.step[plain])):+.2f}")
    else:
        cells.append("")
    host = f"{milliseconds(figures.host[key]):.2f}"
    if ours in figures.step:
        ratio = ratios(figures.step[ours], steps)
        cells.append(f"{ratio.median:.3f} ({ratio.lower:.3f} - {ratio.upper:.3f})")
        cells += [host, f"{ratios(figures.host[ours], figures.host[key]).median:.3f}"]
    else:
        cells += ["", host, ""]
    for peaks in (figures.allocated, figures.reserved):
        cells.append(f"{peaks[key] / MEGABYTE:.0f}" if key in peaks else "")
    return cells


def label(num_ranks: int, key: Key) -> str:
    return f"{num_ranks}{' ckpt' if key.checkpointing else ''} {LABELS[key.name]}"


def beyond(steps: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Return by how much each round's step was longer than the plain module's."""
    return [step - floor for step, floor in zip(steps, plain, strict=True)]


def milliseconds(seconds: Sequence[float]) -> float:
    return quartiles(seconds).median * 1e3


def facts(
    worlds: dict[int, Figures],
    failures: dict[int, str],
    size: Size,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return all samples and the settings of the run, as values for JSON."""
    samples = {
        str(num_ranks): {
            one.name: {str(key): value for key, value in getattr(figures, one.name).items()}
            for one in fields(figures)
        }
        for num_ranks, figures in worlds.items()
    }
    return {
        "title": title(size, options),
        "size": asdict(size),
        "worlds": samples,
        "failures": {str(num_ranks): failure for num_ranks, failure in failures.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
