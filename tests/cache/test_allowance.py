"""A daily limit: counted once a save, however often that is begun, and whatever happens to the count."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic import SMALL, identity, random_tokens, state_of

from kvkeep.cache import allowance
from kvkeep.cache.allowance import Admission
from kvkeep.cache.batches import Saved
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.cache.report import Stats
from kvkeep.cache.totals import Counting, read
from kvkeep.cache.writer import HandOver
from kvkeep.store import rows, settings
from kvkeep.store.errors import DailyLimit, StoreLocked
from kvkeep.store.locks import exclusive
from kvkeep.store.opening import WRITER_LOCK
from kvkeep.store.registry import close_root, open_root


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    repository = open_root(tmp_path / "root")
    yield PrefixCache(repository, identity("daily"))
    close_root(repository)


def save(cache: PrefixCache, seed: int) -> Saved:
    tokens = random_tokens(200, seed=seed)
    return cache.save(tokens, state_of(SMALL, tokens))


def counted(cache: PrefixCache) -> int:
    with cache.repository.rows() as connection:
        return allowance.stored_today(connection)


def test_a_save_that_is_handed_over_is_one_save(cache: PrefixCache) -> None:
    allowance.agree(cache.repository, 1)
    admission = Admission()

    def half() -> Saved:
        save(cache, 1)
        raise HandOver

    with pytest.raises(HandOver):
        admission.save(cache.repository, half)
    saved = admission.save(cache.repository, lambda: save(cache, 2))
    assert saved.written_bytes > 0
    with cache.repository.rows() as connection:
        assert counted(cache) == rows.stored_since(connection, 0.0) > saved.written_bytes
    with pytest.raises(DailyLimit):
        Admission().save(cache.repository, lambda: save(cache, 3))


def test_what_was_stored_today_before_there_was_a_limit_counts(cache: PrefixCache) -> None:
    saved = save(cache, 1)
    allowance.agree(cache.repository, saved.written_bytes + 1)
    assert counted(cache) == saved.written_bytes
    # Named again, nothing is counted again.
    allowance.agree(cache.repository, 2 * saved.written_bytes)
    assert counted(cache) == saved.written_bytes
    allowance.agree(cache.repository, None)
    with cache.repository.rows() as connection:
        assert settings.find(connection, settings.DAILY_BYTES) == 2 * saved.written_bytes


def test_a_save_that_cannot_be_counted_is_stored_all_the_same(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    allowance.agree(cache.repository, 1 << 30)

    def locked(*_: object) -> None:
        raise StoreLocked("another process writes")

    monkeypatch.setattr(allowance, "_count", locked)
    assert Admission().save(cache.repository, lambda: save(cache, 1)).written_bytes > 0


def test_totals_wait_for_nobody(cache: PrefixCache) -> None:
    counting = Counting()
    with exclusive(cache.repository.path / WRITER_LOCK, 1.0):
        counting.add(cache.repository, Stats(requests=3))
        with cache.repository.rows() as connection:
            assert read(connection).requests == 0
    counting.add(cache.repository, Stats(requests=3))
    with cache.repository.rows() as connection:
        assert read(connection).requests == 3
