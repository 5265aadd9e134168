"""The figures that ``budget.toml`` limits: how large the package is, how much a steady step runs.

Run ``python tests/measured.py`` to print them.
"""

from __future__ import annotations

import ast
import io
import json
import math
import sys
import time
import tokenize
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import composable_shard
from composable_shard import MixedPrecisionPolicy, fully_shard
from composable_shard.testing import fake_ranks

ROOT = Path(composable_shard.__file__).parent
NUM_BLOCKS = 8
NUM_WARMUP_STEPS = 3  # by then execution orders are recorded and buffers exist

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BLANK = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


@cache
def num_code_lines(path: Path) -> int:
    """Count the lines that are neither blank nor part of a docstring or a comment."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code = {
        number
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in BLANK
        for number in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def sizes() -> dict[str, int]:
    """Count files and code lines of the core without its transport, of transport, and of all."""
    everything = sorted(ROOT.rglob("*.py"))
    transport = [path for path in everything if "transport" in path.relative_to(ROOT).parts]
    core = [path for path in everything if path.relative_to(ROOT).parts[0] == "core"]
    parts = {
        "core": [path for path in core if path not in transport],
        "transport": transport,
        "package": everything,
    }
    figures = {"test_lines": num_test_lines()}
    for name, paths in parts.items():
        figures[f"{name}_files"] = len(paths)
        figures[f"{name}_code_lines"] = sum(map(num_code_lines, paths))
    return figures


def num_test_lines() -> int:
    tests = Path(__file__).parent.rglob("*.py")
    return sum(len(path.read_text().splitlines()) for path in tests)


def calibration_seconds() -> float:
    """Return how long this machine takes for a fixed loop, the best of three."""
    weight, best = torch.full((64, 64), 0.01), math.inf
    for _ in range(3):
        start, x = time.perf_counter(), torch.ones(64, 64)
        for _ in range(5_000):
            x = torch.tanh(x @ weight)
        best = min(best, time.perf_counter() - start)
    return best


class Block(nn.Module):
    """Twelve parameters, as a transformer block has."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, dim]
        q, k, v = self.mix(self.first(x)).chunk(3, -1)
        x = x + self.project(nn.functional.scaled_dot_product_attention(q, k, v))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return y


class Calls:
    def __init__(self) -> None:
        self.num_python_calls = 0
        self.num_builtin_calls = 0
        self.functions: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(str(ROOT)):
            return
        if event == "c_call":
            self.num_builtin_calls += 1
        elif event == "call":
            self.num_python_calls += 1
            self.functions.add((code.co_filename, code.co_firstlineno))


def steady_step() -> dict[str, int]:
    """Count what the last of four steps of a small transformer runs: eight groups and a root."""
    calls = Calls()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_ranks(2):
        model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        for block in model:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(NUM_WARMUP_STEPS + 1):
            x = torch.randn(4, 8, 32)
            profiler = calls if step == NUM_WARMUP_STEPS else None
            sys.setprofile(profiler)
            output = model(x)
            sys.setprofile(None)
            loss = output.float().sum()
            sys.setprofile(profiler)
            loss.backward()
            sys.setprofile(None)
            optimizer.step()
            optimizer.zero_grad()
    return {
        "step_functions": len(calls.functions),
        "python_calls_per_group": round(calls.num_python_calls / NUM_BLOCKS),
        "builtin_calls_per_group": round(calls.num_builtin_calls / NUM_BLOCKS),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(sizes() | steady_step(), indent=4))
