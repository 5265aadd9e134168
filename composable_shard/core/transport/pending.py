"""Every wait, and whatever has to stay alive until it.

Memory goes back to the stream that it was allocated on, which uses it again at once. So what a
collective needs is allocated, and let go of, on the stream that it is launched from. The stream of
the backend starts after that one, and that one continues after the collective; :class:`Pending`
sees to both, whatever stream waits for it. What lives longer, and is read on other streams, is the
business of :class:`UsedStreams`. On the CPU there are no streams, and the works do the waiting; the
code is the same. What is offloaded has streams of its own: see ``host.py``.
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
    """Launched collectives.

    Hazard: a tensor is let go of while the backend's stream still uses it. Guard: who has this
    object has the tensors, allocated on ``stream``, until :meth:`wait` has ordered the two streams.

    Args:
        works: The collectives, in the order in which to wait for them.
        op: What they do, for messages.
        stream: From which they are launched; ``None`` on the CPU.
        owned: Tensors that nobody else keeps for them.
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

    def pass_through(self, stream: torch.Stream) -> None:
        """Let ``stream`` wait for the collectives; :meth:`wait` is still to come."""
        with _torch.on_stream(stream):
            while self._works:
                self._works.pop().wait()
        self._works = [stream.record_event()]

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


class UsedStreams:
    """The streams that work on some memory is given to.

    Hazard: memory goes back to the stream that it was allocated on while another one uses it.
    Guard: that one waits for all others first. Test: ``tests/streams/test_planted_faults.py``.

    Args:
        device: Where the memory is.

    Attributes:
        home: That which has filled the memory; ``None`` on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = _torch.has_streams(device)
        self._owner: torch.Stream | None = None  # that of the allocation, until it is freed
        self.home: torch.Stream | None = None
        self._used: list[torch.Stream] = []
        self._last: torch.Stream | None = None  # that of the gradients, if there are any

    def fill(self) -> None:
        """Note that the current stream fills the memory, and allocates it unless it was kept."""
        if not self._has_streams:
            return
        stream = _torch.current_stream(self._device)
        if self._owner is None:
            self._owner = stream
        else:
            self._let_wait(stream)
        self.home = stream
        self._used.clear()

    def use(self) -> None:
        """Let the current stream use what was made on that of the memory."""
        if self.home is None:
            return
        stream = _torch.current_stream(self._device)
        if stream not in self._used:
            if stream != self.home:
                stream.wait_stream(self.home)
            self._used.append(stream)
        self._last = stream

    def at_owner(self) -> contextlib.AbstractContextManager[object]:
        """Give work to the stream of the allocation, after all that use it, to free it there."""
        return self._gathered(self._owner) if self._has_streams else _HERE

    def freed(self) -> None:
        """Note that the memory has been freed."""
        self._owner = None

    def where_filled(self) -> contextlib.AbstractContextManager[object]:
        """Give work to the stream that has filled the memory last, after all that have used it."""
        return self._gathered(self.home)

    def where_used(self) -> contextlib.AbstractContextManager[object]:
        """Give work to the stream that has used the memory last, after all others that have."""
        return self._gathered(self._last) if self._has_streams else _HERE

    def _gathered(self, stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
        if stream is None:
            return _HERE
        self._let_wait(stream)
        is_current = stream == _torch.current_stream(self._device)
        return _HERE if is_current else _torch.on_stream(stream)

    def _let_wait(self, stream: torch.Stream) -> None:
        """Let a stream continue after all that have used, or filled, the memory."""
        users = {*self._used, self._owner, self.home, _torch.current_stream(self._device)}
        for other in users - {stream, None}:
            if other is not None:
                stream.wait_stream(other)


def launching_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream that is given work now; ``None`` on the CPU."""
    return _torch.current_stream(device) if _torch.has_streams(device) else None


def stream_beside(device: torch.device) -> torch.Stream | None:
    """Return a stream for what goes on between collectives, beside compute; ``None`` on the CPU."""
    if not _torch.has_streams(device):
        return None
    return beside_compute.get(device) or beside_compute.setdefault(
        device, _torch.make_stream(device)
    )


beside_compute: dict[torch.device, torch.Stream] = {}


def compute_stream(device: torch.device) -> int:
    """Return the number of the stream that is current on ``device``; 0 on the CPU."""
    return _torch.current_stream(device).stream_id if _torch.has_streams(device) else 0


_HERE = contextlib.nullcontext()


def on_stream_beside(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Run what is inside on ``stream``, as :func:`run_beside` does, unless it is current."""
    is_here = stream is None or stream == _torch.current_stream(stream.device)
    return _HERE if is_here else run_beside(stream)


def run_beside(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Run what is inside on ``stream``, after what the compute stream has; it continues after."""
    return _HERE if stream is None else _beside(stream)


@contextlib.contextmanager
def _beside(stream: torch.Stream) -> Iterator[None]:
    compute = _torch.current_stream(stream.device)
    stream.wait_stream(compute)
    with _torch.on_stream(stream):
        yield
    compute.wait_stream(stream)
