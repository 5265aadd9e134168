"""The values of a checkpoint on their way into a model, tensor by tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import _torch
from composable_shard.train.full_values import same_bits
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import Entry
from composable_shard.train.weights.files import Reader, Stored
from composable_shard.train.weights.matching import Match
from composable_shard.train.weights.materialize import materialize
from composable_shard.train.weights.parts import Box, Parts
from composable_shard.train.weights.progress import Progress


class Reading:
    """Reads what was matched.

    A rank that fails goes on to receive and to send, so that the others do not wait for it.

    Args:
        matches: What goes where; the same on all ranks.
        ranks: The ranks that take part.
        strict: Whether tied names must hold the same values.

    Attributes:
        nbytes: How many bytes the tensors have, in the files.
        failure: What went wrong first on this rank, if anything.
    """

    def __init__(self, matches: Sequence[Match], ranks: Ranks, *, strict: bool) -> None:
        files = {stored.file: None for match in matches for stored in match.stored}
        order = {file: place for place, file in enumerate(files)}
        self._matches = sorted(matches, key=lambda match: order[match.stored[0].file])
        self._ranks = ranks
        self._strict = strict
        self._parts = Parts()
        self.nbytes = sum(stored.nbytes for match in matches for stored in match.stored)
        self.failure: str | None = None
        self._buffer: torch.Tensor | None = None

    def run(self, model: nn.Module, bar: Progress, *, sends: bool) -> str | None:
        """Read everything.

        Args:
            model: The model that the tensors are in.
            bar: Told what is done.
            sends: Whether the first rank reads and sends to the others.

        Returns:
            What went wrong on this rank, if anything.

        Collective: with ``sends`` a broadcast of each tensor.
        """
        with torch.inference_mode(False), torch.no_grad(), Reader() as reader:
            with self._noting():
                materialize(model, [match.entry for match in self._matches])
            for match in self._matches:
                for stored in match.stored:
                    full = self._sent(stored, reader) if sends else None
                    if self.failure is None:
                        with self._noting():
                            self._fill(match, stored, full, reader)
                    elif not sends:
                        return self.failure
                    bar.advance(stored.nbytes)
        return self.failure

    def _fill(
        self, match: Match, stored: Stored, full: torch.Tensor | None, reader: Reader
    ) -> None:
        """Write this rank's part of a tensor, or compare it if a tied name has filled it."""
        is_again = self._strict and stored is not match.stored[0]
        for target, box in self._targets(match.entry):
            piece = reader.read(stored, box) if full is None else full[box]
            piece = piece.reshape(target.shape)
            if not is_again:
                target.copy_(piece)
            elif not same_bits(target, piece.to(target.device, target.dtype)):
                raise ValueError(
                    f"Expected '{match.stored[0].name}' and '{stored.name}', which the model "
                    "ties, to hold the same, got different values"
                )

    def _targets(self, entry: Entry) -> Iterator[tuple[torch.Tensor, Box]]:
        plain = entry.plain
        assert plain is not None
        for box, own in self._parts.boxes(entry.tensor):
            yield plain[own], box

    def _sent(self, stored: Stored, reader: Reader) -> torch.Tensor:
        """Return a full tensor, read by the first rank. Collective: a broadcast of its bytes."""
        group, sent = self._ranks.group, self._room(stored.nbytes)
        if self._ranks.is_first and self.failure is None and len(sent):
            with self._noting():
                full = reader.read(stored, tuple(slice(0, length) for length in stored.shape))
                own = full.reshape(-1).view(torch.uint8)
                sent = own if sent.device == own.device else sent.copy_(own)
        if group is not None and len(sent):
            with self._ranks.naming_failures():
                dist.broadcast(sent, group=group, group_src=0)
        return sent.view(stored.dtype).view(stored.shape)

    def _room(self, nbytes: int) -> torch.Tensor:
        """Return bytes to receive into: always the same ones, where the ranks communicate."""
        if self._buffer is None:
            largest = max(one.nbytes for match in self._matches for one in match.stored)
            device, group = torch.device("cpu"), self._ranks.group
            if group is not None:
                device = _torch.device_for(group, device)
            self._buffer = _torch.empty(largest, dtype=torch.uint8, device=device)
        return self._buffer[:nbytes]

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep the text of an exception within, for all ranks to hear of at the end."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever it is)
            self.failure = f"{type(error).__name__}: {error}"
