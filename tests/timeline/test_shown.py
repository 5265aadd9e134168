"""What viewers get: the trace for Perfetto, the page."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from typing import Any

import pytest

from composable_shard.insight.timeline.analysis import lanes_of
from composable_shard.insight.timeline.merging import MergedTrace, to_chrome
from composable_shard.insight.timeline.page import COLORS, WORDS, to_html
from composable_shard.insight.timeline.recording import RankTrace
from composable_shard.insight.timeline.spans import ACTS, KINDS, Flight, Span
from timeline.recordings import device_memory, made_up, recorded_steps


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
    found = to_chrome(merged.ranks)
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


def test_the_exposed_waits_are_all_there(merged: MergedTrace) -> None:
    threads = check_structure(to_chrome(merged.ranks))
    for rank, sums in zip(merged.ranks, merged.summary["ranks"], strict=True):
        waits = threads[rank.rank, 2]
        assert sum(slice["dur"] for slice in waits) / 1e3 == sums["exposed_ms"] * 2 == 11.0
        assert [slice["name"] for slice in waits[-3:]] == [
            "wait for gather 0",
            "wait for reduce 1",
            "wait for reduce 0",
        ]


def test_an_arrow_leads_from_every_launch_to_its_wait(merged: MergedTrace) -> None:
    events = to_chrome(merged.ranks)["traceEvents"]
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
    events = to_chrome(merged.ranks)["traceEvents"]
    for rank in merged.ranks:
        counted = [
            (event["ts"], event["args"]["bytes"])
            for event in events
            if event["ph"] == "C" and event["pid"] == rank.rank
        ]
        assert counted == [(sample.time / 1e3, sample.nbytes) for sample in rank.memory]


def test_reserved_memory_of_a_device_is_shown_beside_what_is_live() -> None:
    recorded = recorded_steps(1, memory=device_memory)
    assert all(sample.reserved == 2 * sample.nbytes for sample in recorded.memory)
    assert RankTrace.from_json(recorded.to_json()) == recorded
    merged = MergedTrace.of([recorded])
    live = max(sample.nbytes for sample in recorded.memory)
    for sums in (merged.summary, *merged.summary["ranks"]):
        assert (sums["peak_nbytes"], sums["peak_reserved_nbytes"]) == (live, 2 * live)
    counted = [event for event in to_chrome(merged.ranks)["traceEvents"] if event["ph"] == "C"]
    for kind, factor in (("live", 1), ("reserved", 2)):
        values = [e["args"]["bytes"] for e in counted if e["name"] == f"{kind} memory (device)"]
        assert values == [factor * sample.nbytes for sample in recorded.memory]
    shown = json.loads(Elements(to_html(merged.ranks, merged.summary)).scripts[0])["ranks"][0]
    assert shown["memory"] == [[s.time / 1e3, s.nbytes, s.reserved] for s in merged.ranks[0].memory]


def test_a_file_without_reserved_memory_is_read() -> None:
    recorded = made_up()
    values = json.loads(recorded.to_json())
    values["memory"] = [sample[:2] for sample in values["memory"]]
    assert RankTrace.from_json(json.dumps(values)) == recorded


def test_collectives_that_overlap_get_lanes_of_their_own() -> None:
    flights = [Flight("gather", "0", i, 10 * i, 10 * i + 15) for i in range(3)]
    recorded = made_up(num_ranks=1, flights=flights)
    titles = [(lane.title, [f.number for f in lane.flights]) for lane in lanes_of(recorded)]
    assert titles[3:] == [("gathers", [0, 2]), ("gathers 2", [1]), ("reductions", [])]
    check_structure(to_chrome([recorded]))


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
        assert shown["memory"] == [[one.time / 1e3, one.nbytes] for one in rank.memory]
        lanes = {lane["title"]: lane["items"] for lane in shown["lanes"]}
        assert list(lanes) == ["compute", "exposed waits", "gathers", "gathers 2", "reductions"]
        spans = lanes["compute"] + lanes["exposed waits"]
        assert sorted(item[2] for item in spans) == [span.start / 1e3 for span in rank.spans]
        exposed = sum(item[3] - item[2] for item in lanes["exposed waits"])
        assert exposed / 1e3 == content["summary"]["ranks"][rank.rank]["exposed_ms"] * 2


def test_the_script_finds_what_it_asks_for(page: str) -> None:
    elements = Elements(page)
    asked = set(re.findall(r'(?:find|getElementById)\("(\w+)"\)', elements.scripts[1]))
    assert asked <= set(elements.ids)
    assert len(asked) > 12


def test_names_of_groups_cannot_end_the_script() -> None:
    name = "</script><b>"
    recorded = made_up(num_ranks=1, spans=[Span("forward", name, 0, 90)])
    merged = MergedTrace.of([recorded])
    text = to_html(merged.ranks, merged.summary)
    content = json.loads(Elements(text).scripts[0])
    assert content["ranks"][0]["lanes"][0]["items"][0][1] == name
    assert name not in text


def test_the_memory_axis_of_the_page_starts_at_zero(page: str) -> None:
    script = Elements(page).scripts[1]
    assert "const y = (nbytes) => MEMORY_TOP + MEMORY * (1 - nbytes / 2 ** 20 / high);" in script
    assert "for (let level = 0; level <= high + step / 2; level += step)" in script


def test_shares_say_of_what(page: str, merged: MergedTrace) -> None:
    content, script = Elements(page).scripts
    summary = json.loads(content)["summary"]
    hidden = 1 - summary["exposed_ms"] / summary["communication_ms"]
    assert summary["hidden_share"] == pytest.approx(hidden)
    assert summary["exposed_share"] == pytest.approx(summary["exposed_ms"] / summary["step_ms"])
    assert "`exposed communication: ${percent(summary.exposed_share)} of the step`" in script
    assert (
        "`of the communication (${ms(summary.communication_ms)}) hidden behind compute`" in script
    )
    alone = MergedTrace.of([made_up(num_ranks=1)]).summary
    assert (alone["communication_ms"], alone["hidden_share"]) == (0.0, 1.0)


def test_everything_has_a_color_and_a_word() -> None:
    assert set(COLORS) == set(WORDS) == {*KINDS, *ACTS.values(), "regather"}


def test_a_trace_without_memory_steps_or_spans_is_shown_too() -> None:
    recorded = RankTrace.from_json(made_up(num_ranks=1).to_json())
    recorded.memory.clear()
    merged = MergedTrace.of([recorded])
    content = json.loads(Elements(to_html(merged.ranks, merged.summary)).scripts[0])
    assert content["ranks"][0]["memory"] == []
    assert [lane["items"] for lane in content["ranks"][0]["lanes"]] == [[], [], [], []]
    check_structure(to_chrome(merged.ranks))


def test_of_many_ranks_the_first_have_lanes_and_all_a_row() -> None:
    ranks = [made_up(rank, num_ranks=70) for rank in range(70)]
    merged = MergedTrace.of(ranks)
    content = json.loads(Elements(to_html(merged.ranks, merged.summary)).scripts[0])
    assert [shown["rank"] for shown in content["ranks"]] == list(range(64))
    assert [row["rank"] for row in content["summary"]["ranks"]] == list(range(70))
