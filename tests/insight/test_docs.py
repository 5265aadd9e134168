"""``docs/understanding.md`` is a program, and prints what stands there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "understanding.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_page_runs() -> None:
    text = PAGE.read_text()
    scope: dict[str, object] = {}
    printed = ""
    kinds = []
    for block in BLOCK.finditer(text):
        kind, body = block.groups()
        kinds.append(kind)
        if kind == "text":
            assert printed == body
            continue
        lines_before = text[: block.start(2)].count("\n")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * lines_before + body, str(PAGE), "exec"), scope)
        printed = out.getvalue()
    assert kinds == ["python", *["python", "text"] * 4]
