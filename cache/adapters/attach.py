"""`attach(llm)`: everything automatic, for any `Llama`, also one inside a framework."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.cache.adapters.backing import Wishes
from kvkeep.cache.adapters.interception import Interception
from kvkeep.cache.match import Match
from kvkeep.cache.paths import resolve_root
from kvkeep.cache.prefix_cache import token_bytes
from kvkeep.cache.report import Report, Stats
from kvkeep.store.errors import KvkeepError, UsageError
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.space import DEFAULT_CAPACITY


def attach(
    llm: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    capacity_bytes: int = DEFAULT_CAPACITY,
    reserve_bytes: int | None = None,
    lifetime: timedelta | None = None,
    daily_bytes: int | None = None,
    break_even: bool = True,
    identity: str = "",
) -> "Attached":
    """Keep the states of a model on disk, and restore them before prompts that begin as something kept.

    Args:
        llm: a `llama_cpp.Llama`. Use it from one thread at a time, as llama-cpp-python demands.
        path: the cache folder; by default `KVKEEP_PATH`, or the user's cache folder.
        capacity_bytes: byte budget of the folder, for all models together. At least 16 MiB. The folder remembers it, as it
            does the next three; the last one who names them wins. A smaller one holds from the next save on.
        reserve_bytes: free disk that is left to others; by default the smaller of 5 % of the disk and 10 GiB.
        lifetime: how long what nobody uses is kept; by default as long as there is room. `timedelta(0)` ends a limit.
        daily_bytes: how many bytes may be stored a day (UTC), for disks that wear out; by default as many as come, as with 0.
            What comes beyond is dropped and counted. The index and its log aren't.
        break_even: restore only where that is quicker than decoding. False restores whatever can be restored.
        identity: your own word for what changes the model's results and can't be seen from outside, such as adapters
            set through llama.cpp's C API. States are shared only under the same word.

    Returns:
        A handle. Keep it to look at what was reused; the cache works without it, and is flushed when the interpreter
        ends.

    Raises:
        UsageError: an argument is wrong. A folder that can't be used raises nothing: it is logged, and the model works
            without a cache.
    """
    wishes = Wishes(capacity_bytes, reserve_bytes, lifetime, daily_bytes)
    return Attached(llm, session_options(llm, path, wishes, break_even, identity))


def session_options(
    llm: Any, path: str | os.PathLike[str] | None, wishes: Wishes, break_even: bool, identity: str
) -> dict[str, Any]:
    """Checked arguments of a session, the same for both ways in."""
    if not hasattr(llm, "_ctx") or not hasattr(llm, "generate"):
        raise UsageError(f"llm is a llama_cpp.Llama, not {type(llm).__name__}")
    if not isinstance(break_even, bool):
        raise UsageError(f"break_even is True or False, not {break_even!r}")
    if not isinstance(identity, str):
        raise UsageError(f"identity is a text, not {identity!r}")
    root: Path = resolve_root(path)
    return {"path": root, "wishes": wishes.checked(), "break_even": break_even, "extra": identity}


class Attachment(Interception):
    """What both ways in offer: look, warm, pin, clear, flush."""

    @property
    def last(self) -> Match | None:
        """What the last request reused; None before the first."""
        return self._session.last

    @property
    def path(self) -> Path | None:
        """The cache folder, or None if it couldn't be opened or is closed."""
        repository = self._session.repository
        return None if repository is None else repository.path

    def stats(self) -> Stats:
        """Totals since the cache was attached. A copy."""
        return self._session.stats()

    def report(self) -> Report | None:
        """What became of the last request: what was reused and from where, what that took, and where the prompt parts from what
        was known. None before the first.

        Returns:
            As far as it is known now: `decode_seconds` grows until the prompt is decoded.
        """
        return self._session.report(self._llm_ref())

    @contextmanager
    def no_store(self) -> Iterator[None]:
        """Nothing that is decoded in a `with` block is ever stored, neither in it nor later.

        What was stored before may still be restored in it. Once the context goes back to where the block began, what
        follows is stored again.
        """
        llm = self._llm_ref()
        if llm is None:
            yield
            return
        with self._session.no_store(llm):
            yield

    def warm(self, prompt: str | Sequence[int], progress: Callable[[int], None] = lambda n_tokens: None) -> Match:
        """Have the context hold a prompt and the store keep it, without generating: for what every chat will begin with.

        Args:
            prompt: as in `pin`.
            progress: called with how many tokens have come in since the last call.

        Returns:
            What of it was there already.

        Raises:
            UsageError: it has no tokens, or more than the context; or the cache isn't usable; or nothing is stored now, because
                this is inside of a `no_store` block.
            KvkeepError: not all of it was stored; of the kind of what was in the way, such as a full disk.
        """
        tokens = self._tokens_of(prompt)
        llm = self._model()
        if not 0 < len(tokens) <= llm.n_ctx():
            raise UsageError(f"the prompt has {len(tokens)} tokens, the context has room for {llm.n_ctx()}")
        self._session.usable_cache()
        self._streams.leave(llm)
        self._session.begin_anew_unless_keepable(llm)
        match = self._session.settle(llm, tokens)
        self._session.want()
        progress(match.length)
        for start in range(llm.n_tokens, len(tokens), llm.n_batch):
            piece = tokens[start : start + llm.n_batch]
            self._decode(llm, piece)
            progress(len(piece))
        self._session.reporter.last_error = None
        # What couldn't be stored before may be stored now, as on another day.
        self._session.forget_kept()
        self.flush()
        stored = self._session.usable_cache().match(tokens).length
        if stored < len(tokens):
            cause = self._session.reporter.last_error
            kind = type(cause) if isinstance(cause, KvkeepError) else KvkeepError
            raise kind(f"of {len(tokens)} tokens only {stored} are stored: {cause or 'the log says why'}") from cause
        return match

    def pin(self, prompt: str | Sequence[int] | None = None) -> int:
        """Keep what is stored of a prompt's beginning, now and later, whatever the budget and its lifetime say.

        Args:
            prompt: tokens, or a text that is tokenized as `create_completion` does it; None is what the context holds,
                up to where `no_store` began.

        Returns:
            How many tokens are pinned.

        Raises:
            UsageError: it has no tokens, or the cache isn't usable; `kvkeep stats` or the log says why.
            TooLarge: all pins together would leave too little for everything else.
            StoreLocked: another process writes, and doesn't end in time.
        """
        tokens = self._tokens_of(prompt)
        self._session.want()
        self.flush()
        self._session.usable_cache().pin(tokens)
        return len(tokens)

    def key_of(self, prompt: str | Sequence[int] | None = None) -> PrefixHash:
        """The prefix hash of a prompt, by which `kvkeep` commands name it; see `pin` for the argument."""
        return self._session.usable_cache().key_of(self._tokens_of(prompt))

    def unpin(self, prompt: str | Sequence[int] | None = None) -> bool:
        """End the pin of exactly this prompt; see `pin`. False if it isn't pinned."""
        return self._session.usable_cache().unpin(self._tokens_of(prompt))

    def clear(self, model: str | None = None) -> int:
        """Remove everything that is stored of this model, pins included. Returns how many entries were removed.

        The disk gets the bytes back with `kvkeep compact`; until then they are used again for what comes.

        Args:
            model: the label of another one, or the beginning of its fingerprint, as `kvkeep stats` shows them.

        Raises:
            UsageError: there is no such model, or the cache isn't usable.
        """
        if not isinstance(model, str | None):
            raise UsageError(f"model is a label or the beginning of a fingerprint, not {model!r}")
        self.flush()
        removed = self._session.usable_cache().clear(model)
        self._session.was_cleared()
        return removed

    def _tokens_of(self, prompt: str | Sequence[int] | None) -> Sequence[int]:
        self._session.check_process()
        if prompt is None:
            return [int(token) for token in self._session.public_tokens()]
        llm = self._model()
        if isinstance(prompt, str):
            try:
                return [int(token) for token in llm.tokenize(prompt.encode(), special=True)]
            except UnicodeEncodeError as error:
                raise UsageError(f"the prompt is no text that can be written in UTF-8: {error}") from error
        tokens = [int(token) for token in np.frombuffer(token_bytes(prompt), "<i4")]
        if (wrong := next((token for token in tokens if not 0 <= token < llm.n_vocab()), None)) is not None:
            raise UsageError(f"{wrong} is no token of this model, which has those from 0 to {llm.n_vocab() - 1}")
        return tokens

    def _model(self) -> Any:
        llm = self._llm_ref()
        if llm is None:
            raise UsageError("the model that this cache was made for is gone")
        return llm

    def flush(self, timeout: float | None = None) -> bool:
        """Store everything now, but for what nothing would ever be restored of (`Stats.one_shot`). `warm` and `pin` do that.

        Returns:
            False if `timeout` seconds weren't enough.

        Raises:
            UsageError: `timeout` is no number of seconds.
        """
        if timeout is not None and not (isinstance(timeout, int | float) and 0 <= timeout <= threading.TIMEOUT_MAX):
            raise UsageError(f"timeout is a number of seconds, from 0 on, or None for as long as it takes, not {timeout!r}")
        return self._session.flush(timeout)


class Attached(Attachment):
    """The handle that `attach` returns."""
