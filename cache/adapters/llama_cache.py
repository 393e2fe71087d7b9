"""`PersistentLlamaCache`: the plain `BaseLlamaCache` interface, for code that only knows `set_cache`."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
from llama_cpp import LlamaState

from kvkeep.cache.adapters.attach import Attachment, session_options
from kvkeep.cache.adapters.backing import Wishes
from kvkeep.cache.adapters.base_cache import BaseLlamaCache, asking_llama
from kvkeep.cache.adapters.states import PresentState, StoredState
from kvkeep.cache.match import Match
from kvkeep.cache.state import Form
from kvkeep.store.space import DEFAULT_CAPACITY


class PersistentLlamaCache(Attachment, BaseLlamaCache):
    """A `BaseLlamaCache` on a kvkeep store, bound to one model.

        llm.set_cache(PersistentLlamaCache.for_model(llm))

    `Llama` asks `cache[prompt]` before each prompt: that restores straight into the model's context and returns an item
    that the context needn't load any more. After each finished answer it calls `cache[tokens] = llm.save_state()`; by then
    the cache has its own copy, so that state is copied only if somebody looks at more than its tokens. `attach` does the same
    also for prompts that are no completions, such as `llm.generate`.

    Bound to its model: never give it to another one's `set_cache`. There is no `__len__`: `Llama` never uses a cache that
    is falsy, as an empty one would be.
    """

    def __init__(self, llm: Any, options: dict[str, Any]) -> None:
        BaseLlamaCache.__init__(self, options["wishes"].capacity_bytes)
        self._asked: list[int] | None = None
        self._was_set = False
        self._off: ExitStack | None = None
        """Open for as long as the model has another cache, or none, after it had this one."""
        Attachment.__init__(self, llm, options)

    @classmethod
    def for_model(
        cls,
        llm: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        capacity_bytes: int = DEFAULT_CAPACITY,
        reserve_bytes: int | None = None,
        lifetime: timedelta | None = None,
        daily_bytes: int | None = None,
        break_even: bool = True,
        identity: str = "",
    ) -> "PersistentLlamaCache":
        """A cache for this model. The arguments are those of `attach`.

        Raises:
            UsageError: an argument is wrong.
        """
        wishes = Wishes(capacity_bytes, reserve_bytes, lifetime, daily_bytes)
        return cls(llm, session_options(llm, path, wishes, break_even, identity))

    @property
    def cache_size(self) -> int:
        """Bytes that the folder's blobs take, of all models together."""
        repository = self._session.repository
        return 0 if repository is None else repository.blobs.used_bytes

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Restore the longest stored beginning of `key` into the model's context.

        Returns:
            The state of those tokens, at most all but the last one of `key`: one must be decoded for its logits. It is
            assembled only if something looks at more than its tokens.

        Raises:
            KeyError: nothing of it is stored, it couldn't be restored, decoding is quicker, or the model has logits_all. The
                text says which.
        """
        if not self.is_active:
            raise KeyError("the cache is closed")
        llm = self._model()
        tokens = list(key)
        if not tokens:
            raise KeyError("nothing is stored for an empty key")
        self._streams.leave(llm)
        match = self._session.settle(llm, tokens, handed_over=self._handed_over)
        self._asked = tokens
        cache = self._session.cache
        if cache is None:
            raise KeyError(str(match))
        if llm._logits_all:
            # Loaded by hand, it would wipe the logits of what the context holds.
            raise KeyError("logits of all tokens are wanted, and a stored state has none")
        # No longer than what the context holds now, or Llama would load it over that.
        stored = self.stored(tokens[: match.length])
        if stored is None:
            raise KeyError(str(match))
        return StoredState(llm, cache, stored, np.asarray(tokens[: stored.length], np.int32))

    def stored(self, key: Sequence[int]) -> Match | None:
        """What is stored of a key's beginning, for use with `load_state`; None if nothing, or once the cache is closed."""
        cache = self._session.cache
        found: Match | None = None
        if cache is not None and self.is_active:
            with self._session.reporter.border("looking up a prompt"):
                match = cache.match(list(key), form=Form.WHOLE)
                found = match if match.length else None
        return found

    def _find_longest_prefix_key(self, key: tuple[int, ...]) -> tuple[int, ...] | None:
        found = self.stored(key)
        return None if found is None else tuple(key[: found.length])

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether at least one token of the key's beginning is stored. False once the cache is closed."""
        return self.stored(key) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Keep the model's context, if it is what `value` says it is.

        `key` isn't looked at: `Llama` passes prompt and answer, which can be a token longer than the state. Only the
        live context is known to hold what its tokens say, so a state of something else is not kept, and counted.
        """
        if not self.is_active:
            return
        llm = self._model()
        tokens = np.asarray(value.input_ids)[: value.n_tokens]
        if not np.array_equal(tokens, llm.input_ids[: llm.n_tokens]):
            self._session.reporter.once("other state", "a state that isn't the model's present one is not kept")
            return
        self._session.keep(llm)

    def detach(self) -> None:
        """Leave the model as it was before, without this cache. What waits is still stored."""
        super().detach()
        llm = self._llm_ref()
        if llm is not None and llm.cache is self:
            llm.set_cache(None)

    def _is_wanted(self, llm: Any) -> bool:
        is_set = llm.cache is self
        if is_set and self._off is not None:
            self._off.close()
            self._off = None
            # Nobody has looked at what was decoded meanwhile.
            self._session.was_reset()
        self._was_set |= is_set
        return is_set or not self._was_set

    def _let_be(self, llm: Any) -> None:
        # Not closed: it may be set again.
        if self._off is None:
            self._off = ExitStack()
            self._off.enter_context(self._session.no_store(llm))

    def _settle(self, llm: Any, prompt: list[int]) -> None:
        # Llama has just asked for this prompt, and nothing was decoded since.
        asked, self._asked = self._asked, None
        if prompt != asked:
            super()._settle(llm, prompt)

    def _decode(self, llm: Any, tokens: Sequence[int]) -> None:
        self._asked = None
        super()._decode(llm, tokens)

    def _reset(self, llm: Any) -> None:
        self._asked = None
        super()._reset(llm)

    def _move(self, name: str, context: Any, *args: Any, **kwargs: Any) -> None:
        self._asked = None
        super()._move(name, context, *args, **kwargs)

    def _clear(self, context: Any) -> None:
        self._asked = None
        super()._clear(context)

    def _remove(self, context: Any, seq_id: int, p0: int, p1: int) -> bool:
        self._asked = None
        return super()._remove(context, seq_id, p0, p1)

    def _save_state(self, llm: Any) -> LlamaState:
        # For this cache, which looks at the tokens only.
        if asking_llama(self._as_seen()) is llm:
            return PresentState(llm, partial(super()._save_state, llm))
        return super()._save_state(llm)

    def _as_seen(self) -> BaseLlamaCache | None:
        """The cache that the model knows."""
        return self

    def _load_state(self, llm: Any, state: LlamaState) -> None:
        self._asked = None
        cache = self._session.cache
        ours = isinstance(state, StoredState) and cache is not None and state.fingerprint == cache.identity.fingerprint
        with self._session.loading(llm, proven=ours):
            self._wrapping.original(llm, "load_state")(state)
