"""Train on several nodes with Ray Train.

    RAY_TRAIN_V2_ENABLED=1 python examples/launch/ray_train.py --workers 16 --gpus \
        --storage /shared/ray -- --checkpoint-dir /shared/run

Run it on a Ray cluster with this repository installed on all nodes. Arguments after ``--`` are
options of ``train.py``. If a worker or its node dies, Ray restarts all workers, on other nodes if
necessary, and they resume from the newest checkpoint. All workers write the sharded checkpoints of
``train.py`` into a folder that all of them see. Ray's own checkpoints are not used.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def train_on_worker(config: dict[str, Any]) -> None:
    """Train on one worker; Ray has started the process group."""
    sys.path.insert(0, config["folder"])
    importlib.import_module("train").main(config["arguments"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on Ray workers."""
    options = read_options(arguments)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"arguments": options.arguments, "folder": str(HERE)},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if options.gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(
            name="train",
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    )
    trainer.fit()


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train on the workers of Ray.")
    parser.add_argument("--workers", type=int, default=2, help="number of workers, each one rank")
    parser.add_argument("--gpus", action="store_true", help="give each worker a GPU")
    parser.add_argument("--storage", help="folder for Ray's files")
    parser.add_argument("--max-failures", type=int, default=10, help="restarts; -1: unlimited")
    parser.add_argument("arguments", nargs="*", help="options of train.py, after --")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
