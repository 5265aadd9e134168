"""The reference has every public name, and no other."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType

import composable_shard
from docs.pages import DOCS, Page, resolve

PAGES = [Page(path) for path in sorted((DOCS / "reference").glob("*.md"))]
SHOWN = [name for page in PAGES for name in page.objects]

# Not made for users to import from; the last one is called from a shell.
WITHIN = ("composable_shard._torch", "composable_shard.core", "composable_shard.cli")

# Modules whose functions are called by their full name: those that show how by an example.
BY_FULL_NAME = (
    "composable_shard.insight.trace",
    "composable_shard.testing.strategies",
    "composable_shard.train.checkpoint",
)


def public_packages() -> list[ModuleType]:
    found = pkgutil.walk_packages(composable_shard.__path__, "composable_shard.")
    names = [one.name for one in found if one.ispkg and not one.name.startswith(WITHIN)]
    return [importlib.import_module(name) for name in ("composable_shard", *names)]


def functions_and_classes(package: ModuleType) -> list[str]:
    return [name for name, value in vars(package).items() if callable(value) and name[0] != "_"]


def public_names() -> list[str]:
    names = [
        f"{package.__name__}.{name}"
        for package in public_packages()
        for name in getattr(package, "__all__", functions_and_classes(package))
    ]
    for path in BY_FULL_NAME:
        module = importlib.import_module(path)
        names += [
            f"{path}.{name}"
            for name, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == path
            and ">>>" in str(value.__doc__)
        ]
    return names


def test_every_public_name_is_in_the_reference() -> None:
    assert len(public_names()) > 70
    shown = {id(resolve(name)) for name in SHOWN}
    assert [name for name in public_names() if id(resolve(name)) not in shown] == []


def test_the_reference_shows_nothing_twice() -> None:
    assert len(set(SHOWN)) == len(SHOWN)


def test_a_name_in_the_reference_exists_and_says_what_it_is() -> None:
    for name in SHOWN:
        value = resolve(name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert (value.__doc__ or "").strip(), name


def test_the_index_of_the_reference_is_complete() -> None:
    for page in PAGES:
        lines = [line for line in page.prose.splitlines() if line.strip()]
        assert lines[0].startswith("# ") and not lines[1].startswith(("#", ":::")), str(page)
