"""Rows of `node`: the radix index. One row per stored run of tokens, a full block or a piece of a tail."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, exists, select, union_all

from kvkeep.store.frame import TOKEN_BYTES
from kvkeep.store.hashing import BlobId, PrefixHash
from kvkeep.store.schema import in_pieces, node
from kvkeep.store.typed import typed


@dataclass(frozen=True, slots=True)
class NewNode:
    """A node to be added.

    Attributes:
        key: prefix hash after its last token.
        parent: prefix hash before its first token.
        anchor: prefix hash at the block border at or below its first token.
        path: tokens from the anchor through its last token, little-endian int32. A full block's path is its tokens.
        start: position of its first token.
        n_tokens: its own tokens, the last ones of `path`.
        blob: the frame that holds its keys and values.
        stored_bytes, plain_bytes: bytes of the stored value and of the plain frame.
    """

    key: PrefixHash
    parent: PrefixHash
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
class Node(NewNode):
    """A node as the index holds it."""

    id: int
    namespace_id: int
    used: float


_FIELDS = (
    node.c.key,
    node.c.parent,
    node.c.anchor,
    node.c.path,
    node.c.start,
    node.c.n_tokens,
    node.c.blob,
    node.c.stored_bytes,
    node.c.plain_bytes,
    node.c.id,
    node.c.namespace_id,
    node.c.used,
)
_TYPES = (bytes, bytes, bytes, bytes, int, int, bytes, int, int, int, int, float)
# Statements are built once: building one costs as much as running it.
# As text, because SQLAlchemy takes half as long as SQLite to write out a list of a hundred keys, and a match waits for it.
_BY_KEYS = f"{select(*_FIELDS)} WHERE {node.c.key} IN "
_AT = select(*_FIELDS).where(node.c.anchor == bindparam("anchor"))
_BELOW = _AT.where(node.c.path <= bindparam("path")).order_by(node.c.path.desc()).limit(1)
_ABOVE = _AT.where(node.c.path > bindparam("path")).order_by(node.c.path).limit(1)
_NEIGHBOURS = union_all(_BELOW.subquery().select(), _ABOVE.subquery().select())
_SLOT = _AT.order_by(node.c.path)
_ANCHORS = select(node.c.anchor).where(node.c.anchor.in_(bindparam("anchors", expanding=True))).distinct()
_CHILD = (
    select(node.c.id).where(node.c.parent == bindparam("key"), node.c.id.not_in(bindparam("besides", expanding=True))).limit(1)
)
_child = node.alias("child")
_IS_LEAF = ~exists().where(_child.c.parent == node.c.key)
_OLD_LEAVES = select(*_FIELDS).where(_IS_LEAF).order_by(node.c.used, node.c.start.desc()).limit(bindparam("count"))


def by_keys(connection: Connection, keys: Sequence[PrefixHash]) -> dict[PrefixHash, Node]:
    """Those of `keys` that are stored."""
    found: dict[PrefixHash, Node] = {}
    for piece in in_pieces(keys):
        statement = f"{_BY_KEYS}({','.join('?' * len(piece))})"
        # All rows at once: one by one they cost more than the search.
        for row in connection.exec_driver_sql(statement, tuple(piece)).all():
            stored = _node(row)
            found[stored.key] = stored
    return found


def neighbours(connection: Connection, anchor: PrefixHash, path: bytes) -> list[Node]:
    """The nodes at this anchor just at or below `path` and just above it, in byte order.

    In an ordered set of strings the one that shares the longest prefix with a given string stands next to it, so one
    of these shares the most tokens with `path`.
    """
    return [_node(row) for row in connection.execute(_NEIGHBOURS, {"anchor": anchor, "path": path})]


def slot(connection: Connection, anchor: PrefixHash) -> list[Node]:
    """Every node at this anchor, in byte order of their paths."""
    return [_node(row) for row in connection.execute(_SLOT, {"anchor": anchor})]


def anchors(connection: Connection, borders: Sequence[PrefixHash]) -> set[PrefixHash]:
    """Those of the block borders behind which anything is stored."""
    found: set[PrefixHash] = set()
    for piece in in_pieces(borders):
        found.update(PrefixHash(anchor) for (anchor,) in connection.execute(_ANCHORS, {"anchors": piece}))
    return found


def has_children(connection: Connection, key: PrefixHash, besides: Sequence[int] = ()) -> bool:
    """Whether any node stands on this one, but for those with the ids `besides`."""
    return connection.execute(_CHILD, {"key": key, "besides": besides}).first() is not None


def oldest_leaves(connection: Connection, count: int) -> list[Node]:
    """Nodes on which no other stands, least recently used first."""
    return [_node(row) for row in connection.execute(_OLD_LEAVES, {"count": count})]


def every(connection: Connection) -> Iterable[Node]:
    """All nodes, parents before children."""
    for row in connection.execute(select(*_FIELDS).order_by(node.c.namespace_id, node.c.start)):
        yield _node(row)


def _node(row: Sequence[Any]) -> Node:
    return Node(*typed(row, _TYPES, "node"))
