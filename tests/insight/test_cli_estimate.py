"""``composable-shard estimate``: files it reads, what it prints, how it ends."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable_shard import MixedPrecisionPolicy, estimate
from composable_shard.cli import main
from composable_shard.cli.estimate import ConfigError, read_config
from tests.insight.models import Layer, Stack

TOML = """
model = "tests.insight.models:Stack"
arguments = { layers = 3 }
ranks = [2, 4]
device = "cpu"
optimizer = "torch.optim:SGD"
flops = 1e12
bandwidth = 1e9
[batch]
x = { shape = [2, 256] }
[fully_shard]
policy = ["tests.insight.models:Layer"]
reshard_after_forward = 2
param_dtype = "bfloat16"
reduce_dtype = "float32"
"""


def call(*arguments: object) -> int:
    return main(["estimate", *map(str, arguments)])


def written(folder: Path, text: str, name: str = "train.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def expected(mesh_shape: Any = (2, 4), **kwargs: Any) -> Any:
    return estimate(
        lambda: Stack(layers=3),
        mesh_shape,
        Layer,
        torch.empty(2, 256),
        device="cpu",
        optimizer=torch.optim.SGD,
        flops=1e12,
        bandwidth=1e9,
        reshard_after_forward=2,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )


def test_a_toml_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, TOML)
    assert call(path) == 0
    assert capsys.readouterr().out == f"{expected()}\n"
    assert call(path, "--json", "--ranks", "8") == 0
    assert json.loads(capsys.readouterr().out) == expected(8).to_dict()


def test_a_json_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model": "tests.insight.models:Stack", "batch": [{"shape": [2, 256]}]}
    path = written(tmp_path, json.dumps(config), "train.json")
    assert call(path, "--ranks", "2x2", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said == estimate(Stack, (2, 2), batch=torch.empty(2, 256)).to_dict()


class TinyLM(nn.Module):
    """Stands for a model of transformers: a loss from labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def test_a_config_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[Path] = []

    class AutoConfig:
        @staticmethod
        def from_pretrained(path: Path, *, local_files_only: bool) -> Any:
            assert local_files_only
            read.append(path)
            return types.SimpleNamespace()

    class AutoModelForCausalLM:
        @staticmethod
        def from_config(config: Any) -> nn.Module:
            assert config.use_cache is False and config.dtype == torch.float32
            return TinyLM()

    stub = types.SimpleNamespace(AutoConfig=AutoConfig, AutoModelForCausalLM=AutoModelForCausalLM)
    monkeypatch.setitem(sys.modules, "transformers", stub)
    path = written(tmp_path, '{"model_type": "tiny"}', "config.json")
    assert call(path, "--ranks", "4", "--batch", "2", "--context", "8", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert read == [path]
    assert said["num_parameters"] == 64 * 16 + 64 * 16 + 64
    assert said["flops"] == 3 * 2 * 16 * 16 * 64
    assert call(tmp_path, "--param-dtype", "bfloat16", "--context", "8") == 0


def test_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    path = written(tmp_path, '{"model_type": "llama"}', "config.json")
    with pytest.raises(ImportError) as caught:
        read_config(path, {"batch": 1, "context": 8})
    text = (
        f"Expected transformers to build the model of {path}, got 'import of transformers halted; "
        "None in sys.modules'; install it with 'pip install transformers'"
    )
    assert str(caught.value) == text
    assert call(path) == 1
    assert capsys.readouterr().err == f"composable-shard estimate: {text}\n"


def test_a_model_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, TOML.replace("ranks = [2, 4]", "ranks = [2, 3]"))
    assert call(path) == 1
    assert capsys.readouterr().err == (
        "composable-shard estimate: Expected reshard_after_forward to divide the number of "
        "shards, got 2 for 3 shards\n"
    )


def test_arguments_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), (written(tmp_path, TOML), "--ranks", "2x")):
        with pytest.raises(SystemExit) as caught:
            call(*arguments)
        assert caught.value.code == 2
    assert "Expected a number of ranks or REPLICASxSHARDS, got '2x'" in capsys.readouterr().err
    assert call(written(tmp_path, "model = 1 2")) == 2
    assert "Expected TOML or JSON in" in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        call("--help")
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert "composable-shard estimate train.toml --ranks 512 --json" in said
    assert "exit codes: 0 done" in said


KEYS = (
    "['arguments', 'bandwidth', 'batch', 'device', 'flops', 'fully_shard', 'latency', 'loss', "
    "'model', 'optimizer', 'ranks', 'replica_bandwidth']"
)
WRONG: list[tuple[str, str]] = [
    ("modle = 1", f"Expected keys out of {KEYS}, got ['modle']"),
    ("ranks = 2", "Expected a key 'model' in {path}, got none"),
    ("model = 'tests'\n[batch]", "Expected 'module:attribute', got 'tests'"),
    (
        "model = 'tests.insight.models:Nothing'\n[batch]",
        "Expected 'Nothing' in module 'tests.insight.models', got none",
    ),
    (
        "model = 'tests.insight.models:Stack'\nbatch = 3",
        "Expected tables with shape and dtype in batch, got 3",
    ),
    (
        "model = 'tests.insight.models:Stack'\nbatch = [3]",
        "Expected a table with shape and dtype in batch, got 3",
    ),
    (
        "model = 'tests.insight.models:Stack'\nbatch = [{ shape = [1], dtype = 'int65' }]",
        "Expected a dtype of torch, got 'int65'",
    ),
    (
        "model = 'tests.insight.models:Stack'\nbatch = []\n[fully_shard]\npolcy = 1",
        "Expected keys out of ['offload', 'param_dtype', 'policy', 'reduce_dtype', "
        "'reshard_after_forward'] in fully_shard, got ['polcy']",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text for text, _ in WRONG])
def test_files_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(path, {})
    assert str(caught.value) == message.replace("{path}", str(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "none.toml", {})
    path = tmp_path / "none.toml"
    assert str(caught.value) == (
        f"Expected a config to read, got [Errno 2] No such file or directory: '{path}'"
    )
    with pytest.raises(ConfigError) as caught:
        read_config(written(tmp_path, "{", "a.json"), {})
    path = tmp_path / "a.json"
    assert str(caught.value) == (
        f"Expected TOML or JSON in {path}, got Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)"
    )
    with pytest.raises(ConfigError) as caught:
        read_config(written(tmp_path, "[1]", "b.json"), {})
    path = tmp_path / "b.json"
    assert str(caught.value) == f"Expected keys and values in {path}, got list"
