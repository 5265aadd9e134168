"""``composable-shard estimate``: what a training step will need, from a file that describes it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_shard.insight.estimate import estimate
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy

# The files that ``composable-shard estimate`` reads -----------------------------------------------

_KEYS = {
    *("model", "arguments", "ranks", "device", "optimizer", "loss", "batch", "fully_shard"),
    *("flops", "bandwidth", "replica_bandwidth", "latency"),
}
_SHARD_KEYS = {"policy", "reshard_after_forward", "param_dtype", "reduce_dtype", "offload"}
_PASSED_ON = ("device", "flops", "bandwidth", "replica_bandwidth", "latency")


class ConfigError(ValueError):
    """A file that cannot be read, or says something that is not known."""


def read_config(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``estimate`` that a file describes.

    Args:
        path: A TOML or JSON file, or a folder with a ``config.json`` of Hugging Face.
        overrides: What the command line says, which counts more.

    Raises:
        ConfigError: If the file is not what it should be.
        ImportError: If what it names, or ``transformers``, cannot be imported.
    """
    config = _load(path)
    if "model_type" in config:
        return _hugging_face(path, overrides)
    unknown = sorted(set(config) - _KEYS)
    if unknown:
        raise ConfigError(f"Expected keys out of {sorted(_KEYS)}, got {unknown}")
    for needed in ("model", "batch"):
        if needed not in config:
            raise ConfigError(f"Expected a key '{needed}' in {path}, got none")
    config |= {name: value for name, value in overrides.items() if name in _KEYS - {"batch"}}
    call = {name: config[name] for name in _PASSED_ON if name in config}
    call["build_model"] = partial(_named(config["model"]), **config.get("arguments", {}))
    call["mesh_shape"] = _shape(config.get("ranks", 1))
    call["batch"] = _batch(config["batch"])
    for name in ("optimizer", "loss"):
        if name in config:
            call[name] = _named(config[name])
    return call | _sharding(config.get("fully_shard", {}), overrides)


def _load(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"Expected a config to read, got {error}") from error
    try:
        config = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ConfigError(f"Expected TOML or JSON in {path}, got {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"Expected keys and values in {path}, got {type(config).__name__}")
    return config


def _named(name: object) -> Any:
    """Import ``module:attribute``, also from the current folder."""
    module, colon, attribute = str(name).partition(":")
    if not colon:
        raise ConfigError(f"Expected 'module:attribute', got '{name}'")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = importlib.import_module(module)
    if not hasattr(found, attribute):
        raise ConfigError(f"Expected '{attribute}' in module '{module}', got none")
    return getattr(found, attribute)


def _shape(ranks: Any) -> Any:
    return tuple(ranks) if isinstance(ranks, list) else ranks


def _batch(described: Any) -> Callable[[], Any]:
    """Return what makes the batch that is described by shapes and dtypes."""
    if isinstance(described, Mapping):
        shapes = {name: _tensor(one) for name, one in described.items()}
        return lambda: {name: torch.zeros(shape, dtype=d) for name, (shape, d) in shapes.items()}
    if not isinstance(described, Sequence) or isinstance(described, str):
        raise ConfigError(f"Expected tables with shape and dtype in batch, got {described!r}")
    listed = [_tensor(one) for one in described]
    return lambda: tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in listed)


def _tensor(described: Any) -> tuple[list[int], torch.dtype]:
    if not isinstance(described, Mapping) or set(described) - {"dtype"} != {"shape"}:
        raise ConfigError(f"Expected a table with shape and dtype in batch, got {described!r}")
    return list(described["shape"]), _dtype(described.get("dtype", "float32"))


def _dtype(name: object) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"Expected a dtype of torch, got '{name}'")
    return dtype


def _sharding(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(config) - _SHARD_KEYS)
    if unknown:
        raise ConfigError(
            f"Expected keys out of {sorted(_SHARD_KEYS)} in fully_shard, got {unknown}"
        )
    call: dict[str, Any] = {}
    policy = config.get("policy")
    if policy is not None:
        call["policy"] = policy if isinstance(policy, int) else tuple(map(_named, policy))
    if "reshard_after_forward" in config:
        call["reshard_after_forward"] = config["reshard_after_forward"]
    if config.get("offload"):
        call["offload_policy"] = CPUOffloadPolicy()
    said = {**config, **overrides}
    param, reduce = (
        _dtype(said[key]) if key in said else None for key in ("param_dtype", "reduce_dtype")
    )
    if param or reduce:
        call["mp_policy"] = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    return call


