"""The index's SQLite database: connections, transactions, errors and schema version. SQL itself lives with its nouns.

sqlalchemy has its home in this package: here, in `schema`, and in the modules of the tables.
"""

import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from sqlite3 import Connection as DriverConnection

from sqlalchemy import URL, Connection, create_engine, event, inspect, text
from sqlalchemy.pool import ConnectionPoolEntry

from kvkeep.store.errors import (
    DamagedFile,
    IndexFull,
    KvkeepError,
    MigrationFailed,
    NotARoot,
    TooNew,
)
from kvkeep.store.patience import Patience
from kvkeep.store.pool import FreeConnections
from kvkeep.store.private import make_private_file, occupied_bytes
from kvkeep.store.releases import known_revisions, migrate_command, release_number
from kvkeep.store.schema import REVISION
from kvkeep.store.space import DEFAULT_CAPACITY, Space
from kvkeep.store.sqlite_errors import translated, translation
from kvkeep.store.steps import Step, reached

# The type of a transaction's handle, for those above the store, who don't know sqlalchemy.
__all__ = ["BUSY_SECONDS", "Connection", "Index"]

# A writer here waits this long for another process's commit; writers are serialised by `writer.lock` anyway.
BUSY_SECONDS = 5.0
# Some seconds of work; an index of 4 GiB of ordinary models has a tenth of that.
MAX_REWRITE_BYTES = 64 << 20
PAGE_BYTES = 4096
# The files that SQLite keeps beside each other.
SUFFIXES = ("", "-wal", "-shm")
# Pages of a copy; some milliseconds, after which it can be interrupted.
_COPIED_AT_ONCE = 1024
_WRITE = "kvkeep_write"

# Must come before the first table: it can't be changed later without rewriting the file. Said to an empty file only,
# because it takes the writer's lock even where it changes nothing, and a reader must never wait for a writer.
_FIRST_PRAGMA = "PRAGMA auto_vacuum=INCREMENTAL"
_PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    # With NORMAL a power cut may take back commits. One of those may have named the blobs that took the place of others,
    # and those others were deleted right behind it: chats that were stored long ago would be gone too.
    "PRAGMA synchronous=FULL",
    "PRAGMA foreign_keys=ON",
    # What is deleted is overwritten in the pages that are written anyway; the others go with a compaction. So `rm` and
    # `compact` together leave nothing of a chat on the disk.
    "PRAGMA secure_delete=FAST",
    f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}",
)


