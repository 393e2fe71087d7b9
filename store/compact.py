"""Writing the live blobs anew into the next generation, so that the disk gets back what is free in the old file.

    plan      what is there, what it would bring, what it needs
    copy      without anybody waiting: what rows name, batch by batch
    catch up  under the writer's lock: what was stored meanwhile, and without what was deleted meanwhile
    switch    one durable transaction; only then the old generation goes
    rewrite   the index

Killed anywhere, one generation is whole and the index names it. What is left of the other goes at the next open.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvkeep.store import generations, rows, settings
from kvkeep.store.blobs import BlobStore, footprint
from kvkeep.store.errors import DiskFull, StoreLocked
from kvkeep.store.hashing import BlobId
from kvkeep.store.locks import exclusive
from kvkeep.store.private import disk_errors, sync_folder
from kvkeep.store.repository import Repository
from kvkeep.store.space import Disk
from kvkeep.store.steps import Step, reached

COMPACT_LOCK = "compact.lock"
# A second compaction at the same time has nothing to do.
LOCK_SECONDS = 1.0
# One batch is held in memory, and the snapshot that it is read from keeps pages from being used again.
BATCH_BYTES = 32 << 20
# What LMDB needs for its B-tree beside the values, as a share of them, and at least.
OVERHEAD = 0.02
MIN_OVERHEAD = 64 << 10

Progress = Callable[[int], None]


def copy_bytes(live_bytes: int) -> int:
    """What a copy of so many bytes of values takes."""
    return live_bytes + max(MIN_OVERHEAD, int(live_bytes * OVERHEAD))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a compaction would do. All in bytes, but for the counts.

    Attributes:
        blobs: blobs that some row names.
        live_bytes: what they take.
        garbage_blobs: blobs that no row names.
        file_bytes: what the blobs' file takes on the disk now.
        index_free_bytes: pages of the index that hold nothing.
        free_bytes: what the disk has to give: without the reserve, unless the copy gives back at least what it takes.
    """

    blobs: int
    live_bytes: int
    garbage_blobs: int
    file_bytes: int
    index_free_bytes: int
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Free disk that the copy needs, before the old file goes."""
        return copy_bytes(self.live_bytes)

    @property
    def gained_bytes(self) -> int:
        """What the disk gets back, about."""
        return max(0, self.file_bytes - self.needed_bytes) + self.index_free_bytes

    @property
    def fits(self) -> bool:
        """Whether the disk can hold the copy."""
        return self.needed_bytes <= self.free_bytes


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did, in bytes of the whole root on the disk."""

    before_bytes: int
    after_bytes: int
    live_bytes: int


def plan(repository: Repository, *, into_reserve: bool = False) -> Plan:
    """What a compaction would do now. Changes nothing.

    Args:
        repository: an open one.
        into_reserve: what is to be left to others counts as free; the copy takes it for its moment only.
    """
    with repository.snapshot() as snapshot:
        sizes = rows.stored_sizes(snapshot.connection)
        garbage = sum(name not in sizes for name in snapshot.blobs.ids())
        reserve = settings.find(snapshot.connection, settings.RESERVE_BYTES)
    disk = Disk.of(repository.path)
    planned = Plan(
        blobs=len(sizes),
        live_bytes=sum(map(footprint, sizes.values())),
        garbage_blobs=garbage,
        file_bytes=repository.blobs.disk_bytes,
        index_free_bytes=repository.index.free_bytes,
        free_bytes=max(0, disk.room(0 if into_reserve else reserve)),
    )
    # Refused, it would help nobody: the reserve is touched already, and there is more of it afterwards.
    return replace(planned, free_bytes=disk.free) if planned.gained_bytes >= planned.needed_bytes else planned


def compact(repository: Repository, progress: Progress = lambda n_bytes: None, *, into_reserve: bool = False) -> Compacted:
    """Write the live blobs anew, and give the disk back what is free.

    Others may have the root open: they read on, and save but for the moment of the switch.

    Args:
        repository: an open one.
        progress: called with the bytes of each batch that was copied; may raise to stop, which leaves all as it was.
        into_reserve: see `plan`.

    Raises:
        DiskFull: the disk can't hold the copy. Nothing was changed.
        StoreLocked: another process is at it, or writes and doesn't end.
    """
    with _alone(repository), disk_errors(f"compacting {repository.path}"):
        planned = plan(repository, into_reserve=into_reserve)
        if not planned.fits:
            raise DiskFull(
                f"a copy of {planned.needed_bytes} bytes doesn't fit: the disk has {planned.free_bytes} bytes free, "
                "besides what is to be left to others"
            )
        before = repository.disk_bytes
        live = _rewrite(repository, progress)
        with repository.writing() as writing:
            writing.index.rewrite()
        reached(Step.COMPACT_DONE)
        return Compacted(before, repository.disk_bytes, live)


