"""Blobs and rows kept in step. Every ordering rule of the store is in this file:

    saving      blob committed, then the row that names it
    deleting    row committed, then the blob
    reading     row, then blob

A blob without a row is garbage, swept later; a row without a blob is a miss. `writer.lock` is held from the look-up
of what exists to the commit of the rows, so that no saver skips a blob that an evictor is about to delete.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import SupportsIndex

from sqlalchemy import Connection

from kvkeep.store import namespaces, rows, settings
from kvkeep.store.blobs import BlobReader, BlobStore
from kvkeep.store.engine import Index
from kvkeep.store.entry import Entry
from kvkeep.store.errors import MapFull, NotARoot, StoreClosed, UsageError
from kvkeep.store.hashing import BlobId
from kvkeep.store.locks import SharedLock, exclusive
from kvkeep.store.rows import NewRow
from kvkeep.store.verify import is_sound

INDEX_FILE = "index.sqlite3"
ROOT_LOCK = "lock"
WRITER_LOCK = "writer.lock"


class DefaultCapacity(int):
    """A number of bytes that nobody has asked for: it never replaces a budget that a root remembers."""


DEFAULT_CAPACITY = DefaultCapacity(4 << 30)
# Below this the index's share leaves next to nothing for blobs.
MIN_CAPACITY = 16 << 20
# The largest file of ext4 has 16 TiB, and the map is one file.
MAX_CAPACITY = 8 << 40
# The index's share of the budget: about 1 KB a block of tens of KB and more, and never less than its write-ahead log and
# the copies that SQLite makes of pages need.
INDEX_SHARE = 1 / 8
MIN_INDEX_BYTES = 4 << 20

# How long an open waits for another process's schema migration.
OPEN_SECONDS = 10.0
# How long a close waits for those who still read.
CLOSE_SECONDS = 60.0
# A save that can't get the writer's lock in this time is dropped and counted.
WRITE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A row to be, with the value that its blob will have."""

    row: NewRow
    value: bytes


class Snapshot:
    """Rows and blobs for reading. The rows were read first, so a blob that they name may be gone: that is a miss."""

    def __init__(self, connection: Connection, blobs: BlobReader) -> None:
        self.connection = connection
        self.blobs = blobs


class Writing:
    """The right to write, for as long as a `with repository.writing()` block runs."""

    def __init__(self, index: Index, blobs: BlobStore) -> None:
        self.index = index
        self.blobs = blobs

    def add(self, namespace_id: int, entries: Sequence[NewEntry], replacing: Sequence[Entry] = ()) -> None:
        """Store entries, parents before children, and remove those that they make superfluous.

        Raises:
            MapFull, DiskFull: nothing of this call was stored.
        """
        self.blobs.put((entry.row.blob, entry.value) for entry in entries)
        with self.index.write() as connection:
            new = [entry.row for entry in entries]
            # Removed first: a new row may have the key of the one that it replaces.
            rows.remove(connection, replacing)
            rows.add(connection, namespace_id, new)
            orphans = _unnamed(connection, replacing)
        self._delete(orphans)

    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove entries, and the blobs that no other row names."""
        with self.index.write() as connection:
            rows.remove(connection, entries)
            orphans = _unnamed(connection, entries)
        self._delete(orphans)

    def remove_damaged(self, entries: Sequence[Entry]) -> int:
        """Remove those of `entries` that are still there and still don't verify. Returns how many were removed.

        Looked at again under the lock: another process may have removed and rewritten them meanwhile.
        """
        with self.index.read() as connection, self.blobs.read() as reader:
            present = [entry for entry in entries if rows.is_there(connection, entry)]
            damaged = [entry for entry in present if not is_sound(reader.get(entry.blob), entry)]
        self.remove(damaged)
        return len(damaged)

    def sweep(self) -> int:
        """Delete blobs that no row names; killed writers leave them. Returns their number."""
        with self.index.read() as connection:
            named = rows.all_named(connection)
        with self.blobs.read() as reader:
            orphans = [name for name in reader.ids() if name not in named]
        self._delete(orphans)
        return len(orphans)

    def _delete(self, names: Sequence[BlobId]) -> None:
        """Delete blobs whose rows are gone. Where even that finds no room they stay, as garbage for the next sweep."""
        if not names:
            return
        with suppress(MapFull):
            try:
                self.blobs.delete(names)
            except MapFull:
                # A really full map can't delete at once.
                self.blobs.settle()
                self.blobs.delete(names)


def _unnamed(connection: Connection, entries: Sequence[Entry]) -> list[BlobId]:
    """Those of the entries' blobs that no row names any more."""
    names = list({entry.blob for entry in entries})
    still = rows.named(connection, names)
    return [name for name in names if name not in still]


