"""What SQLite says, and what it is to us."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import exc

from kvkeep.store.errors import DamagedFile, DiskFull, KvkeepError, NotARoot, StoreError, StoreLocked

# Looked for in its message: the driver's classes are too coarse.
_MEANINGS: tuple[tuple[str, type[KvkeepError]], ...] = (
    ("database is locked", StoreLocked),
    # Its share of the budget may be used up as well, see `max_page_count`; SQLite doesn't tell the two apart.
    ("disk is full", DiskFull),
    ("disk I/O error", DiskFull),
    ("file is not a database", DamagedFile),
    ("malformed", DamagedFile),
    # Writers look first, under a lock: what is in the way and can't be seen stands in a damaged B-tree.
    ("constraint failed", DamagedFile),
    ("Could not decode to UTF-8", DamagedFile),
    ("no such table", DamagedFile),
    ("no such column", DamagedFile),
    ("readonly database", NotARoot),
    # No folder, no rights, or no room for the log; SQLite doesn't say which.
    ("unable to open database file", StoreError),
)


@contextmanager
def translated() -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except exc.SQLAlchemyError as error:
        raise translation(str(getattr(error, "orig", error))) from error
    except UnicodeDecodeError as error:
        # A text that is none, where the driver doesn't expect it: in the schema, or in a message about it.
        raise DamagedFile(f"the index failed: {error}") from error


def translation(said: str) -> KvkeepError:
    """An error of ours for what SQLite says."""
    kind = next((kind for sign, kind in _MEANINGS if sign in said), StoreError)
    return kind(f"the index failed: {said}")
