"""Rows of `window`: keys and values of the layers that need only the last positions, for the last tokens of a run.

They stand beside the nodes of the same tokens: a model with a sliding window needs all nodes below a position, and of
these rows only those that cover its window.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, select

from kvkeep.store.frame import TOKEN_BYTES
from kvkeep.store.hashing import BlobId, PrefixHash
from kvkeep.store.schema import in_pieces, window
from kvkeep.store.typed import typed


@dataclass(frozen=True, slots=True)
class NewWindow:
    """A row to be added.

    Attributes:
        key: prefix hash of all of `path` behind the anchor; that of the node, where `path` is a full block.
        anchor: prefix hash at the block border at or below its first token.
        path: tokens from the anchor through its last token, little-endian int32.
        start: position of its first token, which may lie behind the border.
        n_tokens: its own tokens, the last ones of `path`.
        blob: the frame that holds their keys and values.
        stored_bytes, plain_bytes: bytes of the stored value and of the plain frame.
    """

    key: PrefixHash
    anchor: PrefixHash
    path: bytes
    start: int
    n_tokens: int
    blob: BlobId
    stored_bytes: int
    plain_bytes: int

    @property
    def tokens(self) -> bytes:
        """Its own tokens."""
        return self.path[len(self.path) - self.n_tokens * TOKEN_BYTES :]


@dataclass(frozen=True, slots=True)
class Window(NewWindow):
    """A row as the index holds it."""

    id: int
    namespace_id: int
    used: float


_FIELDS = (
    window.c.key,
    window.c.anchor,
    window.c.path,
    window.c.start,
    window.c.n_tokens,
    window.c.blob,
    window.c.stored_bytes,
    window.c.plain_bytes,
    window.c.id,
    window.c.namespace_id,
    window.c.used,
)
_TYPES = (bytes, bytes, bytes, int, int, bytes, int, int, int, int, float)
_BY_KEYS = select(*_FIELDS).where(window.c.key.in_(bindparam("keys", expanding=True)))
_SLOTS = select(*_FIELDS).where(window.c.anchor.in_(bindparam("anchors", expanding=True)))
_OLDEST = select(*_FIELDS).order_by(window.c.used, window.c.start.desc()).limit(bindparam("count"))


def by_keys(connection: Connection, keys: Sequence[PrefixHash]) -> dict[PrefixHash, Window]:
    """Those of `keys` that are stored."""
    found: dict[PrefixHash, Window] = {}
    for piece in in_pieces(keys):
        for row in connection.execute(_BY_KEYS, {"keys": piece}):
            found[row.key] = _window(row)
    return found


def slots(connection: Connection, anchors: Sequence[PrefixHash]) -> list[Window]:
    """Every row at any of these anchors. There may be many where many chats part."""
    return [_window(row) for row in connection.execute(_SLOTS, {"anchors": anchors})]


def oldest(connection: Connection, count: int) -> list[Window]:
    """Least recently used first."""
    return [_window(row) for row in connection.execute(_OLDEST, {"count": count})]


def every(connection: Connection) -> Iterable[Window]:
    """All rows."""
    for row in connection.execute(select(*_FIELDS).order_by(window.c.id)):
        yield _window(row)


def _window(row: Sequence[Any]) -> Window:
    return Window(*typed(row, _TYPES, "window"))
