r"""Compute the memory and the time of a training step, without the ranks.

Examples:
  composable-shard estimate train.toml
  composable-shard estimate train.toml --ranks 512 --json
  composable-shard estimate train.toml --ranks 16x8 --flops 4e14 --bandwidth 5e10
  composable-shard estimate ./llama/config.json --ranks 64 --batch 4 --context 2048 \
      --param-dtype bfloat16 --reduce-dtype float32

train.toml needs only `model` and `batch`; JSON with the same keys works too:
  model = "my_package.models:build"          # a function or class; see also `arguments`
  arguments = { layers = 32 }                # its keyword arguments
  ranks = [16, 8]                            # replicas and shards, or one number
  device = "cuda"                            # or "cpu"
  optimizer = "torch.optim:AdamW"
  loss = "my_package.train:loss"             # takes the output and the batch
  flops = 4e14                               # per second; with bandwidth, adds the time
  bandwidth = 5e10                           # bytes per second
  [batch]                                    # keyword arguments of forward
  tokens = { shape = [4, 2048], dtype = "int64" }
  [fully_shard]
  policy = ["my_package.models:Block"]       # classes, or a number of elements
  reshard_after_forward = true               # or a number of ranks
  sharding = "zero3"                         # or "zero1", "zero2"
  param_dtype = "bfloat16"
  reduce_dtype = "float32"

A config.json of Hugging Face needs transformers, which builds the model.

Exit codes: 0 success, 1 the model cannot be built or run, 2 wrong arguments or config
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from composable_shard.cli import positive
from composable_shard.insight.estimate import estimate
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy

# The keys of the file -----------------------------------------------------------------------------


class ConfigError(Exception):
    """The config cannot be read, or has unknown keys or wrong values."""


class _Key(NamedTuple):
    """The values of a key.

    Attributes:
        expected: The accepted values, in words.
        fits: Whether a converted value is accepted.
        convert: Converts a value of the file, or raises.
    """

    expected: str
    fits: Callable[[Any], bool] = lambda _: True
    convert: Callable[[Any], Any] = lambda value: value


def _are_counts(values: Iterable[Any], least: int = 1) -> bool:
    return all(type(value) is int and value >= least for value in values)


def _import(name: Any) -> Any:
    """Import ``module:attribute``, also from the current folder."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError:
        raise
    except Exception as error:
        expected = f"Expected to import module '{module}'"
        raise ImportError(f"{expected}, got {_described(error)}") from error
    return getattr(found, attribute)


def _import_each(value: Any) -> Any:
    return tuple(map(_import, value)) if isinstance(value, list) else value


def _is_policy(policy: Any) -> bool:
    if isinstance(policy, tuple):
        return all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in policy)
    return _are_counts([policy])


