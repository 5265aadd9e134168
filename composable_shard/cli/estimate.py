"""``composable-shard estimate``: what a training step will need, from a file that describes it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from composable_shard.insight.estimate import estimate
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy

# The files that ``composable-shard estimate`` reads -----------------------------------------------


def _is_name(value: Any) -> bool:
    """Tell whether a value is ``module:attribute``, the module an absolute one."""
    module, _, attribute = value.partition(":") if isinstance(value, str) else ("", "", "")
    return all(part.isidentifier() for part in (*module.split("."), attribute))


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_speed(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _are_ranks(value: Any) -> bool:
    shape = value if isinstance(value, (list, tuple)) else [value]
    return len(shape) in (1, 2) and all(map(_is_count, shape))


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)


_Kind = tuple[Callable[[Any], bool], str]

_NAME: _Kind = (_is_name, "'module:attribute'")
_TABLE: _Kind = (lambda value: isinstance(value, dict), "a table")
_SPEED: _Kind = (_is_speed, "a positive number")
_BOOL: _Kind = (lambda value: isinstance(value, bool), "true or false")
_DTYPE: _Kind = (_is_dtype, "a dtype of torch")
_COUNT: _Kind = (_is_count, "a positive whole number")

# What the values of the keys must be.
_KEYS: dict[str, _Kind] = {
    "model": _NAME,
    "arguments": _TABLE,
    "ranks": (_are_ranks, "a number of ranks, or [replicas, shards]"),
    "device": (lambda value: hasattr(torch, str(value).partition(":")[0]), "a device of torch"),
    "optimizer": _NAME,
    "loss": _NAME,
    "batch": (
        lambda value: isinstance(value, (dict, list)),
        "tables with shape and dtype, by name or in a list",
    ),
    "fully_shard": _TABLE,
    "flops": _SPEED,
    "bandwidth": _SPEED,
    "replica_bandwidth": _SPEED,
    "latency": (lambda value: value == 0 or _is_speed(value), "a number of at least 0"),
}
_SHARD_KEYS: dict[str, _Kind] = {
    "policy": (
        lambda value: _is_count(value) or (isinstance(value, list) and all(map(_is_name, value))),
        "a list of 'module:attribute', or a number of elements",
    ),
    "reshard_after_forward": (
        lambda value: isinstance(value, bool) or _is_count(value),
        "true, false or a number of ranks",
    ),
    "param_dtype": _DTYPE,
    "reduce_dtype": _DTYPE,
    "offload": _BOOL,
}
_TENSOR_KEYS: dict[str, _Kind] = {
    "shape": (
        lambda value: isinstance(value, list) and all(_is_count(one) or one == 0 for one in value),
        "a list of lengths",
    ),
    "dtype": _DTYPE,
}
_OVERRIDES: dict[str, _Kind] = {**_KEYS, **_SHARD_KEYS, "batch": _COUNT, "context": _COUNT}
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
    overrides = _checked(overrides, _OVERRIDES, " on the command line")
    config = _load(path)
    if "model_type" in config:
        return _hugging_face(path, overrides)
    config = _checked(config, _KEYS, "")
    for needed in ("model", "batch"):
        if needed not in config:
            raise ConfigError(f"Expected a key '{needed}' in {path}, got none")
    config |= {name: overrides[name] for name in _KEYS if name in overrides and name != "batch"}
    call = {name: config[name] for name in _PASSED_ON if name in config}
    call["build_model"] = partial(_function(config, "model"), **config.get("arguments", {}))
    call["mesh_shape"] = config.get("ranks", 1)
    call["batch"] = _batch(config["batch"])
    if "optimizer" in config:
        call["optimizer"] = _named(config["optimizer"])
    if "loss" in config:
        call["loss"] = _function(config, "loss")
    return call | _sharding(config.get("fully_shard", {}), overrides)


def _checked(table: Mapping[str, Any], kinds: Mapping[str, _Kind], where: str) -> dict[str, Any]:
    """Return what a table says, without nulls.

    Raises:
        ConfigError: For keys that are not known, and values of other kinds than they must have.
    """
    unknown = sorted(set(table) - set(kinds))
    if unknown:
        raise ConfigError(f"Expected keys out of {sorted(kinds)}{where}, got {unknown}")
    said = {name: value for name, value in table.items() if value is not None}
    for name, value in said.items():
        is_right, expected = kinds[name]
        if not is_right(value):
            raise ConfigError(f"Expected '{name}'{where} to be {expected}, got {value!r}")
    return said


def _load(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
        config = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"Expected a config to read, got {error}") from error
    except ValueError as error:
        raise ConfigError(f"Expected TOML or JSON in {path}, got {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"Expected keys and values in {path}, got {type(config).__name__}")
    return config


def _named(name: str) -> Any:
    """Import ``module:attribute``, also from the current folder."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError:
        raise
    except Exception as error:
        raise ImportError(
            f"Expected to import module '{module}', got {_described(error)}"
        ) from error
    if not hasattr(found, attribute):
        raise ConfigError(f"Expected '{attribute}' in module '{module}', got none")
    return getattr(found, attribute)


