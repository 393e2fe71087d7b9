"""`attach(llm)`: everything automatic, for any `Llama`, also one inside a framework."""

import inspect
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from llama_cpp import LlamaState

from kvkeep.cache.adapters.backing import Wishes
from kvkeep.cache.adapters.ending import Ending
from kvkeep.cache.adapters.identity import sees
from kvkeep.cache.adapters.session import Session
from kvkeep.cache.adapters.states import whole_state
from kvkeep.cache.adapters.streams import Streams
from kvkeep.cache.adapters.wrapping import Wrapping
from kvkeep.cache.match import Match, Reason
from kvkeep.cache.paths import resolve_root
from kvkeep.cache.prefix_cache import token_bytes
from kvkeep.cache.report import Report, Stats
from kvkeep.store.errors import KvkeepError, UsageError
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.space import DEFAULT_CAPACITY

# Tokens in front of an image that are worth a copy of their own.
WORTH_KEEPING = 64


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


class Attachment:
    """A session in front of a model's methods. What both ways in offer: look, flush, close; also in a `with` statement."""

    def __init__(self, llm: Any, options: dict[str, Any]) -> None:
        self._wrapping = Wrapping(
            llm,
            {
                "generate": self._generate,
                "eval": self._eval,
                "reset": self._reset,
                "load_state": self._load_state,
                "save_state": self._save_state,
            },
        )
        try:
            self._session = Session(llm, **options)
        except BaseException:
            self._wrapping.undo()
            raise
        methods: dict[str, Callable[..., Any]] = {
            "reset_timings": self._reset_timings,
            "kv_cache_clear": self._clear,
            "kv_cache_seq_rm": self._remove,
        }
        for name in ("kv_cache_seq_cp", "kv_cache_seq_keep", "kv_cache_seq_shift"):
            methods[name] = partial(self._move, name)
        self._context = Wrapping(llm._ctx, methods)
        self._llm_ref: Callable[[], Any] = weakref.ref(llm)
        self._signature = inspect.signature(type(llm).generate)
        self._streams = Streams()
        self._is_cut_off = False
        self._inside = False
        self._handed_over = False
        # A model that goes takes its cache with it; what waits is stored first.
        self._ending = Ending(llm, self._session.close)

    @property
    def is_active(self) -> bool:
        """Whether it stands in front of the model's methods: not after `close` or `detach`."""
        return self._wrapping.active

    def _is_wanted(self, llm: Any) -> bool:
        """Whether the model still uses this cache. Asked before each prompt and each token; if not, see `_let_be`."""
        return True

    def _let_be(self, llm: Any) -> None:
        """The model doesn't use this cache any more: nothing of what comes is kept."""
        self.close()

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
        """
        self.flush()
        removed = self._session.usable_cache().clear(model)
        self._session.was_cleared()
        return removed

    def _tokens_of(self, prompt: str | Sequence[int] | None) -> Sequence[int]:
        if prompt is None:
            return [int(token) for token in self._session.public_tokens()]
        if not isinstance(prompt, str):
            return [int(token) for token in np.frombuffer(token_bytes(prompt), "<i4")]
        return [int(token) for token in self._model().tokenize(prompt.encode(), special=True)]

    def _model(self) -> Any:
        llm = self._llm_ref()
        if llm is None:
            raise UsageError("the model that this cache was made for is gone")
        return llm

    def flush(self, timeout: float | None = None) -> bool:
        """Store everything now, but for what nothing would ever be restored of (`Stats.one_shot`). `warm` and `pin` do that.

        Returns:
            False if `timeout` seconds weren't enough.
        """
        return self._session.flush(timeout)

    def detach(self) -> None:
        """Leave the model as it was before. What waits is still stored."""
        self._wrapping.undo()
        self._context.undo()
        llm = self._llm_ref()
        if llm is not None and not self._inside:
            # A stream that is suspended has nothing to go on from then, and ends.
            self._is_cut_off |= self._session.leave(llm)

    def close(self) -> None:
        """Flush, detach, and give the folder back. Safe to call twice."""
        self._session.close()
        self._ending.cancel()
        self.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- in front of the model's methods --------------------------------------------------------------------------

    def _settle(self, llm: Any, prompt: list[int]) -> None:
        """Before a prompt is generated from."""
        self._session.settle(llm, prompt, handed_over=self._handed_over)

    def _generate(self, llm: Any, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        # Bound here and not in the generator, so that a wrong argument is an error of the call, as it is in Llama's own.
        if not self._is_wanted(llm):
            self._let_be(llm)
            self._session.leave(llm)
            stream: Generator[int, Any, None] = self._wrapping.original(llm, "generate")(tokens, *args, **kwargs)
            return stream
        bound = self._signature.bind(llm, tokens, *args, **kwargs)
        bound.apply_defaults()
        return self._generated(llm, tokens, bound.arguments["reset"], args, kwargs)

    def _generated(
        self, llm: Any, tokens: Sequence[int], reset: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Generator[int, Any, None]:
        prompt = list(tokens)
        number = self._streams.begin(llm)
        if reset and prompt:
            self._settle(llm, prompt)
        else:
            self._session.last = Match(length=0, prompt_tokens=len(prompt), reason=Reason.NO_RESET)
        self._handed_over = False
        stream = self._wrapping.original(llm, "generate")(prompt, *args, **kwargs)
        try:
            yield from self._driven(stream, llm, number)
        finally:
            self._streams.end(number)
            # A generator that is dropped and closed late must not save in the middle of the next one.
            if self._streams.is_newest(number):
                self._session.keep(llm)
                if not self.is_active:
                    self._session.leave(llm)

    def _driven(self, stream: Generator[int, Any, None], llm: Any, number: int) -> Generator[int, Any, None]:
        """`yield from stream`, knowing at any time whether control is inside of it.

        A stream may be suspended for good; what is evaluated meanwhile is not its doing. One that finds the context moved by
        others when it is gone on with has nothing to go on from, and ends.
        """
        answer: Any = None
        try:
            while True:
                self._inside = True
                try:
                    token = stream.send(answer)
                except StopIteration:
                    return
                finally:
                    self._inside = False
                answer = yield token
                if self.is_active and not self._is_wanted(llm):
                    self._let_be(llm)
                if self._is_cut_off or not self._streams.may_go_on(llm, number):
                    return
        finally:
            stream.close()

    def _eval(self, llm: Any, tokens: Sequence[int]) -> None:
        if not self._inside:
            self._streams.leave(llm)
            if not self._is_wanted(llm):
                self._let_be(llm)
                self._session.leave(llm)
                self._wrapping.original(llm, "eval")(tokens)
                return
            # Chat handlers clear the context and call eval themselves: that is a prompt too.
            if llm.n_tokens == 0 and len(tokens) > 1:
                self._handed_over = True
                self._begin(llm, tokens)
                return
            self._handed_over = True
        self._decode(llm, tokens)

    def _begin(self, llm: Any, prompt: Sequence[int]) -> None:
        """Decode the beginning of a prompt for a chat handler."""
        self._session.wait_for_kept(prompt)
        rest = prompt[self._session.settle(llm, prompt).length :]
        self._decode(llm, rest)
        if sees(llm) and len(rest) > WORTH_KEEPING:
            # An image may come behind it, and from then on nobody can tell what of the context is still text.
            self._session.keep(llm)

    def _decode(self, llm: Any, tokens: Sequence[int]) -> None:
        for piece in self._session.pieces(llm, tokens):
            with self._session.observe(llm, piece):
                self._wrapping.original(llm, "eval")(piece)

    def _reset(self, llm: Any) -> None:
        if not self._inside:
            # What a suspended stream has left would be gone.
            self._session.keep(llm)
            self._streams.leave(llm)
        self._session.was_reset()
        self._wrapping.original(llm, "reset")()

    def _reset_timings(self, context: Any) -> None:
        # With verbose=True, the default, Llama does this before each prompt.
        with self._session.resetting_timings():
            self._context.original(context, "reset_timings")()

    def _move(self, name: str, context: Any, *args: Any, **kwargs: Any) -> None:
        # A context shift by hand: the positions hold other tokens than those that were decoded there.
        self._session.was_reset()
        self._context.original(context, name)(*args, **kwargs)

    def _clear(self, context: Any) -> None:
        llm = self._llm_ref()
        if llm is not None:
            # As before a reset. `Llama.embed` clears first, and resets when it is done.
            self._session.keep(llm)
            self._streams.leave(llm)
            llm._requires_eval = True
        self._session.was_reset()
        self._context.original(context, "kv_cache_clear")()

    def _remove(self, context: Any, seq_id: int, p0: int, p1: int) -> bool:
        removed = bool(self._context.original(context, "kv_cache_seq_rm")(seq_id, p0, p1))
        if removed and seq_id <= 0:
            # What comes behind a hole doesn't follow on what is before it.
            self._session.was_cut(max(0, p0))
        return removed

    def _save_state(self, llm: Any) -> LlamaState:
        if self._session.lacks_positions(llm):
            return whole_state(llm, self._session)
        state: LlamaState = self._wrapping.original(llm, "save_state")()
        return state

    def _load_state(self, llm: Any, state: Any) -> None:
        self._streams.leave(llm)
        with self._session.loading(llm, proven=False):
            self._wrapping.original(llm, "load_state")(state)


class Attached(Attachment):
    """The handle that `attach` returns."""
