"""Rows of `checkpoint`: states that hold for exactly one position. Key: (seq_id, pos, prefix hash)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, select

from kvkeep.store.frame import Kind
from kvkeep.store.hashing import BlobId, PrefixHash
from kvkeep.store.schema import MANY, checkpoint


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """A checkpoint to be added.

    Attributes:
        kind: what the payload is.
        seq_id: the sequence that it was taken from.
        pos: tokens before it.
        prefix: prefix hash of all `pos` tokens.
        anchor: prefix hash at the block border at or below `pos`.
        path: tokens from the anchor to `pos`, little-endian int32; empty on a border.
        blob: the frame that holds it.
        stored_bytes, plain_bytes: bytes of the stored value and of the plain frame.
    """

    kind: Kind
    seq_id: int
    pos: int
    prefix: PrefixHash
    anchor: PrefixHash
    path: bytes
    blob: BlobId
    stored_bytes: int
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint(NewCheckpoint):
    """A checkpoint as the index holds it."""

    id: int
    namespace_id: int
    used: float


_FIELDS = (
    checkpoint.c.kind,
    checkpoint.c.seq_id,
    checkpoint.c.pos,
    checkpoint.c.prefix,
    checkpoint.c.anchor,
    checkpoint.c.path,
    checkpoint.c.blob,
    checkpoint.c.stored_bytes,
    checkpoint.c.plain_bytes,
    checkpoint.c.id,
    checkpoint.c.namespace_id,
    checkpoint.c.used,
)
_BY_ANCHORS = (
    select(*_FIELDS)
    .where(checkpoint.c.anchor.in_(bindparam("anchors", expanding=True)), checkpoint.c.seq_id == bindparam("seq"))
    .order_by(checkpoint.c.pos.desc())
)


def by_anchors(connection: Connection, anchors: Sequence[PrefixHash], seq_id: int) -> list[Checkpoint]:
    """Checkpoints of a sequence at any of these block borders, highest position first."""
    found: list[Checkpoint] = []
    for first in range(0, len(anchors), MANY):
        rows = connection.execute(_BY_ANCHORS, {"anchors": anchors[first : first + MANY], "seq": seq_id})
        found += [_checkpoint(row) for row in rows]
    return sorted(found, key=lambda point: point.pos, reverse=True)


def find(connection: Connection, kind: Kind, seq_id: int, pos: int, prefix: PrefixHash) -> Checkpoint | None:
    row = connection.execute(
        select(*_FIELDS).where(
            checkpoint.c.kind == kind, checkpoint.c.seq_id == seq_id, checkpoint.c.pos == pos, checkpoint.c.prefix == prefix
        )
    ).first()
    return _checkpoint(row) if row else None


def oldest(connection: Connection, count: int) -> list[Checkpoint]:
    """Least recently used first."""
    rows = connection.execute(select(*_FIELDS).order_by(checkpoint.c.used).limit(count))
    return [_checkpoint(row) for row in rows]


def every(connection: Connection) -> Iterable[Checkpoint]:
    for row in connection.execute(select(*_FIELDS).order_by(checkpoint.c.id)):
        yield _checkpoint(row)


def _checkpoint(row: Sequence[Any]) -> Checkpoint:
    # The kind stays the number that it is on disk: a flipped one is found when the blob is verified.
    return Checkpoint(*row)
