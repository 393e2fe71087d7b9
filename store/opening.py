"""Opening a root: who comes alone brings it in order first.

Every process that has a root open shares its lock. Whoever gets that lock alone knows that nobody else looks: it may
migrate the schema, delete what killed processes have left, and mend what is damaged. Whoever comes later just opens.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvkeep.store import generations, recovery, settings
from kvkeep.store.blobs import DATA_FILE, BlobStore
from kvkeep.store.engine import Index
from kvkeep.store.errors import CapacityError, DamagedFile, StoreError, StoreLocked
from kvkeep.store.locks import SharedLock, exclusive
from kvkeep.store.marker import Ending, Marker
from kvkeep.store.pages import examine
from kvkeep.store.private import disk_errors
from kvkeep.store.releases import migrate_command
from kvkeep.store.schema import REVISION
from kvkeep.store.space import DEFAULT_CAPACITY, Space
from kvkeep.store.steps import Step, reached
from kvkeep.store.writing import Writing

INDEX_FILE = "index.sqlite3"
ROOT_LOCK = "lock"
WRITER_LOCK = "writer.lock"

# How long an open waits for another process that has the root alone.
OPEN_SECONDS = 10.0
# How often an open begins anew because somebody else got between two of its locks.
_TRIES = 5


@dataclass(slots=True)
class Parts:
    """An open root's parts.

    Attributes:
        index, blobs: its two databases.
        generation: which blobs they are.
        recovered: what was damaged and is mended now, in sentences for people.
    """

    index: Index
    blobs: BlobStore
    generation: int
    recovered: list[str] = field(default_factory=list)


def open_parts(root: Path, lock: SharedLock, capacity_bytes: int | None) -> Parts:
    """Open a root. On return its lock is shared.

    Args:
        root: an existing folder.
        lock: its lock, not held.
        capacity_bytes: the budget, if somebody asks for one.

    Raises:
        KvkeepError: it can't be opened; nothing is held.
    """
    recovered: list[str] = []
    for _ in range(_TRIES):
        with ExitStack() as undo:
            undo.callback(lock.release)
            parts = _Opening(root, lock, capacity_bytes, undo, recovered).run()
            if parts is not None:
                undo.pop_all()
                return parts
    raise StoreLocked(f"{root} is taken by other processes again and again")


def migrate_root(root: Path, wanted: str = REVISION, before: Callable[[Index], None] = lambda index: None) -> list[str]:
    """Bring the schema of a root to a revision, up or down, as an open does it that comes alone; and nothing else.

    Args:
        root: a folder with an index.
        wanted: a known revision.
        before: called with the index in its old schema, if it hasn't the wanted one, when nobody else can look any more.
            May raise to stop: nothing is changed then.

    Returns:
        What was damaged and is mended now, in sentences for people.

    Raises:
        StoreLocked: others keep it open.
        MigrationFailed: the old schema is unchanged.
    """
    recovered: list[str] = []
    lock = SharedLock(root / ROOT_LOCK)
    with ExitStack() as undo:
        undo.callback(lock.release)
        _Opening(root, lock, None, undo, recovered, wanted, before).migrate()
    return recovered


@contextmanager
def index_of(root: Path) -> Iterator[Index]:
    """The index of a root, beside others, with whatever schema it has. For looking at that.

    Raises:
        StoreLocked: another process has it alone.
    """
    lock = SharedLock(root / ROOT_LOCK)
    with disk_errors(f"opening {root}"), ExitStack() as undo:
        undo.callback(lock.release)
        # Or its log might be taken away by whoever mends it at this moment.
        lock.share(OPEN_SECONDS)
        index = Index(root / INDEX_FILE)
        undo.callback(index.close)
        yield index


class _Opening:
    """One attempt."""

    def __init__(
        self,
        root: Path,
        lock: SharedLock,
        capacity_bytes: int | None,
        undo: ExitStack,
        recovered: list[str],
        schema: str = REVISION,
        before_migration: Callable[[Index], None] = lambda index: None,
    ) -> None:
        self._root = root
        self._schema = schema
        self._before_migration = before_migration
        self._is_changing = False
        self._lock = lock
        self._wanted = capacity_bytes
        self._undo = undo
        self._recovered = recovered
        self._marker = Marker(root)
        self._path = root / INDEX_FILE

    def run(self) -> Parts | None:
        """The parts, or None if somebody got in between."""
        with disk_errors(f"opening {self._root}"):
            return self._run()

    def _run(self) -> Parts | None:
        alone = self._lock.try_exclude()
        if not alone:
            self._lock.share(OPEN_SECONDS)
            if not self._is_current():
                # Alone it is, then: as soon as the others are gone.
                self._wait_until_alone()
                alone = True
        ending = self._marker.read()
        # Before anything is changed.
        self._marker.set()
        if not alone:
            return self._beside_others()
        with self._unmarked_if_refused(ending):
            parts = self._alone(ending)
        return self._shared(parts)

    @contextmanager
    def _unmarked_if_refused(self, ending: Ending) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if ending is Ending.CLEAN and not self._is_changing:
                # It may be a folder that isn't ours at all. And what is wrong with it is worth more than that.
                with suppress(OSError):
                    self._marker.clear()
            raise

    def migrate(self) -> None:
        """Alone, and nothing but the schema."""
        with disk_errors(f"migrating {self._root}"):
            if not self._lock.try_exclude():
                self._wait_until_alone()
            ending = self._marker.read()
            self._marker.set()
            with self._unmarked_if_refused(ending):
                self._sound_index(ending).close()
            if ending is Ending.CLEAN and self._schema == REVISION and not self._recovered:
                self._marker.clear()
            # Else it stays, as behind a process that was killed: the next open compares rows and blobs. A way back takes
            # rows away, and their blobs are garbage.

    def _wait_until_alone(self) -> None:
        try:
            self._lock.exclude(OPEN_SECONDS)
        except StoreLocked as error:
            raise StoreLocked(
                f"{self._root} must be migrated to schema {self._schema}, and other programs keep it open: end them, and "
                f"open it again or run: {migrate_command(self._root, self._schema)}"
            ) from error

    def _is_current(self) -> bool:
        index = Index(self._path)
        try:
            return index.is_current()
        finally:
            index.close()

    def _beside_others(self) -> Parts:
        index = self._kept(Index(self._path))
        self._take_budget(index)
        with index.read() as connection:
            generation = generations.current(connection, self._root)
        return Parts(index, self._kept_blobs(index, generation, alone=False), generation)

    def _alone(self, ending: Ending) -> Parts:
        index = self._sound_index(ending)
        recovery.remove_unfinished(self._path)
        self._take_budget(index)
        with index.read() as connection:
            generation = generations.current(connection, self._root)
        generations.remove_leftovers(self._root, generation)
        generation, blobs = self._sound_blobs(index, generation, ending)
        if ending is not Ending.CLEAN or self._recovered:
            self._compare(index, blobs)
        self._marker.mended()
        return Parts(index, blobs, generation, self._recovered)

    def _shared(self, parts: Parts) -> Parts | None:
        """The same parts under a shared lock, unless somebody has changed them between the two."""
        try:
            opened_file = self._path.stat().st_ino
            self._lock.downgrade()
            unchanged = self._path.stat().st_ino == opened_file and parts.index.is_current()
            with parts.index.read() as connection:
                unchanged = unchanged and generations.current(connection, self._root) == parts.generation
        except (OSError, StoreLocked):
            return None
        return parts if unchanged else None

    # -- the index ------------------------------------------------------------------------------------------------

    def _sound_index(self, ending: Ending) -> Index:
        """The index with the schema that it is to have, rebuilt if it is damaged."""
        index = self._kept(Index(self._path))
        complaint = self._complaint(index, ending)
        if complaint is not None:
            index.close()
            if not generations.present(self._root):
                raise DamagedFile(f"{self._path} is no index of kvkeep: {complaint}")
            self._recovered.append(f"{self._path} was damaged and is rebuilt from what can be read of it: {complaint}")
            index = self._kept(recovery.rebuilt_index(self._path, index.space))
        self._migrate(index)
        return index

    def _complaint(self, index: Index, ending: Ending) -> str | None:
        try:
            if not index.is_current(self._schema):
                # Before it is migrated, because that reads all of it.
                return index.complaint()
            if ending is Ending.DAMAGED:
                if (found := index.complaint()) is not None:
                    return found
                if (count := recovery.mend(index)) > 0:
                    self._recovered.append(f"{count} rows of {self._path} were damaged and are removed")
            with index.read() as connection:
                generations.current(connection, self._root)
        except DamagedFile as error:
            return str(error)
        return None

    def _migrate(self, index: Index) -> None:
        if not index.is_current(self._schema):
            reached(Step.MIGRATE_LOCKED)
            self._before_migration(index)
            # From here on it stays marked: an interrupt may come behind the commit, and a way back leaves blobs without rows.
            self._is_changing = True
            index.migrate(self._schema)

    def _take_budget(self, index: Index) -> None:
        """Divide the budget that was asked for, or the one that is remembered."""
        with index.read() as connection:
            known = settings.capacity(connection)
        index.resize(Space(self._wanted or known or DEFAULT_CAPACITY))

    # -- the blobs ------------------------------------------------------------------------------------------------

    def _sound_blobs(self, index: Index, generation: int, ending: Ending) -> tuple[int, BlobStore]:
        """The blobs, or an empty new generation if LMDB's own pages are damaged: it may end the process on them."""
        folder = generations.folder(self._root, generation)
        complaint = examine(folder / DATA_FILE, deep=ending is not Ending.CLEAN)
        if complaint is None:
            try:
                return generation, self._kept_blobs(index, generation, alone=True)
            except DamagedFile as error:
                complaint = str(error)
        self._recovered.append(f"the blobs in {folder} were damaged and are given up: {complaint}")
        generation = recovery.give_up_blobs(index, self._root, generation)
        return generation, self._kept_blobs(index, generation, alone=True)

    def _kept_blobs(self, index: Index, generation: int, *, alone: bool) -> BlobStore:
        folder, map_bytes = generations.folder(self._root, generation), index.space.map_bytes
        if alone or not BlobStore.is_too_short(folder, map_bytes):
            blobs = BlobStore(folder, map_bytes)
        else:
            # Under the lock, because extending a file that somebody else extends further would cut it.
            with exclusive(self._root / WRITER_LOCK, OPEN_SECONDS):
                blobs = BlobStore(folder, map_bytes)
        self._undo.callback(blobs.close)
        return blobs

    def _compare(self, index: Index, blobs: BlobStore) -> None:
        """Remove what a killed process has left half done: blobs without rows, and rows without blobs."""
        writing = Writing(self._root, index, blobs)
        # Where there is no room for it, reading must still be possible.
        with suppress(CapacityError):
            writing.remove_dangling()
            writing.sweep()

    def _kept(self, index: Index) -> Index:
        self._undo.callback(index.close)
        return index


def open_generation(root: Path, index: Index, generation: int) -> BlobStore:
    """The blobs of another generation than the one that was opened, because somebody has compacted the root.

    Raises:
        StoreError: it is gone already, because there is a still newer one.
    """
    folder = generations.folder(root, generation)
    if not (folder / DATA_FILE).exists():
        raise StoreError(f"{folder} is gone")
    # Made longer by the next one who writes: readers haven't the lock for that.
    return BlobStore(folder, index.space.map_bytes, extend=False)
