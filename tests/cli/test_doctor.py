"""`composable-shard doctor`: what it finds, measures, advises, prints and exits with."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from composable_shard import cli
from composable_shard.cli import doctor
from composable_shard.cli.doctor import Facts, look, measure, problems_of, warnings_of
from composable_shard.testing import run_ranks


def collective(how: str, seconds: float) -> Facts:
    facts = {"how": how, "seconds": seconds, "nbytes_received": 8 << 20, "is_right": True}
    return {**facts, "bytes_per_second": (8 << 20) / seconds}


MEASURED: Facts = {
    "backend": "gloo",
    "num_threads": 1,
    "transports": {"0-1": "shared memory"},
    "copied_per_second": 8e9,
    "all_gather": collective("DirectAllGather", 0.004),
    "reduce_scatter": collective("DirectReduceScatter", 0.008),
}

HERE: Facts = {
    "versions": {"torch": "2.13.0", "python": "3.11.7", "composable_shard": "1", "einops": "0.8"},
    "build": "cpu",
    "system": "Linux 6",
    "backends": {"gloo": True, "nccl": False},
    "devices": [],
    "device_type": "cpu",
    "num_cores": 4,
    "load": 0.2,
    "num_threads": 2,
    "variables": dict.fromkeys(doctor.VARIABLES),
}
GPUS: Facts = {
    **HERE,
    "backends": {"gloo": True, "nccl": True},
    "devices": ["GPU"] * 2,
    "device_type": "cuda",
    "build": "cuda 13.0",
}


def with_variable(name: str, value: str, machine: Facts = HERE) -> Facts:
    return {**machine, "variables": {**machine["variables"], name: value}}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the doctor find this machine and this measurement."""
    found: dict[str, Any] = {"machine": HERE, "measured": MEASURED, "requests": []}

    def measure_given(*request: object) -> Facts:
        found["requests"].append(request)
        if isinstance(found["measured"], Exception):
            raise found["measured"]
        return found["measured"]

    monkeypatch.setattr(doctor, "look", lambda: found["machine"])
    monkeypatch.setattr(doctor, "measure", measure_given)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # no driver of a GPU
    return found


@pytest.mark.matrix
def test_ranks_measure_what_training_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("RANK", "5")  # of a launcher around this process
    monkeypatch.setenv("WORLD_SIZE", "9")
    measured = measure(2, "cpu", nbytes=1 << 16)
    assert measured["backend"] == "gloo"
    assert measured["transports"] == {"0-1": "shared memory"}
    assert measured["copied_per_second"] > 0
    for name in ("all_gather", "reduce_scatter"):
        one = measured[name]
        how = "Direct" + name.title().replace("_", "")
        assert (one["how"], one["nbytes_received"], one["is_right"]) == (how, 1 << 15, True)
        assert one["bytes_per_second"] == one["nbytes_received"] / one["seconds"] > 0


def sleep_long(*arguments: object) -> None:
    import time

    time.sleep(600)


def test_ranks_that_do_not_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_be_rank", sleep_long)
    monkeypatch.setattr(doctor, "TIMEOUT", 0.2)
    with pytest.raises(multiprocessing.TimeoutError):
        measure(2, "cpu", nbytes=8)


def figures_of_two() -> list[float]:
    rank = torch.distributed.get_rank()
    return doctor.worst(torch.device("cpu"), 1.0 + rank, rank == 0)


def test_the_slowest_rank_counts_and_one_wrong_value_is_wrong() -> None:
    assert run_ranks(figures_of_two, 2) == [[2.0, 1.0]] * 2


def test_this_machine_is_seen_as_it_is() -> None:
    seen = look()
    assert seen["versions"]["torch"] == torch.__version__
    assert seen["backends"]["gloo"] is torch.distributed.is_gloo_available()
    assert seen["num_threads"] == torch.get_num_threads()
    assert seen["variables"].keys() == HERE["variables"].keys()
    assert len(seen["devices"]) == torch.accelerator.device_count()


PROBLEMS: list[tuple[Facts, int, str]] = [
    (HERE, 2, ""),
    (GPUS, 2, ""),
    (
        {**HERE, "versions": {**HERE["versions"], "torch": "2.9.1+cpu"}},
        *(2, "torch 2.9.1+cpu is older than 2.11: install a later one"),
    ),
    (
        {**HERE, "backends": {"gloo": False}},
        *(2, "torch has no backend for collectives: install a build with gloo"),
    ),
    (
        {**GPUS, "backends": {"gloo": True, "nccl": False}},
        *(2, "there are GPUs, but torch has no nccl: install a CUDA build"),
    ),
    (GPUS, 4, "4 ranks, but 2 devices: pass --ranks or --device cpu"),
]


