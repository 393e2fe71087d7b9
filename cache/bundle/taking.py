"""From a verified bundle into a store: all of it or nothing.

The writer's lock is held from the first look to the last commit, so that nobody evicts, between two batches, what was
stored by the first, and what is new is known to be of this bundle.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvkeep.cache import budget, pinned, radix
from kvkeep.cache.batches import Batches
from kvkeep.cache.bundle.format import RECORD_BYTES, BundleFile, Head
from kvkeep.cache.bundle.rows import as_entry, reached
from kvkeep.cache.eviction import key_of
from kvkeep.cache.restore_point import Prompt, is_filed
from kvkeep.store import checkpoints, namespaces, nodes, pins, rows, windows
from kvkeep.store.blobs import BlobReader
from kvkeep.store.checkpoints import NewCheckpoint
from kvkeep.store.engine import Connection
from kvkeep.store.entry import Entry
from kvkeep.store.errors import DiskFull, KvkeepError, TooLarge, UsageError
from kvkeep.store.frame import TOKEN_BYTES
from kvkeep.store.hashing import BlobId, PrefixHash
from kvkeep.store.namespaces import Namespace
from kvkeep.store.nodes import NewNode, Node
from kvkeep.store.repository import Repository
from kvkeep.store.rows import NewRow
from kvkeep.store.verify import is_sound, verified
from kvkeep.store.windows import NewWindow
from kvkeep.store.writing import NewEntry, Writing


class Item(NamedTuple):
    """An entry of a bundle: its row, and where its value is in the file."""

    row: NewRow
    at: int

    @property
    def n_bytes(self) -> int:
        """With its record."""
        return RECORD_BYTES + self.row.stored_bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """What was taken from a bundle.

    Attributes:
        new: entries that were stored.
        present: entries that were there.
        written_bytes: bytes of the new ones' stored values.
        tokens: first tokens of all prefixes together that the bundle reaches up to.
        evicted: entries that had to go.
        pinned: prefixes that weren't pinned before.
    """

    new: int
    present: int
    written_bytes: int
    tokens: int
    evicted: int = 0
    pinned: int = 0


@dataclass(slots=True)
class _Plan:
    """What of a bundle is to be stored.

    Attributes:
        new: what isn't there, parents before children.
        mending: the same, where something of less use has its key: damaged, or less of a window.
        there: what is there, in the bundle's order.
        used: the entries that stand for these.
        in_the_way: damaged checkpoints with the keys of new ones, by the blobs of these.
    """

    new: list[Item] = field(default_factory=list)
    mending: list[Item] = field(default_factory=list)
    there: list[Item] = field(default_factory=list)
    used: list[Entry] = field(default_factory=list)
    in_the_way: dict[BlobId, Entry] = field(default_factory=dict)


def take(
    repository: Repository,
    file: BundleFile,
    items: Sequence[Item],
    prompts: Sequence[Prompt],
    *,
    pin: bool,
    progress: Callable[[int], None],
) -> Taken:
    """Store a bundle's entries; see `kvkeep.cache.bundle.Bundle.take`.

    Args:
        repository: where to.
        file: the bundle, open.
        items: all of its entries, verified.
        prompts: its prefixes.
        pin: also pin these.
        progress: called with the bytes of each entry; may raise to stop.
    """
    head = file.head
    # Written down before anybody is evicted for it.
    repository.flush_touched()
    with repository.writing() as writing:
        with writing.index.read() as connection, writing.blobs.read() as blobs:
            _check_block_tokens(namespaces.find(connection, head.fingerprint), head)
            plan = _Look(connection, blobs, items).plan()
        protected = {key_of(row) for row, _ in items} | {key_of(entry) for entry in plan.used}
        if pin:
            _check_pins(writing, items)
        evicted = _make_room(writing, [*plan.new, *plan.mending], protected)
        with writing.index.write() as connection:
            space = namespaces.add(connection, head.fingerprint, head.label, head.ingredients, head.block_tokens)
        new_pins: list[bytes] = []
        batches = Batches(writing, space.id, protected)
        try:
            # First, so that the last commit of entries is the last thing that can go wrong.
            for tokens in _unpinned(writing, space, prompts) if pin else ():
                # Noted first: an interrupt may come behind the commit.
                new_pins.append(tokens)
                pinned.pin(writing, space, tokens)
            _store(batches, file, plan, progress)
        except BaseException as error:
            _undo(writing, space, plan, new_pins, error)
            raise
    repository.touch(plan.used, hit=False)
    with repository.rows() as connection:
        tables = rows.tables_in_use(connection, space.id)
    n_tokens = sum(reached(prompts, (item.row for item in items), tables))
    saved = batches.saved
    return Taken(saved.written, len(plan.there), saved.written_bytes, n_tokens, evicted + saved.evicted, len(new_pins))


def missing_bytes(repository: Repository, head: Head, items: Sequence[Item]) -> int:
    """What storing a bundle's entries would take at most; 0 if all of it is there. Changes nothing.

    Raises:
        UsageError: this model is stored there in blocks of another length.
    """
    with repository.snapshot() as snapshot:
        _check_block_tokens(namespaces.find(snapshot.connection, head.fingerprint), head)
        plan = _Look(snapshot.connection, snapshot.blobs, items).plan()
    return sum(budget.footprint(row.stored_bytes) for row, _ in (*plan.new, *plan.mending))


def _check_block_tokens(space: Namespace | None, head: Head) -> None:
    if space is not None and space.block_tokens != head.block_tokens:
        raise UsageError(
            f"the bundle has blocks of {head.block_tokens} tokens, and {head.label} is stored here in blocks of "
            f"{space.block_tokens}; the two can't be mixed"
        )


def _unpinned(writing: Writing, space: Namespace, prompts: Sequence[Prompt]) -> list[bytes]:
    with writing.index.read() as connection:
        known = {pin.tokens for pin in pins.of(connection, space.id)}
    return [tokens for tokens in dict.fromkeys(prompt.tokens for prompt in prompts) if tokens not in known]


# -- looking -----------------------------------------------------------------------------------------------------------


class _Look:
    """What of a bundle a store has already."""

    def __init__(self, connection: Connection, blobs: BlobReader, items: Sequence[Item]) -> None:
        self._connection = connection
        self._blobs = blobs
        self._items = items
        self._plan = _Plan()
        self._needed: set[PrefixHash] = set()

    def plan(self) -> _Plan:
        """Compare everything. Children first: what a new one stands on is needed, though its tokens may be there otherwise."""
        known = nodes.by_keys(self._connection, [item.row.key for item in self._items if isinstance(item.row, NewNode)])
        for item in reversed(self._items):
            match item.row:
                case NewNode():
                    self._node(item, item.row, known.get(item.row.key))
                case NewWindow():
                    self._window(item, item.row)
                case NewCheckpoint():
                    self._checkpoint(item, item.row)
        plan = self._plan
        for group in (plan.new, plan.mending, plan.there):
            group.reverse()
        return plan

    def _node(self, item: Item, row: NewNode, known: Node | None) -> None:
        standing: Sequence[Entry] = ()
        if known is not None:
            standing = [known] if _agrees(known, row) else []
        elif row.key not in self._needed:
            # Pieces that others have cut otherwise, or the block that has replaced them.
            border = row.start - (len(row.path) // TOKEN_BYTES - row.n_tokens)
            steps = radix.slot_steps(self._connection, row.anchor, row.path, border)
            standing = [node for node, _ in steps] if radix.covered(steps) * TOKEN_BYTES == len(row.path) else []
        if not self._file(item, standing, is_in_the_way=known is not None):
            self._needed.add(row.parent)

    def _window(self, item: Item, row: NewWindow) -> None:
        border = row.start - (len(row.path) // TOKEN_BYTES - row.n_tokens)
        near = [other for other in windows.slots(self._connection, [row.anchor]) if is_filed(other, row.anchor, border)]
        covering = [other for other in near if other.path.startswith(row.path) and other.start <= row.start]
        is_in_the_way = bool(windows.by_keys(self._connection, [row.key]))
        self._file(item, covering[:1], is_in_the_way=is_in_the_way)

    def _checkpoint(self, item: Item, row: NewCheckpoint) -> None:
        known = checkpoints.find(self._connection, row.kind, row.seq_id, row.pos, row.prefix)
        standing = [known] if known is not None and (known.anchor, known.path) == (row.anchor, row.path) else []
        if not self._file(item, standing, is_in_the_way=known is not None) and known is not None:
            self._plan.in_the_way[row.blob] = known

    def _file(self, item: Item, standing: Sequence[Entry], *, is_in_the_way: bool) -> bool:
        """Note where an item goes. True if the store has it: sound, because a damaged one would be no better than none."""
        if standing and all(is_sound(self._blobs.get(entry.blob), entry) for entry in standing):
            self._plan.there.append(item)
            self._plan.used += standing
            return True
        (self._plan.mending if is_in_the_way else self._plan.new).append(item)
        return False


def _agrees(known: Node, row: NewNode) -> bool:
    """Whether two rows speak of the same tokens at the same place."""
    mine = (row.parent, row.anchor, row.path, row.start, row.n_tokens)
    return (known.parent, known.anchor, known.path, known.start, known.n_tokens) == mine


# -- room --------------------------------------------------------------------------------------------------------------


def _check_pins(writing: Writing, items: Sequence[Item]) -> None:
    """Whether all pins together will leave enough for everything else; see `kvkeep.cache.pinned.pin`."""
    with writing.index.read() as connection:
        keys = pinned.pinned_keys(connection)
        total = pinned.pinned_bytes(connection)
    total += sum(row.stored_bytes for row, _ in items if key_of(row) not in keys)
    if total > (limit := int(writing.blobs.map_bytes * pinned.MAX_SHARE)):
        raise TooLarge(f"with it {total} bytes would be pinned; at most {limit} may be, half of the budget")


def _make_room(writing: Writing, new: Sequence[Item], protected: Collection[PrefixHash]) -> int:
    """Evict what must go for all of it; nothing if it can't fit at all. Returns how many entries went."""
    if not new:
        return 0
    incoming = sum(budget.footprint(row.stored_bytes) for row, _ in new)
    with writing.index.read() as connection:
        kept = pinned.pinned_keys(connection, int(writing.blobs.map_bytes * pinned.MAX_SHARE))
        staying = {*protected, *writing.held, *kept}
        beside = sum(budget.footprint(e.stored_bytes) for e in rows.every(connection) if key_of(e) in staying)
    largest = budget.largest(writing.blobs)
    by_disk = int(writing.blob_bytes(len(new)) * budget.FILL)
    if incoming + beside > min(largest, by_disk):
        if by_disk < largest:
            raise DiskFull(f"the bundle's {incoming} bytes don't fit: the disk has no more room than is to be left to others")
        raise TooLarge(f"the bundle's {incoming} bytes don't fit beside {beside} that must stay, in {largest} bytes for blobs")
    return len(budget.make_room(writing, incoming, protected, rows=len(new)))


