"""The programs beside the package: the example that resumes, the benchmark that checks itself."""

from __future__ import annotations

import ast
import importlib
import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import demo
import pytest
from warm import Warm

import two_towers
from towers.samples import Document, batches_of_rank, draw_documents


def losses(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k in ("step", "loss")} for line in demo.lines(folder)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.write_text(tmp_path_factory.mktemp("text"))


def options(folder: Path, text: Path, *more: str) -> list[str]:
    chosen = ["--layers", "1", "--text", str(text), "--checkpoint-dir", str(folder)]
    return [*demo.SMALL, *chosen, *more]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The folder of a run from start to end, by the program with all that it does itself."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    traced = ["--trace", str(folder / "timeline")]
    demo.run("examples/train_lm.py", *options(folder, text, *traced))
    return folder


@pytest.mark.matrix
def test_a_resumed_training_has_bitwise_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, text: Path, uninterrupted: Path
) -> None:
    parts = tmp_path / "parts"
    demo.train(*options(parts, text, "--stop-at", "5"))
    assert len(losses(parts)) == 5
    demo.train(*options(parts, text, "--resume"))
    assert len(losses(uninterrupted)) == 8
    assert losses(parts) == losses(uninterrupted)


def run_main_block(program: str) -> None:
    """Do what a program does when it is started; ranks import its functions by its name."""
    module = importlib.import_module(program)
    assert module.__file__ is not None
    *_, block = ast.parse(Path(module.__file__).read_text()).body
    assert isinstance(block, ast.If) and ast.unparse(block.test) == "__name__ == '__main__'"
    exec(compile(ast.Module(block.body, []), module.__file__, "exec"), vars(module))


@pytest.mark.matrix
def test_the_example_of_a_subclass_passes_the_kit_and_learns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_main_block("custom_subclass")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Int8Rows: all 14 checks pass"
    losses = [re.fullmatch(r"rank (\d): loss (\S+) at first, (\S+) at last", x) for x in lines[-2:]]
    for rank, match in enumerate(losses):
        assert match is not None and int(match[1]) == rank
        assert float(match[2]) > 1 and float(match[3]) < 0.1


@pytest.mark.brief(1)
@pytest.mark.parametrize(("num_trainers", "num_engines"), [(3, 2), (2, 3)])
def test_an_engine_gets_the_weights_of_a_training(
    warm: Warm, tmp_path: Path, num_trainers: int, num_engines: int
) -> None:
    """What it holds is bitwise equal, and each byte that it needs has come once, in buckets."""
    engine = importlib.import_module("weights_to_engine")
    options = ["--engine", str(num_engines), "--check", "--updates", "6", "--json", str(tmp_path)]
    num_ranks, bucket_nbytes = num_trainers + num_engines, 16384
    options += ["--bucket-bytes", str(bucket_nbytes)]
    program = demo.ROOT / "examples/weights_to_engine.py"
    script = f"import runpy; sys.path.insert(0, {str(program.parent)!r}); sys.argv += {options}\n"
    for code, _, errors in warm.run(
        tmp_path,
        f"import sys; {script}runpy.run_path({str(program)!r}, run_name='__main__')",
        num_ranks,
    ):
        assert code == 0, errors
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    texts = [line["text"] for line in found[num_trainers]]
    assert texts[0] != texts[-1] == 2 * engine.TEXT
    assert len(set(texts)) > 2
    for lines in found[:num_trainers]:
        assert [line["nbytes"] for line in lines] == [0] * 6
    parts = [nbytes_of_part(engine, place, num_engines) for place in range(num_engines)]
    embedding = engine.VOCABULARY * engine.WIDTH * 4  # is not trained, and not sent again
    for lines, nbytes in zip(found[num_trainers:], parts, strict=True):
        assert [line["text"] for line in lines] == texts
        assert all(line["equal"] for line in lines)
        assert [line["nbytes"] for line in lines] == [nbytes] + [nbytes - embedding] * 5
        assert [line["largest"] for line in lines] == [embedding] + [lines[1]["largest"]] * 5
        assert lines[1]["largest"] <= min(bucket_nbytes, (nbytes - embedding) // 2)


def nbytes_of_part(engine: Any, place: int, count: int) -> int:
    """Return the bytes of a tensor-parallel rank, whose first places have the shorter parts."""
    total = 0
    for name, tensor in engine.Model().state_dict().items():
        dim = engine.cut_dim(name)
        if dim is None:
            total += tensor.nbytes
        else:
            length = tensor.shape[dim]
            own = length * (place + 1) // count - length * place // count
            total += tensor.nbytes // length * own
    return total


def small_towers(file: Path) -> list[str]:
    model = ["--layers", "1", "--width", "16", "--heads", "2", "--lr", "0.01"]
    return [*model, "--documents", "16", "--epochs", "2", "--held-out", "4", "--json", str(file)]


def test_towers_train_as_one_process_does_and_bitwise_alike_again(tmp_path: Path) -> None:
    reports = []
    for name in ("first", "again"):
        demo.train(*small_towers(tmp_path / name), "--check", program=two_towers)
        reports.append(json.loads((tmp_path / name).read_text()))
    assert reports[0] == reports[1]  # to the bit: all digits are written
    losses, expected = reports[0]["losses"], reports[0]["unsharded"]
    assert losses == pytest.approx(expected, rel=1e-9, abs=0)
    documents = draw_documents(count=16, seed=0)
    num_steps = [expect_uneven_work(documents, epoch) for epoch in range(2)]
    assert len(losses) == sum(num_steps)
    assert losses[-1] < 0.6 * losses[0]


def expect_uneven_work(documents: list[Document], epoch: int) -> int:
    """Look for all that ranks may do differently in an epoch; return its number of steps."""
    of_ranks = [batches_of_rank(documents, rank, 3, epoch, 512) for rank in range(3)]
    steps = list(zip_longest(*of_ranks))
    assert any(None in step for step in steps)
    full = [step for step in steps if None not in step]
    assert all(len({sum(one.num_tokens for one in some) for some in step}) > 1 for step in full)
    seeing = [[any(one.picture is not None for one in some) for some in step] for step in full]
    assert any(len(set(of_step)) == 2 for of_step in seeing)
    return len(steps)


def test_the_contestants_of_the_benchmark_train_alike(capsys: pytest.CaptureFixture[str]) -> None:
    step = importlib.import_module("step")
    assert step.main(["--check", "2", "--layers", "1", "--width", "64"]) == 0
    printed = capsys.readouterr()
    assert "mean loss by step" in printed.out
    assert "failed" not in printed.out + printed.err
