"""What values a row may have at all. SQLite has no page checksums: a flipped bit can turn a blob into a text, or nothing.

Values of the right type may be wrong, too; those are found when an entry is verified.
"""

from typing import Any

from sqlalchemy import (
    REAL,
    Column,
    ColumnElement,
    Connection,
    LargeBinary,
    Text,
    delete,
    false,
    func,
    not_,
    or_,
    select,
    update,
)

from kvkeep.store.generations import LAST
from kvkeep.store.rows import TABLES
from kvkeep.store.schema import metadata, namespace, pin, setting
from kvkeep.store.settings import GENERATION


def _has_wrong_value(column: Column[Any]) -> ColumnElement[bool]:
    """SQL that is true where a column's value can't be."""
    kind = func.typeof(column)
    match column.type:
        case LargeBinary(length=length):
            wrong = kind != "blob" if length is None else or_(kind != "blob", func.length(column) != length)
        case Text():
            wrong = kind != "text"
        case REAL():
            wrong = kind.not_in(["real", "integer"])
        case _:
            wrong = kind != "integer"
    return (wrong & (kind != "null")) if column.nullable else wrong


def remove_others(connection: Connection) -> int:
    """Remove rows with values that can't be, and entries of namespaces that are gone. Returns how many were removed."""
    removed = 0
    # Entries first, because they name namespaces.
    bad_spaces = select(namespace.c.id).where(
        or_(namespace.c.block_tokens < 1, *(_has_wrong_value(column) for column in namespace.columns))
    )
    for table in (*TABLES, pin):
        foreign = or_(table.c.namespace_id.in_(bad_spaces), table.c.namespace_id.not_in(select(namespace.c.id)))
        removed += connection.execute(delete(table).where(foreign)).rowcount
    for table in metadata.sorted_tables:
        wrong = or_(false(), *(_has_wrong_value(column) for column in table.columns))
        if table is namespace:
            wrong = or_(wrong, table.c.block_tokens < 1)
        removed += connection.execute(delete(table).where(wrong)).rowcount
    impossible = (setting.c.name == GENERATION) & not_(setting.c.value.between(1, LAST))
    removed += connection.execute(delete(setting).where(impossible)).rowcount
    # Only people read it.
    unreadable = func.json_valid(namespace.c.ingredients) == 0
    connection.execute(update(namespace).where(unreadable).values(ingredients="{}"))
    return removed
