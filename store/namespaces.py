"""Rows of `namespace`: one fingerprint each, with what was measured for it."""

import json
import time
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, Table, func, insert, select, update

from kvkeep.store.errors import DamagedFile
from kvkeep.store.hashing import Fingerprint
from kvkeep.store.schema import checkpoint, namespace, node, window
from kvkeep.store.typed import typed


@dataclass(frozen=True, slots=True)
class Namespace:
    """States that may stand in for each other.

    Attributes:
        id: row id.
        fingerprint: see `kvkeep.cache.fingerprint`.
        label: the model's own name, for people.
        block_tokens: tokens of one block, fixed for the namespace's life.
        prefill_rate: tokens a second, as last measured; None before the first measurement.
        restore_rate: bytes a second, likewise.
    """

    id: int
    fingerprint: Fingerprint
    label: str
    block_tokens: int
    prefill_rate: float | None
    restore_rate: float | None


@dataclass(frozen=True, slots=True)
class Usage:
    """What one namespace holds. Bytes are stored (compressed) and plain ones."""

    fingerprint: Fingerprint
    label: str
    ingredients: dict[str, str]
    blocks: int
    tails: int
    checkpoints: int
    windows: int
    tokens: int
    stored_bytes: int
    plain_bytes: int
    created: float
    used: float


def find(connection: Connection, fingerprint: Fingerprint) -> Namespace | None:
    row = connection.execute(select(namespace).where(namespace.c.fingerprint == fingerprint)).mappings().first()
    return _namespace(row) if row else None


def add(
    connection: Connection, fingerprint: Fingerprint, label: str, ingredients: dict[str, str], block_tokens: int
) -> Namespace:
    """The namespace of this fingerprint, created if missing."""
    found = find(connection, fingerprint)
    if found is not None:
        return found
    now = time.time()
    connection.execute(
        insert(namespace).values(
            fingerprint=fingerprint,
            label=label,
            ingredients=json.dumps(ingredients),
            block_tokens=block_tokens,
            created=now,
            used=now,
        )
    )
    created = find(connection, fingerprint)
    assert created is not None
    return created


def measured(connection: Connection, space: Namespace, prefill_rate: float | None, restore_rate: float | None) -> None:
    """Remember how fast decoding and restoring were, for the next process."""
    values: dict[str, float] = {"used": time.time()}
    if prefill_rate is not None:
        values["prefill_rate"] = prefill_rate
    if restore_rate is not None:
        values["restore_rate"] = restore_rate
    connection.execute(update(namespace).where(namespace.c.id == space.id).values(values))


def touch(connection: Connection, ids: Collection[int], now: float) -> None:
    """Note that something of these namespaces was used."""
    connection.execute(update(namespace).where(namespace.c.id.in_(ids)).values(used=now))


def any_other(connection: Connection, fingerprint: Fingerprint) -> bool:
    """Whether the store holds anything of another namespace."""
    return any(
        connection.execute(select(table.c.id).join(namespace).where(namespace.c.fingerprint != fingerprint).limit(1)).first()
        for table in (node, window, checkpoint)
    )


def ids(connection: Connection) -> dict[bytes, int]:
    """Row ids of all namespaces, by fingerprint."""
    return {row.fingerprint: row.id for row in connection.execute(select(namespace.c.fingerprint, namespace.c.id))}


def every(connection: Connection) -> list[Namespace]:
    """All namespaces, most recently used first."""
    return [_namespace(row) for row in connection.execute(select(namespace).order_by(namespace.c.used.desc())).mappings()]


def ingredients(connection: Connection) -> dict[Fingerprint, dict[str, str]]:
    """What went into each fingerprint."""
    found = connection.execute(select(namespace.c.fingerprint, namespace.c.ingredients))
    return {Fingerprint(row.fingerprint): _ingredients(row.ingredients) for row in found}


def named(connection: Connection, text: str) -> list[Namespace]:
    """Namespaces whose label is `text`, or whose fingerprint begins with it, in hexadecimal digits."""
    wanted = text.lower()
    return [
        space for space in every(connection) if space.label == text or (wanted and space.fingerprint.hex().startswith(wanted))
    ]


def usage(connection: Connection) -> list[Usage]:
    """What every namespace holds, most recently used first."""
    rows = connection.execute(select(namespace).order_by(namespace.c.used.desc())).mappings()
    return [_usage(connection, row) for row in rows]


def _usage(connection: Connection, row: RowMapping) -> Usage:
    is_block = node.c.n_tokens == row["block_tokens"]
    nodes = connection.execute(
        select(
            func.count(),
            func.count().filter(is_block),
            func.coalesce(func.sum(node.c.n_tokens), 0),
            func.coalesce(func.sum(node.c.stored_bytes), 0),
            func.coalesce(func.sum(node.c.plain_bytes), 0),
        ).where(node.c.namespace_id == row["id"])
    ).one()
    points = _count(connection, checkpoint, row["id"])
    windows = _count(connection, window, row["id"])
    return Usage(
        fingerprint=Fingerprint(row["fingerprint"]),
        label=row["label"],
        ingredients=_ingredients(row["ingredients"]),
        blocks=int(nodes[1]),
        tails=int(nodes[0] - nodes[1]),
        checkpoints=int(points[0]),
        windows=int(windows[0]),
        tokens=int(nodes[2]),
        stored_bytes=int(nodes[3] + points[1] + windows[1]),
        plain_bytes=int(nodes[4] + points[2] + windows[2]),
        created=row["created"],
        used=row["used"],
    )


def _ingredients(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError) as error:
        raise DamagedFile(f"a namespace's ingredients are no JSON: {error}") from error
    if not isinstance(found, dict):
        raise DamagedFile(f"a namespace's ingredients are no object, but {type(found).__name__}")
    return {str(name): str(value) for name, value in found.items()}


def _count(connection: Connection, table: Table, namespace_id: int) -> tuple[int, int, int]:
    """Rows, stored bytes and plain bytes of a namespace in a table."""
    found = connection.execute(
        select(
            func.count(), func.coalesce(func.sum(table.c.stored_bytes), 0), func.coalesce(func.sum(table.c.plain_bytes), 0)
        ).where(table.c.namespace_id == namespace_id)
    ).one()
    return int(found[0]), int(found[1]), int(found[2])


def _namespace(row: RowMapping) -> Namespace:
    identifier, fingerprint, label, block_tokens = typed(
        [row[name] for name in ("id", "fingerprint", "label", "block_tokens")], (int, bytes, str, int), "namespace"
    )
    if block_tokens < 1:
        raise DamagedFile(f"a namespace can't have blocks of {block_tokens} tokens: its row is damaged")
    rates = (row[name] if isinstance(row[name], float) else None for name in ("prefill_rate", "restore_rate"))
    return Namespace(identifier, Fingerprint(fingerprint), label, block_tokens, *rates)
