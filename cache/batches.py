"""Entries on their way to disk: collected, given room within the budget, and committed together."""

from dataclasses import dataclass, field

from kvkeep.cache import budget
from kvkeep.store import nodes, windows
from kvkeep.store.entry import Entry
from kvkeep.store.errors import MapFull, UnknownLayout
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.nodes import NewNode
from kvkeep.store.verify import is_sound
from kvkeep.store.windows import NewWindow
from kvkeep.store.writing import NewEntry, Writing

# A commit waits for the disk, so entries are written together; but a batch is held in memory, and once more as LMDB's changed
# pages, and it needs free ones.
BATCH_BYTES = 32 << 20
MIN_BATCH_BYTES = 4 << 20
# Of a state, so that saving it takes little more memory than its copy.
BATCH_SHARE = 1 / 16
# At once, when freed pages have become free, and when there are more of them.
_TRIES = 3


@dataclass(slots=True)
class Saved:
    """What a save did.

    Attributes:
        tokens: tokens whose state is stored now.
        written: entries written.
        written_bytes: bytes of their stored values.
        evicted: entries that had to go for them.
        opaque: the state was kept whole, because its memory can't be cut.
    """

    tokens: int = 0
    written: int = 0
    written_bytes: int = 0
    evicted: int = 0
    opaque: bool = False


@dataclass(slots=True)
class _Batch:
    entries: list[NewEntry] = field(default_factory=list)
    replaced: list[Entry] = field(default_factory=list)
    size: int = 0


class Batches:
    """Writes the entries of one save.

    Args:
        writing: the right to write.
        namespace_id: whose they are.
        protected: keys that no eviction may take; everything added joins them.
        state_bytes: what is being saved has so many bytes in memory, if it is one state.
    """

    def __init__(self, writing: Writing, namespace_id: int, protected: set[PrefixHash], state_bytes: int | None = None) -> None:
        self._writing = writing
        self._namespace_id = namespace_id
        self._protected = protected
        self._batch = _Batch()
        self._most_bytes = min(BATCH_BYTES, budget.largest(writing.blobs) // 4)
        if state_bytes is not None:
            self._most_bytes = min(self._most_bytes, max(MIN_BATCH_BYTES, int(state_bytes * BATCH_SHARE)))
        self.saved = Saved()

    def protect(self, key: PrefixHash) -> None:
        """No eviction for this save may take the entry with this key."""
        self._protected.add(key)

    def replace(self, entry: Entry) -> None:
        """An entry that the last added one makes superfluous; removed in the same transaction."""
        self._batch.replaced.append(entry)

    def add(self, entry: NewEntry) -> None:
        """Queue an entry, parents before children. Commits what is queued if that is enough for a batch."""
        footprint = budget.footprint(len(entry.value))
        is_large = self._batch.size + footprint > self._most_bytes
        if self._batch.entries and (is_large or len(self._batch.entries) >= self._writing.rows_at_once):
            self.commit()
        self.protect(budget.key_of(entry.row))
        self._batch.entries.append(entry)
        self._batch.size += footprint

    def commit(self) -> None:
        """Write what is queued.

        Raises:
            CapacityError, StoreError: nothing of it was written.
        """
        batch, self._batch = self._batch, _Batch()
        if not batch.entries:
            return
        batch.replaced += self._in_the_way(batch)
        self.saved.evicted += len(self._make_room(batch, batch.size))
        self._write(batch)
        self.saved.written += len(batch.entries)
        self.saved.written_bytes += sum(len(entry.value) for entry in batch.entries)

    def _in_the_way(self, batch: _Batch) -> list[Entry]:
        """Damaged rows that the look-up passed over, and that still have the keys of new ones.

        Raises:
            UnknownLayout: one is sound, but of other tokens that hash alike. What stands on it would stand on the new one.
        """
        new_nodes = {entry.row.key: entry.row for entry in batch.entries if isinstance(entry.row, NewNode)}
        new_windows = [entry.row.key for entry in batch.entries if isinstance(entry.row, NewWindow)]
        with self._writing.index.read() as connection, self._writing.blobs.read() as blobs:
            found = nodes.by_keys(connection, list(new_nodes))
            for key, node in found.items():
                if not _is_same(node, new_nodes[key]) and is_sound(blobs.get(node.blob), node):
                    start = new_nodes[key].start
                    raise UnknownLayout(f"another entry already has the key of the node at position {start}")
            return [*found.values(), *windows.by_keys(connection, new_windows).values()]

    def _write(self, batch: _Batch) -> None:
        """Store a batch. By the books there is room; LMDB may have it in the wrong places, or not yet free.

        Evicting more is tried once: beside a reader that hangs nothing becomes free, whatever is evicted.
        """
        for attempt in range(1, _TRIES + 1):
            try:
                self._writing.add(self._namespace_id, batch.entries, batch.replaced)
                return
            except MapFull:
                if attempt == _TRIES:
                    raise
                self._writing.blobs.settle()
                # Waits for those who read just now.
                self._writing.blobs.has_room(*(len(entry.value) for entry in batch.entries))
                if attempt == _TRIES - 1:
                    self.saved.evicted += len(self._make_room(batch, batch.size * 2))

    def _make_room(self, batch: _Batch, n_bytes: int) -> list[Entry]:
        return budget.make_room(self._writing, n_bytes, self._protected, rows=len(batch.entries))


def _is_same(one: NewNode, other: NewNode) -> bool:
    """Whether two rows speak of the same tokens behind the same parent."""
    return (one.parent, one.start, one.tokens) == (other.parent, other.start, other.tokens)