def _hugging_face(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a causal language model of transformers, with its own loss."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError(
            f"Expected transformers to build the model of {path}, got '{error}'; install it with "
            "'pip install transformers'"
        ) from error
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    config.use_cache = False
    config.dtype = torch.float32
    shape = (overrides["batch"], overrides["context"])

    def build() -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        return model.train()

    def batch() -> dict[str, torch.Tensor]:
        tokens = torch.zeros(shape, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens.clone()}

    call = {name: overrides[name] for name in _PASSED_ON if name in overrides}
    call |= {"build_model": build, "batch": batch, "mesh_shape": overrides.get("ranks", 1)}
    return call | _sharding({}, overrides)


# ``composable-shard estimate``: what a training step will need, from a file that describes it -----

OK, FAILED, WRONG_ARGUMENTS = 0, 1, 2

_EXAMPLES = """
examples:
  composable-shard estimate train.toml
  composable-shard estimate train.toml --ranks 512 --json
  composable-shard estimate train.toml --ranks 16x8 --flops 4e14 --bandwidth 5e10
  composable-shard estimate ./llama/config.json --ranks 64 --batch 4 --context 2048 \\
      --param-dtype bfloat16 --reduce-dtype float32

train.toml, of which only `model` and `batch` are needed (JSON with the same keys will do):
  model = "my_package.models:build"          # a function or class; see also `arguments`
  arguments = { layers = 32 }                # what it is called with
  ranks = [16, 8]                            # replicas and shards, or one number
  device = "cuda"                            # or "cpu"
  optimizer = "torch.optim:AdamW"
  loss = "my_package.train:loss"             # of the output and the batch
  flops = 4e14                               # in a second; with bandwidth, time is estimated
  bandwidth = 5e10                           # bytes in a second
  [batch]                                    # keyword arguments of forward
  tokens = { shape = [4, 2048], dtype = "int64" }
  [fully_shard]
  policy = ["my_package.models:Block"]       # classes, or a number of elements
  reshard_after_forward = true               # or a number of ranks
  param_dtype = "bfloat16"
  reduce_dtype = "float32"

A config.json of Hugging Face is built by transformers, which must be installed.

exit codes: 0 done, 1 the model cannot be built or run, 2 wrong arguments or config
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = "Tell what a training step will need on each rank, without any of them."
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "config",
        type=Path,
        help="a .toml or .json file, or a folder with a config.json of Hugging Face",
    )
    parser.add_argument("--ranks", type=_ranks, help="how many, or REPLICASxSHARDS")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank (Hugging Face)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each (Hugging Face)")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--param-dtype", metavar="DTYPE", help="dtype of compute")
    parser.add_argument("--reduce-dtype", metavar="DTYPE", help="dtype of reductions")
    parser.add_argument("--flops", type=float, help="floating-point operations in a second")
    parser.add_argument("--bandwidth", type=float, help="bytes that a rank sends in a second")
    parser.add_argument("--replica-bandwidth", type=float, help="the same between replicas")
    parser.add_argument("--latency", type=float, help="seconds of a launch besides")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Estimate what the arguments ask for; return the exit code."""
    try:
        call = read_config(args.config, _overrides(args))
    except ConfigError as error:
        return _fail(error, WRONG_ARGUMENTS)
    except ImportError as error:
        return _fail(error, FAILED)
    try:
        result = estimate(**call)
    except (TypeError, ValueError, RuntimeError) as error:
        return _fail(error, FAILED)
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        _show(result)
    return OK


def _fail(error: Exception, code: int) -> int:
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    print(f"composable-shard estimate: {error}{notes}", file=sys.stderr)
    return code


def _show(result: Any) -> None:
    """Print by rich where it is there and somebody looks, else as plain text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console().print(result)
            return
    print(result)


def _overrides(args: argparse.Namespace) -> Mapping[str, Any]:
    names = (
        *("ranks", "device", "flops", "bandwidth", "replica_bandwidth", "latency"),
        *("param_dtype", "reduce_dtype", "batch", "context"),
    )
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _ranks(text: str) -> int | tuple[int, ...]:
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"Expected a number of ranks or REPLICASxSHARDS, got {text!r}"
        )
    lengths = tuple(map(int, parts))
    return lengths if len(lengths) > 1 else lengths[0]
