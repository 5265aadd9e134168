"""``composable-shard trace``: what it prints, writes and returns."""

from __future__ import annotations

import argparse
import importlib
import json
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from composable_shard.cli import trace as command
from composable_shard.insight.timeline.merging import MERGED
from timeline.recordings import recorded_steps


def call(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser(prog="composable-shard")
    command.add_parser(parser.add_subparsers(required=True))
    chosen = parser.parse_args(["trace", *map(str, arguments)])
    code: int = chosen.run(chosen)
    return code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded")
    recorded_steps(2, path, rank=0)
    recorded_steps(2, path, rank=1)
    return path


def test_json_is_the_summary_and_what_was_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(folder, "--json", "--output", tmp_path / "new") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("files") == [str(tmp_path / "new" / name) for name in MERGED]
    chrome = json.loads((tmp_path / "new" / "trace.json").read_text())
    summary = chrome["otherData"]["summary"]
    assert printed == {**summary, "num_clocks": 1, "clock_error_ms": 0.0}
    assert [rank["exposed_ms"] for rank in printed["ranks"]] == [7.5, 7.5]


def test_the_table_has_a_row_for_each_rank(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(folder) == 0
    printed = capsys.readouterr().out
    assert "2 ranks, milliseconds of a step, mean of 2" in printed
    cells = [line.replace("│", " ").split() for line in printed.splitlines()]
    assert ["0", "50.0", "23.5", "5.5", "5.5", "7.5", "15%", "0.0", "8.0", "0"] in cells
    assert ["1", "50.0", "23.5", "5.5", "5.5", "7.5", "15%", "0.0", "8.0", "0"] in cells
    assert printed.splitlines()[-3:] == [str(folder / name) for name in MERGED]


def test_without_rich_the_table_is_plain(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.import_module

    def find(name: str) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return found(name)

    monkeypatch.setattr(importlib, "import_module", find)
    assert call(folder) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "2 ranks, milliseconds of a step, mean of 2"
    assert head.split() == [
        *("rank", "step", "compute", "launch", "copy", "exposed", "late", "other", "MiB")
    ]
    assert [row.split()[:3] for row in rows[:2]] == [["0", "50.0", "23.5"], ["1", "50.0", "23.5"]]


def test_missing_ranks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_steps(1, tmp_path)
    assert call(tmp_path) == 0
    assert "missing: rank 1 wrote no trace" in capsys.readouterr().out.splitlines()


def test_the_picture_may_show_another_step(folder: Path, tmp_path: Path) -> None:
    assert call(folder, "--json", "--output", tmp_path, "--step", "0") == 0
    assert "step 0: " in (tmp_path / "timeline.svg").read_text()


def test_the_page_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert call(folder, "--json", "--open") == 0
    assert opened == [(folder / "timeline.html").resolve().as_uri()]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ([], "Expected files of ranks (rank-00000.json) in {folder}, got none"),
        (["--step", "9"], "Expected a step within the 2 recorded ones, got 9"),
    ],
    ids=["nothing there", "no such step"],
)
def test_failures_are_one_line_and_exit_code_1(
    more: list[str],
    text: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = folder if more else tmp_path
    assert call(asked, *more) == 1
    text = text.format(folder=tmp_path)
    assert capsys.readouterr().err == f"composable-shard trace: {text}\n"


def test_wrong_arguments_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        call()
    assert caught.value.code == 2
    assert "the following arguments are required: FOLDER" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        call("--help")
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "composable-shard trace runs/trace --open" in printed
    assert "exit codes: 0 merged, 1 no trace to merge, 2 wrong arguments" in printed
