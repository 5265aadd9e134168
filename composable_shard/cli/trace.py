"""Merge the recordings that composable_shard.trace() made on each rank; show where the time goes.

Examples:
  composable-shard trace runs/trace                      merge all ranks, print where the time goes
  composable-shard trace runs/trace --open               and look at the timeline
  composable-shard trace runs/trace --json               the same as JSON, for a script
  composable-shard trace node0 node1 --output merged     ranks that wrote to local disks

Writes trace.json and timeline.html into the (first) folder, or into --output. trace.json is for
https://ui.perfetto.dev or chrome://tracing, timeline.html for a browser.
Exit codes: 0 merged, 1 no trace to merge, 2 wrong arguments
"""

from __future__ import annotations

import argparse
import json
import sys
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from composable_shard.insight.merging import MERGED, PAGE, MergedTrace, read
from composable_shard.insight.report import Table, as_text


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    of_ranks = "a folder that trace() wrote"
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help=of_ranks)
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="folder for the merged files")
    parser.add_argument("--open", action="store_true", help="open the timeline in a browser")
    parser.add_argument("--json", action="store_true", help="print the sums as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Merge, write and print; return 0, or 1 if there is nothing to merge."""
    output = arguments.output or arguments.folders[0]
    try:
        merged = read(*arguments.folders)
        output.mkdir(parents=True, exist_ok=True)
        merged.save(output)
    except (OSError, ValueError) as error:
        print(f"composable-shard trace: {error}", file=sys.stderr)
        return 1
    files = [str(output / name) for name in MERGED]
    if arguments.json:
        print(json.dumps({**merged.summary, "files": files}, indent=2))
    else:
        _print(merged, files)
    if arguments.open:
        webbrowser.open((output / PAGE).resolve().as_uri())
    return 0


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f}" if nbytes else ""


TIMES = ("step", "compute", "launch", "copy", "exposed")
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "rank": ("rank", str),
    **{name: (f"{name}_ms", "{:.1f}".format) for name in TIMES},
    "of step": ("exposed_share", "{:.0%}".format),
    **{name: (f"{name}_ms", "{:.1f}".format) for name in ("late", "other")},
    "MiB": ("peak_nbytes", _mib),
}
RESERVED = {"reserved MiB": ("peak_reserved_nbytes", _mib)}
"""One more column, for ranks on a device with an allocator that reports it."""


def table_of(summary: dict[str, Any]) -> Table:
    """Return the table: milliseconds of a mean step, and the peaks of memory."""
    columns = COLUMNS | RESERVED if summary["peak_reserved_nbytes"] else COLUMNS
    rows = [[write(rank[key]) for key, write in columns.values()] for rank in summary["ranks"]]
    num_steps = summary["num_steps"]
    mean = f" of a step, mean of {num_steps}" if num_steps else ""
    return Table(f"{len(rows)} ranks, milliseconds{mean}", list(columns), rows, num_words=0)


def _print(merged: MergedTrace, files: Sequence[str]) -> None:
    summary = merged.summary
    print(as_text([table_of(summary)]))
    print(
        f"exposed communication: {summary['exposed_share']:.0%} of the step; "
        f"hidden: {summary['hidden_share']:.0%} of the communication"
    )
    if summary["missing_ranks"]:
        print(f"missing: rank {', '.join(map(str, summary['missing_ranks']))} wrote no trace")
    if summary["num_clocks"] > 1:
        error = summary["clock_error_ms"]
        how = "by their wall clocks" if error is None else f"to within {error:.3f} ms"
        print(f"the clocks of {summary['num_clocks']} hosts are aligned {how}")
    print("\n".join(files))
