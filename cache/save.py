"""From a state that llama.cpp wrote to blobs and rows: parse, cut, encode, link. Only what isn't stored yet.

attention caches     full blocks, then the tail, as nodes of the radix index
a window             rows beside the nodes of the same tokens
recurrent tensors    a checkpoint at the state's end, and at every position where one was taken on the way
anything else        one whole state
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvkeep.cache import budget, planes, points, radix
from kvkeep.cache.batches import Batches, Saved
from kvkeep.cache.cutter import Cutter, in_order, last_run
from kvkeep.cache.layout import Bytes, Cells
from kvkeep.cache.memory import MemoryKind
from kvkeep.cache.points import Point
from kvkeep.cache.restore_point import Prompt, along, is_filed
from kvkeep.cache.state import Form, Recurrent, State, parse
from kvkeep.store import checkpoints, codec, frame, nodes, windows
from kvkeep.store.checkpoints import NewCheckpoint
from kvkeep.store.entry import Entry
from kvkeep.store.errors import LayoutError, TooLarge, UnknownLayout
from kvkeep.store.frame import TOKEN_BYTES, FrameHeader, Kind
from kvkeep.store.hashing import PrefixHash, blob_id, extend, prefix_of
from kvkeep.store.namespaces import Namespace
from kvkeep.store.nodes import NewNode
from kvkeep.store.windows import NewWindow
from kvkeep.store.writing import NewEntry, Writing

if TYPE_CHECKING:
    from kvkeep.cache.prefix_cache import Identity

# The checkpoints of one chat may take this share of the budget, so that they never drive out what they stand on.
POINTS_SHARE = 1 / 4


class Saver:
    """One save under the writer's lock.

    Args:
        writing: the right to write.
        space: the namespace.
        identity: the model's memory and settings.
        prompt: the tokens that the state was decoded from.
        seq_id: the sequence, by which checkpoints are filed.
        pause: called before each block; may raise to stop, which leaves what was committed.
        state_bytes: size of the state in memory.
    """

    def __init__(
        self,
        writing: Writing,
        space: Namespace,
        identity: "Identity",
        prompt: Prompt,
        seq_id: int,
        pause: Callable[[], None],
        state_bytes: int,
    ) -> None:
        self._writing = writing
        self._memory = identity.memory
        self._prompt = prompt
        self._borders = prompt.borders
        self._seq_id = seq_id
        self._pause = pause
        self._block_tokens = space.block_tokens
        self._batches = Batches(writing, space.id, set(prompt.borders), state_bytes)
        self.passed: list[Entry] = []
        """What was stored already of this state. It is in use, as if it had been restored."""

    def save(self, data: Bytes, form: Form, taken: Sequence[Point] = ()) -> Saved:
        """Store the state, cut into its parts if its memory allows that, else whole.

        Args:
            data: llama.cpp's bytes.
            form: which form they have.
            taken: checkpoints that were taken while its tokens were decoded.
        """
        saved = self._batches.saved
        # One at the state's own end is in the state itself.
        below = {point.pos: point for point in taken if point.pos < self._prompt.n_tokens}
        state = self._parsed(data, form)
        if state is None:
            self._wholes(data, form, list(below.values()))
        else:
            if state.caches:
                caches = Cutter(state.caches)
                self._blocks(caches)
                self._tail(caches)
            self._parts(state, self._prompt.n_tokens)
            # What follows may be refused, and what there is by now is good. Also, what is only queued isn't seen.
            self._batches.commit()
            for point in sorted(below.values(), key=lambda point: -point.pos):
                self._pause()
                self._parts(parse(point.data, Form.SEQUENCE, self._memory, partial=True), point.pos)
        self._batches.commit()
        if self._memory.kind is not MemoryKind.ATTENTION:
            self._thin()
        saved.tokens = self._prompt.n_tokens
        return saved

    def _parsed(self, data: Bytes, form: Form) -> State | None:
        try:
            state = parse(data, form, self._memory)
        except LayoutError:
            # Another memory behind the same model kind: kept whole, slower and bigger, never wrong.
            return None
        wanted = self._prompt.n_tokens
        caches = tuple(in_order(cells, wanted) for cells in state.caches)
        return State(caches, state.window, state.recurrent)

    # -- attention caches -----------------------------------------------------------------------------------------

    def _blocks(self, caches: Cutter) -> None:
        with self._writing.index.read() as connection:
            stored = nodes.by_keys(connection, self._borders[1:])
            occupied = nodes.anchors(connection, self._borders)
        for i, key in enumerate(self._borders[1:]):
            self._pause()
            tokens = self._prompt.rest(i)
            start = i * self._block_tokens
            known = stored.get(key)
            if known is None or not radix.is_block(known, self._borders[i], tokens, start):
                self._node(caches, self._borders[i], self._borders[i], tokens, tokens, start)
                if self._borders[i] in occupied:
                    # Behind it: a full batch is committed before the block is queued, and they must go with the block.
                    self._replace_pieces(self._borders[i], tokens, start)
            else:
                self.passed.append(known)

    def _replace_pieces(self, anchor: PrefixHash, block: bytes, start: int) -> None:
        """Pieces of a tail that a full block makes superfluous, if no other chat stands on them."""
        with self._writing.index.read() as connection:
            pieces = radix.whole(radix.slot_steps(connection, anchor, block, start))
            for piece in reversed(pieces):
                if nodes.has_children(connection, piece.key, besides=[other.id for other in pieces]):
                    break
                self._batches.replace(piece)

    def _tail(self, caches: Cutter) -> None:
        full = len(self._borders) - 1
        anchor = self._borders[-1]
        rest = self._prompt.rest(full)
        if not rest:
            return
        with self._writing.index.read() as connection:
            steps = radix.slot_steps(connection, anchor, rest, full * self._block_tokens)
        # Also where it is another chat's: the checkpoint of this state will stand on it.
        for node, _ in steps:
            self._batches.protect(node.key)
            self.passed.append(node)
        if radix.covered(steps) * TOKEN_BYTES == len(rest):
            return
        pieces = radix.whole(steps)
        parent: PrefixHash = pieces[-1].key if pieces else anchor
        done = sum(len(piece.tokens) for piece in pieces)
        start = full * self._block_tokens + done // TOKEN_BYTES
        self._node(caches, parent, anchor, rest, rest[done:], start)

    def _node(self, caches: Cutter, parent: PrefixHash, anchor: PrefixHash, path: bytes, tokens: bytes, start: int) -> None:
        """Cut, encode and queue one node."""
        key = extend(parent, tokens)
        n_tokens = len(tokens) // TOKEN_BYTES
        plain = caches.frame(FrameHeader(Kind.BLOCK, key, parent, start, tokens, caches.layout), start)
        value = codec.encode(plain)
        row = NewNode(key, parent, anchor, path, start, n_tokens, blob_id(plain.data), len(value), plain.size)
        self._batches.add(NewEntry(row, value))

    # -- parts that hold for one position -------------------------------------------------------------------------

    def _parts(self, state: State, pos: int) -> None:
        """The window and the recurrent tensors of a state of `pos` tokens."""
        if state.window is not None:
            self._window(last_run(state.window, pos), pos)
            self._batches.commit()
        if state.recurrent is not None:
            self._recurrent(state.recurrent, pos)

    def _window(self, cells: Cells, pos: int) -> None:
        """The windowed cache, block by block, as far as it isn't stored."""
        first = pos - len(cells.positions)
        cutter = Cutter([cells])
        for slot in range(first // self._block_tokens, -(-pos // self._block_tokens)):
            self._pause()
            border = slot * self._block_tokens
            start, end = max(first, border), min(pos, border + self._block_tokens)
            anchor, path = self._borders[slot], self._prompt.rest(slot)[: (end - border) * TOKEN_BYTES]
            with self._writing.index.read() as connection:
                near = [row for row in windows.slots(connection, [anchor]) if is_filed(row, anchor, border)]
            if covering := [row for row in near if row.path.startswith(path) and row.start <= start]:
                self._batches.protect(covering[0].key)
                self.passed.append(covering[0])
                continue
            key = extend(anchor, path)
            tokens = path[(start - border) * TOKEN_BYTES :]
            plain = cutter.frame(FrameHeader(Kind.WINDOW, key, anchor, start, tokens, cutter.layout), start - first)
            value = codec.encode(plain)
            row = NewWindow(key, anchor, path, start, end - start, blob_id(plain.data), len(value), plain.size)
            self._batches.add(NewEntry(row, value))
            for shorter in near:
                # A tail that has grown. One with the same path is found by its key.
                if path.startswith(shorter.path) and path != shorter.path and shorter.start >= start:
                    self._batches.replace(shorter)

    def _recurrent(self, recurrent: Recurrent, pos: int) -> None:
        if recurrent.pos != pos - 1:
            raise UnknownLayout(f"the recurrent tensors are those of position {recurrent.pos}, not of {pos - 1}")
        width = planes.run_width(recurrent.data.size)

        def framed(prefix: PrefixHash, anchor: PrefixHash, path: bytes) -> Bytes:
            start = pos - len(path) // TOKEN_BYTES
            header = FrameHeader(Kind.RECURRENT, prefix, anchor, start, path, bytes([width]))
            plain, payload = frame.allocate(header, recurrent.data.size)
            planes.split_run(recurrent.data, payload)
            return plain

        self._checkpoint(Kind.RECURRENT, pos, framed)

    def _wholes(self, data: Bytes, form: Form, taken: Sequence[Point]) -> None:
        if form is not Form.SEQUENCE:
            raise UnknownLayout("a memory that can't be parsed is kept in the sequence form only")
        if self._memory.kind is MemoryKind.UNKNOWN:
            # Of another kind's memory the checkpoints lack what can't be told apart here.
            for point in taken:
                self._pause()
                self._whole(point.data, point.pos)
        self._whole(data, self._prompt.n_tokens)
        self._batches.saved.opaque = True

    def _whole(self, data: Bytes, pos: int) -> None:
        tokens = self._prompt.tokens[: pos * TOKEN_BYTES]

        def framed(prefix: PrefixHash, anchor: PrefixHash, path: bytes) -> Bytes:
            header = FrameHeader(Kind.OPAQUE, prefix, self._borders[0], 0, tokens, b"")
            if header.size + data.size > frame.MAX_FRAME_BYTES:
                raise TooLarge(f"a whole state of {data.size} bytes doesn't fit into one blob of {frame.MAX_FRAME_BYTES}")
            plain, payload = frame.allocate(header, data.size)
            payload[:] = data
            return plain

        self._checkpoint(Kind.OPAQUE, pos, framed)

    def _checkpoint(self, kind: Kind, pos: int, framed: Callable[[PrefixHash, PrefixHash, bytes], Bytes]) -> None:
        """File what `framed` makes, given prefix hash, anchor and path, under a position, unless it is there."""
        slot, inside = divmod(pos, self._block_tokens)
        anchor, path = self._borders[slot], self._prompt.rest(slot)[: inside * TOKEN_BYTES]
        prefix = prefix_of(anchor, path)
        with self._writing.index.read() as connection:
            known = checkpoints.find(connection, kind, self._seq_id, pos, prefix)
        if known is not None and (known.anchor, known.path) == (anchor, path):
            self._batches.protect(prefix)
            self.passed.append(known)
            return
        plain = framed(prefix, anchor, path)
        value = codec.encode(plain)
        row = NewCheckpoint(kind, self._seq_id, pos, prefix, anchor, path, blob_id(plain.data), len(value), plain.size)
        del plain  # as large as the state; not needed while the disk is waited for
        self._batches.add(NewEntry(row, value))
        if known is not None:
            # Damaged, so that no look-up finds it.
            self._batches.replace(known)

    def _thin(self) -> None:
        """Checkpoints of this chat that are too many: a spread over its whole length remains."""
        with self._writing.index.read() as connection:
            found = list(along(connection, self._prompt, self._seq_id))[::-1]
        drop = points.surplus(
            [point.pos for point in found],
            [point.stored_bytes for point in found],
            points.MAX_POINTS,
            int(budget.largest(self._writing.blobs) * POINTS_SHARE),
        )
        if drop:
            self._writing.remove([found[i] for i in drop])
