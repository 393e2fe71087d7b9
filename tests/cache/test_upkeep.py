"""What a root keeps, and for how long: the budget, the disk's reserve, pins, lifetimes, and chats that alternate."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crowd import BLOCK_TOKENS, LARGE, MODELS, occupied
from synthetic import Made, random_tokens

from kvkeep.cache import budget, upkeep
from kvkeep.cache.pinned import MAX_SHARE
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store import generations, namespaces, nodes, pins, settings
from kvkeep.store.blobs import BlobStore
from kvkeep.store.check import check
from kvkeep.store.compact import COMPACT_LOCK
from kvkeep.store.errors import CapacityError, DiskFull, MapFull, StoreLocked, TooLarge, UsageError
from kvkeep.store.locks import exclusive
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.space import MIN_CAPACITY, Disk, Space

MB = 1 << 20
# What the blobs of one chat of these take: about 8 KiB a token.
CHAT = random_tokens(400, seed=1)
OTHER = random_tokens(400, seed=2)


@pytest.fixture
def repository(root: Path) -> Iterator[Repository]:
    opened = open_root(root, MIN_CAPACITY)
    yield opened
    close_root(opened)


@pytest.fixture
def cache(repository: Repository) -> PrefixCache:
    return PrefixCache(repository, LARGE.identity(), block_tokens=BLOCK_TOKENS)


def save(cache: PrefixCache, tokens: list[int], made: Made = LARGE, **more: Any) -> None:
    cache.save(tokens, made.state(tokens), **more)


def fill(cache: PrefixCache, first: int = 1000, count: int = 8) -> None:
    """More than the budget, of chats that nobody asks for again."""
    for seed in range(first, first + count):
        save(cache, random_tokens(300, seed=seed))


# -- the budget ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [MIN_CAPACITY, 100 * MB, 4 << 30, 8 << 40])
def test_the_parts_make_no_more_than_the_budget(capacity: int) -> None:
    space = Space(capacity)
    assert space.map_bytes + space.index_bytes + space.log_bytes < capacity
    assert space.map_bytes > capacity / 2
    assert space.rows_at_once >= 8


def test_a_smaller_budget_holds_after_the_next_save_of_a_process_that_has_it_open(root: Path) -> None:
    repository = open_root(root, 64 * MB)
    cache = PrefixCache(repository, LARGE.identity(), block_tokens=BLOCK_TOKENS)
    fill(cache, count=16)
    assert occupied(root) > 2 * MIN_CAPACITY
    other = open_root(root, MIN_CAPACITY)
    save(cache, CHAT)
    assert occupied(root) <= MIN_CAPACITY
    assert repository.capacity_bytes == MIN_CAPACITY
    assert cache.match(CHAT).length == 400, "what was just saved is there"
    close_root(other)
    close_root(repository)


def test_a_smaller_budget_holds_when_a_root_is_settled_after_the_next_open(root: Path) -> None:
    repository = open_root(root, 64 * MB)
    cache = PrefixCache(repository, LARGE.identity(), block_tokens=BLOCK_TOKENS)
    fill(cache, count=16)
    save(cache, CHAT)
    close_root(repository)
    repository = open_root(root, MIN_CAPACITY)
    done = upkeep.settle(repository)
    assert done.evicted > 0
    assert done.compacted
    assert occupied(root) <= MIN_CAPACITY
    cache = PrefixCache(repository, LARGE.identity(), block_tokens=BLOCK_TOKENS)
    assert cache.match(CHAT).length == 400
    assert check(repository) == []
    assert upkeep.settle(repository) == upkeep.Upkeep()
    close_root(repository)


def test_a_larger_budget_holds_at_once(cache: PrefixCache, root: Path) -> None:
    fill(cache)
    other = open_root(root, 64 * MB)
    save(cache, CHAT)
    fill(cache, first=2000)
    assert cache.match(CHAT).length == 400
    assert 2 * MIN_CAPACITY > occupied(root) > MIN_CAPACITY
    close_root(other)


def test_an_index_full_of_tiny_rows_is_bounded_too(repository: Repository) -> None:
    """A model so small that rows are larger than what they name."""
    made = MODELS["hybrid"]
    cache = PrefixCache(repository, made.identity(), block_tokens=1)
    for seed in range(60):
        save(cache, random_tokens(150, seed=seed), made)
        assert repository.index.disk_bytes <= repository.index.space.index_bytes + repository.index.space.log_bytes + 64 * 1024
        assert occupied(repository.path) <= MIN_CAPACITY
    assert cache.match(random_tokens(150, seed=59)).length == 150
    assert cache.match(random_tokens(150, seed=0)).length == 0


# -- free disk ----------------------------------------------------------------------------------------------------------


def disk_with(monkeypatch: pytest.MonkeyPatch, free: Callable[[], int]) -> None:
    monkeypatch.setattr(Disk, "of", classmethod(lambda cls, path: cls(100 << 30, free())))


def test_the_default_reserve_is_a_twentieth_and_at_most_ten_gib() -> None:
    assert Disk(100 << 30, 0).default_reserve == 5 << 30
    assert Disk(1 << 40, 0).default_reserve == 10 << 30
    assert Disk(1000, 60).room(None) == 10
    assert Disk(1000, 60).room(100) == -40
    assert Disk(1000, 60).room(0) == 60


def test_the_reserve_is_never_eaten(cache: PrefixCache, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk on which the root may take 6 MB more."""
    begin = occupied(root)
    disk_with(monkeypatch, lambda: (5 << 30) + 6 * MB - (occupied(root) - begin))
    fill(cache)
    assert occupied(root) - begin <= 6 * MB
    save(cache, CHAT[:100])
    assert cache.match(CHAT[:100]).length == 100, "what is there makes room for what comes"
    assert occupied(root) - begin <= 6 * MB


