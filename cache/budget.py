"""Which entries go when the byte budget is full: leaves first, least recently used first."""

from collections.abc import Collection

from kvkeep.store import checkpoints, nodes, windows
from kvkeep.store.blobs import PAGE_BYTES, BlobStore
from kvkeep.store.checkpoints import Checkpoint, NewCheckpoint
from kvkeep.store.engine import Connection
from kvkeep.store.entry import Entry
from kvkeep.store.errors import TooLarge
from kvkeep.store.frame import Kind
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.nodes import Node
from kvkeep.store.repository import Writing
from kvkeep.store.rows import NewRow

# The map is filled to here; the rest is headroom for two write batches, because LMDB can use a freed page again only
# two transactions later.
FILL = 0.8
# Evicted in batches: one commit each, and each commit waits for the disk.
_BATCH = 64


def footprint(stored_bytes: int) -> int:
    """Bytes that a value takes in the map: whole pages, the first with a header of 16 bytes."""
    return -(-(stored_bytes + 16) // PAGE_BYTES) * PAGE_BYTES


def largest(blobs: BlobStore) -> int:
    """The most that blobs may take together."""
    return int(blobs.map_bytes * FILL)


def make_room(writing: Writing, incoming: int, protect: Collection[PrefixHash] = ()) -> list[Entry]:
    """Evict until `incoming` more bytes fit.

    Args:
        writing: the right to write.
        incoming: footprint of what is about to be stored.
        protect: keys that must stay, such as the parents of what is about to be stored.

    Returns:
        What was evicted.

    Raises:
        TooLarge: it doesn't fit even when everything else is gone. Nothing more than that was evicted for it.
    """
    limit = largest(writing.blobs)
    if incoming > limit:
        raise TooLarge(f"{incoming} bytes don't fit into the {limit} bytes that the budget leaves for blobs")
    evicted: list[Entry] = []
    while (surplus := writing.blobs.used_bytes + incoming - limit) > 0:
        chosen = _choose(writing, surplus, protect)
        if not chosen:
            # Blobs without rows may hold the room: killed writers leave them.
            if writing.sweep() == 0:
                raise TooLarge(f"{incoming} bytes don't fit beside what is protected, in {limit} bytes for blobs")
            continue
        writing.remove(chosen)
        evicted += chosen
    return evicted


def _choose(writing: Writing, surplus: int, protect: Collection[PrefixHash]) -> list[Entry]:
    with writing.index.read() as connection:
        leaves = nodes.oldest_leaves(connection, _BATCH + len(protect))
        points = checkpoints.oldest(connection, _BATCH + len(protect))
        rows = windows.oldest(connection, _BATCH + len(protect))
        candidates: list[Entry] = [*leaves, *points, *rows]
        candidates.sort(key=lambda entry: entry.used)
        chosen: dict[tuple[type, int], Entry] = {}
        for entry in candidates:
            if surplus <= 0 or len(chosen) >= _BATCH:
                break
            together = [entry, *_standing_on(connection, entry)]
            if any(key_of(gone) in protect for gone in together):
                continue
            for gone in together:
                if chosen.setdefault((type(gone), gone.id), gone) is gone:
                    surplus -= footprint(gone.stored_bytes)
    return list(chosen.values())


def _standing_on(connection: Connection, entry: Entry) -> list[Entry]:
    """Checkpoints and windows that are of no use without a leaf: they never outlive it. Whole states stand on nothing."""
    if not isinstance(entry, Node):
        return []
    before = len(entry.path) - len(entry.tokens)
    others = [node.path for node in nodes.slot(connection, entry.anchor) if node.id != entry.id]
    beside: list[Entry] = [*checkpoints.at(connection, entry.anchor), *windows.slots(connection, [entry.anchor])]
    above: list[Entry] = [*checkpoints.at(connection, entry.key), *windows.slots(connection, [entry.key])]
    for other in beside:
        in_it = len(other.path) > before and entry.path.startswith(other.path)
        if in_it and not any(path.startswith(other.path) for path in others):
            above.append(other)
    return [other for other in above if not (isinstance(other, Checkpoint) and other.kind == Kind.OPAQUE)]


def key_of(row: Entry | NewRow) -> PrefixHash:
    """The prefix hash by which an entry is found."""
    return row.prefix if isinstance(row, NewCheckpoint) else row.key
