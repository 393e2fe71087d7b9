"""The steps at which a killed process leaves something half done, each with a name.

A seam for tests: they end the process at every one of them, and look at what the next open finds. `on_step` is None in
all other processes, and then a step costs one look.
"""

from collections.abc import Callable
from enum import Enum


class Step(str, Enum):
    """What has just been done. Its value is what tests and docs/RELIABILITY.md call it."""

    SAVE_LOCKED = "save: lock taken"
    SAVE_BLOBS = "save: blobs committed, rows not yet"
    SAVE_ROWS = "save: rows committed, replaced blobs still there"
    SAVE_DONE = "save: done"
    EVICT_ROWS = "evict: rows gone, blobs still there"
    EVICT_DONE = "evict: blobs gone"
    SWEEP_LOOKED = "sweep: garbage found, still there"
    COMPACT_BEGUN = "compact: next generation begun"
    COMPACT_COPIED = "compact: a batch copied"
    COMPACT_COMPLETE = "compact: next generation complete and synced"
    COMPACT_SWITCHED = "compact: switched, old generation still there"
    COMPACT_OLD_GONE = "compact: old generation gone, index not shrunk"
    COMPACT_DONE = "compact: done"
    MIGRATE_LOCKED = "migrate: lock taken alone"
    MIGRATE_CHANGED = "migrate: tables changed, not committed"
    MIGRATE_COMMITTED = "migrate: committed, lock still held alone"
    RECOVER_BEGUN = "recover: damage found, nothing changed"
    RECOVER_INDEX = "recover: new index complete, damaged one still in its place"
    RECOVER_ROWS = "recover: rows removed, blobs of the old generation still there"


on_step: Callable[[Step], None] | None = None
"""Called at every step, in the thread that has reached it."""


def reached(step: Step) -> None:
    """Say that a step has been done."""
    if on_step is not None:
        on_step(step)
