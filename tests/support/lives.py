"""Lives of a root that a test may cut short, or disturb, at any operation.

A life opens the root, works in it, and says after each step what is surely there by then: for each chat, how many of its
first tokens come back. The same steps are done in every run, so a test that has seen a whole life knows what the step that
was cut short was about to do. Lives are jobs for `faults.Forks`.
"""

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree

import faults
import numpy as np
import powerloss
from synthetic import ATTENTION, Made, dense_layout, random_tokens

import kvkeep.migrations.upgrade  # noqa: F401 - alembic takes long to import: here it is done before the forks
from kvkeep.cache import budget, upkeep
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store import compact, generations, nodes, settings, steps
from kvkeep.store.blobs import DATA_FILE, PAGE_BYTES
from kvkeep.store.errors import KvkeepError
from kvkeep.store.hashing import BlobId
from kvkeep.store.marker import Marker
from kvkeep.store.opening import INDEX_FILE
from kvkeep.store.registry import close_root, open_root

CAPACITY = 16 << 20
BLOCK_TOKENS = 16

MADE = Made(ATTENTION.memory, (dense_layout(4, 512),))
"""8 KiB a token, so that nine short chats are more than the budget."""

_TRUNK = random_tokens(40, seed=99)
# Each third one begins as the first one does.
CHATS = [(_TRUNK if i % 3 == 0 else random_tokens(40, seed=i)) + random_tokens(120, seed=100 + i) for i in range(9)]
# Each chat is saved as often, the later ones in place of the end of the earlier: in mid-block, twice in one block.
TURNS = (70, 75, 160)
# A second model, whose entries go when most of a root has to go.
OTHER = "other"


@contextmanager
def opened(root: Path, capacity_bytes: int = CAPACITY, model: str = "model") -> Iterator[PrefixCache]:
    """A cache at a root, which is closed at the end."""
    repository = open_root(root, capacity_bytes)
    try:
        yield PrefixCache(repository, MADE.identity(model), block_tokens=BLOCK_TOKENS)
    finally:
        close_root(repository)


def lengths(cache: PrefixCache) -> list[int]:
    """How many of each chat's first tokens are there."""
    return [cache.match(chat).length for chat in CHATS]


def restored(cache: PrefixCache, chats: Sequence[list[int]] = CHATS) -> list[int]:
    """How many of each chat's first tokens come back.

    Raises:
        AssertionError: they aren't what a context would hold, or fewer than were promised.
    """
    found = []
    for number, chat in enumerate(chats):
        matched = cache.match(chat)
        back = cache.restore(matched, chat)
        assert back.length == matched.length, f"of chat {number} {back.length} tokens come back, not {matched.length}"
        assert not back.damaged, f"chat {number} is damaged: {back.detail}"
        if back.length:
            assert np.array_equal(back.state, MADE.state(chat[: back.length])), f"chat {number} has a wrong state"
        found.append(back.length)
    return found


