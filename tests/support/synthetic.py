"""States without a model, of every kind of memory: real layouts, and bytes that depend on nothing but the tokens before.

The numbers of position i are a function of the first i + 1 tokens, as keys, values and recurrent tensors are. So whatever
a store gives back for a prefix can be compared with `state_of(layout, prefix)` or `Made.state(prefix)`, byte for byte,
without remembering anything.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkeep.cache.layout import ELEMENT_TYPES, EXT_BYTES, Bytes, Cells, Layout, Role, Section
from kvkeep.cache.memory import Memory, MemoryKind, Window
from kvkeep.cache.points import Point
from kvkeep.cache.prefix_cache import Identity
from kvkeep.cache.state import Form, Windowed, blank
from kvkeep.store.hashing import Fingerprint, digest_fields

F16 = 1
ARCH = "llama"

# Normally distributed f16, as keys and values are: their high bytes compress and their low bytes don't.
_NUMBERS = np.random.default_rng(7).standard_normal(1 << 16).astype("<f2").view("<u2")


def dense_layout(
    n_layer: int = 2,
    values: int = 32,
    *,
    k_type: int = F16,
    v_type: int = F16,
    v_trans: bool = False,
    ext: bool = False,
    mla: bool = False,
) -> Layout:
    """A layout of plain attention with `values` numbers a layer in keys and values each."""
    row = {kind: values // element.block * element.size for kind, element in ELEMENT_TYPES.items()}
    keys = [Section(Role.KEY, k_type, 1, row[k_type])] * n_layer
    if mla:
        vals = []
    elif v_trans:
        vals = [Section(Role.VALUE_COLUMNS, v_type, values, ELEMENT_TYPES[v_type].size)] * n_layer
    else:
        vals = [Section(Role.VALUE_ROWS, v_type, 1, row[v_type])] * n_layer
    cells = [Section(Role.EXT, 0, 1, EXT_BYTES)] if ext else []
    return Layout(v_trans, n_layer, ext, (*cells, *keys, *vals))


SMALL = dense_layout()
"""256 bytes a token."""


def state_of(layout: Layout, tokens: Sequence[int], form: Form = Form.SEQUENCE) -> Bytes:
    """The state of a context that has decoded exactly these tokens."""
    buffer, state = blank([layout], len(tokens), form, ARCH)
    _fill(state.caches[0], _prefix_words(tokens))
    return buffer


def _fill(cells: Cells, words: npt.NDArray[np.uint64]) -> None:
    """Numbers of the positions that these cells have; `words` has one for every position from 0 on."""
    own = words[cells.positions]
    for number, (section, array) in enumerate(zip(cells.layout.sections, cells.arrays, strict=True)):
        rows = _numbers(own + np.uint64(number), -(-section.token_bytes // 2)).view(np.uint8)[:, : section.token_bytes]
        array[...] = rows.reshape(len(own), section.outer, section.inner).transpose(1, 0, 2)


@dataclass(frozen=True)
class Made:
    """A model that doesn't exist, with a memory of any kind.

    Attributes:
        memory: what kind of memory.
        caches: layouts of the caches that keep every position.
        window: layout of the windowed cache.
        tensor_bytes: bytes of each of its two recurrent tensors; 0 if it has none.
    """

    memory: Memory
    caches: tuple[Layout, ...] = ()
    window: Layout | None = None
    tensor_bytes: int = 0

    def identity(self, name: str = "model") -> Identity:
        return Identity(fingerprint_of(name), name, {"name": name}, self.memory)

    def first(self, length: int) -> int:
        """The lowest position in the windowed cache of a state of `length` tokens."""
        window = self.memory.window
        return 0 if window is None or window.full else window.first_written(length)

    def state(self, tokens: Sequence[int], form: Form = Form.SEQUENCE, *, first: int | None = None) -> Bytes:
        """The state of a context that has decoded exactly these tokens, its window from `first` on."""
        return self._state(self.caches, tokens, form, self.first(len(tokens)) if first is None else first)

    def point(self, tokens: Sequence[int]) -> Point:
        """A checkpoint behind these tokens."""
        return Point(len(tokens), self._state((), tokens, Form.SEQUENCE, self.first(len(tokens))))

    def _state(self, caches: Sequence[Layout], tokens: Sequence[int], form: Form, first: int) -> Bytes:
        heads = [struct.pack("<II", 0, 2)] + [struct.pack("<iQ", 0, self.tensor_bytes)] * 2
        size = sum(map(len, heads)) + 2 * self.tensor_bytes if self.tensor_bytes else None
        in_window = None if self.window is None else Windowed(self.window, first)
        buffer, state = blank(caches, len(tokens), form, ARCH, window=in_window, recurrent_bytes=size)
        words = _prefix_words(tokens)
        for number, cells in enumerate(state.caches):
            _fill(cells, words + np.uint64(1000 * number))
        if state.window is not None:
            _fill(state.window, words + np.uint64(5000))
        if state.recurrent is not None:
            count = -(-self.tensor_bytes // 2)
            rows = [_numbers(words[-1:] + np.uint64(7000 + i), count).tobytes()[: self.tensor_bytes] for i in range(2)]
            data = heads[0] + heads[1] + rows[0] + heads[2] + rows[1]
            state.recurrent.data[:] = np.frombuffer(data, np.uint8)
        return buffer


NO_LAYERS = Layout(False, 0, False, ())
"""A cache that llama.cpp writes although no layer uses it: that of a hybrid all of whose attention has a window."""


def _prefix_words(tokens: Sequence[int]) -> npt.NDArray[np.uint64]:
    """One word a position that depends on all tokens up to it."""
    words = np.empty(len(tokens), np.uint64)
    word = 1
    for i, token in enumerate(tokens):
        word = (word * 6364136223846793005 + int(token) + 1442695040888963407) % (1 << 64)
        words[i] = word
    return words


def _numbers(words: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.uint16]:
    """`count` f16 numbers for each word: splitmix64 of a counter, looked up in a table."""
    mixed = words[:, None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.ascontiguousarray(_NUMBERS[(mixed >> np.uint64(40)) & np.uint64(0xFFFF)])


def fingerprint_of(name: str) -> Fingerprint:
    return Fingerprint(digest_fields("kvkeep tests: a made-up model", [("name", name)]))


def identity(
    name: str = "model",
    kind: MemoryKind = MemoryKind.ATTENTION,
    *,
    v_trans: bool | None = False,
    ext: bool = False,
) -> Identity:
    """The identity of a model that doesn't exist."""
    return Identity(fingerprint_of(name), name, {"name": name}, Memory(kind, v_trans=v_trans, ext=ext))


_KEPT, _WINDOWED = dense_layout(1, 8), dense_layout(2, 8)


def _memory(kind: MemoryKind, window: Window | None = None) -> Memory:
    return Memory(kind, window, v_trans=False, ext=False)


def window_model(size: int, *, chunked: bool = False, full: bool = False) -> Made:
    return Made(_memory(MemoryKind.WINDOW, Window(size, chunked, full)), (_KEPT,), _WINDOWED)


def hybrid_window_model(size: int, kept: Layout = NO_LAYERS) -> Made:
    return Made(_memory(MemoryKind.HYBRID, Window(size)), (kept,), _WINDOWED, tensor_bytes=40)


ATTENTION = Made(_memory(MemoryKind.ATTENTION), (SMALL,))
HYBRID = Made(_memory(MemoryKind.HYBRID), (_KEPT,), tensor_bytes=40)
RECURRENT = Made(_memory(MemoryKind.RECURRENT), tensor_bytes=40)
TWO_CACHES = Made(_memory(MemoryKind.ATTENTION), (_KEPT, dense_layout(1, 8, mla=True)))


def random_tokens(count: int, seed: int = 0, n_vocab: int = 32_000) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, n_vocab, count)]
