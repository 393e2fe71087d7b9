"""A foreign state on its way into the store: checked whole, and only then written."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvkeep.cache import budget
from kvkeep.cache.batches import Saved
from kvkeep.cache.foreign.item import Found, Item, Tokens
from kvkeep.cache.foreign.streams import as_only_sequence
from kvkeep.cache.layout import Bytes, Cells
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.cache.pinned import MAX_SHARE, pinned_bytes
from kvkeep.cache.prefix_cache import BLOCK_TOKENS, Identity, PrefixCache
from kvkeep.cache.state import Form, State, parse
from kvkeep.store.errors import LayoutError, TooLarge, UnknownLayout
from kvkeep.store.repository import Repository

# What a frame has besides tokens and payload, and more than its layout takes.
_FRAME_BYTES = 4096


class Judge(Protocol):
    """Whoever says whether bytes can be a state of the named model: `kvkeep.cache.adapters.named_model.NamedModel`."""

    @property
    def identity(self) -> Identity:
        """Whose states are imported."""

    def check(self, tokens: Tokens, data: Bytes, form: Form) -> None:
        """Raise LayoutError or UsageError, with a sentence, if they can't."""


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """A state that can be stored.

    Attributes:
        item: it, with exactly the tokens that it holds.
        stored: how many of its first tokens can be had from the store already.
        needed_bytes: the most that storing the rest takes.
    """

    item: Item
    stored: int
    needed_bytes: int

    @property
    def is_new(self) -> bool:
        """Whether there is something to store."""
        return self.stored < len(self.item.tokens)


class Taker:
    """Checks and stores the states of one model.

    Args:
        judge: the model.
        repository: where they are to be kept; for a dry run, one that tells how large the budget is.
        pin: whether what is taken is pinned, too.
    """

    def __init__(self, judge: Judge, repository: Repository, *, pin: bool = False) -> None:
        self._judge = judge
        self._repository = repository
        self._cache = PrefixCache(repository, judge.identity)
        self._pin = pin

    @property
    def room(self) -> int:
        """The most that everything together may take, in bytes."""
        return self._cache.largest_bytes

    def read(self, found: Found) -> Checked:
        """Read a state, and look whether all of it is what it should be. Writes nothing.

        Raises:
            LayoutError: it isn't, or not this model's.
            TooLarge: the budget can't hold it.
            UsageError, StoreError: it can't be read.
        """
        try:
            item = fitted(found.read(self.room), self._judge.identity.memory)
        except MemoryError as error:
            raise TooLarge("it doesn't fit into this machine's memory") from error
        self._judge.check(item.tokens, item.data, item.form)
        match = self._cache.match(item.tokens, form=item.form)
        checked = Checked(item, match.length, self._needed(item, match.length))
        if checked.is_new:
            self._check_room(checked.needed_bytes)
        return checked

    def _needed(self, item: Item, stored: int) -> int:
        """Compression isn't reckoned with: what comes of it is known only when it is done."""
        new = len(item.tokens) - stored
        # A checkpoint is whole, however many of its tokens are new.
        is_cut = self._judge.identity.memory.kind is MemoryKind.ATTENTION
        plain = item.data.size * new // len(item.tokens) if is_cut else item.data.size
        blocks = -(-new // BLOCK_TOKENS) + 1
        return blocks * budget.footprint(plain // blocks + _FRAME_BYTES)

    def _check_room(self, needed: int) -> None:
        limit = int(self._repository.blobs.map_bytes * MAX_SHARE)
        with self._repository.rows() as connection:
            pinned = pinned_bytes(connection)
        if self._pin and pinned + needed > limit:
            raise TooLarge(f"with it {pinned + needed} bytes would be pinned; at most {limit} may be, half of the budget")
        # What is pinned beyond its share goes as anything else does.
        if needed > (room := self.room - min(pinned, limit)):
            raise TooLarge(f"it may take {needed} bytes; the budget leaves {room} beside what is pinned")

    def store(self, checked: Checked, pause: Callable[[], None] = lambda: None) -> Saved:
        """Store what of it isn't stored yet.

        Args:
            checked: from `read`.
            pause: called before each block; may raise to stop.

        Raises:
            CapacityError, StoreLocked, StoreError: not, or only a first part, was stored. The store is sound.
        """
        item = checked.item
        saved = self._cache.save(item.tokens, item.data, item.form, pause=pause)
        if self._pin:
            self._cache.pin(item.tokens)
        return saved

    def is_stored(self, tokens: Tokens, form: Form) -> bool:
        """Whether all of a state can be had from the store now."""
        return self._cache.match(tokens, form=form).length == len(tokens)


def fitted(item: Item, memory: Memory) -> Item:
    """A state with just the tokens that its cells were made of.

    A spare last token, which was never decoded, is left out where its writer is known to name it. In any other case in
    which tokens and cells don't go together nobody knows which token made which cell.

    Raises:
        LayoutError: its cells aren't the positions of its tokens.
    """
    if memory.kind is MemoryKind.UNKNOWN:
        if item.form is not Form.SEQUENCE:
            raise UnknownLayout(
                "states of this model's memory can be kept only as saved sequences, not as sessions or from a LlamaDiskCache"
            )
        return item
    if item.form is Form.SEQUENCE and not _fits(item, memory) and _fits(item, memory, any_streams=True):
        item = replace(item, data=as_only_sequence(item, memory))
    state = _parsed(item, memory)
    n_cells, n_tokens = _length(state), len(item.tokens)
    if n_cells == n_tokens - 1 and item.loose:
        item = replace(item, tokens=item.tokens[:n_cells])
    elif n_cells != n_tokens:
        raise UnknownLayout(f"it names {n_tokens} tokens and holds a state of {n_cells}")
    _check_positions(state, memory, n_cells)
    return item


def _parsed(item: Item, memory: Memory) -> State:
    try:
        return parse(item.data, item.form, memory)
    except LayoutError as error:
        if memory.v_trans is not None and _fits(item, replace(memory, v_trans=not memory.v_trans)):
            its, ours = ("on", "off") if memory.v_trans else ("off", "on")
            raise UnknownLayout(
                f"it was written with other settings: flash attention was {its}, and is {ours} for this model"
            ) from error
        raise type(error)(f"it is no state of a model with this memory ({memory.kind.value}): {error}") from error


def _fits(item: Item, memory: Memory, *, any_streams: bool = False) -> bool:
    try:
        parse(item.data, item.form, memory, any_streams=any_streams)
    except LayoutError:
        return False
    return True


def _length(state: State) -> int:
    if state.recurrent is not None:
        return state.recurrent.pos + 1
    return 1 + max(int(cells.positions.max()) for cells in (*state.caches, state.window) if cells is not None)


def _check_positions(state: State, memory: Memory, length: int) -> None:
    for cells in state.caches:
        if not np.array_equal(_sorted(cells), np.arange(length)):
            raise UnknownLayout(f"it should hold the positions 0 to {length - 1}, each once; others are missing or twice there")
    if state.window is not None and memory.window is not None:
        first = memory.window.first_needed(length)
        positions = _sorted(state.window)
        needed = positions[positions >= first]
        if not np.array_equal(needed, np.arange(first, length)) or (np.diff(positions) == 0).any():
            raise UnknownLayout(f"its window should hold the positions {first} to {length - 1}, each once")


def _sorted(cells: Cells) -> npt.NDArray[np.int32]:
    return np.sort(cells.positions)
