"""`LlamaDiskCache`: llama-cpp-python's disk cache by name and constructor, on a kvkeep store."""

import os
import random
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from llama_cpp import LlamaState

from kvkeep.cache.adapters.attach import session_options
from kvkeep.cache.adapters.backing import Wishes
from kvkeep.cache.adapters.base_cache import STOCK_CAPACITY, BaseLlamaCache, asking_llama
from kvkeep.cache.adapters.by_hand import Found, StatesByHand
from kvkeep.cache.adapters.ending import Ending, wait_for_the_gone
from kvkeep.cache.adapters.llama_cache import PersistentLlamaCache
from kvkeep.cache.match import Match
from kvkeep.cache.paths import resolve_root
from kvkeep.cache.report import Reporter
from kvkeep.store.errors import DailyLimit, LayoutError, UsageError
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.space import DEFAULT_CAPACITY, DefaultCapacity, valid_capacity

_DEFAULT = DefaultCapacity(STOCK_CAPACITY)
# What a stock folder has.
_STOCK_FILE = "cache.db"
# How long a prompt waits for states that are about to be stored.
FLUSH_SECONDS = 10.0


class LlamaDiskCache(BaseLlamaCache):
    """A disk cache for any `Llama` that is given it, with nothing but the import changed.

        llm.set_cache(LlamaDiskCache("/home/me/.cache/chat"))

    A `Llama` that asks during a completion is recognised, and from then on served as by `PersistentLlamaCache.for_model`: by
    the content of its model, its adapters and its settings, for every kind of memory. So several models may share a folder, and
    none ever gets another one's state.

    A chat handler for images decodes before it asks, so the first chat that a model has with this cache is left as it is,
    neither restored nor stored. Where each program has one chat only, use `for_model`.

    **States put in or taken out by hand** (`cache[tokens] = llm.save_state()`, `llm.load_state(cache[tokens])`) come without
    their model. They are kept apart by what a state says itself: architecture, layers, types and sizes, vocabulary, n_ctx, and
    the version of llama-cpp-python. That can't tell a model from its fine-tune, nor see adapters, rope settings, `swa_full` or
    images. Two models that look alike never mix in one state: where the same tokens have other keys, the last one who stores
    them wins. Of models with a sliding window only states with the whole window are kept (`swa_full`, the default). Where that
    isn't enough, use `for_model`.

    What is stored is found by its own tokens, `state.input_ids[:state.n_tokens]`; the key that it is stored under isn't looked
    at. Storing during a completion happens behind the caller's back: `flush` waits for it, and so does the end of the program.

    Args:
        cache_dir: the folder. What llama-cpp-python's own cache has put there before stays as it is; `kvkeep import` reads it.
        capacity_bytes: byte budget of the folder. If it isn't given, and the folder remembers one, that holds.
        verbose: log at the level INFO what is found.

    Raises:
        UsageError: an argument is wrong. A folder that can't be used raises nothing: it is logged, and nothing is ever found.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] = ".cache/llama_cache",
        capacity_bytes: int = _DEFAULT,
        verbose: bool = False,
    ) -> None:
        is_default = isinstance(capacity_bytes, DefaultCapacity)
        super().__init__(STOCK_CAPACITY if is_default else valid_capacity(capacity_bytes))
        self.verbose = verbose
        self._path = resolve_root(cache_dir)
        self._reporter = Reporter()
        self._repository: Repository | None = None
        self._is_closed = False
        with self._reporter.border("opening the cache folder"):
            self._open(None if is_default else self.capacity_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what comes out of a pickle, is another cache on the same folder."""
        return type(self), (str(self._path), self.capacity_bytes, self.verbose)

    @staticmethod
    def for_model(
        llm: Any, cache_dir: str | os.PathLike[str] = ".cache/llama_cache", capacity_bytes: int = DEFAULT_CAPACITY
    ) -> PersistentLlamaCache:
        """The full way: a cache for one model, which restores straight into its context. See `PersistentLlamaCache`."""
        return PersistentLlamaCache.for_model(llm, cache_dir, capacity_bytes=capacity_bytes)

    def _open(self, wanted: int | None) -> None:
        # A cache that was dropped a moment ago should have stored everything.
        wait_for_the_gone()
        self._repository = repository = open_root(self._path, wanted)
        self._by_hand = StatesByHand(repository)
        self._ending = Ending(self, partial(close_root, repository))
        if wanted is None and not repository.remembers_capacity:
            repository.agree_on_capacity(STOCK_CAPACITY)
        if (self._path / _STOCK_FILE).exists():
            self._reporter.once(
                "stock folder",
                "%s also holds states of llama-cpp-python's own cache: kvkeep import %s --path %s --model FILE takes them "
                "over; then cache.db and the numbered folders can go",
                *[self._path] * 3,
            )

    @property
    def cache_size(self) -> int:
        """Bytes that the folder's blobs take, of all models together. O(1)."""
        return 0 if self._repository is None else self._repository.blobs.used_bytes

    def _find_longest_prefix_key(self, key: tuple[int, ...]) -> tuple[int, ...] | None:
        found = self._stored(key)
        return None if found is None else tuple(key[: found.length])

    def _stored(self, key: Sequence[int]) -> Match | None:
        if (bound := self._bound_to(asking_llama(self))) is not None:
            return bound.stored(key)
        by_hand = self._found_by_hand(key)
        return None if by_hand is None else by_hand.match

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """The longest stored beginning of a key, for the model that asks; by hand, of the one state that can be meant.

        Raises:
            KeyError: there is none.
        """
        tokens = list(key)
        llm = asking_llama(self)
        if llm is not None:
            if (bound := self._bound_to(llm)) is None:
                raise KeyError("the model can't be served")
            try:
                return bound[tokens]
            finally:
                self._say("%s", bound.last)
        found = self._found_by_hand(tokens)
        state: LlamaState | None = None
        if found is not None:
            with self._reporter.border("restoring a state"), suppress(KeyError):
                # Not the seed that it had: every restored chat would sample alike.
                state = self._by_hand.state(found, tokens, random.getrandbits(32))
        if state is None:
            self._say("%d tokens: nothing found", len(tokens))
            raise KeyError("Key not found" if self.cache_size else "Cache is empty")
        self._say("%d tokens: found a state of %d", len(tokens), state.n_tokens)
        return state

    def _found_by_hand(self, key: Sequence[int]) -> Found | None:
        found: Found | None = None
        if self._repository is not None and len(key):
            with self._reporter.border("looking up a prompt"):
                found = self._by_hand.find(list(key))
        return found

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether at least one token of the key's beginning is stored. By hand: of states that were stored by hand."""
        return self._find_longest_prefix_key(tuple(key)) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Store a state: behind the caller's back for a model in a completion, else before this returns."""
        llm = asking_llama(self)
        if llm is not None:
            if (bound := self._bound_to(llm)) is not None:
                bound[key] = value
            return
        if self._repository is None:
            return
        with self._reporter.border("storing a state"):
            try:
                self._by_hand.save(value)
            except LayoutError as error:
                self._reporter.once("unknown state", "a state is not kept: %s", error)
            except DailyLimit as error:
                self._reporter.dropped(str(error), error)

    # -- models -------------------------------------------------------------------------------------------------------

    def _bound_to(self, llm: Any | None) -> "_Bound | None":
        """The cache of a model that uses this one, or None if it can't have one."""
        if llm is None or self._is_closed:
            return None
        bound = _bound.get(llm)
        if bound is not None and (bound.owner is not self or not bound.is_active):
            bound.close()
            bound = None
        if bound is None:
            try:
                # What it has stored may be restored whatever that costs: whoever asks for this class gets what it does.
                wishes = Wishes(DEFAULT_CAPACITY)
                bound = _Bound(llm, session_options(llm, self._path, wishes, break_even=False, identity=""), self)
            except UsageError as error:
                self._reporter.once("attached", "%s", error)
                return None
            with _changing:
                _bound[llm] = bound
        return bound

    def flush(self, timeout: float | None = None) -> bool:
        """Store everything now. Returns False if `timeout` seconds, for each model, weren't enough."""
        done = [bound.flush(timeout) for bound in self._mine()]
        return all(done)

    def close(self) -> None:
        """Store everything, and give the folder back. Nothing is found any more. Safe to call twice."""
        self._is_closed = True
        for bound in self._mine():
            bound.close()
        repository, self._repository = self._repository, None
        if repository is not None:
            self._ending.cancel()
            close_root(repository)

    def _mine(self) -> "list[_Bound]":
        with _changing:
            return [bound for bound in _bound.values() if bound.owner is self]


