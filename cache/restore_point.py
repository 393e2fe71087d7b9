"""The largest position at which a context can be rebuilt: where all parts of the model's memory exist.

attention caches     nodes cover everything below the position
a window             rows cover the window below it
recurrent tensors    there is a checkpoint at exactly this position
anything else        there is a whole state of exactly this position
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvkeep.cache import radix
from kvkeep.cache.match import Step, WindowStep
from kvkeep.cache.memory import Memory, Window
from kvkeep.store import checkpoints, windows
from kvkeep.store.checkpoints import Checkpoint
from kvkeep.store.engine import Connection
from kvkeep.store.frame import TOKEN_BYTES, Kind
from kvkeep.store.hashing import BlobId, Fingerprint, PrefixHash, chain, prefix_of
from kvkeep.store.windows import Window as WindowRow


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, as the index is asked for it.

    Attributes:
        tokens: little-endian int32.
        borders: prefix hashes at 0, B, 2B, ... of them; the first one is the fingerprint.
        block_tokens: B.
    """

    tokens: bytes
    borders: Sequence[PrefixHash]
    block_tokens: int

    @classmethod
    def of(cls, fingerprint: Fingerprint, tokens: bytes, block_tokens: int) -> "Prompt":
        """A prompt with the hashes at its block borders."""
        return cls(tokens, [PrefixHash(fingerprint), *chain(fingerprint, tokens, block_tokens * TOKEN_BYTES)], block_tokens)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def prefix(self) -> PrefixHash:
        """The prefix hash of all its tokens."""
        return prefix_of(self.borders[-1], self.rest(len(self.borders) - 1))

    def rest(self, slot: int) -> bytes:
        """Its tokens from a block border to the next one."""
        size = self.block_tokens * TOKEN_BYTES
        return self.tokens[slot * size : (slot + 1) * size]


class RestorePoint(NamedTuple):
    """A position at which a context can be rebuilt, and from what.

    Attributes:
        length: tokens before it.
        steps: nodes for the attention caches.
        windows: rows for the window, lowest first.
        checkpoint: recurrent tensors, or a whole state.
        in_common: tokens that are stored, whether or not all that they need is there.
    """

    length: int
    steps: tuple[Step, ...] = ()
    windows: tuple[WindowStep, ...] = ()
    checkpoint: Checkpoint | None = None
    in_common: int = 0


def find(
    connection: Connection,
    prompt: Prompt,
    memory: Memory,
    *,
    seq_id: int = 0,
    whole_window: bool = False,
    without: Collection[BlobId] = (),
) -> RestorePoint:
    """The largest restore point within a prompt.

    Args:
        connection: a read transaction.
        prompt: the tokens.
        memory: the parts that must be there.
        seq_id: the sequence whose checkpoints count.
        whole_window: take all of the windowed cache that is stored, not only what the window needs.
        without: blobs that are known to be damaged.
    """
    steps = radix.walk(connection, prompt.borders, prompt.tokens, prompt.block_tokens) if memory.has_attention else []
    length = radix.covered(steps) if memory.has_attention else prompt.n_tokens
    rows = _WindowRows(connection, prompt, memory.window, whole_window, without)

    def at(position: int, checkpoint: Checkpoint | None = None) -> RestorePoint | None:
        window = rows.below(position)
        return None if window is None else RestorePoint(position, tuple(radix.cut(steps, position)), window, checkpoint)

    best = RestorePoint(0, in_common=radix.covered(steps))
    if not memory.is_recurrent and memory.has_attention:
        deepest = rows.deepest(length)
        best = (at(deepest) if deepest else None) or best
    for point in along(connection, prompt, seq_id, without, above=best.length):
        if point.kind == Kind.OPAQUE:
            return RestorePoint(point.pos, checkpoint=point)
        if memory.is_recurrent and point.pos <= length and (found := at(point.pos, point)) is not None:
            return found
    return best