# -- storing -----------------------------------------------------------------------------------------------------------


def _store(batches: Batches, file: BundleFile, plan: _Plan, progress: Callable[[int], None]) -> None:
    for item in plan.there:
        progress(item.n_bytes)
    # What takes the place of something comes last: if this is stopped before, nothing that was there is gone.
    for group in (plan.new, plan.mending):
        for item in group:
            value = file.value(item.at, item.row.stored_bytes)
            # Once more, because the file may have changed since.
            verified(memoryview(value), as_entry(item.row))
            progress(item.n_bytes)
            batches.add(NewEntry(item.row, value))
            if isinstance(item.row, NewCheckpoint) and (known := plan.in_the_way.get(item.row.blob)) is not None:
                batches.replace(known)
        batches.commit()


def _undo(writing: Writing, space: Namespace, plan: _Plan, new_pins: Collection[bytes], error: BaseException) -> None:
    """Remove what was new, and its pins. If even that fails, the error says so: what is left is sound, and evicted in time."""
    try:
        for tokens in new_pins:
            pinned.unpin(writing, space, tokens)
        with writing.index.read() as connection:
            stored = _stored(connection, [*plan.new, *plan.mending])
        writing.remove(stored)
        # Ctrl-C between blobs and rows.
        writing.sweep()
    except KvkeepError as second:
        error.add_note(f"What was new couldn't all be removed: {second}")


def _stored(connection: Connection, items: Sequence[Item]) -> list[Entry]:
    """The entries of some items as the index holds them, what stands on others first."""
    new = [item.row for item in reversed(items)]
    own_nodes = nodes.by_keys(connection, [row.key for row in new if isinstance(row, NewNode)])
    own_windows = windows.by_keys(connection, [row.key for row in new if isinstance(row, NewWindow)])
    points = [
        checkpoints.find(connection, row.kind, row.seq_id, row.pos, row.prefix) for row in new if isinstance(row, NewCheckpoint)
    ]
    found: list[Entry] = [*(point for point in points if point is not None), *own_windows.values(), *own_nodes.values()]
    blobs = {row.blob for row in new}
    return [entry for entry in found if entry.blob in blobs]
