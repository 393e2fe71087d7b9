"""What was done with a root since it was made, as rows of `setting`: every process adds to them.

In milliseconds and bytes, because settings are whole numbers.
"""

import time
from collections.abc import Mapping

from sqlalchemy import Connection, select
from sqlalchemy.dialects.sqlite import insert

from kvkeep.store.schema import setting

_PREFIX = "total."
_SINCE = f"{_PREFIX}since"


def add(connection: Connection, counts: Mapping[str, int]) -> None:
    """Add to the totals.

    Args:
        connection: a write transaction.
        counts: by how much each has grown; may be negative, and zero is nothing.
    """
    grown = [{"name": f"{_PREFIX}{name}", "value": count} for name, count in counts.items() if count]
    if not grown:
        return
    adding = insert(setting)
    more = {"value": setting.c.value + adding.excluded.value}
    connection.execute(adding.on_conflict_do_update(index_elements=["name"], set_=more), grown)
    began = insert(setting).values(name=_SINCE, value=int(time.time()))
    connection.execute(began.on_conflict_do_nothing(index_elements=["name"]))


def every(connection: Connection) -> dict[str, int]:
    """The totals, by name. `since` is when the first one was written, in seconds since 1970."""
    rows = connection.execute(
        select(setting.c.name, setting.c.value).where(setting.c.name.startswith(_PREFIX, autoescape=True))
    )
    return {name.removeprefix(_PREFIX): value for name, value in rows if isinstance(value, int)}
