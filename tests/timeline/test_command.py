"""``composable-shard trace``: what it prints, writes and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composable_shard.cli import main
from composable_shard.insight.merging import MERGED
from timeline.recordings import recorded_steps


def call(*arguments: str | Path) -> int:
    return main(["trace", *map(str, arguments)])


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
    assert printed == chrome["otherData"]["summary"]
    assert (printed["num_clocks"], printed["clock_error_ms"]) == (1, 0.0)
    assert [rank["exposed_ms"] for rank in printed["ranks"]] == [5.5, 5.5]


TABLE = """\
2 ranks, milliseconds of a step, mean of 2
  rank  step  compute  launch  copy  exposed  of step  late  other  MiB
     0  46.0     25.5     5.5   5.5      5.5      12%   0.0    4.0    0
     1  46.0     25.5     5.5   5.5      5.5      12%   0.0    4.0    0
"""


def test_the_table_has_a_row_for_each_rank(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # narrower than the table
    assert call(folder) == 0
    files = "".join(f"{folder / name}\n" for name in MERGED)
    said = "exposed communication: 12% of the step; hidden: 79% of the communication\n"
    assert capsys.readouterr().out == TABLE + said + files


def test_missing_ranks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_steps(1, tmp_path)
    assert call(tmp_path) == 0
    assert "missing: rank 1 wrote no trace" in capsys.readouterr().out.splitlines()


def test_failures_are_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path) == 1
    text = f"Expected files of ranks (rank-00000.json) in {tmp_path}, got none"
    assert capsys.readouterr().err == f"composable-shard trace: {text}\n"
