"""The protocol between a live `Llama` and its prefix cache, shared by both ways in.

    settle     before a prompt is decoded: cut back, restore, or clear
    observe    around every `eval`: which positions hold which tokens
    keep       when a generation has ended, however it ended: copy the state once, hand it to the writer

No error passes this border: it is logged once, counted, and becomes a miss.
"""

import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.cache.adapters.backing import Backing, Wishes
from kvkeep.cache.adapters.keeping import Keeping
from kvkeep.cache.adapters.live import LiveSequence, Tokens
from kvkeep.cache.adapters.requests import Requests
from kvkeep.cache.adapters.schedule import Schedule
from kvkeep.cache.break_even import BreakEven
from kvkeep.cache.match import Match, Reason, Source
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.cache.report import Report, Reporter, Stats
from kvkeep.store.errors import KvkeepError, StateRefused, UsageError
from kvkeep.store.repository import Repository

# Said even when the context itself could give the tokens: the person may want to do something about it.
_WORTH_SAYING = {Reason.BELOW_BREAK_EVEN, Reason.DAMAGED, Reason.REFUSED, Reason.UNAVAILABLE}


class Session:
    """One `Llama` and one store.

    Args:
        llm: a `llama_cpp.Llama`; held weakly.
        path: the store's root.
        wishes: budget, reserve and lifetime of the root, as far as somebody asks for them.
        break_even: restore only where that is quicker than decoding.
        extra: part of the model's identity that can't be seen from outside.
    """

    def __init__(self, llm: Any, path: Path, wishes: Wishes, break_even: bool, extra: str) -> None:
        self._llm = weakref.ref(llm)
        self._pid = os.getpid()
        self._use_break_even = break_even
        self.reporter = Reporter()
        self.rates = BreakEven()
        self.last: Match | None = None
        self._requests = Requests()
        self._live = LiveSequence(llm)
        self._schedule = Schedule(self._live, self.rates, self.reporter)
        self._lock = threading.RLock()
        self._backing = Backing(
            self.reporter, self._live.context.memory, lambda error: self._keeping.failed(error), self._is_ready, self.stats
        )
        self._keeping = Keeping(self._live, self._backing, self._requests, self.rates, self.reporter)
        if self._live.context.has_memory:
            self._backing.open(llm, path, wishes, extra)
        else:
            self._backing.refuse("the model has no memory to keep: an embedding or diffusion model")

    @property
    def cache(self) -> PrefixCache | None:
        """The model's states, or None as long as it isn't known whose they are."""
        return self._backing.cache

    def usable_cache(self) -> PrefixCache:
        """The model's states, for somebody who asks by hand.

        Raises:
            UsageError: there is none, with the reason.
        """
        self._backing.settle_identity(give_up=False)
        if self._backing.unavailable or self.cache is None:
            why = self._backing.unavailable or "the model's file is still being hashed"
            raise UsageError(f"the cache can't be used: {why}")
        return self.cache

    @property
    def repository(self) -> Repository | None:
        """The open store, or None."""
        return self._backing.repository

    def _is_ready(self, cache: PrefixCache) -> None:
        with self.reporter.border("reading what was measured before"):
            if (space := cache.namespace) is not None:
                self.rates.prefill_rate = space.prefill_rate
                self.rates.restore_rate = space.restore_rate
                # SQLAlchemy compiles each statement at its first use: 3 ms that the first prompt needn't wait for.
                cache.match([0] * (space.block_tokens + 1))

    # -- settle ---------------------------------------------------------------------------------------------------

    def settle(self, llm: Any, prompt: Sequence[int], *, handed_over: bool = False) -> Match:
        """Make the context hold as much of the prompt as can be had, and say what that was.

        Afterwards the last token of the prompt is left to be decoded, unless the context stands exactly at its end with
        fresh logits.

        Args:
            llm: the model.
            prompt: the prompt's tokens.
            handed_over: the caller has decoded the context by itself and now asks for a completion of it, as chat
                handlers for images do; then the prompt shows stale numbers where the images are.
        """
        if not self._is_usable(llm):
            # Nothing but this: a forked child has the parent's locks as they were, maybe held by threads that it lacks.
            forked = self._pid != os.getpid()
            detail = "attached before a fork: attach again in this process" if forked else "the model is closed"
            self.last = Match(length=0, prompt_tokens=len(prompt), reason=Reason.UNAVAILABLE, detail=detail)
            return self.last
        began = time.perf_counter()
        with self._lock:
            before = self.last
            try:
                # A copy: it is looked at again when somebody asks for a report.
                match = self._settle(llm, np.array(prompt, np.int32), handed_over)
            except Exception as error:  # noqa: BLE001 - the border: whatever it is, the answer is the cold answer
                self.reporter.error("preparing a prompt", error)
                self._backing.look_after(error)
                with self.reporter.border("clearing the context"):
                    self._live.empty(llm, buffers=True)
                match = Match(length=0, prompt_tokens=len(prompt), reason=Reason.UNAVAILABLE, detail=str(error))
            self._keeping.prompt_came()
            self.last = match
            if match is not before:
                # Else it is that of the handler's own eval, which has been counted.
                self._requests.settled(match, time.perf_counter() - began)
                self.reporter.request(match)
            return match

    def _settle(self, llm: Any, prompt: Tokens, handed_over: bool) -> Match:
        self._live.refresh(llm)
        self._requests.begin(prompt, self._live.known_tokens().copy())
        n_tokens = len(prompt)
        at_its_end = n_tokens == llm.n_tokens and np.array_equal(llm.input_ids[:n_tokens], prompt)
        known = self._live.is_known(llm)
        if at_its_end and not llm._requires_eval and (known or handed_over):
            return self._decoded_before(n_tokens, known, handed_over)
        with self.reporter.border("saving"):
            # What a dropped stream has left: the next lines may cut it away.
            self._keeping.keep(llm)
        usable = self._live.usable_prefix(llm, prompt)
        match = self._from_store(llm, prompt, usable)
        if match.source is Source.DISK:
            self._live.take_point(llm, saved=True)
            return match
        # Looked at again: a refused state has emptied the context.
        usable = self._live.usable_prefix(llm, prompt)
        try:
            self._live.cut(llm, usable)
        except StateRefused as error:
            self.reporter.error("going back to a checkpoint", error)
            return self._from_store(llm, prompt, 0)
        if usable == 0:
            return match
        self._live.take_point(llm)
        reason = match.reason if match.reason in _WORTH_SAYING else Reason.FOUND
        return replace(match, length=usable, source=Source.LIVE, reason=reason)

    def _decoded_before(self, n_tokens: int, known: bool, handed_over: bool) -> Match:
        """The context stands at the prompt's end with fresh logits: nothing is to be decoded."""
        if not known:
            # It may hold an image. Leave it alone.
            return Match(length=n_tokens, prompt_tokens=n_tokens, source=Source.LIVE, reason=Reason.FOREIGN_POSITIONS)
        if handed_over and self.last is not None and self.last.prompt_tokens == n_tokens:
            # What the handler's own eval found is the better answer to what was reused.
            return self.last
        return Match(length=n_tokens, prompt_tokens=n_tokens, source=Source.LIVE)

    def _from_store(self, llm: Any, prompt: Tokens, usable: int) -> Match:
        """Restore what is stored if that is better than the `usable` tokens of the context; else the reason why not."""
        missed = Match(length=0, prompt_tokens=len(prompt), reason=Reason.UNAVAILABLE, detail=self._backing.unavailable)
        if llm._logits_all:
            return replace(missed, reason=Reason.LOGITS_ALL, detail="")
        if self._backing.unavailable:
            return missed
        if self.cache is None:
            return replace(missed, reason=Reason.IDENTIFYING)
        try:
            return self._look_up(llm, self.cache, prompt, usable)
        except KvkeepError as error:
            # The context wasn't touched yet: what it holds is still good.
            self.reporter.error("looking up a prompt", error)
            self._backing.look_after(error)
            return replace(missed, detail=str(error))

    def _look_up(self, llm: Any, cache: PrefixCache, prompt: Tokens, usable: int) -> Match:
        stored = cache.match(prompt, at_most=min(len(prompt) - 1, llm.n_ctx()))
        missed = Match(length=0, prompt_tokens=len(prompt), reason=Reason.LIVE_IS_BETTER)
        if stored.length == 0:
            return stored
        if stored.length <= usable:
            return missed
        gained = stored.length - usable
        if self._use_break_even and not self.rates.worth(gained, stored.plain_bytes):
            detail = self.rates.describe(gained, stored.plain_bytes)
            return replace(missed, reason=Reason.BELOW_BREAK_EVEN, detail=detail)
        return self._restore(llm, cache, prompt, stored, usable)

    def _restore(self, llm: Any, cache: PrefixCache, prompt: Tokens, stored: Match, usable: int) -> Match:
        began = time.perf_counter()
        missed = Match(length=0, prompt_tokens=len(prompt), reason=Reason.DAMAGED)
        restored = cache.restore(stored, prompt)
        self._requests.read(sum(entry.stored_bytes for entry in restored.used))
        if restored.damaged:
            self._keeping.again()
            self._backing.quarantine(cache, restored)
        if restored.length <= usable:
            return replace(missed, detail=restored.detail)
        try:
            self._live.load(llm, restored.state, prompt[: restored.length])
        except StateRefused as error:
            self.reporter.error("restoring a state", error)
            refused, why = restored.used, str(error)
            self._keeping.again()
            self._backing.later(lambda: self.reporter.quarantined(cache.remove(refused), why))
            return replace(missed, reason=Reason.REFUSED, detail=why)
        seconds = time.perf_counter() - began
        self.rates.restored(restored.state.nbytes, seconds)
        return replace(
            stored,
            length=restored.length,
            reason=Reason.DAMAGED if restored.damaged else Reason.FOUND,
            detail=restored.detail,
            seconds=seconds,
            state_bytes=restored.state.nbytes,
        )

    def report(self, llm: Any) -> Report | None:
        """What became of the last request; None before the first."""
        # Without the lock: that of a prompt is held for as long as it is decoded, and a forked child has it as it was.
        match = self.last
        if match is None or self._pid != os.getpid():
            return None if match is None else Report(match=match)
        model = llm if llm is not None and self._is_usable(llm) else None
        cache = None if model is None or self._backing.unavailable else self.cache
        try:
            return self._requests.report(match, model, cache)
        except KvkeepError as error:
            self.reporter.error("comparing a prompt", error)
            self._backing.look_after(error)
            return Report(match=match)

    def stats(self) -> Stats:
        """Totals since the beginning. A copy."""
        return self.reporter.snapshot(self.rates.decode_seconds)

    # -- observe --------------------------------------------------------------------------------------------------

    @contextmanager
    def observe(self, llm: Any, tokens: Sequence[int]) -> Iterator[None]:
        """Around every `eval`."""
        with self._lock, self._live.observed(llm, tokens) as outcome:
            yield
        decoded, seconds = outcome
        self.rates.prefilled(int(decoded), seconds)
        self._requests.decoded(int(decoded), seconds)

    def pieces(self, llm: Any, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """Cut a prompt where checkpoints are to be taken, and take one behind each piece that has been decoded."""
        start, taken = llm.n_tokens, 0
        with self._lock:
            positions = self._schedule.positions(llm, tokens)
        for at in positions:
            yield tokens[taken : at - start]
            taken = at - start
            if llm.n_tokens != at:
                # Somebody else has moved the context meanwhile; decode the rest as it comes.
                break
            with self._lock, self.reporter.border("taking a checkpoint"):
                self._live.take_point(llm)
        yield tokens[taken:]

    @contextmanager
    def resetting_timings(self) -> Iterator[None]:
        """Around a reset of llama.cpp's counters."""
        with self._lock, self._live.resetting_timings():
            yield

    def was_reset(self) -> None:
        """`Llama.reset` was called."""
        with self._lock:
            self._live.was_reset()

    def was_cut(self, length: int) -> None:
        """Positions from `length` on were removed or moved through `Llama`'s context."""
        with self._lock:
            self._live.was_cut(length)

    @contextmanager
    def loading(self, llm: Any, *, proven: bool) -> Iterator[None]:
        """Around `Llama.load_state`. If it fails, the context is emptied: stock leaves `n_tokens` promising a state."""
        with self._lock:
            try:
                yield
            except BaseException:
                self._live.empty(llm, buffers=True)
                raise
            self._live.was_loaded(llm, proven=proven)

    # -- keep -----------------------------------------------------------------------------------------------------

    def keep(self, llm: Any) -> None:
        """Save the context's state, if it is known to be right and isn't stored yet. Costs the caller one copy."""
        if not self._is_usable(llm):
            return
        with self._lock, self.reporter.border("saving"):
            self._keeping.keep(llm)

    @contextmanager
    def no_store(self, llm: Any) -> Iterator[None]:
        """Nothing that is decoded in the block is ever saved, neither in it nor later."""
        # What came before is no secret.
        self.keep(llm)
        with self._live.private():
            yield

    def check_process(self) -> None:
        """Before the lock is taken for somebody who asks by hand.

        Raises:
            UsageError: this is a forked child, which has the lock as it was, and nobody who gives it back.
        """
        if self._pid != os.getpid():
            raise UsageError("the cache was attached before a fork: attach again in this process")

    def wait_for_kept(self, prompt: Sequence[int]) -> None:
        """See `Keeping.wait_for`."""
        if self._pid == os.getpid():
            self._keeping.wait_for(prompt)

    def want(self) -> None:
        """Somebody asked for what the context holds to be kept."""
        with self._lock:
            self._requests.want()
            self._keeping.forget()

    def was_cleared(self) -> None:
        """See `Keeping.was_cleared`."""
        with self._lock:
            self._keeping.was_cleared()

    def forget_kept(self) -> None:
        """See `Keeping.forget`."""
        with self._lock:
            self._keeping.forget()

    def public_tokens(self) -> Tokens:
        """The tokens that the context holds, as far as they are known and may be stored. A copy."""
        with self._lock:
            return self._live.public_tokens().copy()

    def _is_usable(self, llm: Any) -> bool:
        """Whether the model is still open, and this is the process that opened it."""
        return self._pid == os.getpid() and llm._ctx.ctx is not None

    def begin_anew_unless_keepable(self, llm: Any) -> None:
        """Empty the context if what follows could never be stored because of what it holds.

        Raises:
            UsageError: nothing that is decoded now is ever stored.
        """
        with self._lock:
            if not len(self._live.keepable(llm)):
                self._live.empty(llm)
            if self._live.is_private:
                raise UsageError("nothing is stored inside of a no_store block")

    def lacks_positions(self, llm: Any) -> bool:
        """Whether stock code would go wrong with what the context holds."""
        with self._lock:
            return self._is_usable(llm) and llm.n_tokens > 0 and self._live.context.lacks_positions()

    def leave(self, llm: Any) -> bool:
        """Leave the context to stock code: empty, if only the code here knows what it lacks. Returns whether that was so.

        A restored window has only the positions that are attended to. Where llama.cpp keeps all of them, `Llama` never meets
        that by itself: it would cut into the hole, and go on (logit error 4.4).
        """
        lacking = self.lacks_positions(llm)
        if lacking:
            with self._lock, self.reporter.border("leaving the context"):
                self._live.empty(llm)
        return lacking

    # -- the end --------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Save what the context holds, and return when everything is stored. False if `timeout` wasn't enough."""
        if self._pid != os.getpid():
            return False
        began = time.monotonic()
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            # Another thread is in the middle of a prompt.
            return False
        try:
            llm = self._llm()
            if llm is not None:
                self.keep(llm)
        finally:
            self._lock.release()
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        return self._backing.flush(left)

    def close(self) -> None:
        """Flush, and give the store back. Safe to call twice, and beside a prompt in another thread."""
        if self._pid != os.getpid():
            # A forked child has the parent's locks as they were, and none of its threads: it would wait forever.
            return
        self._backing.settle_identity()
        self.flush()
        with self._lock:
            # From here on nothing more is kept, also not by a generation in another thread.
            self._backing.unavailable = self._backing.unavailable or "the cache is closed"
        self._backing.close()
        with self._lock:
            self._backing.give_back()
