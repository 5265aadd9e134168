"""What is recorded of whole steps: every span, flight and sample, by a clock that ticks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from composable_shard import trace
from composable_shard.insight.merging import GroupFacts, RankTrace, Span
from composable_shard.insight.trace import Timeline
from composable_shard.testing import fake_ranks
from timeline.recordings import MS, Ticks, growing_memory, recorded_steps, train, two_layers


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def shown(span: Span) -> str:
    words = [span.kind, span.op, span.name or "root"]
    what = " ".join(word for word in words if word)
    return f"{span.start // MS:>3}-{span.end // MS} {what}".strip()


def spans_of(recorded: RankTrace, step: int) -> list[str]:
    begin, end = recorded.intervals[step]
    return [shown(span) for span in recorded.spans if begin <= span.start < end]


SECOND_STEP = """
    50-51 forward root
    51-52 forward 0
    52-53 launch gather 0
    53-54 forward 0
    54-55 launch gather 1
    55-56 forward 0
    56-57 wait gather 0
    57-58 copy gather 0
    58-59 forward 0
    59-61 forward root
    61-62 forward 1
    62-63 wait gather 1
    63-64 copy gather 1
    64-65 forward 1
    65-66 forward root
    67-68 backward root
    68-69 backward 1
    69-70 launch gather 0
    70-71 backward 1
    71-73 backward root
    73-74 launch reduce 1
    74-75 backward root
    75-76 backward 0
    76-77 wait gather 0
    77-78 copy gather 0
    78-79 backward 0
    79-80 backward root
    80-81 wait reduce 1
    81-82 copy reduce 1
    82-83 backward root
    83-84 launch reduce 0
    84-85 backward root
    85-86 wait reduce 0
    86-87 copy reduce 0
    87-89 backward root
    90-91 optimizer SGD"""


def test_every_moment_of_a_step_belongs_to_one_span() -> None:
    recorded = recorded_steps(2)
    assert recorded.intervals == [(0, 49 * MS), (49 * MS, 92 * MS)]
    assert spans_of(recorded, 1) == lines(SECOND_STEP)
    for before, after in itertools.pairwise(recorded.spans):
        assert before.end <= after.start


def test_memory_is_asked_where_it_was_taken_or_is_given_back() -> None:
    memory = recorded_steps(1).memory
    assert [sample.nbytes for sample in memory] == list(range(100, 100 + len(memory)))
    ticks = [sample.time // MS for sample in memory]
    assert ticks[:6] == [0, 4, 8, 9, 12, 16]  # begin, gather 0, left 0, freed 0, gather 1, left 1
    assert ticks[-4:] == [47, 48, 49, 50]  # the optimizer, the step, the end


def test_the_facts_of_groups_and_ranks() -> None:
    recorded = recorded_steps(1)
    facts = GroupFacts(nbytes=80, first_of_shards=0, first_of_replicas=0)
    assert recorded.groups == {"": GroupFacts(0, 0, 0), "0": facts, "1": facts}
    assert (recorded.rank, recorded.num_ranks, recorded.device) == (0, 2, "cpu")
    assert RankTrace.from_json(recorded.to_json()) == recorded


def acts(recorded: RankTrace) -> list[str]:
    return [f"{flight.op} {flight.name}" for flight in recorded.flights]


def test_gathers_of_kept_parts_are_told_apart() -> None:
    with fake_ranks(4):
        model = two_layers(reshard_after_forward=2)
        timeline = Timeline(model, clock=Ticks(), memory=growing_memory())
        model(torch.ones(2, 4)).sum().backward()
        timeline.stop()
    assert timeline.recorded is not None
    assert acts(timeline.recorded) == [
        *("gather 0", "gather 1", "regather 1", "regather 0", "reduce 1", "reduce 0")
    ]


def test_reductions_over_replicas_are_flights_of_their_own() -> None:
    with fake_ranks(4, rank=3):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
        model = two_layers(mesh=mesh)
        timeline = Timeline(model, clock=Ticks(), memory=growing_memory())
        model(torch.ones(2, 4)).sum().backward()
        timeline.stop()
    recorded = timeline.recorded
    assert recorded is not None
    assert acts(recorded)[-4:] == ["reduce 1", "reduce 0", "all-reduce 1", "all-reduce 0"]
    assert recorded.groups["0"][1:] == (2, 1)  # the first of ranks 2 and 3, and of 1 and 3
    ends = {f"{flight.op} {flight.name}": flight for flight in recorded.flights}
    for name in ("0", "1"):
        assert ends[f"all-reduce {name}"].start == ends[f"reduce {name}"].end


def test_skipped_steps_are_not_recorded_and_recording_ends_by_itself() -> None:
    with fake_ranks(2):
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trace(model, skip=1, steps=2) as timeline:
            listening = []
            for _ in range(5):
                train(model, optimizer)
                timeline.step()
                listening.append(timeline.recorded is None)
    assert listening == [True, True, False, False, False]
    recorded = timeline.recorded
    assert recorded is not None
    assert (recorded.first_step, len(recorded.steps)) == (1, 2)
    assert [span.name for span in recorded.spans].count("SGD") == 2


def test_nothing_is_recorded_of_a_run_that_ends_before_its_first_recorded_step() -> None:
    with fake_ranks(2), trace(two_layers(), skip=3) as timeline:
        timeline.step()
    with pytest.raises(ValueError) as caught:
        timeline.summary()
    assert str(caught.value) == "Expected a recording that has ended, got one that has not begun"


def test_an_exception_ends_the_recording_and_what_was_recorded_is_kept(tmp_path: Path) -> None:
    with fake_ranks(2):
        model = two_layers()
        with pytest.raises(RuntimeError, match="shapes"), trace(model, tmp_path) as timeline:
            model(torch.ones(2, 4))
            timeline.step()
            model(torch.ones(2, 3))
        model(torch.ones(2, 4))
    recorded = RankTrace.from_json((tmp_path / "rank-00000.json").read_text())
    assert recorded == timeline.recorded
    assert len(recorded.steps) == 1
