"""One root folder, open in this process: who reads, who writes, and which blobs count."""

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvkeep.store import generations, namespaces, rows, settings
from kvkeep.store.blobs import BlobReader, BlobStore
from kvkeep.store.engine import Connection
from kvkeep.store.entry import Entry
from kvkeep.store.errors import DamagedFile, KvkeepError, NotARoot, StoreClosed, StoreError
from kvkeep.store.gate import Gate
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.locks import SharedLock, exclusive
from kvkeep.store.marker import Marker
from kvkeep.store.opening import ROOT_LOCK, WRITER_LOCK, Parts, open_generation, open_parts
from kvkeep.store.private import make_private_folder
from kvkeep.store.schema import in_pieces
from kvkeep.store.space import DEFAULT_CAPACITY, Space
from kvkeep.store.writing import Writing

# How long a close waits for those who still read.
CLOSE_SECONDS = 60.0
# A save that can't get the writer's lock in this time is dropped and counted.
WRITE_SECONDS = 20.0
# How long nobody tries to open anew what couldn't be opened.
TRY_AGAIN_SECONDS = 5.0
# How often a snapshot is taken anew because the blobs were compacted in the middle of it.
_TRIES = 5


@dataclass(frozen=True, slots=True)
class _Lost:
    """It was closed to be mended, and couldn't be opened again.

    Attributes:
        error: why not.
        until: not tried again before then, in monotonic seconds.
    """

    error: KvkeepError
    until: float


@dataclass(frozen=True, slots=True)
class _Touch:
    """An entry was used."""

    namespace_id: int
    hit: bool


class Snapshot:
    """Rows and blobs for reading. The rows were read first, so a blob that they name may be gone: that is a miss."""

    def __init__(self, connection: Connection, blobs: BlobReader) -> None:
        self.connection = connection
        self.blobs = blobs


