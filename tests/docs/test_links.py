"""Every page is in the navigation, and every link, anchor and picture is there."""

from __future__ import annotations

import re
import tomllib
import xml.etree.ElementTree as ET
from itertools import pairwise

from docs.pages import DOCS, ROOT, Page, all_pages, resolve, site_pages

PAGES = list(all_pages())
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))


def navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = re.search(r"^nav:\n((?:[ #].*\n|\n)+)", text, re.MULTILINE)
    assert nav is not None
    return re.findall(r"^ *- [^#\n]*?:? ?(\S+\.md)$", nav[1], re.MULTILINE)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as mkdocs makes it, and GitHub for what is plain."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link is its text
    text = re.sub(r"[`*]", "", text).strip().lower()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text))


def anchors(page: Page) -> set[str]:
    return {slug(heading) for heading in page.headings} | set(page.objects)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigation()) == [str(page.path.relative_to(DOCS)) for page in site_pages()]


def test_links_point_to_what_is_there() -> None:
    for page in PAGES:
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.path.parent / path).resolve() if path else page.path
            assert target.exists(), f"{page}: {link}"
            if page.path.is_relative_to(DOCS):
                assert target.is_relative_to(DOCS), f"{page}: {link} is not on the site"
            if anchor:
                assert target.suffix == ".md", f"{page}: {link}"
                owner, _, member = anchor.rpartition(".")  # of a method its class is shown
                is_member = owner in Page(target).objects and hasattr(resolve(owner), member)
                assert is_member or anchor in anchors(Page(target)), f"{page}: {link}"


def test_words_that_newcomers_search_for_are_in_headings() -> None:
    words = "meta, autocast, ema, gradient (activation) checkpointing, oom, loss spike, slow, nan, "
    words += "multi-node, elastic, slurm, reproducible, zero-1, zero-2, hsdp, muon, inference, "
    words += "`generate`, qlora, fp8, vllm, profiler"
    headings = " ".join(heading for page in site_pages() for heading in page.headings).lower()
    assert [word for word in words.split(", ") if word not in headings] == []


def test_lists_and_tables_stand_apart() -> None:
    """Without an empty line before it, the site shows a list or a table as text."""
    for page in PAGES:
        lines = page.prose.splitlines()
        for before, line in pairwise(lines):
            for start in ("- ", "1. ", "|"):
                if line.startswith(start) and before.strip():
                    assert before.startswith((start, "  ")), f"{page}: {line}"


def test_there_are_pictures_and_each_is_shown() -> None:
    shown = {
        (page.path.parent / link).resolve()
        for page in PAGES
        for link in page.links
        if link.endswith(".svg")
    }
    assert PICTURES
    assert set(PICTURES) <= shown


def test_a_picture_says_what_it_shows_and_is_readable_in_the_dark() -> None:
    for picture in PICTURES:
        text = picture.read_text()
        root = ET.fromstring(text)
        named = {child.tag.split("}")[-1]: (child.text or "") for child in root}
        assert root.get("role") == "img" and root.get("viewBox"), picture
        assert named["title"].strip() and named["desc"].strip(), picture
        assert "prefers-color-scheme: dark" in named["style"], picture
        assert not re.search(r"https?://(?!www\.w3\.org)", text), picture


# What building the site needs is there ------------------------------------------------------------


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