def _mesh_shape(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = list(map(int, value.split("x")))
    return tuple(value) if isinstance(value, list) else (value,)


def _batch(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tensor(described) for name, described in value.items()}
    return tuple(map(_tensor, value))


def _tensor(described: Any) -> torch.Tensor:
    if not isinstance(described, dict) or described.get("shape") is None:
        raise ConfigError(f"Expected a table with shape and dtype in batch, got {described!r}")
    facts = _read(described, _TENSOR_KEYS, " in batch")
    return torch.empty(facts.pop("shape"), **facts, device="meta")


def _described(error: Exception) -> str:
    """Return the type of an error, its text, and the place that raised it."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}, raised at {place.filename}:{place.lineno}"


_TABLE = _Key("a table", lambda value: isinstance(value, dict))
_FUNCTION = _Key("'module:attribute' of a function or a class", callable, _import)
_DTYPE = _Key(
    "a dtype of torch", lambda dtype: isinstance(dtype, torch.dtype), partial(getattr, torch)
)
_RANKS = "a number of ranks, [replicas, shards] or 'REPLICASxSHARDS'"
_POLICY = "a list of 'module:attribute' of module classes, or a number of elements"
_RESHARDING = "true, false or a number of ranks"

_KEYS: dict[str, _Key] = {
    "model": _FUNCTION,
    "arguments": _TABLE,
    "ranks": _Key(_RANKS, lambda ranks: len(ranks) < 3 and _are_counts(ranks), _mesh_shape),
    "optimizer": _Key("'module:attribute'", convert=_import),
    "loss": _FUNCTION,
    "batch": _Key("tables with shape and dtype, by name or in a list", convert=_batch),
    "fully_shard": _TABLE,
    # `estimate` checks these itself.
    **dict.fromkeys(("device", "flops", "bandwidth", "replica_bandwidth", "latency"), _Key("")),
}
_SHARD_KEYS: dict[str, _Key] = {
    "policy": _Key(_POLICY, _is_policy, _import_each),
    "reshard_after_forward": _Key(_RESHARDING, lambda v: isinstance(v, bool) or _are_counts([v])),
    "sharding": _Key("a string", lambda value: isinstance(value, str)),
    "param_dtype": _DTYPE,
    "reduce_dtype": _DTYPE,
    "offload": _Key("true or false", lambda value: isinstance(value, bool)),
}
_TENSOR_KEYS: dict[str, _Key] = {
    "shape": _Key("a list of lengths", lambda shape: _are_counts(shape, 0), tuple),
    "dtype": _DTYPE,
}


# The file -----------------------------------------------------------------------------------------


def read_config(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``estimate`` that a file describes.

    Args:
        path: A TOML or JSON file, or a folder with a ``config.json`` of Hugging Face.
        overrides: Values of the command line, which take precedence.

    Raises:
        ConfigError: If the file cannot be read, or has unknown keys or wrong values.
        ImportError: If a name in the file, or ``transformers``, cannot be imported.
    """
    config, overrides = _load(path), dict(overrides)
    shape = overrides.pop("batch", 1), overrides.pop("context", 1)
    if "model_type" in config:
        call = _hugging_face(path, shape)
    else:
        call = _read(config, _KEYS)
        for needed in ("model", "batch"):
            if needed not in call:
                raise ConfigError(f"Expected a key '{needed}' in {path}, got none")
        call["build_model"] = partial(call.pop("model"), **call.pop("arguments", {}))
        call |= _read(call.pop("fully_shard", {}), _SHARD_KEYS, " in fully_shard")
    call |= _read(overrides, _KEYS | _SHARD_KEYS, " on the command line")
    call["mesh_shape"] = call.pop("ranks", 1)
    if call.pop("offload", False):
        call["offload_policy"] = CPUOffloadPolicy()
    dtypes = {name: call.pop(name) for name in ("param_dtype", "reduce_dtype") if name in call}
    return {**call, "mp_policy": MixedPrecisionPolicy(**dtypes)} if dtypes else call


def _read(table: Mapping[str, Any], keys: Mapping[str, _Key], where: str = "") -> dict[str, Any]:
    """Return the converted values of a table, without nulls.

    Raises:
        ConfigError: For unknown keys, and for values that do not fit.
    """
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise ConfigError(f"Expected keys out of {sorted(keys)}{where}, got {unknown}")
    values = {name: value for name, value in table.items() if value is not None}
    for name, value in values.items():
        fits, key = False, keys[name]
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            values[name] = key.convert(value)
            fits = key.fits(values[name])
        if not fits:
            raise ConfigError(f"Expected '{name}'{where} to be {key.expected}, got {value!r}")
    return values


def _load(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
        config = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Expected TOML or JSON in {path}, got {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"Expected keys and values in {path}, got {type(config).__name__}")
    return config


def _hugging_face(path: Path, shape: tuple[int, int]) -> dict[str, Any]:
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

    def build() -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        return model.train()

    names = ("input_ids", "labels")
    batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in names}
    return {"build_model": build, "batch": batch}


# The command --------------------------------------------------------------------------------------

OK, FAILED, WRONG_ARGUMENTS = 0, 1, 2


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    config = "a .toml or .json file, or a folder with a config.json of Hugging Face"
    parser.add_argument("config", type=Path, help=config)
    parser.add_argument("--ranks", help="a number of ranks or REPLICASxSHARDS")
    batch, context = "sequences of a rank (Hugging Face)", "tokens of each sequence (Hugging Face)"
    parser.add_argument("--batch", type=positive, default=1, help=batch)
    parser.add_argument("--context", type=positive, default=1024, help=context)
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--param-dtype", metavar="DTYPE", help="dtype of compute")
    parser.add_argument("--reduce-dtype", metavar="DTYPE", help="dtype of reductions")
    parser.add_argument("--flops", type=float, help="floating-point operations per second")
    parser.add_argument("--bandwidth", type=float, help="bytes that a rank sends per second")
    parser.add_argument("--replica-bandwidth", type=float, help="the same between replicas")
    parser.add_argument("--latency", type=float, help="additional seconds per launch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the estimate of the arguments; return the exit code."""
    others = ("command", "config", "json", "run")
    given = {n: v for n, v in vars(args).items() if v is not None and n not in others}
    code = WRONG_ARGUMENTS
    try:
        call = read_config(args.config, given)
        build_model = call.pop("build_model")

        def build() -> nn.Module:
            nonlocal code
            code = FAILED  # the arguments were right
            return build_model()

        result = estimate(build, **call)
    except Exception as error:  # noqa: BLE001 - user functions may raise anything
        is_clear = isinstance(
            error, (ConfigError, ImportError, TypeError, ValueError, RuntimeError)
        )
        text = str(error) if is_clear else _described(error)
        text = "\n".join([text, *getattr(error, "__notes__", ())])
        print(f"composable-shard estimate: {text}", file=sys.stderr)
        return FAILED if isinstance(error, ImportError) else code
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        _show(result)
    return OK


def _show(result: Any) -> None:
    """Print with rich to a terminal, if rich is installed; else print plain text."""
    show: Callable[[Any], None] = print
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console

            show = Console().print
    show(result)
