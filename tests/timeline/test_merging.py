"""Ranks on one scale of time: clocks, lateness, sums, folders."""

from __future__ import annotations

import json
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from composable_shard import trace
from composable_shard.insight.merging import (
    MERGED,
    MergedTrace,
    RankTrace,
    Shift,
    Span,
    file_of,
    merge,
    read,
    shifts,
)
from composable_shard.insight.trace import Timeline
from composable_shard.testing import fake_ranks, run_ranks
from timeline.recordings import MS, made_up, recorded_steps, train, two_layers


def gather(number: int, start: int, end: int, op: str = "gather") -> Span:
    return Span(op, "0", start, end, op, number)


def test_ranks_of_one_host_share_a_clock() -> None:
    flights = [gather(0, 10, 20)]
    assert shifts([made_up(0, flights=flights), made_up(1, flights=flights)]) == {
        "host": Shift(0, 0)
    }


def test_collectives_bound_the_difference_of_two_clocks_from_both_sides() -> None:
    # Rank 1 is late once and rank 0 twice; each ends 2 ns after the other has begun.
    first = made_up(0, flights=[gather(0, 10, 42), gather(1, 60, 63)])
    second = made_up(1, clock="other", behind=1000, flights=[gather(0, 40, 44), gather(1, 50, 62)])
    found = shifts([first, second])
    assert found == {"host": Shift(0, 0), "other": Shift(1000, 2)}
    merged = MergedTrace.of([first, second])
    assert [[(f.start, f.end) for f in rank.flights] for rank in merged.ranks] == [
        [(10, 42), (60, 63)],
        [(40, 44), (50, 62)],
    ]
    assert merged.summary["num_clocks"] == 2
    assert merged.summary["clock_error_ms"] == 2e-6


def test_hosts_without_a_collective_between_them_go_by_their_wall_clocks() -> None:
    first, second = made_up(0), made_up(1, clock="other", behind=700)
    assert shifts([first, second]) == {"host": Shift(0, 0), "other": Shift(700, inf)}
    assert MergedTrace.of([first, second]).summary["clock_error_ms"] is None


def test_gathers_of_kept_parts_bound_nothing() -> None:
    flights = [gather(0, 10, 14, "regather")]
    traces = [made_up(0, flights=flights), made_up(1, clock="other", flights=flights)]
    assert shifts(traces)["other"] == Shift(0, inf)


def wait(start: int, end: int, op: str = "gather", number: int = 0) -> Span:
    return Span("wait", "0", start, end, op, number)


def test_a_wait_is_late_until_the_last_rank_has_begun_to_launch() -> None:
    copies = wait(60, 70, "copies", -1)
    first = made_up(0, flights=[gather(0, 10, 50)], spans=[wait(20, 50), copies])
    second = made_up(1, flights=[gather(0, 44, 52)], spans=[wait(45, 52)])
    merged = MergedTrace.of([first, second])
    assert merged.ranks[0].spans == [
        Span("wait", "0", 20, 50, "gather", 0, late=24, late_rank=1),
        copies,
    ]
    assert merged.ranks[1].spans == [wait(45, 52)]
    assert [rank["late_ms"] for rank in merged.summary["ranks"]] == [24e-6, 0]


def test_what_a_rank_does_adds_up_to_its_step() -> None:
    recorded = recorded_steps(2)
    [sums] = MergedTrace.of([recorded]).summary["ranks"]
    parts = ("forward", "backward", "optimizer", "launch", "copy", "exposed", "other")
    assert sum(sums[f"{part}_ms"] for part in parts) == pytest.approx(sums["step_ms"])
    assert sums["step_ms"] == 46.0
    waits = [span for span in recorded.spans if span.kind == "wait"]
    assert sums["exposed_ms"] * 2 == sum(span.end - span.start for span in waits) / MS == 11.0
    assert sums["exposed_share"] == 11 / 92
    assert (sums["optimizer_ms"], sums["launch_ms"], sums["copy_ms"]) == (1.0, 5.5, 5.5)
    assert sums["peak_nbytes"] == max(sample.nbytes for sample in recorded.memory)


