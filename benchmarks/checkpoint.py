"""Saving, loading and resharding with torch.distributed.checkpoint: this library and torch's FSDP2.

Run `python benchmarks/checkpoint.py`. It saves the standard GPT and the state of its AdamW.
"Sharded" writes one file for each rank. For "full", rank 0 gathers everything and writes one file;
it reads the file and distributes the content. The floor of both is torch.save and torch.load of the
plain module in one process. Wall time is that of the slowest rank. Processor time is the sum over
all ranks; other load on the machine disturbs it less. Ratios are ours to FSDP2, round by round.
Memory is the growth of peak resident memory during the call, on the rank on which it grows most.

Before a load, the benchmark overwrites all values. A first round, which does not count, compares
the loaded bytes with the saved ones.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from checkpoint_acts import Cost, build, digest, payload, perform
from contestants import Spec
from report import print_table, write_json
from rounds import orders, quartiles, ratios
from starting import end_ranks, on_ranks

SHARDED = ["ours", "fsdp2"]
CONTESTANTS = [*SHARDED, "single"]
LABELS = {"ours": "composable_shard", "fsdp2": "torch FSDP2", "single": "plain module"}
MEGABYTE = 1e6


class Step(NamedTuple):
    """One thing to do on some ranks, with the checkpoint of a name.

    Attributes:
        label: What the table calls it.
        act: One of `checkpoint_acts.ACTS`.
        num_ranks: How many ranks do it.
        checkpoint: The folder that it writes or reads.
    """

    label: str
    act: str
    num_ranks: int
    checkpoint: str


@dataclass
class Figures:
    """What was measured.

    Attributes:
        costs: By step and contestant, one for each round.
        on_disk: By checkpoint and contestant, the bytes of all its files.
        payload: The bytes of parameters and optimizer states.
    """

    costs: dict[str, dict[str, list[Cost]]] = field(default_factory=dict)
    on_disk: dict[str, dict[str, int]] = field(default_factory=dict)
    payload: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    spec = Spec(layers=options.layers, width=options.width)
    end_ranks()
    try:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoints-") as folder:
            figures = measure(
                spec, options.ranks, options.other_ranks, options.rounds, Path(folder)
            )
    finally:
        end_ranks()
    show(figures, spec, options.ranks, options.other_ranks)
    if options.json:
        ranks = {"ranks": options.ranks, "other_ranks": options.other_ranks}
        write_json(options.json, {"spec": asdict(spec), **ranks, **asdict(figures)})
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--other-ranks", type=int, default=1, help="to reshard to, and from")
    parser.add_argument("--folder", help="where to put the checkpoints while they are needed")
    parser.add_argument("--json", metavar="FILE", help="write all samples to this file")
    return parser.parse_args(arguments)


def steps_of(name: str, ranks: int, other: int) -> list[Step]:
    """Return the steps of one round with a contestant, in a possible order."""
    if name == "single":
        return [
            Step("save full", "save_plain", 1, "full"),
            Step("load full", "load_plain", 1, "full"),
        ]
    return [
        Step(f"save sharded, {ranks}", "save_sharded", ranks, "sharded"),
        Step(f"load sharded, {ranks}", "load_sharded", ranks, "sharded"),
        Step(f"load sharded, {ranks} to {other}", "load_sharded", other, "sharded"),
        Step(f"save sharded, {other}", "save_sharded", other, "other"),
        Step(f"load sharded, {other} to {ranks}", "load_sharded", ranks, "other"),
        Step("save full", "save_full", ranks, "full"),
        Step("load full", "load_full", ranks, "full"),
    ]


def measure(spec: Spec, ranks: int, other: int, num_rounds: int, folder: Path) -> Figures:
    """Let the contestants take turns, round by round; check the first one, and do not count it."""
    figures = Figures()
    for name in CONTESTANTS:
        for num_ranks in sorted({step.num_ranks for step in steps_of(name, ranks, other)}):
            on_ranks(build, num_ranks, name, spec)
    figures.payload = on_ranks(payload, 1, "single")[0]
    for index, order in enumerate(orders(CONTESTANTS, num_rounds + 1)):
        for name in order:
            place = folder / name
            place.mkdir()
            saved: dict[str, str] = {}
            for step in steps_of(name, ranks, other):
                if index == 0:
                    take_checked(step, name, place, saved)
                else:
                    cost = take(step, name, place)
                    figures.costs.setdefault(step.label, {}).setdefault(name, []).append(cost)
            figures.on_disk = sizes(figures.on_disk, name, place)
            shutil.rmtree(place)
    return figures


def take(step: Step, name: str, place: Path) -> Cost:
    """Do one step; return its cost to the rank that it cost most, processor time to all."""
    costs = on_ranks(perform, step.num_ranks, name, step.act, place / step.checkpoint)
    return Cost(
        seconds=max(one.seconds for one in costs),
        processor=sum(one.processor for one in costs),
        growth=max(one.growth for one in costs),
    )


def take_checked(step: Step, name: str, place: Path, saved: dict[str, str]) -> None:
    """Do one step and check that it has loaded the saved bytes.

    Args:
        saved: The digest of each checkpoint; this adds to it.

    Raises:
        RuntimeError: A byte is another one.
    """
    if step.act.startswith("save"):
        saved[step.checkpoint] = on_ranks(digest, step.num_ranks, name)[0]
        take(step, name, place)
        return
    take(step, name, place)
    found = on_ranks(digest, step.num_ranks, name)
    if found != [saved[step.checkpoint]] * step.num_ranks:
        raise RuntimeError(f"{LABELS[name]}: {step.label} gave other bytes than were saved")


def sizes(known: dict[str, dict[str, int]], name: str, place: Path) -> dict[str, dict[str, int]]:
    """Add the bytes of the checkpoints of a contestant to those that are known."""
    for checkpoint in sorted(path for path in place.iterdir() if path.is_dir()):
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        known.setdefault(checkpoint.name, {})[name] = sum(file.stat().st_size for file in files)
    return known


def show(figures: Figures, spec: Spec, ranks: int, other: int) -> None:
    columns = ["", "ours s", "FSDP2 s", "plain s", "ratio", "processor (quartiles)"]
    columns += ["ours MB", "FSDP2 MB", "plain MB"]
    title = (
        f"{spec.layers} layers, width {spec.width}, {figures.payload / MEGABYTE:.0f} MB with "
        f"optimizer state, {ranks} ranks and {other}"
    )
    labels = [step.label for step in steps_of("ours", ranks, other)]
    print_table(title, columns, [row(label, figures.costs[label]) for label in labels])
    for checkpoint, on_disk in figures.on_disk.items():
        counts = ", ".join(f"{LABELS[name]} {nbytes}" for name, nbytes in on_disk.items())
        print(f"bytes on disk, {checkpoint}: {counts}; tensors {figures.payload}")


def row(label: str, costs: dict[str, list[Cost]]) -> list[str]:
    seconds = {name: [cost.seconds for cost in sample] for name, sample in costs.items()}
    growth = {name: [float(cost.growth) for cost in sample] for name, sample in costs.items()}
    processor = ratios(*([cost.processor for cost in costs[name]] for name in SHARDED))
    return [
        label,
        *(f"{median(seconds[name]):.3f}" if name in seconds else "" for name in CONTESTANTS),
        f"{ratios(*(seconds[name] for name in SHARDED)).median:.3f}",
        f"{processor.median:.3f} ({processor.lower:.3f} - {processor.upper:.3f})",
        *(
            f"{median(growth[name]) / MEGABYTE:.0f}" if name in growth else ""
            for name in CONTESTANTS
        ),
    ]


def median(sample: Sequence[float]) -> float:
    return quartiles(sample).median


if __name__ == "__main__":
    sys.exit(main())
