"""Train two towers on ranks that have different amounts of pictures and text.

    python examples/two_towers.py                        three ranks on the CPU, or one on each GPU
    python examples/two_towers.py --check                compare with one unsharded process
    python examples/two_towers.py --text-only            train without the pictures
    torchrun --nproc-per-node 4 examples/two_towers.py   on the ranks that torchrun starts

The model predicts captions byte by byte, and looks at the picture of a caption if there is one.
Ranks differ in three ways, and each way needs one function:

- A rank without a picture in its batch calls ``sit_out`` instead of the picture tower.
- A rank that has no more batches still takes part in the steps of the others, by ``uneven``.
- Batches have different numbers of bytes: ``weigh`` averages gradients over all bytes.

The result is the same as if one process trained on the batches of all ranks together. With
``--check``, such a process also trains, and the losses of all steps are compared. All computation
is in float64, so that rounding does not hide a difference. On the CPU, repeated runs of the same
command give bitwise the same losses. The model and the samples are in ``towers/``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from composable_shard import clip_grad_norm_, fully_shard, sit_out, uneven, weigh
from lm.ranks import Place, num_ranks_here, run_on_ranks
from towers.model import Skip, TwoTowers
from towers.samples import (
    NO_TARGET,
    Batch,
    Document,
    Sample,
    batches_of_rank,
    collate,
    draw_documents,
    draw_scene,
)

NUM_RANKS = 3  # on the CPU
LARGEST_NORM = 1.0
LARGEST_DIFFERENCE = 1e-9  # relative difference of losses that rounding may cause
DTYPE = torch.float64  # in float32, rounding becomes visible within hundreds of steps

Options = argparse.Namespace


def build(options: Options, skip: Skip) -> TwoTowers:
    """Build the model, with the same weights on each rank."""
    torch.manual_seed(options.seed)
    return TwoTowers(options.layers, options.width, options.heads, skip)


def shard(model: TwoTowers, place: Place) -> TwoTowers:
    """Shard the model over all ranks, with a group for each block."""
    mesh = init_device_mesh(place.device.type, (place.num_ranks,))
    for block in (*model.text.blocks, *model.pictures.blocks):
        fully_shard(block, mesh=mesh)
    for part in (model.text, model.pictures, model.head):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss in nats over all target bytes."""
    logits = model(batch.inputs, batch.pictures, batch.rows).flatten(0, 1)
    return F.cross_entropy(logits, batch.targets.flatten(), ignore_index=NO_TARGET)


class Training:
    """The model, optimizer and batches of a rank."""

    def __init__(self, options: Options, place: Place, documents: Sequence[Document]) -> None:
        self._options, self._place, self._documents = options, place, documents
        self.model = shard(build(options, sit_out).to(place.device, DTYPE), place)
        self._optimizer = AdamW(self.model.parameters(), lr=options.lr)
        self._schedule = CosineAnnealingLR(self._optimizer, options.epochs)
        self.losses: list[float] = []

    def train_epoch(self, epoch: int) -> float:
        """Train until no rank has another batch; keep the losses of steps, return their mean."""
        total = total_tokens = 0.0
        ranks = self._place.rank, self._place.num_ranks
        batches = batches_of_rank(self._documents, *ranks, epoch, self._options.tokens)
        for samples in uneven(self.model, batches):
            with weigh(self.model) as weighing:
                if samples is None:
                    num_tokens, loss = 0, sit_out(self.model)
                else:
                    batch = self._collate(samples)
                    num_tokens, loss = batch.num_tokens, loss_of(self.model, batch)
                weighing.add(num_tokens, loss).backward()
            clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.losses.append(weighing.loss)
            total += weighing.loss * weighing.total
            total_tokens += weighing.total
        self._schedule.step()
        return total / total_tokens

    @torch.no_grad()
    def held_out_loss(self, samples: Sequence[Sample]) -> float:
        """Return the mean loss of samples, in nats per byte; each rank does its share."""
        total = torch.zeros(2, dtype=torch.float64, device=self._place.device)
        ranks = self._place.rank, self._place.num_ranks
        documents = [[sample] for sample in samples]
        batches = batches_of_rank(documents, *ranks, 0, self._options.tokens)
        for batch_samples in uneven(self.model, batches):
            if batch_samples is None:
                sit_out(self.model)
                continue
            batch = self._collate(batch_samples)
            total[0] += loss_of(self.model, batch) * batch.num_tokens
            total[1] += batch.num_tokens
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def _collate(self, samples: Sequence[Sample]) -> Batch:
        return collate(samples, self._place.device, DTYPE)


