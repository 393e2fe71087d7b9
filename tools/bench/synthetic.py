"""States of a model that doesn't exist, with numbers that compress as keys and values do."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkeep.cache.layout import Bytes, Layout, Role, Section
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.cache.prefix_cache import Identity
from kvkeep.cache.state import blank
from kvkeep.store.hashing import Fingerprint, digest_fields

_F16, _F16_BYTES = 1, 2
# Longer than any block's numbers are, so that no block repeats itself.
_POOL_NUMBERS = 1 << 25
# A smaller one has so many times the numbers of the state, so that two layers hardly ever begin near each other.
_ROOM = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of a model.

    Attributes:
        layers: how many.
        heads: of keys and values.
        head_dim: numbers of a head, f16.
    """

    layers: int
    heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.heads * self.head_dim * _F16_BYTES

    @property
    def layout(self) -> Layout:
        """Values as rows, as with flash attention."""
        row = self.heads * self.head_dim * _F16_BYTES
        keys = [Section(Role.KEY, _F16, 1, row)] * self.layers
        values = [Section(Role.VALUE_ROWS, _F16, 1, row)] * self.layers
        return Layout(False, self.layers, False, (*keys, *values))


def identity(name: str) -> Identity:
    """Whose states they are."""
    fingerprint = Fingerprint(digest_fields("kvkeep bench: a made-up model", [("name", name)]))
    memory = Memory(MemoryKind.ATTENTION, v_trans=False, ext=False)
    return Identity(fingerprint, name, {"name": name}, memory)


def tokens(count: int, seed: int) -> npt.NDArray[np.int32]:
    """A prompt, int32; each seed gives another one."""
    return np.random.default_rng(seed).integers(0, 32_000, count).astype(np.int32)


def state(shape: Shape, n_tokens: int, seed: int) -> Bytes:
    """A sequence state, uint8. Its numbers are normally distributed: the high bytes are much alike, the low ones noise."""
    buffer, made = blank([shape.layout], n_tokens)
    draw = np.random.default_rng(seed)
    # One pool for all, begun at another place for each layer: 4 GiB of numbers would take a minute to draw.
    wanted = min(_POOL_NUMBERS, _ROOM * n_tokens * shape.token_bytes // _F16_BYTES)
    pool = draw.standard_normal(wanted, np.float32).astype("<f2").view(np.uint8)
    for array in made.caches[0].arrays:
        flat = array.reshape(-1)
        start = int(draw.integers(0, pool.size // _F16_BYTES)) * _F16_BYTES
        flat[:] = np.resize(np.roll(pool, -start), flat.size) if pool.size < flat.size else _run(pool, start, flat.size)
    return buffer


def _run(pool: Bytes, start: int, size: int) -> Bytes:
    """`size` bytes of the pool from `start` on, which goes on at its beginning."""
    head = pool[start : start + size]
    return head if head.size == size else np.concatenate([head, pool[: size - head.size]])


def empty_state(n_tokens: int) -> Bytes:
    """The smallest state of so many tokens: one layer, one number."""
    return blank([Shape(1, 1, 4).layout], n_tokens)[0]