class Repository:
    """One root folder, open in this process.

    Use `open_root`, which gives everyone in the process the same one.

    Raises:
        NotARoot: the path is a file, or can't be created or written.
        TooNew: a newer kvkeep wrote it.
        StoreLocked: another process has it alone, or it needs a migration and others have it open.
        DamagedFile: the index is no database, and nothing beside it says that it was ours.
    """

    def __init__(self, path: Path, capacity_bytes: int | None = None) -> None:
        self.path = path
        self._pid = os.getpid()
        self._closed = False
        self._ended = False
        self._lost: _Lost | None = None
        self._touched: dict[tuple[str, int], _Touch] = {}
        self._held: Counter[PrefixHash] = Counter()
        self._touching = threading.Lock()
        self._users = 0
        self._left = Gate()
        _make_root(path)
        self._lock = SharedLock(path / ROOT_LOCK)
        self._marker = Marker(path)
        self._take(open_parts(path, self._lock, capacity_bytes))
        try:
            # Remembered only now: a budget with which nothing can be opened must not be found by the next one.
            self.agree_on_capacity(capacity_bytes)
        except BaseException:
            self._shut()
            raise

    def _take(self, parts: Parts) -> None:
        self.index = parts.index
        self.blobs = parts.blobs
        self._generation = parts.generation
        self.recovered = parts.recovered

    @property
    def capacity_bytes(self) -> int:
        """The byte budget that holds since it was opened, or since the last save after another one was asked for."""
        return self.index.space.capacity_bytes

    def agree_on_capacity(self, wanted: int | None) -> None:
        """Remember a budget for everybody's next save or open. The last explicit wish wins."""
        known = self._remembered(settings.CAPACITY_BYTES)
        if wanted is not None and wanted != (DEFAULT_CAPACITY if known is None else known):
            self.agree_on(settings.CAPACITY_BYTES, wanted)

    @property
    def remembers_capacity(self) -> bool:
        """Whether anybody has asked for a budget yet."""
        return self._remembered(settings.CAPACITY_BYTES) is not None

    def agree_on(self, name: str, wanted: int | None) -> None:
        """Remember a setting that all processes agree on. None is no wish."""
        if wanted is not None and wanted != self._remembered(name):
            with self._in_use(), self.index.write() as connection:
                settings.put(connection, name, wanted)

    def _remembered(self, name: str) -> int | None:
        with self.rows() as connection:
            return settings.find(connection, name)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the environment open: reading from a map that is gone ends the process."""
        counted = False
        try:
            with self._left:
                self._enter()
                self._users += 1
                counted = True
            yield
        except DamagedFile as error:
            self.report_damage(str(error))
            raise
        finally:
            if counted:
                with self._left:
                    self._users -= 1
                    self._left.notify_all()
                    self._end_if_left()

    def _enter(self) -> None:
        """Whether it can be used, or can be again. The caller holds `_left`."""
        self._check_open()
        if self._lost is not None:
            if time.monotonic() < self._lost.until:
                raise type(self._lost.error)(str(self._lost.error))
            self._find_again()

    def report_damage(self, sentence: str) -> None:
        """Damage of a file itself was met: whoever opens the root alone next looks at everything, and mends it."""
        self._marker.report(sentence)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Read rows, then blobs."""
        with self._in_use(), ExitStack() as of_blobs, ExitStack() as of_rows:
            yield self._snapshot(of_rows, of_blobs)

    @contextmanager
    def values(self) -> Iterator[BlobReader]:
        """Read blobs that rows have named a moment ago; one that has gone since is a miss.

        Holds no view of the rows: a restore may take long, and the index's log can't be emptied beside one who reads.
        """
        with self._in_use(), ExitStack() as of_blobs:
            with ExitStack() as of_rows:
                found = self._snapshot(of_rows, of_blobs)
            yield found.blobs

    def _snapshot(self, of_rows: ExitStack, of_blobs: ExitStack) -> Snapshot:
        for attempt in range(1, _TRIES + 1):
            try:
                connection = of_rows.enter_context(self.index.read())
                return Snapshot(connection, of_blobs.enter_context(self._current_blobs(connection).read()))
            except StoreError:
                # Compacted between two of these looks.
                of_rows.close()
                if attempt == _TRIES:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _current_blobs(self, connection: Connection) -> BlobStore:
        """The blobs that count now. Another process may have compacted them into a new generation."""
        generation = generations.current(connection, self.path)
        if generation == self._generation:
            return self.blobs
        with self._left:
            if generation > self._generation:
                outdated, self.blobs = self.blobs, open_generation(self.path, self.index, generation)
                self._generation = generation
                outdated.close()
            return self.blobs

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
            self._take_over()
            yield Writing(self.path, self.index, self.blobs, self.held)

    def refresh(self) -> None:
        """Take over the blobs that count now, if others have compacted them."""
        with self.snapshot():
            pass

    def _take_over(self) -> None:
        """All that others have changed: the budget may be another one, too. The caller holds the writer's lock."""
        with self.snapshot() as snapshot:
            wanted = settings.capacity(snapshot.connection)
        if wanted is not None and wanted != self.capacity_bytes:
            space = Space(wanted)
            self.blobs.resize(space.map_bytes)
            self.index.resize(space)
        self.blobs.extend()

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

    def touch(self, entries: Iterable[Entry], *, hit: bool = True) -> None:
        """Note that entries were used. Written by `flush_touched`, because readers never write.

        Args:
            entries: what was used.
            hit: they were restored; else what they stand for was merely decoded further.
        """
        with self._touching:
            for entry in entries:
                where = (rows.table_of(entry).name, entry.id)
                before = self._touched.get(where)
                self._touched[where] = _Touch(entry.namespace_id, hit or (before is not None and before.hit))

    def flush_touched(self) -> None:
        """Write down what was used. Losing it costs an eviction in the wrong order, nothing else."""
        with self._in_use():
            with self._touching:
                touched, self._touched = self._touched, {}
            now = time.time()
            for piece in in_pieces(list(touched.items()), self.index.space.rows_at_once):
                with self.index.write() as connection:
                    for table in rows.TABLES:
                        own = {row: touch.hit for (name, row), touch in piece if name == table.name}
                        rows.touch(connection, table, own, now)
                    namespaces.touch(connection, {touch.namespace_id for _, touch in piece}, now)

    @contextmanager
    def holding(self, keys: Collection[PrefixHash]) -> Iterator[None]:
        """No eviction by this process takes the entries with these keys, as long as the block runs."""
        with self._touching:
            self._held.update(keys)
        try:
            yield
        finally:
            with self._touching:
                self._held.subtract(keys)
                self._held += Counter()

    @property
    def held(self) -> set[PrefixHash]:
        """Keys of what is being restored at this moment."""
        with self._touching:
            return set(self._held)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the root occupies on disk: blobs with leftovers, index, write-ahead log."""
        return generations.occupied(self.path) + self.index.disk_bytes

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosed(f"{self.path} was opened before a fork: open it again in this process")
        if self._closed:
            raise StoreClosed(f"{self.path} is closed")

    def recover(self) -> list[str]:
        """Open it anew, because damage was met. Returns what could be mended.

        Mends nothing as long as other processes have it open; then the next one to come alone does it.

        Raises:
            KvkeepError: it can't be opened now. It is tried again as soon as somebody wants it.
        """
        with self._left:
            self._check_open()
            self._lost = _Lost(StoreError(f"{self.path} is being opened anew"), math.inf)
            try:
                idle = self._left.wait_for(lambda: self._users == 0, CLOSE_SECONDS)
            finally:
                self._lost = None
            if not idle:
                return []
            self._lost = _Lost(StoreError(f"{self.path} was closed to be mended"), 0.0)
            self._shut()
            self._find_again()
        return self.recovered

    def _find_again(self) -> None:
        """Open what couldn't be opened before, as on a disk that was full. The caller holds `_left`.

        Ctrl-C leaves it to the next one who wants it.
        """
        try:
            self._take(open_parts(self.path, self._lock, self.capacity_bytes))
        except KvkeepError as error:
            self._lost = _Lost(error, time.monotonic() + TRY_AGAIN_SECONDS)
            raise
        self._lost = None

    def _shut(self) -> None:
        self.blobs.close()
        self.index.close()
        self._lock.release()

    def close(self) -> None:
        """Close it, as soon as nobody reads or writes any more: the last one of those does it, if that takes too long."""
        with self._left:
            if self._closed:
                return
            self._closed = True
            try:
                self._left.wait_for(lambda: self._users == 0, CLOSE_SECONDS)
            finally:
                # Ctrl-C doesn't keep it open for good.
                self._end_if_left()

    def _end_if_left(self) -> None:
        """The end, once nobody is in it any more. The caller holds `_left`."""
        if not self._closed or self._users > 0 or self._ended:
            return
        self._ended = True
        self._shut()
        if self._lock.try_exclude():
            # Where that fails, the next open looks more closely than it must.
            with suppress(OSError):
                self._marker.clear()
            self._lock.release()

    def forget_locks(self) -> None:
        """In a forked child, at once: threads that aren't here may have held them."""
        self._left = Gate()
        self._touching = threading.Lock()
        self.blobs.forget_locks()

    def abandon(self) -> None:
        """In a forked child: let go of what belongs to the parent, so that the root can be opened here.

        The lock is neither released nor forgotten: both processes hold it through the same open file, and releasing it
        here would release it there.
        """
        self._closed = self._ended = True
        self.blobs.close()
        self.index.abandon()


def _make_root(path: Path) -> None:
    try:
        make_private_folder(path, parents=True)
    except FileExistsError as error:
        raise NotARoot(f"{path} is a file; a folder is needed") from error
    except OSError as error:
        raise NotARoot(f"{path} can't be created: {error.strerror}") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise NotARoot(f"{path} can't be read and written by this user")
