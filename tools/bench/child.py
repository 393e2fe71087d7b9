"""One process of the bench: reads a job as JSON from stdin, and writes what came out to stdout. See `kvkeep.tools.children`."""

import errno
import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvkeep.store.errors import DiskFull, KvkeepError
from kvkeep.tools.children import Events

# By name, because only those with a model may need llama_cpp.
_JOBS = {
    "probe": ("kvkeep.tools.bench.chat", "probe"),
    "talk": ("kvkeep.tools.bench.chat", "talk"),
    "keep": ("kvkeep.tools.bench.restart", "store"),
    "restart": ("kvkeep.tools.bench.restart", "restart"),
    "throughput": ("kvkeep.tools.bench.store", "throughput"),
    "lookups": ("kvkeep.tools.bench.store", "lookups"),
}


def main() -> int:
    """Do the job on stdin. Returns the exit code."""
    emit = Events()
    given: dict[str, Any] = json.load(sys.stdin)
    module, function = _JOBS[given.pop("job")]
    do: Callable[..., dict[str, Any]] = getattr(import_module(module), function)
    try:
        found = do(**given)
    except KvkeepError as error:
        emit("failed", message=str(error), exit_code=error.exit_code)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        emit("failed", message=f"the disk is full: {error}", exit_code=DiskFull.exit_code)
        return DiskFull.exit_code
    emit("done", **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
