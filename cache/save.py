"""From a state that llama.cpp wrote to blobs and rows: parse, cut, encode, link. Only what isn't stored yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.cache import budget, planes, radix
from kvkeep.cache.layout import Bytes, Form, MemoryKind, State, parse
from kvkeep.store import checkpoints, codec, frame, nodes
from kvkeep.store.checkpoints import NewCheckpoint
from kvkeep.store.entry import Entry
from kvkeep.store.errors import LayoutError, MapFull, TooLarge, UnknownLayout
from kvkeep.store.frame import TOKEN_BYTES, FrameHeader, Kind
from kvkeep.store.hashing import PrefixHash, blob_id, extend, prefix_of
from kvkeep.store.namespaces import Namespace
from kvkeep.store.nodes import NewNode, Node
from kvkeep.store.repository import NewEntry, Writing
from kvkeep.store.verify import is_sound

if TYPE_CHECKING:
    from kvkeep.cache.prefix_cache import Identity

# A commit waits for the disk, so entries are written together; but a batch is held in memory and needs free pages.
BATCH_BYTES = 32 << 20
# A really full map can't always be written to at once after an eviction; more tries than this never helped.
_TRIES = 4


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


class Saver:
    """One save under the writer's lock.

    Args:
        writing: the right to write.
        space: the namespace.
        identity: the model's memory and settings.
        borders: prefix hashes at 0, B, 2B, ... of the tokens.
        tokens: little-endian int32.
        pause: called before each block; may raise to stop, which leaves what was committed.
    """

    def __init__(
        self,
        writing: Writing,
        space: Namespace,
        identity: "Identity",
        borders: Sequence[PrefixHash],
        tokens: bytes,
        pause: Callable[[], None],
    ) -> None:
        self._writing = writing
        self._space = space
        self._identity = identity
        self._borders = borders
        self._tokens = tokens
        self._pause = pause
        self._size = space.block_tokens * TOKEN_BYTES
        self._batch = _Batch()
        self._saved = Saved()
        self._protected = set(borders)

    def save(self, data: Bytes, form: Form) -> Saved:
        """Store the state, cut into blocks if its memory allows that, else whole."""
        state = self._parsed(data, form)
        if state is None:
            self._opaque(data, form)
        else:
            self._blocks(state)
            self._tail(state)
            self._commit()
        self._saved.tokens = len(self._tokens) // TOKEN_BYTES
        return self._saved

    def _parsed(self, data: Bytes, form: Form) -> State | None:
        who = self._identity
        if who.kind is not MemoryKind.ATTENTION:
            return None
        try:
            state = parse(data, form, v_trans=who.v_trans, ext=who.ext)
        except LayoutError:
            # Another memory behind the same model kind (dsa, msa): kept whole, slower and bigger, never wrong.
            return None
        return _in_order(state, len(self._tokens) // TOKEN_BYTES)

    def _blocks(self, state: State) -> None:
        with self._writing.index.read() as connection:
            stored = nodes.by_keys(connection, self._borders[1:])
        for i, key in enumerate(self._borders[1:]):
            self._pause()
            tokens = self._tokens[i * self._size : (i + 1) * self._size]
            start = i * self._space.block_tokens
            known = stored.get(key)
            if known is None or not radix.is_block(known, self._borders[i], tokens, start):
                self._node(state, self._borders[i], self._borders[i], tokens, tokens, start)
                # Behind it: a full batch is committed before the block is queued, and they must go with the block.
                self._replace_pieces(self._borders[i], tokens, start)

    def _replace_pieces(self, anchor: PrefixHash, block: bytes, start: int) -> None:
        """Pieces of a tail that a full block makes superfluous, if no other chat stands on them."""
        with self._writing.index.read() as connection:
            pieces = radix.whole(radix.slot_steps(connection, anchor, block, start))
            for piece in reversed(pieces):
                if nodes.has_children(connection, piece.key, besides=[other.id for other in pieces]):
                    break
                self._batch.replaced.append(piece)

    def _tail(self, state: State) -> None:
        full = len(self._borders) - 1
        anchor = self._borders[-1]
        rest = self._tokens[full * self._size :]
        if not rest:
            return
        with self._writing.index.read() as connection:
            steps = radix.slot_steps(connection, anchor, rest, full * self._space.block_tokens)
        if radix.covered(steps) * TOKEN_BYTES == len(rest):
            return
        pieces = radix.whole(steps)
        parent: PrefixHash = pieces[-1].key if pieces else anchor
        self._protected.update(piece.key for piece in pieces)
        done = sum(len(piece.tokens) for piece in pieces)
        start = full * self._space.block_tokens + done // TOKEN_BYTES
        self._node(state, parent, anchor, rest, rest[done:], start)

    def _node(self, state: State, parent: PrefixHash, anchor: PrefixHash, path: bytes, tokens: bytes, start: int) -> None:
        """Cut, encode and queue one node."""
        key = extend(parent, tokens)
        n_tokens = len(tokens) // TOKEN_BYTES
        header = FrameHeader(Kind.BLOCK, key, parent, start, tokens, state.layout.pack())
        plain, payload = frame.allocate(header, planes.payload_bytes(state.layout, n_tokens))
        planes.split(state.layout, tuple(array[:, start : start + n_tokens, :] for array in state.arrays), payload)
        value = codec.encode(plain)
        row = NewNode(key, parent, anchor, path, start, n_tokens, blob_id(plain.data), len(value), plain.size)
        self._protected.add(key)
        self._queue(NewEntry(row, value))

    def _opaque(self, data: Bytes, form: Form) -> None:
        if form is not Form.SEQUENCE:
            raise UnknownLayout("a memory that can't be parsed is kept in the sequence form only")
        anchor = self._borders[-1]
        path = self._tokens[(len(self._borders) - 1) * self._size :]
        prefix = prefix_of(anchor, path)
        pos = len(self._tokens) // TOKEN_BYTES
        with self._writing.index.read() as connection:
            known = checkpoints.find(connection, Kind.OPAQUE, 0, pos, prefix)
        if known is not None:
            if (known.anchor, known.path) == (anchor, path):
                return
            # Damaged, so that no walk finds it.
            self._batch.replaced.append(known)
        header = FrameHeader(Kind.OPAQUE, prefix, self._borders[0], 0, self._tokens, b"")
        if header.size + data.size > frame.MAX_FRAME_BYTES:
            raise TooLarge(f"a whole state of {data.size} bytes doesn't fit into one blob of {frame.MAX_FRAME_BYTES}")
        plain, payload = frame.allocate(header, data.size)
        payload[:] = data
        value = codec.encode(plain)
        row = NewCheckpoint(Kind.OPAQUE, 0, pos, prefix, anchor, path, blob_id(plain.data), len(value), plain.size)
        del plain, payload  # as large as the state; not needed while the disk is waited for
        self._saved.opaque = True
        self._protected.add(prefix)
        self._queue(NewEntry(row, value))
        self._commit()

    def _queue(self, entry: NewEntry) -> None:
        footprint = budget.footprint(len(entry.value))
        if self._batch.entries and self._batch.size + footprint > min(BATCH_BYTES, budget.largest(self._writing.blobs) // 4):
            self._commit()
        self._batch.entries.append(entry)
        self._batch.size += footprint

    def _commit(self) -> None:
        batch, self._batch = self._batch, _Batch()
        if not batch.entries:
            return
        batch.replaced += self._in_the_way(batch)
        self._saved.evicted += len(budget.make_room(self._writing, batch.size, self._protected))
        self._add(batch)
        self._saved.written += len(batch.entries)
        self._saved.written_bytes += sum(len(entry.value) for entry in batch.entries)

    def _in_the_way(self, batch: _Batch) -> list[Node]:
        """Damaged rows that the walk passed over, and that still have the keys of new nodes.

        Raises:
            UnknownLayout: one is sound, but of other tokens that hash alike. What stands on it would stand on the new one.
        """
        new = {entry.row.key: entry.row for entry in batch.entries if isinstance(entry.row, NewNode)}
        with self._writing.index.read() as connection, self._writing.blobs.read() as blobs:
            found = nodes.by_keys(connection, list(new))
            for key, node in found.items():
                if not _is_same(node, new[key]) and is_sound(blobs.get(node.blob), node):
                    raise UnknownLayout(f"another entry already has the key of the node at position {new[key].start}")
        return list(found.values())

    def _add(self, batch: _Batch) -> None:
        """Store a batch. Free pages can be in the wrong places: then evict more, and try again."""
        for attempt in range(1, _TRIES + 1):
            try:
                self._writing.add(self._space.id, batch.entries, batch.replaced)
                return
            except MapFull:
                if attempt == _TRIES:
                    raise
                self._writing.blobs.settle()
                evicted = budget.make_room(self._writing, batch.size * (attempt + 1), self._protected)
                self._saved.evicted += len(evicted)


def _is_same(one: NewNode, other: NewNode) -> bool:
    """Whether two rows speak of the same tokens behind the same parent."""
    return (one.parent, one.start, one.tokens) == (other.parent, other.start, other.tokens)


def _in_order(state: State, n_tokens: int) -> State:
    """The state with its cells in the order of their positions.

    Cells are taken by their position, never by their place: after a cut-back or a shift llama.cpp fills holes.

    Raises:
        UnknownLayout: the cells aren't exactly the positions 0 to n_tokens - 1.
    """
    order = np.argsort(state.positions, kind="stable")
    if not np.array_equal(state.positions[order], np.arange(n_tokens)):
        found = f"{state.positions.size} cells from {state.positions.min()} to {state.positions.max()}"
        raise UnknownLayout(f"the state should hold the positions 0 to {n_tokens - 1}, it holds {found}")
    if np.array_equal(order, np.arange(n_tokens)):
        return state
    arrays: tuple[Bytes, ...] = tuple(array[:, order, :] for array in state.arrays)
    return State(state.layout, state.positions[order], arrays)
