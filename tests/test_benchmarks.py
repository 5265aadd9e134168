"""The benchmarks: each runs from end to end, and its figures are what arithmetic says."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from composable_shard import explain, fully_shard
from composable_shard._torch import poisoned_memory
from composable_shard.testing import fake_ranks, run_ranks

contestants, copies, host, limit, live_storage, memory, muon, packing, report, step = map(
    importlib.import_module,
    [
        *("contestants", "copies", "host", "limit", "live_storage", "memory", "muon", "packing"),
        *("report", "step"),
    ],
)

FP32 = 4
FLAG = 4  # one for each parameter says who took part, in the dtype of the reduction
# Some parameters of this width are big enough to travel by themselves, others travel packed.
SPEC = contestants.Spec(layers=2, width=128, batch=1, context=8)
TINY = ["--layers", "1", "--width", "64", "--context", "8", "--batch", "1"]


def main(program: Any, tmp_path: Path, *arguments: str) -> Any:
    path = tmp_path / "figures.json"
    assert program.main([*arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def rows_of(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def parameters() -> list[torch.nn.Parameter]:
    with torch.device("meta"):
        return list(contestants.Gpt(SPEC).parameters())


def packed_parameters() -> list[bool]:
    """Return which of them share a message when two ranks gather them in single precision."""
    with fake_ranks(2), torch.device("meta"):
        model = fully_shard(contestants.Gpt(SPEC))
        travels = {param.name: param.travels for param in explain(model).groups[0].parameters}
        return [travels[name] == "packed" for name, _ in model.named_parameters()]


SMALL = ("--layers", "1", "--width", "64", "--rounds", "2")
BLOCKS = ("--blocks", "2", "--rounds", "2", "--steps-per-round", "1")
PROGRAMS: list[tuple[Any, tuple[str, ...], str, set[str]]] = [
    (step, (*SMALL, "--sweep", "1", "3", "--only", "ours", "ddp"), "turns", {"1", "3"}),
    (copies, (*TINY, "--dtype-policies", "fp32", "--only", "fsdp2"), "counts", {"fp32"}),
    (memory, (*TINY, "--only", "ours", "--rounds", "1"), "live", {"ours"}),
    (host, (*BLOCKS, "--ranks", "2", "64"), "seconds", {"2", "64"}),
    (packing, (*BLOCKS[2:], "--params", "2", "--sizes", "4", "512"), "seconds", {"4", "512"}),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("program", "arguments", "part", "names"), PROGRAMS)
def test_a_program_prints_what_it_has_measured(
    program: Any,
    arguments: tuple[str, ...],
    part: str,
    names: set[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = main(program, tmp_path, *arguments)
    assert names <= set(figures[part])
    assert len(rows_of(capsys.readouterr().out)) >= len(names)


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_transfer_alone_sends_what_a_step_sends(policy: str) -> None:
    spec = contestants.Spec(layers=2, width=128, batch=1, context=8, dtype_policy=policy)
    ours, alone = (
        [counts.sent for counts in run_ranks(counted, 2, name, spec)]
        for name in ("ours", "transfer")
    )
    numels = [param.numel() for param in parameters()]
    packed = sum(itertools.compress(numels, packed_parameters()))
    # Behind the packed gradients travel flags, and both are cast before they are sent.
    extra = FLAG * len(parameters()) + packed * (FP32 - spec.compute_dtype.itemsize) // 2
    assert ours == [num_bytes + extra for num_bytes in alone]
    num_params = sum(param.numel() for param in parameters())
    block = sum(param.numel() for param in parameters()[2:14])  # after the two embeddings
    gathered = (num_params + 2 * block) * spec.compute_dtype.itemsize
    assert alone == [(gathered + num_params * spec.compute_dtype.itemsize) // 2] * 2


def counted(name: str, spec: Any) -> Any:
    """Return what one step of a contestant, or of a side of the limit, did on this rank."""
    if name != "transfer":
        return copies.count(name, spec, 1)
    transfer = limit.build(name, spec)
    with copies.Copies() as watched:
        transfer.step(0)
    return watched.counts


def beyond_floor(name: str, policy: str) -> tuple[dict[str, float], Any]:
    spec = contestants.Spec(layers=2, width=128, batch=1, context=8, dtype_policy=policy)
    counts, floor = (run_ranks(copies.count, 2, each, spec, 2)[0] for each in (name, "floor"))
    return copies.beyond_floor(counts, floor, 2), counts


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_copies_of_fsdp2_are_those_of_arithmetic(policy: str) -> None:
    beyond, counts = beyond_floor("fsdp2", policy)
    spec = contestants.Spec(layers=2, width=128, batch=1, context=8, dtype_policy=policy)
    arithmetic = copies.fsdp2_by_arithmetic(spec, 2)
    assert {phase: beyond[phase] for phase in arithmetic} == arithmetic
    # In two steps: three gathers in forward, two in backward, three reductions.
    assert (counts.collectives, counts.messages) == (2 * 8, 0)


def test_ours_copies_only_what_travels_packed() -> None:
    beyond, counts = beyond_floor("ours", "fp32")
    params = parameters()
    packed = packed_parameters()
    assert 0 < sum(packed) < len(packed)
    sizes = [param.numel() * FP32 for param in params]
    copied = [size for size, is_packed in zip(sizes, packed, strict=True) if is_packed]
    blocks = range(2, 26)  # two embeddings before, the norm and the head behind
    again = sum(sizes[index] for index in blocks if packed[index])
    flags = FLAG * len(params)
    assert beyond == {
        "forward": sum(copied),
        "backward": again + sum(copied) + 2 * flags,
        "optimizer": 0,
        "arithmetic": 0,
        # A gather copies this rank's shards once, and both halves of what is packed again. A
        # reduction copies the part that the other rank reads and its own, and writes sum and mean.
        "in_collectives": 2.5 * sum(sizes)
        + (sum(sizes[index] for index in blocks) / 2 + sum(copied) + again + 4 * flags),
    }
    assert counts.collectives == 2 * 8


@poisoned_memory(False)  # which keeps memory for a while
def live_bytes(name: str) -> tuple[int, int]:
    return memory.live_bytes(name, SPEC)


def test_between_steps_a_rank_keeps_parameters_and_their_state() -> None:
    params = parameters()
    whole = 3 * sum(param.numel() for param in params) * FP32
    counters = FP32 * len(params)  # the optimizer counts the steps of each parameter
    for name, kept in (("single", whole), ("fsdp2", whole // 2), ("ours", whole // 2)):
        for between, peak in run_ranks(live_bytes, 2, name):
            # Besides, a library may keep a few numbers for each parameter.
            assert 0 <= between - kept - counters <= 3 * counters, name
            assert peak > between


def test_ways_to_step_whole_matrices_are_timed_and_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--layers", "1", "--width", "16", "--rounds", "2", "--steps-per-round", "1")
    figures = main(muon, tmp_path, *small)
    printed = capsys.readouterr().out
    assert figures["difference"] == 0 and "differ by 0.0" in printed
    assert {len(sample) for sample in figures["seconds"].values()} == {2}
    assert [row[0] for row in rows_of(printed)][-4:] == list(muon.NAMES)


@pytest.mark.parametrize("name", ["limit", "live_storage", "muon", "packing", "report", "rounds"])
def test_examples_in_docstrings(name: str) -> None:
    import doctest

    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.matrix
def test_full_weights_beside_those_of_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights_out = importlib.import_module("weights_out")
    sizes = ["--width", "64", "--blocks", "2", "--bucket-mib", "1", "--rounds", "3"]
    figures = main(weights_out, tmp_path, "--ranks", "2", *sizes)["2"]
    names = ["iter_full", "full_tensor of each", "full state dict of DCP"]
    assert list(figures["seconds"]) == list(figures["nbytes"]) == names
    assert [len(times) for times in figures["seconds"].values()] == [3, 3, 3]
    assert capsys.readouterr().out.count(" of the time") == 2
