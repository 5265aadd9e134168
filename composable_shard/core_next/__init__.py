"""Sharded parameters: when they are gathered, freed and reduced. Imports nothing above it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_REPLACED = {
    "api": "api",
    "module": "module",
    "core.bucket": "placement",
    "core.copying": "copying",
    "core.finalization": "finalization",
    "core.gradient": "reduction",
    "core.gradient_extension": "features.grad_extension",
    "core.group": "group",
    "core.hooks": "hooks",
    "core.layout": "layout",
    "core.optimizers": "optimizers",
    "core.param": "storage",
    "core.root": "tree",
    "core.shard": "shard",
    "core.state_dict": "state_dict",
    "core.substituted": "substituted",
    "core.ties": "ties",
    "core.torch_state": "torch_state",
    "core.tree": "tree",
    "train.moving.relocation": "train.relocation",
    "train.sitting_out": "train.sitting_out",
    "insight.group_plan": "insight.group_plan",
    "insight.group_traffic": "insight.group_traffic",
}
"""Modules of the package, and what this core has in their places."""


class _Replacing(MetaPathFinder, Loader):
    """Imports this core where the rest of the package imports today's."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        replaced = _REPLACED.get(name.removeprefix("composable_shard."))
        return None if replaced is None else ModuleSpec(name, self, origin=replaced)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(f"{__name__}.{spec.origin}")

    def exec_module(self, module: ModuleType) -> None:
        """Let the classes of the interface say the module that they are imported from."""
        assert module.__spec__ is not None
        if module.__spec__.origin == "module":
            for found in vars(module).values():
                if isinstance(found, type) and found.__module__ == module.__name__:
                    found.__module__ = module.__spec__.name


def replace_core() -> None:
    """Let the package import this core in place of today's, from now on."""
    sys.meta_path.insert(0, _Replacing())
