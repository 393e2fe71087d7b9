"""Threads that take only what nobody else wants.

ggml's threads spin at barriers, so one more runnable thread costs a generation far more than its share: beside an
ordinary writer thread prefill fell to 0.52 of its speed and generation to 0.44 (`make bench ARGS=background`), to a
hundredth where other programs were busy too; at idle priority both stay above 0.9.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress


def become_idle() -> bool:
    """Put the calling thread at idle priority. Returns whether the system allows it.

    Usually for good: an unprivileged process may not raise a thread again (RLIMIT_NICE is 0 by default), so whoever
    can't wait does the work in its own thread instead, see `Writer.flush`. Linux only: macOS and Windows have no call for
    this that Python can reach without private interfaces.
    """
    if sys.platform != "linux":
        return False
    try:
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        # A sandbox may forbid it. The writer still works, only less politely.
        return False
    return True


def lift(native_id: int) -> None:
    """Put another thread back at ordinary priority, where the system allows that: root, or an RLIMIT_NICE above 0."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(native_id, os.SCHED_OTHER, os.sched_param(0))


def run_idle(work: Callable[[], None]) -> None:
    """Run `work` in the calling thread at idle priority: a target for `threading.Thread`."""
    become_idle()
    work()
