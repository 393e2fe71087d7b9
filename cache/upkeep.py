"""Bringing a root within its budget: after a smaller one was asked for, or when entries get too old."""

from dataclasses import dataclass

from kvkeep.cache import budget
from kvkeep.cache.pinned import pinned_bytes
from kvkeep.store import generations
from kvkeep.store.compact import compact, copy_bytes, plan, remove_leftovers
from kvkeep.store.errors import DiskFull
from kvkeep.store.repository import Repository


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What was done.

    Attributes:
        expired: entries that nobody had used for longer than the root keeps anything.
        evicted: entries that the budget has no room for.
        compacted: the blobs were written anew, because their file was larger than its share.
    """

    expired: int = 0
    evicted: int = 0
    compacted: bool = False


def is_over_budget(repository: Repository) -> bool:
    """Whether a root takes more of the disk than it may. Cheap.

    Without a generation that somebody is about to write: then the old one goes.
    """
    return repository.blobs.disk_bytes + repository.index.disk_bytes > repository.capacity_bytes


def needs_care(repository: Repository) -> bool:
    """Whether a root takes more of the disk than it may, or has leftovers. Cheap."""
    return is_over_budget(repository) or len(generations.present(repository.path)) > 1


def settle(repository: Repository) -> Upkeep:
    """Remove what is too old or too much, and shrink the files if they are larger than the budget.

    Raises:
        DiskFull: the disk can't hold a copy of what is live, even after everything that may go was evicted.
        StoreLocked: another process writes or compacts.
    """
    remove_leftovers(repository)
    with repository.writing() as writing:
        expired = len(budget.expire(writing))
        evicted = len(budget.make_room(writing, 0))
    compacted = False
    if is_over_budget(repository):
        repository.index.shrink()
    if is_over_budget(repository):
        # What is to be left to others is given back a moment later, with more.
        evicted += evict_until_copy_fits(repository, into_reserve=True)
        compact(repository, into_reserve=True)
        compacted = True
    return Upkeep(expired, evicted, compacted)


def evict_until_copy_fits(repository: Repository, *, into_reserve: bool = False) -> int:
    """Evict, the least recently used first, until the disk can hold a copy of the rest. Returns how many went.

    Evicting frees no disk by itself, only pages of the blobs' file; it makes the copy smaller.

    Raises:
        DiskFull: even a copy of what is pinned wouldn't fit. Nothing was evicted for it.
    """
    evicted = 0
    while not (planned := plan(repository, into_reserve=into_reserve)).fits:
        with repository.rows() as connection:
            least = copy_bytes(pinned_bytes(connection))
        if least > planned.free_bytes:
            raise DiskFull(f"not even a copy of {least} bytes fits: the disk has {planned.free_bytes} bytes to give")
        with repository.writing() as writing:
            gone = budget.evict(writing, planned.needed_bytes - planned.free_bytes)
        if not gone:
            break
        evicted += len(gone)
    return evicted
