"""Ranks on one scale of time: clocks, lateness, sums, folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable_shard import fully_shard, trace
from composable_shard.insight.timeline.analysis import Shift, shifts
from composable_shard.insight.timeline.merging import MERGED, MergedTrace, merge, read
from composable_shard.insight.timeline.recording import GroupFacts, RankTrace, file_of
from composable_shard.insight.timeline.spans import Flight, Sample, Span
from composable_shard.insight.trace import Timeline
from composable_shard.testing import fake_ranks, run_ranks
from timeline.recordings import MS, made_up, recorded_steps, train, two_layers


def gather(number: int, start: int, end: int, op: str = "gather") -> Flight:
    return Flight(op, "0", number, start, end)


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
    assert [[tuple(f[3:]) for f in rank.flights] for rank in merged.ranks] == [
        [(10, 42), (60, 63)],
        [(40, 44), (50, 62)],
    ]
    assert merged.summary["num_clocks"] == 2
    assert merged.summary["clock_error_ms"] == 2e-6


def test_clocks_are_joined_by_those_between_them_and_errors_add_up() -> None:
    def host(rank: int, peers: list[int], behind: int) -> RankTrace:
        """Take part in one collective for each set of ranks, all launched at 10 and over at 14."""
        recorded = made_up(rank, num_ranks=3, clock=f"host {rank}", behind=behind)
        recorded.rank_sets[:] = [peers, [0, 1] if rank < 2 else [rank]]
        recorded.flights[:] = [gather(0, 10 - behind, 14 - behind)]
        if rank < 2:
            recorded.flights.append(gather(0, 10 - behind, 14 - behind, "all-reduce"))
        return recorded

    found = shifts([host(0, [0], 0), host(1, [1, 2], 300), host(2, [1, 2], 500)])
    assert found == {"host 0": Shift(0, 0), "host 1": Shift(300, 4), "host 2": Shift(500, 8)}


def test_hosts_without_a_collective_between_them_go_by_their_wall_clocks() -> None:
    first, second = made_up(0), made_up(1, clock="other", behind=700)
    assert shifts([first, second]) == {"host": Shift(0, 0), "other": Shift(700, None)}
    assert MergedTrace.of([first, second]).summary["clock_error_ms"] is None


def test_gathers_of_kept_parts_bound_nothing() -> None:
    flights = [gather(0, 10, 14, "regather")]
    traces = [made_up(0, flights=flights), made_up(1, clock="other", flights=flights)]
    assert shifts(traces)["other"] == Shift(0, None)


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


def test_a_rank_that_launched_after_the_wait_has_ended_makes_all_of_it_late() -> None:
    first = made_up(0, flights=[gather(0, 10, 30)], spans=[wait(20, 30)])
    second = made_up(1, flights=[gather(0, 90, 95)])
    assert MergedTrace.of([first, second]).ranks[0].spans[0].late == 10


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


def test_what_comes_after_the_last_step_does_not_count() -> None:
    spans = [Span("forward", "0", 10, 30), Span("forward", "0", 60, 80)]
    recorded = made_up(spans=spans, steps=[50], flights=[gather(0, 40, 60)])
    [sums] = MergedTrace.of([recorded]).summary["ranks"]
    found = [sums[f"{name}_ms"] for name in ("step", "forward", "communication")]
    assert found == pytest.approx([50e-6, 20e-6, 10e-6])


def record(folder: Path, num_steps: int, fails: int | None = None) -> dict[str, Any]:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = torch.distributed.get_rank()
    with trace(model, folder) as timeline:
        for _ in range(num_steps):
            train(model, optimizer)
            timeline.step()
        assert timeline.recorded is None
    torch.distributed.barrier()
    if rank == fails:
        file_of(folder, rank).unlink()
    assert timeline.recorded is not None
    return {
        "flights": [flight[:3] for flight in timeline.recorded.flights],
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


def test_merging_on_one_scale_begins_with_the_first_rank(tmp_path: Path) -> None:
    run_ranks(record, 2, tmp_path, 1)
    merged = merge(tmp_path)
    assert min(rank.begin for rank in merged.ranks) == 0
    assert all(
        start.start <= end.end
        for one in merged.ranks
        for other in merged.ranks
        for start, end in zip(one.flights, other.flights, strict=True)
    )


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


def test_folders_of_hosts_with_disks_of_their_own_are_merged_too(tmp_path: Path) -> None:
    for rank, name in enumerate(("one", "two")):
        recorded_steps(1, tmp_path / name, rank)
    merged = merge(tmp_path / "one", tmp_path / "two")
    assert [rank.rank for rank in merged.ranks] == [0, 1]
    assert merged.summary["missing_ranks"] == []


def test_ranks_come_in_order_whatever_their_folders() -> None:
    traces = [made_up(1), made_up(0)]
    assert [rank.rank for rank in MergedTrace.of(traces).ranks] == [0, 1]


def test_of_many_ranks_none_merges_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composable_shard.insight.trace.MAX_MERGED", 1)
    for rank in range(2):
        recorded_steps(1, tmp_path, rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank-00000.json",
        "rank-00001.json",
    ]


def test_a_training_goes_on_where_a_timeline_cannot_be_written(tmp_path: Path) -> None:
    with fake_ranks(2):
        timeline = Timeline(two_layers(), tmp_path)
        file_of(tmp_path, 1).write_text("{}")  # rank 1 of another version of the library
        with pytest.warns(UserWarning) as caught:
            timeline.stop()
    error = f"Expected the trace of a rank in {file_of(tmp_path, 1)}, got KeyError('format')"
    assert [str(one.message) for one in caught] == [
        f"Expected to write a timeline to {tmp_path}, got {ValueError(error)!r}; merge what is "
        "there by `composable-shard trace`"
    ]
    assert file_of(tmp_path, 0).exists() and timeline.recorded is not None


def test_a_tree_that_is_sharded_further_meanwhile_is_shown_all_the_same(tmp_path: Path) -> None:
    with fake_ranks(1):
        model = nn.Sequential(fully_shard(nn.Linear(4, 4)))
        with trace(model, tmp_path) as timeline:
            fully_shard(model)
            model(torch.ones(2, 4))
    assert timeline.recorded is not None
    assert [flight.name for flight in timeline.recorded.flights] == ["0.0"]
    assert timeline.recorded.groups["0.0"] == GroupFacts(0, 0, 1, 1)
    assert read(tmp_path).summary["num_ranks"] == 1


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
    assert message(lambda: RankTrace.from_json("[]", "a file")) == (
        "Expected the format 'composable_shard.trace 1' in a file, got 'list'"
    )
    assert message(lambda: RankTrace.from_json("{}", "a file")) == (
        "Expected the trace of a rank in a file, got KeyError('format')"
    )
    assert message(lambda: RankTrace.from_json('{"format": "2"}', "a file")) == (
        "Expected the format 'composable_shard.trace 1' in a file, got '2'"
    )


DAMAGED: list[tuple[str, object, str]] = [
    (
        "begin",
        None,
        "TypeError(\"RankTrace.__init__() missing 1 required positional argument: 'begin'\")",
    ),
    ("spans", None, "KeyError('spans')"),
    ("groups", [], "AttributeError(\"'list' object has no attribute 'items'\")"),
    ("flights", 3, "TypeError(\"'int' object is not iterable\")"),
]


@pytest.mark.parametrize(("field", "value", "error"), DAMAGED)
def test_a_file_that_lacks_a_field(field: str, value: object, error: str) -> None:
    values = json.loads(made_up().to_json())
    del values[field]
    if value is not None:
        values[field] = value
    with pytest.raises(ValueError) as caught:
        RankTrace.from_json(json.dumps(values), "a file")
    assert str(caught.value) == f"Expected the trace of a rank in a file, got {error}"


def test_shifting_shifts_all_times() -> None:
    recorded = made_up(steps=[90], spans=[wait(1, 2)], flights=[gather(0, 3, 4)]).shifted(10)
    assert (recorded.begin, recorded.end, recorded.steps) == (10, 110, [100])
    assert recorded.spans == [wait(11, 12)] and recorded.flights == [gather(0, 13, 14)]
    assert recorded.memory == [Sample(10, 2**20), Sample(60, 3 * 2**20)]
