"""The protocol between a live `Llama` and its prefix cache, shared by both ways in.

    settle     before a prompt is decoded: cut back, restore, or clear
    observe    around every `eval`: which positions hold which tokens
    keep       when a generation has ended, however it ended: copy the state once, hand it to the writer

Nothing that goes wrong in here reaches the caller. After a failed restore the context is empty and `n_tokens` is 0.
"""

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.cache.adapters.context import LiveContext
from kvkeep.cache.adapters.identity import ingredients_of, label_of
from kvkeep.cache.break_even import BreakEven
from kvkeep.cache.fingerprint import Identification
from kvkeep.cache.layout import MemoryKind
from kvkeep.cache.ledger import Ledger
from kvkeep.cache.match import Match, Reason, Source
from kvkeep.cache.prefix_cache import Identity, PrefixCache
from kvkeep.cache.report import Reporter
from kvkeep.cache.writer import Job, Writer
from kvkeep.store.entry import Entry
from kvkeep.store.errors import KvkeepError, StoreLocked, UsageError
from kvkeep.store.hashing import Fingerprint
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository

Tokens = npt.NDArray[np.int32]

_WORTH_SAYING = {Reason.BELOW_BREAK_EVEN, Reason.DAMAGED, Reason.REFUSED, Reason.UNAVAILABLE}
_NO_TOKENS: Tokens = np.empty(0, np.int32)