class _Bound(PersistentLlamaCache):
    """What serves one model, for as long as that uses the disk cache."""

    def __init__(self, llm: Any, options: dict[str, Any], owner: LlamaDiskCache) -> None:
        self._owner = weakref.ref(owner)
        super().__init__(llm, options)
        # It comes to be when a completion asks. What the context holds then was maybe decoded for that very completion, by a
        # chat handler, with an image in it.
        self._handed_over = True

    @property
    def owner(self) -> LlamaDiskCache | None:
        return self._owner()

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """As there. What waits for the disk is waited for, if it may be what the prompt needs.

        The stock class has stored each answer before it returns; a prompt that leaves the present chat right behind it would
        find less here. One that goes on with it has all it needs in the context.
        """
        llm = self._model()
        if self._session.cache is not None and llm.longest_token_prefix(llm._input_ids.tolist(), list(key)) < llm.n_tokens:
            self.flush(FLUSH_SECONDS)
        return super().__getitem__(key)

    def _is_wanted(self, llm: Any) -> bool:
        return llm.cache is not None and llm.cache is self.owner

    def _let_be(self, llm: Any) -> None:
        # Its owner makes another one if it is set again.
        self.close()

    def _as_seen(self) -> BaseLlamaCache | None:
        return self.owner


# Weak both ways: a model takes its cache along, and none of the two keeps the other.
_bound: "weakref.WeakKeyDictionary[Any, _Bound]" = weakref.WeakKeyDictionary()
_changing = threading.Lock()
