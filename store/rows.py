"""What rows of `node`, `window` and `checkpoint` have in common: a namespace, a blob, sizes and recency."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Table, bindparam, delete, func, insert, select, update

from kvkeep.store import checkpoints, nodes, windows
from kvkeep.store.checkpoints import Checkpoint, NewCheckpoint
from kvkeep.store.entry import Entry
from kvkeep.store.frame import Kind
from kvkeep.store.hashing import BlobId
from kvkeep.store.nodes import NewNode, Node
from kvkeep.store.schema import checkpoint, in_pieces, node, window
from kvkeep.store.windows import NewWindow, Window

NewRow = NewNode | NewWindow | NewCheckpoint

TABLES: tuple[Table, ...] = (node, window, checkpoint)
_TABLE_OF: dict[type, Table] = {
    NewNode: node,
    Node: node,
    NewWindow: window,
    Window: window,
    NewCheckpoint: checkpoint,
    Checkpoint: checkpoint,
}

# Built once: building a statement takes longer than running it.
_IS_THERE = {
    kind: select(table.c.id).where(table.c.id == bindparam("row"), table.c.blob == bindparam("blob"))
    for kind, table in _TABLE_OF.items()
}
_TOUCH = {
    table.name: update(table)
    .where(table.c.id == bindparam("row"))
    .values(used=bindparam("now"), hits=table.c.hits + bindparam("hit"))
    for table in TABLES
}


def add(connection: Connection, namespace_id: int, new: Iterable[NewRow]) -> None:
    """Insert rows; their fields are the columns."""
    now = time.time()
    values: dict[str, list[dict[str, Any]]] = {}
    for row in new:
        columns = asdict(row) | {"namespace_id": namespace_id, "created": now, "used": now}
        values.setdefault(table_of(row).name, []).append(columns)
    for table in TABLES:
        if table.name in values:
            connection.execute(insert(table), values[table.name])


def tables_in_use(connection: Connection, namespace_id: int) -> set[str]:
    """Names of the tables in which a namespace has rows; of `checkpoint` only for recurrent tensors, not for whole states."""
    wanted = [table.c.namespace_id == namespace_id for table in TABLES]
    wanted[-1] &= checkpoint.c.kind == Kind.RECURRENT
    found = (
        (table.name, connection.execute(select(table.c.id).where(where).limit(1)).first())
        for table, where in zip(TABLES, wanted, strict=True)
    )
    return {name for name, row in found if row is not None}


def is_there(connection: Connection, entry: Entry) -> bool:
    """Whether the row still is as it was read: ids are used again, so the blob is compared too."""
    return connection.execute(_IS_THERE[type(entry)], {"row": entry.id, "blob": entry.blob}).first() is not None


def table_of(entry: Entry | NewRow) -> Table:
    """The table that an entry has, or will have, its row in."""
    return _TABLE_OF[type(entry)]


def remove(connection: Connection, entries: Sequence[Entry]) -> None:
    """Delete rows.

    A row that went meanwhile is passed over: SQLite has given its id to another one by now.
    """
    ids: dict[str, list[int]] = {table.name: [] for table in TABLES}
    for entry in entries:
        if is_there(connection, entry):
            ids[table_of(entry).name].append(entry.id)
    for table in TABLES:
        for piece in in_pieces(ids[table.name]):
            connection.execute(delete(table).where(table.c.id.in_(piece)))


def touch(connection: Connection, table: Table, used: Mapping[int, bool], now: float) -> None:
    """Refresh recency, and count a hit for the ids with True. Ids that are gone are passed over."""
    rows = [{"row": row, "now": now, "hit": int(hit)} for row, hit in used.items()]
    if rows:
        connection.execute(_TOUCH[table.name], rows)


def holds_any(connection: Connection, namespace_id: int) -> bool:
    """Whether anything is stored for this namespace."""
    return any(
        connection.execute(select(table.c.id).where(table.c.namespace_id == namespace_id).limit(1)).first() is not None
        for table in TABLES
    )


def named(connection: Connection, blobs: Sequence[BlobId]) -> set[BlobId]:
    """Those of `blobs` that some row still names."""
    found: set[BlobId] = set()
    for table in TABLES:
        for piece in in_pieces(blobs):
            found.update(BlobId(name) for (name,) in connection.execute(select(table.c.blob).where(table.c.blob.in_(piece))))
    return found


def all_named(connection: Connection) -> set[BlobId]:
    """Every blob that some row names."""
    return {BlobId(name) for table in TABLES for (name,) in connection.execute(select(table.c.blob))}


def stored_sizes(connection: Connection) -> dict[BlobId, int]:
    """Every blob that some row names, with the bytes of its value."""
    return {
        BlobId(name): int(size)
        for table in TABLES
        for name, size in connection.execute(select(table.c.blob, table.c.stored_bytes))
    }


def stored_since(connection: Connection, then: float) -> int:
    """Bytes of the values of all entries that were written since."""
    sums = (select(func.coalesce(func.sum(table.c.stored_bytes), 0)).where(table.c.created >= then) for table in TABLES)
    return sum(int(connection.execute(one).scalar_one()) for one in sums)


def hits(connection: Connection) -> dict[tuple[type, int], int]:
    """How often each entry was restored, by its type and id."""
    kinds = ((Node, node), (Window, window), (Checkpoint, checkpoint))
    return {(kind, row): count for kind, table in kinds for row, count in connection.execute(select(table.c.id, table.c.hits))}


def of(connection: Connection, namespace_id: int) -> list[Entry]:
    """Every entry of a namespace."""
    return [entry for entry in every(connection) if entry.namespace_id == namespace_id]


def every(connection: Connection) -> Iterator[Entry]:
    """Every entry."""
    yield from nodes.every(connection)
    yield from windows.every(connection)
    yield from checkpoints.every(connection)
