"""A training that goes on with the nodes that are left, and takes in another one later."""

from __future__ import annotations

from pathlib import Path

import pytest
from many_machines.nodes import namespaces, reason_against_namespaces, this_machine_twice
from many_machines.programs import train
from many_machines.runs import Run, losses

from composable_shard.testing import run_ranks

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
