"""Install the drop-in once torch's ``fully_shard`` is loaded; Python imports this at startup.

For processes that a script starts: launchers, workers of ``multiprocessing``, ranks. They import
this copy of the package, even if their path has another.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PACKAGE = "composable_shard"
_WANTED = "torch.distributed.fsdp"
_HERE = os.path.realpath(os.path.dirname(__file__))
_ROOT = os.path.realpath(os.path.join(_HERE, *[".."] * 4))


def _install_behind(loader: Loader) -> None:
    """Let a loader install the drop-in once it has loaded a module."""
    load = loader.exec_module

    def load_and_install(module: ModuleType) -> None:
        load(module)
        from composable_shard.compat.torch_dropin import install

        install()

    loader.exec_module = load_and_install  # type: ignore[method-assign]


class _Finder(MetaPathFinder):
    """Finds this package, and the module that has torch's ``fully_shard``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _PACKAGE:
            return PathFinder.find_spec(fullname, [_ROOT])
        if fullname != _WANTED:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            _install_behind(spec.loader)
        return spec


def _run_the_hidden_one() -> None:
    """Run the ``sitecustomize`` that Python would import if this folder were not there."""
    folders = [folder for folder in sys.path if os.path.realpath(folder) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":  # not when imported as a part of the package
    sys.meta_path.insert(0, _Finder())
    _run_the_hidden_one()
