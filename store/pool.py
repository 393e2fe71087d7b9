"""Free connections to the index, without a lock among them."""

from collections import deque
from collections.abc import Callable
from typing import Any

from sqlalchemy.pool import ConnectionPoolEntry, Pool

# As many as write and read at a time in most programs; more are closed when they come back.
_MAX_FREE = 5


class FreeConnections(Pool):
    """Gives a connection that is free, or makes one.

    Instead of SQLAlchemy's `QueuePool`, which waits at condition variables: an interrupt that comes when one of those has
    its lock, and before that is known, leaves it locked, and the program never ends. To append to a deque and to pop from
    it are single steps. Nobody needs to wait for a connection either: SQLite has no limit of them.
    """

    def __init__(self, creator: Callable[..., Any], **options: Any) -> None:
        super().__init__(creator, **options)
        self._free: deque[ConnectionPoolEntry] = deque()

    def _do_get(self) -> ConnectionPoolEntry:
        try:
            return self._free.pop()
        except IndexError:
            return self._create_connection()

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        if len(self._free) < _MAX_FREE:
            self._free.append(record)
        else:
            record.close()

    def recreate(self) -> "FreeConnections":
        """Another one like this, with nothing in it."""
        return FreeConnections(
            self._creator,
            recycle=self._recycle,
            echo=self.echo,
            pre_ping=self._pre_ping,
            logging_name=self._orig_logging_name,
            reset_on_return=self._reset_on_return,
            _dispatch=self.dispatch,
            dialect=self._dialect,
        )

    def dispose(self) -> None:
        """Close those that are free."""
        while self._free:
            self._free.pop().close()

    def status(self) -> str:
        """For people."""
        return f"{len(self._free)} free connections"