@pytest.mark.parametrize(("of", "num_ranks", "problem"), PROBLEMS)
def test_problems(of: Facts, num_ranks: int, problem: str) -> None:
    assert list(problems_of(of, num_ranks)) == [problem] * bool(problem)


SEGMENTS = (
    "gathered parameters fragment the memory of the CUDA allocator: set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True"
)
COMPARES = "COMPOSABLE_SHARD_CHECK=1 slows every collective: unset it once training is debugged"
WARNINGS: list[tuple[Facts, str]] = [
    (HERE, ""),
    (GPUS, SEGMENTS),
    ({**GPUS, "build": "hip 7.0"}, ""),
    (with_variable("PYTORCH_ALLOC_CONF", "expandable_segments:True", GPUS), ""),
    (with_variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", GPUS), ""),
    (with_variable("COMPOSABLE_SHARD_CHECK", "1"), COMPARES),
    (
        with_variable("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        "TORCH_DISTRIBUTED_DEBUG=DETAIL makes every collective slower: unset it",
    ),
    (
        with_variable("NCCL_P2P_DISABLE", "1"),
        "NCCL_P2P_DISABLE=1 keeps GPUs from copying to each other: unset it",
    ),
]


@pytest.mark.parametrize(("of", "warning"), WARNINGS)
def test_warnings(of: Facts, warning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)  # no driver of a GPU
    assert list(warnings_of(of)) == [warning] * bool(warning)


def test_a_driver_without_a_gpu_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    assert list(warnings_of(HERE)) == ["there is a GPU driver, but torch (cpu) sees no GPU"]


def measured_with(num_threads: int, gather: float, reduce: float) -> Facts:
    """Return what ranks measure, each in bytes per second, beside copies of 8 GB in a second."""
    return {
        **MEASURED,
        "num_threads": num_threads,
        "all_gather": collective("DirectAllGather", (8 << 20) / gather),
        "reduce_scatter": collective("DirectReduceScatter", (8 << 20) / reduce),
    }


def with_gather(measured: Facts, **facts: Any) -> Facts:
    return {**measured, "all_gather": {**measured["all_gather"], **facts}}


SHARED = "2 ranks with 4 threads each share 4 cores"


FEWER, REDUCES = f"{SHARED}: set OMP_NUM_THREADS=2", "reduce-scatter is 80 times slower"
OTHERS = "other programs may run, or a container may allow fewer than 4 cores"
THREADS: list[tuple[int, tuple[float, float] | None, list[str]]] = [
    (2, None, []),
    (2, (2e9, 1e9), []),
    (4, None, [FEWER]),
    (4, (2e9, 0.5e9), [FEWER]),
    (4, (2e9, 0.1e9), [f"{REDUCES} than a copy of memory; {FEWER}"]),
    (
        *(2, (0.2e9, 0.1e9)),
        [f"all-gather is 40 times slower, {REDUCES} than a copy of memory; {OTHERS}"],
    ),
]


@pytest.mark.parametrize(("num_threads", "speeds", "warnings"), THREADS)
def test_threads(num_threads: int, speeds: tuple[float, float] | None, warnings: list[str]) -> None:
    measured = measured_with(num_threads, *speeds) if speeds else None
    machine = {**HERE, "num_threads": num_threads}
    report = {"machine": machine, "num_ranks": 2, "measured": measured}
    assert list(doctor.speed_warnings(report)) == warnings


def test_one_thread_each_is_not_too_many_for_more_ranks_than_cores() -> None:
    report = {"machine": {**HERE, "num_threads": 1}, "num_ranks": 9, "measured": None}
    assert list(doctor.speed_warnings(report)) == []


WHY = "a rank cannot set up shared memory: [Errno 1] not here"
SENT = "ranks 0-1, 1-2 do not share memory: a rank cannot set up shared memory: [Errno 1] not here"
MIXED = {
    "0-1": f"messages, because {WHY}",
    "0-2": "shared memory",
    "1-2": f"messages, because {WHY}",
}


REPORT = """\
torch           2.13.0, built for cpu
python          3.11.7 on Linux 6
devices         the CPU alone; 4 cores, 2 threads, load 0.2
backends        gloo
variables       no relevant variable is set
ranks           2 on cpu over gloo, 1 thread each
transport       shared memory: ranks 0-1
all-gather      2.10 GB/s to each rank (8 MiB in 4.0 ms), in shared memory
reduce-scatter  1.05 GB/s to each rank (8 MiB in 8.0 ms), in shared memory, summed in rank order
verdict         nothing is wrong
"""


def test_the_report(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--mib", "16"]) == 0
    assert capsys.readouterr().out == REPORT
    assert given["requests"] == [(2, "cpu", 16 << 20)]


def test_the_report_for_programs(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    given["measured"] = {**MEASURED, "transports": MIXED}
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_well"] is True
    assert report["measured"]["copied_per_second"] == 8e9
    assert report["machine"]["versions"] == HERE["versions"]
    assert report["measured"]["all_gather"] == {
        "how": "DirectAllGather",
        "seconds": 0.004,
        "nbytes_received": 8 << 20,
        "is_right": True,
        "bytes_per_second": (8 << 20) / 0.004,
    }
    assert (report["num_ranks"], report["problems"]) == (2, [])
    assert report["warnings"] == [SENT]


def test_the_report_of_ranks_that_send(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given["measured"] = {**MEASURED, "transports": MIXED, "num_threads": 2}
    assert cli.main(["doctor", "--ranks", "3"]) == 0
    printed = capsys.readouterr().out
    assert "ranks           3 on cpu over gloo, 2 threads each\n" in printed
    assert f"transport       messages, because {WHY}: ranks 0-1, 1-2\n" in printed
    assert "transport       shared memory: ranks 0-2\n" in printed
    assert "(8 MiB in 4.0 ms), sent from rank to rank over gloo\n" in printed


def test_nothing_is_started_if_not_asked_for(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--no-measure", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] is None
    assert given["requests"] == []


def test_gpus_are_measured_unless_the_cpu_is_asked_for(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given["machine"] = GPUS
    coalesced = with_gather(MEASURED, how="CoalescedAllGather")
    given["measured"] = {**coalesced, "backend": "nccl", "transports": {}}
    assert cli.main(["doctor"]) == 0
    assert "one coalesced launch of nccl for a group" in capsys.readouterr().out
    assert cli.main(["doctor", "--device", "cpu", "--ranks", "3"]) == 0
    asked = [request[:2] for request in given["requests"]]
    assert asked == [(2, "cuda"), (3, "cpu")]


def test_one_gpu_is_well_and_has_nothing_to_measure(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given["machine"] = {**GPUS, "devices": ["GPU"]}
    assert cli.main(["doctor"]) == 0
    assert given["requests"] == []
    assert "ranks      1 on cuda, which has no collectives\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("measured", "problem"),
    [
        (
            with_gather(MEASURED, is_right=False),
            "all-gather gave wrong values: the backend or the machine is broken",
        ),
        (
            RuntimeError("of gloo:\nno route\n"),
            "2 ranks could not measure: RuntimeError: no route; if they cannot connect, set "
            "GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME): lo on one machine",
        ),
        (
            multiprocessing.TimeoutError(),
            "2 ranks could not measure: TimeoutError: no result within 120 s; if they cannot "
            "connect, set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME): lo on one machine",
        ),
    ],
    ids=["wrong", "failed", "waits"],
)
def test_what_is_wrong_exits_with_1(
    given: dict[str, Any], measured: Any, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given["measured"] = measured
    assert cli.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["is_well"], report["problems"]) == (False, [problem])
    assert cli.main(["doctor"]) == 1
    assert "nothing is wrong" not in capsys.readouterr().out


def test_no_ranks_are_started_on_a_machine_with_problems(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given["machine"] = {**HERE, "backends": {"gloo": False}}
    assert cli.main(["doctor"]) == 1
    assert given["requests"] == []
    assert capsys.readouterr().out.splitlines()[-1] == (
        "problem    torch has no backend for collectives: install a build with gloo"
    )


@pytest.mark.parametrize("option", ["--ranks", "--mib"])
@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_numbers_are_positive(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", option, value])
    assert caught.value.code == 2
    text = f"Expected a positive number, got '{value}'"
    assert capsys.readouterr().err.endswith(f"error: argument {option}: {text}\n")


def test_too_many_threads_are_not_said_to_be_well(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given["machine"] = {**HERE, "num_threads": 4}
    given["measured"] = measured_with(4, 2e9, 1e9)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"warning         {SHARED}: set OMP_NUM_THREADS=2",
        "verdict         training works; see the warnings above",
    ]