def _function(config: Mapping[str, Any], key: str) -> Callable[..., Any]:
    found = _named(config[key])
    if not callable(found):
        raise ConfigError(f"Expected '{key}' to name a function or a class, got {found!r}")
    return cast(Callable[..., Any], found)


def _described(error: Exception) -> str:
    """Say what was raised, and where."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}, raised at {place.filename}:{place.lineno}"


def _batch(described: Any) -> Callable[[], Any]:
    """Return what makes the batch that is described by shapes and dtypes."""
    if isinstance(described, Mapping):
        makers = {name: _tensor(one) for name, one in described.items()}
        return lambda: {name: make() for name, make in makers.items()}
    listed = list(map(_tensor, described))
    return lambda: tuple(make() for make in listed)


def _tensor(described: Any) -> Callable[[], torch.Tensor]:
    if not isinstance(described, Mapping) or described.get("shape") is None:
        raise ConfigError(f"Expected a table with shape and dtype in batch, got {described!r}")
    said = _checked(described, _TENSOR_KEYS, " in batch")
    return partial(torch.zeros, said["shape"], dtype=getattr(torch, said.get("dtype", "float32")))


def _sharding(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    said = {**_checked(config, _SHARD_KEYS, " in fully_shard"), **overrides}
    names = ("policy", "reshard_after_forward")
    call = {name: said[name] for name in names if name in said}
    if isinstance(call.get("policy"), list):
        call["policy"] = tuple(map(_named, call["policy"]))
        for one in call["policy"]:
            if not isinstance(one, type) or not issubclass(one, nn.Module):
                raise ConfigError(
                    f"Expected 'policy' in fully_shard to name classes of modules, got {one!r}"
                )
    if said.get("offload"):
        call["offload_policy"] = CPUOffloadPolicy()
    names = ("param_dtype", "reduce_dtype")
    dtypes = {name: getattr(torch, said[name]) for name in names if name in said}
    try:
        if dtypes:
            call["mp_policy"] = MixedPrecisionPolicy(**dtypes)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
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
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"Expected a config of Hugging Face in {path}, got {error}") from error
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
        said = {name: value for name, value in vars(args).items() if value is not None}
        call = read_config(args.config, {n: said[n] for n in _OVERRIDES if n in said})
    except ConfigError as error:
        return _fail(error, WRONG_ARGUMENTS)
    except ImportError as error:
        return _fail(error, FAILED)
    try:
        result = estimate(**call)
    except (TypeError, ValueError, RuntimeError) as error:
        return _fail(error, FAILED)
    except Exception as error:  # noqa: BLE001 - whatever the user's functions raise
        return _fail(_described(error), FAILED)
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        _show(result)
    return OK


def _fail(error: Exception | str, code: int) -> int:
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    print(f"composable-shard estimate: {error}{notes}", file=sys.stderr)
    return code


def _show(result: Any) -> None:
    """Print by rich where it is there and somebody looks, else as plain text."""
    show: Callable[[Any], None] = print
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console

            show = Console().print
    show(result)


def _ranks(text: str) -> int | tuple[int, ...]:
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"Expected a number of ranks or REPLICASxSHARDS, got {text!r}"
        )
    return tuple(map(int, parts)) if len(parts) > 1 else int(text)
