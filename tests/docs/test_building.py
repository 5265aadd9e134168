"""What building the site needs is named, pinned and there; it is built by ``make docs`` alone."""

from __future__ import annotations

import re
import tomllib

from docs.pages import DOCS, ROOT


def pinned(path: str) -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / path).read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in lines}


def test_the_extra_is_pinned_and_no_version_contradicts_another() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [re.split(r"[\[<>=]", wish)[0] for wish in project["optional-dependencies"]["docs"]]
    assert extra == ["mkdocs", "mkdocs-material", "mkdocstrings"]
    assert set(extra) <= pinned("constraints-docs.txt").keys()
    others = pinned("constraints.txt")
    for name, version in pinned("constraints-docs.txt").items():
        assert others.get(name, version) == version


def test_warnings_are_errors() -> None:
    (command,) = re.findall(r"^docs:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "mkdocs build --strict" in command
    config = (ROOT / "mkdocs.yml").read_text()
    checks = re.search(r"^validation:\n((?: .*\n)+)", config, re.MULTILINE)
    assert checks is not None
    choices = re.findall(r"^    \w+: (\w+)$", checks[1], re.MULTILINE)
    assert choices == ["warn"] * 7


WORKER = DOCS / "javascripts" / "iframe-worker.js"


def test_the_site_searches_when_opened_from_disk_and_fetches_nothing_for_it() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    plugins = re.findall(r"^  - (\w+)", config[config.index("plugins:") :], re.MULTILINE)
    assert plugins[:2] == ["search", "offline"]
    assert "use_directory_urls: false" in config
    # With a file of this name the plugin does not add one that browsers would fetch.
    assert re.findall(r"^    - (\S*iframe-worker\S*)", config, re.MULTILINE) == [
        str(WORKER.relative_to(DOCS))
    ]
    assert WORKER.exists()


# What of a browser the file uses: a frame runs a script that answers each message with its double.
