"""Rows of `checkpoint`: states that hold for exactly one position. Key: (seq_id, pos, prefix hash)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, select

from kvkeep.store.frame import TOKEN_BYTES, Kind
from kvkeep.store.hashing import BlobId, PrefixHash
from kvkeep.store.schema import checkpoint, in_pieces
from kvkeep.store.typed import typed


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
_TYPES = (int, int, int, bytes, bytes, bytes, bytes, int, int, int, int, float)
_ANCHORS = (
    select(checkpoint.c.anchor)
    .where(checkpoint.c.anchor.in_(bindparam("anchors", expanding=True)), checkpoint.c.seq_id == bindparam("seq"))
    .distinct()
)
_ALL_AT = select(*_FIELDS).where(checkpoint.c.anchor == bindparam("anchor"))
_AT = select(*_FIELDS).where(checkpoint.c.anchor == bindparam("anchor"), checkpoint.c.seq_id == bindparam("seq"))
_DEEPEST = _AT.where(checkpoint.c.path <= bindparam("path")).order_by(checkpoint.c.path.desc(), checkpoint.c.id).limit(1)
_SAME_PATH = _AT.where(checkpoint.c.path == bindparam("path")).order_by(checkpoint.c.id)
_FIND = select(*_FIELDS).where(
    checkpoint.c.kind == bindparam("kind"),
    checkpoint.c.seq_id == bindparam("seq"),
    checkpoint.c.pos == bindparam("pos"),
    checkpoint.c.prefix == bindparam("prefix"),
)
_OLDEST = select(*_FIELDS).order_by(checkpoint.c.used, checkpoint.c.pos.desc()).limit(bindparam("count"))


def anchors(connection: Connection, borders: Sequence[PrefixHash], seq_id: int) -> set[PrefixHash]:
    """Those of the block borders behind which this sequence has checkpoints."""
    found: set[PrefixHash] = set()
    for piece in in_pieces(borders):
        rows = connection.execute(_ANCHORS, {"anchors": piece, "seq": seq_id})
        found.update(PrefixHash(anchor) for (anchor,) in rows)
    return found


def at(connection: Connection, anchor: PrefixHash) -> list[Checkpoint]:
    """Every checkpoint behind a block border, of any sequence."""
    return [_checkpoint(row) for row in connection.execute(_ALL_AT, {"anchor": anchor})]


def along(connection: Connection, anchor: PrefixHash, rest: bytes, seq_id: int) -> Iterator[Checkpoint]:
    """Checkpoints whose paths are a beginning of `rest`, the deepest first.

    However many chats part at this anchor: all beginnings of a string stand below it in byte order, and from any other
    string that is met between them one can jump to what the two have in common.
    """
    values: dict[str, Any] = {"anchor": anchor, "seq": seq_id, "path": rest}
    while (row := connection.execute(_DEEPEST, values).first()) is not None:
        path: bytes = row.path
        if rest.startswith(path):
            for same in connection.execute(_SAME_PATH, values | {"path": path}):
                yield _checkpoint(same)
            if not path:
                return
            values["path"] = path[:-TOKEN_BYTES]
        else:
            common = next(i for i, (mine, theirs) in enumerate(zip(path, rest, strict=False)) if mine != theirs)
            values["path"] = rest[: common // TOKEN_BYTES * TOKEN_BYTES]


def find(connection: Connection, kind: Kind, seq_id: int, pos: int, prefix: PrefixHash) -> Checkpoint | None:
    row = connection.execute(_FIND, {"kind": kind, "seq": seq_id, "pos": pos, "prefix": prefix}).first()
    return _checkpoint(row) if row else None


def oldest(connection: Connection, count: int) -> list[Checkpoint]:
    """Least recently used first."""
    return [_checkpoint(row) for row in connection.execute(_OLDEST, {"count": count})]


def every(connection: Connection) -> Iterable[Checkpoint]:
    for row in connection.execute(select(*_FIELDS).order_by(checkpoint.c.id)):
        yield _checkpoint(row)


def _checkpoint(row: Sequence[Any]) -> Checkpoint:
    # The kind stays the number that it is on disk: a flipped one is found when the blob is verified.
    return Checkpoint(*typed(row, _TYPES, "checkpoint"))
