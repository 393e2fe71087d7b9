"""What stands behind a live context: the store, the identity under which states are kept there, and the writer.

No error of opening or identifying passes it: without a store the model works on, and `unavailable` says why.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.cache import allowance
from kvkeep.cache.adapters.ending import wait_for_the_gone
from kvkeep.cache.adapters.identity import ingredients_of, label_of
from kvkeep.cache.allowance import Admission
from kvkeep.cache.fingerprint import Identification
from kvkeep.cache.layout import Bytes
from kvkeep.cache.memory import Memory
from kvkeep.cache.points import Point
from kvkeep.cache.prefix_cache import Identity, PrefixCache
from kvkeep.cache.report import Reporter, Stats
from kvkeep.cache.restore import Restored
from kvkeep.cache.state import Form
from kvkeep.cache.totals import Counting
from kvkeep.cache.upkeep import settle
from kvkeep.cache.writer import Job, Writer
from kvkeep.store import settings
from kvkeep.store.errors import DailyLimit, DamagedFile, StoreLocked, UsageError
from kvkeep.store.hashing import Fingerprint
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.space import DefaultCapacity, valid_capacity, valid_daily, valid_reserve

# How long a close waits for the model's hash: a first run of a large model should leave something behind, but nobody
# waits minutes for a window to close.
IDENTIFY_SECONDS = 10.0
# How often what was counted is added to the root's totals, at most.
COUNT_SECONDS = 60.0
# How long to leave a store alone that couldn't be mended.
RECOVER_SECONDS = 60.0

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a root is asked to keep to. It remembers them, and the last one who asks wins.

    Attributes:
        capacity_bytes: the byte budget; a `DefaultCapacity` is no wish.
        reserve_bytes: free disk that is left to others; None is no wish.
        lifetime: how long what nobody uses is kept; zero is for ever, None is no wish.
        daily_bytes: how many bytes may be stored a day; zero is as many as come, None is no wish.
    """

    capacity_bytes: int
    reserve_bytes: int | None = None
    lifetime: timedelta | None = None
    daily_bytes: int | None = None

    def checked(self) -> "Wishes":
        """The same, if it makes sense.

        Raises:
            UsageError: it doesn't.
        """
        if self.lifetime is not None and not isinstance(self.lifetime, timedelta):
            raise UsageError(f"lifetime is a datetime.timedelta, not {self.lifetime!r}")
        if self.lifetime is not None and self.lifetime < timedelta(0):
            raise UsageError(f"lifetime is {self.lifetime}; it can't be negative")
        reserve = None if self.reserve_bytes is None else valid_reserve(self.reserve_bytes)
        daily = None if self.daily_bytes is None else valid_daily(self.daily_bytes)
        is_default = isinstance(self.capacity_bytes, DefaultCapacity)
        capacity = self.capacity_bytes if is_default else valid_capacity(self.capacity_bytes)
        return Wishes(capacity, reserve, self.lifetime, daily)

    @property
    def wanted_capacity(self) -> int | None:
        """The budget that somebody asks for, if anybody does."""
        return None if isinstance(self.capacity_bytes, DefaultCapacity) else self.capacity_bytes

    def tell(self, repository: Repository) -> None:
        """Have the root remember the others."""
        repository.agree_on(settings.RESERVE_BYTES, self.reserve_bytes)
        seconds = None if self.lifetime is None else math.ceil(self.lifetime.total_seconds())
        repository.agree_on(settings.LIFETIME_SECONDS, seconds)
        allowance.agree(repository, self.daily_bytes)


