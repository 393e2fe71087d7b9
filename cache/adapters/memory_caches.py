"""`LlamaRAMCache` and `LlamaTrieCache`: llama-cpp-python's caches in memory, by name and by behaviour.

What is different, and why, is in `tests/adapters/test_stock_classes.py`, line by line.
"""

import threading
from abc import abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import LlamaState

from kvkeep.cache.adapters.base_cache import STOCK_CAPACITY, BaseLlamaCache, asking_llama, key_tokens, may_hold_images
from kvkeep.cache.adapters.identity import shape_of
from kvkeep.cache.adapters.states import are_filled
from kvkeep.cache.token_tree import Tokens, TokenTree
from kvkeep.store.errors import UsageError


class _Kept:
    """A state that nobody else can change.

    Args:
        key: the tokens that it is found by.
        value: what was handed over; nothing of it is kept but bytes that can't change.
        model: in whose completion it was handed over; None if it was put in by hand.

    Raises:
        UsageError: it says that it has more tokens than it names.
    """

    __slots__ = ("_ids_size", "_n_vocab", "_scores", "_seed", "_state", "_tokens", "key", "model")

    def __init__(self, key: Tokens, value: LlamaState, model: "_Model | None") -> None:
        ids = np.asarray(value.input_ids)
        if not 0 <= value.n_tokens <= ids.size:
            raise UsageError(f"a LlamaState of {value.n_tokens} tokens must name that many in input_ids, and names {ids.size}")
        self.key = key
        self.model = model
        self._tokens = ids[: value.n_tokens].copy()
        self._ids_size = ids.size
        scores = np.asarray(value.scores)
        self._n_vocab = scores.shape[-1] if scores.ndim else 0
        self._scores: npt.NDArray[np.single] | None = scores.copy() if are_filled(scores, value.n_tokens) else None
        self._state = bytes(value.llama_state)[: value.llama_state_size]
        self._seed = value.seed

    @property
    def has_logits(self) -> bool:
        """Whether the logits of all its tokens are there."""
        return self._scores is not None

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


class _Model(NamedTuple):
    """A model that asks for a state, or hands one over.

    Attributes:
        shape: see `shape_of`.
        n_ctx: a state of a longer context may not fit.
        logits_all: a state without the logits of all tokens is none for it.
    """

    shape: Hashable
    n_ctx: int
    logits_all: bool


