"""A condition variable that an interrupt never leaves locked."""

import threading
from collections.abc import Callable

_RLock: type = type(threading.RLock())


class Gate(_RLock):  # type: ignore[misc]  # its type has no name of its own
    """A lock, and a place to wait for what it guards; may be taken again by the thread that has it.

    As `threading.Condition`, whose `__enter__` is written in Python: Ctrl-C may come when it has taken the lock and hasn't
    returned yet, and then nobody ever gives that back, and the end of the program waits for it for ever. The one here is that
    of a lock, in C, where no signal is looked at in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting = threading.Condition(self)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until something is so. False if `timeout` seconds weren't enough. The caller holds the lock."""
        return self._waiting.wait_for(predicate, timeout)

    def notify_all(self) -> None:
        """Let everybody who waits look again. The caller holds the lock."""
        self._waiting.notify_all()
