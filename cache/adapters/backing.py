"""What stands behind a live context: the store, the identity under which states are kept there, and the writer.

No error of opening or identifying passes it: without a store the model works on, and `unavailable` says why.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.cache.adapters.ending import wait_for_the_gone
from kvkeep.cache.adapters.identity import ingredients_of, label_of
from kvkeep.cache.fingerprint import Identification
from kvkeep.cache.layout import Bytes
from kvkeep.cache.memory import Memory
from kvkeep.cache.points import Point
from kvkeep.cache.prefix_cache import Identity, PrefixCache
from kvkeep.cache.report import Reporter
from kvkeep.cache.restore import Restored
from kvkeep.cache.state import Form
from kvkeep.cache.writer import Job, Writer
from kvkeep.store.errors import StoreLocked
from kvkeep.store.hashing import Fingerprint
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.space import DefaultCapacity

# How long a close waits for the model's hash: a first run of a large model should leave something behind, but nobody
# waits minutes for a window to close.
IDENTIFY_SECONDS = 10.0

Tokens = npt.NDArray[np.int32]


class Backing:
    """The store behind one model.

    Args:
        reporter: counts and logs.
        memory: what the model's memory consists of.
        failed: called with every error of a job, before it is reported; with None for a job that was given up.
        ready: called with the prefix cache as soon as it is known whose states these are.
    """

    def __init__(
        self,
        reporter: Reporter,
        memory: Memory,
        failed: Callable[[BaseException | None], None] = lambda error: None,
        ready: Callable[[PrefixCache], None] = lambda cache: None,
    ) -> None:
        self._reporter = reporter
        self._memory = memory
        self._failed = failed
        self._ready = ready
        self.cache: PrefixCache | None = None
        self.repository: Repository | None = None
        self.unavailable = ""
        self._identification: Identification | None = None
        # Saves wait until it is known whose they are.
        self._writer = Writer(self._job_failed, self._job_dropped, held=True)

    def open(self, llm: Any, path: Path, capacity_bytes: int, extra: str) -> None:
        """Open the store and begin to identify the model."""
        # A model that was loaded in place of another one should find what that one had.
        wait_for_the_gone()
        try:
            explicit = None if isinstance(capacity_bytes, DefaultCapacity) else capacity_bytes
            self.repository = open_root(path, explicit)
            ingredients = ingredients_of(llm, extra)
            label = label_of(llm)
            self._identification = Identification(
                ingredients,
                self.repository,
                lambda fingerprint: self._identified(fingerprint, label, ingredients.fields),
                lambda error: self._give_up("identifying the model", error),
            )
            self.later(self.repository.sweep)
            self._identification.start()
        except Exception as error:  # noqa: BLE001 - the border: whatever a folder or a file does, the model works without
            self._give_up("opening the cache folder", error)

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

        def run() -> None:
            if (cache := self.cache) is None:
                return
            saved = cache.save(tokens, state, form, points=points, seq_id=seq_id, pause=self._writer.pause)
            self._reporter.saved(saved.written_bytes, saved.evicted)
            done(cache)

        size = state.nbytes + sum(point.data.nbytes for point in points)
        self._writer.submit(Job(run, tokens, size, replaces=replaces))

    def quarantine(self, cache: PrefixCache, restored: Restored) -> None:
        """Remove, behind, what didn't verify."""
        self.later(lambda: self._reporter.quarantined(cache.quarantine(restored.damaged), restored.detail))

    def _job_dropped(self) -> None:
        self._failed(None)
        self._reporter.dropped()

    def _job_failed(self, error: BaseException) -> None:
        if isinstance(error, StoreLocked):
            self._reporter.dropped()
        self._failed(error)
        self._reporter.error("storing a state", error)

    def flush(self, timeout: float | None = None) -> bool:
        """Return when everything that was submitted is stored. False if `timeout` seconds weren't enough."""
        return True if self.unavailable else self._writer.flush(timeout)

    def settle_identity(self) -> None:
        """Before the end: nothing can be stored as long as the model isn't known, and that isn't waited for forever."""
        if self._identification is not None:
            self._identification.wait(IDENTIFY_SECONDS)
            self._identification.stop()
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
            close_root(repository)
