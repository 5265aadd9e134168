"""``trace``: a timeline of the time and the memory of training on every rank."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable_shard.arguments import check_int, check_module, check_path
from composable_shard.insight.events import groups_in, listening
from composable_shard.insight.merging import MergedTrace, clear, merge
from composable_shard.insight.recording import (
    Bytes,
    Clock,
    LiveMemory,
    Mark,
    RankTrace,
    clock_of,
    file_of,
    join,
    live_memory,
    write,
)

__all__ = ["MergedTrace", "Timeline", "merge", "trace"]

MAX_MERGED = 64
"""The last rank merges up to this many ranks. Merging more would block it for long."""

# Reading memory takes longer than a time stamp: it is read after allocations and before frees.
READS_MEMORY = {
    *("begin", "all_gather", "post_forward", "reshard", "post_backward"),
    *("reduce_scatter", "wait_for_reduce_scatter", "wait_for_all_reduce"),
    *("begin_optimizer", "optimizer", "step", "end"),
}


class Timeline:
    """The recording that :func:`trace` makes on this rank.

    Attributes:
        recorded: What this rank recorded; ``None`` until recording has ended.
    """

    def __init__(
        self,
        module: nn.Module,
        folder: Path | None = None,
        *,
        skip: int = 0,
        steps: int | None = None,
        clock: Clock | None = None,
        memory: LiveMemory | None = None,
    ) -> None:
        check_module("module", module)
        check_int("skip", skip, 0)
        if steps is not None:
            check_int("steps", steps, 1)
        names = {inner: name for name, inner in module.named_modules()}
        roots = dict.fromkeys(group.tree.root for group in groups_in(module))
        self._roots = {
            next((names[inner] for inner in root.modules if inner in names), ""): root
            for root in roots
        }
        self._module, self._folder = module, folder
        device = next(iter(roots)).mesh.device
        memory = memory or live_memory(device)
        self._clock, self._read_memory = clock or clock_of(device), memory.read
        self._empty = RankTrace.empty(self._roots, memory.of)
        self.recorded: RankTrace | None = None
        self._skip, self._num_steps = skip, 0
        self._last = None if steps is None else skip + steps
        self._marks: list[tuple[Any, str, str, Bytes | None]] = []  # none but while it records
        self._hooks = contextlib.ExitStack()
        if folder is not None:
            clear(folder, self._empty.rank, self._empty.num_ranks)
        if skip == 0:
            self._open()

    def step(self) -> None:
        """Mark the end of a training step.

        Example:
            >>> with fake_ranks(2):
            ...     model = fully_shard(nn.Linear(4, 4))
            ...     with trace(model, skip=1, steps=2) as timeline:
            ...         for _ in range(10):
            ...             timeline.step()
            >>> timeline.summary()["first_step"], timeline.summary()["num_steps"]
            (1, 2)
        """
        self._num_steps += 1
        if self._marks:
            self._mark("step")
        elif self._num_steps == self._skip:
            self._open()
        if self._num_steps == self._last:
            self.stop()

    def stop(self) -> None:
        """End recording, write this rank's file, and merge all if it is the last; idempotent.

        Collective: none. Ranks that never call it are missing from the merged timeline.

        Example:
            >>> with fake_ranks(2), trace(fully_shard(nn.Linear(4, 4))) as timeline:
            ...     timeline.stop()
            >>> timeline.recorded.num_ranks
            2
        """
        if not self._marks:
            return
        self._hooks.close()
        self._mark("end")
        stamps, *others = zip(*self._marks, strict=True)
        self._marks.clear()
        marks = map(Mark, self._clock.times(stamps), *others)
        self.recorded = self._empty.recorded(list(marks), self._skip)
        if self._folder is not None:
            try:
                self._write(self._folder, self.recorded)
            except (OSError, ValueError) as error:  # no reason to end a training
                warnings.warn(
                    f"Expected to write a timeline to {self._folder}, got {error!r}; merge the "
                    "written files by `composable-shard trace`",
                    stacklevel=2,
                )

    def _write(self, folder: Path, recorded: RankTrace) -> None:
        write(file_of(folder, recorded.rank), recorded.to_json())
        files = [file_of(folder, rank) for rank in range(recorded.num_ranks)]
        if len(files) <= MAX_MERGED and all(file.exists() for file in files):
            merge(folder)

    def summary(self) -> dict[str, Any]:
        """Return the sums over this rank's steps; see ``merge(folder).summary`` for all ranks.

        Raises:
            ValueError: If nothing is recorded yet.

        Example:
            >>> with fake_ranks(2), trace(fully_shard(nn.Linear(4, 4))) as timeline:
            ...     timeline.step()
            >>> timeline.summary()["exposed_ms"]
            0.0
        """
        if self.recorded is None:
            state = "not ended" if self._marks else "not begun"
            raise ValueError(f"Expected a recording that has ended, got one that has {state}")
        return MergedTrace.of([self.recorded]).summary

    def _open(self) -> None:
        self._mark("begin")
        for prefix, root in self._roots.items():
            self._hooks.enter_context(listening(root.tree, partial(self._mark, prefix=prefix)))
        pre = register_optimizer_step_pre_hook(partial(self._mark_step, "begin_optimizer"))
        post = register_optimizer_step_post_hook(partial(self._mark_step, "optimizer"))
        self._hooks.callback(pre.remove)
        self._hooks.callback(post.remove)

    def _mark(self, event: str, name: str = "", prefix: str = "") -> None:
        read = self._read_memory if event in READS_MEMORY else None
        memory = None if read is None else read()
        self._marks.append((self._clock.stamp(), event, join(prefix, name), memory))

    def _mark_step(self, event: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if not stepped.isdisjoint(map(id, self._module.parameters())):  # it is of this model
            self._mark(event, type(optimizer).__name__)


@contextlib.contextmanager
def trace(
    module: nn.Module,
    folder: str | Path | None = None,
    *,
    skip: int = 0,
    steps: int | None = None,
) -> Iterator[Timeline]:
    """Record where the time and the memory of training go on this rank.

    The timeline has gathers, waits, forward and backward of each group, reductions, optimizer
    steps, live memory and, on a device, reserved memory. Each rank writes a file of its own when it
    leaves the context, also by an exception. The last one of at most 64 ranks merges all files into
    ``trace.json`` (for https://ui.perfetto.dev) and ``timeline.html``. No rank waits for another.
    See ``docs/timeline.md``.

    Args:
        module: A sharded module, or one with sharded modules in it.
        folder: The folder to write to, the same for all ranks; nothing is written if absent.
        skip: Steps to skip before recording; a step ends where ``timeline.step()`` is called.
        steps: Steps to record; by default recording ends with the context.

    Returns:
        A :class:`Timeline`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If nothing in the module is sharded, or a number is out of range.

    Collective: none. Memory: about 200 bytes for each event; a group has some thirty events in a
    step.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> with fake_ranks(2):
        ...     for layer in model:
        ...         _ = fully_shard(layer)
        ...     with trace(fully_shard(model)) as timeline:
        ...         model(torch.ones(2, 4)).sum().backward()
        ...         timeline.step()
        >>> [f"{flight.op} {flight.name}" for flight in timeline.recorded.flights]
        ['gather 0', 'gather 1', 'gather 1', 'gather 0', 'reduce 1', 'reduce 0']
    """
    check_path("folder", folder, is_needed=False)
    timeline = Timeline(module, None if folder is None else Path(folder), skip=skip, steps=steps)
    try:
        yield timeline
    finally:
        timeline.stop()
