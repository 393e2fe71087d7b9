"""What a sparse file holds between its holes: a map of gigabytes has kilobytes of data."""

import os
from collections.abc import Iterator
from pathlib import Path


def ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of bytes that is no hole."""
    size = os.fstat(descriptor).st_size
    at = 0
    while at < size:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:
            return  # nothing but a hole up to the end
        end = os.lseek(descriptor, at, os.SEEK_HOLE)
        yield at, end
        at = end


def is_on_the_disk(wanted: bytes, folder: Path) -> bool:
    """Whether these bytes are in some file below `folder`, be it as a remnant."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                if any(wanted in os.pread(file.fileno(), end - start, start) for start, end in ranges(file.fileno())):
                    return True
    return False
