"""Running a script, or a module, as Python would, with the drop-in installed."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence

from composable_shard.compat.torch_dropin.installation import install

_AT_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "at_start")


def run_script(target: str, arguments: Sequence[str] = (), *, is_module: bool = False) -> None:
    """Run a program in this process with torch's ``fully_shard`` replaced by ours.

    It finds ``sys.argv``, ``sys.path[0]`` and ``__main__`` as if Python had started it. Processes
    that it starts have the drop-in too, by ``PYTHONPATH``; a Python that ignores its environment
    (``-I``, ``-E``) or skips ``site`` (``-S``) has not.

    Args:
        target: Path of a script, of a folder or of a zip file with a ``__main__.py``, or the name
            of a module.
        arguments: What follows it on the command line.
        is_module: Whether ``target`` is a module, as after ``python -m``.

    Raises:
        Exception: What the program raises, ``SystemExit`` too, and what runpy does if there is no
            such program.

    Collective: none of its own.

    Example:
        >>> import os, tempfile
        >>> from composable_shard.compat.torch_dropin.scripts import run_script
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = os.path.join(folder, "script.py")
        ...     with open(script, "w") as file:
        ...         _ = file.write("import sys; print(__name__, sys.argv[1:])")
        ...     run_script(script, ["--steps", "3"])
        __main__ ['--steps', '3']
    """
    with install(), _children_install(), _command_line(target, arguments, is_module):
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")


@contextlib.contextmanager
def _command_line(target: str, arguments: Sequence[str], is_module: bool) -> Iterator[None]:
    """Set what Python sets of ``sys`` when it starts a program."""
    before = sys.argv, sys.path[0]
    folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    sys.argv, sys.path[0] = ["-m" if is_module else target, *arguments], folder
    try:
        yield
    finally:
        sys.argv, sys.path[0] = before


@contextlib.contextmanager
def _children_install() -> Iterator[None]:
    """Let every Python that starts with this environment install the drop-in by itself."""
    before = os.environ.get("PYTHONPATH")
    folders = [_AT_START, *filter(None, (before or "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
