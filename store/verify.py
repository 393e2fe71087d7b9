"""Trust nothing that was read from disk: the one border that every blob crosses before it is used."""

from kvkeep.store import codec, frame
from kvkeep.store.entry import Entry
from kvkeep.store.errors import HashMismatch, IntegrityError, MissingBlob
from kvkeep.store.frame import Bytes, FrameHeader, Kind
from kvkeep.store.hashing import blob_id, extend
from kvkeep.store.nodes import Node


def verified(value: memoryview | None, entry: Entry) -> tuple[FrameHeader, Bytes]:
    """Header and payload of an entry's blob, after everything about it has been checked.

    The blob is bound to the row's tokens both ways: the row's key must be the hash of its parent and tokens, and the
    frame must carry the same key. SQLite has no page checksums, so a flipped token or pointer in a row is found here.

    Raises:
        MissingBlob: there is no such blob.
        HashMismatch, BadFrame: it isn't what the row says.
    """
    if value is None:
        raise MissingBlob(f"blob {entry.blob.hex()[:16]} of the entry at position {_position(entry)} is missing")
    if value.nbytes != entry.stored_bytes:
        raise HashMismatch(f"blob {entry.blob.hex()[:16]} has {value.nbytes} bytes, its row says {entry.stored_bytes}")
    plain = codec.decode(value, expected=entry.plain_bytes)
    if blob_id(plain) != entry.blob:
        raise HashMismatch(f"the bytes of blob {entry.blob.hex()[:16]} don't hash to its name")
    header, payload = frame.unpack(plain)
    if not _belongs(header, entry):
        raise HashMismatch(f"blob {entry.blob.hex()[:16]} belongs to another entry than the row at position {_position(entry)}")
    if isinstance(entry, Node) and extend(entry.parent, entry.tokens) != entry.key:
        raise HashMismatch(f"the row at position {entry.start} doesn't hash to its key: its tokens or its parent are damaged")
    return header, payload


def is_sound(value: memoryview | None, entry: Entry) -> bool:
    """Whether an entry's blob verifies."""
    try:
        verified(value, entry)
    except IntegrityError:
        return False
    return True


def _belongs(header: FrameHeader, entry: Entry) -> bool:
    """Whether a frame is the one that a row speaks of."""
    if isinstance(entry, Node):
        # The number of tokens too: `tokens` of a row that claims more than its path has are all of the path.
        return (header.kind, header.key, header.parent, header.start, header.n_tokens, header.tokens) == (
            Kind.BLOCK,
            entry.key,
            entry.parent,
            entry.start,
            entry.n_tokens,
            entry.tokens,
        )
    same = (header.kind, header.key, header.start, header.n_tokens) == (entry.kind, entry.prefix, 0, entry.pos)
    return same and header.tokens.endswith(entry.path)


def _position(entry: Entry) -> int:
    return entry.start if isinstance(entry, Node) else entry.pos
