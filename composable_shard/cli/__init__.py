"""The command line: ``composable-shard COMMAND``, or ``python -m composable_shard COMMAND``.

Each command is a module with ``set_up(parser)``, which describes its arguments, and
``run(arguments)``, which returns the exit code. Only the module of the command that is asked for is
imported, so that help and usage errors do not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

__all__ = ["main"]

COMMANDS = {
    "doctor": "say what this machine will use, how fast it is, and what is wrong",
    "estimate": "memory, communication and time of a step, without the devices",
    "run": "run a script with our fully_shard in the place of torch's",
    "trace": "merge the timelines of ranks, and say where the time goes",
}

_EXAMPLES = """examples:
  composable-shard doctor                    what this machine will use, and how fast it is
  composable-shard estimate config.json      what a model takes on ranks that need not be there
  composable-shard run train.py --steps 10   train.py with our fully_shard in the place of torch's
  composable-shard trace runs/trace          the timelines of all ranks, as one page

exit codes: 0 all is well, 1 something is wrong, 2 wrong arguments; `run` exits as the script does
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The words after ``composable-shard``; those of this process if absent.

    Returns:
        The exit code: 0 if all is well, 1 if something is wrong.

    Raises:
        SystemExit: With code 2 for wrong arguments, with 0 after ``--help`` and ``--version``, and
            as the script says in ``run``.

    Example:
        >>> main(["--version"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    chosen = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code: int = chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads it, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    return code


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return what the words say; ``run`` in it is the function to call."""
    parser = argparse.ArgumentParser(
        prog="composable-shard",
        description="Fully sharded data parallelism for PyTorch: see it, plan it, drop it in.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True)
    for name, summary in COMMANDS.items():
        command = subparsers.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in words[:1]:
            module = "composable_shard.run" if name == "run" else f"{__name__}.{name}"
            importlib.import_module(module).set_up(command)
    return parser.parse_args(words)


def _version() -> str:
    try:
        return f"composable-shard {version('composable_shard')}"
    except PackageNotFoundError:  # a checkout on the path
        return "composable-shard, not installed"
