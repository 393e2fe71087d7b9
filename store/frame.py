"""The plain frame: what a blob means, before it is compressed. Its BLAKE3 is the blob's name.

A frame says by itself which tokens it belongs to and how its payload is laid out, so a blob can be verified, and an
index rebuilt, without trusting a row. The byte table is in docs/FORMAT.md.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.store.errors import BadFrame
from kvkeep.store.hashing import DIGEST_BYTES, PrefixHash

# Written into every frame. Never change the meaning of a number that has been released: add another.
MAGIC = b"KVF1"
_HEADER = struct.Struct("<4sB3x32s32sIIIQ")
HEADER_BYTES = _HEADER.size
TOKEN_BYTES = 4
# LMDB's values end at 4 GiB. A block of 64 tokens of a 70B model has 20 MB; only an opaque state could be larger.
MAX_FRAME_BYTES = (1 << 32) - 4096

Bytes = npt.NDArray[np.uint8]


class Kind(IntEnum):
    """What a frame holds."""

    BLOCK = 1
    """Keys and values of a run of tokens, cut so that any first part of it can be used alone."""
    OPAQUE = 2
    """A whole llama.cpp state of a memory that the parser doesn't know; holds for exactly one position."""
    WINDOW = 3
    """Keys and values of a sliding window's layers, for the last tokens of a run; cut like a block."""
    RECURRENT = 4
    """Recurrent tensors; hold for exactly one position."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Everything in a frame but its payload.

    Attributes:
        kind: what the payload is.
        key: prefix hash after the frame's last token.
        parent: prefix hash before its first token.
        start: position of its first token.
        tokens: the frame's own tokens, little-endian int32.
        layout: how the payload is laid out; opaque here, see `kvkeep.cache.layout`.
    """

    kind: Kind
    key: PrefixHash
    parent: PrefixHash
    start: int
    tokens: bytes
    layout: bytes

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def size(self) -> int:
        """Bytes of the frame before its payload."""
        return HEADER_BYTES + len(self.tokens) + len(self.layout)


def allocate(header: FrameHeader, payload_bytes: int) -> tuple[Bytes, Bytes]:
    """A new frame with its header written, and the view of its payload, which the caller fills in place.

    One allocation for header and payload, because a payload is megabytes and would otherwise be copied once more.
    """
    if len(header.key) != DIGEST_BYTES or len(header.parent) != DIGEST_BYTES:
        raise ValueError(f"a frame's key and parent have {DIGEST_BYTES} bytes, not {len(header.key)} and {len(header.parent)}")
    frame: Bytes = np.empty(header.size + payload_bytes, np.uint8)
    head = _HEADER.pack(
        MAGIC, header.kind, header.key, header.parent, header.start, header.n_tokens, len(header.layout), payload_bytes
    )
    frame[: header.size] = np.frombuffer(head + header.tokens + header.layout, np.uint8)
    return frame, frame[header.size :]


def unpack(frame: Any) -> tuple[FrameHeader, Bytes]:
    """Header and payload view of a plain frame.

    Args:
        frame: anything with the buffer protocol.

    Raises:
        BadFrame: the bytes are no frame, of an unknown version or kind, or their lengths don't add up.
    """
    data: Bytes = np.frombuffer(frame, np.uint8)
    if data.size < HEADER_BYTES:
        raise BadFrame(f"a frame has at least {HEADER_BYTES} bytes, this has {data.size}")
    magic, kind, key, parent, start, n_tokens, layout_bytes, payload_bytes = _HEADER.unpack_from(data.data)
    if magic != MAGIC:
        raise BadFrame(f"a frame starts with {MAGIC!r}, this starts with {magic!r}")
    if kind not in Kind.__members__.values():
        raise BadFrame(f"frame kind {kind} is unknown to this version of kvkeep")
    size = HEADER_BYTES + n_tokens * TOKEN_BYTES + layout_bytes
    if size + payload_bytes != data.size:
        raise BadFrame(f"the frame's fields announce {size + payload_bytes} bytes, there are {data.size}")
    tokens = data[HEADER_BYTES : HEADER_BYTES + n_tokens * TOKEN_BYTES].tobytes()
    layout = data[HEADER_BYTES + n_tokens * TOKEN_BYTES : size].tobytes()
    return FrameHeader(Kind(kind), PrefixHash(key), PrefixHash(parent), start, tokens, layout), data[size:]
