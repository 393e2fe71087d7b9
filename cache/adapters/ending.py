"""Closing what belongs to an object that is gone.

The garbage collector may call a finalizer in the middle of anything, in a thread that holds any lock: to close a store
right there can wait for a lock that the very same thread holds, for ever. So a finalizer only puts a word into a queue
(`SimpleQueue.put` is made for that), and a thread does the closing. What is still open at the interpreter's end is closed
there.
"""

import atexit
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Close = Callable[[], None]

# How long somebody who opens a store waits for those that are being closed.
WAIT_SECONDS = 10.0

_LOG = logging.getLogger("kvkeep")
_numbers = itertools.count()


class _Closer:
    """The thread that closes, started when something is there to be closed one day."""

    def __init__(self) -> None:
        self._gone: SimpleQueue[Close | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.open: dict[int, Close] = {}

    def start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="kvkeep-closer", daemon=True)
                self._thread.start()

    def gone(self, number: int) -> None:
        close = self.open.pop(number, None)
        if close is not None:
            self._gone.put(close)

    def _loop(self) -> None:
        while (close := self._gone.get()) is not None:
            _safely(close)

    def wait(self, timeout: float) -> None:
        if self._thread is not None and threading.current_thread() is not self._thread:
            done = threading.Event()
            self._gone.put(done.set)
            done.wait(timeout)

    def finish(self) -> None:
        """At the interpreter's end."""
        for number in list(self.open):
            if (close := self.open.pop(number, None)) is not None:
                _safely(close)
        if self._thread is not None:
            self._gone.put(None)
            self._thread.join(WAIT_SECONDS)


def _safely(close: Close) -> None:
    """One that fails mustn't keep the others from being closed."""
    try:
        close()
    except Exception:  # noqa: BLE001 - whatever it is, it is logged, and the others are closed
        _LOG.exception("closing a cache failed")


_closer = _Closer()


def _forked() -> None:
    # The parent's thread isn't here, and what it has open is closed there.
    global _closer
    _closer = _Closer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
atexit.register(lambda: _closer.finish())


def wait_for_the_gone() -> None:
    """Until everything whose owner is gone by now is closed: what it had is stored then. Not for ever."""
    _closer.wait(WAIT_SECONDS)


class Ending:
    """Calls `close` once, when `owner` is gone or at the interpreter's end, whichever comes first.

    Args:
        owner: held weakly.
        close: must not hold `owner`.
    """

    def __init__(self, owner: Any, close: Close) -> None:
        _closer.start()
        self._number = next(_numbers)
        _closer.open[self._number] = close
        self._finalizer = weakref.finalize(owner, _gone, self._number)
        self._finalizer.atexit = False

    def cancel(self) -> None:
        """It is closed already."""
        self._finalizer.detach()
        _closer.open.pop(self._number, None)


def _gone(number: int) -> None:
    _closer.gone(number)
