"""Is the byte budget kept after every save, whoever reads and hangs or dies meanwhile? And what is written for it?"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import children
import crowd
from crowd import Crowd
from figures import AtLeast, AtMost, Figure, Run

from kvkeep.store.errors import CapacityError
from kvkeep.store.registry import close_root, open_root

CAPACITY = 24 << 20
# A reader begins to hang every so many saves, and goes on doing so for half as many.
HANGS_EVERY = 25


def measure(run: Run) -> list[Figure]:
    n_saves = 60 if run.quick else 500
    root = run.folder / "root"
    random = Random(1)
    repository = open_root(root, CAPACITY)
    together = Crowd.on(repository)
    largest = dropped = stored = 0
    reader: subprocess.Popen[str] | None = None
    written_before = crowd.written_bytes()
    for number in range(n_saves):
        if number % HANGS_EVERY == 5:
            reader = _hanging_reader(root)
        if number % HANGS_EVERY == 5 + HANGS_EVERY // 2 and reader is not None:
            _end(reader)
            reader = None
        try:
            stored += together.save(list(crowd.MODELS)[number % 3], crowd.chat(random, random.randrange(100, 500)))
        except CapacityError:
            dropped += 1
        largest = max(largest, crowd.occupied(root))
    if reader is not None:
        _end(reader)
    tokens = crowd.chat(random, 200)
    together.save("dense", tokens)
    works = together.restored("dense", tokens) == len(tokens)
    written = crowd.written_bytes() - written_before
    close_root(repository)
    return [
        Figure("largest root / budget", largest / CAPACITY, "x", AtMost(1.0), f"after each of {n_saves} saves over 3 models"),
        Figure(
            "saves that found room", n_saves - dropped, "", AtLeast(n_saves / 3), f"{dropped} given up beside readers that hung"
        ),
        Figure("stored and restored once no reader hangs", int(works), "", AtLeast(1)),
        Figure(
            "bytes written to the disk / bytes stored", written / max(1, stored), "x", None, f"{stored / 1e6:.0f} MB stored"
        ),
    ]


def _hanging_reader(root: Path) -> "subprocess.Popen[str]":
    """A process that is stopped in the middle of a snapshot."""
    command = [sys.executable, __file__, json.dumps({"root": str(root)})]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=children.environment(__file__))
    assert child.stdout is not None
    assert child.stdout.readline() == "reading\n"
    os.kill(child.pid, signal.SIGSTOP)
    return child


def _end(reader: "subprocess.Popen[str]") -> None:
    """Killed in the middle of its snapshot; it says goodbye to nobody."""
    reader.kill()
    reader.communicate()


def hang(root: Path) -> None:
    """Read, and never end."""
    repository = open_root(root)
    with repository.snapshot() as snapshot:
        list(snapshot.blobs.ids())
        print("reading", flush=True)
        signal.pause()


if __name__ == "__main__":
    hang(Path(json.loads(sys.argv[1])["root"]))
