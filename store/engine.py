"""The index's SQLite database: connections, transactions, errors and schema version. SQL itself lives with its nouns.

sqlalchemy has its home in this package: here, in `schema`, and in the modules of the tables.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from sqlite3 import Connection as DriverConnection

from sqlalchemy import URL, Connection, create_engine, event, exc, inspect, text
from sqlalchemy.pool import ConnectionPoolEntry

from kvkeep.store.errors import (
    DiskFull,
    IntegrityError,
    KvkeepError,
    MigrationFailed,
    NotARoot,
    StoreError,
    StoreLocked,
    TooNew,
)
from kvkeep.store.schema import REVISION

# The type of a transaction's handle, for those above the store, who don't know sqlalchemy.
__all__ = ["BUSY_SECONDS", "WAL_BYTES", "Connection", "Index", "translated"]

# A writer here waits this long for another process's commit; writers are serialised by `writer.lock` anyway.
BUSY_SECONDS = 5.0
WAL_BYTES = 1 << 20
_WRITE = "kvkeep_write"

# Must come before the first table: it can't be changed later without rewriting the file. Said to an empty file only,
# because it takes the writer's lock even where it changes nothing, and a reader must never wait for a writer.
_FIRST_PRAGMA = "PRAGMA auto_vacuum=INCREMENTAL"
_PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    # A power cut may lose the last commits, never corrupt: each lost row is a miss, and its blob garbage.
    "PRAGMA synchronous=NORMAL",
    "PRAGMA foreign_keys=ON",
    # The WAL counts against the byte budget; without a limit it keeps its largest size for good.
    f"PRAGMA journal_size_limit={WAL_BYTES}",
    # In pages of 4 KiB; the default of 1,000 lets the log grow to 4 MiB.
    f"PRAGMA wal_autocheckpoint={WAL_BYTES // 4096}",
    f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}",
)


class Index:
    """The database file. Threads may share it: each transaction takes a connection of its own from the pool."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _create_private(path)
        self._engine = create_engine(URL.create("sqlite", database=str(path)))
        event.listen(self._engine, "connect", _configure)
        event.listen(self._engine, "begin", _begin)
        # Connections in use, by thread.
        self._used: dict[int, list[DriverConnection]] = {}
        event.listen(self._engine, "checkout", self._taken)
        event.listen(self._engine, "checkin", self._given_back)

    def _taken(self, connection: DriverConnection, _record: ConnectionPoolEntry, _proxy: object) -> None:
        self._used.setdefault(threading.get_ident(), []).append(connection)

    def _given_back(self, connection: DriverConnection | None, _record: ConnectionPoolEntry) -> None:
        mine = self._used.get(threading.get_ident(), [])
        self._used[threading.get_ident()] = [other for other in mine if other is not connection]

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """End a transaction that an interrupt has left open.

        Ctrl-C may come inside of SQLAlchemy, between BEGIN and whoever would end it, and the next writer waited in vain.
        """
        outer = list(self._used.get(threading.get_ident(), []))
        try:
            yield
        except BaseException as error:
            inner = [mine for mine in self._used.get(threading.get_ident(), []) if mine not in outer]
            for connection in inner:
                # One that the pool has closed already has no transaction.
                with suppress(sqlite3.ProgrammingError):
                    connection.rollback()
            if inner:
                # Not used again: what SQLAlchemy believes of it may be wrong.
                self._used[threading.get_ident()] = outer
                self._engine.dispose(close=False)
            if (interrupt := _interrupt_behind(error)) is not None:
                raise interrupt from None
            raise

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view, for as long as the block runs. Never waits for a writer."""
        with translated(), self._interruptible(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction, committed at the end of the block, rolled back by an exception.

        BEGIN IMMEDIATE, because a transaction that begins as a reader and then writes gets "database is locked" at
        once, whatever the busy timeout.
        """
        writing = self._engine.execution_options(**{_WRITE: True})
        with translated(), self._interruptible(), writing.begin() as connection:
            yield connection

    def revision(self) -> str | None:
        """The schema's revision, or None in an empty database."""
        with self.read() as connection:
            if not inspect(connection).has_table("alembic_version"):
                return None
            found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
            return found

    def is_current(self) -> bool:
        """Whether the schema is this version's.

        Raises:
            TooNew: it is of a version that this one doesn't know.
        """
        found = self.revision()
        if found == REVISION:
            return True
        if found is not None and found not in _known_revisions():
            raise TooNew(
                f"{self.path} has schema {found}, which is newer than schema {REVISION} of this kvkeep: update kvkeep, "
                "or name another folder"
            )
        return False

    def upgrade(self) -> None:
        """Bring the schema to this version's, in one transaction. The caller holds the root's lock alone.

        Raises:
            MigrationFailed: the old schema is unchanged.
        """
        from kvkeep.migrations.upgrade import upgrade  # alembic takes 0.2 s to import, and is rarely needed

        try:
            with self.write() as connection:
                upgrade(connection)
        except KvkeepError:
            raise
        except Exception as error:
            raise MigrationFailed(f"{self.path} couldn't be brought to schema {REVISION}: {error}") from error

    @property
    def disk_bytes(self) -> int:
        """Bytes of the database with its write-ahead log."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            # SQLite removes the log when the last user closes.
            with suppress(FileNotFoundError):
                total += self.path.with_name(self.path.name + suffix).stat().st_blocks * 512
        return total

    def close(self) -> None:
        self._engine.dispose()

    def abandon(self) -> None:
        """In a forked child: forget the connections without closing them, for they are the parent's."""
        self._engine.dispose(close=False)


