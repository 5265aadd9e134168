"""Saving and loading a contestant with its optimizer state, on the ranks.

Every act works on the contestant of that name which this process has built, and on a folder that
all ranks see.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contestants import Contestant, Spec, build_contestant
from memory_probe import map_large_tensors, peak_resident, reset_peak
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FULL_FILE = "full.pt"

# Rank side: the contestants live here from one call to the next.
_BUILT: dict[str, Contestant] = {}


class Cost(NamedTuple):
    """What an act took of one rank.

    Attributes:
        seconds: On the clock.
        processor: Seconds of processor time, of all threads.
        growth: Of the peak of resident memory, in bytes.
    """

    seconds: float
    processor: float
    growth: int


def build(name: str, spec: Spec) -> None:
    """Build a contestant and train one step, so that its optimizer has a state."""
    map_large_tensors()  # freed memory returns to the system, so the next act starts low
    _BUILT[name] = build_contestant(name, spec)
    _BUILT[name].step(0)


# Acts -----------------------------------------------------------------------------------------


def save_sharded(contestant: Contestant, folder: Path) -> None:
    """Every rank writes its shards."""
    dcp.save(_state(contestant), checkpoint_id=folder)


def load_sharded(contestant: Contestant, folder: Path) -> None:
    """Every rank reads its shards, of whatever number of ranks the checkpoint is."""
    state = _state(contestant)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        contestant.model,
        contestant.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def save_full(contestant: Contestant, folder: Path) -> None:
    """Rank 0 gathers and writes everything."""
    state = _state(contestant, FULL)
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / FULL_FILE)


def load_full(contestant: Contestant, folder: Path) -> None:
    """Rank 0 reads everything and sends each rank its shards."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(folder / FULL_FILE)
    # One by one: set_state_dict takes an empty dict for "no model" and leaves rank 0 waiting.
    set_model_state_dict(contestant.model, state["model"], options=FROM_RANK_0)
    set_optimizer_state_dict(
        contestant.model, contestant.optimizer, state["optimizer"], options=FROM_RANK_0
    )


def save_plain(contestant: Contestant, folder: Path) -> None:
    """Write the states of a plain module and its optimizer as they are."""
    folder.mkdir(exist_ok=True)
    states = (contestant.model.state_dict(), contestant.optimizer.state_dict())
    torch.save(states, folder / FULL_FILE)


def load_plain(contestant: Contestant, folder: Path) -> None:
    """Read the file that :func:`save_plain` wrote."""
    model, optimizer = torch.load(folder / FULL_FILE)
    contestant.model.load_state_dict(model)
    contestant.optimizer.load_state_dict(optimizer)


def _state(contestant: Contestant, options: StateDictOptions | None = None) -> dict[str, Any]:
    model, optimizer = get_state_dict(contestant.model, contestant.optimizer, options=options)
    return {"model": model, "optimizer": optimizer}


ACTS: dict[str, Callable[[Contestant, Path], None]] = {
    act.__name__: act
    for act in (save_sharded, load_sharded, save_full, load_full, save_plain, load_plain)
}


def perform(name: str, act: str, folder: Path) -> Cost:
    """Do one act on this rank and return its time and memory.

    Before an act that loads, all that it is to load is wiped out.
    """
    contestant = _BUILT[name]
    if act.startswith("load"):
        for _, tensor in _tensors(contestant):
            _local(tensor).zero_()
    gc.collect()
    dist.barrier()
    before = reset_peak()
    start, processor = time.perf_counter(), time.process_time()
    ACTS[act](contestant, folder)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    return Cost(seconds, processor, peak_resident() - before)


# What there is to save ------------------------------------------------------------------------


def digest(name: str) -> str:
    """Name the exact state of a contestant: all bytes, in whatever way they are sharded.

    Collective: gathers every tensor.
    """
    found = hashlib.sha256()
    for key, tensor in _tensors(_BUILT[name]):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(f"{key} {tuple(full.shape)} {full.dtype}".encode())
        found.update(full.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def payload(name: str) -> int:
    """Return the bytes of all parameters and optimizer states, each once."""
    return sum(tensor.numel() * tensor.itemsize for _, tensor in _tensors(_BUILT[name]))


def _tensors(contestant: Contestant) -> Iterator[tuple[str, torch.Tensor]]:
    for key, param in contestant.model.named_parameters():
        yield key, param
        for part, value in sorted(contestant.optimizer.state[param].items()):
            yield f"{key}.{part}", value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
