"""Bringing a root within its budget: after a smaller one was asked for, or when entries get too old."""

from dataclasses import dataclass

from kvkeep.cache import budget
from kvkeep.store import generations
from kvkeep.store.compact import compact, plan, remove_leftovers
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
        evicted += evict_until_copy_fits(repository)
        compact(repository)
        compacted = True
    return Upkeep(expired, evicted, compacted)


def evict_until_copy_fits(repository: Repository) -> int:
    """Evict, the least recently used first, until the disk can hold a copy of the rest. Returns how many went.

    Evicting frees no disk by itself, only pages of the blobs' file; it makes the copy smaller.
    """
    evicted = 0
    while not (planned := plan(repository)).fits:
        with repository.writing() as writing:
            gone = budget.evict(writing, planned.needed_bytes - planned.free_bytes)
        if not gone:
            break
        evicted += len(gone)
    return evicted
