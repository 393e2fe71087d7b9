"""What all processes did with a root, together: each adds what it has counted, when it has nothing better to do."""

from contextlib import suppress
from dataclasses import dataclass, fields

from kvkeep.cache.report import Stats
from kvkeep.store import totals
from kvkeep.store.engine import Connection
from kvkeep.store.errors import CapacityError, StoreLocked
from kvkeep.store.repository import Repository


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a root since it was made, or since the first version that counted them.

    What a process has counted is added at its end and while nothing waits to be stored; a kill loses what is in between.

    Attributes:
        since: when the first was counted, in seconds since 1970; 0 if nothing was.
        requests: prompts that came through.
        hits: of these, prompts of which something was restored from the store.
        prompt_tokens: tokens of all prompts.
        restored_tokens: tokens that came from the store.
        live_tokens: tokens that were still in a context.
        decoded_tokens: tokens of prompts that had to be decoded.
        restore_ms: milliseconds spent restoring.
        saved_ms: milliseconds that decoding the restored tokens would have taken beyond that; an estimate.
        saves: states stored.
        written_bytes: bytes of the values written for them.
        evicted: entries that had to go for them.
        dropped: states given up.
        one_shot: states that weren't stored, because nothing would ever have been restored from them.
        quarantined: damaged entries removed.
        errors: errors that were met, of all kinds.
    """

    since: int = 0
    requests: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    restored_tokens: int = 0
    live_tokens: int = 0
    decoded_tokens: int = 0
    restore_ms: int = 0
    saved_ms: int = 0
    saves: int = 0
    written_bytes: int = 0
    evicted: int = 0
    dropped: int = 0
    one_shot: int = 0
    quarantined: int = 0
    errors: int = 0


_MOST = 1 << 62
# Of the year 9999; `datetime` knows no later one.
_LAST_SECOND = 253_402_300_799
_COUNTS = tuple(field.name for field in fields(Totals) if field.name != "since")


def read(connection: Connection) -> Totals:
    """The totals of a root."""
    known = totals.every(connection)
    return Totals(**{name: known[name] for name in (*_COUNTS, "since") if name in known and _can_be(name, known[name])})


def _can_be(name: str, value: int) -> bool:
    """Whether it isn't damaged as far as one can see."""
    return -_MOST < value < _MOST if name == "saved_ms" else 0 <= value < (_LAST_SECOND if name == "since" else _MOST)


class Counting:
    """What one process has added so far."""

    def __init__(self) -> None:
        self._added = dict.fromkeys(_COUNTS, 0)

    def add(self, repository: Repository, stats: Stats) -> None:
        """Add what is new in `stats`. Left for the next time if another process writes now, or the disk is full."""
        now = _counts(stats)
        new = {name: now[name] - self._added[name] for name in _COUNTS}
        if not any(new.values()):
            return
        with suppress(StoreLocked, CapacityError), repository.writing(timeout=0.0) as writing:
            with writing.index.write() as connection:
                totals.add(connection, new)
            self._added = now


def _counts(stats: Stats) -> dict[str, int]:
    computed = {
        "restore_ms": round(stats.restore_seconds * 1e3),
        "saved_ms": round(stats.saved_seconds * 1e3),
        "errors": sum(stats.errors.values()),
    }
    return {name: computed[name] if name in computed else int(getattr(stats, name)) for name in _COUNTS}