class _MemoryCache(BaseLlamaCache):
    """States in memory, the least recently used ones first to go. Safe to use from several threads."""

    def __init__(self, capacity_bytes: int, verbose: bool) -> None:
        super().__init__(capacity_bytes)
        self.verbose = verbose
        self._fill([])

    def _fill(self, entries: Sequence[_Kept]) -> None:
        """Hold these and nothing else; the most recently used one is the last."""
        self._lock = threading.Lock()
        self._trees: defaultdict[Hashable, TokenTree[_Kept]] = defaultdict(TokenTree)
        for kept in entries:
            self._trees[kept.model].put(kept.key, kept)
        self._by_use: OrderedDict[_Kept, None] = OrderedDict.fromkeys(entries)
        self._bytes = sum(kept.n_bytes for kept in entries)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: the entries, but neither the tree nor the lock, which belong to one cache."""
        with self._lock:
            return {"capacity_bytes": self.capacity_bytes, "verbose": self.verbose, "entries": list(self._by_use)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.capacity_bytes, self.verbose = state["capacity_bytes"], state["verbose"]
        self._fill(state["entries"])

    def _find(self, key: Tokens, asking: "_Model | None") -> _Kept | None:
        """The entry that this key reads: in a completion one of the same model or one that was put in by hand."""
        wanted = list(self._trees) if asking is None else [tree for tree in (asking, None) if tree in self._trees]
        found = [self._found(self._trees[tree], key) for tree in wanted]
        if asking is not None and asking.logits_all:
            found = [(length, kept) for length, kept in found if kept is not None and kept.has_logits]
        return max(found, key=lambda match: match[0], default=(-1, None))[1]

    @staticmethod
    @abstractmethod
    def _found(tree: TokenTree[_Kept], key: Tokens) -> tuple[int, _Kept | None]:
        """The entry of one tree that a key reads, behind the number of tokens that it serves; -1 if there is none."""

    @property
    def cache_size(self) -> int:
        """Bytes of everything that is kept: states, their tokens and keys, and scores where they hold something. O(1)."""
        return self._bytes

    def _find_longest_prefix_key(self, key: tuple[int, ...]) -> tuple[int, ...] | None:
        with self._lock:
            found = self._find(key_tokens(key), self._asking())
        return None if found is None else tuple(found.key.tolist())

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """The state that this key finds; it becomes the most recently used one.

        Raises:
            KeyError: there is none. In a completion those of other models don't count.
        """
        asking = self._asking()
        with self._lock:
            found = self._find(key_tokens(key), asking)
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

        One that is larger than everything that may be kept isn't, and drives nobody out. Nor is one that may hold an image: its
        tokens don't show that, and `Llama` never needs it, because chat handlers that see decode everything by themselves.
        """
        if may_hold_images(self):
            self._say("%d tokens: not kept, there may be an image among them", len(key))
            return
        kept = _Kept(key_tokens(key), value, self._asking())
        with self._lock:
            before = self._trees[kept.model].remove(kept.key)
            if before is not None:
                self._forget(before)
            if kept.n_bytes > self.capacity_bytes:
                self._say("a state of %d bytes is more than the %d that may be kept", kept.n_bytes, self.capacity_bytes)
                return
            self._trees[kept.model].put(kept.key, kept)
            self._by_use[kept] = None
            self._bytes += kept.n_bytes
            while self._bytes > self.capacity_bytes:
                oldest = next(iter(self._by_use))
                self._trees[oldest.model].remove(oldest.key)
                self._forget(oldest)

    def _asking(self) -> "_Model | None":
        """The model in whose completion this is; None by hand."""
        llm = asking_llama(self)
        return None if llm is None else _Model(shape_of(llm), llm.n_ctx(), llm._logits_all)

    def _forget(self, kept: _Kept) -> None:
        del self._by_use[kept]
        self._bytes -= kept.n_bytes

    def _missing(self, key: Sequence[int]) -> str:
        return "Key not found"


class LlamaRAMCache(_MemoryCache):
    """States in memory, found by the longest beginning that a key has in common with theirs.

        llm.set_cache(LlamaRAMCache(capacity_bytes=4 << 30))

    Where several models share it, none gets a state that a completion of another has stored. One that was put in by hand goes
    to whoever asks: it doesn't say whose it is.

    Args:
        capacity_bytes: what all states together may take.
        verbose: log at the level INFO what is found.
    """

    def __init__(self, capacity_bytes: int = STOCK_CAPACITY, verbose: bool = False) -> None:
        super().__init__(capacity_bytes, verbose)

    @staticmethod
    def _found(tree: TokenTree[_Kept], key: Tokens) -> tuple[int, _Kept | None]:
        length, kept = tree.longest_common(key)
        return -1 if kept is None else length, kept


class LlamaTrieCache(_MemoryCache):
    """States in memory, found by the longest of their keys that the asked one begins with.

    For several models as `LlamaRAMCache` is.

    Args:
        capacity_bytes: what all states together may take.
    """

    def __init__(self, capacity_bytes: int = STOCK_CAPACITY) -> None:
        super().__init__(capacity_bytes, verbose=False)

    @staticmethod
    def _found(tree: TokenTree[_Kept], key: Tokens) -> tuple[int, _Kept | None]:
        kept = tree.longest_prefix(key)
        return -1 if kept is None else kept.key.size, kept

    def _missing(self, key: Sequence[int]) -> str:
        return f"Key {tuple(key)} not found"


LlamaCache = LlamaTrieCache
"""What code that wants just any cache imports."""
