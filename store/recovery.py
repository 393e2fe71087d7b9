"""Making a damaged root work again. Only by whoever has it alone.

Nothing is adopted that isn't proven: every entry that comes through is verified against its own hashes before it is
used, as always. So rows may be saved from a damaged index one by one; what LMDB's own pages say can't be checked that
way, and a generation with damaged ones is given up as a whole.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Table, insert

from kvkeep.store import generations, namespaces, settings, wellformed
from kvkeep.store.engine import SUFFIXES, Connection, Index
from kvkeep.store.private import sync_folder
from kvkeep.store.rows import TABLES
from kvkeep.store.schema import metadata
from kvkeep.store.space import Space
from kvkeep.store.steps import Step, reached

_NEW = ".new"
_Row = dict[str, Any]


def remove_unfinished(index: Path) -> None:
    """Delete what a rebuilding that was killed has left."""
    for suffix in SUFFIXES:
        index.with_name(index.name + _NEW + suffix).unlink(missing_ok=True)


def rebuilt_index(path: Path, space: Space) -> Index:
    """A new index in the place of a damaged one, with every row of it that can still be read.

    Made beside it: a kill leaves the damaged one where it is, and the next open begins anew.
    """
    reached(Step.RECOVER_BEGUN)
    remove_unfinished(path)
    beside = path.with_name(path.name + _NEW)
    index = Index(beside, space)
    try:
        index.upgrade()
        for table in metadata.sorted_tables:
            _copy(index, table, _readable(path, table))
        mend(index)
        index.empty_log()
    finally:
        # The last one to close moves the rest of the log into the file, and removes it.
        index.close()
    sync_folder(path.parent)
    reached(Step.RECOVER_INDEX)
    # A log belongs to its database; the damaged one's would be taken for the new one's.
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.replace(beside, path)
    sync_folder(path.parent)
    remove_unfinished(path)
    return Index(path, space)


def _copy(index: Index, table: Table, rows: Iterator[_Row]) -> None:
    """Insert rows, in transactions of a bounded size. One that breaks a rule of its table is left out."""
    with index.read() as connection:
        known = set(namespaces.ids(connection).values())
    # A foreign key that points nowhere is the one rule that can't be ignored by the statement.
    fitting = (row for row in rows if row.get("namespace_id", None) in known or "namespace_id" not in row)
    while batch := list(islice(fitting, index.space.rows_at_once)):
        with index.write() as connection:
            connection.execute(insert(table).prefix_with("OR IGNORE"), batch)


def _readable(damaged: Path, table: Table) -> Iterator[_Row]:
    """Rows of a damaged database, from both ends up to where it can't be read."""
    names = [column.name for column in table.columns]
    # With the table's name before it, because SQLite takes a quoted name that is no column for a text.
    columns = ", ".join(f'"{table.name}"."{name}"' for name in names)
    with closing(sqlite3.connect(f"{damaged.as_uri()}?mode=ro", uri=True)) as connection:
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        seen: set[Any] = set()
        for order in ("ASC", "DESC"):
            # An error is as far as it can be read from this end.
            with suppress(sqlite3.Error, UnicodeDecodeError):
                for number, *values in connection.execute(
                    f'SELECT rowid, {columns} FROM "{table.name}" ORDER BY rowid {order}'
                ):
                    if number in seen:
                        break
                    seen.add(number)
                    yield dict(zip(names, values, strict=True))


def mend(index: Index) -> int:
    """Remove rows whose values can't be. Returns how many."""
    with index.write() as connection:
        return wellformed.remove_others(connection)


def give_up_blobs(index: Index, root: Path, generation: int) -> int:
    """Begin a new generation without any blob. Returns its number."""
    reached(Step.RECOVER_BEGUN)
    following = max([generation, *generations.present(root)]) + 1
    with index.write() as connection:
        forget_entries(connection)
        settings.put(connection, settings.GENERATION, following)
    reached(Step.RECOVER_ROWS)
    generations.remove_leftovers(root, following)
    index.empty_log()
    return following


def forget_entries(connection: Connection) -> None:
    """Remove every row that names a blob. Without a condition SQLite frees the pages and reads none of them."""
    for table in TABLES:
        connection.execute(table.delete())
