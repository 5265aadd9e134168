"""Runs that take long: the demo to its end, two thousand iterations, nodes that leave and join."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from demo import run
from many_machines.nodes import namespaces, reason_against_namespaces, this_machine_twice
from many_machines.runs import Run, losses, train
from training.iterations import iterate

from composable_shard.testing import run_on_ranks, run_ranks, stop_ranks

AFTER = r"held-out loss after training *\S *(\S+) nats"


@pytest.mark.timeout(1200)
def test_the_demo_with_int8_gradients_ends_within_a_hundredth_of_the_loss(tmp_path: Path) -> None:
    found = []
    for more in ((), ("--int8-gradients",)):
        folder = str(tmp_path / "-".join(("run", *more)))
        printed = run("examples/train_lm.py", "--checkpoint-dir", folder, *more, timeout=600)
        (loss,) = re.findall(AFTER, printed)
        found.append(float(loss))
    assert 1.5 < found[0] < 2.2
    assert found[1] == pytest.approx(found[0], rel=0.01)


MEASURES = (400, 800, 1200, 1600, 2000)


@pytest.mark.timeout(3000)
def test_two_thousand_iterations_train_exactly_and_leave_nothing_behind() -> None:
    stop_ranks()  # what earlier calls have left in the processes is none of this
    for found, seen in run_on_ranks(iterate, 2, 2000, MEASURES, timeout=2700):
        assert found == []
        for name in ("open_files", "process_groups", "own_objects", "tensors"):
            assert len({getattr(one, name) for one in seen}) == 1, (name, seen)
        growth = seen[-1].resident_nbytes - seen[0].resident_nbytes
        assert growth < 4 * 2**20, seen


OPTIONS = ["--steps", "400", "--checkpoint-every", "5"]


@pytest.mark.timeout(1500)
def test_fewer_nodes_go_on_and_more_join(tmp_path: Path) -> None:
    """The first node is left alone, goes on, and is joined by another one."""
    uninterrupted = tmp_path / "uninterrupted"
    run_ranks(train, 2, [*OPTIONS, "--checkpoint-dir", str(uninterrupted)], timeout=600)
    if reason_against_namespaces() is None:
        with namespaces() as nodes:
            lose_and_gain(nodes, tmp_path, losses(uninterrupted))
    else:
        lose_and_gain(this_machine_twice(), tmp_path, losses(uninterrupted))


def lose_and_gain(nodes: list, folder: Path, wanted: list[dict[str, float]]) -> None:
    with Run(nodes, folder, {"NODES": "1:2"}, *OPTIONS, "--pause", "0.2") as run:
        run.start(0, "first")
        run.start(1, "second")
        run.wait_for(lambda: run.starts("first")[-1:] == [(0, 2)], timeout=300)
        run.wait_for(lambda: len(run.losses) > 10)
        run.kill("second")
        run.wait_for(lambda: run.starts("first")[-1][1] == 1)
        alone_from = run.starts("first")[-1][0]
        run.wait_for(lambda: len(run.losses) > alone_from + 10)
        run.start(1, "third")
        run.finish(timeout=900)
    assert [num_ranks for _, num_ranks in run.starts("first")] == [2, 1, 2]
    assert [num_ranks for _, num_ranks in run.starts("third")] == [2]
    assert run.losses[:alone_from] == wanted[:alone_from]
    assert [one["step"] for one in run.losses] == [one["step"] for one in wanted]
    for got, expected in zip(run.losses, wanted, strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-3)
