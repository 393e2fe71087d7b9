"""Work in new Python processes: a job goes in as JSON, events come out as they happen, and the end is told however it comes.

A process writes one JSON object a line, each with the name of an `event`. The last one is either of

    done     with the fields of what came out
    failed   message, exit_code
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import IO, Any

from kvkeep.store.errors import KvkeepError

Event = dict[str, Any]

_TAIL_LINES = 15


class ChildFailed(KvkeepError):
    """A process ended before it was done. The exit code is that of the process."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Events:
    """In the child: stdout, for events only. Whatever else is printed there, also by C code, goes to stderr from now on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def __call__(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=self._out, flush=True)


def run_child(module: str, whose: str, job: Mapping[str, Any], on_event: Callable[[Event], None]) -> Event:
    """Do a job in a new Python process.

    Args:
        module: what it runs, as `python -m` does.
        whose: whose process it is, for the sentence about its end.
        job: what to do; JSON on the stdin of the process.
        on_event: called for every event but the last.

    Returns:
        The fields of `done`.

    Raises:
        ChildFailed: the process said why, or the end of its stderr does.
    """
    # A file and not a pipe: nobody reads it while events come, and a full pipe would stop the process.
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            # -P: modules that happen to lie in the working folder aren't ours.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
        )
        try:
            return _talk(child, whose, job, on_event, errors)
        finally:
            # After Ctrl-C, and after any other exception in here. A killed writer leaves the store whole.
            child.kill()
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]


def _talk(
    child: "subprocess.Popen[str]",
    whose: str,
    job: Mapping[str, Any],
    on_event: Callable[[Event], None],
    errors: IO[bytes],
) -> Event:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with child.stdin:
            json.dump(job, child.stdin)
    except BrokenPipeError:
        raise _failure(child, whose, errors) from None
    for line in child.stdout:
        event: Event = json.loads(line)
        kind = event.pop("event")
        if kind == "done":
            child.wait()
            return event
        if kind == "failed":
            raise ChildFailed(event["message"], event["exit_code"])
        on_event({"event": kind, **event})
    raise _failure(child, whose, errors)


def _failure(child: "subprocess.Popen[str]", whose: str, errors: IO[bytes]) -> ChildFailed:
    code = child.wait()
    errors.seek(0)
    tail = errors.read().decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    # Killed by a signal: what a shell would report.
    if code < 0:
        how, code = f"was ended by {signal.Signals(-code).name}", 128 - code
    else:
        how = f"ended with exit code {code}"
    return ChildFailed("\n".join([f"{whose} process {how}", *tail]), code or 1)
