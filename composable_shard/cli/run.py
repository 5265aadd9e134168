"""``composable-shard run``: a script with our ``fully_shard`` in the place of torch's."""

from __future__ import annotations

import argparse

from composable_shard import run as program

_EXAMPLES = """examples:
  composable-shard run train.py --lr 1e-3
  composable-shard run -m my_package.train --lr 1e-3
  composable-shard run -m torch.distributed.run --nproc-per-node 2 train.py
  torchrun --nproc-per-node 2 -m composable_shard.run train.py

The script finds sys.argv and __main__ as if Python had started it, and processes that it starts
have our fully_shard too. It exits as the script does.
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = "Run a script, unchanged, with torch's fully_shard replaced by ours."
    parser.epilog = _EXAMPLES
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="path of a script, or a module after -m")
    rest = parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="for the script"
    )
    rest.required = False  # as argparse says where SCRIPT is missing
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the script; what it raises is raised, ``SystemExit`` too."""
    option = ["-m"] if arguments.is_module else []
    program.main([*option, arguments.script, *arguments.arguments])
    return 0