class Index:
    """The database file. Threads may share it: each transaction takes a connection of its own from the pool."""

    def __init__(self, path: Path, space: Space | None = None) -> None:
        self.path = path
        self.space = space or Space(DEFAULT_CAPACITY)
        if path.is_dir():
            raise NotARoot(f"{path} is a folder; a file is needed")
        try:
            make_private_file(path)
        except OSError as error:
            raise NotARoot(f"{path} can't be created: {error.strerror}") from error
        self._engine = create_engine(URL.create("sqlite", database=str(path)), poolclass=FreeConnections)
        event.listen(self._engine, "connect", self._configure)
        event.listen(self._engine, "begin", _begin)
        self._patience = Patience(BUSY_SECONDS)
        # Connections in use, by thread.
        self._used: dict[int, list[DriverConnection]] = {}
        event.listen(self._engine, "checkout", self._taken)
        event.listen(self._engine, "checkin", self._given_back)

    def _configure(self, connection: DriverConnection, _record: ConnectionPoolEntry) -> None:
        # The driver's own transactions begin too late and as readers; we emit BEGIN ourselves.
        connection.isolation_level = None
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            connection.execute(_FIRST_PRAGMA)
        for pragma in (*_PRAGMAS, *self._bounds()):
            connection.execute(pragma)

    def resize(self, space: Space) -> None:
        """Divide another budget from now on. For whoever opens it: transactions that run keep their bounds."""
        self.space = space
        # The bounds belong to connections; new ones take the new bounds.
        self._engine.dispose()

    def _bounds(self) -> tuple[str, ...]:
        """The index's share of the budget, as SQLite keeps it."""
        return (
            f"PRAGMA max_page_count={self.space.index_bytes // PAGE_BYTES}",
            # Without a limit the log keeps its largest size for good. In pages; the default is 1,000.
            f"PRAGMA journal_size_limit={self.space.log_bytes // 4}",
            f"PRAGMA wal_autocheckpoint={max(16, self.space.log_bytes // 4 // PAGE_BYTES)}",
        )

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
        handled = sys.exc_info()[1]
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
            if (interrupt := _interrupt_behind(error, handled)) is not None:
                raise interrupt from None
            raise

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view, for as long as the block runs. Never waits for a writer."""
        with translated(), self._interruptible(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction, committed at the end of the block, rolled back by an exception. Durable on return.

        BEGIN IMMEDIATE, because a transaction that begins as a reader and then writes gets "database is locked" at
        once, whatever the busy timeout.

        Raises:
            IndexFull: the index, or its log, has no room left within the budget.
            StoreLocked: another process writes, and didn't finish in time.
        """
        self._keep_log_small()
        writing = self._engine.execution_options(**{_WRITE: True})
        with translated(), self._interruptible(), writing.begin() as connection:
            yield connection

    def _keep_log_small(self) -> None:
        """Empty the write-ahead log before it takes more than its share.

        SQLite does it by itself behind a commit, but not beside a reader who still needs it, and such a reader may hang
        for days.
        """
        if self.log_bytes > self.space.log_bytes // 2:
            self.empty_log()
            if self.log_bytes > self.space.log_bytes // 2:
                raise IndexFull(f"the log of {self.path} can't be emptied, because somebody has been reading for long")

    def empty_log(self) -> None:
        """Move what the log holds into the file, as far as no reader needs it, and cut the log to nothing."""
        with translated(), self._raw() as connection:
            # Asked again and again instead of SQLite's own waiting: that doesn't wait for others who do the same.
            connection.execute("PRAGMA busy_timeout=0")
            try:
                self._patience.until(lambda: not connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
            finally:
                connection.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")

    @contextmanager
    def _raw(self) -> Iterator[DriverConnection]:
        """A connection outside of any transaction."""
        pooled = self._engine.raw_connection()
        try:
            connection = pooled.driver_connection
            assert isinstance(connection, DriverConnection)
            # What SQLAlchemy would translate if it came by its own ways.
            try:
                yield connection
            except sqlite3.Error as error:
                raise translation(str(error)) from error
        finally:
            pooled.close()

    def rewrite(self) -> None:
        """Write the file anew: free pages go back to the disk, and nothing of deleted rows is left in the others.

        Not beside a reader who keeps the log from being emptied, nor where it would take long: others wait for it to write.
        """
        self.empty_log()
        if self.log_bytes > 0 or self.used_bytes > MAX_REWRITE_BYTES:
            self.shrink()
            return
        with translated(), self._raw() as connection:
            # Not in a temporary file: that is on another disk, and readable by others while it is there.
            connection.execute("PRAGMA temp_store=MEMORY")
            connection.execute("VACUUM")
        self.empty_log()

    def shrink(self) -> None:
        """Give free pages back to the disk, in pieces that the log has room for."""
        pages = max(1, self.space.log_bytes // 4 // PAGE_BYTES)
        while self.free_bytes > 0:
            before = self.free_bytes
            with self.write() as connection:
                driver = connection.connection.driver_connection
                assert isinstance(driver, DriverConnection)
                # Gives back a page with each step; SQLAlchemy takes it for a statement without rows, and does one.
                driver.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()
            self.empty_log()
            if self.free_bytes >= before:
                # Somebody still reads, or has written meanwhile.
                return

    def _pragma(self, name: str) -> int:
        with self.read() as connection:
            return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that hold something."""
        with self.read() as connection:
            pages, free = (
                int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()) for name in ("page_count", "freelist_count")
            )
        return (pages - free) * PAGE_BYTES

    @property
    def free_bytes(self) -> int:
        """Bytes of the file that hold nothing any more."""
        return self._pragma("freelist_count") * PAGE_BYTES

    @property
    def log_bytes(self) -> int:
        """Bytes of the write-ahead log."""
        return occupied_bytes(self._beside("-wal"))

    def complaint(self) -> str | None:
        """The first thing that is wrong with the structure of the file, or None. Reads all of it."""
        try:
            with self.read() as connection:
                found = str(connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one())
        except DamagedFile as error:
            return str(error)
        return None if found == "ok" else found

    def revision(self) -> str | None:
        """The schema's revision, or None in an empty database.

        Raises:
            DamagedFile: it is no database, or doesn't say.
        """
        with self.read() as connection:
            tables = inspect(connection).get_table_names()
            if not tables:
                return None
            if "alembic_version" not in tables:
                raise DamagedFile(f"{self.path} has tables, and no word about its schema")
            found: object = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
            if not isinstance(found, str):
                raise DamagedFile(f"{self.path} says {found!r} about its schema")
            return found

    def is_current(self, wanted: str = REVISION) -> bool:
        """Whether the schema is this version's, or the one that is wanted instead.

        Raises:
            TooNew: it is of a version that this one doesn't know.
        """
        found = self.revision()
        if found == wanted:
            return True
        if found is not None and found not in known_revisions():
            if self._pragma("user_version") != release_number(found):
                # Written twice, because one flipped bit would otherwise end a store that is sound.
                raise DamagedFile(f"{self.path} names a schema {found!r} that it doesn't have")
            raise TooNew(
                f"{self.path} has schema {found}, which is newer than schema {REVISION} of this kvkeep: update kvkeep, "
                f"or name another folder, or with the newer kvkeep: {migrate_command(self.path.parent, REVISION, to=True)}"
            )
        return False

    def upgrade(self) -> None:
        """Bring the schema to this version's, in one transaction. The caller holds the root's lock alone.

        Raises:
            MigrationFailed: the old schema is unchanged.
        """
        from kvkeep.migrations.upgrade import upgrade  # alembic takes 0.2 s to import, and is rarely needed

        with self._changing_to(REVISION) as connection:
            upgrade(connection)

    def migrate(self, wanted: str) -> None:
        """Bring the schema to any known revision, up or down; otherwise as `upgrade`."""
        from kvkeep.migrations.upgrade import migrate

        found = self.revision()
        with self._changing_to(wanted) as connection:
            migrate(connection, found, wanted)

    @contextmanager
    def _changing_to(self, wanted: str) -> Iterator[Connection]:
        """The one transaction of a migration."""
        try:
            with self.write() as connection:
                yield connection
                connection.exec_driver_sql(f"PRAGMA user_version={release_number(wanted)}")
                reached(Step.MIGRATE_CHANGED)
            reached(Step.MIGRATE_COMMITTED)
        except KvkeepError:
            raise
        except Exception as error:
            raise MigrationFailed(
                f"{self.path} couldn't be brought to schema {wanted}, and is unchanged: {error}. To try again: "
                f"{migrate_command(self.path.parent, wanted)}"
            ) from error

    def copy_to(self, target: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Copy the database into an empty file. Others may use it meanwhile.

        By SQLite itself: whoever opens and closes a database's file by other ways drops all locks that this process has on it.

        Args:
            target: the file. Whole and durable on return; after an error nobody needs it.
            progress: called with the bytes that are done, and all that there are; may raise to stop.
        """

        def report(_status: int, left: int, total: int) -> None:
            progress((total - left) * PAGE_BYTES, total * PAGE_BYTES)

        with translated(), self._raw() as connection, closing(sqlite3.connect(target)) as copy:
            copy.execute("PRAGMA journal_mode=OFF")
            connection.backup(copy, pages=_COPIED_AT_ONCE, progress=report)

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the database with its write-ahead log."""
        return occupied_bytes(*(self._beside(suffix) for suffix in SUFFIXES))

    def close(self) -> None:
        self._engine.dispose()

    def abandon(self) -> None:
        """In a forked child: forget the connections without closing them, for they are the parent's."""
        self._engine.dispose(close=False)


def _interrupt_behind(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """The interrupt that a library has turned into an error of its own, such as an assertion that it then met.

    Args:
        error: what came out.
        handled: what was being handled before; that is no interrupt of this.
    """
    behind = error.__context__
    while behind is not None and behind is not handled and isinstance(behind, Exception):
        behind = behind.__context__
    return behind if isinstance(error, Exception) and behind is not handled else None


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get(_WRITE):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.exec_driver_sql("BEGIN")
        # A plain BEGIN takes no view of the database before its first SELECT: rows read later than the blobs beside
        # them would name some that this snapshot of the blobs doesn't have.
        connection.exec_driver_sql("SELECT 1 FROM sqlite_master LIMIT 1")
