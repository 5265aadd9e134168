"""``torchrun -m composable_shard.run script.py``: run a script with the drop-in installed.

Torch's ``fully_shard`` is ours in it, without a change to the script: ``docs/drop_in.md``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

USAGE = "usage: python -m composable_shard.run [-m] SCRIPT_OR_MODULE [ARGUMENT ...]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script, or after ``-m`` the module, that ``arguments`` begin with.

    Args:
        arguments: A script or module and what it shall find in ``sys.argv``; those of this process
            if absent.

    Raises:
        SystemExit: With code 2 if there is no script.
        Exception: What the script raises.

    Example:
        >>> main(["-m", "this_is_no_module"])
        Traceback (most recent call last):
        ImportError: No module named this_is_no_module
    """
    from composable_shard.compat.torch_dropin import run_script

    words = list(sys.argv[1:] if arguments is None else arguments)
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        raise SystemExit(0)
    if not words or words[0].startswith("-"):
        print(f"{USAGE}\nExpected a script or a module, got {words[:1]}", file=sys.stderr)
        raise SystemExit(2)
    if not is_module and not os.path.exists(words[0]):
        print(f"{USAGE}\nExpected a script, got '{words[0]}', which is not there", file=sys.stderr)
        raise SystemExit(2)
    run_script(words[0], words[1:], is_module=is_module)


if __name__ == "__main__":
    main()
