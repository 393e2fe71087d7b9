"""What the cache did, in numbers, and the border at which its errors stop."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

from kvkeep.cache.match import Match, Reason, Source

logger = logging.getLogger("kvkeep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first token of a prompt that is shared neither with the context as it was, nor with anything stored.

    Attributes:
        index: its position in the prompt, from 0.
        text: its text.
        known_text: the text of the token that was known there.
        before: the text of the 8 tokens before it.
        behind: the text of the 8 tokens from it on.
        known_behind: the same of what was known there.
        source: where that was known: in the context (LIVE), or in the store (DISK).
        is_inserted: whether most of what follows in the prompt was known all the same. Then something in front of it has
            changed, such as a time, and nothing behind that can be reused: it belongs to the prompt's end.
    """

    index: int
    text: str
    known_text: str
    before: str
    behind: str
    known_behind: str
    source: Source
    is_inserted: bool

    def __str__(self) -> str:
        where = "the context" if self.source is Source.LIVE else "what is stored"
        told = f"token {self.index} is {self.text!r} where {where} has {self.known_text!r}, behind {self.before!r}"
        return told + ("; most of what follows is the same: what changes should stand last" if self.is_inserted else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of one request.

    Attributes:
        match: how many tokens were reused, from where, and why no more.
        settle_seconds: what finding that out and restoring it took, all together.
        read_bytes: bytes read from the disk for it, as they are stored; 0 unless something was restored.
        decode_seconds: what decoding the rest of the prompt took; as far as it is decoded.
        parting: where the prompt parts from everything that was known; None if it doesn't, because it goes on where that ends.
    """

    match: Match
    settle_seconds: float = 0.0
    read_bytes: int = 0
    decode_seconds: float = 0.0
    parting: Parting | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.match.prompt_tokens

    @property
    def reused_tokens(self) -> int:
        """Of these, tokens that needn't be decoded."""
        return self.match.length

    @property
    def decoded_tokens(self) -> int:
        """The others."""
        return self.match.decoded

    @property
    def source(self) -> Source:
        """Where the reused ones came from."""
        return self.match.source

    @property
    def reason(self) -> Reason:
        """Why no more were reused, or FOUND."""
        return self.match.reason

    @property
    def restore_seconds(self) -> float:
        """What reading, verifying and handing them to llama.cpp took; 0.0 unless something was restored."""
        return self.match.seconds

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, with times in seconds, sizes in bytes and `parting` as an object or None."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "decoded_tokens": self.decoded_tokens,
            "source": self.source.value,
            "reason": self.reason.value,
            "detail": self.match.detail,
            "settle_seconds": self.settle_seconds,
            "restore_seconds": self.restore_seconds,
            "read_bytes": self.read_bytes,
            "state_bytes": self.match.state_bytes,
            "decode_seconds": self.decode_seconds,
            "parting": None if self.parting is None else asdict(self.parting) | {"source": self.parting.source.value},
        }

    def __str__(self) -> str:
        told = [str(self.match)]
        if self.source is Source.DISK:
            told.append(f"restored in {self.restore_seconds * 1e3:.0f} ms, {self.read_bytes:,} bytes read")
        told.append(f"{self.decoded_tokens} decoded in {self.decode_seconds * 1e3:.0f} ms")
        return "; ".join([*told, *([] if self.parting is None else [str(self.parting)])])


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
        saved_seconds: what decoding the restored tokens would have taken, less the time spent restoring; an estimate by the
            speed of decoding that is known now, and 0.0 as long as it was never measured.
        saves: states stored.
        written_bytes: bytes of the values written for them.
        evicted: entries that had to go for them.
        dropped: states given up because too much waited for the writer, a lock stayed busy, or as much as may be was
            stored today.
        one_shot: states that weren't stored, because many are that differ in their beginning and are alike in the rest.
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
    one_shot: int = 0
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

    def request(self, match: Match) -> None:
        """A prompt was settled."""
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
        logger.debug("%s", match)

    def saved(self, written_bytes: int, evicted: int) -> None:
        with self._lock:
            self.stats.saves += 1
            self.stats.written_bytes += written_bytes
            self.stats.evicted += evicted

    def dropped(
        self, why: str = "a state was given up because too much waits for the disk", cause: BaseException | None = None
    ) -> None:
        """A state is not stored."""
        with self._lock:
            self.stats.dropped += 1
            self.last_error = cause or self.last_error
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

    def one_shot(self) -> None:
        """A state isn't stored, because nothing would ever be restored from it."""
        with self._lock:
            self.stats.one_shot += 1
        self.once(
            "one shot",
            "prompts differ early and are alike in the rest, so nothing of that can be reused, and more of them are stored "
            "only if they come again; what changes should stand last (report() of attach's handle shows it)",
        )

    def snapshot(self, decode_seconds: Callable[[int], float | None] = lambda n_tokens: None) -> Stats:
        """A copy of the totals.

        Args:
            decode_seconds: what decoding so many tokens takes. Asked now and for all together: what was known of it when each
                was restored may be far off, as it is right after a start.
        """
        with self._lock:
            stats = deepcopy(self.stats)
        seconds = decode_seconds(stats.restored_tokens)
        stats.saved_seconds = 0.0 if seconds is None else seconds - stats.restore_seconds
        return stats

    @contextmanager
    def border(self, what: str) -> Iterator[None]:
        """Nothing but an interrupt passes: what is inside must never end the person's generation."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the one place where any error becomes a miss
            self.error(what, error)
