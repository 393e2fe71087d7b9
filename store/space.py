"""How many bytes may be used: the budget of a root, how it is divided, and what is left to others on the disk.

    budget = blobs (LMDB's map) + index (SQLite's file) + its write-ahead log + small things

Each part has a bound that its library keeps by itself: the size of the map, `max_page_count`, and a log that is emptied
before it reaches its own. So the sum holds whatever is in them, also while readers hang.
"""

import shutil
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import SupportsIndex

from kvkeep.store.errors import UsageError


class DefaultCapacity(int):
    """A number of bytes that nobody has asked for: it never replaces a budget that a root remembers."""


DEFAULT_CAPACITY = DefaultCapacity(4 << 30)
# Below this the index's share leaves next to nothing for blobs.
MIN_CAPACITY = 16 << 20
# The largest file of ext4 has 16 TiB, and the map is one file.
MAX_CAPACITY = 8 << 40

# The index's share of the budget with its log: about 1 KB a block of tens of KB and more.
INDEX_SHARE = 1 / 8
MIN_INDEX_BYTES = 4 << 20
# The log's part of that.
LOG_SHARE = 1 / 4
MAX_LOG_BYTES = 16 << 20
# lock.mdb, SQLite's shared memory, lock files, and the folders themselves.
SMALL_THINGS = 256 << 10

# What one row costs the log at most: a page in each of seven B-trees, and some more where they split.
ROW_LOG_BYTES = 32 << 10

# Free disk that is left to others, unless somebody asks for another number.
RESERVE_SHARE = 0.05
MAX_RESERVE = 10 << 30


@dataclass(frozen=True, slots=True)
class Space:
    """How a budget is divided.

    Attributes:
        capacity_bytes: the budget of the root.
    """

    capacity_bytes: int

    @property
    def _index_share(self) -> int:
        return max(MIN_INDEX_BYTES, int(self.capacity_bytes * INDEX_SHARE))

    @property
    def map_bytes(self) -> int:
        """The largest size of the blobs' file."""
        return self.capacity_bytes - self._index_share - SMALL_THINGS

    @property
    def log_bytes(self) -> int:
        """The largest size of the index's write-ahead log."""
        return min(MAX_LOG_BYTES, int(self._index_share * LOG_SHARE))

    @property
    def index_bytes(self) -> int:
        """The largest size of the index's file."""
        return self._index_share - self.log_bytes

    @property
    def rows_at_once(self) -> int:
        """Rows that one transaction may change: it must fit into half of the log, behind what is in the other half."""
        return max(1, self.log_bytes // 2 // ROW_LOG_BYTES)


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that a root is on. All in bytes."""

    total: int
    free: int

    @classmethod
    def of(cls, path: Path) -> "Disk":
        """As it is now; free is what an ordinary user may take."""
        found = shutil.disk_usage(path)
        return cls(found.total, found.free)

    @property
    def default_reserve(self) -> int:
        """The smaller of 5 % of the disk and 10 GiB."""
        return min(MAX_RESERVE, int(self.total * RESERVE_SHARE))

    def room(self, reserve_bytes: int | None) -> int:
        """Bytes that may still be taken; negative if the reserve is touched already.

        Args:
            reserve_bytes: what is left to others; None for the default.
        """
        return self.free - (self.default_reserve if reserve_bytes is None else reserve_bytes)


def valid_capacity(capacity_bytes: SupportsIndex) -> int:
    """A byte budget that makes sense.

    Raises:
        UsageError: no whole number, too small, or too large.
    """
    value = _whole_number("capacity_bytes", capacity_bytes)
    if value > MAX_CAPACITY:
        raise UsageError(f"capacity_bytes is {value}; at most {MAX_CAPACITY} (8 TiB) are possible")
    if value < MIN_CAPACITY:
        raise UsageError(f"capacity_bytes is {value}; at least {MIN_CAPACITY} (16 MiB) are needed")
    return value


def valid_reserve(reserve_bytes: SupportsIndex) -> int:
    """A reserve that makes sense; 0 is none.

    Raises:
        UsageError: no whole number, negative, or beyond 64 bits.
    """
    return _bytes("reserve_bytes", reserve_bytes, "a number of bytes of free disk, from 0 on, is expected")


def valid_daily(daily_bytes: SupportsIndex) -> int:
    """A number of bytes a day that makes sense; 0 is as many as come.

    Raises:
        UsageError: no whole number, negative, or beyond 64 bits.
    """
    return _bytes("daily_bytes", daily_bytes, "a number of bytes a day is expected, or 0 for as many as come")


def _bytes(name: str, given: SupportsIndex, expected: str) -> int:
    value = _whole_number(name, given)
    if not 0 <= value < 1 << 63:
        raise UsageError(f"{name} is {value}; {expected}")
    return value


def _whole_number(name: str, given: SupportsIndex) -> int:
    try:
        # numpy's integers too; SQLite takes only Python's own.
        value = given if isinstance(given, int) else index(given)
    except TypeError as error:
        raise UsageError(f"{name} is a whole number of bytes, not {given!r}") from error
    if isinstance(value, bool):
        raise UsageError(f"{name} is a whole number of bytes, not {given!r}")
    return value
