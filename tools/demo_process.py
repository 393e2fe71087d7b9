"""Running one process of the demo from outside: its events as they come, and its end, however it ends."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any

from kvkeep.store.errors import KvkeepError
from kvkeep.tools.demo_chat import Job, Result

Event = dict[str, Any]

_TAIL_LINES = 15


class ChatFailed(KvkeepError):
    """A process of the demo ended before it was done. The exit code is that of the process."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run(job: Job, on_event: Callable[[Event], None]) -> Result:
    """Do a job in a new Python process.

    Args:
        job: what to do.
        on_event: called for every event but the last.

    Raises:
        ChatFailed: the process said why, or the end of its stderr does.
    """
    # A file and not a pipe: nobody reads it while events come, and a full pipe would stop the process.
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            # -P: modules that happen to lie in the working folder aren't ours.
            [sys.executable, "-P", "-m", "kvkeep.tools.demo_chat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
        )
        try:
            return _talk(child, job, on_event, errors)
        finally:
            # After Ctrl-C, and after any other exception in here. A killed writer leaves the store whole.
            child.kill()
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]


def _talk(child: "subprocess.Popen[str]", job: Job, on_event: Callable[[Event], None], errors: IO[bytes]) -> Result:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with child.stdin:
            json.dump(asdict(job), child.stdin)
    except BrokenPipeError:
        raise _failure(child, errors) from None
    for line in child.stdout:
        event: Event = json.loads(line)
        kind = event.pop("event")
        if kind == "done":
            child.wait()
            return Result(**event)
        if kind == "failed":
            raise ChatFailed(event["message"], event["exit_code"])
        on_event({"event": kind, **event})
    raise _failure(child, errors)


def _failure(child: "subprocess.Popen[str]", errors: IO[bytes]) -> ChatFailed:
    code = child.wait()
    errors.seek(0)
    tail = errors.read().decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    # Killed by a signal: what a shell would report.
    if code < 0:
        how, code = f"was ended by {signal.Signals(-code).name}", 128 - code
    else:
        how = f"ended with exit code {code}"
    return ChatFailed("\n".join([f"the demo's process {how}", *tail]), code or 1)
