"""The background writer: bounded, in order, and never in anybody's way."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.cache.writer import Job, Writer
from kvkeep.store.errors import StoreClosed

LONG = 30.0
"""Seconds after which a test gives up waiting. None waits that long."""


class Desk:
    """A writer whose thread is busy until it is told to go on, with a record of what was done."""

    def __init__(self, max_waiting_bytes: int = 100) -> None:
        self.done: list[str] = []
        self.threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []
        self.dropped = 0
        self._busy = threading.Event()
        self._go = threading.Event()
        self.writer = Writer(self.failures.append, self._count, max_waiting_bytes=max_waiting_bytes)

    def _count(self) -> None:
        self.dropped += 1

    def block(self) -> None:
        """Keep the writer's thread in a job."""

        def wait() -> None:
            self._busy.set()
            assert self._go.wait(LONG)

        self.writer.submit(Job(wait, np.empty(0, np.int32), 0))
        assert self._busy.wait(LONG)

    def go_on(self) -> None:
        self._go.set()

    def submit(self, name: str, size: int = 1, tokens: list[int] | None = None, run: Callable[[], None] | None = None) -> None:
        def work() -> None:
            self.done.append(name)
            self.threads.append(threading.current_thread())
            if run is not None:
                run()

        self.writer.submit(Job(work, np.array(tokens or [], np.int32), size))


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.go_on()
    made.writer.close()


def test_jobs_are_done_in_the_order_in_which_they_came(desk: Desk) -> None:
    desk.block()
    for name in "abcdef":
        desk.submit(name)
    desk.go_on()
    assert desk.writer.flush(LONG)
    assert "".join(desk.done) == "abcdef"


def test_the_writers_own_thread_does_jobs_without_a_flush(desk: Desk) -> None:
    done = threading.Event()
    desk.submit("a", run=done.set)
    assert done.wait(LONG)
    assert [thread.name for thread in desk.threads] == ["kvkeep-writer"]


def test_too_much_waiting_drops_the_oldest_and_counts(desk: Desk) -> None:
    desk.block()
    for name in "abcd":
        desk.submit(name, 40)
    desk.go_on()
    desk.writer.flush()
    assert (desk.done, desk.dropped) == (["c", "d"], 2)


def test_exactly_the_bound_may_wait(desk: Desk) -> None:
    desk.block()
    desk.submit("a", 50)
    desk.submit("b", 50)
    desk.go_on()
    desk.writer.flush()
    assert (desk.done, desk.dropped) == (["a", "b"], 0)


def test_one_that_is_larger_than_the_bound_waits_alone(desk: Desk) -> None:
    desk.block()
    desk.submit("small", 10)
    desk.submit("huge", 1000)
    desk.submit("next", 10)
    desk.go_on()
    desk.writer.flush()
    assert (desk.done, desk.dropped) == (["next"], 2)


def test_jobs_without_a_state_are_free(desk: Desk) -> None:
    desk.block()
    desk.submit("state", 100)
    for _ in range(20):
        desk.submit("note", 0)
    desk.go_on()
    desk.writer.flush()
    assert (len(desk.done), desk.dropped) == (21, 0)


def test_newer_state_of_the_same_chat_replaces_the_waiting_one(desk: Desk) -> None:
    desk.block()
    desk.submit("first", 60, [1, 2, 3])
    desk.submit("other chat", 10, [1, 2, 9])
    desk.submit("second", 60, [1, 2, 3, 4])
    desk.submit("third", 60, [1, 2, 3, 4])
    desk.go_on()
    desk.writer.flush()
    # Replaced is not dropped: nothing was lost.
    assert (desk.done, desk.dropped) == (["other chat", "third"], 0)


def test_shorter_or_parted_state_replaces_nothing(desk: Desk) -> None:
    desk.block()
    desk.submit("long", tokens=[1, 2, 3])
    desk.submit("short", tokens=[1, 2])
    desk.submit("parted", tokens=[1, 3, 4, 5])
    desk.submit("note")
    desk.go_on()
    desk.writer.flush()
    assert desk.done == ["long", "short", "parted", "note"]