def record(folder: Path, num_steps: int) -> dict[str, Any]:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, folder) as timeline:
        for _ in range(num_steps):
            train(model, optimizer)
            timeline.step()
        assert timeline.recorded is None
    torch.distributed.barrier()
    assert timeline.recorded is not None
    return {
        "flights": [(*flight[:2], flight.number) for flight in timeline.recorded.flights],
        "spans": [(*span[:2], *span[4:6]) for span in timeline.recorded.spans],
        "exposed": timeline.summary()["exposed_ms"],
    }


def test_the_last_rank_merges_what_all_have_written(tmp_path: Path) -> None:
    first, second = run_ranks(record, 2, tmp_path, 2)
    assert first["flights"] == second["flights"]
    assert first["spans"] == second["spans"]
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"rank-00000.json", "rank-00001.json", *MERGED}
    found = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in found["traceEvents"]} == {0, 1}
    summary = found["otherData"]["summary"]
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert [rank["exposed_ms"] for rank in summary["ranks"]] == [
        first["exposed"],
        second["exposed"],
    ]
    assert (summary["num_steps"], summary["missing_ranks"]) == (2, [])


def test_a_rank_that_wrote_nothing_is_named_and_nobody_waits_for_it(tmp_path: Path) -> None:
    recorded_steps(1, tmp_path)  # as one of two ranks, alone
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.json"]
    assert merge(tmp_path).summary["missing_ranks"] == [1]


def test_what_an_earlier_run_left_is_not_merged(tmp_path: Path) -> None:
    for rank in range(4):
        file_of(tmp_path, rank).write_text(made_up(rank, num_ranks=4).to_json())
    (tmp_path / "trace.json").write_text("{}")
    recorded_steps(1, tmp_path)
    names = sorted(path.name for path in tmp_path.glob("rank-*"))
    assert names == ["rank-00000.json", "rank-00001.json"]
    merged = read(tmp_path)
    assert [rank.rank for rank in merged.ranks] == [0]  # rank 1 of four is another run's
    assert merged.summary["missing_ranks"] == [1]


def test_a_training_goes_on_where_a_timeline_cannot_be_written(tmp_path: Path) -> None:
    with fake_ranks(2):
        timeline = Timeline(two_layers(), tmp_path)
        file_of(tmp_path, 1).write_text("{}")  # rank 1 of another version of the library
        with pytest.warns(UserWarning) as caught:
            timeline.stop()
    error = f"Expected the trace of a rank in {file_of(tmp_path, 1)}, got KeyError('format')"
    assert [str(one.message) for one in caught] == [
        f"Expected to write a timeline to {tmp_path}, got {ValueError(error)!r}; merge the "
        "written files by `composable-shard trace`"
    ]
    assert file_of(tmp_path, 0).exists() and timeline.recorded is not None


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with fake_ranks(2), trace(two_layers()) as timeline:
        timeline.step()
    assert list(tmp_path.iterdir()) == []
    assert timeline.summary()["num_steps"] == 1


def test_messages(tmp_path: Path) -> None:
    def message(call: Any) -> str:
        with pytest.raises(ValueError) as caught:
            call()
        return str(caught.value)

    folder = tmp_path / "none"
    assert message(lambda: merge(folder)) == (
        f"Expected files of ranks (rank-00000.json) in {folder}, got none"
    )
    for text, error in (
        ("[]", "TypeError(\"'str' object cannot be interpreted as an integer\")"),
        ("{}", "KeyError('format')"),
        ('{"format": "2"}', "ValueError(\"Expected the format 'composable_shard.trace 2'\")"),
    ):
        said = message(partial(RankTrace.from_json, text, "a file"))
        assert said == f"Expected the trace of a rank in a file, got {error}"
