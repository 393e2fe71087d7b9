"""Work in new processes: arguments in as JSON, one line of JSON out.

New processes, because what a bench measures must not be warm from the measurement before: imports, thread pools,
LMDB's map and the allocator's free lists all remember.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from runner import Failed


class ChildFailed(Failed):
    """A child ended with an error; its last words are in the text."""


def environment(file: str) -> dict[str, str]:
    """That of a child which finds the modules beside its own file, and those here."""
    folders = (Path(file).parent, Path(__file__).parent)
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def run(file: str, job: str, *, compiled_in: Path | None = None, **arguments: Any) -> dict[str, Any]:
    """Do `job` of a bench's file in a new process, and return what it answers.

    Its stderr is shown only if it fails: the stock caches print to it with every access.

    Args:
        file, job: what to do.
        compiled_in: a folder where all modules are compiled to, or found as they were compiled before. As pip does with
            what it installs, whatever the environment says; compiling kvkeep anew takes as long as loading it.
        arguments: as JSON has them.

    Raises:
        ChildFailed: it ended with an error.
    """
    done = subprocess.run(
        [sys.executable, file, "--child", job],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        env=environment(file) | _compiling(compiled_in),
    )
    if done.returncode != 0:
        raise ChildFailed(f"{Path(file).name} --child {job} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _compiling(folder: Path | None) -> dict[str, str]:
    # An empty value counts as not set.
    return {} if folder is None else {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}


def pages_at_hand(n_bytes: int) -> None:
    """Touch and free this much memory, right before something is measured that allocates it.

    A virtual machine may give pages back to its host that were free for two seconds. Whoever touches them next pays for
    that: 70 ms instead of 11 for a copy of 47 MB. That would be measured, and not the work.
    """
    np.ones(n_bytes, np.uint8)


def serve(jobs: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """The child's side: call this at the end of a bench's file, when it is run as a script."""
    if len(sys.argv) != 3 or sys.argv[1] != "--child":
        sys.exit("run it with: python run.py, in the same folder")
    print(json.dumps(jobs[sys.argv[2]](**json.load(sys.stdin))))
