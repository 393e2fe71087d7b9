"""A copy of the index beside it, made by SQLite itself while others may use it."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvkeep.store import settings
from kvkeep.store.engine import Index
from kvkeep.store.errors import DiskFull, UsageError
from kvkeep.store.private import disk_errors, sync_folder
from kvkeep.store.space import Disk

# The end of the name of a backup in the making.
_COPYING = ".copying"


def free_name(root: Path, revision: str) -> Path:
    """A name in the root that no earlier backup has. What a killed one has left is deleted: nobody else may be at it now."""
    for leftover in root.glob(f"index-*.backup*.sqlite3.*{_COPYING}"):
        leftover.unlink(missing_ok=True)
    names = (root / f"index-{revision}.backup{f'-{n}' if n > 1 else ''}.sqlite3" for n in range(1, sys.maxsize))
    return next(name for name in names if not os.path.lexists(name))


def back_up(index: Index, target: Path, progress: Callable[[int, int], None]) -> None:
    """Copy the index into a new file that only its owner can read, whole or not at all.

    Args:
        index: an open one.
        target: the file.
        progress: called with the bytes that are done, and all that there are; may raise to stop.

    Raises:
        DiskFull: the disk has no room.
        UsageError: the file exists.
    """
    with disk_errors(f"writing {target}"):
        _refuse_too_large(index, target.parent)
        descriptor, name = tempfile.mkstemp(_COPYING, f"{target.name}.", target.parent)
        os.close(descriptor)
        try:
            index.copy_to(Path(name), progress)
            if os.path.lexists(target):
                # Somebody has made one meanwhile.
                raise UsageError(f"{target} exists, and nothing is written over it: name another file")
            os.rename(name, target)
            sync_folder(target.parent)
        finally:
            Path(name).unlink(missing_ok=True)


def _refuse_too_large(index: Index, folder: Path) -> None:
    with index.read() as connection:
        reserve = settings.find(connection, settings.RESERVE_BYTES)
    needed, free = index.used_bytes + index.free_bytes, Disk.of(folder).room(reserve)
    if needed > free:
        raise DiskFull(
            f"a copy of {needed} bytes doesn't fit: the disk of {folder} has {max(0, free)} bytes free, besides what is to be "
            "left to others"
        )
