"""Train a small byte-level GPT with its parameters sharded over ranks.

    python examples/train_lm.py                          two ranks on the CPU, or one on each GPU
    python examples/train_lm.py --resume                 resume from the newest checkpoint
    python examples/train_lm.py --optimizer muon         use Muon for the matrices of the blocks
    python examples/train_lm.py --wire int8              send int8 instead of fp32
    torchrun --nproc-per-node 4 examples/train_lm.py     on the ranks that torchrun starts

With ``torchrun --max-restarts``, ranks resume from the newest checkpoint after one of them died.

``build`` shards the model: it calls ``fully_shard`` on each block, then on the root. ``--trace
FOLDER`` records a timeline of a few steps. The rest is a training loop as for one device: AdamW, a
schedule, gradient clipping, checkpoints by ``torch.distributed.checkpoint``. The model, the text
and the start of ranks are in ``lm/``.

Initial weights and batches do not depend on the number of ranks, so with another number of ranks
losses differ only by rounding. On the CPU, repeated runs of the same command give bitwise the same
losses, and so does a run that was stopped (``--stop-at``) and resumed. They are in the file
``losses.jsonl`` in the folder of the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Muon, Optimizer

from composable_shard import BlockFormat, MixedPrecisionPolicy, fully_shard, trace
from composable_shard.insight.trace import Timeline
from composable_shard.optim import Owned, Rows, Sharded, with_layout
from int8_gradients import send_int8_gradients
from lm.checkpoint import Progress, RunFolder
from lm.model import GPT
from lm.options import Options, read_options
from lm.ranks import Place, run_on_ranks
from lm.report import Summary, Ticker, local_nbytes, on_every_rank, peak_memory
from lm.text import NO_TARGET, Text, held_out_batches, load_text, training_batch

UNTRACED_STEPS, TRACED_STEPS = 10, 3
MUON_LR = 5.0
"""Muon's learning rate, relative to AdamW's. ``match_rms_adamw`` scales Muon's updates to a root
mean square of a fifth of the learning rate, but AdamW's first updates are five times as large."""


def build(options: Options, place: Place) -> GPT:
    """Build the model and shard it over all ranks."""
    torch.manual_seed(options.seed)  # every rank draws the same weights and keeps its shard
    model = GPT(options.layers, options.width, options.heads, options.context).to(place.device)
    if options.int8_gradients:
        send_int8_gradients(model)
    mesh = init_device_mesh(place.device.type, (place.num_ranks,))
    wire = None if options.wire is None else getattr(torch, options.wire)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, options.param_dtype),
        reduce_dtype=torch.float32,
        gather_wire=wire,
        reduce_wire=unbiased(wire),
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def unbiased(wire: torch.dtype | None) -> torch.dtype | BlockFormat | None:
    """Return the format of gradients: 8-bit codes are rounded at random, so their mean is exact."""
    if wire is None or wire.itemsize > 1:
        return wire
    return BlockFormat(wire, stochastic=True)


