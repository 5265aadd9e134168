"""Putting our functions where torch's are, and running scripts with them."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from composable_shard import _torch
from composable_shard.compat.torch_dropin.functions import OF_TORCH, OURS

# Putting our functions where torch's are, in all modules that are loaded, and taking them out -----


class Installation:
    """What :func:`install` returns: leaving it as a context takes our functions out again.

    Attributes:
        replaced: Where a function was replaced, as ``"module.name"``, sorted.

    Example:
        >>> from composable_shard.compat.torch_dropin import install
        >>> with install() as installation:
        ...     "torch.distributed.fsdp.fully_shard" in installation.replaced
        True
    """

    def __init__(self, replaced: list[str], *, is_first: bool) -> None:
        self.replaced = replaced
        self._is_first = is_first

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_first:
            uninstall()


def install() -> Installation:
    """Make torch's ``fully_shard`` ours, for this process.

    Replaces ``fully_shard``, ``register_fsdp_forward_method`` and ``share_comm_ctx`` where torch
    has them, and in every loaded module that has imported them by name. Not reached: what holds
    such a function elsewhere (a closure, a default argument, an attribute of an object, a
    ``functools.partial``). Install before such modules are imported, which every later import is.

    Classes stay torch's: its policies are understood, and our modules are instances of its
    ``FSDPModule``. Modules that are sharded already stay what they are. May be called again, to
    reach what has been loaded from elsewhere since.

    Returns:
        What was replaced; as a context manager, it uninstalls at its end, unless the drop-in was
        installed before.

    Collective: none.

    Example:
        >>> import torch
        >>> from composable_shard import FSDPModule
        >>> from composable_shard.compat.torch_dropin import install
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2), install():
        ...     model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(4, 4))
        >>> isinstance(model, FSDPModule), isinstance(model, torch.distributed.fsdp.FSDPModule)
        (True, True)
    """
    is_first = not is_installed()
    return Installation(_replace(OF_TORCH, OURS), is_first=is_first)


def uninstall() -> None:
    """Make torch's ``fully_shard`` its own again, in all loaded modules.

    What was sharded stays sharded by ours. Does nothing if the drop-in is not installed.

    Example:
        >>> from composable_shard.compat.torch_dropin import install, is_installed, uninstall
        >>> installation = install()
        >>> uninstall()
        >>> is_installed()
        False
    """
    _replace(OURS, OF_TORCH)


def is_installed() -> bool:
    """Tell whether ``torch.distributed.fsdp.fully_shard`` is ours.

    Example:
        >>> from composable_shard.compat.torch_dropin import install, is_installed
        >>> with install():
        ...     is_installed()
        True
    """
    torch_fsdp = importlib.import_module("torch.distributed.fsdp")
    return vars(torch_fsdp)["fully_shard"] is OURS["fully_shard"]


def _replace(
    before: Mapping[str, Callable[..., Any]], after: Mapping[str, Callable[..., Any]]
) -> list[str]:
    """Replace functions in the globals of all modules but those of this package."""
    for name in _torch.FULLY_SHARD_MODULES:
        with contextlib.suppress(ModuleNotFoundError):  # of another version of torch
            importlib.import_module(name)
    new = {id(before[name]): after[name] for name in OF_TORCH}
    replaced = []
    for path, module in tuple(sys.modules.items()):
        if not isinstance(module, ModuleType) or path.split(".")[0] == "composable_shard":
            continue
        members = vars(module)  # not getattr, which would load the members of lazy modules
        for name, value in tuple(members.items()):
            if id(value) in new:
                members[name] = new[id(value)]
                replaced.append(f"{path}.{name}")
    return sorted(replaced)


# Running a script, or a module, as Python would, with the drop-in installed -----------------------

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
        >>> from composable_shard.compat.torch_dropin.installation import run_script
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