def remove_leftovers(repository: Repository) -> int:
    """Delete what a compaction that was killed has left, unless another one runs. Returns how many generations."""
    try:
        with _alone(repository, 0), repository.rows() as connection:
            return generations.remove_leftovers(repository.path, generations.current(connection, repository.path))
    except StoreLocked:
        return 0


@contextmanager
def _alone(repository: Repository, timeout: float | None = None) -> Iterator[None]:
    try:
        with exclusive(repository.path / COMPACT_LOCK, LOCK_SECONDS if timeout is None else timeout):
            yield
    except StoreLocked as error:
        raise StoreLocked(f"{repository.path} is being compacted by another process already") from error


def _rewrite(repository: Repository, progress: Progress) -> int:
    with repository.rows() as connection:
        old = generations.current(connection, repository.path)
    # Nobody else makes new ones: what there is besides was left by a compaction that was killed.
    generations.remove_leftovers(repository.path, old)
    copy = _Copy(repository, old + 1, progress)
    try:
        copy.begin()
        copy.bring()
        with repository.writing() as writing:
            copy.bring()
            copy.finish()
            with writing.index.write() as connection:
                settings.put(connection, settings.GENERATION, old + 1)
            reached(Step.COMPACT_SWITCHED)
    except BaseException:
        copy.drop()
        raise
    repository.refresh()
    generations.remove(repository.path, old)
    reached(Step.COMPACT_OLD_GONE)
    return copy.live_bytes


class _Copy:
    """The next generation in the making."""

    def __init__(self, repository: Repository, generation: int, progress: Progress) -> None:
        self._repository = repository
        self._generation = generation
        self._progress = progress
        self._folder: Path = generations.folder(repository.path, generation)
        self._blobs: BlobStore | None = None

    def begin(self) -> None:
        # It needn't be durable before it counts: one wait for the disk, at its end.
        self._blobs = BlobStore(self._folder, self._repository.index.space.map_bytes, durable=False)
        reached(Step.COMPACT_BEGUN)

    @property
    def _target(self) -> BlobStore:
        assert self._blobs is not None
        return self._blobs

    def bring(self) -> None:
        """Copy what is named now and isn't there yet; delete what isn't named any more."""
        with self._target.read() as reader:
            present = set(reader.ids())
        with self._repository.rows() as connection:
            named = rows.stored_sizes(connection)
        if gone := [name for name in present if name not in named]:
            self._target.delete(gone)
            # What comes may need the pages of what went.
            self._target.settle()
        for batch in _batches(named, present):
            # A snapshot for each: a long one would keep the pages of what is evicted meanwhile.
            with self._repository.snapshot() as snapshot:
                found = [(name, snapshot.blobs.get(name)) for name in batch]
                self._target.put((name, value) for name, value in found if value is not None)
            reached(Step.COMPACT_COPIED)
            self._progress(sum(named[name] for name in batch))

    def finish(self) -> None:
        """Make it durable, names included."""
        self.live_bytes = self._target.used_bytes
        self._target.sync()
        self._target.close()
        sync_folder(self._folder)
        sync_folder(self._repository.path)
        reached(Step.COMPACT_COMPLETE)

    def drop(self) -> None:
        """It isn't wanted, unless the index names it by now."""
        if self._blobs is not None:
            self._blobs.close()
        with self._repository.rows() as connection:
            current = generations.current(connection, self._repository.path)
        if current != self._generation:
            generations.remove(self._repository.path, self._generation)


def _batches(sizes: dict[BlobId, int], without: set[BlobId]) -> Iterator[Sequence[BlobId]]:
    """Names of blobs that are copied together; in the order of their names, as LMDB has them."""
    batch: list[BlobId] = []
    total = 0
    for name in sorted(sizes.keys() - without):
        if batch and total + sizes[name] > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += sizes[name]
    if batch:
        yield batch
