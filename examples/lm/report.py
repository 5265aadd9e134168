"""The output of a run: a progress bar and lines during training, then a table and a sample."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from lm.ranks import Place

MIB = 2**20


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: on its CUDA device, or resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def local_nbytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's shards of the parameters."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return sum(part.nbytes for part in local)


def on_every_rank(value: int) -> list[int]:
    """Return the value of each rank. Collective: one all-gather of an object."""
    values: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Ticker:
    """The progress bar, and the lines above it.

    Args:
        place: this rank; only rank 0 writes.
        num_steps: steps of the whole run.
        step: steps done before.
        tokens_per_step: bytes of text that a step trains on, over all ranks.
    """

    def __init__(self, place: Place, num_steps: int, step: int, tokens_per_step: int) -> None:
        self.step = step
        self._place = place
        self._tokens_per_step = tokens_per_step
        self._last_line = (step, time.perf_counter())
        self._bar = tqdm(
            total=num_steps,
            initial=step,
            unit="step",
            disable=None if place.leads else True,  # None: shown on a terminal only
        )

    def tick(self, loss: float) -> None:
        """Count a step."""
        self.step += 1
        self._bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self._bar.update()

    def write_line(self, loss: float, learning_rate: float) -> None:
        """Print the loss, and the speed since the last line (called on every rank)."""
        peaks = on_every_rank(peak_memory(self._place.device))
        now = (self.step, time.perf_counter())
        num_steps, seconds = (new - old for new, old in zip(now, self._last_line, strict=True))
        self._last_line = now
        if self._place.leads:
            self._bar.write(
                f"step {self.step:>5}   loss {loss:.4f}   lr {learning_rate:.1e}   "
                f"{num_steps * self._tokens_per_step / seconds:,.0f} tokens/s   "
                f"peak MiB of each rank {' '.join(f'{peak / MIB:,.0f}' for peak in peaks)}"
            )

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


@dataclass(frozen=True)
class Summary:
    """The results of a run.

    Attributes:
        loss_before: held-out loss before the first step, in nats per byte.
        loss_after: held-out loss after the last step, in nats per byte.
        unsharded_nbytes: bytes of all parameters.
        sharded_nbytes: bytes of the parameters that each rank holds.
        peaks: peak memory of each rank, in bytes.
        prompt: input text of the model.
        sample: text that the model generated from it.
    """

    loss_before: float
    loss_after: float
    unsharded_nbytes: int
    sharded_nbytes: list[int]
    peaks: list[int]
    prompt: bytes
    sample: bytes

    def show(self) -> None:
        """Print the table and the sample."""
        table = Table("", "", show_header=False)
        table.columns[1].justify = "right"
        table.add_row("held-out loss before training", f"{self.loss_before:.3f} nats per byte")
        table.add_row("held-out loss after training", f"{self.loss_after:.3f} nats per byte")
        table.add_section()
        table.add_row("parameters, unsharded", f"{self.unsharded_nbytes:,} bytes")
        for rank, nbytes in enumerate(self.sharded_nbytes):
            table.add_row(f"parameters of rank {rank}", f"{nbytes:,} bytes")
        table.add_section()
        for rank, peak in enumerate(self.peaks):
            table.add_row(f"peak memory of rank {rank}", f"{peak / MIB:,.0f} MiB")
        console = Console()
        console.print(table)
        if self.sample:
            text = Text(self.prompt.decode(), style="bold")
            text.append(self.sample.decode(errors="replace"), style="not bold")
            console.print(Panel(text, title="Sample", title_align="left"))
