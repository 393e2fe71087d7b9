"""`LlamaState`s that are made only as far as somebody looks at them, and some that stock code must not get as they are."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import LlamaState

from kvkeep.cache.adapters.session import Session
from kvkeep.cache.layout import Bytes
from kvkeep.cache.match import Match
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.cache.state import Form, empty
from kvkeep.store.errors import KvkeepError
from kvkeep.store.hashing import Fingerprint

# How long somebody who asks for a state waits for what it lacks to be stored.
COMPLETE_SECONDS = 10.0


class StoredState(LlamaState):
    """A `LlamaState` that is read from the store when something looks at more than its tokens.

    `Llama.load_state` reads `n_tokens` before it changes anything; whatever can fail happens there, as a KeyError.
    `input_ids` is as long as the model's n_ctx, -1 beyond the state's end; `scores` is zeros of shape (1, n_vocab),
    because logits are never stored; `seed` is the model's own, so that restored chats don't all sample alike.
    """

    def __init__(self, llm: Any, cache: PrefixCache, match: Match, tokens: npt.NDArray[np.int32]) -> None:
        self._cache = cache
        self._match = match
        self._tokens = tokens
        self._arch = str(llm.metadata.get("general.architecture", ""))
        self._n_vocab = llm.n_vocab()
        self._state: bytes | None = None
        self.seed = llm._seed
        self.input_ids: npt.NDArray[np.int32] = np.full(llm.input_ids.shape, -1, np.int32)
        self.input_ids[: len(tokens)] = tokens

    @property
    def fingerprint(self) -> Fingerprint:
        """Whose state it is."""
        return self._cache.identity.fingerprint

    def _assembled(self) -> bytes:
        if self._match.is_opaque:
            raise KeyError(
                "the state of this model's memory is kept in the sequence form only; load_state wants the whole form"
            )
        if self._state is None:
            self._refuse_hole()
            try:
                restored = self._cache.restore(self._match, self._tokens, form=Form.WHOLE, arch=self._arch)
            except KvkeepError as error:
                raise KeyError(f"the stored state can't be read: {error}") from error
            if restored.length != len(self._tokens):
                raise KeyError(f"the stored state is damaged: {restored.detail}")
            self._state = restored.state.tobytes()
        return self._state

    @property
    def n_tokens(self) -> int:  # type: ignore[override]  # an attribute there
        self._assembled()
        return len(self._tokens)

    @property
    def scores(self) -> npt.NDArray[np.float32]:  # type: ignore[override]  # an attribute there
        return np.zeros((1, self._n_vocab), np.float32)

    @property
    def llama_state(self) -> bytes:  # type: ignore[override]  # an attribute there
        return self._assembled()

    @property
    def llama_state_size(self) -> int:  # type: ignore[override]  # an attribute there
        return len(self._assembled())

    def _refuse_hole(self) -> None:
        """Stock code cuts a window that llama.cpp keeps whole anywhere, so none may be missing."""
        window = self._cache.identity.memory.window
        if window is not None and window.full and not self._match.has_whole_window:
            raise KeyError("only the last positions of the window are stored; load_state wants all of them")


class PresentState(LlamaState):
    """What a model holds now, copied only when something looks at more than its tokens.

    For a cache that has a copy of its own already: `Llama.save_state` copies three times, and adds as many zeros again.

    Args:
        llm: the model; its context must stay where it is until the state is looked at.
        save: `Llama.save_state` of the model.
    """

    def __init__(self, llm: Any, save: Callable[[], LlamaState]) -> None:
        self.input_ids: npt.NDArray[np.int32] = llm.input_ids.copy()
        self.n_tokens = llm.n_tokens
        self.seed = llm._seed
        self._save = save

    @cached_property
    def _copied(self) -> LlamaState:
        return self._save()

    @property
    def scores(self) -> npt.NDArray[np.float32]:  # type: ignore[override]  # an attribute there
        found: npt.NDArray[np.float32] = self._copied.scores
        return found

    @property
    def llama_state(self) -> bytes:  # type: ignore[override]  # an attribute there
        return bytes(self._copied.llama_state)

    @property
    def llama_state_size(self) -> int:  # type: ignore[override]  # an attribute there
        return int(self._copied.llama_state_size)


def are_filled(scores: npt.NDArray[np.single], n_tokens: int) -> bool:
    """Whether scores are the logits of all tokens, as with logits_all.

    Else `Llama` has never filled them: they are zeros, or whatever that memory held before, and twice as large as the state.
    Logits are numbers everywhere, and hardly ever exactly 0.
    """
    if scores.ndim != 2 or len(scores) != n_tokens or not scores.size:
        return False
    return int(np.count_nonzero(scores)) > 0.99 * scores.size and bool(np.isfinite(scores).all())


def whole_state(llm: Any, session: Session) -> LlamaState:
    """What a model holds, for stock code, where its window lacks positions that llama.cpp would have kept.

    They are taken from the store. If it doesn't have them all, the state is that of an empty context: nothing is wrong then,
    and all of it is decoded.
    """
    arch = str(llm.metadata.get("general.architecture", ""))
    state = _completed(llm, session, arch)
    n_tokens = 0 if state is None else llm.n_tokens
    data = (empty(arch, 2) if state is None else state).tobytes()
    ids = np.full(llm.input_ids.shape, -1, np.int32)
    ids[:n_tokens] = llm.input_ids[:n_tokens]
    return LlamaState(ids, np.zeros((1, llm.n_vocab()), np.float32), n_tokens, data, len(data), llm._seed)


def _completed(llm: Any, session: Session, arch: str) -> Bytes | None:
    """The whole form of what the context holds, from the store, or None if that doesn't have all of it."""
    state: Bytes | None = None
    with session.reporter.border("completing a state"):
        session.flush(COMPLETE_SECONDS)
        tokens, cache = session.public_tokens(), session.cache
        if cache is not None and len(tokens) == llm.n_tokens:
            match = cache.match(tokens, form=Form.WHOLE)
            if match.length == len(tokens) and match.has_whole_window:
                restored = cache.restore(match, tokens, form=Form.WHOLE, arch=arch)
                state = restored.state if restored.length == len(tokens) else None
    if state is None:
        session.reporter.once("incomplete", "a state is handed out empty: only the end of its window is there")
    return state
