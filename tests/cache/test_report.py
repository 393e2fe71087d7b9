"""Counting, logging once a kind, and the border at which errors stop."""

import logging
import threading

import pytest

from kvkeep.cache.match import Match, Reason, Source
from kvkeep.cache.report import Reporter


def test_hits_and_misses_are_counted_apart() -> None:
    reporter = Reporter()
    reporter.request(Match(length=0, prompt_tokens=10, reason=Reason.EMPTY))
    reporter.request(Match(length=8, prompt_tokens=10, source=Source.LIVE))
    reporter.request(Match(length=9, prompt_tokens=10, source=Source.DISK, seconds=0.25))
    stats = reporter.snapshot(lambda n_tokens: n_tokens / 4.5)
    assert (stats.requests, stats.hits, stats.prompt_tokens) == (3, 1, 30)
    assert (stats.restored_tokens, stats.live_tokens, stats.decoded_tokens) == (9, 8, 13)
    assert (stats.restore_seconds, stats.saved_seconds) == (0.25, 1.75)
    assert stats.reasons == {"found": 2, "empty": 1}


def test_saved_seconds_follow_the_speed_that_is_known_when_asked() -> None:
    """The first decode after a start waits for the disk, and what was estimated by it must not stay."""
    reporter = Reporter()
    reporter.request(Match(length=100, prompt_tokens=101, source=Source.DISK, seconds=0.5))
    assert reporter.snapshot().saved_seconds == 0.0
    assert reporter.snapshot(lambda n_tokens: n_tokens / 1.0).saved_seconds == 99.5
    assert reporter.snapshot(lambda n_tokens: n_tokens / 100.0).saved_seconds == 0.5


def test_saves_and_evictions_add_up() -> None:
    reporter = Reporter()
    reporter.saved(100, 2)
    reporter.saved(50, 0)
    reporter.quarantined(3, "rotten")
    reporter.dropped()
    stats = reporter.stats
    assert (stats.saves, stats.written_bytes, stats.evicted, stats.quarantined, stats.dropped) == (2, 150, 2, 3, 1)


def test_each_kind_of_trouble_is_logged_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter()
    with caplog.at_level(logging.WARNING, "kvkeep"):
        for _ in range(3):
            reporter.error("saving", OSError("disk"))
        reporter.error("saving", ValueError("other"))
        reporter.error("restoring", OSError("disk"))
    assert reporter.stats.errors == {"OSError": 4, "ValueError": 1}
    assert len(caplog.records) == 3
    assert "saving failed, and generation goes on without it: disk" in caplog.text


def test_no_error_passes_the_border(caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter()
    with reporter.border("saving"):
        raise RuntimeError("anything")
    assert reporter.stats.errors == {"RuntimeError": 1}


def test_an_interrupt_passes_the_border() -> None:
    reporter = Reporter()
    with pytest.raises(KeyboardInterrupt), reporter.border("saving"):
        raise KeyboardInterrupt
    assert reporter.stats.errors == {}


def test_threads_lose_no_count() -> None:
    reporter = Reporter()
    threads = [threading.Thread(target=lambda: [reporter.saved(1, 1) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (reporter.stats.saves, reporter.stats.evicted) == (2000, 2000)
