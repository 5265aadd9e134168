"""``composable-shard estimate``: what a training step will need, from a file that describes it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composable_shard.cli.estimate_config import ConfigError, read_config
from composable_shard.insight.estimate import estimate

OK, FAILED, WRONG_ARGUMENTS = 0, 1, 2

_EXAMPLES = """
examples:
  composable-shard estimate train.toml
  composable-shard estimate train.toml --ranks 512 --json
  composable-shard estimate train.toml --ranks 16x8 --flops 4e14 --bandwidth 5e10
  composable-shard estimate ./llama/config.json --ranks 64 --batch 4 --context 2048 \\
      --param-dtype bfloat16 --reduce-dtype float32

train.toml, of which only `model` and `batch` are needed (JSON with the same keys will do):
  model = "my_package.models:build"          # a function or class; see also `arguments`
  arguments = { layers = 32 }                # what it is called with
  ranks = [16, 8]                            # replicas and shards, or one number
  device = "cuda"                            # or "cpu"
  optimizer = "torch.optim:AdamW"
  loss = "my_package.train:loss"             # of the output and the batch
  flops = 4e14                               # in a second; with bandwidth, time is estimated
  bandwidth = 5e10                           # bytes in a second
  [batch]                                    # keyword arguments of forward
  tokens = { shape = [4, 2048], dtype = "int64" }
  [fully_shard]
  policy = ["my_package.models:Block"]       # classes, or a number of elements
  reshard_after_forward = true               # or a number of ranks
  param_dtype = "bfloat16"
  reduce_dtype = "float32"

A config.json of Hugging Face is built by transformers, which must be installed.

exit codes: 0 done, 1 the model cannot be built or run, 2 wrong arguments or config
"""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to those of ``composable-shard``."""
    parser = subparsers.add_parser(
        "estimate",
        help="memory, communication and time of a step, without the devices",
        description="Tell what a training step will need on each rank, without any of them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config",
        type=Path,
        help="a .toml or .json file, or a folder with a config.json of Hugging Face",
    )
    parser.add_argument("--ranks", type=_ranks, help="how many, or REPLICASxSHARDS")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank (Hugging Face)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each (Hugging Face)")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--param-dtype", metavar="DTYPE", help="dtype of compute")
    parser.add_argument("--reduce-dtype", metavar="DTYPE", help="dtype of reductions")
    parser.add_argument("--flops", type=float, help="floating-point operations in a second")
    parser.add_argument("--bandwidth", type=float, help="bytes that a rank sends in a second")
    parser.add_argument("--replica-bandwidth", type=float, help="the same between replicas")
    parser.add_argument("--latency", type=float, help="seconds of a launch besides")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Estimate what the arguments ask for; return the exit code."""
    try:
        call = read_config(args.config, _overrides(args))
    except ConfigError as error:
        return _fail(error, WRONG_ARGUMENTS)
    except ImportError as error:
        return _fail(error, FAILED)
    try:
        result = estimate(**call)
    except (TypeError, ValueError, RuntimeError) as error:
        return _fail(error, FAILED)
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        _show(result)
    return OK


def _fail(error: Exception, code: int) -> int:
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    print(f"composable-shard estimate: {error}{notes}", file=sys.stderr)
    return code


def _show(result: Any) -> None:
    """Print by rich where it is there and somebody looks, else as plain text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console().print(result)
            return
    print(result)


def _overrides(args: argparse.Namespace) -> Mapping[str, Any]:
    names = (
        *("ranks", "device", "flops", "bandwidth", "replica_bandwidth", "latency"),
        *("param_dtype", "reduce_dtype", "batch", "context"),
    )
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _ranks(text: str) -> int | tuple[int, ...]:
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"Expected a number of ranks or REPLICASxSHARDS, got {text!r}"
        )
    lengths = tuple(map(int, parts))
    return lengths if len(lengths) > 1 else lengths[0]
