"""Rows of `setting`: numbers that every process of a root must agree on."""

from sqlalchemy import Connection, bindparam, select
from sqlalchemy.dialects.sqlite import insert

from kvkeep.store.schema import setting
from kvkeep.store.space import MAX_CAPACITY, MIN_CAPACITY

CAPACITY_BYTES = "capacity_bytes"
"""The byte budget that was last asked for."""
GENERATION = "generation"
"""Which `blobs-N` counts."""
RESERVE_BYTES = "reserve_bytes"
"""Free disk that is left to others."""
LIFETIME_SECONDS = "lifetime_seconds"
"""How long an entry is kept that nobody uses; 0 is for ever."""
DAILY_BYTES = "daily_bytes"
"""How many bytes may be stored a day; 0 is as many as come."""
STORED_DAY = "stored_day"
"""The day, in days since 1970, to which the next one belongs."""
STORED_BYTES = "stored_bytes"
"""How many bytes were stored on that day."""

_FIND = select(setting.c.value).where(setting.c.name == bindparam("wanted"))


def find(connection: Connection, name: str) -> int | None:
    """What was put under this name, or None."""
    found: int | None = connection.execute(_FIND, {"wanted": name}).scalar()
    return found if isinstance(found, int) else None


def capacity(connection: Connection) -> int | None:
    """The budget that the root remembers, or None: nobody has asked for one, or the number is damaged."""
    known = find(connection, CAPACITY_BYTES)
    return known if known is not None and MIN_CAPACITY <= known <= MAX_CAPACITY else None


def put(connection: Connection, name: str, value: int) -> None:
    connection.execute(
        insert(setting).values(name=name, value=value).on_conflict_do_update(index_elements=["name"], set_={"value": value})
    )
