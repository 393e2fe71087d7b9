"""One buffer of a state's bytes: read from front to back, and made in one piece."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from kvkeep.cache.layout import Bytes
from kvkeep.store.errors import TruncatedState

U32 = struct.Struct("<I")


class BufferReader:
    """Reads a buffer from front to back and never beyond its end.

    Attributes:
        data: the buffer.
        at: how far it is read.
        max_streams: streams that a cache in it may have.
    """

    def __init__(self, data: Bytes, max_streams: int = 1) -> None:
        self.data = data
        self.at = 0
        self.max_streams = max_streams

    @property
    def left(self) -> int:
        """Bytes that are still to be read."""
        return int(self.data.size) - self.at

    def take(self, count: int) -> Bytes:
        """The next bytes, a view.

        Raises:
            TruncatedState: there aren't so many.
        """
        if count > self.left:
            raise TruncatedState(f"the state ends at byte {self.data.size}, {count} more were announced at {self.at}")
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def read(self, what: struct.Struct) -> tuple[Any, ...]:
        """The next fields."""
        return what.unpack(self.take(what.size).data)

    def u32(self) -> int:
        """The next number."""
        value: int = self.read(U32)[0]
        return value


class BufferWriter:
    """Collects what a buffer consists of, then makes it in one allocation: it may have gigabytes."""

    def __init__(self) -> None:
        self._size = 0
        self._known: list[tuple[int, bytes | Bytes]] = []
        self._buffer: Bytes = np.empty(0, np.uint8)

    def put(self, data: bytes | Bytes) -> Callable[[], Bytes]:
        """Bytes that are known already. Returns what gives their place, once the buffer is made."""
        self._known.append((self._size, data))
        return self.room(len(data))

    def room(self, count: int) -> Callable[[], Bytes]:
        """Bytes to be filled later. Returns what gives them, once the buffer is made."""
        at = self._size
        self._size += count
        return lambda: self._buffer[at : at + count]

    def finish(self) -> Bytes:
        """Make the buffer, with everything in it that is known."""
        self._buffer = np.empty(self._size, np.uint8)
        for at, data in self._known:
            self._buffer[at : at + len(data)] = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        return self._buffer
