"""Rows of `setting`: numbers that every process of a root must agree on."""

from sqlalchemy import Connection, select
from sqlalchemy.dialects.sqlite import insert

from kvkeep.store.schema import setting

CAPACITY_BYTES = "capacity_bytes"
GENERATION = "generation"


def get(connection: Connection, name: str, default: int) -> int:
    found: int | None = connection.execute(select(setting.c.value).where(setting.c.name == name)).scalar()
    return default if found is None else found


def put(connection: Connection, name: str, value: int) -> None:
    connection.execute(
        insert(setting).values(name=name, value=value).on_conflict_do_update(index_elements=["name"], set_={"value": value})
    )