class Backing:
    """The store behind one model.

    Args:
        reporter: counts and logs.
        memory: what the model's memory consists of.
        failed: called with every error of a job, before it is reported; with None for a job that was given up.
        ready: called with the prefix cache as soon as it is known whose states these are.
        stats: what was counted so far; by default what the reporter knows.
    """

    def __init__(
        self,
        reporter: Reporter,
        memory: Memory,
        failed: Callable[[BaseException | None], None] = lambda error: None,
        ready: Callable[[PrefixCache], None] = lambda cache: None,
        stats: Callable[[], Stats] | None = None,
    ) -> None:
        self._reporter = reporter
        self._memory = memory
        self._failed = failed
        self._ready = ready
        self._stats = stats or reporter.snapshot
        self._counting = Counting()
        self._next_count = time.monotonic() + COUNT_SECONDS
        self.cache: PrefixCache | None = None
        self.repository: Repository | None = None
        self.unavailable = ""
        self._identification: Identification | None = None
        self._next_recovery = 0.0
        # Saves wait until it is known whose they are.
        self._writer = Writer(self._job_failed, self._job_dropped, idle=self._look_around, held=True)

    def open(self, llm: Any, path: Path, wishes: Wishes, extra: str) -> None:
        """Open the store and begin to identify the model."""
        # A model that was loaded in place of another one should find what that one had.
        wait_for_the_gone()
        try:
            repository = open_root(path, wishes.wanted_capacity)
            self.repository = repository
            self._say_what_was_mended(repository)
            wishes.tell(repository)
            ingredients = ingredients_of(llm, extra)
            label = label_of(llm)
            self._identification = Identification(
                ingredients,
                repository,
                lambda fingerprint: self._identified(fingerprint, label, ingredients.fields),
                lambda error: self._give_up("identifying the model", error),
            )
            self.later(repository.sweep)
            self.later(lambda: settle(repository))
            self._identification.start()
        except Exception as error:  # noqa: BLE001 - the border: whatever a folder or a file does, the model works without
            self._give_up("opening the cache folder", error)

    def _say_what_was_mended(self, repository: Repository) -> None:
        for sentence in repository.recovered:
            self._reporter.once(f"recovered: {sentence}", "%s", sentence)

    def _look_around(self) -> None:
        """Let go of blobs that others have compacted away: as long as they are open here, the disk doesn't get them back."""
        if (repository := self.repository) is not None:
            with self._reporter.border("looking around"):
                repository.refresh()
                repository.flush_touched()
                self._count(repository)

    def _count(self, repository: Repository) -> None:
        """Add to the root's totals. Also between saves: a program that is busy all day may be killed in the evening."""
        self._next_count = time.monotonic() + COUNT_SECONDS
        self._counting.add(repository, self._stats())

    def look_after(self, error: BaseException) -> None:
        """Mend the store, behind, if an error says that a file itself is damaged."""
        repository = self.repository
        if isinstance(error, DamagedFile) and repository is not None and not self.unavailable:
            self.later(lambda: self._recover(repository))

    def _recover(self, repository: Repository) -> None:
        if time.monotonic() < self._next_recovery:
            # It was tried a moment ago. Others have the store open, or nothing more can be mended.
            return
        self._next_recovery = time.monotonic() + RECOVER_SECONDS
        repository.recover()
        self._say_what_was_mended(repository)

    def refuse(self, why: str) -> None:
        """There is nothing to keep, for a reason that is no error."""
        self.unavailable = why
        self._reporter.once("no memory", "%s", why)

    def _give_up(self, what: str, error: Exception) -> None:
        self.unavailable = str(error) or type(error).__name__
        self._reporter.error(what, error)
        self._writer.give_up()

    def _identified(self, fingerprint: Fingerprint, label: str, fields: dict[str, str]) -> None:
        repository = self.repository
        if repository is None:
            return
        cache = PrefixCache(repository, Identity(fingerprint, label, fields, self._memory))
        self._ready(cache)
        self.cache = cache
        self._writer.let_go()

    def later(self, run: Callable[[], object]) -> None:
        """Do something in the writer's thread."""
        self._writer.submit(Job.of(run))

    def fits(self, n_bytes: int) -> bool:
        """Whether a state that can't be cut could be stored. Counted as dropped if it never could."""
        if self.cache is None or n_bytes <= self.cache.largest_bytes:
            return True
        self._reporter.dropped("a state is larger than the whole budget allows, and can't be cut")
        return False

    def keep(
        self,
        tokens: Tokens,
        state: Bytes,
        form: Form,
        points: Sequence[Point],
        *,
        seq_id: int = 0,
        replaces: bool = True,
        done: Callable[[PrefixCache], None],
    ) -> None:
        """Have a state stored, with checkpoints that were taken on the way to it.

        Args:
            tokens: what it was decoded from.
            state: llama.cpp's bytes.
            form: their form.
            points: the checkpoints.
            seq_id: the sequence.
            replaces: a waiting state of the same tokens' beginning needn't be stored any more.
            done: called once it is stored.
        """
        admission = Admission()

        def run() -> None:
            if (cache := self.cache) is None:
                return
            saved = admission.save(
                cache.repository,
                lambda: cache.save(tokens, state, form, points=points, seq_id=seq_id, pause=self._writer.pause),
            )
            self._reporter.saved(saved.written_bytes, saved.evicted)
            done(cache)
            if time.monotonic() > self._next_count:
                self._count(cache.repository)

        size = state.nbytes + sum(point.data.nbytes for point in points)
        self._writer.submit(Job(run, tokens, size, replaces=replaces))

    def quarantine(self, cache: PrefixCache, restored: Restored) -> None:
        """Remove, behind, what didn't verify."""
        self.later(lambda: self._reporter.quarantined(cache.quarantine(restored.damaged), restored.detail))

    def _job_dropped(self) -> None:
        self._failed(None)
        self._reporter.dropped()

    def _job_failed(self, error: BaseException) -> None:
        self._failed(error)
        if isinstance(error, DailyLimit):
            # As it was asked for: no error of the store.
            self._reporter.dropped(str(error), error)
            return
        if isinstance(error, StoreLocked):
            self._reporter.dropped()
        self._reporter.error("storing a state", error)
        self.look_after(error)

    def flush(self, timeout: float | None = None) -> bool:
        """Return when everything that was submitted is stored. False if `timeout` seconds weren't enough."""
        return True if self.unavailable else self._writer.flush(timeout)

    def settle_identity(self, *, give_up: bool = True) -> None:
        """Nothing can be stored as long as the model isn't known, and that isn't waited for forever.

        Args:
            give_up: it is the end; else it goes on behind.
        """
        if self._identification is not None:
            self._identification.wait(IDENTIFY_SECONDS)
            if give_up:
                self._identification.stop()
        if not give_up:
            return
        if self.cache is None:
            self.unavailable = self.unavailable or "the model's file wasn't hashed before the end"
            self._writer.give_up()
            self._writer.let_go()

    def close(self) -> None:
        """Store what waits, and end the writer's thread. Safe to call twice."""
        self._writer.close()

    def give_back(self) -> None:
        """Give the store back. Safe to call twice."""
        repository, self.repository = self.repository, None
        self.cache = None
        self.unavailable = self.unavailable or "the cache is closed"
        if repository is not None:
            with self._reporter.border("closing"):
                repository.flush_touched()
                self._count(repository)
            close_root(repository)
