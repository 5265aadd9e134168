"""Runs cases until the time is up: ``python -m tests.fuzz --help``."""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import sys
import time
from pathlib import Path

import torch

from composable_shard.testing import stop_ranks

from .compare import rehearse, run
from .generate import FAMILIES, FEATURES, generate
from .oracle import Invalid
from .program import Case, Find, shown
from .shrink import shrunk


def main() -> int:
    parser = argparse.ArgumentParser(description="Look for programs that train otherwise sharded.")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="all")
    parser.add_argument("--without", default="", help=f"of {','.join(sorted(FEATURES))}")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for one program")
    parser.add_argument(
        "--rehearse",
        choices=["no", "first", "only"],
        default="no",
        help="compare which collectives ranks launch, in one process, before a run or instead",
    )
    parser.add_argument("--known", default="", help="words, |: such finds are only counted")
    parser.add_argument("--out", default="", help="a folder for what is found")
    args = parser.parse_args()
    torch.set_num_threads(1)
    features = FAMILIES[args.family] - set(args.without.split(","))
    known = [word for word in args.known.split("|") if word]
    counts: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + 60 * args.minutes
    for seed in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(args.start)):
        case = generate(seed, features)
        find = attempt(case, args.timeout, args.rehearse)
        counts["invalid" if find == "invalid" else "run"] += 1
        if not isinstance(find, Find):
            continue
        counts[find.kind] += 1
        print(f"== seed {seed}: {find.kind}", flush=True)
        if any(word in find.kind + find.text for word in known):
            continue
        if counts[find.kind] <= 3:
            limit = min(args.timeout, 12.0)
            case = shrunk(case, functools.partial(fails_so, find.kind, limit, args.rehearse))
        text = f"{shown(case)}\n{find.text}\n"
        print(text, flush=True)
        if args.out:
            Path(args.out).mkdir(exist_ok=True)
            (Path(args.out) / f"{args.family}-{seed}.txt").write_text(text)
    print(f"{dict(counts)}", flush=True)
    stop_ranks()
    return int(any(kind not in ("run", "invalid") for kind in counts))


def attempt(case: Case, timeout: float, rehearses: str) -> Find | str | None:
    try:
        find = rehearse(case) if rehearses != "no" else None
        return find if find is not None or rehearses == "only" else run(case, timeout)
    except Invalid:
        return "invalid"


def fails_so(kind: str, timeout: float, rehearses: str, case: Case) -> bool:
    try:
        find = attempt(case, timeout, rehearses)
    except (LookupError, StopIteration):  # steps name parts that were left out
        return False
    return isinstance(find, Find) and find.kind == kind


if __name__ == "__main__":
    sys.exit(main())
