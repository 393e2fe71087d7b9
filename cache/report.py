"""What the cache did, in numbers, and the border at which its errors stop."""

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

from kvkeep.cache.match import Match, Source

logger = logging.getLogger("kvkeep")


@dataclass(slots=True)
class Stats:
    """Totals since the cache was attached.

    Attributes:
        requests: prompts that came through.
        hits: of these, prompts of which something was restored from the store.
        prompt_tokens: tokens of all prompts.
        restored_tokens: tokens that came from the store.
        live_tokens: tokens that were still in the context.
        decoded_tokens: tokens of prompts that had to be decoded.
        restore_seconds: time spent restoring.
        saved_seconds: what decoding the restored tokens would have taken, less the time spent restoring; an estimate,
            and nothing as long as decoding was never measured.
        saves: states stored.
        written_bytes: bytes of the values written for them.
        evicted: entries that had to go for them.
        dropped: states given up because too much waited for the writer, or a lock stayed busy.
        quarantined: damaged entries removed.
        reasons: how often each `Reason` was met.
        errors: how often each kind of error was met.
    """

    requests: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    restored_tokens: int = 0
    live_tokens: int = 0
    decoded_tokens: int = 0
    restore_seconds: float = 0.0
    saved_seconds: float = 0.0
    saves: int = 0
    written_bytes: int = 0
    evicted: int = 0
    dropped: int = 0
    quarantined: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


class Reporter:
    """Counts, and logs each kind of trouble once. Safe to use from several threads."""

    def __init__(self) -> None:
        self.stats = Stats()
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self.last_error: BaseException | None = None
        """The newest one that was reported, for who asked for what then failed behind."""

    def request(self, match: Match, decode_seconds: float | None) -> None:
        """A prompt was settled. `decode_seconds` is what decoding the restored tokens would have taken."""
        with self._lock:
            stats = self.stats
            stats.requests += 1
            stats.prompt_tokens += match.prompt_tokens
            stats.decoded_tokens += match.decoded
            stats.reasons[match.reason.value] += 1
            if match.source is Source.LIVE:
                stats.live_tokens += match.length
            elif match.source is Source.DISK:
                stats.hits += 1
                stats.restored_tokens += match.length
                stats.restore_seconds += match.seconds
                if decode_seconds is not None:
                    stats.saved_seconds += decode_seconds - match.seconds
        logger.debug("%s", match)

    def saved(self, written_bytes: int, evicted: int) -> None:
        with self._lock:
            self.stats.saves += 1
            self.stats.written_bytes += written_bytes
            self.stats.evicted += evicted

    def dropped(self, why: str = "a state was given up because too much waits for the disk") -> None:
        """A state is not stored."""
        with self._lock:
            self.stats.dropped += 1
        self.once(f"dropped: {why}", "%s", why)

    def quarantined(self, count: int, detail: str) -> None:
        with self._lock:
            self.stats.quarantined += count
        self.once("damaged", "stored data didn't verify and is removed: %s", detail)

    def error(self, what: str, error: BaseException) -> None:
        """Something failed while `what`. Logged once a kind, counted always."""
        with self._lock:
            self.stats.errors[type(error).__name__] += 1
            self.last_error = error
        self.once(
            f"{what}:{type(error).__name__}", "%s failed, and generation goes on without it: %s", what, error, cause=error
        )

    def once(self, kind: str, message: str, *args: object, cause: BaseException | None = None) -> None:
        """Log a warning, the first time that this kind is met."""
        with self._lock:
            known = kind in self._logged
            self._logged.add(kind)
        if not known:
            logger.warning(message, *args)
        if cause is not None:
            logger.debug(message, *args, exc_info=cause)

    def snapshot(self) -> Stats:
        """A copy of the totals."""
        with self._lock:
            return deepcopy(self.stats)

    @contextmanager
    def border(self, what: str) -> Iterator[None]:
        """Nothing but an interrupt passes: what is inside must never end the person's generation."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the one place where any error becomes a miss
            self.error(what, error)