def make_optimizer(model: GPT, options: Options) -> Optimizer:
    """Make the optimizer: AdamW for all parameters, or Muon for the matrices of the blocks.

    With Muon, each rank steps some whole matrices. Queries, keys and values are separate matrices.
    """
    adamw = partial(AdamW, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if options.optimizer == "adamw":
        return adamw(model.parameters())
    muon = partial(Muon, lr=MUON_LR * options.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return with_layout(
        model,
        {
            "blocks.*.qkv.weight": Rows(muon, split_sizes=(options.width,) * 3),
            lambda name, weight: name.startswith("blocks.") and weight.ndim == 2: Owned(muon),
            "*": Sharded(adamw),
        },
    )


def learning_rate(step: int, options: Options) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine decay to a tenth."""
    rising = (step + 1) / options.warmup
    falling = 0.55 + 0.45 * math.cos(math.pi * step / options.steps)
    return options.lr * min(rising, falling)


@dataclass(frozen=True)
class Training:
    """The model, optimizer and text of a rank."""

    options: Options
    place: Place
    text: Text
    model: GPT
    optimizer: Optimizer

    @property
    def num_rows(self) -> int:
        """Number of this rank's rows of a batch."""
        return self.options.batch // self.place.num_ranks

    def update(self, step: int) -> float:
        """Take a step; return the loss of its whole batch, in nats per byte."""
        first_row = self.place.rank * self.num_rows
        inputs, targets = training_batch(
            self.text.train,
            self.options.context,
            rows=range(first_row, first_row + self.num_rows),
            num_rows=self.options.batch,
            seed=self.options.seed,
            step=step,
        )
        for group in self.optimizer.param_groups:
            is_muon = "ns_steps" in group
            group["lr"] = learning_rate(step, self.options) * (MUON_LR if is_muon else 1.0)
        loss = self.loss(inputs, targets) / targets.numel()
        loss.backward()
        clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum_over_ranks(loss.detach()) / self.place.num_ranks

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss in nats, summed over all targets except ``NO_TARGET``."""
        logits = self.model(inputs.to(self.place.device)).float().flatten(0, 1)
        targets = targets.to(self.place.device).flatten()
        return F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum")

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss on the held-out text, in nats per byte; each rank does its share."""
        total = torch.zeros((), dtype=torch.float64, device=self.place.device)
        for inputs, targets in held_out_batches(
            self.text.held_out,
            self.options.context,
            self.num_rows,
            self.place.rank,
            self.place.num_ranks,
        ):
            total += self.loss(inputs, targets)
        return sum_over_ranks(total) / (len(self.text.held_out) - 1)

    @torch.no_grad()
    def sample(self, prompt: bytes) -> bytes:
        """Generate text from a prompt.

        Every rank takes part, because each forward gathers, and draws the same bytes.
        """
        generator = torch.Generator().manual_seed(self.options.seed)
        written = list(prompt)
        for _ in range(self.options.sample_bytes):
            window = torch.tensor([written[-self.options.context :]], device=self.place.device)
            logits = self.model(window)[0, -1].float().cpu()
            chances = torch.softmax(logits / self.options.temperature, dim=-1)
            written.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(written[len(prompt) :])


def sum_over_ranks(value: Tensor) -> float:
    """Return the sum over ranks of a number. Collective: one all-reduce."""
    dist.all_reduce(value)
    return value.item()


def recording(model: GPT, options: Options) -> AbstractContextManager[Timeline | None]:
    """Return a context that records a timeline of a few steps, if the options ask for it."""
    if options.trace is None:
        return nullcontext()
    skip = min(UNTRACED_STEPS, options.steps // 2)
    return trace(model, options.trace, skip=skip, steps=TRACED_STEPS)


def train(options: Options, place: Place) -> None:
    """Train on one rank, from the start or from the newest checkpoint, and report."""
    model = build(options, place)
    parameters = list(model.parameters())
    optimizer = make_optimizer(model, options)
    text = load_text(options.text, options.context)
    training = Training(options, place, text, model, optimizer)

    folder = RunFolder(options.checkpoint_dir)
    if options.resume:
        progress = folder.load(model, optimizer)
    else:
        progress = Progress(step=0, loss_before=training.held_out_loss())
        if place.leads:
            folder.begin(options.decisive(text.digest), options.overwrite)

    ticker = Ticker(place, options.steps, progress.step, options.batch * options.context)
    with recording(model, options) as timeline:
        for step in range(progress.step, options.stop_at):
            loss = training.update(step)
            if timeline:
                timeline.step()
            ticker.tick(loss)
            if place.leads:
                folder.record(step + 1, loss)
            if ticker.step % options.log_every == 0 or ticker.step == options.stop_at:
                ticker.write_line(loss, learning_rate(step, options))
            if ticker.step % options.checkpoint_every == 0 or ticker.step == options.stop_at:
                folder.save(model, optimizer, Progress(ticker.step, progress.loss_before))
    ticker.close()

    summary = Summary(
        loss_before=progress.loss_before,
        loss_after=training.held_out_loss(),
        unsharded_nbytes=sum(parameter.numel() * parameter.itemsize for parameter in parameters),
        sharded_nbytes=on_every_rank(local_nbytes(parameters)),
        prompt=options.prompt.encode(),
        sample=training.sample(options.prompt.encode()),
        peaks=on_every_rank(peak_memory(place.device)),
    )
    if place.leads:
        summary.show()
        if options.trace and (page := options.trace / "timeline.html").exists():
            print(f"timeline of {TRACED_STEPS} steps: {page}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and train on every rank."""
    options = read_options(arguments)
    run_on_ranks(partial(train, options), options.ranks, options.device)


if __name__ == "__main__":
    main()
