"""Loops over batches of which ranks have different numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from composable_shard.arguments import check_module, check_type
from composable_shard.core.hooks import groups_in
from composable_shard.core.transport.process_groups import SmallAllReduce
from composable_shard.errors import CommunicationError, ShardError
from composable_shard.mesh import ShardMesh, largest_of

_AGREEING = "agreeing on whether any rank has a batch"
_HAS_NONE, _HAS_ONE, _FAILED = range(3)  # and on which rank, added to the last

Batch = TypeVar("Batch")


class uneven(Generic[Batch]):
    """Iterate over batches on all ranks until none of them has any left.

    A rank that has no more gets ``None`` while others go on. It takes part in their forward and
    backward by :func:`sit_out`, and in all that a step does besides: clipping, the optimizer, the
    schedule. So ranks never wait for one that has finished, and the optimizer's states stay the
    same on all. The losses of ranks without a batch count as zeros in the mean over ranks.

    Also for the microbatches of one step: ``is_last`` tells, on all ranks alike, when to reduce.

    Args:
        model: A sharded module, or one with sharded ones inside.
        batches: This rank's; a number of its own. It is read one batch ahead, anew by each loop.

    Raises:
        TypeError: If ``model`` is no module, or ``batches`` cannot be iterated over.
        ShardError: If nothing in ``model`` is sharded; from the loop, if it is parked, or on other
            ranks.
        ValueError: From the loop, if a batch is ``None``; on the rank that has it.
        CommunicationError: From the loop, on the other ranks, if ``batches`` raises on one of them.

    Collective: an all-reduce of 8 bytes for each turn, launched one turn ahead.

    Example:
        >>> from composable_shard import fully_shard, sit_out
        >>> from composable_shard.testing import fake_ranks
        >>> with fake_ranks(2):
        ...     model = fully_shard(nn.Linear(4, 1))
        ...     for batch in uneven(model, [torch.ones(1, 4), torch.ones(3, 4)]):
        ...         loss = sit_out(model) if batch is None else model(batch).mean()
        ...         loss.backward()
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch]) -> None:
        check_module("model", model)
        is_iterable = isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
        check_type("batches", batches, is_iterable, "iterable")
        if not groups_in(model.modules()):
            raise ShardError(
                f"Expected a model with sharded modules, got none in {type(model).__name__}; apply "
                "fully_shard before uneven()"
            )
        self._model, self._batches = model, batches
        self._next: _Turn[Batch] | None = None

    @property
    def is_last(self) -> bool:
        """Whether no rank has another batch. Waits until that is known."""
        return self._next is not None and not self._next.is_anybodys()

    def __iter__(self) -> Iterator[Batch | None]:
        """Yield this rank's batches, and ``None`` as long as others have more."""
        own, groups = iter(self._batches), groups_in(self._model.modules())
        for group in groups:
            group.check_awake("for a loop of uneven()")
        mesh = largest_of(group.mesh for group in groups)
        turn = self._next = _Turn(own, mesh)
        try:
            while turn.is_anybodys():
                self._next = _Turn(own, mesh)
                yield turn.batch
                turn = self._next
        finally:
            turn.end()
            self._next.end()
            self._next = None


class _Turn(Generic[Batch]):
    """What comes next in a loop.

    Attributes:
        batch: This rank's, or ``None``.
    """

    def __init__(self, batches: Iterator[Batch], mesh: ShardMesh) -> None:
        self.batch: Batch | None = None
        self._failure: Exception | None = None
        said = _HAS_NONE
        try:
            self.batch = next(batches)
            said = _HAS_ONE
            if self.batch is None:
                raise ValueError("Expected batches that are not None, which stands for having none")
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 (whatever it is, all ranks hear of it)
            self._failure, said = error, _FAILED + dist.get_rank()
        largest: Any = dist.ReduceOp.MAX
        self._said = SmallAllReduce(torch.tensor([said]), largest, mesh, _AGREEING)

    def is_anybodys(self) -> bool:
        """Tell whether any rank has a batch.

        Raises:
            CommunicationError: On other ranks than the one that failed to take its batch.
        """
        (said,) = self._said.wait()
        if self._failure is not None:
            raise self._failure
        if said >= _FAILED:
            raise CommunicationError(f"Rank {said - _FAILED} failed while taking its next batch")
        return said == _HAS_ONE

    def end(self) -> None:
        """Wait until all ranks have said what they have."""
        self._said.wait()
