"""Running one process of the demo from outside: its events as they come, and its end, however it ends."""

from collections.abc import Callable
from dataclasses import asdict

from kvkeep.tools.children import ChildFailed as ChatFailed
from kvkeep.tools.children import Event, run_child
from kvkeep.tools.demo_chat import Job, Result

__all__ = ["ChatFailed", "Event", "run"]


def run(job: Job, on_event: Callable[[Event], None]) -> Result:
    """Do a job in a new Python process.

    Args:
        job: what to do.
        on_event: called for every event but the last.

    Raises:
        ChatFailed: the process said why, or the end of its stderr does.
    """
    return Result(**run_child("kvkeep.tools.demo_chat", "the demo's", asdict(job), on_event))
