"""A background thread that calls functions periodically or once.

On this thread, `failures.py` polls pending waits, and `mailbox.py` reads the entries of other
ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from types import MethodType

PERIOD = 0.5
"""Seconds between two rounds of periodic calls, at most."""

_JOIN_TIMEOUT = 2.0  # seconds that the interpreter waits for the thread to end

_Function = Callable[[], object]


def call_periodically(function: Callable[[], object]) -> None:
    """Call a function periodically on the background thread.

    Args:
        function: It must be quick and thread-safe. A method does not keep its object alive, and is
            called until the object is freed. Errors are ignored.
    """
    is_method = isinstance(function, MethodType)
    _periodic.append(weakref.WeakMethod(function) if is_method else lambda: function)


def call_once(function: Callable[[], object], seconds: float = 0.0) -> None:
    """Call a function once on the background thread; wait for it at most ``seconds`` seconds."""
    _thread.ensure()
    is_done = threading.Event()

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            function()
        is_done.set()

    _thread.requests.put(call)
    if seconds:
        is_done.wait(seconds)


def ensure_thread() -> None:
    """Start the thread, unless it already runs in this process."""
    _thread.ensure()


_periodic: list[Callable[[], _Function | None]] = []


class _Thread:
    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[_Function | None] = queue.SimpleQueue()
        self._process = 0
        self._thread: threading.Thread | None = None

    def ensure(self) -> None:
        if self._process == os.getpid():
            return
        self._process, self.requests = os.getpid(), queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="composable-shard", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _run(self) -> None:
        while self._run_request():
            for ref in list(_periodic):
                self._call(ref)

    # These are methods because a local variable of `_run` would keep the last function, and its
    # process group, alive until the next call.

    def _run_request(self) -> bool:
        """Run the next request, if one arrives in time; return whether the thread continues."""
        try:
            request = self.requests.get(timeout=PERIOD)
        except queue.Empty:
            return True
        if request is not None:
            request()
        return request is not None

    def _call(self, ref: Callable[[], _Function | None]) -> None:
        function = ref()
        if function is None:
            _periodic.remove(ref)
            return
        with contextlib.suppress(BaseException):  # the thread continues
            function()

    def _end(self) -> None:
        """End the thread before the interpreter ends; otherwise the interpreter would abort."""
        if self._thread is not None and self._process == os.getpid():
            self.requests.put(None)
            self._thread.join(_JOIN_TIMEOUT)


_thread = _Thread()
