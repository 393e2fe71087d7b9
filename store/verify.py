"""Trust nothing that was read from disk: the one border that every blob crosses before it is used."""

from kvkeep.store import codec, frame
from kvkeep.store.checkpoints import Checkpoint
from kvkeep.store.codec import Scratch
from kvkeep.store.entry import Entry
from kvkeep.store.errors import HashMismatch, IntegrityError, MissingBlob
from kvkeep.store.frame import TOKEN_BYTES, Bytes, FrameHeader, Kind
from kvkeep.store.hashing import PrefixHash, blob_id, extend, prefix_of
from kvkeep.store.nodes import Node
from kvkeep.store.windows import Window


def verified(value: memoryview | None, entry: Entry, scratch: Scratch | None = None) -> tuple[FrameHeader, Bytes]:
    """Header and payload of an entry's blob, after everything about it has been checked.

    The blob is bound to the row's tokens both ways: the row's key must be the hash of its parent and tokens, and the
    frame must carry the same key. SQLite has no page checksums, so a flipped token or pointer in a row is found here.

    Args:
        value: what is stored under the entry's blob.
        entry: the entry.
        scratch: see `kvkeep.store.codec.decode`; the payload is good only until its next use.

    Raises:
        MissingBlob: there is no such blob.
        HashMismatch, BadFrame: it isn't what the row says.
    """
    if value is None:
        raise MissingBlob(f"blob {entry.blob.hex()[:16]} of the entry at position {_position(entry)} is missing")
    if value.nbytes != entry.stored_bytes:
        raise HashMismatch(f"blob {entry.blob.hex()[:16]} has {value.nbytes} bytes, its row says {entry.stored_bytes}")
    plain = codec.decode(value, entry.plain_bytes, scratch)
    if blob_id(plain) != entry.blob:
        raise HashMismatch(f"the bytes of blob {entry.blob.hex()[:16]} don't hash to its name")
    header, payload = frame.unpack(plain)
    if not _belongs(header, entry):
        raise HashMismatch(f"blob {entry.blob.hex()[:16]} belongs to another entry than the row at position {_position(entry)}")
    if _key_of(entry) != _hashed(entry):
        raise HashMismatch(
            f"the row at position {_position(entry)} doesn't hash to its key: its tokens, or what it stands on, are damaged"
        )
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
    found = (header.kind, header.key, header.start, header.n_tokens)
    match entry:
        case Node():
            # The number of tokens too: `tokens` of a row that claims more than its path has are all of the path.
            wanted = (Kind.BLOCK, entry.key, entry.start, entry.n_tokens)
            return found == wanted and (header.parent, header.tokens) == (entry.parent, entry.tokens)
        case Window():
            wanted = (Kind.WINDOW, entry.key, entry.start, entry.n_tokens)
            return found == wanted and (header.parent, header.tokens) == (entry.anchor, entry.tokens)
    n_path = len(entry.path) // TOKEN_BYTES
    if entry.kind == Kind.RECURRENT:
        wanted = (Kind.RECURRENT, entry.prefix, entry.pos - n_path, n_path)
        return found == wanted and (header.parent, header.tokens) == (entry.anchor, entry.path)
    wanted = (Kind.OPAQUE, entry.prefix, 0, entry.pos)
    return entry.kind == Kind.OPAQUE and found == wanted and header.tokens.endswith(entry.path)


def _key_of(entry: Entry) -> PrefixHash:
    return entry.prefix if isinstance(entry, Checkpoint) else entry.key


def _hashed(entry: Entry) -> PrefixHash:
    """The key that a row's own tokens hash to."""
    if isinstance(entry, Node):
        return extend(entry.parent, entry.tokens)
    return prefix_of(entry.anchor, entry.path)


def _position(entry: Entry) -> int:
    return entry.pos if isinstance(entry, Checkpoint) else entry.start
