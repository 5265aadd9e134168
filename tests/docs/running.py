"""Running the blocks of a page, in order and in one namespace, on this rank."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from docs.pages import Block, Page


def run_page(path: Path, folder: Path) -> int:
    """Run a page on a rank; it may write into ``folder``. Return how many blocks it has."""
    page = Page(path)
    names: dict[str, object] = {"__name__": f"docs_{path.stem}", "folder": folder}
    environment = dict(os.environ)
    try:
        # A process group of the ranks of the tests is ended by them.
        stays = mock.patch.object(dist, "destroy_process_group")
        with stays if dist.is_initialized() else contextlib.nullcontext():
            for block in page.programs:
                run_block(page, block, names)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    if dist.is_initialized():
        dist.barrier()
    return len(page.programs)


def run_block(page: Page, block: Block, names: dict[str, object]) -> None:
    """Run a block; compare what it raises or prints with what the page says."""
    code = compile("\n" * (block.line - 1) + block.source, str(page.path), "exec")
    printed = io.StringIO()
    raised = ""
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, names)
    except Exception as error:
        if block.way != "raises":
            raise
        raised = "".join(traceback.format_exception_only(error))
    if block.way == "raises":
        assert same(raised, block.expected), f"{page}:{block.line} raised\n{raised or 'nothing'}"
    if block.way == "prints" and (not dist.is_initialized() or dist.get_rank() == 0):
        got = printed.getvalue()
        assert same(got, block.expected), f"{page}:{block.line} printed\n{got}"


def same(got: str, expected: str) -> bool:
    """Compare texts but for how their lines are broken; ``...`` stands for any text."""
    words = " ".join(got.replace("composable_shard.errors.", "").split())
    parts = " ".join(expected.split()).split("...")
    if len(parts) == 1:
        return words == parts[0]
    start, end = parts[0].rstrip(), parts[-1].lstrip()
    if not (words.startswith(start) and words.endswith(end)):
        return False
    place = len(start)
    for part in parts[1:-1]:
        place = words.find(part.strip(), place)
        if place < 0:
            return False
        place += len(part.strip())
    return place <= len(words) - len(end)


def run_program(page: Page, folder: Path) -> int:
    """Run a page whose functions ranks have to import, as a module in this process."""
    name = f"docs_{page.path.stem}"
    source = "\n".join(block.source for block in page.programs)
    written = folder / "written"
    written.mkdir()
    (folder / f"{name}.py").write_text(importable(source, written))
    sys.path.insert(0, str(folder))
    try:
        importlib.import_module(name).main()
    finally:
        sys.path.remove(str(folder))
        del sys.modules[name]
    return len(page.programs)


def importable(source: str, folder: Path) -> str:
    """Put what is not a definition or an import into ``main``, as ranks import the module."""
    definitions, rest = [], []
    for node in ast.parse(source).body:
        kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        (definitions if isinstance(node, kinds) else rest).append(ast.unparse(node))
    body = "\n".join(rest).replace("\n", "\n    ")
    head = (
        "from __future__ import annotations\n"
        f"from pathlib import Path\nfolder = Path({str(folder)!r})\n"
    )
    return head + "\n".join([*definitions, f"def main():\n    {body}\n"])
