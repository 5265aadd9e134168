"""The command line as a whole: help, exit codes, and scripts run by it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import composable_shard
from composable_shard import cli
from composable_shard.cli import parse
from composable_shard.compat.torch_dropin import is_installed

ROOT = Path(composable_shard.__file__).parents[1]
NAMES = list(cli.COMMANDS)


def exit_code(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return caught.value.code


def test_the_script_is_the_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"composable-shard": "composable_shard.cli:main"}


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--help"]) == 0
    printed = capsys.readouterr().out
    for name in NAMES:
        assert f"\n    {name} " in printed


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([name, "--help"]) == 0
    assert f"Examples:\n  composable-shard {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "composable-shard: error: the following arguments are required: command"),
        (["heal"], "composable-shard: error: argument command: invalid choice: 'heal' "),
        (["run"], "composable-shard run: error: the following arguments are required: SCRIPT\n"),
    ],
    ids=["none", "unknown", "no script"],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(arguments) == 2
    assert f"\n{text}" in capsys.readouterr().err


def test_a_script_that_is_not_there_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["run", "gone.py"]) == 2
    assert (
        "Expected the path of a script, got 'gone.py', which does not exist"
        in capsys.readouterr().err
    )


def test_a_script_runs_with_its_own_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "print(sys.argv[1:], fully_shard.__module__)\n"
    )
    assert cli.main(["run", str(script), "--help", "-m", "x"]) == 0
    ours = "composable_shard.compat.torch_dropin"
    assert capsys.readouterr().out == f"['--help', '-m', 'x'] {ours}\n"
    assert not is_installed()


def test_a_script_exits_as_it_says(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)")
    assert exit_code(["run", str(script)]) == 7


def test_a_module_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_to_run.py").write_text("import sys; sys.exit(len(sys.argv))")
    monkeypatch.chdir(tmp_path)
    assert exit_code(["run", "-m", "module_to_run", "--one", "-m"]) == 3


def test_a_reader_that_has_seen_enough_is_no_failure_to_speak_of() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "composable_shard", "doctor", "--no-measure"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


DOCS = ROOT / "docs"
PAGES = ("command_line.md", "drop_in.md")


def blocks(page: str, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    return [shlex.split(line) for block in blocks(page, "sh") for line in block.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page: str) -> None:
    found = commands(page)
    assert len(found) >= 4
    for program, *words in found:
        if program == "composable-shard":
            parse(words)
        else:
            assert program == "torchrun"
            chosen = get_args_parser().parse_args(words)
            assert (chosen.module, chosen.training_script) == (True, "composable_shard.run")


def test_the_report_on_the_page_has_the_topics_that_are_printed() -> None:
    report, _ = blocks("command_line.md", "text")
    topics = [line.split()[0] for line in report.splitlines() if not line.startswith(" ")]
    assert topics == [
        *("torch", "python", "devices", "backends", "variables", "ranks", "transport"),
        *("all-gather", "reduce-scatter", "verdict"),
    ]
