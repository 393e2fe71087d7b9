"""Python processes whose file operations are counted, written down, made to fail, or the last thing that they do.

`run` starts one with the layer of `tests/faults/shim.c`. Each call of that process that changes a file below the root, or
waits for the disk, is an operation with a number from 1 on: the same one in every run of the same single-threaded script.
What only opens, closes, reads or locks isn't counted, nor what would change nothing anyway, such as making a folder that
is there. SQLite's shared memory (`-shm`) and LMDB's `lock.mdb` aren't looked at, and neither are processes that the
script starts itself. Syncs aren't carried out: power is cut on paper only, by `powerloss`.
"""

import ctypes
import gc
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

SUPPORT = Path(__file__).parent
SOURCE = SUPPORT.parent / "faults" / "shim.c"


class Kind(IntEnum):
    """What an operation does. The numbers are those of shim.c."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    ALLOCATE = 4
    FSYNC = 5
    FDATASYNC = 6
    MSYNC = 7
    RENAME = 8
    UNLINK = 9
    MKDIR = 10
    RMDIR = 11


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a journal.

    Attributes:
        number: from 1 on.
        kind: what was done.
        path: to which file or folder, relative to the root; "." is the root itself.
        target: the new path of one that was renamed.
        offset: where a write begins; the new size for TRUNCATE and ALLOCATE.
        data: what was written, as much of it as was carried out.
        durable: a write through a descriptor with O_DSYNC or O_SYNC.
        folder: a sync of a folder.
        result: what the call returned, -1 if it failed.
        error: its errno then.
        inode: of the file, by which it is known when its name has changed.
        mode: permissions of what was created.
    """

    number: int
    kind: Kind
    path: str
    target: str = ""
    offset: int = 0
    data: bytes = b""
    durable: bool = False
    folder: bool = False
    result: int = 0
    error: int = 0
    inode: int = 0
    mode: int = 0


# struct record of shim.c.
_RECORD = struct.Struct("<QqqqQIIHHBB")
_DURABLE, _FOLDER = 1, 2


def operations(log: Path) -> list[Operation]:
    """All operations of a journal, in their order. A record that a kill has cut off is left out."""
    data = log.read_bytes()
    found = []
    at = 0
    while at + _RECORD.size <= len(data):
        number, offset, result, length, inode, mode, error, path_length, target_length, kind, flags = _RECORD.unpack_from(
            data, at
        )
        ends = [at := at + _RECORD.size, at := at + path_length, at := at + target_length, at := at + length]
        if at > len(data):
            break
        path, target, written = (data[first:end] for first, end in pairwise(ends))
        found.append(
            Operation(
                number=number,
                kind=Kind(kind),
                path=os.fsdecode(path),
                target=os.fsdecode(target),
                offset=offset,
                data=written,
                durable=bool(flags & _DURABLE),
                folder=bool(flags & _FOLDER),
                result=result,
                error=error,
                inode=inode,
                mode=mode,
            )
        )
    return found


@cache
def library() -> Path:
    """The compiled layer, made once for each version of its source."""
    source = SOURCE.read_bytes()
    folder = Path(tempfile.gettempdir()) / f"kvfault-{os.getuid()}-{blake2b(source, digest_size=8).hexdigest()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / "shim.so"
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / made.name
            options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
            built = subprocess.run(["gcc", *options, "-o", fresh, SOURCE], capture_output=True, text=True)
            assert built.returncode == 0, built.stderr
            # Another test process may do the same at this moment; either result is good.
            fresh.replace(made)
    return made


def run(
    script: Sequence[str],
    root: Path,
    *,
    log: Path | None = None,
    kill_at: int | None = None,
    torn: bool = False,
    fail_at: int | None = None,
    errno: int = 0,
    fail_count: int = 1,
    armed: bool = True,
    timeout: float = 120,
) -> "subprocess.CompletedProcess[str]":
    """A Python process under the layer, from its start to its end.

    Args:
        script: arguments of Python.
        root: a folder that exists; what is below it counts.
        log: where to write the journal. Nothing may be there yet.
        kill_at: the process is killed right before this operation.
        torn: if that is a write, its first half is carried out. With `fail_at`: the first write that would fail writes
            its first half and says so, as on a disk that has just become full.
        fail_at: this operation fails, as far as its kind can: with EIO any, else what takes room on the disk.
        errno: and with this number.
        fail_count: so do the operations after it, this many in all; 0 is all of them.
        armed: count from the start; otherwise from the script's call of `arm` on.
        timeout: seconds.
    """
    if not root.is_dir():
        raise NotADirectoryError(f"{root} must be there before the process starts")
    assert log is None or not log.exists(), "the journals of two processes would be mixed"
    settings = {
        "LD_PRELOAD": library(),
        "PYTHONPATH": SUPPORT,
        "PYTHONDONTWRITEBYTECODE": 1,
        "KVFAULT_ROOT": root,
        "KVFAULT_LOG": log,
        "KVFAULT_KILL_AT": kill_at,
        "KVFAULT_TORN": int(torn),
        "KVFAULT_FAIL_AT": fail_at,
        "KVFAULT_ERRNO": errno,
        "KVFAULT_FAIL_COUNT": fail_count,
        "KVFAULT_ARMED": int(armed),
    }
    env = os.environ | {name: str(value) for name, value in settings.items() if value is not None}
    return subprocess.run([sys.executable, *script], capture_output=True, text=True, env=env, timeout=timeout)


