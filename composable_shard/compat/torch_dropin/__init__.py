"""Programs that call torch's ``fully_shard`` get ours, without a change to them.

``install()`` does it for this process, ``composable-shard run script.py`` and ``torchrun -m
composable_shard.run script.py`` for a script and all that it starts. See ``docs/drop_in.md``.

The drop-in leaves the classes of torch alone: a program may have made a policy, or imported the
class, before. So the arguments of ``fully_shard`` are translated.

Modules that torch's ``fully_shard`` was applied to before keep working: calls for them go to
torch's functions. Ours are imported when they are called, since the drop-in may be installed in the
middle of importing this package, which itself imports from torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from composable_shard import _torch
from composable_shard.mesh import DataParallelMeshDims, ShardPlacementResult
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = ["Installation", "install", "is_installed", "run_script", "uninstall"]

_torch_fsdp = importlib.import_module("torch.distributed.fsdp")

# Policies of torch, said in ours ------------------------------------------------------------------

_POLICIES = (MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy, DataParallelMeshDims)
"""Ours, a class before its base classes; torch has classes of the same names."""


class _EarlierPolicy(MixedPrecisionPolicy):
    """One of a torch below 2.15, where ``param_dtype`` decides the dtype of gradients, too."""

    rounds_gradients = True


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call of ``fully_shard`` with ours in the place of torch's."""
    ours = {name: _translated_value(value) for name, value in options.items()}
    place = ours.get("shard_placement_fn")
    if callable(place):
        ours["shard_placement_fn"] = _translated_function(place)
    return ours


def _translated_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _translated_value(member) for name, member in value.items()}
    for ours in _POLICIES:
        theirs = getattr(_torch_fsdp, ours.__name__, None)  # torch has not had all of them always
        if theirs is not None and isinstance(value, theirs):
            fields = {
                field.name: getattr(value, field.name) for field in dataclasses.fields(theirs)
            }
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
OF_TORCH: dict[str, Callable[..., Any]] = {
    name: getattr(_torch_fsdp, name) for name in _NAMES if hasattr(_torch_fsdp, name)
}  # torch has not had all of them always


# Signature and docstring are torch's, the name is that of the function here: it can be pickled.
@functools.wraps(OF_TORCH["fully_shard"], assigned=("__doc__",), updated=())
def fully_shard(module: Any, **options: Any) -> Any:
    """Shard a module by ours."""
    from composable_shard import api

    return api.fully_shard(module, **translated(options))


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Let another method of a module be called like its forward, by ours or by torch's function."""
    from composable_shard import api

    if _is_of_torch(module):
        OF_TORCH["register_fsdp_forward_method"](module, method_name)
    else:
        api.register_fsdp_forward_method(module, method_name)


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Let roots bound their memory for reductions together, or share streams if torch's."""
    from composable_shard import api

    if any(map(_is_of_torch, modules)):
        OF_TORCH["share_comm_ctx"](modules)
    else:
        api.share_comm_ctx(modules)


# Pipeline schedules ask the function for the state of a module.
fully_shard.state = OF_TORCH["fully_shard"].state  # type: ignore[attr-defined]

OURS: dict[str, Callable[..., Any]] = {name: globals()[name] for name in _NAMES}


def _is_of_torch(module: Any) -> bool:
    """Tell whether torch's ``fully_shard`` was applied to a module."""
    from composable_shard.module import FSDPModule

    return isinstance(module, _torch_fsdp.FSDPModule) and not isinstance(module, FSDPModule)


# Putting our functions where torch's are, in all modules that are loaded, and taking them out -----


class Installation:
    """The result of :func:`install`; as a context, it takes our functions out at its end.

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
    has them, and in every loaded module that has imported them by name. Not reached: a
    function that is held elsewhere (in a closure, a default argument, an attribute of an object, a
    ``functools.partial``). Install before such modules are imported.

    Classes stay torch's: its policies are understood, and our modules are instances of its
    ``FSDPModule``. Modules that are sharded already stay as they are. May be called again, to
    reach modules that were loaded since.

    Returns:
        The replaced functions; as a context manager, it uninstalls at its end, unless the drop-in
        was installed before.

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

    Modules that ours sharded stay sharded. Does nothing if the drop-in is not installed.

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
    return vars(_torch_fsdp)["fully_shard"] is OURS["fully_shard"]


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
        arguments: The arguments that follow it on the command line.
        is_module: Whether ``target`` is a module, as after ``python -m``.

    Raises:
        Exception: That of the program, ``SystemExit`` too, or that of runpy if there is no such
            program.

    Collective: none of its own.

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
    with install(), _children_install(), _command_line(target, arguments, is_module):
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")


@contextlib.contextmanager
def _command_line(target: str, arguments: Sequence[str], is_module: bool) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path[0]`` as Python does when it starts a program."""
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