class Repository:
    """One root folder, open in this process.

    Use `open_root`, which gives everyone in the process the same one.

    Raises:
        NotARoot: the path is a file, or can't be created or written.
        TooNew: a newer kvkeep wrote it.
        StoreLocked: another process is migrating it, and didn't finish in time.
    """

    def __init__(self, path: Path, capacity_bytes: int | None = None) -> None:
        self.path = path
        self._pid = os.getpid()
        self._closed = False
        self._touched: dict[tuple[str, int], int] = {}
        self._touching = threading.Lock()
        self._users = 0
        self._left = threading.Condition()
        _make_private(path)
        self._lock = SharedLock(path / ROOT_LOCK)
        self._lock.share(OPEN_SECONDS)
        with ExitStack() as undo:
            undo.callback(self._lock.release)
            self.index = Index(path / INDEX_FILE)
            undo.callback(self.index.close)
            self._bring_up_to_date()
            self.capacity_bytes = self._known_capacity() if capacity_bytes is None else capacity_bytes
            with self.index.read() as connection:
                generation = settings.get(connection, settings.GENERATION, 1)
            self.blobs = self._open_blobs(path / f"blobs-{generation}")
            undo.callback(self.blobs.close)
            # Remembered only now: a budget with which nothing can be opened must not be found by the next one.
            self.agree_on_capacity(capacity_bytes)
            undo.pop_all()

    def _open_blobs(self, folder: Path) -> BlobStore:
        map_bytes = _map_bytes(self.capacity_bytes)
        if not BlobStore.is_too_short(folder, map_bytes):
            return BlobStore(folder, map_bytes)
        # Under the lock, because extending a file that somebody else extends further would cut it.
        with exclusive(self.path / WRITER_LOCK, OPEN_SECONDS):
            return BlobStore(folder, map_bytes)

    def _bring_up_to_date(self) -> None:
        while not self.index.is_current():
            self._lock.exclude(OPEN_SECONDS)
            # Somebody else may have done it while we waited.
            if not self.index.is_current():
                self.index.upgrade()
            # Looked at once more: between the two locks a newer kvkeep may have changed it.
            self._lock.share(OPEN_SECONDS)

    def _known_capacity(self) -> int:
        with self.index.read() as connection:
            return settings.get(connection, settings.CAPACITY_BYTES, DEFAULT_CAPACITY)

    def agree_on_capacity(self, wanted: int | None) -> None:
        """Remember a budget for the next open. The last explicit wish wins."""
        if wanted is not None and wanted != self._known_capacity():
            with self.index.write() as connection:
                settings.put(connection, settings.CAPACITY_BYTES, wanted)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the environment open: reading from a map that is gone ends the process."""
        with self._left:
            self._check_open()
            self._users += 1
        try:
            yield
        finally:
            with self._left:
                self._users -= 1
                self._left.notify_all()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Read rows, then blobs."""
        with self._in_use(), self.index.read() as connection, self.blobs.read() as blobs:
            yield Snapshot(connection, blobs)

    @contextmanager
    def rows(self) -> Iterator[Connection]:
        """Read rows only."""
        with self._in_use(), self.index.read() as connection:
            yield connection

    @contextmanager
    def writing(self, timeout: float = WRITE_SECONDS) -> Iterator[Writing]:
        """Write alone among all processes.

        Raises:
            StoreLocked: another writer didn't finish within `timeout` seconds.
        """
        with self._in_use(), exclusive(self.path / WRITER_LOCK, timeout):
            yield Writing(self.index, self.blobs)

    def sweep(self) -> int:
        """Delete blobs that no row names, as killed writers leave them. Returns their number.

        Looks first, without a lock, because there are hardly ever any.
        """
        with self.snapshot() as snapshot:
            named = rows.all_named(snapshot.connection)
            if all(name in named for name in snapshot.blobs.ids()):
                return 0
        with self.writing() as writing:
            return writing.sweep()

    def touch(self, entries: Iterable[Entry]) -> None:
        """Note that entries were used. Written by `flush_touched`, because readers never write."""
        with self._touching:
            for entry in entries:
                self._touched[(rows.table_of(entry).name, entry.id)] = entry.namespace_id

    def flush_touched(self) -> None:
        """Write down what was used. Losing it costs an eviction in the wrong order, nothing else."""
        self._check_open()
        with self._touching:
            touched, self._touched = self._touched, {}
        if not touched:
            return
        now = time.time()
        with self.index.write() as connection:
            for table in rows.TABLES:
                rows.touch(connection, table, (row for name, row in touched if name == table.name), now)
            namespaces.touch(connection, set(touched.values()), now)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the root occupies on disk: blobs, index, write-ahead log."""
        return self.blobs.disk_bytes + self.index.disk_bytes

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosed(f"{self.path} was opened before a fork: open it again in this process")
        if self._closed:
            raise StoreClosed(f"{self.path} is closed")

    def close(self) -> None:
        """Close it, as soon as nobody reads or writes any more."""
        with self._left:
            self._closed = True
            if not self._left.wait_for(lambda: self._users == 0, CLOSE_SECONDS):
                # Left open for those who still read; the process's end closes it.
                return
        self.blobs.close()
        self.index.close()
        self._lock.release()

    def abandon(self) -> None:
        """In a forked child: let go of what belongs to the parent, so that the root can be opened here.

        The lock is neither released nor forgotten: both processes hold it through the same open file, and releasing it
        here would release it there.
        """
        self._closed = True
        self.blobs.close()
        self.index.abandon()


def _map_bytes(capacity_bytes: int) -> int:
    return capacity_bytes - max(MIN_INDEX_BYTES, int(capacity_bytes * INDEX_SHARE))


def _make_private(path: Path) -> None:
    try:
        path.mkdir(parents=True, mode=0o700, exist_ok=True)
    except FileExistsError as error:
        raise NotARoot(f"{path} is a file; a folder is needed") from error
    except OSError as error:
        raise NotARoot(f"{path} can't be created: {error.strerror}") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise NotARoot(f"{path} can't be read and written by this user")


def valid_capacity(capacity_bytes: SupportsIndex) -> int:
    """A byte budget that makes sense.

    Raises:
        UsageError: no whole number, too small, or too large.
    """
    try:
        # numpy's integers too; SQLite takes only Python's own.
        value = capacity_bytes if isinstance(capacity_bytes, int) else index(capacity_bytes)
    except TypeError as error:
        raise UsageError(f"capacity_bytes is a whole number of bytes, not {capacity_bytes!r}") from error
    if isinstance(value, bool):
        raise UsageError(f"capacity_bytes is a whole number of bytes, not {value!r}")
    if value > MAX_CAPACITY:
        raise UsageError(f"capacity_bytes is {value}; at most {MAX_CAPACITY} (8 TiB) are possible")
    if value < MIN_CAPACITY:
        raise UsageError(f"capacity_bytes is {value}; at least {MIN_CAPACITY} (16 MiB) are needed")
    return value
