"""From a plain frame to the value that is stored, and back. The one home of the zstandard package.

A value says its own codec and plain size. zstd level 1: level 3 gains about 1 % more on KV data and costs twice the
time. What a codec doesn't shrink by at least 3 % is stored raw, because raw values are read straight out of the map.
"""

import struct
import threading
from enum import IntEnum
from typing import Any

import zstandard

from kvkeep.store.errors import BadFrame
from kvkeep.store.frame import MAX_FRAME_BYTES

MAGIC = b"KVV1"
_HEADER = struct.Struct("<4sB3xQ")
HEADER_BYTES = _HEADER.size
LEVEL = 1
WORTH_IT = 0.97


class Codec(IntEnum):
    """How a stored value is coded. Numbers are written to disk: never reuse one, keep reading all."""

    RAW = 0
    ZSTD = 1


# zstd contexts are not safe to share between threads and cost about 100 us to make.
_local = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL)
    found: zstandard.ZstdCompressor = _local.compressor
    return found


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _local.decompressor
    return found


def encode(plain: Any) -> bytes:
    """The value that stores `plain` (anything with the buffer protocol)."""
    size = memoryview(plain).nbytes
    packed = _compressor().compress(plain)
    if len(packed) < WORTH_IT * size:
        return _HEADER.pack(MAGIC, Codec.ZSTD, size) + packed
    return _HEADER.pack(MAGIC, Codec.RAW, size) + memoryview(plain).cast("B")


class Scratch:
    """Memory that one value after the other is decompressed into; each overwrites the one before it.

    Fresh memory for each costs more than the decompressing itself: the system clears it, page by page. A restore of 47 MB
    took 44 ms of one core in fresh memory, and 18 in this.
    """

    def __init__(self) -> None:
        self._memory = bytearray()

    def room(self, size: int) -> memoryview:
        """So many bytes of it."""
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)[:size]


def decode(value: Any, expected: int | None = None, scratch: Scratch | None = None) -> bytes | memoryview:
    """The plain bytes of a stored value. For `Codec.RAW` a view into `value`, no copy.

    Args:
        value: anything with the buffer protocol.
        expected: how many plain bytes there should be; compared before anything is allocated.
        scratch: where to decompress to, if need be; by default into memory of its own. Bytes behind a compressed value are then
            passed over in silence: whoever has a row has compared its size.

    Raises:
        BadFrame: no value of ours, an unknown codec, or sizes that don't agree.
    """
    view = memoryview(value)
    if view.nbytes < HEADER_BYTES:
        raise BadFrame(f"a stored value has at least {HEADER_BYTES} bytes, this has {view.nbytes}")
    magic, codec, size = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise BadFrame(f"a stored value starts with {MAGIC!r}, this starts with {magic!r}")
    if expected not in (None, size):
        raise BadFrame(f"a stored value announces {size} bytes, {expected} are expected")
    if size > MAX_FRAME_BYTES:
        raise BadFrame(f"a stored value announces {size} bytes, more than any frame has")
    body = view[HEADER_BYTES:]
    if codec == Codec.RAW:
        if body.nbytes != size:
            raise BadFrame(f"a raw value announces {size} bytes and has {body.nbytes}")
        return body
    if codec != Codec.ZSTD:
        raise BadFrame(f"codec {codec} is unknown to this version of kvkeep")
    try:
        announced = zstandard.frame_content_size(body)
        if announced != size:
            raise BadFrame(f"a zstd value announces {size} bytes, its frame announces {announced}")
        plain = _inflated(body) if scratch is None else _inflated_into(body, scratch.room(size))
    except zstandard.ZstdError as error:
        raise BadFrame(f"a zstd value can't be decompressed: {error}") from error
    if len(plain) != size:
        raise BadFrame(f"a zstd value announces {size} bytes and has {len(plain)}")
    return plain


def _inflated(body: memoryview) -> bytes:
    plain: bytes = _decompressor().decompress(body, allow_extra_data=False)
    return plain


def _inflated_into(body: memoryview, room: memoryview) -> memoryview:
    """As much of a body as there is room for; all of it, if its frame tells the truth about its size."""
    done = 0
    with _decompressor().stream_reader(body) as reader:
        while done < len(room) and (count := reader.readinto(room[done:])):
            done += count
    return room[:done]