def test_running_job_is_not_replaced(desk: Desk) -> None:
    started, go = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        go.wait(LONG)

    desk.submit("first", tokens=[1], run=wait)
    assert started.wait(LONG)
    desk.submit("second", tokens=[1, 2])
    assert desk.writer.waiting == 2
    go.set()
    desk.writer.flush()
    assert desk.done == ["first", "second"]


def test_flush_works_off_the_queue_in_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread at idle priority beside a busy generation: it is there, and never gets its turn.
    go = threading.Event()
    original = Writer._step

    def starved(self: Writer, *args: Any) -> bool:
        if threading.current_thread().name == "kvkeep-writer":
            assert go.wait(LONG)
        return original(self, *args)

    monkeypatch.setattr(Writer, "_step", starved)
    desk = Desk()
    for name in "abc":
        desk.submit(name)
    assert desk.writer.flush(LONG)
    assert desk.done == ["a", "b", "c"]
    assert set(desk.threads) == {threading.current_thread()}
    go.set()
    desk.writer.close()


def test_flush_waits_for_the_job_that_is_running(desk: Desk) -> None:
    desk.block()
    desk.submit("a")
    flushed = threading.Event()

    def flush() -> None:
        assert desk.writer.flush()
        flushed.set()

    thread = threading.Thread(target=flush)
    thread.start()
    assert not flushed.is_set()
    desk.go_on()
    thread.join(LONG)
    assert flushed.is_set()
    assert desk.done == ["a"]


def test_flush_gives_up_when_its_time_is_over(desk: Desk) -> None:
    desk.block()
    desk.submit("a")
    assert not desk.writer.flush(0)
    assert desk.writer.waiting == 2
    desk.go_on()
    assert desk.writer.flush(LONG)
    assert desk.writer.waiting == 0


def test_flush_of_nothing_is_done_at_once(desk: Desk) -> None:
    assert desk.writer.flush(0)
    assert desk.writer.flush()


def test_exception_of_a_job_is_reported_and_ends_only_that_job(desk: Desk) -> None:
    error = ValueError("disk")

    def fail() -> None:
        raise error

    desk.submit("bad", run=fail)
    desk.submit("good")
    desk.writer.flush()
    assert desk.done == ["bad", "good"]
    assert desk.failures == [error]


def test_jobs_are_never_done_two_at_a_time(desk: Desk) -> None:
    inside = threading.Lock()
    overlaps: list[bool] = []

    def exclusive() -> None:
        free = inside.acquire(blocking=False)
        overlaps.append(not free)
        if free:
            inside.release()

    desk.block()
    for _ in range(50):
        desk.submit("a", 0, run=exclusive)
    flushers = [threading.Thread(target=desk.writer.flush) for _ in range(3)]
    for flusher in flushers:
        flusher.start()
    desk.go_on()
    for flusher in flushers:
        flusher.join()
    assert overlaps == [False] * 50


def test_close_stores_what_waits_and_ends_the_thread(desk: Desk) -> None:
    for name in "abc":
        desk.submit(name)
    desk.writer.close()
    assert desk.done == ["a", "b", "c"]
    assert not desk.writer._thread.is_alive()


def test_closing_twice_is_no_error(desk: Desk) -> None:
    desk.writer.close()
    desk.writer.close()


def test_submitting_after_close_says_so(desk: Desk) -> None:
    desk.writer.close()
    with pytest.raises(StoreClosed, match="closed"):
        desk.submit("late")
    assert desk.done == []


def test_a_job_that_closes_its_own_writer_waits_for_nobody(desk: Desk) -> None:
    # The owner's last reference may be a job's: then its finaliser runs in the middle of that job.
    flushed: list[bool] = []

    def close() -> None:
        flushed.append(desk.writer.flush())
        desk.writer.close()

    desk.block()
    desk.submit("closes", run=close)
    desk.submit("waits")
    desk.go_on()
    desk.writer._thread.join(LONG)
    assert not desk.writer._thread.is_alive()
    assert flushed == [False]
    assert desk.done == ["closes", "waits"]


def test_a_done_job_keeps_nothing_alive(desk: Desk) -> None:
    import weakref

    class State:
        pass

    state = State()
    gone = weakref.ref(state)
    # The closure holds it, as a save holds the copy of a state.
    desk.writer.submit(Job(lambda held=state: None, np.empty(0, np.int32), 1))  # type: ignore[misc]
    del state
    done = threading.Event()
    desk.submit("next", run=done.set)
    assert done.wait(LONG)
    desk.writer.flush()
    assert gone() is None


