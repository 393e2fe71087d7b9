"""Threads that take only what nobody else wants.

ggml's threads spin at barriers, so one more runnable thread costs a generation far more than its share: beside an
ordinary writer thread prefill fell to 0.35 of its speed and generation to a hundredth; at idle priority both stay
above 0.9.
"""

import os
import sys
import threading
from collections.abc import Callable


def become_idle() -> bool:
    """Put the calling thread at idle priority, for good. Returns whether the system allows it.

    For good, because an unprivileged thread may not raise itself again (RLIMIT_NICE is 0 by default): whoever can't
    wait does the work in its own thread instead, see `Writer.flush`. Linux only: macOS and Windows have no call for
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


def run_idle(work: Callable[[], None]) -> None:
    """Run `work` in the calling thread at idle priority: a target for `threading.Thread`."""
    become_idle()
    work()
