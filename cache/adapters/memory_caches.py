"""`LlamaRAMCache` and `LlamaTrieCache`: llama-cpp-python's caches in memory, by name and by behaviour.

What is different, and why, is in `tests/adapters/test_stock_classes.py`, line by line.
"""

import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import LlamaState

from kvkeep.cache.adapters.base_cache import STOCK_CAPACITY, BaseLlamaCache, key_tokens
from kvkeep.cache.token_tree import Tokens, TokenTree
from kvkeep.store.errors import UsageError


class _Kept:
    """A state that nobody else can change.

    Args:
        key: the tokens that it is found by.
        value: what was handed over; nothing of it is kept but bytes that can't change.

    Raises:
        UsageError: it says that it has more tokens than it names.
    """

    __slots__ = ("_ids_size", "_n_vocab", "_scores", "_seed", "_state", "_tokens", "key")

    def __init__(self, key: Tokens, value: LlamaState) -> None:
        ids = np.asarray(value.input_ids)
        if not 0 <= value.n_tokens <= ids.size:
            raise UsageError(f"a LlamaState of {value.n_tokens} tokens must name that many in input_ids, and names {ids.size}")
        self.key = key
        self._tokens = ids[: value.n_tokens].copy()
        self._ids_size = ids.size
        scores = np.asarray(value.scores)
        self._n_vocab = scores.shape[-1] if scores.ndim else 0
        self._scores: npt.NDArray[np.single] | None = scores.copy() if _are_filled(scores, value.n_tokens) else None
        self._state = bytes(value.llama_state)[: value.llama_state_size]
        self._seed = value.seed

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes in memory."""
        scores = 0 if self._scores is None else self._scores.nbytes
        return len(self._state) + scores + self._tokens.nbytes + self.key.nbytes

    def state(self) -> LlamaState:
        """A `LlamaState` for one use, with -1 where `input_ids` has no tokens: there may be stale ones there otherwise."""
        ids = np.full(self._ids_size, -1, self._tokens.dtype)
        ids[: self._tokens.size] = self._tokens
        # `load_state` spreads a single row over all tokens.
        scores = np.zeros((1, self._n_vocab), np.single) if self._scores is None else self._scores.view()
        scores.flags.writeable = False
        return LlamaState(ids, scores, self._tokens.size, self._state, len(self._state), self._seed)


def _are_filled(scores: npt.NDArray[np.single], n_tokens: int) -> bool:
    """Whether scores are the logits of all tokens, as with logits_all.

    Else `Llama` has never filled them: they are zeros, or whatever that memory held before, and twice as large as the state.
    """
    return scores.ndim == 2 and len(scores) == n_tokens and 2 * int(np.count_nonzero(scores)) > scores.size


class _MemoryCache(BaseLlamaCache):
    """States in memory, the least recently used ones first to go. Safe to use from several threads."""

    def __init__(self, capacity_bytes: int, verbose: bool) -> None:
        super().__init__(capacity_bytes)
        self.verbose = verbose
        self._fill([])

    def _fill(self, entries: Sequence[_Kept]) -> None:
        """Hold these and nothing else; the most recently used one is the last."""
        self._lock = threading.Lock()
        self._tree: TokenTree[_Kept] = TokenTree()
        for kept in entries:
            self._tree.put(kept.key, kept)
        self._by_use: OrderedDict[_Kept, None] = OrderedDict.fromkeys(entries)
        self._bytes = sum(kept.n_bytes for kept in entries)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: the entries, but neither the tree nor the lock, which belong to one cache."""
        with self._lock:
            return {"capacity_bytes": self.capacity_bytes, "verbose": self.verbose, "entries": list(self._by_use)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.capacity_bytes, self.verbose = state["capacity_bytes"], state["verbose"]
        self._fill(state["entries"])

    @abstractmethod
    def _find(self, key: Tokens) -> _Kept | None:
        """The entry that this key reads."""

    @property
    def cache_size(self) -> int:
        """Bytes of everything that is kept: states, their tokens and keys, and scores where they hold something. O(1)."""
        return self._bytes

    def _find_longest_prefix_key(self, key: tuple[int, ...]) -> tuple[int, ...] | None:
        with self._lock:
            found = self._find(key_tokens(key))
        return None if found is None else tuple(found.key.tolist())

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """The state that this key finds; it becomes the most recently used one.

        Raises:
            KeyError: there is none.
        """
        with self._lock:
            found = self._find(key_tokens(key))
            if found is None:
                self._say("%d tokens: nothing found", len(key))
                raise KeyError(self._missing(key))
            self._by_use.move_to_end(found)
        self._say("%d tokens: found a state of %d", len(key), found.key.size)
        return found.state()

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether reading this key finds something."""
        return self._find_longest_prefix_key(tuple(key)) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Keep a copy of a state, in place of one with the same key.

        One that is larger than everything that may be kept isn't, and drives nobody out.
        """
        kept = _Kept(key_tokens(key), value)
        with self._lock:
            before = self._tree.remove(kept.key)
            if before is not None:
                self._forget(before)
            if kept.n_bytes > self.capacity_bytes:
                self._say("a state of %d bytes is more than the %d that may be kept", kept.n_bytes, self.capacity_bytes)
                return
            self._tree.put(kept.key, kept)
            self._by_use[kept] = None
            self._bytes += kept.n_bytes
            while self._bytes > self.capacity_bytes:
                oldest = next(iter(self._by_use))
                self._tree.remove(oldest.key)
                self._forget(oldest)

    def _forget(self, kept: _Kept) -> None:
        del self._by_use[kept]
        self._bytes -= kept.n_bytes

    def _missing(self, key: Sequence[int]) -> str:
        return "Key not found"


class LlamaRAMCache(_MemoryCache):
    """States in memory, found by the longest beginning that a key has in common with theirs.

        llm.set_cache(LlamaRAMCache(capacity_bytes=4 << 30))

    For one model: a cache in memory can't tell whose state it is asked for.

    Args:
        capacity_bytes: what all states together may take.
        verbose: log at the level INFO what is found.
    """

    def __init__(self, capacity_bytes: int = STOCK_CAPACITY, verbose: bool = False) -> None:
        super().__init__(capacity_bytes, verbose)

    def _find(self, key: Tokens) -> _Kept | None:
        return self._tree.longest_common(key)[1]


class LlamaTrieCache(_MemoryCache):
    """States in memory, found by the longest of their keys that the asked one begins with.

    For one model, as `LlamaRAMCache`.

    Args:
        capacity_bytes: what all states together may take.
    """

    def __init__(self, capacity_bytes: int = STOCK_CAPACITY) -> None:
        super().__init__(capacity_bytes, verbose=False)

    def _find(self, key: Tokens) -> _Kept | None:
        return self._tree.longest_prefix(key)

    def _missing(self, key: Sequence[int]) -> str:
        return f"Key {tuple(key)} not found"


LlamaCache = LlamaTrieCache
"""What code that wants just any cache imports."""
