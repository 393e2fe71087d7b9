"""Rows and blobs without tokens of any model: what the store's own tests put into it."""

from collections.abc import Sequence

import numpy as np

from kvkeep.store import codec, frame, namespaces
from kvkeep.store.checkpoints import NewCheckpoint
from kvkeep.store.frame import FrameHeader, Kind
from kvkeep.store.hashing import Fingerprint, PrefixHash, blob_id, extend, prefix_of
from kvkeep.store.namespaces import Namespace
from kvkeep.store.nodes import NewNode
from kvkeep.store.repository import Repository
from kvkeep.store.windows import NewWindow
from kvkeep.store.writing import NewEntry

FINGERPRINT = Fingerprint(bytes(range(32)))
OTHER_FINGERPRINT = Fingerprint(bytes(range(32, 64)))
ROOT = PrefixHash(FINGERPRINT)


def token_bytes(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def noise(count: int, seed: int = 0) -> bytes:
    """Bytes that no codec shrinks."""
    return np.random.default_rng(seed).bytes(count)


def block(
    tokens: Sequence[int],
    *,
    parent: PrefixHash = ROOT,
    start: int = 0,
    anchor: PrefixHash | None = None,
    before: Sequence[int] = (),
    payload: bytes = b"keys and values " * 16,
    layout: bytes = b"layout",
) -> NewEntry:
    """A node and its value.

    Args:
        tokens: its own tokens.
        parent: prefix hash before them.
        start: position of the first one.
        anchor: prefix hash at the border below, if it is a piece of a tail.
        before: tokens between the anchor and the first one.
        payload: what its frame holds.
        layout: how that is laid out.
    """
    own = token_bytes(tokens)
    key = extend(parent, own)
    plain, view = frame.allocate(FrameHeader(Kind.BLOCK, key, parent, start, own, layout), len(payload))
    view[:] = np.frombuffer(payload, np.uint8)
    value = codec.encode(plain)
    path = token_bytes(before) + own
    row = NewNode(key, parent, anchor or parent, path, start, len(tokens), blob_id(plain.data), len(value), plain.size)
    return NewEntry(row, value)


def chain_of(*runs: Sequence[int], payload: bytes = b"keys and values " * 16) -> list[NewEntry]:
    """Full blocks that follow each other from position 0 on."""
    entries: list[NewEntry] = []
    parent, start = ROOT, 0
    for run in runs:
        entry = block(run, parent=parent, start=start, payload=payload)
        entries.append(entry)
        parent, start = key_of(entry), start + len(run)
    return entries


def key_of(entry: NewEntry) -> PrefixHash:
    assert isinstance(entry.row, NewNode)
    return entry.row.key


def opaque(tokens: Sequence[int], payload: bytes = b"whole state " * 20, *, root: PrefixHash = ROOT) -> NewEntry:
    """A checkpoint behind `tokens`, in a namespace whose blocks are longer than that."""
    path = token_bytes(tokens)
    prefix = extend(root, path)
    plain, view = frame.allocate(FrameHeader(Kind.OPAQUE, prefix, root, 0, path, b""), len(payload))
    view[:] = np.frombuffer(payload, np.uint8)
    value = codec.encode(plain)
    row = NewCheckpoint(Kind.OPAQUE, 0, len(tokens), prefix, root, path, blob_id(plain.data), len(value), plain.size)
    return NewEntry(row, value)


def recurrent(
    tokens: Sequence[int],
    payload: bytes = b"tensors " * 20,
    *,
    anchor: PrefixHash = ROOT,
    border: int = 0,
    seq_id: int = 0,
) -> NewEntry:
    """A checkpoint of recurrent tensors, `tokens` behind the block border `anchor` at position `border`."""
    path = token_bytes(tokens)
    prefix = prefix_of(anchor, path)
    plain, view = frame.allocate(FrameHeader(Kind.RECURRENT, prefix, anchor, border, path, b"\4"), len(payload))
    view[:] = np.frombuffer(payload, np.uint8)
    value = codec.encode(plain)
    pos = border + len(tokens)
    row = NewCheckpoint(Kind.RECURRENT, seq_id, pos, prefix, anchor, path, blob_id(plain.data), len(value), plain.size)
    return NewEntry(row, value)


def windowed(
    tokens: Sequence[int],
    *,
    skip: int = 0,
    anchor: PrefixHash = ROOT,
    border: int = 0,
    payload: bytes = b"window " * 20,
) -> NewEntry:
    """A row of a window: `tokens` behind the block border `anchor` at position `border`, without the first `skip`."""
    path, own = token_bytes(tokens), token_bytes(tokens[skip:])
    key, start = extend(anchor, path), border + skip
    plain, view = frame.allocate(FrameHeader(Kind.WINDOW, key, anchor, start, own, b"layout"), len(payload))
    view[:] = np.frombuffer(payload, np.uint8)
    value = codec.encode(plain)
    row = NewWindow(key, anchor, path, start, len(tokens) - skip, blob_id(plain.data), len(value), plain.size)
    return NewEntry(row, value)


def add_namespace(repository: Repository, fingerprint: Fingerprint = FINGERPRINT, block_tokens: int = 4) -> Namespace:
    with repository.index.write() as connection:
        return namespaces.add(connection, fingerprint, "a model", {"n_layer": "2"}, block_tokens)


def store(repository: Repository, entries: Sequence[NewEntry], fingerprint: Fingerprint = FINGERPRINT) -> Namespace:
    """Put entries in, as a save does."""
    space = add_namespace(repository, fingerprint)
    with repository.writing() as writing:
        writing.add(space.id, entries)
    return space