class Life:
    """What one process does with a root, step by step.

    Args:
        root: its folder.
        patient: errors of kvkeep are noted in `caught`, and the next step is tried. Without it they end the life.
    """

    def __init__(self, root: Path, *, patient: bool = False) -> None:
        self.root = root
        self.caught: list[str] = []
        self._patient = patient
        self._cache: PrefixCache | None = None

    def do(self, work: Callable[[PrefixCache], object] = lambda _: None) -> None:
        """A step: open the root if it isn't, work, and say what is there when that is flushed."""
        with self._noting():
            if self._cache is None:
                self._cache = PrefixCache(open_root(self.root, CAPACITY), MADE.identity(), block_tokens=BLOCK_TOKENS)
            work(self._cache)
            print(json.dumps([faults.count(), lengths(self._cache)]), flush=True)

    def save(self, chat: list[int]) -> None:
        self.do(lambda cache: cache.save(chat, MADE.state(chat)))

    def close(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            with self._noting():
                close_root(cache.repository)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except KvkeepError as error:
            if not self._patient:
                raise
            self.caught.append(type(error).__name__)


# -- scenarios ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A life, and the root that it begins with.

    Attributes:
        live: the life.
        prepare: makes its root, and closes it properly.
        is_damaged: what was there before may be gone.
    """

    live: Callable[[Life], None]
    prepare: Callable[[Path], None] = lambda _: None
    is_damaged: bool = False


def _save(life: Life) -> None:
    """An empty root, chats that grow, and evictions as soon as it is full."""
    for chat in CHATS:
        for length in TURNS:
            life.save(chat[:length])
    life.close()


def _filled(root: Path, count: int = len(CHATS), length: int = 160, **options: object) -> None:
    with opened(root, **options) as cache:  # type: ignore[arg-type]
        for chat in CHATS[:count]:
            cache.save(chat[:length], MADE.state(chat[:length]))


def _again(life: Life) -> None:
    """A second and a third life of a root that was closed properly."""
    for chat in CHATS[:2]:
        life.do(restored)
        life.save(chat[:75])
        life.save(chat)
        life.save(CHATS[4][:100])
        life.close()
    life.do()
    life.close()


def _evict(life: Life) -> None:
    """Everything by which entries go, on a root that is full."""
    life.do(lambda cache: cache.pin(CHATS[8][:70]))
    life.save(CHATS[0])
    life.save(CHATS[1])
    life.do(_expire)
    life.save(CHATS[2])
    life.do(lambda cache: cache.unpin(CHATS[8][:70]))
    life.save(CHATS[3][:75])
    life.do(PrefixCache.clear)
    life.save(CHATS[4])
    life.close()


def _expire(cache: PrefixCache) -> None:
    """Half an hour later, what isn't pinned is too old."""
    cache.repository.agree_on(settings.LIFETIME_SECONDS, 1000)
    with cache.repository.writing() as writing:
        budget.expire(writing, time.time() + 2000)


def _with_another_model(root: Path) -> None:
    _filled(root, 7, model=OTHER)
    _filled(root, 2)


def _compact(life: Life) -> None:
    """Most of a root is removed, and the disk gets it back, in batches of a few blobs; and all that once more."""
    compact.BATCH_BYTES = 512 << 10
    life.do(lambda cache: cache.clear(OTHER))
    life.do(lambda cache: compact.compact(cache.repository))
    life.save(CHATS[2])
    life.save(CHATS[3][:75])
    life.do(PrefixCache.clear)
    life.save(CHATS[4])
    life.do(lambda cache: compact.compact(cache.repository))
    life.save(CHATS[5][:75])
    life.close()


def _begin(life: Life) -> None:
    """A root that an open has much to do with."""
    life.do()
    life.save(CHATS[0])
    life.save(CHATS[3])
    life.close()


def _as_it_was_in_0_2_0(root: Path) -> None:
    _filled(root, 2)
    with closing(sqlite3.connect(root / INDEX_FILE)) as connection, connection:
        connection.execute("DROP TABLE pin")
        connection.execute("UPDATE alembic_version SET version_num = '0.2.0'")


def _with_leftovers(root: Path) -> None:
    """As a save, an eviction and a compaction leave it that are killed."""
    _filled(root, 3)
    with opened(root) as cache:
        with cache.repository.rows() as connection:
            last = max(nodes.every(connection), key=lambda node: node.start)
        cache.repository.blobs.delete([last.blob])
        cache.repository.blobs.put([(BlobId(last.blob[::-1]), b"garbage")])
    copytree(generations.folder(root, 1), generations.folder(root, 2))
    Marker(root).set()


def _with_damaged_blobs(root: Path) -> None:
    """LMDB's file ends in the middle of a page, and whoever had it open last didn't close it."""
    _filled(root, 3)
    os.truncate(generations.folder(root, 1) / DATA_FILE, 5 * PAGE_BYTES + 77)
    Marker(root).set()


def _with_damaged_index(root: Path) -> None:
    """One of SQLite's B-trees is gone, and somebody has met that; the rows themselves can be read."""
    _filled(root, 3)
    with closing(sqlite3.connect(root / INDEX_FILE)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'ix_node_used'").fetchone()
    with (root / INDEX_FILE).open("r+b") as file:
        file.seek((page - 1) * PAGE_BYTES)
        file.write(b"\x77" * 100)
    Marker(root).report("it was met")


def _lower(life: Life) -> None:
    """A root that holds more than the budget that is asked for now."""
    life.do()
    life.do(lambda cache: upkeep.settle(cache.repository))
    life.save(CHATS[3])
    life.close()


def _with_a_larger_budget(root: Path) -> None:
    for model in (OTHER, "model"):
        _filled(root, capacity_bytes=2 * CAPACITY, model=model)


SCENARIOS: dict[str, Scenario] = {
    "save": Scenario(_save),
    "again": Scenario(_again, lambda root: _filled(root, 3, 70)),
    "evict": Scenario(_evict, _filled),
    "compact": Scenario(_compact, _with_another_model),
    "migrate": Scenario(_begin, _as_it_was_in_0_2_0),
    "tidy up": Scenario(_begin, _with_leftovers),
    "recover blobs": Scenario(_begin, _with_damaged_blobs, is_damaged=True),
    "recover index": Scenario(_begin, _with_damaged_index, is_damaged=True),
    "lower": Scenario(_lower, _with_a_larger_budget),
}


# -- jobs ----------------------------------------------------------------------------------------------------------------


def prepare(root: Path, scenario: str) -> None:
    """Make the root of a scenario, and say what is surely there."""
    made = SCENARIOS[scenario]
    made.prepare(root)
    nothing = [0] * len(CHATS)
    if made.is_damaged or not any(root.iterdir()):
        print(json.dumps(nothing))
        return
    # Looked at in a copy: a root of an older version would be a new one behind it.
    powerloss.copy(root, copied := root.with_name(f"{root.name} copied"))
    with opened(copied, 2 * CAPACITY) as cache:
        print(json.dumps(lengths(cache)))


def live(root: Path, scenario: str, *, kill_at_step: int | None = None) -> None:
    """A life that ends with the first error. Says at its end which points of `Step` it came by, and how long it took.

    Args:
        root: as `prepare` has made it.
        scenario: its name.
        kill_at_step: at which of those points it is killed, from 0 on.
    """
    met: list[str] = []

    def on_step(step: steps.Step) -> None:
        if len(met) == kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        met.append(step.value)

    steps.on_step = on_step
    began = time.monotonic()
    SCENARIOS[scenario].live(Life(root))
    print(json.dumps([met, time.monotonic() - began]))


JOBS: dict[str, Callable[..., None]] = {"prepare": prepare, "live": live}
