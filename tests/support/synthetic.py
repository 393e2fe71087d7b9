"""Dense states without a model: real layouts, and bytes that depend on nothing but the tokens before them.

The numbers of position i are a function of the first i + 1 tokens, as keys and values are. So whatever a store gives
back for a prefix can be compared with `state_of(layout, prefix)`, byte for byte, without remembering anything.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvkeep.cache.layout import ELEMENT_TYPES, EXT_BYTES, Bytes, Layout, Role, Section
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.cache.prefix_cache import Identity
from kvkeep.cache.state import Form, blank
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
    words = _prefix_words(tokens)
    for number, (section, array) in enumerate(zip(layout.sections, state.caches[0].arrays, strict=True)):
        rows = _numbers(words + np.uint64(number), -(-section.token_bytes // 2)).view(np.uint8)[:, : section.token_bytes]
        array[...] = rows.reshape(len(tokens), section.outer, section.inner).transpose(1, 0, 2)
    return buffer


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


def random_tokens(count: int, seed: int = 0, n_vocab: int = 32_000) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, n_vocab, count)]
