"""What imports cost: counted in modules, as times depend on the machine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import composable_shard

ROOT = Path(composable_shard.__file__).parents[1]

# Each takes long to import, and a program that shards a model does not need it.
HEAVY = {
    *("hypothesis", "rich", "safetensors", "tqdm", "transformers", "pytest"),
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "torch.utils.data"),
    "torch.testing._internal.common_utils",
}


def modules_after(*statements: str) -> list[set[str]]:
    """Return the modules that there are in a new process after each of the statements."""
    source = "import sys\n"
    for statement in statements:
        source += f"{statement}\nprint('modules:', *sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [set(line.split()) for line in done.stdout.splitlines() if line.startswith("modules:")]


def test_the_package_costs_nothing_beside_torch_and_fully_shard_nothing_heavy() -> None:
    torchs, package, fsdp, ours = modules_after(
        *("import torch", "import composable_shard", "import torch.distributed.fsdp"),
        "from composable_shard import *",
    )
    assert package - torchs == {"composable_shard"}
    assert "torch._dynamo" not in fsdp  # so that a slow import is not the one of its FSDP2
    assert HEAVY & (ours - fsdp) == set()


def test_the_command_line_answers_without_torch() -> None:
    answer = "try: main(['{}'])\nexcept SystemExit: print('answered')"
    found = modules_after(
        "from composable_shard.cli import main", answer.format("--help"), answer.format("--version")
    )
    assert len(found) == 3 and "torch" not in set().union(*found)


def test_public_names_come_from_where_type_checkers_find_them() -> None:
    tree = ast.parse(Path(composable_shard.__file__).read_text())
    (seen,) = (node for node in tree.body if isinstance(node, ast.If))
    by_checkers = {
        alias.name: str(node.module).removeprefix("composable_shard.")
        for node in seen.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert by_checkers == composable_shard._MODULE_OF
    assert sorted(by_checkers) == composable_shard.__all__
    assert set(composable_shard.__all__) <= set(dir(composable_shard))


def test_a_name_that_is_not_public_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError) as caught:
        composable_shard.fully_sharded  # noqa: B018
    assert str(caught.value) == "module 'composable_shard' has no attribute 'fully_sharded'"