AT_EXIT = """
import sys, weakref
import numpy as np
from kvkeep.cache.writer import Job, Writer
class Owner: pass
owner = Owner()
writer = Writer(print, print)
weakref.finalize(owner, writer.close)
def note(number):
    with open(sys.argv[1], "a") as file:
        file.write(f"{number}\\n")
for number in range(50):
    writer.submit(Job(lambda number=number: note(number), np.empty(0, np.int32), 1))
"""


def test_what_waits_is_stored_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    done = subprocess.run([sys.executable, "-c", AT_EXIT, str(path)], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert path.read_text().split() == [str(number) for number in range(50)]


def test_interrupted_flush_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    raised = []

    def interrupted() -> None:
        if not raised:
            raised.append(1)
            raise KeyboardInterrupt
        done.append("a")

    failures: list[BaseException] = []
    writer = Writer(failures.append, lambda: None, held=True)
    writer.submit(Job(interrupted, np.arange(3, dtype=np.int32), 10))
    writer.submit(Job(lambda: done.append("b"), np.arange(9, 12, dtype=np.int32), 10))
    monkeypatch.setattr(writer, "_loop", lambda: None)
    writer._held = False
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    assert writer.waiting == 2
    assert writer.flush()
    assert done == ["a", "b"]
    assert failures == []
    writer.close()


def test_large_state_never_drops_a_job_without_a_state() -> None:
    done: list[str] = []
    dropped: list[int] = []
    writer = Writer(lambda error: None, lambda: dropped.append(1), max_waiting_bytes=100, held=True)
    writer.submit(Job(lambda: done.append("quarantine"), np.empty(0, np.int32), 0))
    writer.submit(Job(lambda: done.append("old"), np.arange(5, dtype=np.int32), 90))
    writer.submit(Job(lambda: done.append("large"), np.arange(9, 14, dtype=np.int32), 500))
    writer.close()
    assert done == ["quarantine", "large"]
    assert dropped == [1]


def test_held_writer_does_nothing_until_it_is_let_go() -> None:
    done: list[str] = []
    writer = Writer(lambda error: None, lambda: None, held=True)
    writer.submit(Job(lambda: done.append("a"), np.arange(3, dtype=np.int32), 10))
    assert writer.flush(timeout=0.0) is False
    assert done == []
    writer.let_go()
    assert writer.flush()
    assert done == ["a"]
    writer.close()


def test_state_that_holds_for_one_position_replaces_none() -> None:
    done: list[str] = []
    writer = Writer(lambda error: None, lambda: None, held=True)
    writer.submit(Job(lambda: done.append("at 3"), np.arange(3, dtype=np.int32), 10, replaces=False))
    writer.submit(Job(lambda: done.append("at 5"), np.arange(5, dtype=np.int32), 10, replaces=False))
    writer.close()
    assert done == ["at 3", "at 5"]


def test_flush_takes_over_the_job_that_the_idle_thread_is_in() -> None:
    """Beside busy programs the idle thread may take minutes; a job that pauses gives itself up, and is done anew."""
    threads: list[threading.Thread] = []
    begun = threading.Event()
    failures: list[BaseException] = []
    writer = Writer(failures.append, lambda: None)

    def long_job() -> None:
        threads.append(threading.current_thread())
        begun.set()
        while threading.current_thread().name == "kvkeep-writer":
            writer.pause()

    writer.submit(Job(long_job, np.arange(3, dtype=np.int32), 10))
    assert begun.wait(LONG)
    assert writer.flush(LONG)
    assert [thread.name for thread in threads] == ["kvkeep-writer", threading.current_thread().name]
    assert failures == []
    writer.close()


def test_an_idle_writer_looks_around_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.cache.writer.IDLE_SECONDS", 0.01)
    looked, done = threading.Semaphore(0), threading.Event()
    writer = Writer(print, print, idle=looked.release)
    for _ in range(3):
        assert looked.acquire(timeout=60)
    writer.submit(Job.of(done.set))
    assert done.wait(60)
    assert looked.acquire(timeout=60)
    writer.close()
