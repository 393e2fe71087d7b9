"""Room within the byte budget: what has to go for what comes, and what is too old."""

import time
from collections.abc import Collection, Iterator

from kvkeep.cache.eviction import in_order, key_of
from kvkeep.cache.pinned import MAX_SHARE, pinned_keys
from kvkeep.store import settings
from kvkeep.store.blobs import BlobStore, footprint
from kvkeep.store.entry import Entry
from kvkeep.store.errors import DiskFull, TooLarge
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.space import Space
from kvkeep.store.writing import Writing

__all__ = ["evict", "expire", "footprint", "key_of", "largest", "make_room"]

# The map is filled to here; the rest is headroom for two write batches, because LMDB can use a freed page again only
# two transactions later. The index likewise: B-trees split where they like.
FILL = 0.8
# Entries that are removed together: one commit each, and each commit waits for the disk.
_BATCH = 256
# What a row takes in the index, B-trees included, and somewhat more.
_ROW_BYTES = 2048


def largest(blobs: BlobStore) -> int:
    """The most that blobs may take together."""
    return int(blobs.map_bytes * FILL)


def make_room(writing: Writing, incoming: int, protect: Collection[PrefixHash] = (), *, rows: int = 0) -> list[Entry]:
    """Evict until `incoming` more bytes fit.

    Args:
        writing: the right to write.
        incoming: footprint of what is about to be stored.
        protect: keys that must stay, such as the parents of what is about to be stored. What is pinned, or being
            restored, stays too.
        rows: how many rows are about to be stored.

    Returns:
        What was evicted.

    Raises:
        TooLarge: it doesn't fit even when everything else is gone. Nothing more than that was evicted for it.
        DiskFull: the same, because the disk has no more room than is to be left to others.
    """
    if incoming > (limit := largest(writing.blobs)):
        raise TooLarge(f"{incoming} bytes don't fit into the {limit} bytes that the budget leaves for blobs")
    room = _Room(writing, incoming, rows)
    evicted: list[Entry] = []
    while max(surplus := room.surplus()) > 0:
        room.check_possible()
        chosen = _chosen(writing, *surplus, protect)
        if not chosen:
            # Blobs without rows may hold the room: killed writers leave them.
            if writing.sweep() == 0:
                raise room.too_small()
            continue
        writing.remove(chosen)
        evicted += chosen
    return evicted


def evict(writing: Writing, n_bytes: int) -> list[Entry]:
    """Evict entries of at least so many bytes together, or of what may go. Returns what went."""
    evicted: list[Entry] = []
    while n_bytes > 0 and (chosen := _chosen(writing, n_bytes, 0, ())):
        writing.remove(chosen)
        evicted += chosen
        n_bytes -= sum(footprint(entry.stored_bytes) for entry in chosen)
    return evicted


class _Room:
    """What there is, and what there will be."""

    def __init__(self, writing: Writing, incoming: int, rows: int) -> None:
        self._writing = writing
        self._incoming = incoming
        self._rows = rows
        # Asked once: it costs a look at the disk, and an eviction doesn't make the file smaller.
        self._by_disk = int(writing.blob_bytes(rows) * FILL)
        self._limit = min(largest(writing.blobs), self._by_disk)

    def surplus(self) -> tuple[int, int]:
        """Bytes of blobs, and rows of the index, that are too many."""
        space: Space = self._writing.index.space
        of_blobs = self._writing.blobs.used_bytes + self._incoming - self._limit
        of_index = self._writing.index.used_bytes + self._rows * _ROW_BYTES - int(space.index_bytes * FILL)
        return of_blobs, -(-of_index // _ROW_BYTES)

    def check_possible(self) -> None:
        """Nobody is evicted for what can't fit anyway."""
        if self._incoming > self._limit:
            raise self.too_small()

    def too_small(self) -> TooLarge | DiskFull:
        """Why it doesn't fit."""
        if self._by_disk < largest(self._writing.blobs):
            return DiskFull(
                f"{self._incoming} bytes don't fit: the disk has no such room besides what is to be left to others and "
                "what the store's own files need"
            )
        return TooLarge(f"{self._incoming} bytes don't fit beside what is protected, in {self._limit} bytes for blobs")


def _chosen(writing: Writing, surplus: int, surplus_rows: int, protect: Collection[PrefixHash]) -> list[Entry]:
    chosen: list[Entry] = []
    for together in _may_go(writing, protect):
        if (surplus <= 0 and surplus_rows <= 0) or len(chosen) >= _BATCH:
            break
        chosen += together
        surplus -= sum(footprint(entry.stored_bytes) for entry in together)
        surplus_rows -= len(together)
    return chosen


def _may_go(writing: Writing, protect: Collection[PrefixHash]) -> Iterator[list[Entry]]:
    with writing.index.read() as connection:
        pinned = pinned_keys(connection, int(writing.blobs.map_bytes * MAX_SHARE))
        yield from in_order(connection, {*protect, *writing.held, *pinned})


def expire(writing: Writing, now: float | None = None) -> list[Entry]:
    """Remove what nobody has used for longer than the root keeps anything. Returns what was removed."""
    with writing.index.read() as connection:
        lifetime = settings.find(connection, settings.LIFETIME_SECONDS) or 0
    if lifetime <= 0:
        return []
    before = (time.time() if now is None else now) - lifetime
    removed: list[Entry] = []
    while chosen := _older(writing, before):
        writing.remove(chosen)
        removed += chosen
    return removed


def _older(writing: Writing, before: float) -> list[Entry]:
    chosen: list[Entry] = []
    for together in _may_go(writing, ()):
        if together[-1].used >= before or len(chosen) >= _BATCH:
            break
        chosen += together
    return chosen
