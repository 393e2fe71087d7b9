"""Beginnings of prompts whose states weren't stored, as rows of `setting`: one that is met again is worth storing.

Whichever process meets it: many programs are started for each question. Kept as short hashes, the newest few of each model.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from kvkeep.store.schema import setting

MAX_REMEMBERED = 256
_PREFIX = "left_out."


class Beginning(NamedTuple):
    """The first tokens of a prompt.

    Attributes:
        length: how many.
        digest: 8 bytes of their hash.
    """

    length: int
    digest: bytes


def of(connection: Connection, namespace_id: int) -> list[Beginning]:
    """Those of one model, the newest first."""
    return [found for name in _names(connection, namespace_id) if (found := _parsed(name)) is not None]


def add(connection: Connection, namespace_id: int, beginning: Beginning) -> None:
    """Remember one. The oldest are forgotten where there are too many."""
    name = f"{_prefix(namespace_id)}{beginning.length}.{beginning.digest.hex()}"
    # Nanoseconds: many a program asks twice within a second.
    row = {"name": name, "value": time.time_ns()}
    connection.execute(insert(setting).values(row).on_conflict_do_update(index_elements=["name"], set_=row))
    _remove(connection, _names(connection, namespace_id)[MAX_REMEMBERED:])


def clear(connection: Connection, namespace_id: int) -> None:
    """Forget those of one model."""
    _remove(connection, _names(connection, namespace_id))


def _prefix(namespace_id: int) -> str:
    return f"{_PREFIX}{namespace_id}."


def _names(connection: Connection, namespace_id: int) -> list[str]:
    ours = setting.c.name.startswith(_prefix(namespace_id), autoescape=True)
    rows = connection.execute(select(setting.c.name).where(ours).order_by(setting.c.value.desc()))
    return [name for (name,) in rows if isinstance(name, str)]


def _remove(connection: Connection, names: Sequence[str]) -> None:
    if names:
        connection.execute(delete(setting).where(setting.c.name.in_(names)))


def _parsed(name: str) -> Beginning | None:
    """None if it is damaged."""
    try:
        length, digest = name.split(".")[2:]
        found = Beginning(int(length), bytes.fromhex(digest))
    except ValueError:
        return None
    return found if found.length > 0 else None
