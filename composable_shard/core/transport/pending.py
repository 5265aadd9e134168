"""Pending collectives: the wait for them, and the tensors and streams that they use.

The allocator returns freed memory to its allocating stream, which reuses it at once. So tensors of
a collective are allocated and released on the launching stream. Earlier work of that stream may
still use the memory, so the collective starts after this work. :class:`Pending` keeps the tensors
until the wait, and `Program` runs the wait on the same stream, so the stream reuses the memory
after the collective. :class:`UsedStreams` tracks memory that lives longer and is read on other
streams. The CPU has no streams, and runs the same code. Copies of offloaded shards use streams of
their own: see ``host.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from composable_shard import _torch
from composable_shard.core.transport.failures import with_op
from composable_shard.errors import ShardError


class Waitable(Protocol):
    """A launched collective, such as ``torch.distributed.Work``, or an event of any device type."""

    def wait(self) -> object:
        """Make the current stream (on the CPU: the caller) wait for it."""


class Pending:
    """Launched collectives, and the tensors that they use.

    Hazard: a tensor is released while the backend's stream still uses it. Guard: this object keeps
    the tensors until :meth:`wait`. Their allocation and :meth:`wait` are both on ``stream``, so
    the stream reuses the memory only after the collectives.

    Args:
        works: The collectives, in the order of their waits.
        op: The operation, for error messages.
        stream: The launching stream; ``None`` on the CPU.
        owned: Tensors of the collectives that nothing else keeps alive.
    """

    __slots__ = ("_is_broken", "_op", "_owned", "_stream", "_works")

    def __init__(
        self,
        works: Sequence[Waitable],
        op: str = "communicating",
        stream: torch.Stream | None = None,
        owned: Sequence[torch.Tensor] = (),
    ) -> None:
        self._stream = stream
        self._works = list(works)[::-1]
        self._owned = list(owned)
        self._op = op
        self._is_broken = False

    def order_before(self, stream: torch.Stream) -> None:
        """Make ``stream`` wait for the collectives; the caller must still call :meth:`wait`."""
        with _torch.on_stream(stream):
            while self._works:
                self._works.pop().wait()
        self._works = [stream.record_event()]

    def wait(self) -> None:
        """Make the current stream wait for the collectives; release the tensors. Idempotent.

        Raises:
            CommunicationError: If a collective fails.
            ShardError: After a wait that failed or was interrupted.
        """
        if self._is_broken:
            raise ShardError(
                f"Expected no earlier failure while {self._op}, got a wait that failed or was "
                "interrupted; run the whole iteration again"
            )
        works, self._is_broken = self._works, True
        try:
            while works:
                works.pop().wait()
        except RuntimeError as error:
            raise with_op(error, self._op) from error
        self._owned.clear()
        self._is_broken = False

    def drop(self) -> None:
        """Wait until no collective writes to the tensors any more, even if some have failed."""
        while self._works:
            with contextlib.suppress(RuntimeError):
                self._works.pop().wait()
        self._owned.clear()


class UsedStreams:
    """The streams that use a piece of memory.

    Hazard: memory returns to its allocating stream while another stream uses it. Guard: the
    allocating stream first waits for all others. Test: ``tests/streams/test_planted_faults.py``.

    Args:
        device: The device of the memory.

    Attributes:
        filling_stream: The stream that has filled the memory; ``None`` on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = _torch.has_streams(device)
        self._allocating_stream: torch.Stream | None = None  # None if it is freed
        self.filling_stream: torch.Stream | None = None
        self._users: list[torch.Stream] = []
        self._last_user: torch.Stream | None = None  # of the latest `record_use`

    def record_fill(self) -> None:
        """Record that the current stream fills the memory.

        If the memory was freed, this stream allocates it; otherwise it waits for all users.
        """
        if not self._has_streams:
            return
        stream = _torch.current_stream(self._device)
        if self._allocating_stream is None:
            self._allocating_stream = stream
        else:
            self._wait_for_users(stream)
        self.filling_stream = stream
        self._users.clear()

    def record_use(self) -> None:
        """Record that the current stream uses the memory; it waits for the filling stream."""
        if self.filling_stream is None:
            return
        stream = _torch.current_stream(self._device)
        if stream not in self._users:
            if stream != self.filling_stream:
                stream.wait_stream(self.filling_stream)
            self._users.append(stream)
        self._last_user = stream

    def record_free(self) -> None:
        """Record that the memory has been freed."""
        self._allocating_stream = None

    def on_allocating_stream(self) -> contextlib.AbstractContextManager[object]:
        """Let the allocating stream wait for all other users of the memory; make it current."""
        return self._after_users(self._allocating_stream) if self._has_streams else _SAME_STREAM

    def on_filling_stream(self) -> contextlib.AbstractContextManager[object]:
        """Let the filling stream wait for all other users of the memory; make it current."""
        return self._after_users(self.filling_stream)

    def on_last_user(self) -> contextlib.AbstractContextManager[object]:
        """Let the last user wait for all other users of the memory; make it current."""
        return self._after_users(self._last_user) if self._has_streams else _SAME_STREAM

    def _after_users(
        self, stream: torch.Stream | None
    ) -> contextlib.AbstractContextManager[object]:
        if stream is None:
            return _SAME_STREAM
        self._wait_for_users(stream)
        is_current = stream == _torch.current_stream(self._device)
        return _SAME_STREAM if is_current else _torch.on_stream(stream)

    def _wait_for_users(self, stream: torch.Stream) -> None:
        """Let a stream wait for all streams that use the memory, and for the current stream."""
        current = _torch.current_stream(self._device)
        users = {*self._users, self._allocating_stream, self.filling_stream, current}
        for other in users - {stream, None}:
            if other is not None:
                stream.wait_stream(other)


def launching_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream; ``None`` on the CPU."""
    return _torch.current_stream(device) if _torch.has_streams(device) else None


def compute_stream_id(device: torch.device) -> int:
    """Return the id of the current stream on ``device``; 0 on the CPU."""
    return _torch.current_stream(device).stream_id if _torch.has_streams(device) else 0


side_streams: dict[torch.device, torch.Stream] = {}


def side_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream for reductions over replicas, and divisions before; ``None`` on the CPU."""
    if not _torch.has_streams(device):
        return None
    return side_streams.get(device) or side_streams.setdefault(device, _torch.make_stream(device))


_SAME_STREAM = contextlib.nullcontext()


def on_side_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Run the block on ``stream``, between the earlier and the later work of the current stream.

    Nothing changes if ``stream`` is ``None`` or current already.
    """
    if stream is None or stream == _torch.current_stream(stream.device):
        return _SAME_STREAM
    return _on_side_stream(stream)


@contextlib.contextmanager
def _on_side_stream(stream: torch.Stream) -> Iterator[None]:
    current = _torch.current_stream(stream.device)
    stream.wait_stream(current)
    with _torch.on_stream(stream):
        yield
    current.wait_stream(stream)
