"""The command line of the example, and checks before any rank starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lm.checkpoint import RunFolder, Settings
from lm.ranks import is_restarted, num_ranks_here
from lm.text import load_text

# The losses depend on these options: a resumed run must have the same values.
DECISIVE = (
    *("steps", "batch", "optimizer", "lr", "warmup", "clip", "seed"),
    *("layers", "width", "heads", "context", "device", "param_dtype", "int8_gradients"),
    "wire",
)


@dataclass(frozen=True)
class Options:
    """The command line; ``_parser`` explains each option."""

    steps: int
    batch: int
    optimizer: str
    lr: float
    warmup: int
    clip: float
    seed: int
    text: Path | None
    layers: int
    width: int
    heads: int
    context: int
    ranks: int
    device: str
    param_dtype: str
    int8_gradients: bool
    wire: str | None
    checkpoint_dir: Path
    checkpoint_every: int
    resume: bool
    overwrite: bool
    stop_at: int
    log_every: int
    sample_bytes: int
    prompt: str
    temperature: float
    trace: Path | None

    def decisive(self, digest: str) -> Settings:
        """Return all values on which the losses depend, with the digest of the text."""
        return {name: getattr(self, name) for name in DECISIVE} | {"text": digest}


def read_options(arguments: Sequence[str] | None) -> Options:
    """Read and check the command line; exit with a message and status 2 if it is wrong."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    if values["device"] == "auto":
        values["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    values["stop_at"] = min(values["steps"], values["stop_at"] or values["steps"])
    try:
        values["ranks"] = num_ranks_here(values["ranks"], values["device"])
        if is_restarted():  # by torchrun: resume from the newest checkpoint
            values["resume"] = RunFolder(values["checkpoint_dir"]).newest() is not None
            values["overwrite"] = not values["resume"]
        options = Options(**values)
        _refuse(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def _refuse(options: Options) -> None:
    if options.batch % options.ranks:
        raise ValueError(
            f"Expected --batch to be a multiple of the {options.ranks} ranks, got {options.batch}"
        )
    if options.width % (2 * options.heads):
        raise ValueError(
            f"Expected --width to be a multiple of twice the {options.heads} --heads, "
            f"got {options.width}"
        )
    if not options.prompt and options.sample_bytes:
        raise ValueError("Expected a --prompt of at least one byte, got none")
    text = load_text(options.text, options.context)
    folder = RunFolder(options.checkpoint_dir)
    if options.resume:
        folder.refuse_other_run(options.decisive(text.digest))
    elif not options.overwrite:
        folder.refuse_overwriting()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]",
        description="Train a small byte-level GPT with its parameters sharded over ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    training = parser.add_argument_group("training").add_argument
    training("--steps", type=_positive, default=200, help="steps of the whole run")
    training("--batch", type=_positive, default=16, help="rows of a step, over all ranks")
    training(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="with muon, Muon steps the matrices of the blocks, and AdamW the rest",
    )
    training("--lr", type=float, default=3e-3, help="highest learning rate of AdamW")
    training("--warmup", type=_positive, default=20, help="steps until the highest learning rate")
    training("--clip", type=float, default=1.0, help="largest norm of the gradient")
    training("--seed", type=int, default=0, help="seed of weights, batches and sample")
    training("--text", type=Path, help="file to train on; by default the documentation of Python")

    model = parser.add_argument_group("model").add_argument
    model("--layers", type=_positive, default=4, help="blocks")
    model("--width", type=_positive, default=128, help="features of a position")
    model("--heads", type=_positive, default=4, help="attention heads of a block")
    model("--context", type=_positive, default=128, help="bytes of a row")

    ranks = parser.add_argument_group("ranks").add_argument
    ranks(
        "--ranks",
        type=_positive,
        help="ranks to start; by default 2, or one per GPU; ignored under torchrun",
    )
    ranks("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    ranks("--param-dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in")
    ranks("--int8-gradients", action="store_true", help="send int8 instead of fp32 gradients")
    ranks("--wire", choices=("bfloat16", "float8_e4m3fn", "int8"), help="dtype of all messages")

    folder = parser.add_argument_group("checkpoints")
    folder.add_argument("--checkpoint-dir", type=Path, default=Path("runs/train_lm"), help="folder")
    folder.add_argument("--checkpoint-every", type=_positive, default=100, help="steps")
    folder.add_argument("--stop-at", type=_positive, help="end after this step, as if interrupted")
    start = folder.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    start.add_argument("--overwrite", action="store_true", help="drop an earlier run's checkpoints")

    output = parser.add_argument_group("output").add_argument
    output("--log-every", type=_positive, default=50, help="steps between two lines")
    output("--sample-bytes", type=int, default=300, help="bytes to write when training has ended")
    output("--prompt", default="The ", help="text that the sample continues")
    output("--temperature", type=float, default=0.7, help="temperature of the sample")
    output("--trace", metavar="FOLDER", type=Path, help="record a timeline of a few steps there")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number
