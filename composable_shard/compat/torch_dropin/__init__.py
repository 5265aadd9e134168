"""Replace torch's ``fully_shard`` by ours in programs that stay unchanged.

``install()`` does it for this process, ``composable-shard run script.py`` and ``torchrun -m
composable_shard.run script.py`` for a script and the processes that it starts. See
``docs/drop_in.md``.

Torch's classes stay, because a program may have imported them before ``install()``. So
``fully_shard`` accepts torch's policies and translates them.

Modules that torch sharded before ``install()`` keep working: calls for them go to torch's
functions. The package imports our functions only when they are called, because ``install()`` may
run while the package itself is being imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import composable_shard
from composable_shard import _torch
from composable_shard.mesh import DataParallelMeshDims, ShardPlacementResult
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["Installation", "install", "is_installed", "run_script", "uninstall"]

_torch_fsdp = importlib.import_module("torch.distributed.fsdp")

# Translating torch's policies to ours -------------------------------------------------------------

_POLICIES = (MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy, DataParallelMeshDims)
"""Our policies, subclasses before their bases; torch's have the same names."""


class _EarlierPolicy(MixedPrecisionPolicy):
    """A policy of torch before 2.15, which rounds each gradient to ``param_dtype``."""

    rounds_gradients = True


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``fully_shard`` with torch's policies replaced by ours."""
    ours = {name: _translated_value(value) for name, value in options.items()}
    place = ours.get("shard_placement_fn")
    if callable(place):
        ours["shard_placement_fn"] = _translated_function(place)
    return ours


def _translated_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _translated_value(member) for name, member in value.items()}
    for ours in _POLICIES:
        torch_class = getattr(_torch_fsdp, ours.__name__, None)  # not in every torch
        if torch_class is not None and isinstance(value, torch_class):
            names = [field.name for field in dataclasses.fields(torch_class)]
            fields = {name: getattr(value, name) for name in names}
            if ours is MixedPrecisionPolicy and not _torch.REDUCES_IN_GRAD_DTYPE:
                fields["reduce_dtype"] = fields["reduce_dtype"] or fields["param_dtype"]
                return _EarlierPolicy(**fields)
            return ours(**fields)
    return value


