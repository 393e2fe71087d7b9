"""Generations of blobs: `blobs-1`, `blobs-2`, ... One of them is named by the index; the others are leftovers.

A compaction, or a recovery, writes a new one beside the old one and then switches in one transaction.
"""

import re
from contextlib import suppress
from pathlib import Path

from kvkeep.store import settings
from kvkeep.store.blobs import DATA_FILE, LOCK_FILE
from kvkeep.store.engine import Connection
from kvkeep.store.errors import DamagedFile
from kvkeep.store.private import occupied_bytes

_NAME = re.compile(r"blobs-([1-9]\d{0,8})")
# A compaction a minute, for two thousand years.
LAST = 999_999_999


def folder(root: Path, generation: int) -> Path:
    """Where the blobs of a generation are."""
    return root / f"blobs-{generation}"


def current(connection: Connection, root: Path) -> int:
    """The generation that the index names.

    In an index that names none yet, the oldest that there is: of two, the newer one may be half a copy.

    Raises:
        DamagedFile: the index names one that can't be.
    """
    found = settings.find(connection, settings.GENERATION)
    if found is None:
        return min(present(root), default=1)
    if _NAME.fullmatch(f"blobs-{found}") is None:
        raise DamagedFile(f"the index names a generation of blobs that can't be: {found}")
    return found


def present(root: Path) -> list[int]:
    """Generations that have a folder, the oldest first."""
    names = (_NAME.fullmatch(path.name) for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(int(name[1]) for name in names if name is not None)


def occupied(root: Path) -> int:
    """Bytes that all generations take on the disk, leftovers included."""
    files = (folder(root, generation) / name for generation in present(root) for name in (DATA_FILE, LOCK_FILE))
    return occupied_bytes(*files)


def remove(root: Path, generation: int) -> None:
    """Delete a generation. Others may still have its files open: they keep them until they close. Foreign files stay."""
    place = folder(root, generation)
    # What can't be deleted now, as a file that others have open on Windows, is a leftover for whoever comes alone next;
    # nor can a folder in which somebody has put something that isn't ours.
    with suppress(OSError):
        for name in (DATA_FILE, LOCK_FILE):
            (place / name).unlink(missing_ok=True)
        place.rmdir()


def remove_leftovers(root: Path, keep: int) -> int:
    """Delete all generations but one. Returns how many."""
    leftovers = [generation for generation in present(root) if generation != keep]
    for generation in leftovers:
        remove(root, generation)
    return len(leftovers)