def _interrupt_behind(error: BaseException) -> BaseException | None:
    """The interrupt that a library has turned into an error of its own, such as an assertion that it then met."""
    behind = error.__context__
    while behind is not None and isinstance(behind, Exception):
        behind = behind.__context__
    return behind if isinstance(error, Exception) else None


def _known_revisions() -> list[str]:
    from kvkeep.migrations.upgrade import revisions

    return revisions()


def _create_private(path: Path) -> None:
    """Create the file with mode 0600 before SQLite does with the umask's; WAL and SHM files inherit it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        # Left unopened: closing any descriptor of a database that this process has open drops all its POSIX locks.
        pass
    except OSError as error:
        raise NotARoot(f"{path} can't be created: {error.strerror}") from error


def _configure(connection: DriverConnection, _record: ConnectionPoolEntry) -> None:
    # The driver's own transactions begin too late and as readers; we emit BEGIN ourselves.
    connection.isolation_level = None
    if connection.execute("PRAGMA page_count").fetchone() == (0,):
        connection.execute(_FIRST_PRAGMA)
    for pragma in _PRAGMAS:
        connection.execute(pragma)


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get(_WRITE):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.exec_driver_sql("BEGIN")
        # A plain BEGIN takes no view of the database before its first SELECT: rows read later than the blobs beside
        # them would name some that this snapshot of the blobs doesn't have.
        connection.exec_driver_sql("SELECT 1 FROM sqlite_master LIMIT 1")


# What SQLite says, and what it is to us. Looked for in its message: the driver's classes are too coarse.
_MEANINGS: tuple[tuple[str, type[KvkeepError]], ...] = (
    ("database is locked", StoreLocked),
    ("disk is full", DiskFull),
    ("disk I/O error", DiskFull),
    ("file is not a database", IntegrityError),
    ("malformed", IntegrityError),
    ("readonly database", NotARoot),
    ("unable to open database file", NotARoot),
)


@contextmanager
def translated() -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except exc.SQLAlchemyError as error:
        said = str(getattr(error, "orig", error))
        kind = next((kind for sign, kind in _MEANINGS if sign in said), StoreError)
        raise kind(f"the index failed: {said}") from error