def _translated_function(place: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a ``shard_placement_fn`` that may return the placement result of torch."""

    @functools.wraps(place)
    def place_ours(param: Any) -> Any:
        result = place(param)
        mesh_of_torch = getattr(result, "mesh_info", None)
        if mesh_of_torch is None:
            return result
        return ShardPlacementResult(result.placement, mesh_of_torch.mesh)

    return place_ours


# The functions in the place of torch's --------------------------------------------------------

_NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
_Functions = dict[str, Callable[..., Any]]
OF_TORCH: _Functions = {  # an older torch lacks some of them
    name: getattr(_torch_fsdp, name) for name in _NAMES if hasattr(_torch_fsdp, name)
}


# It has torch's docstring and, by `__wrapped__`, torch's signature, but its own name, for pickles.
@functools.wraps(OF_TORCH["fully_shard"], assigned=("__doc__",), updated=())
def fully_shard(module: Any, **options: Any) -> Any:
    """Shard a module with our ``fully_shard``."""
    return composable_shard.fully_shard(module, **translated(options))


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Register a method to be called like forward, with our function or torch's."""
    if _is_of_torch(module):
        OF_TORCH["register_fsdp_forward_method"](module, method_name)
    else:
        composable_shard.register_fsdp_forward_method(module, method_name)


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Call our ``share_comm_ctx`` for our roots, and torch's for torch's."""
    if any(map(_is_of_torch, modules)):
        OF_TORCH["share_comm_ctx"](modules)
    else:
        composable_shard.share_comm_ctx(modules)


# Torch's pipeline schedules call ``fully_shard.state(module)``, which also finds our state.
fully_shard.state = OF_TORCH["fully_shard"].state  # type: ignore[attr-defined]

OURS: _Functions = {name: globals()[name] for name in _NAMES}


def _is_of_torch(module: Any) -> bool:
    """Return whether torch's ``fully_shard`` was applied to a module."""
    is_ours = isinstance(module, composable_shard.FSDPModule)
    return isinstance(module, _torch_fsdp.FSDPModule) and not is_ours


# Replacing torch's functions in all loaded modules, and restoring them ----------------------------


class Installation:
    """The result of :func:`install`, and a context manager that uninstalls the drop-in at its end.

    If the drop-in was installed before, the context manager leaves it installed.

    Attributes:
        replaced: The replaced functions, as ``"module.name"``, sorted.

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
    """Replace torch's ``fully_shard`` by ours in this process.

    Replaces ``fully_shard``, ``register_fsdp_forward_method`` and ``share_comm_ctx`` where torch
    has them, and in every loaded module that has imported them by name. Other references are not
    replaced (in a closure, a default argument, an attribute of an object, a ``functools.partial``).
    Call ``install()`` before importing modules with such references.

    Torch's classes stay: our ``fully_shard`` takes torch's policies, and our modules are instances
    of torch's ``FSDPModule``. Modules that are already sharded stay as they are. After loading more
    modules, call ``install()`` again.

    Returns:
        An `Installation`, which lists the replaced functions.

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
    """Restore torch's ``fully_shard`` in all loaded modules.

    Modules that our function sharded stay sharded. Does nothing if the drop-in is not installed.

    Example:
        >>> from composable_shard.compat.torch_dropin import install, is_installed, uninstall
        >>> installation = install()
        >>> uninstall()
        >>> is_installed()
        False
    """
    _replace(OURS, OF_TORCH)


def is_installed() -> bool:
    """Return whether ``torch.distributed.fsdp.fully_shard`` is ours.

    Example:
        >>> from composable_shard.compat.torch_dropin import install, is_installed
        >>> with install():
        ...     is_installed()
        True
    """
    return vars(_torch_fsdp)["fully_shard"] is OURS["fully_shard"]


def _replace(before: _Functions, after: _Functions) -> list[str]:
    """Replace functions in the globals of all modules but those of this package."""
    for name in _torch.FULLY_SHARD_MODULES:
        with contextlib.suppress(ModuleNotFoundError):  # not in this torch
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

    The program sees ``sys.argv``, ``sys.path[0]`` and ``__main__`` as if Python had started it.
    Python processes that it starts install the drop-in, too, by a start file on ``PYTHONPATH``,
    unless they run with ``-I``, ``-E`` or ``-S``.

    Args:
        target: Path of a script, of a folder or of a zip file with a ``__main__.py``, or the name
            of a module.
        arguments: The arguments that follow it on the command line.
        is_module: Whether ``target`` is a module, as after ``python -m``.

    Raises:
        Exception: Any exception of the program, ``SystemExit`` included, or runpy's if there is no
            such program.

    Collective: those of the program.

    Example:
        >>> import os, tempfile
        >>> from composable_shard.compat.torch_dropin import run_script
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = os.path.join(folder, "script.py")
        ...     with open(script, "w") as file:
        ...         _ = file.write("import sys; print(__name__, sys.argv[1:])")
        ...     run_script(script, ["--steps", "3"])
        __main__ ['--steps', '3']
    """
    before = sys.argv, sys.path[0], os.environ.get("PYTHONPATH")
    folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    sys.argv, sys.path[0] = ["-m" if is_module else target, *arguments], folder
    # Every Python that starts with this environment installs the drop-in by itself.
    folders = [_AT_START, *filter(None, (before[2] or "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
    try:
        with install():
            if is_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(target, run_name="__main__")
    finally:
        sys.argv, sys.path[0], path = before
        os.environ.pop("PYTHONPATH", None)
        if path is not None:
            os.environ["PYTHONPATH"] = path
