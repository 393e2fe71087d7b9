"""Waiting for others who end in milliseconds, or in seconds on a busy machine, or hang: for those it is waited once."""

import time
from collections.abc import Callable

_ASK_AGAIN = 0.01
# How long nobody waits any more after it was in vain.
HANGING_SECONDS = 30.0


class Patience:
    """How long to wait for others, as it went the last time.

    Args:
        seconds: how long to wait for those who don't hang.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._hanging_until = 0.0

    def until(self, done: Callable[[], bool]) -> bool:
        """Ask `done` until it is true, or the patience is at its end. At least once."""
        was_patient = time.monotonic() >= self._hanging_until
        deadline = time.monotonic() + (self._seconds if was_patient else 0.0)
        while not (is_done := done()) and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN)
        if is_done:
            self._hanging_until = 0.0
        elif was_patient:
            self._hanging_until = time.monotonic() + HANGING_SECONDS
        return is_done
