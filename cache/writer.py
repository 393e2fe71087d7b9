"""The background writer: takes copies of states and stores them when nobody needs the processor."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkeep.cache.priority import become_idle, lift
from kvkeep.store.errors import StoreClosed
from kvkeep.store.gate import Gate

# Copies that may wait. One long chat of a 7B model has 1 to 4 GB, and beside a busy generation the writer gets nothing,
# so this is what the person may lose in memory. A single larger copy is taken all the same, alone.
MAX_WAITING_BYTES = 1 << 30
# How often an idle writer looks around.
IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Something to be stored.

    Attributes:
        run: does it; may raise, which is reported and ends only this job.
        tokens: what the state was decoded from, int32; empty for jobs without a state.
        size: bytes that the job keeps alive; jobs without a state have 0, and are never dropped.
        replaces: a waiting state of the same tokens' beginning needn't be stored as well. Not so where a state holds
            for one position only.
    """

    run: Callable[[], object]
    tokens: npt.NDArray[np.int32]
    size: int
    replaces: bool = True

    @classmethod
    def of(cls, run: Callable[[], object]) -> "Job":
        """A job without a state."""
        return cls(run, np.empty(0, np.int32), 0)

    def continues(self, other: "Job") -> bool:
        """Whether this is a later state of the same chat, which makes `other` superfluous."""
        length = len(other.tokens)
        return self.replaces and 0 < length <= len(self.tokens) and np.array_equal(self.tokens[:length], other.tokens)


class HandOver(Exception):
    """A job of the idle thread gives up at a good point, because somebody waits who can do it faster."""


class Writer:
    """A thread at idle priority with a bounded queue.

    Args:
        failed: called with every exception of a job.
        dropped: called for every job that is given up because too much waits.
        idle: called now and then while there is nothing to do; must not raise.
        max_waiting_bytes: bound of the queue.
        held: do nothing until `let_go`.
    """

    def __init__(
        self,
        failed: Callable[[BaseException], None],
        dropped: Callable[[], None],
        *,
        idle: Callable[[], object] = lambda: None,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        held: bool = False,
    ) -> None:
        self._failed = failed
        self._dropped = dropped
        self._idle = idle
        self._max_waiting_bytes = max_waiting_bytes
        self._jobs: deque[Job] = deque()
        self._changed = Gate()
        # Identifier of the thread that does a job, 0 while nobody does.
        self._running = 0
        self._closed = False
        self._held = held
        # Threads that are in `flush`. A set, because each takes itself out by one step that no interrupt divides.
        self._waited_for: set[int] = set()
        self._thread = threading.Thread(target=self._loop, name="kvkeep-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Waiting jobs that it makes superfluous go; the oldest go if too much waits.

        Raises:
            StoreClosed: after `close`.
        """
        with self._changed:
            if self._closed:
                raise StoreClosed("the writer is closed")
            self._jobs = deque(waiting for waiting in self._jobs if not job.continues(waiting))
            self._make_room(job.size)
            self._jobs.append(job)
            self._changed.notify_all()

    def _make_room(self, size: int) -> None:
        """Drop the oldest states until `size` more bytes may wait."""
        surplus = sum(job.size for job in self._jobs) + size - self._max_waiting_bytes
        for job in [job for job in self._jobs if job.size > 0]:
            if surplus <= 0:
                return
            self._jobs.remove(job)
            self._dropped()
            surplus -= job.size

    def let_go(self) -> None:
        """End the state of being held."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def give_up(self) -> None:
        """Drop every state that waits."""
        with self._changed:
            self._make_room(self._max_waiting_bytes)

    @property
    def waiting(self) -> int:
        """Jobs that aren't done yet."""
        with self._changed:
            return len(self._jobs) + bool(self._running)

    def flush(self, timeout: float | None = None) -> bool:
        """Return when everything submitted so far is stored. Returns False if `timeout` seconds weren't enough.

        Works off the queue in the calling thread: the writer's own thread may be starved at its idle priority, and an
        unprivileged process can't lift it. Called by a job, which can't wait for its own end, it does nothing.
        """
        if self._is_a_job():
            return False
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._hurried():
            while self._step(lambda: not self._jobs, deadline):
                pass
        return self.waiting == 0

    @contextmanager
    def _hurried(self) -> Iterator[None]:
        """Somebody waits: let the writer's own thread run as others do, or hand its job over."""
        me = threading.get_ident()
        try:
            self._waited_for.add(me)
            if self._thread.native_id is not None:
                lift(self._thread.native_id)
            yield
        finally:
            self._waited_for.discard(me)
            with self._changed:
                self._changed.notify_all()

    def pause(self) -> None:
        """To be called by a long job now and then, where it can be begun anew without harm.

        Beside other busy programs a thread at idle priority takes minutes for what takes a fraction of a second.

        Raises:
            HandOver: in the writer's own thread, when somebody waits for it. The job stays in the queue.
        """
        if self._waited_for and threading.current_thread() is self._thread:
            raise HandOver

    def close(self) -> None:
        """Store everything that waits, then end the thread. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._held = False
            self._changed.notify_all()
        if self._is_a_job() or threading.current_thread() is self._thread:
            # Called by a job, or by the garbage collector in the writer's own thread: the loop does what waits.
            return
        self.flush()
        self._thread.join()

    def _is_a_job(self) -> bool:
        return self._running == threading.get_ident()

    def _step(self, at_end: Callable[[], bool], deadline: float | None) -> bool:
        """Do the next job, as soon as none is running. Returns False when `at_end`, or at the deadline.

        One at a time, whoever does them: a state must not be stored before the damaged one that it replaces is gone. An
        interrupt anywhere in here leaves the job in the queue.
        """
        job: Job | None = None
        try:
            with self._changed:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._changed.wait_for(lambda: self._is_ready(at_end), left) or not self._jobs:
                    return False
                job = self._jobs[0]
                self._running = threading.get_ident()
                self._jobs.popleft()
            job.run()
        except HandOver:
            with self._changed:
                if job is not None:
                    self._jobs.appendleft(job)
        except Exception as error:  # noqa: BLE001 - reported by the owner: counted, and logged once a kind
            self._failed(error)
        except BaseException:
            with self._changed:
                if job is not None and job not in self._jobs:
                    self._jobs.appendleft(job)
            raise
        finally:
            with self._changed:
                if self._is_a_job():
                    self._running = 0
                    self._changed.notify_all()
        return True

    def _is_ready(self, at_end: Callable[[], bool]) -> bool:
        if self._running or (self._held and self._jobs):
            return False
        if self._jobs and self._waited_for and threading.current_thread() is self._thread:
            # Those who wait do it themselves.
            return False
        return bool(self._jobs) or at_end()

    def _loop(self) -> None:
        while True:
            # Again after each job: a flush may have lifted it.
            become_idle()
            if self._step(lambda: self._closed, time.monotonic() + IDLE_SECONDS):
                continue
            if self._closed:
                return
            self._idle()
