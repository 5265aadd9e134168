"""Every wait, and whatever has to stay alive until it.

All memory is allocated and freed on the compute stream. A collective is launched from it, so the
backend's own stream starts after whatever the memory was used for before; :meth:`Pending.wait`
makes the compute stream continue after the collective, so the memory may be freed then. On the CPU
streams do nothing and the works do the waiting; the code is the same. What is offloaded has streams
of its own: see ``host.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from composable_shard import _torch
from composable_shard.core.transport.failures import named
from composable_shard.errors import ShardError


class Waitable(Protocol):
    """A launched collective, as ``torch.distributed.Work`` is, or an event of any backend."""

    def wait(self) -> object:
        """Make the current stream (on the CPU: the caller) continue after it."""


class Pending:
    """Launched collectives and the tensors they read and write.

    Hazard: a tensor freed on the compute stream while the backend's stream still uses it. Guard:
    this object owns the tensors until :meth:`wait` has ordered the two streams.

    Args:
        works: The collectives, in the order in which to wait for them.
        owned: The tensors.
        op: What they do, for messages.
    """

    __slots__ = ("_is_broken", "_op", "_owned", "_works")

    def __init__(
        self,
        works: Sequence[Waitable],
        owned: Sequence[torch.Tensor | None] = (),
        op: str = "communicating",
    ) -> None:
        self._works = list(works)[::-1]
        self._owned = list(owned)
        self._op = op
        self._is_broken = False

    def wait(self) -> None:
        """Order the consumer after the collectives and let go of the tensors; idempotent.

        Raises:
            CommunicationError: If a collective fails.
            ShardError: If it is waited for again after it failed, or after an interrupt.
        """
        if self._is_broken:
            raise ShardError(
                f"Expected to be waiting for the first time while {self._op}, got a wait that "
                "failed or was interrupted before; run the whole iteration again"
            )
        works, self._is_broken = self._works, True
        try:
            while works:
                works.pop().wait()
        except RuntimeError as error:
            raise named(error, self._op) from error
        self._owned.clear()
        self._is_broken = False

    def drop(self) -> None:
        """Wait until nothing writes to the tensors any more, whatever became of the collectives."""
        while self._works:
            with contextlib.suppress(RuntimeError):
                self._works.pop().wait()
        self._owned.clear()


def compute_stream(device: torch.device) -> int:
    """Return the number of the stream that is current on ``device``; 0 on the CPU."""
    return _torch.current_stream(device).stream_id if _torch.has_streams(device) else 0


@contextlib.contextmanager
def beside(stream: torch.Stream | None) -> Iterator[None]:
    """Run what is inside on ``stream``, after what the compute stream has; it continues after."""
    if stream is None:
        yield
        return
    compute = _torch.current_stream(stream.device)
    stream.wait_stream(compute)
    with _torch.on_stream(stream):
        yield
    compute.wait_stream(stream)