def begin(
    root: Path,
    *,
    log: str | None = None,
    kill_at: int = 0,
    torn: bool = False,
    fail_at: int = 0,
    errno: int = 0,
    fail_count: int = 1,
) -> None:
    """In a process with the layer: count from here on, from 1. The arguments are those of `run`."""
    place = None if log is None else os.fsencode(log)
    numbers = [ctypes.c_long(number) for number in (kill_at, fail_at, fail_count)]
    if ctypes.CDLL(None).kvfault_begin(os.fsencode(root), place, *numbers, errno, int(torn), 1) != 0:
        raise NotADirectoryError(f"{root} must be there before it begins")


def rest() -> None:
    """In the child: count no more, fail no more, and carry out syncs again."""
    ctypes.CDLL(None).kvfault_rest()


def arm() -> None:
    """In the child: count from here on."""
    ctypes.CDLL(None).kvfault_arm()


def count() -> int:
    """In the child: the number of the last operation."""
    counter = ctypes.CDLL(None).kvfault_count
    counter.restype = ctypes.c_long
    return int(counter())


# -- many processes, one after the other ---------------------------------------------------------------------------------


class Forks:
    """A process that has imported everything and forks a child for each job: a tenth of the time of a new process.

    Args:
        file: a script that ends with `serve`.
    """

    def __init__(self, file: str) -> None:
        # OpenBLAS would start threads as soon as numpy is imported, and who has threads must not fork.
        settings = {"LD_PRELOAD": library(), "PYTHONPATH": SUPPORT, "OPENBLAS_NUM_THREADS": 1, "OMP_NUM_THREADS": 1}
        env = os.environ | {name: str(value) for name, value in settings.items()}
        self._server = subprocess.Popen(
            [sys.executable, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def run(
        self,
        job: str,
        root: Path,
        *,
        kill_after: float | None = None,
        timeout: float = 120,
        faults: Mapping[str, object] | None = None,
        **arguments: Any,
    ) -> "subprocess.CompletedProcess[str]":
        """Do a job in a child, from its start to its end.

        Args:
            job: name of what to do.
            root: its first argument, below which the layer counts.
            kill_after: seconds after which it is killed.
            timeout: seconds after which it is killed because it hangs; the answer says so.
            faults: arguments of `begin`.
            arguments: more ones of the job.
        """
        task = {"job": job, "root": str(root), "arguments": arguments, "faults": faults or {}}
        stdin, stdout = self._server.stdin, self._server.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(task | {"kill_after": kill_after, "timeout": timeout}) + "\n")
        stdin.flush()
        returncode, said, complained = json.loads(stdout.readline())
        return subprocess.CompletedProcess([job, str(root)], returncode, said, complained)

    def close(self) -> None:
        self._server.communicate()


def serve(jobs: Mapping[str, Callable[..., None]]) -> None:
    """The other side of `Forks`: do these jobs, each in a child of its own, until nobody asks for more."""
    assert len(os.listdir("/proc/self/task")) == 1, "who has threads must not fork"
    # Or the objects of all that was imported would be copied with every child's first collection.
    gc.freeze()
    for line in sys.stdin:
        task = json.loads(line)
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 1)
                os.dup2(complained.fileno(), 2)
                _do(task, jobs)
            returncode, hung = _wait(child, task["kill_after"], task["timeout"])
            said.seek(0)
            complained.seek(0)
            answer = [returncode, said.read(), complained.read() + hung]
        print(json.dumps(answer), flush=True)


def _do(task: dict[str, Any], jobs: Mapping[str, Callable[..., None]]) -> NoReturn:
    returncode = 1
    try:
        begin(Path(task["root"]), **task["faults"])
        jobs[task["job"]](Path(task["root"]), **task["arguments"])
        returncode = 0
    except BaseException:  # noqa: BLE001 - a child must never get to its parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(returncode)


def _wait(child: int, kill_after: float | None, timeout: float) -> tuple[int, str]:
    handle = os.pidfd_open(child)
    try:
        ended = select.select([handle], [], [], timeout if kill_after is None else kill_after)[0]
        if not ended:
            os.kill(child, signal.SIGKILL)
        returncode = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(handle)
    return returncode, "" if ended or kill_after is not None else f"it hung for {timeout:g} seconds"
