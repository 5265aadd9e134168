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


def test_a_config_that_transformers_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class AutoConfig:
        @staticmethod
        def from_pretrained(path: Path, *, local_files_only: bool) -> Any:
            raise KeyError("nonsense")

    stub = types.SimpleNamespace(AutoConfig=AutoConfig, AutoModelForCausalLM=None)
    monkeypatch.setitem(sys.modules, "transformers", stub)
    path = written(tmp_path, '{"model_type": "nonsense"}', "config.json")
    assert call(path) == 2
    text = f"Expected a config of Hugging Face in {path}, got 'nonsense'"
    assert capsys.readouterr().err == f"composable-shard estimate: {text}\n"


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
    with pytest.raises(SystemExit) as caught:
        call()
    assert caught.value.code == 2
    assert call(written(tmp_path, TOML), "--ranks", "2x") == 2
    assert (
        f"Expected 'ranks' on the command line to be {RANKS}, got '2x'" in capsys.readouterr().err
    )
    assert call(written(tmp_path, "model = 1 2")) == 2
    assert "Expected TOML or JSON in" in capsys.readouterr().err


KEYS = (
    "['arguments', 'bandwidth', 'batch', 'device', 'flops', 'fully_shard', 'latency', 'loss', "
    "'model', 'optimizer', 'ranks', 'replica_bandwidth']"
)
MODEL = "model = 'tests.insight.models"
RANKS = "a number of ranks, [replicas, shards] or 'REPLICASxSHARDS'"
STACK = f"{MODEL}:Stack'\n"
SHARDED = f"{STACK}batch = []\n[fully_shard]\n"
FUNCTION = "'module:attribute' of a function or a class"
POLICY = "a list of 'module:attribute' of module classes, or a number of elements"
SPEEDS = "Expected speeds to be positive, and the latency at least 0, got "
WRONG: list[tuple[str, str]] = [
    ("modle = 1", f"Expected keys out of {KEYS}, got ['modle']"),
    ("ranks = 2", "Expected a key 'model' in {path}, got none"),
    *(
        (f"model = {said}\n[batch]", f"Expected 'model' to be {FUNCTION}, got {said}")
        for said in ("'tests'", "['tests:Net']")
    ),
    *(
        (
            f"{MODEL}:{name}'\n[batch]",
            f"Expected 'model' to be {FUNCTION}, got 'tests.insight.models:{name}'",
        )
        for name in ("Nothing", "__name__")
    ),
    (
        f"{STACK}loss = 'tests.insight.models:__name__'\n[batch]",
        f"Expected 'loss' to be {FUNCTION}, got 'tests.insight.models:__name__'",
    ),
    (
        f"{STACK}batch = 3",
        "Expected 'batch' to be tables with shape and dtype, by name or in a list, got 3",
    ),
    (f"{STACK}batch = [3]", "Expected a table with shape and dtype in batch, got 3"),
    (
        f"{STACK}batch = [{{ dtype = 'int64' }}]",
        "Expected a table with shape and dtype in batch, got {'dtype': 'int64'}",
    ),
    (
        f"{STACK}batch = [{{ shape = [-2, 16] }}]",
        "Expected 'shape' in batch to be a list of lengths, got [-2, 16]",
    ),
    (
        f"{STACK}batch = [{{ shape = [1], dtype = 'int65' }}]",
        "Expected 'dtype' in batch to be a dtype of torch, got 'int65'",
    ),
    (
        f"{STACK}batch = [{{ shape = [1], size = 2 }}]",
        "Expected keys out of ['dtype', 'shape'] in batch, got ['size']",
    ),
    (f"{STACK}arguments = 3\n[batch]", "Expected 'arguments' to be a table, got 3"),
    (
        f"{STACK}ranks = [2, -1]\n[batch]",
        f"Expected 'ranks' to be {RANKS}, got [2, -1]",
    ),
    (f"{STACK}device = 3\n[batch]", "Expected device to be a device or its name, got int: 3"),
    (f"{STACK}flops = nan\n[batch]", f"{SPEEDS}{{'flops': nan, 'latency': 0.0}}"),
    (f"{STACK}latency = nan\n[batch]", f"{SPEEDS}{{'latency': nan}}"),
    (f"{STACK}fully_shard = 3\n[batch]", "Expected 'fully_shard' to be a table, got 3"),
    (
        f"{SHARDED}polcy = 1",
        "Expected keys out of ['offload', 'param_dtype', 'policy', 'reduce_dtype', "
        "'reshard_after_forward', 'sharding'] in fully_shard, got ['polcy']",
    ),
    (
        f"{SHARDED}policy = 0",
        f"Expected 'policy' in fully_shard to be {POLICY}, got 0",
    ),
    (
        f"{SHARDED}policy = ['tests.insight.models:__name__']",
        f"Expected 'policy' in fully_shard to be {POLICY}, got ['tests.insight.models:__name__']",
    ),
    (
        f"{SHARDED}reshard_after_forward = 'no'",
        "Expected 'reshard_after_forward' in fully_shard to be true, false or a number of ranks, "
        "got 'no'",
    ),
    (
        f"{SHARDED}param_dtype = 'bf16'",
        "Expected 'param_dtype' in fully_shard to be a dtype of torch, got 'bf16'",
    ),
    (
        f"{SHARDED}param_dtype = 'int8'",
        "Expected param_dtype to be a floating-point dtype, got torch.int8",
    ),
    (f"{SHARDED}offload = 1", "Expected 'offload' in fully_shard to be true or false, got 1"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text for text, _ in WRONG])
def test_files_that_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = written(tmp_path, text)
    message = message.replace("{path}", str(path))
    assert call(path) == 2
    assert capsys.readouterr().err == f"composable-shard estimate: {message}\n"


BUILDERS = """
def key():
    return {}["nothing"]

def claim():
    assert False, "not so"
"""


def test_what_a_model_raises_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    place = written(tmp_path, BUILDERS, "failing_builders.py")
    written(tmp_path, "def f(:", "broken_module.py")
    written(tmp_path, "1 / 0", "dividing_module.py")
    for model, message in (
        ("failing_builders:key", f"KeyError: 'nothing', raised at {place}:3"),
        ("failing_builders:claim", f"AssertionError: not so, raised at {place}:6"),
        (
            "broken_module:f",
            "Expected to import module 'broken_module', got SyntaxError: invalid syntax "
            "(broken_module.py, line 1)",
        ),
        (
            "dividing_module:f",
            "Expected to import module 'dividing_module', got ZeroDivisionError: division by "
            f"zero, raised at {tmp_path / 'dividing_module.py'}:1",
        ),
    ):
        assert call(written(tmp_path, f"model = '{model}'\n[batch]")) == 1
        assert capsys.readouterr().err == f"composable-shard estimate: {message}\n"


UNREADABLE: dict[str, tuple[bytes | None, str]] = {
    "none.toml": (
        None,
        "Expected TOML or JSON in {0}, got [Errno 2] No such file or directory: '{0}'",
    ),
    "a.json": (
        b"{",
        "Expected TOML or JSON in {}, got Expecting property name enclosed in double quotes: line "
        "1 column 2 (char 1)",
    ),
    "b.json": (b"[1]", "Expected keys and values in {}, got list"),
    "c.json": (
        b"\xff\xfe",
        "Expected TOML or JSON in {}, got 'utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    path, (content, said) = tmp_path / name, UNREADABLE[name]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config(path, {})
    assert str(caught.value) == said.format(path)
