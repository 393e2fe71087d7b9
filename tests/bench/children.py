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

_FOLDERS = (Path(__file__).parent, Path(__file__).parent.parent / "support")


def run(file: str, job: str, **arguments: Any) -> dict[str, Any]:
    """Do `job` of a bench's file in a new process, and return what it answers.

    Its stderr is shown only if it fails: the stock caches print to it with every access.

    Raises:
        RuntimeError: the child failed.
    """
    done = subprocess.run(
        [sys.executable, file, "--child", job],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, _FOLDERS))},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{Path(file).name} --child {job} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def serve(jobs: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """The child's side: call this at the end of a bench's file, when it is run as a script."""
    if len(sys.argv) != 3 or sys.argv[1] != "--child":
        sys.exit("run the benches with: python tests/bench/run.py")
    print(json.dumps(jobs[sys.argv[2]](**json.load(sys.stdin))))