def test_a_small_disk_with_a_large_budget_is_used_all_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of so large a budget may take 16 MiB; it doesn't."""
    repository = open_root(root, 4 << 30)
    begin = occupied(root)
    disk_with(monkeypatch, lambda: (5 << 30) + 12 * MB - (occupied(root) - begin))
    cache = PrefixCache(repository, LARGE.identity(), block_tokens=BLOCK_TOKENS)
    save(cache, CHAT)
    assert cache.match(CHAT).length == 400
    close_root(repository)


def test_a_disk_that_is_full_before_the_budget_costs_no_more_than_what_comes(
    cache: PrefixCache, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blobs' file has no free page, and may not grow: what is deleted needs some, too."""
    save(cache, CHAT)
    save(cache, OTHER)
    begin = occupied(root)
    disk_with(monkeypatch, lambda: (5 << 30) - (occupied(root) - begin))
    for seed in range(6):
        save(cache, random_tokens(60, seed=seed))
        assert cache.match(random_tokens(60, seed=seed)).length == 60
    assert occupied(root) - begin <= 1 * MB
    # A fifth of the file is headroom from now on.
    assert cache.match(OTHER).length >= 300
    with cache.repository.rows() as connection:
        assert len(list(nodes.every(connection))) > 25


def test_a_file_that_cant_even_be_deleted_from_loses_nothing(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    save(cache, CHAT)
    monkeypatch.setattr(BlobStore, "has_room", lambda self, *sizes: False)
    with cache.repository.writing() as writing, pytest.raises(MapFull, match="nothing can be deleted"):
        budget.evict(writing, 100 * MB)
    assert cache.match(CHAT).length == 400


def test_beside_a_reader_that_hangs_saves_are_given_up_and_nothing_is_lost(cache: PrefixCache) -> None:
    """It keeps every page that it can see; what is evicted meanwhile makes no room."""
    save(cache, CHAT)
    cache.pin(CHAT[:200])
    failed = 0
    with cache.repository.snapshot():
        for seed in range(12):
            try:
                save(cache, random_tokens(300, seed=seed))
            except CapacityError:
                failed += 1
        with cache.repository.rows() as connection:
            left = len(list(nodes.every(connection)))
    assert failed > 3
    assert left > 25
    for seed in range(3):
        save(cache, random_tokens(300, seed=50 + seed))
        assert cache.match(random_tokens(300, seed=50 + seed)).length == 300
    assert cache.match(CHAT).length >= 200


def test_a_disk_without_any_room_is_an_error_that_names_it(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    room = [0]
    disk_with(monkeypatch, lambda: (5 << 30) + room[0])
    with pytest.raises(DiskFull, match="left to others"):
        save(cache, CHAT)
    room[0] = 100 * MB
    save(cache, CHAT)
    assert cache.match(CHAT).length == 400


def test_another_reserve_is_remembered(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_with(monkeypatch, lambda: 1 * MB)
    with pytest.raises(DiskFull):
        save(cache, CHAT[:64])
    cache.repository.agree_on(settings.RESERVE_BYTES, 0)
    disk_with(monkeypatch, lambda: 20 * MB)
    save(cache, CHAT[:64])
    assert cache.match(CHAT[:64]).length == 64


# -- who goes -----------------------------------------------------------------------------------------------------------


def test_two_chats_with_room_for_one_and_a_half_keep_their_beginnings(cache: PrefixCache) -> None:
    """Each turn finds a part of its chat, however long they go on."""
    room = budget.largest(cache.repository.blobs)
    size = int(room / 1.5 / (8.2 * 1024))
    one, other = random_tokens(size, seed=1), random_tokens(size, seed=2)
    found = []
    for _ in range(4):
        for chat in (one, other):
            found.append(cache.match(chat).length)
            cache.restore(cache.match(chat), chat)
            save(cache, chat)
    assert found[0] == 0
    assert all(length >= size * 0.3 for length in found[2:]), found


def test_a_chat_nobody_used_goes_as_a_whole_before_anything_of_a_newer_one(cache: PrefixCache) -> None:
    for chat in (CHAT, OTHER):
        save(cache, chat)
    with cache.repository.writing() as writing:
        budget.evict(writing, 2 * MB)
    assert 0 < cache.match(CHAT).length < 200
    assert cache.match(OTHER).length == 400


def test_going_on_with_a_chat_keeps_its_beginning_young(cache: PrefixCache) -> None:
    save(cache, CHAT[:200])
    save(cache, OTHER)
    save(cache, CHAT)
    cache.repository.flush_touched()
    with cache.repository.rows() as connection:
        rows = {node.start: node.used for node in nodes.every(connection) if node.path in _bytes(CHAT)}
    assert min(rows.values()) > _used(cache, OTHER)


def _bytes(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def _used(cache: PrefixCache, tokens: list[int]) -> float:
    with cache.repository.rows() as connection:
        return max(node.used for node in nodes.every(connection) if node.path in _bytes(tokens))


def test_what_is_being_restored_stays(cache: PrefixCache) -> None:
    save(cache, CHAT)
    save(cache, OTHER)
    held = [budget.key_of(entry) for entry in cache.match(CHAT).entries]
    with cache.repository.holding(held), cache.repository.writing() as writing:
        budget.evict(writing, 100 * MB)
    assert cache.match(CHAT).length == 400
    assert cache.match(OTHER).length == 0
    with cache.repository.writing() as writing:
        budget.evict(writing, 100 * MB)
    assert cache.match(CHAT).length == 0


# -- pins ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_pinned_prefix_outlives_everything_of_every_memory(repository: Repository, name: str) -> None:
    made = MODELS[name]
    cache = PrefixCache(repository, made.identity(), block_tokens=BLOCK_TOKENS)
    large = PrefixCache(repository, LARGE.identity("large"), block_tokens=BLOCK_TOKENS)
    save(cache, CHAT[:100], made)
    save(cache, CHAT[:150], made)
    assert cache.pin(CHAT[:100])
    assert not cache.pin(CHAT[:100])
    fill(large)
    with repository.writing() as writing:
        budget.evict(writing, 100 * MB)
    assert cache.match(CHAT[:150]).length >= 100
    assert cache.unpin(CHAT[:100])
    assert not cache.unpin(CHAT[:100])
    with repository.writing() as writing:
        budget.evict(writing, 100 * MB)
    assert cache.match(CHAT[:150]).length == 0


def test_a_pin_holds_for_what_is_stored_later(cache: PrefixCache, root: Path) -> None:
    assert cache.pin(CHAT[:50])
    save(cache, CHAT)
    close_root(cache.repository)
    repository = open_root(root)
    again = PrefixCache(repository, LARGE.identity(), block_tokens=BLOCK_TOKENS)
    with repository.writing() as writing:
        budget.evict(writing, 100 * MB)
    # The last block that the prefix reaches into goes with it.
    assert again.match(CHAT).length == 64
    close_root(repository)


def test_pins_leave_half_of_the_budget(cache: PrefixCache) -> None:
    limit = int(cache.repository.blobs.map_bytes * MAX_SHARE)
    long = random_tokens(int(1.3 * limit / (8 * 1024)), seed=3)
    save(cache, long)
    assert cache.pin(long[: len(long) // 3])
    with pytest.raises(TooLarge, match="half of the budget"):
        cache.pin(long)
    assert cache.pin(long[: len(long) // 2])


def test_nothing_cant_be_pinned(cache: PrefixCache) -> None:
    with pytest.raises(UsageError, match="empty prefix"):
        cache.pin([])


# -- lifetimes ----------------------------------------------------------------------------------------------------------


def age(cache: PrefixCache, tokens: list[int], seconds: float) -> None:
    with cache.repository.index.write() as connection:
        for entry in cache.match(tokens).entries:
            for table in ("node", "window", "checkpoint"):
                connection.exec_driver_sql(
                    f'UPDATE "{table}" SET used = ? WHERE blob = ?', (time.time() - seconds, bytes(entry.blob))
                )


def test_what_nobody_used_for_longer_than_its_lifetime_goes_with_the_next_save(cache: PrefixCache) -> None:
    for chat in (CHAT, OTHER):
        save(cache, chat)
        age(cache, chat, 1000 if chat is CHAT else 10)
    save(cache, [1, 2, 3])
    assert cache.match(CHAT).length == 400, "without a limit nothing goes"
    cache.repository.agree_on(settings.LIFETIME_SECONDS, 500)
    cache.restore(cache.match([1]), [1])
    save(cache, [1, 2, 4])
    assert cache.match(CHAT).length == 0
    assert cache.match(OTHER).length == 400
    cache.repository.agree_on(settings.LIFETIME_SECONDS, 0)
    age(cache, OTHER, 10_000)
    save(cache, [1, 2, 5])
    assert cache.match(OTHER).length == 400


def test_a_use_or_a_pin_gives_it_another_life(cache: PrefixCache) -> None:
    for chat in (CHAT, OTHER):
        save(cache, chat)
        age(cache, chat, 1000)
    cache.repository.agree_on(settings.LIFETIME_SECONDS, 500)
    cache.pin(CHAT)
    cache.restore(cache.match(OTHER), OTHER)
    save(cache, [1, 2, 3])
    assert (cache.match(CHAT).length, cache.match(OTHER).length) == (400, 400)


# -- clear --------------------------------------------------------------------------------------------------------------


def test_clearing_a_model_leaves_the_others(repository: Repository) -> None:
    one, other = (PrefixCache(repository, LARGE.identity(name), block_tokens=BLOCK_TOKENS) for name in ("one", "other"))
    for cache in (one, other):
        save(cache, CHAT)
    one.pin(CHAT)
    assert one.clear() > 0
    assert one.clear() == 0
    assert (one.match(CHAT).length, other.match(CHAT).length) == (0, 400)
    with repository.rows() as connection:
        assert pins.every(connection) == []
        (fingerprint,) = [space.fingerprint for space in namespaces.every(connection) if space.label == "other"]
    with pytest.raises(UsageError, match="no model is called 'nobody'"):
        one.clear("nobody")
    with pytest.raises(UsageError):
        one.clear("")
    assert one.clear(fingerprint.hex()[:10]) > 0
    assert len(repository.blobs) == 0
    save(one, CHAT)
    assert one.match(CHAT).length == 400


def test_clearing_by_the_label(repository: Repository) -> None:
    one, other = (PrefixCache(repository, LARGE.identity(name), block_tokens=BLOCK_TOKENS) for name in ("one", "other"))
    save(other, CHAT)
    assert one.clear("other") > 0
    assert other.match(CHAT).length == 0


# -- room for a copy ----------------------------------------------------------------------------------------------------


def test_evicting_until_a_copy_fits(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(cache, count=3)
    save(cache, CHAT)
    cache.repository.agree_on(settings.RESERVE_BYTES, 0)
    disk_with(monkeypatch, lambda: 5 * MB)
    assert upkeep.evict_until_copy_fits(cache.repository) > 0
    upkeep.compact(cache.repository)
    assert cache.match(CHAT).length == 400
    disk_with(monkeypatch, lambda: 0)
    with pytest.raises(DiskFull, match="not even a copy"):
        upkeep.evict_until_copy_fits(cache.repository)
    assert cache.match(CHAT).length == 400, "nothing goes for what can't be"


def test_pins_of_what_is_stored_later_leave_room_for_something_else(cache: PrefixCache) -> None:
    """Pinned before they were stored, so that nobody could say no."""
    long = [random_tokens(500, seed=seed) for seed in range(4)]
    for chat in long:
        cache.pin(chat)
    for chat in long:
        save(cache, chat)
    save(cache, CHAT)
    assert cache.match(CHAT).length == 400
    assert cache.match(long[0]).length == 500, "the oldest pin holds"


def test_a_save_goes_on_where_another_process_is_settling(
    cache: PrefixCache, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: Repository) -> None:
        raise StoreLocked("somebody is at it")

    monkeypatch.setattr(upkeep, "needs_care", lambda _: True)
    monkeypatch.setattr(upkeep, "settle", busy)
    save(cache, CHAT)
    assert cache.match(CHAT).length == 400


def test_leftovers_of_a_killed_compaction_go_with_the_next_save_and_a_running_one_is_left_alone(
    cache: PrefixCache, root: Path
) -> None:
    save(cache, CHAT)
    shutil.copytree(root / "blobs-1", root / "blobs-2")
    with exclusive(root / COMPACT_LOCK, 0):
        save(cache, OTHER)
        assert generations.present(root) == [1, 2]
    save(cache, CHAT[:7])
    assert generations.present(root) == [1]
    assert cache.match(CHAT).length == 400


# -- less free disk than is to be left to others -----------------------------------------------------------------------


def test_on_a_disk_below_the_reserve_old_chats_still_make_room_for_new_ones(
    cache: PrefixCache, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have filled it. Nothing more may be taken, but what is there is ours to use again."""
    save(cache, CHAT)
    save(cache, OTHER)
    begin = occupied(root)
    cache.repository.agree_on(settings.RESERVE_BYTES, 100 << 30)
    disk_with(monkeypatch, lambda: (20 << 30) - (occupied(root) - begin))
    for seed in range(4):
        save(cache, random_tokens(60, seed=seed))
        assert cache.match(random_tokens(60, seed=seed)).length == 60
    assert occupied(root) - begin <= 1 * MB, "half a MiB is lent, once"


def test_on_a_disk_below_the_reserve_what_was_removed_can_be_wiped(
    cache: PrefixCache, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(cache, CHAT)
    cache.repository.agree_on(settings.RESERVE_BYTES, 100 << 30)
    disk_with(monkeypatch, lambda: 20 << 30)
    assert cache.clear() > 0
    before = occupied(root)
    upkeep.compact(cache.repository)
    assert occupied(root) < before / 4
