"""Rows of `pin`: beginnings of prompts that people want to keep, whether or not anybody uses them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from kvkeep.store.frame import TOKEN_BYTES
from kvkeep.store.schema import pin
from kvkeep.store.typed import typed


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix.

    Attributes:
        id: row id.
        namespace_id: whose tokens they are.
        tokens: the prefix, little-endian int32.
        created: when it was pinned, seconds since 1970.
    """

    id: int
    namespace_id: int
    tokens: bytes
    created: float

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


_FIELDS = (pin.c.id, pin.c.namespace_id, pin.c.tokens, pin.c.created)
_TYPES = (int, int, bytes, float)


def add(connection: Connection, namespace_id: int, tokens: bytes) -> bool:
    """Pin a prefix. False if it is pinned already."""
    if any(found.tokens == tokens for found in of(connection, namespace_id)):
        return False
    connection.execute(insert(pin).values(namespace_id=namespace_id, tokens=tokens, created=time.time()))
    return True


def remove(connection: Connection, pins: Sequence[Pin]) -> None:
    """Unpin."""
    connection.execute(delete(pin).where(pin.c.id.in_([found.id for found in pins])))


def of(connection: Connection, namespace_id: int) -> list[Pin]:
    """The pins of one namespace."""
    return [_pin(row) for row in connection.execute(select(*_FIELDS).where(pin.c.namespace_id == namespace_id))]


def every(connection: Connection) -> list[Pin]:
    """All pins, the oldest first."""
    return [_pin(row) for row in connection.execute(select(*_FIELDS).order_by(pin.c.id))]


def _pin(row: Sequence[Any]) -> Pin:
    return Pin(*typed(row, _TYPES, "pin"))