def train_unsharded(
    options: Options, num_ranks: int, documents: Sequence[Document], device: torch.device
) -> list[float]:
    """Train one process, each step on the batches of all ranks together; return the losses."""
    model = build(options, skip=lambda tower: 0.0).to(device, DTYPE)
    optimizer = AdamW(model.parameters(), lr=options.lr)
    schedule = CosineAnnealingLR(optimizer, options.epochs)
    losses = []
    for epoch in range(options.epochs):
        batches_of_all = (
            batches_of_rank(documents, rank, num_ranks, epoch, options.tokens)
            for rank in range(num_ranks)
        )
        for batches in zip_longest(*batches_of_all, fillvalue=[]):
            batch = collate([sample for samples in batches for sample in samples], device, DTYPE)
            loss = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        schedule.step()
    return losses


def check(losses: Sequence[float], expected: Sequence[float]) -> None:
    """Compare the losses of all steps with those of the unsharded process.

    Raises:
        ArithmeticError: If they differ by more than rounding.
    """
    pairs = zip(losses, expected, strict=True)
    difference = max(abs(loss - target) / target for loss, target in pairs)
    print(f"largest difference from one unsharded process: {difference:.1e}")
    if not difference <= LARGEST_DIFFERENCE:
        raise ArithmeticError(
            f"Expected losses that differ by at most {LARGEST_DIFFERENCE:.0e}, got {difference:.1e}"
        )


def without_pictures(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples without their pictures."""
    return [Sample(sample.text) for sample in samples]


def describe(options: Options, documents: Sequence[Document], num_ranks: int) -> None:
    """Print the number and sizes of each rank's batches in the first epoch."""
    for rank in range(num_ranks):
        batches = batches_of_rank(documents, rank, num_ranks, 0, options.tokens)
        num_tokens = [sum(sample.num_tokens for sample in batch) for batch in batches]
        blind = sum(all(sample.picture is None for sample in batch) for batch in batches)
        print(
            f"rank {rank}: {len(batches)} batches, {blind} of them without a picture, "
            f"of {min(num_tokens, default=0)} to {max(num_tokens, default=0)} bytes"
        )


def train(options: Options, place: Place) -> None:
    """Train on one rank, and report."""
    documents = draw_documents(options.documents, options.seed)
    if options.text_only:
        documents = [without_pictures(document) for document in documents]
    source = random.Random(f"held out {options.seed}")
    held_out = [draw_scene(source) for _ in range(options.held_out)]
    if place.leads:
        describe(options, documents, place.num_ranks)

    training = Training(options, place, documents)
    for epoch in range(options.epochs):
        loss = training.train_epoch(epoch)
        if place.leads:
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)

    held_out_losses = {"without": training.held_out_loss(without_pictures(held_out))}
    if not options.text_only:
        held_out_losses["with"] = training.held_out_loss(held_out)
    if not place.leads:
        return
    for what, loss in held_out_losses.items():
        print(f"held-out captions {what} pictures: {loss:.3f} nats per byte")
    report = {"losses": training.losses, "held_out": held_out_losses}
    if options.check:
        expected = train_unsharded(options, place.num_ranks, documents, place.device)
        report["unsharded"] = expected
    if options.json:
        options.json.write_text(json.dumps(report))
    if options.check:
        check(training.losses, expected)


def read_options(arguments: Sequence[str] | None) -> Options:
    """Read the command line; exit with a message and status 2 if it is wrong."""
    parser = argparse.ArgumentParser(
        description="Train two towers on ranks with different amounts of pictures and text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=6, help="passes through the documents")
    add("--documents", type=int, default=120, help="albums and sheets to train on")
    add("--held-out", type=int, default=120, help="held-out captions")
    add("--tokens", type=int, default=512, help="bytes of a rank's batch, at most")
    add("--layers", type=int, default=1, help="blocks of each tower")
    add("--width", type=int, default=64, help="features of a byte, and of a patch")
    add("--heads", type=int, default=4, help="attention heads")
    add("--lr", type=float, default=4e-3, help="highest learning rate")
    add("--seed", type=int, default=0, help="seed of the weights and the samples")
    add("--ranks", type=int, help=f"ranks to start; by default {NUM_RANKS}, or one per GPU")
    add("--device", choices=("cpu", "cuda"), help="device; by default a GPU if there is one")
    add("--text-only", action="store_true", help="train without the pictures")
    add("--check", action="store_true", help="also train one unsharded process, and compare")
    add("--json", type=Path, help="file for the losses")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    asked = options.ranks or (NUM_RANKS if options.device == "cpu" else None)
    try:
        options.ranks = num_ranks_here(asked, options.device)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and train on every rank."""
    options = read_options(arguments)
    run_on_ranks(partial(train, options), options.ranks, options.device)


if __name__ == "__main__":
    main()
