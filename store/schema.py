"""The tables of the index, as this version uses them. Created and changed by Alembic only (`kvkeep.migrations`)."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from sqlalchemy import (
    REAL,
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

# The revision that these tables belong to. Alembic revisions are named after the release that brought them. Written
# here too, so that opening an up-to-date root needn't import alembic; a test compares the two.
REVISION = "0.3.0"

# SQLite allows 32,766 variables in one statement; longer lists are asked for in pieces of this.
MANY = 10_000

_T = TypeVar("_T")


def in_pieces(items: Sequence[_T], length: int = MANY) -> Iterator[Sequence[_T]]:
    """A long list in pieces, by default of a length that SQLite takes in one statement."""
    for first in range(0, len(items), length):
        yield items[first : first + length]


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

setting = Table(
    "setting",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
    comment="budget and the like; the last explicit argument wins",
)

namespace = Table(
    "namespace",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("fingerprint", LargeBinary(32), nullable=False, unique=True),
    Column("label", Text, nullable=False, comment="the model's own name, for people"),
    Column("ingredients", Text, nullable=False, comment="JSON of what went into the fingerprint, for people"),
    Column("block_tokens", Integer, nullable=False),
    Column("prefill_rate", REAL, comment="tokens a second that this model decodes here, as last measured"),
    Column("restore_rate", REAL, comment="bytes a second that restoring reaches here, as last measured"),
    Column("created", REAL, nullable=False),
    Column("used", REAL, nullable=False),
)

node = Table(
    "node",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("namespace_id", ForeignKey("namespace.id"), nullable=False),
    Column("key", LargeBinary(32), nullable=False, unique=True, comment="prefix hash after the last token"),
    Column("parent", LargeBinary(32), nullable=False, comment="prefix hash before the first token"),
    Column("anchor", LargeBinary(32), nullable=False, comment="prefix hash at the block border at or below the first token"),
    Column("path", LargeBinary, nullable=False, comment="tokens from the anchor through the last token, int32 little-endian"),
    Column("start", Integer, nullable=False, comment="position of the first token"),
    Column("n_tokens", Integer, nullable=False),
    Column("blob", LargeBinary(32), nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("plain_bytes", BigInteger, nullable=False),
    Column("created", REAL, nullable=False),
    Column("used", REAL, nullable=False),
    Column("hits", Integer, nullable=False, server_default="0"),
    # In byte order the entry that shares the longest prefix with a given path is one of its two neighbours, so this
    # index finds the best partial match in O(log n), however many chats part at this anchor.
    Index(None, "anchor", "path"),
    Index(None, "parent"),
    Index(None, "used"),
    Index(None, "blob"),
    Index(None, "namespace_id"),
)

window = Table(
    "window",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("namespace_id", ForeignKey("namespace.id"), nullable=False),
    Column("key", LargeBinary(32), nullable=False, unique=True, comment="prefix hash after the last token, from the anchor"),
    Column("anchor", LargeBinary(32), nullable=False, comment="prefix hash at the block border at or below the first token"),
    Column("path", LargeBinary, nullable=False, comment="tokens from the anchor through the last token, int32 little-endian"),
    Column("start", Integer, nullable=False, comment="position of the first token that it has"),
    Column("n_tokens", Integer, nullable=False, comment="the last ones of path"),
    Column("blob", LargeBinary(32), nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("plain_bytes", BigInteger, nullable=False),
    Column("created", REAL, nullable=False),
    Column("used", REAL, nullable=False),
    Column("hits", Integer, nullable=False, server_default="0"),
    Index(None, "anchor", "path"),
    Index(None, "used"),
    Index(None, "blob"),
    Index(None, "namespace_id"),
    comment="keys and values of the layers that need only the last positions; beside the nodes of the same tokens",
)

checkpoint = Table(
    "checkpoint",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("namespace_id", ForeignKey("namespace.id"), nullable=False),
    Column("kind", Integer, nullable=False, comment="as in the frame"),
    Column("seq_id", Integer, nullable=False),
    Column("pos", Integer, nullable=False, comment="tokens before it; the state holds for exactly this position"),
    Column("prefix", LargeBinary(32), nullable=False, comment="prefix hash of all pos tokens"),
    Column("anchor", LargeBinary(32), nullable=False, comment="prefix hash at the block border at or below pos"),
    Column("path", LargeBinary, nullable=False, comment="tokens from the anchor to pos"),
    Column("blob", LargeBinary(32), nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("plain_bytes", BigInteger, nullable=False),
    Column("created", REAL, nullable=False),
    Column("used", REAL, nullable=False),
    Column("hits", Integer, nullable=False, server_default="0"),
    UniqueConstraint("seq_id", "pos", "prefix", "kind"),
    # Those taken on a given path are found one after the other, from the deepest up, as nodes are.
    Index(None, "anchor", "path"),
    Index(None, "used"),
    Index(None, "blob"),
    Index(None, "namespace_id"),
)

pin = Table(
    "pin",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("namespace_id", ForeignKey("namespace.id"), nullable=False),
    Column("tokens", LargeBinary, nullable=False, comment="the prefix, int32 little-endian"),
    Column("created", REAL, nullable=False),
    Index(None, "namespace_id"),
    comment="beginnings of prompts that are never evicted, whether or not they are stored",
)

file_digest = Table(
    "file_digest",
    metadata,
    Column("path", Text, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("ctime_ns", BigInteger, nullable=False),
    Column("inode", BigInteger, nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    comment="BLAKE3 of model files, so that gigabytes are hashed once and not at every start",
)
