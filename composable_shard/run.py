"""Run a script, unchanged, with torch's fully_shard replaced by ours.

Examples:
  composable-shard run train.py --lr 1e-3
  composable-shard run -m my_package.train --lr 1e-3
  composable-shard run -m torch.distributed.run --nproc-per-node 2 train.py
  torchrun --nproc-per-node 2 -m composable_shard.run train.py

The script sees sys.argv and __main__ as if Python had started it. Processes that the
script starts use this library's fully_shard, too. The exit code is that of the script.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial

from composable_shard.cli import describe


def set_up(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="path of a script, or a module after -m")
    rest = parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="for the script"
    )
    rest.required = False  # if SCRIPT is missing, argparse should not name ARGUMENT, too
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the script; its exceptions pass through, also ``SystemExit``."""
    from composable_shard.compat.torch_dropin import run_script

    script = arguments.script
    if not arguments.is_module and not os.path.exists(script):
        parser.error(f"Expected the path of a script, got '{script}', which does not exist")
    run_script(script, arguments.arguments, is_module=arguments.is_module)
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script, or after ``-m`` a module.

    Args:
        arguments: The script or module, then its arguments; by default ``sys.argv[1:]``.

    Raises:
        SystemExit: With code 2 if there is no script.
        Exception: Any exception of the script.

    Example:
        >>> main(["-m", "this_is_no_module"])
        Traceback (most recent call last):
        ImportError: No module named this_is_no_module
    """
    parser = argparse.ArgumentParser(prog="python -m composable_shard.run")
    describe(parser, __doc__)
    set_up(parser)
    run(parser, parser.parse_args(arguments))


if __name__ == "__main__":
    main()
