"""In front of a model's methods: what is generated, decoded, reset, cut and loaded goes through a session."""

import inspect
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from llama_cpp import LlamaState

from kvkeep.cache.adapters.ending import Ending
from kvkeep.cache.adapters.identity import sees
from kvkeep.cache.adapters.session import Session
from kvkeep.cache.adapters.states import whole_state
from kvkeep.cache.adapters.streams import streams_of
from kvkeep.cache.adapters.wrapping import Wrapping
from kvkeep.cache.match import Match, Reason

# Tokens in front of an image that are worth a copy of their own.
WORTH_KEEPING = 64


class Interception:
    """A session in front of a model's methods, until it is closed; also in a `with` statement."""

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
        self._streams = streams_of(llm)
        self._is_cut_off = False
        # Taken away from inside of a stream, which still needs what the context holds.
        self._is_to_leave = False
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

    def detach(self) -> None:
        """Leave the model as it was before. What waits is still stored."""
        self._wrapping.undo()
        self._context.undo()
        llm = self._llm_ref()
        if self._inside:
            self._is_to_leave = True
        elif llm is not None:
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

    # -- the model's methods ----------------------------------------------------------------------------------------------

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
            # Somebody goes on with it, so it is worth keeping.
            self._session.want()
        self._handed_over = False
        stream = self._wrapping.original(llm, "generate")(prompt, *args, **kwargs)
        try:
            yield from self._driven(stream, llm, number)
        finally:
            self._streams.end(number)
            # A generator that is dropped and closed late must not save in the middle of the next one.
            if self._streams.is_newest(number):
                self._session.keep(llm)
            if self._is_to_leave:
                self._is_to_leave = False
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
                if self._is_cut_off:
                    return
                if not self._streams.may_go_on(llm, number):
                    self._session.reporter.once(
                        "stream", "a stream was gone on with after another prompt had taken the context, and has ended"
                    )
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
