"""How many bytes may be stored a day: for disks that wear out.

A count of the root, not of the process, because the disk is the same for all. Days end at midnight UTC. It is kept only where
there is a limit, as it costs one more commit a save.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from kvkeep.cache.batches import Saved
from kvkeep.cache.writer import HandOver
from kvkeep.store import rows, settings
from kvkeep.store.engine import Connection
from kvkeep.store.errors import CapacityError, DailyLimit, KvkeepError, StoreLocked
from kvkeep.store.repository import Repository

_DAY_SECONDS = 86_400


def today() -> int:
    """Days since 1970, UTC."""
    return int(time.time() // _DAY_SECONDS)


def limit(connection: Connection) -> int:
    """Bytes that may be stored a day; 0 is as many as come."""
    return max(0, settings.find(connection, settings.DAILY_BYTES) or 0)


def stored_today(connection: Connection) -> int:
    """Bytes that were stored today, since there has been a limit."""
    # Not only that very day: a clock that is set back and forth doesn't begin it anew.
    if (settings.find(connection, settings.STORED_DAY) or 0) < today():
        return 0
    return max(0, settings.find(connection, settings.STORED_BYTES) or 0)


def agree(repository: Repository, daily_bytes: int | None) -> None:
    """Have a limit from now on; what was stored today before it counts, as far as it is still there. None is no wish."""
    with repository.rows() as connection:
        had_none = limit(connection) == 0
    if daily_bytes and had_none:
        midnight = today() * _DAY_SECONDS
        _count(repository, lambda connection: rows.stored_since(connection, midnight) - stored_today(connection))
    repository.agree_on(settings.DAILY_BYTES, daily_bytes)


class Admission:
    """The right to do one save, however often it is begun: whoever is handed a job does it anew from where it was left."""

    def __init__(self) -> None:
        self._began: float | None = None

    def save(self, repository: Repository, run: Callable[[], Saved]) -> Saved:
        """Do the save, unless as much as may be was stored today, and count what it stores.

        The save that reaches the limit is still done as a whole: how much is new in a state shows only while it is saved.

        Args:
            repository: the root.
            run: does it.

        Raises:
            DailyLimit: it wasn't begun.
        """
        with repository.rows() as connection:
            at_most, so_far = limit(connection), stored_today(connection)
        if at_most == 0:
            return run()
        is_first = self._began is None
        if is_first and so_far >= at_most:
            raise DailyLimit(f"{at_most} bytes may be stored a day, and today they were: more is stored after midnight UTC")
        began = self._began = time.time() if self._began is None else self._began
        try:
            saved = run()
        except (StoreLocked, HandOver):
            raise  # not begun, or gone on with by somebody else
        except BaseException:
            # Some batches of it may be on the disk.
            with suppress(KvkeepError):
                _count(repository, lambda connection: rows.stored_since(connection, began))
            raise
        # What can't be counted now isn't: it is stored all the same.
        with suppress(StoreLocked, CapacityError):
            if not is_first:
                _count(repository, lambda connection: rows.stored_since(connection, began))
            elif saved.written_bytes:
                _count(repository, lambda _: saved.written_bytes)
        return saved


def _count(repository: Repository, n_bytes: Callable[[Connection], int]) -> None:
    with repository.writing() as writing, writing.index.write() as connection:
        total = stored_today(connection) + n_bytes(connection)
        settings.put(connection, settings.STORED_DAY, max(today(), settings.find(connection, settings.STORED_DAY) or 0))
        settings.put(connection, settings.STORED_BYTES, total)