def along(
    connection: Connection, prompt: Prompt, seq_id: int, without: Collection[BlobId] = (), *, above: int = 0
) -> Iterator[Checkpoint]:
    """Checkpoints that were taken on the way through the prompt, at positions `above` this one, the deepest first."""
    if above >= prompt.n_tokens:
        return
    lowest = above // prompt.block_tokens
    present = checkpoints.anchors(connection, prompt.borders[lowest:], seq_id)
    for slot in range(len(prompt.borders) - 1, lowest - 1, -1):
        anchor = prompt.borders[slot]
        if anchor not in present:
            continue
        for point in checkpoints.along(connection, anchor, prompt.rest(slot), seq_id):
            behind = point.pos - slot * prompt.block_tokens
            fits = behind * TOKEN_BYTES == len(point.path) and point.prefix == prefix_of(anchor, point.path)
            if fits and point.pos > above and point.blob not in without:
                yield point


# 1,024 positions, as many as the windows of most models have.
_SLOTS_AT_ONCE = 16


class _WindowRows:
    """Which positions of a prompt have their keys and values in the windowed cache stored."""

    def __init__(
        self, connection: Connection, prompt: Prompt, window: Window | None, whole: bool, without: Collection[BlobId]
    ) -> None:
        self._connection = connection
        self._prompt = prompt
        self._window = window
        self._whole = whole
        self._without = without
        self._slots: dict[int, list[WindowRow]] = {}

    def below(self, position: int) -> tuple[WindowStep, ...] | None:
        """Rows that cover the window below `position`; none if the memory has no window; None if they don't."""
        if self._window is None or position == 0:
            return ()
        # A ring has no room for more than its window.
        everything = self._whole and self._window.full
        wanted = 0 if everything else self._window.first_written(position)
        reached, steps = self._cover(position, wanted)
        return tuple(steps) if reached <= self._window.first_needed(position) else None

    def deepest(self, length: int) -> int:
        """The largest position up to `length` whose window is covered."""
        position = length
        while position > 0 and self._window is not None:
            needed = self._window.first_needed(position)
            reached, _ = self._cover(position, needed)
            if reached <= needed:
                break
            # Something is missing just below `reached`, and would be missing in every window that contains it.
            position = reached if reached < position else self._covered_below(position)
        return position

    def _covered_below(self, position: int) -> int:
        """The largest position below this one up to which a row of the same slot reaches; else the slot's border."""
        slot = (position - 1) // self._prompt.block_tokens
        border, rest = slot * self._prompt.block_tokens, self._prompt.rest(slot)
        ends = (border + radix.common_tokens(row.path, rest) for row in self._in_slot(slot))
        return max((end for end in ends if end < position), default=border)

    def _cover(self, end: int, wanted: int) -> tuple[int, list[WindowStep]]:
        """Rows that cover the positions below `end`, down to `wanted` or to the first gap."""
        steps: list[WindowStep] = []
        at = end
        while at > wanted:
            row = self._covering(at - 1)
            if row is None:
                break
            first = max(row.start, wanted)
            steps.append(WindowStep(row, first - row.start, at - first))
            at = first
        return at, steps[::-1]

    def _covering(self, position: int) -> WindowRow | None:
        """Of the rows that have this position, with the prompt's tokens up to it, the one that begins lowest."""
        slot, inside = divmod(position, self._prompt.block_tokens)
        rest = self._prompt.rest(slot)
        fitting = [
            row
            for row in self._in_slot(slot)
            if row.start <= position and radix.common_tokens(row.path, rest) > inside and row.blob not in self._without
        ]
        return min(fitting, key=lambda row: row.start, default=None)

    def _in_slot(self, slot: int) -> list[WindowRow]:
        """All rows of a slot: those that share most tokens with the prompt needn't be those that begin lowest."""
        if slot not in self._slots:
            # A window reaches over several slots: one query for some of them, downwards.
            below = range(max(0, slot - _SLOTS_AT_ONCE + 1), slot + 1)
            found = windows.slots(self._connection, [self._prompt.borders[i] for i in below])
            for i in below:
                anchor, border = self._prompt.borders[i], i * self._prompt.block_tokens
                self._slots[i] = [row for row in found if is_filed(row, anchor, border)]
        return self._slots[slot]


def is_filed(row: WindowRow, anchor: PrefixHash, border: int) -> bool:
    """Whether a row's own figures agree, so that its positions can be trusted."""
    end = border + len(row.path) // TOKEN_BYTES
    return row.anchor == anchor and border <= row.start < end and row.start + row.n_tokens == end
