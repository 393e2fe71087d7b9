"""What is counted while a model answers: tokens handed to llama.cpp, times of kvkeep's own steps, bytes on the disk."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IO = Path("/proc/self/io")
_BLOCK_BYTES = 512


class Decodes:
    """Counts the tokens that a `Llama` hands to `llama_decode`.

    Counted at the call, because llama.cpp's own counters show 1 where they are 0.
    """

    def __init__(self, llm: Any) -> None:
        self.count = 0
        context = llm._ctx
        decode = context.decode

        def counting(batch: Any) -> Any:
            self.count += batch.batch.n_tokens
            return decode(batch)

        context.decode = counting


class Stopwatch:
    """Adds up what calls of a method take. For a process that does nothing else: the class itself is changed."""

    def __init__(self, owner: type, method: str) -> None:
        self.seconds = 0.0
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, method, timed)


def written_bytes() -> int | None:
    """Bytes that this process has given to write calls so far; None where the system doesn't say."""
    try:
        fields = dict(line.split(": ") for line in _IO.read_text().splitlines())
    except OSError:
        return None
    return int(fields["wchar"])


def disk_bytes(folder: Path) -> int:
    """Bytes that a folder occupies, as `du` counts them; sparse files are longer than that. 0 if there is none."""
    stats = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return sum(stat.st_blocks * _BLOCK_BYTES if hasattr(stat, "st_blocks") else stat.st_size for stat in stats)
