"""Files and folders that only their owner can read, whatever the umask; and what they take on the disk."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvkeep.store.errors import DiskFull, StoreError

FOLDER_MODE = 0o700
FILE_MODE = 0o600

# A disk, or a user's quota on it, that is full; or one that gives errors, which is how some say the same.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Errors of the system as ours.

    Args:
        what: what is done, for the message.
    """
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in _NO_ROOM else StoreError
        raise kind(f"{what} failed: {error.strerror or error}") from error


def make_private_folder(path: Path, *, parents: bool = False) -> None:
    """Create a folder that only its owner can look into. One that exists keeps the mode that somebody gave it.

    Raises:
        OSError: it can't be created.
    """
    try:
        path.mkdir(mode=FOLDER_MODE, parents=parents)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        # The umask takes bits from what was asked for; one of 0o777 would leave a folder that nobody can enter.
        path.chmod(FOLDER_MODE)


def make_private_file(path: Path) -> None:
    """Create an empty file that only its owner can read. One that exists is left as it is, and isn't even opened.

    Closing any descriptor of a file drops all POSIX locks that this process has on it, and databases have them.

    Raises:
        OSError: it can't be created.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, FILE_MODE)
    except FileExistsError:
        return
    try:
        os.chmod(path, FILE_MODE)
    finally:
        os.close(descriptor)


def occupied_bytes(*files: Path) -> int:
    """Bytes that files really take on the disk. Those that don't exist take none."""
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            found = file.stat()
            # Windows doesn't say how many blocks it has given.
            total += found.st_blocks * 512 if hasattr(found, "st_blocks") else found.st_size
    return total


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk: a synced file whose name is lost is lost."""
    if os.name == "nt":
        # Folders can't be opened there; NTFS journals names.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