class Session:
    """One `Llama` and one store.

    Args:
        llm: a `llama_cpp.Llama`; held weakly.
        path: the store's root.
        capacity_bytes: byte budget of the root.
        break_even: restore only where that is quicker than decoding.
        extra: part of the model's identity that can't be seen from outside.
    """

    def __init__(self, llm: Any, path: Path, capacity_bytes: int, break_even: bool, extra: str) -> None:
        self._llm = weakref.ref(llm)
        self._use_break_even = break_even
        self.context = LiveContext(llm)
        self.reporter = Reporter()
        self.rates = BreakEven()
        self.last: Match | None = None
        self._ledger = Ledger(llm.n_ctx())
        self._lock = threading.RLock()
        self._count = self.context.decoded_count() if self.context.has_memory else (0, 0)
        self._kept = _NO_TOKENS
        self._cache: PrefixCache | None = None
        self._repository: Repository | None = None
        self._identification: Identification | None = None
        self._writer = Writer(self._job_failed, self.reporter.dropped)
        self._unavailable = ""
        if llm.n_tokens > 0:
            # Decoded before anybody looked: fit to go on from, not to be saved.
            self._ledger.set(llm.input_ids[: llm.n_tokens], proven=False)
        self._open(llm, path, capacity_bytes, extra)

    def _open(self, llm: Any, path: Path, capacity_bytes: int, extra: str) -> None:
        if not self.context.has_memory:
            self._unavailable = "the model has no memory to keep (an embedding or diffusion model)"
            self.reporter.once("no memory", "%s", self._unavailable)
            return
        try:
            self._repository = open_root(path, capacity_bytes)
            ingredients = ingredients_of(llm, extra)
            label = label_of(llm)
            self._identification = Identification(
                ingredients,
                self._repository,
                lambda fingerprint: self._identified(fingerprint, label, ingredients.fields),
                lambda error: self._give_up("identifying the model", error),
            )
            self._identification.start()
        except UsageError:
            raise
        except (KvkeepError, OSError) as error:
            self._give_up("opening the cache folder", error)

    def _give_up(self, what: str, error: Exception) -> None:
        self._unavailable = str(error)
        self.reporter.error(what, error)

    def _identified(self, fingerprint: Fingerprint, label: str, fields: dict[str, str]) -> None:
        assert self._repository is not None
        context = self.context
        identity = Identity(fingerprint, label, fields, context.kind, context.v_trans, context.ext)
        cache = PrefixCache(self._repository, identity)
        space = cache.namespace
        if space is not None:
            self.rates.prefill_rate = space.prefill_rate
            self.rates.restore_rate = space.restore_rate
        self._cache = cache

    # -- settle ---------------------------------------------------------------------------------------------------

    def settle(self, llm: Any, prompt: Sequence[int]) -> Match:
        """Make the context hold as much of the prompt as can be had, and say what that was.

        Afterwards `llm.n_tokens` and `llm.input_ids` agree with the memory, and the last token of the prompt is left to
        be decoded, unless the context stands exactly at its end with fresh logits.
        """
        n_tokens = len(prompt)
        with self._lock:
            match = Match(length=0, prompt_tokens=n_tokens, reason=Reason.UNAVAILABLE)
            with self._clean_on_failure(llm), self.reporter.border("settling a prompt"):
                tokens = np.asarray(prompt, np.int32)
                match = self._settle(llm, tokens)
            self.last = match
            restored = match.length if match.source is Source.DISK else 0
            self.reporter.request(match, self.rates.decode_seconds(restored))
            return match

    @contextmanager
    def _clean_on_failure(self, llm: Any) -> Iterator[None]:
        """Empty the context if what is inside fails, or is interrupted, anywhere between clearing and a good end."""
        errors = sum(self.reporter.stats.errors.values())
        try:
            yield
        except BaseException:
            self._empty(llm)
            raise
        if sum(self.reporter.stats.errors.values()) != errors:
            self._empty(llm)

    def _settle(self, llm: Any, prompt: Tokens) -> Match:
        self._notice_foreign_decodes()
        self._agree_with_memory(llm)
        n_tokens = len(prompt)
        exact = n_tokens == llm.n_tokens and np.array_equal(llm.input_ids[:n_tokens], prompt)
        if exact and not llm._requires_eval:
            return self._already_decoded(llm, n_tokens)
        self._keep_unsaved(llm)
        live = self._live_prefix(llm, prompt)
        stored = self._stored(llm, prompt)
        if stored.length > live:
            reason, detail = self._restore_or_not(stored, live)
            if reason is Reason.FOUND:
                restored = self._restore(llm, prompt, stored, live)
                if restored.length > live:
                    return restored
                reason, detail = restored.reason, restored.detail
                live = self._live_prefix(llm, prompt)
        elif stored.length == 0:
            reason, detail = stored.reason, stored.detail
        else:
            reason, detail = Reason.LIVE_IS_BETTER, ""
        self._cut(llm, live)
        if live:
            # What the store lacks is no news where the context has it.
            reason = reason if reason in _WORTH_SAYING else Reason.FOUND
            return Match(length=live, prompt_tokens=n_tokens, source=Source.LIVE, reason=reason, detail=detail)
        return Match(length=0, prompt_tokens=n_tokens, reason=reason, detail=detail)

    def _already_decoded(self, llm: Any, n_tokens: int) -> Match:
        """The prompt was decoded by an `eval` just now: a chat handler does that, and then asks for a completion."""
        if len(self._ledger) < n_tokens:
            # It may hold an image. Leave it alone.
            return Match(length=n_tokens, prompt_tokens=n_tokens, source=Source.LIVE, reason=Reason.FOREIGN_POSITIONS)
        if self.last is not None and self.last.prompt_tokens == n_tokens:
            return self.last
        return Match(length=n_tokens, prompt_tokens=n_tokens, source=Source.LIVE)

    def _agree_with_memory(self, llm: Any) -> None:
        """Clear a context whose `n_tokens` promises more than the memory holds, as a refused `load_state` leaves it."""
        if llm.n_tokens > 0 and self.context.pos_max() < llm.n_tokens - 1:
            self._empty(llm)
        self._ledger.cut(llm.n_tokens)

    def _live_prefix(self, llm: Any, prompt: Tokens) -> int:
        """How much of the prompt the live context can give: it must be known, shared, and possible to cut back to."""
        shared = self._ledger.common(prompt, min(llm.n_tokens, len(prompt) - 1))
        return shared if shared > 0 and self.context.can_cut_to(shared) else 0

    def _cut(self, llm: Any, length: int) -> None:
        """Cut the live context back to `length`, here and not by the stock `generate`, which doesn't check."""
        if length == 0 or not self.context.cut(length):
            self._empty(llm)
            return
        if length < llm.n_tokens:
            llm._requires_eval = True
        llm.n_tokens = length
        self._ledger.cut(length)

    def _empty(self, llm: Any) -> None:
        """Nothing is left, in the memory and in what is known about it."""
        llm.n_tokens = 0
        llm._requires_eval = True
        self._ledger.cut(0)
        if self.context.has_memory and self.context.pos_max() >= 0:
            self.context.clear()

    def _stored(self, llm: Any, prompt: Tokens) -> Match:
        n_tokens = len(prompt)
        if llm._logits_all:
            return Match(length=0, prompt_tokens=n_tokens, reason=Reason.LOGITS_ALL)
        if self._unavailable:
            return Match(length=0, prompt_tokens=n_tokens, reason=Reason.UNAVAILABLE, detail=self._unavailable)
        if self._cache is None:
            return Match(length=0, prompt_tokens=n_tokens, reason=Reason.IDENTIFYING)
        return self._cache.match(prompt, at_most=min(n_tokens - 1, llm.n_ctx()))

    def _restore_or_not(self, stored: Match, live: int) -> tuple[Reason, str]:
        gained = stored.length - live
        if not self._use_break_even or self.rates.worth(gained, stored.plain_bytes):
            return Reason.FOUND, ""
        decode = self.rates.decode_seconds(gained) or 0.0
        restore = self.rates.restore_seconds(stored.plain_bytes)
        detail = f"decoding {gained} tokens takes about {decode * 1e3:.0f} ms, restoring about {restore * 1e3:.0f} ms"
        return Reason.BELOW_BREAK_EVEN, detail

    def _restore(self, llm: Any, prompt: Tokens, stored: Match, live: int) -> Match:
        """Replace the context's memory by the stored state; the live one stays if that has become the better one."""
        assert self._cache is not None
        began = time.perf_counter()
        restored = self._cache.restore(stored, prompt)
        if restored.damaged:
            self._quarantine(restored.damaged, restored.detail)
        if restored.length <= live:
            return replace(stored, length=0, source=Source.NONE, reason=Reason.DAMAGED, detail=restored.detail)
        length = restored.length
        try:
            self.context.load(restored.state, length)
        except KvkeepError as error:
            self.reporter.error("restoring a state", error)
            self._empty(llm)
            self._quarantine(_entries(stored), str(error), refused=True)
            return replace(stored, length=0, source=Source.NONE, reason=Reason.REFUSED, detail=str(error))
        llm.input_ids[:length] = prompt[:length]
        llm.n_tokens = length
        llm._requires_eval = True
        self._ledger.set(prompt[:length], proven=True)
        seconds = time.perf_counter() - began
        self.rates.restored(restored.state.nbytes, seconds)
        reason = Reason.DAMAGED if restored.damaged else Reason.FOUND
        return replace(
            stored, length=length, reason=reason, detail=restored.detail, seconds=seconds, state_bytes=restored.state.nbytes
        )

    def _quarantine(self, entries: Sequence[Entry], detail: str, *, refused: bool = False) -> None:
        cache = self._cache
        assert cache is not None

        def remove() -> None:
            count = cache.remove(entries) if refused else cache.quarantine(entries)
            self.reporter.quarantined(count, detail)

        self._writer.submit(Job(remove, _NO_TOKENS, 0))

    # -- observe --------------------------------------------------------------------------------------------------

    @contextmanager
    def observe(self, llm: Any, tokens: Sequence[int]) -> Iterator[None]:
        """Around an `eval`: note what it decoded, also if it fails half-way."""
        with self._lock:
            with self.reporter.border("watching an eval"):
                self._notice_foreign_decodes()
            at = llm.n_tokens
            began = time.perf_counter()
            try:
                yield
            finally:
                with self.reporter.border("watching an eval"):
                    self._count = self.context.decoded_count()
                    done = llm.n_tokens - at
                    self._ledger.extend(at, tokens[:done])
                    self.rates.prefilled(done, time.perf_counter() - began)

    def _notice_foreign_decodes(self) -> None:
        """Forget what was known if anybody but `eval` has decoded since: an image, an embedding, the C API."""
        count = self.context.decoded_count()
        if count != self._count:
            self._count = count
            self._ledger.cut(0)

    def was_reset(self) -> None:
        """`Llama.reset` was called."""
        with self._lock:
            self._ledger.cut(0)

    def was_loaded(self, llm: Any, *, proven: bool) -> None:
        """`Llama.load_state` was called; whose state that was, nobody knows, unless it was ours."""
        with self._lock:
            self._ledger.set(llm.input_ids[: llm.n_tokens], proven=proven)

    # -- keep -----------------------------------------------------------------------------------------------------

    def keep(self, llm: Any) -> bool:
        """Save the context's state if it is known to be right and isn't stored yet. Returns whether it was copied."""
        with self._lock:
            copied = False
            with self.reporter.border("saving"):
                self._notice_foreign_decodes()
                copied = self._keep_unsaved(llm)
            return copied

    def _keep_unsaved(self, llm: Any) -> bool:
        tokens = self._keepable(llm)
        if len(tokens) == 0 or self._is_kept(tokens):
            return False
        state = self.context.copy_state()
        self._kept = tokens
        self._writer.submit(Job(lambda: self._save(tokens, state), tokens, state.nbytes))
        return True

    def _keepable(self, llm: Any) -> Tokens:
        """The tokens of the context, if every position is known and the memory stands exactly behind the last one."""
        n_tokens = llm.n_tokens
        ledger = self._ledger
        if self._unavailable or n_tokens == 0 or len(ledger) != n_tokens or not ledger.proven:
            return _NO_TOKENS
        if not np.array_equal(ledger.tokens, llm.input_ids[:n_tokens]):
            return _NO_TOKENS
        # An interrupt leaves the memory ahead of n_tokens. Plain attention can be cut down to it.
        if self.context.pos_max() >= n_tokens and self.context.kind is MemoryKind.ATTENTION:
            self.context.cut(n_tokens)
        if self.context.pos_max() != n_tokens - 1 or not self.context.can_go_on_from(n_tokens):
            return _NO_TOKENS
        return ledger.tokens.copy()

    def _is_kept(self, tokens: Tokens) -> bool:
        """Whether it was saved a moment ago, or the store has it already."""
        if len(tokens) <= len(self._kept) and np.array_equal(tokens, self._kept[: len(tokens)]):
            return self.context.kind is MemoryKind.ATTENTION or len(tokens) == len(self._kept)
        return self._cache is not None and self._cache.match(tokens).length == len(tokens)

    def _save(self, tokens: Tokens, state: npt.NDArray[np.uint8]) -> None:
        """Runs in the writer's thread, or in that of whoever flushes."""
        if self._identification is not None:
            self._identification.wait()
        cache = self._cache
        if cache is None:
            return
        saved = cache.save(tokens, state)
        self.reporter.saved(saved.written_bytes, saved.evicted)
        cache.measured(self.rates.prefill_rate, self.rates.restore_rate)
        cache.repository.flush_touched()

    def _job_failed(self, error: BaseException) -> None:
        # The state isn't stored, so a later one must not be skipped because of it.
        self._kept = _NO_TOKENS
        if isinstance(error, StoreLocked):
            self.reporter.dropped()
        self.reporter.error("saving", error)

    # -- the end --------------------------------------------------------------------------------------------------

    @property
    def cache(self) -> PrefixCache | None:
        """The prefix cache, once the model is identified and if the store could be opened."""
        return self._cache

    @property
    def repository(self) -> Repository | None:
        return self._repository

    def wait_identified(self) -> None:
        """Until the model file is hashed."""
        if self._identification is not None:
            self._identification.wait()

    def flush(self, timeout: float | None = None) -> bool:
        """Save what the context holds, and return when everything is stored."""
        llm = self._llm()
        if llm is not None and getattr(llm._ctx, "ctx", None) is not None:
            self.keep(llm)
        return self._writer.flush(timeout)

    def close(self) -> None:
        """Flush, and give the store back. Safe to call twice."""
        self.flush()
        self._writer.close()
        if self._identification is not None:
            self._identification.stop()
        repository, self._repository = self._repository, None
        self._cache = None
        self._unavailable = self._unavailable or "the cache is closed"
        if repository is not None:
            with self.reporter.border("closing"):
                repository.flush_touched()
            close_root(repository)


def _entries(match: Match) -> list[Entry]:
    entries: list[Entry] = [node for node, _ in match.plan]
    if match.checkpoint is not None:
        entries.append(match.checkpoint)
    return entries
