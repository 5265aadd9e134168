"""Outputs of a recording: the trace for Perfetto, the page, ``composable-shard trace``."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from composable_shard.cli import main
from composable_shard.insight.merging import MERGED, MergedTrace, Span, to_chrome, to_html
from timeline.recordings import made_up, recorded_steps


@pytest.fixture(scope="module")
def merged() -> MergedTrace:
    return MergedTrace.of([recorded_steps(2, rank=rank) for rank in range(2)])


REQUIRED = {
    "M": {"name", "args"},
    "X": {"name", "cat", "dur", "args"},
    "C": {"name", "args"},
    "s": {"name", "cat", "id"},
    "f": {"name", "cat", "id", "bp"},
}


def check_structure(found: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Check what a viewer relies on; return the slices of each thread."""
    events = json.loads(json.dumps(found, allow_nan=False))["traceEvents"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert set(event) == {"ph", "ts", "pid", "tid"} | REQUIRED[event["ph"]]
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            threads[event["pid"], event["tid"]].append(event)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    for slices in threads.values():
        for before, after in itertools.pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"]
    return threads


def test_a_trace_for_perfetto_is_well_formed(merged: MergedTrace) -> None:
    found = to_chrome(merged.ranks, merged.summary)
    threads = check_structure(found)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in found["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    titles = ["steps", "compute", "exposed waits", "gathers", "gathers 2", "reductions"]
    assert names == {(rank, i): title for rank in range(2) for i, title in enumerate(titles)}
    assert set(threads) == set(names)
    assert [slice["name"] for slice in threads[0, 0]] == ["step 0", "step 1"]
    assert {slice["cat"] for slice in threads[0, 2]} == {"exposed"}


def test_an_arrow_leads_from_every_launch_to_its_wait(merged: MergedTrace) -> None:
    events = to_chrome(merged.ranks, merged.summary)["traceEvents"]
    tails = {event["id"]: event for event in events if event["ph"] == "s"}
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(tails) == sum(event["ph"] == "s" for event in events) == 2 * 11
    assert set(tails) == set(heads)
    slices = [event for event in events if event["ph"] == "X"]
    for name, tail in tails.items():
        rank, op, group, number = name.split()
        where = [e for e in slices if (e["pid"], e["tid"], e["ts"]) == place_of(tail)]
        assert [slice["name"] for slice in where] == [f"{op} {group}"]
        where = [e for e in slices if (e["pid"], e["tid"], e["ts"]) == place_of(heads[name])]
        assert [slice["name"] for slice in where] == [f"wait for {op} {group}"]
        assert tail["ts"] < heads[name]["ts"]
        assert int(rank) == tail["pid"] == heads[name]["pid"] and int(number) >= 0


def place_of(event: dict[str, Any]) -> tuple[int, int, float]:
    return event["pid"], event["tid"], event["ts"]


def test_memory_is_a_counter_of_each_rank(merged: MergedTrace) -> None:
    events = to_chrome(merged.ranks, merged.summary)["traceEvents"]
    for rank in merged.ranks:
        counted = [
            (event["ts"], event["args"]["bytes"])
            for event in events
            if event["ph"] == "C" and event["pid"] == rank.rank
        ]
        assert counted == [(sample.time / 1e3, sample.nbytes) for sample in rank.memory]


class Elements(HTMLParser):
    """Notes the elements of a page, and checks that they are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [str(value) for name, value in attrs if name == "id"]
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts.append(data)


@pytest.fixture(scope="module")
def page(merged: MergedTrace, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "timeline.html"
    merged.save_html(path)
    return path.read_text()


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    elements = Elements(page)
    fetching = {"src", "href", "data", "action", "srcset"}
    assert [one for one in elements.attributes if one[1] in fetching] == []
    assert not re.findall(r"https?://", page)
    for word in ("import(", "fetch(", "XMLHttpRequest", "WebSocket", "@import", "url("):
        assert word not in page
    assert not re.search(r"/\*[A-Z]+\*/|<!--[A-Z]+-->", page)


def test_the_page_holds_all_ranks(page: str, merged: MergedTrace) -> None:
    content = json.loads(Elements(page).scripts[0])
    assert content["summary"] == json.loads(json.dumps(merged.summary))
    for shown, rank in zip(content["ranks"], merged.ranks, strict=True):
        assert shown["rank"] == rank.rank
        assert shown["memory"] == [list(sample) for sample in rank.memory]
        lanes = {lane["title"]: lane["spans"] for lane in shown["lanes"]}
        assert list(lanes) == ["compute", "exposed waits", "gathers", "gathers 2", "reductions"]
        spans = lanes["compute"] + lanes["exposed waits"]
        assert sorted(span[2] for span in spans) == [span.start for span in rank.spans]
        exposed = sum(span[3] - span[2] for span in lanes["exposed waits"])
        assert exposed / 1e6 == content["summary"]["ranks"][rank.rank]["exposed_ms"] * 2


def test_names_of_groups_cannot_end_the_script() -> None:
    name = "</script><b>"
    recorded = made_up(num_ranks=1, spans=[Span("forward", name, 0, 90)])
    merged = MergedTrace.of([recorded])
    text = to_html(merged.ranks, merged.summary)
    content = json.loads(Elements(text).scripts[0])
    assert content["ranks"][0]["lanes"][0]["spans"][0][1] == name
    assert name not in text


def test_of_many_ranks_the_first_have_lanes_and_all_a_row() -> None:
    ranks = [made_up(rank, num_ranks=70) for rank in range(70)]
    merged = MergedTrace.of(ranks)
    content = json.loads(Elements(to_html(merged.ranks, merged.summary)).scripts[0])
    assert [shown["rank"] for shown in content["ranks"]] == list(range(64))
    assert [row["rank"] for row in content["summary"]["ranks"]] == list(range(70))


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
