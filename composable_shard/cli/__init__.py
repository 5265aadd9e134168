"""Fully sharded data parallelism for PyTorch: see it, plan it, drop it in.

Examples:
  composable-shard doctor                    check this machine, and measure how fast it is
  composable-shard estimate config.json      memory and time of a step, without the ranks
  composable-shard run train.py --steps 10   train.py with torch's fully_shard replaced by ours
  composable-shard trace runs/trace          the timelines of all ranks, as one page

Exit codes: 0 success, 1 a problem or a failure, 2 wrong arguments; `run` exits as the script does
"""

# Each command is a module. Its docstring is the help text, ``set_up(parser)`` adds its arguments,
# and ``run(arguments)`` returns the exit code. Only the requested module is imported, so that help
# and usage errors do not wait for torch.

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

__all__ = ["main"]

COMMANDS = {
    "doctor": "check this machine: devices, collectives, their speed, and problems",
    "estimate": "compute memory, communication and time of a step, without the devices",
    "run": "run a script with torch's fully_shard replaced by ours",
    "trace": "merge the timelines of ranks and show where the time goes",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The words after ``composable-shard``; by default those of this process.

    Returns:
        The exit code: 0 for success, 1 for a problem.

    Raises:
        SystemExit: With code 2 for wrong arguments, with 0 after ``--help`` and ``--version``, and
            with the code of the script in ``run``.

    Example:
        >>> main(["--version"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    chosen = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code: int = chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # the reading process, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    return code


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed words; their attribute ``run`` is the function to call."""
    parser = argparse.ArgumentParser(prog="composable-shard")
    describe(parser, __doc__)
    ours = installed_version("composable_shard") or "from a checkout, not installed"
    parser.add_argument("--version", action="version", version=f"composable-shard {ours}")
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True)
    for name, summary in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary)
        if name in words[:1]:
            module = "composable_shard.run" if name == "run" else f"{__name__}.{name}"
            chosen = importlib.import_module(module)
            describe(command, chosen.__doc__)
            chosen.set_up(command)
    return parser.parse_args(words)


def describe(parser: argparse.ArgumentParser, docstring: str | None) -> None:
    """Make the docstring of a module the help text of its command."""
    parser.description, _, parser.epilog = (docstring or "").partition("\n\n")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def installed_version(package: str) -> str | None:
    """Return the version of a package; ``None`` if it is not installed (as in a checkout)."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def positive(text: str) -> int:
    """Parse a positive number of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"Expected a positive number, got '{text}'")
    return int(text)
