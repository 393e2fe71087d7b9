"""Writing to a root: the ordering rules, and what may be taken from the disk.

    saving      blob committed, then the row that names it
    deleting    row committed, then the blob
    reading     row, then blob

A blob without a row is garbage, swept later; a row without a blob is a miss. `writer.lock` is held from the look-up
of what exists to the commit of the rows, so that no saver skips a blob that an evictor is about to delete.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from kvkeep.store import rows, settings
from kvkeep.store.blobs import BlobStore
from kvkeep.store.engine import Index
from kvkeep.store.entry import Entry
from kvkeep.store.errors import MapFull
from kvkeep.store.hashing import BlobId, PrefixHash
from kvkeep.store.rows import NewRow
from kvkeep.store.schema import in_pieces
from kvkeep.store.space import ROW_LOG_BYTES, Disk
from kvkeep.store.steps import Step, reached
from kvkeep.store.verify import is_sound

ROOM_STEP = 1 << 20
# What LMDB may need to delete a batch from a full file: its leaves, the branches above, and the list of freed pages.
DELETE_ROOM = 512 << 10
DELETE_PROBE = 128 << 10
# Rows that go for those that come.
SOME_ROWS = 32


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A row to be, with the value that its blob will have."""

    row: NewRow
    value: bytes


class Writing:
    """The right to write, for as long as a `with repository.writing()` block runs."""

    def __init__(self, path: Path, index: Index, blobs: BlobStore, held: Collection[PrefixHash] = ()) -> None:
        self._path = path
        self.index = index
        self.blobs = blobs
        self.held = held
        """Keys of what this process is restoring at the moment: no eviction should take it."""
        reached(Step.SAVE_LOCKED)

    @property
    def rows_at_once(self) -> int:
        """Rows that one transaction may change, so that the index's log keeps its bound."""
        return self.index.space.rows_at_once

    def blob_bytes(self, rows: int = 0) -> int:
        """The size to which the blobs' file may grow now: its share of the budget, or less where the disk gets full.

        Args:
            rows: how many are about to be written; the index's log grows by them.
        """
        with self.index.read() as connection:
            reserve = settings.find(connection, settings.RESERVE_BYTES)
        disk = Disk.of(self._path)
        room = disk.room(reserve)
        log = min(self.index.space.log_bytes, max(rows, SOME_ROWS) * ROW_LOG_BYTES)
        room_for_blobs = max(0, room - max(0, log - self.index.log_bytes))
        share, taken = self.blobs.map_bytes, self.blobs.file_bytes
        # In whole steps, because every other size waits for those who read.
        allowed = min(share, taken + room_for_blobs - room_for_blobs % ROOM_STEP)
        # A file that may not grow at all can't even be deleted from: LMDB writes changed pages to new places. So much of the
        # reserve may be lent for that, once: what was deleted then leaves pages for the next time.
        lent = min(DELETE_ROOM, max(0, room + DELETE_ROOM))
        if taken - self.blobs.used_bytes < DELETE_ROOM and disk.free > 2 * DELETE_ROOM:
            lent = DELETE_ROOM
        # A file that is longer than its share, because a smaller budget was asked for, is about to be compacted.
        self.blobs.limit(taken + DELETE_ROOM if taken > share else min(allowed + lent, share))
        return allowed

    def add(self, namespace_id: int, entries: Sequence[NewEntry], replacing: Sequence[Entry] = ()) -> None:
        """Store entries, parents before children, and remove those that they make superfluous.

        Raises:
            CapacityError: nothing of this call was stored.
        """
        self.blobs.put((entry.row.blob, entry.value) for entry in entries)
        reached(Step.SAVE_BLOBS)
        try:
            with self.index.write() as connection:
                new = [entry.row for entry in entries]
                # Removed first: a new row may have the key of the one that it replaces.
                rows.remove(connection, replacing)
                rows.add(connection, namespace_id, new)
                orphans = _unnamed(connection, replacing)
        except Exception:
            # Not left for a sweep: where the disk is full, these bytes are what the next try needs.
            with suppress(Exception):
                self._delete(self._still_unnamed([entry.row.blob for entry in entries]))
            raise
        reached(Step.SAVE_ROWS)
        self._delete(orphans)
        reached(Step.SAVE_DONE)

    def _still_unnamed(self, names: Sequence[BlobId]) -> list[BlobId]:
        with self.index.read() as connection:
            named = rows.named(connection, names)
        return [name for name in names if name not in named]

    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove entries, and the blobs that no other row names.

        Raises:
            MapFull: the map has no room for that, as where a reader that hangs keeps every page. Nothing more was removed.
        """
        for piece in in_pieces(entries, self.rows_at_once):
            if not self.blobs.has_room(DELETE_PROBE):
                # Before the rows go: whoever evicts for room would go on until nothing is left.
                raise MapFull("the blobs' file is so full that nothing can be deleted from it")
            with self.index.write() as connection:
                rows.remove(connection, piece)
                orphans = _unnamed(connection, piece)
            reached(Step.EVICT_ROWS)
            if not self._delete(orphans):
                raise MapFull("the blobs' file had no room to delete from it; what was to go is swept later")
            reached(Step.EVICT_DONE)

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
        """Delete blobs that no row names, as killed writers leave them. Returns their number."""
        with self.index.read() as connection:
            named = rows.all_named(connection)
        with self.blobs.read() as reader:
            orphans = [name for name in reader.ids() if name not in named]
        reached(Step.SWEEP_LOOKED)
        return len(orphans) if self._delete(orphans) else 0

    def remove_dangling(self) -> int:
        """Remove rows whose blobs are gone. Returns their number."""
        with self.index.read() as connection, self.blobs.read() as reader:
            present = set(reader.ids())
            missing = rows.all_named(connection) - present
            dangling = [entry for entry in rows.every(connection) if entry.blob in missing] if missing else []
        self.remove(dangling)
        return len(dangling)

    def _delete(self, names: Sequence[BlobId]) -> bool:
        """Delete blobs whose rows are gone. False if even that finds no room: they stay, as garbage for the next sweep."""
        if not names:
            return True
        try:
            self.blobs.delete(names)
        except MapFull:
            try:
                # A really full map can't delete at once.
                self.blobs.settle()
                self.blobs.delete(names)
            except MapFull:
                return False
        return True


def _unnamed(connection: Connection, entries: Sequence[Entry]) -> list[BlobId]:
    """Those of the entries' blobs that no row names any more."""
    names = list({entry.blob for entry in entries})
    still = rows.named(connection, names)
    return [name for name in names if name not in still]
