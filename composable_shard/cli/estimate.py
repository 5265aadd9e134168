"""``composable-shard estimate``: the memory and the time of a step, from a config file."""

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
from typing import Any

import torch
from torch import nn

from composable_shard.cli import positive
from composable_shard.insight.estimate import estimate
from composable_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy

# Values of the file: each function converts a value or raises -------------------------------------


class ConfigError(ValueError):
    """The config cannot be read, or has unknown keys or wrong values."""


def _require(is_right: bool) -> None:
    if not is_right:
        raise ValueError


def _imported(name: Any) -> Any:
    """Import ``module:attribute``, also from the current folder."""
    module, _, attribute = name.partition(":")
    _require(all(part.isidentifier() for part in (*module.split("."), attribute)))
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


def _function(name: Any) -> Any:
    found = _imported(name)
    _require(callable(found))
    return found


def _of_type(kind: type, value: Any) -> Any:
    _require(isinstance(value, kind))
    return value


def _count(value: Any, least: int = 1) -> int:
    _require(type(value) is int and value >= least)
    return int(value)


def _ranks(value: Any) -> tuple[int, ...]:
    shape = value if isinstance(value, (list, tuple)) else [value]
    _require(len(shape) in (1, 2))
    return tuple(map(_count, shape))


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError
    return dtype


def _policy(value: Any) -> int | tuple[type[nn.Module], ...]:
    if not isinstance(value, list):
        return _count(value)
    classes = tuple(map(_imported, value))
    _require(all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in classes))
    return classes


def _resharding(value: Any) -> bool | int:
    return value if isinstance(value, bool) else _count(value)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_count(length, 0) for length in _of_type(list, value))


def _batch(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tensor(described) for name, described in value.items()}
    return tuple(map(_tensor, _of_type(list, value)))


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


_Kind = tuple[Callable[[Any], Any], str]

_TABLE: _Kind = (partial(_of_type, dict), "a table")
_FUNCTION: _Kind = (_function, "'module:attribute' of a function or a class")
_DTYPE: _Kind = (_dtype, "a dtype of torch")
_PASSED_ON = ("device", "flops", "bandwidth", "replica_bandwidth", "latency")
"""Keys that ``estimate`` checks itself."""

_KEYS: dict[str, _Kind] = {
    "model": _FUNCTION,
    "arguments": _TABLE,
    "ranks": (_ranks, "a number of ranks, or [replicas, shards]"),
    "optimizer": (_imported, "'module:attribute'"),
    "loss": _FUNCTION,
    "batch": (_batch, "tables with shape and dtype, by name or in a list"),
    "fully_shard": _TABLE,
    **{name: (lambda value: value, "") for name in _PASSED_ON},
}
_SHARD_KEYS: dict[str, _Kind] = {
    "policy": (_policy, "a list of 'module:attribute' of module classes, or a number of elements"),
    "reshard_after_forward": (_resharding, "true, false or a number of ranks"),
    "param_dtype": _DTYPE,
    "reduce_dtype": _DTYPE,
    "offload": (partial(_of_type, bool), "true or false"),
}
_TENSOR_KEYS: dict[str, _Kind] = {
    "shape": (_shape, "a list of lengths"),
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


def _read(table: Mapping[str, Any], kinds: Mapping[str, _Kind], where: str = "") -> dict[str, Any]:
    """Return the values of a table, without nulls.

    Raises:
        ConfigError: For unknown keys, and for values of the wrong kind.
    """
    unknown = sorted(set(table) - set(kinds))
    if unknown:
        raise ConfigError(f"Expected keys out of {sorted(kinds)}{where}, got {unknown}")
    values = {}
    for name, value in table.items():
        convert, expected = kinds[name]
        try:
            if value is not None:
                values[name] = convert(value)
        except ConfigError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            text = f"Expected '{name}'{where} to be {expected}, got {value!r}"
            raise ConfigError(text) from error
    return values


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

_EXAMPLES = """
examples:
  composable-shard estimate train.toml
  composable-shard estimate train.toml --ranks 512 --json
  composable-shard estimate train.toml --ranks 16x8 --flops 4e14 --bandwidth 5e10
  composable-shard estimate ./llama/config.json --ranks 64 --batch 4 --context 2048 \\
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
  param_dtype = "bfloat16"
  reduce_dtype = "float32"

A config.json of Hugging Face needs transformers, which builds the model.

exit codes: 0 success, 1 the model cannot be built or run, 2 wrong arguments or config
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its arguments."""
    parser.description = "Compute the memory and the time of a training step, without the ranks."
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "config",
        type=Path,
        help="a .toml or .json file, or a folder with a config.json of Hugging Face",
    )
    parser.add_argument("--ranks", type=_ranks_of, help="a number of ranks or REPLICASxSHARDS")
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


def _ranks_of(text: str) -> tuple[int, ...]:
    try:
        ranks = _ranks([int(number) for number in text.split("x")])
    except ValueError as error:
        expected = f"Expected a number of ranks or REPLICASxSHARDS, got {text!r}"
        raise argparse.ArgumentTypeError(expected) from error
    return ranks


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
        if isinstance(error, ImportError):
            code = FAILED
        is_clear = isinstance(error, (ImportError, TypeError, ValueError, RuntimeError))
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        text = f"{error if is_clear else _described(error)}{notes}"
        print(f"composable-shard estimate: {text}", file=sys.stderr)
        return code
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
