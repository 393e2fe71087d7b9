"""Locks between processes. The one home of the portalocker package.

`flock` on Unix, so a lock belongs to one open file: threads of one process exclude each other as processes do, and a
dead process leaves nothing locked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import portalocker

from kvkeep.store.errors import StoreError, StoreLocked
from kvkeep.store.private import disk_errors, make_private_file

# portalocker asks again this often; its default of 0.25 s would be most of a small save.
_ASK_AGAIN = 0.01


class SharedLock:
    """Held by everyone who has a root open; exclusive while its schema changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: portalocker.Lock | None = None

    def share(self, timeout: float) -> None:
        """Hold it together with others.

        Raises:
            StoreLocked: somebody held it exclusively for `timeout` seconds.
        """
        self._take(portalocker.LockFlags.SHARED, timeout)

    def exclude(self, timeout: float) -> None:
        """Hold it alone. Whatever was held before is given up first, so look again at what you knew.

        Raises:
            StoreLocked: others held it for `timeout` seconds; nothing is held now.
        """
        self._take(portalocker.LockFlags.EXCLUSIVE, timeout)

    def _take(self, how: portalocker.LockFlags, timeout: float) -> None:
        self.release()
        self._held = _acquire(self._path, how, timeout)

    def try_exclude(self) -> bool:
        """Hold it alone if nobody else has it right now. Otherwise nothing is held."""
        try:
            self.exclude(0)
        except StoreLocked:
            return False
        return True

    def downgrade(self) -> None:
        """From holding it alone to sharing it, through the same open file.

        The system may let somebody else have it alone for a moment in between: look again at what you knew.

        Raises:
            StoreLocked: somebody else was quicker, and nothing is held now.
        """
        assert self._held is not None
        assert self._held.fh is not None
        try:
            portalocker.lock(self._held.fh, portalocker.LockFlags.SHARED | portalocker.LockFlags.NON_BLOCKING)
        except portalocker.exceptions.LockException as error:
            self.release()
            raise StoreLocked(f"{self._path} was taken by another process") from error

    def release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None


@contextmanager
def exclusive(path: Path, timeout: float) -> Iterator[None]:
    """Hold `path` alone for the length of a `with` block.

    Raises:
        StoreLocked: another holder didn't let go within `timeout` seconds.
    """
    lock = _acquire(path, portalocker.LockFlags.EXCLUSIVE, timeout)
    try:
        yield
    finally:
        lock.release()


def _acquire(path: Path, how: portalocker.LockFlags, timeout: float) -> portalocker.Lock:
    # Made here with the mode that we want; portalocker would leave it to the umask.
    with disk_errors(f"creating {path}"):
        make_private_file(path)
    lock = portalocker.Lock(
        path, mode="a", timeout=timeout, check_interval=_ASK_AGAIN, flags=how | portalocker.LockFlags.NON_BLOCKING
    )
    try:
        lock.acquire()
    except portalocker.exceptions.AlreadyLocked as error:
        raise StoreLocked(f"{path} stayed locked by another process for {timeout:g} seconds") from error
    except portalocker.exceptions.LockException as error:
        raise StoreError(f"{path} can't be locked: {error}") from error
    return lock
