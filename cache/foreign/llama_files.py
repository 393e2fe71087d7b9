"""Files that llama.cpp itself writes: a saved sequence, as llama-server's slots are, or a session, as of `--prompt-cache`.

    u32 magic     'ggsq' for a sequence, 'ggsn' for a session
    u32 version   LLAMA_STATE_SEQ_VERSION, LLAMA_SESSION_VERSION
    u32 n         number of tokens
    n x i32       the tokens; llama-server packs them, see `_unpacked`
    rest          sequence: the memory without the head of eight bytes; session: the state in its whole form

From `llama_context::state_save_file` and `state_seq_save_file`. Whose states they are they don't say.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from kvkeep.cache.foreign.item import MAX_TOKENS, Found, Item, Tokens, as_tokens, check_size, opened, read_exactly
from kvkeep.cache.layout import Bytes
from kvkeep.cache.state import SEQ_ID, SEQUENCE_MAGIC, Form
from kvkeep.store.errors import TruncatedState, UnknownLayout

_HEAD = struct.Struct("<III")
_SEQUENCE_HEAD = struct.pack("<Ii", SEQUENCE_MAGIC, SEQ_ID)
# `server_tokens::serialize`: no token id, then the version, a list of tokens, and a list of images.
_PACKED, _PACKED_VERSION = -1, 1


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of file.

    Attributes:
        what: its name for people.
        version: the one that is read.
        form: the form of its state.
        head: what the form has and the file hasn't.
        loose: llama-cli saves a prompt before its last token is decoded, but names that too; likewise the last one that
            was sampled.
    """

    what: str
    version: int
    form: Form
    head: bytes
    loose: bool


_KINDS = {
    0x67677371: _Kind("saved sequence", 3, Form.SEQUENCE, _SEQUENCE_HEAD, loose=False),
    0x6767736E: _Kind("session", 10, Form.WHOLE, b"", loose=True),
}
_MAGICS = {magic.to_bytes(4, "little") for magic in _KINDS}


def is_llama_file(path: Path) -> bool:
    """Whether a file begins as one.

    Raises:
        UsageError, StoreError: it can't be read.
    """
    with opened(path) as (file, _):
        return file.read(4) in _MAGICS


def found_at(path: Path) -> Found:
    """The state in a file."""
    with opened(path) as (_, size):
        return Found(str(path), size, lambda at_most: _read(path, at_most))


def _read(path: Path, at_most: int) -> Item:
    with opened(path) as (file, size):
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise TruncatedState(f"it has {size} bytes; the head of such a file alone has {_HEAD.size}")
        magic, version, count = _HEAD.unpack(head)
        if magic not in _KINDS:
            raise UnknownLayout("it is neither a saved sequence nor a session of llama.cpp")
        kind = _KINDS[magic]
        if version != kind.version:
            raise UnknownLayout(f"it is a {kind.what} of version {version}; this kvkeep reads version {kind.version}")
        left = size - _HEAD.size
        if count > MAX_TOKENS or 4 * count > left:
            raise TruncatedState(f"it names {count} tokens, and {left} bytes follow")
        check_size(left - 4 * count, at_most)
        tokens = _tokens(file, count)
        return Item(tokens, _state(file, kind, left - 4 * count), kind.form, kind.loose)


def _tokens(file: BinaryIO, count: int) -> Tokens:
    buffer: Bytes = np.empty(4 * count, np.uint8)
    read_exactly(file, buffer)
    numbers = buffer.view("<i4")
    return as_tokens(_unpacked(numbers) if count and numbers[0] == _PACKED else numbers)


def _unpacked(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The tokens that llama-server has packed: what no token is, a version, their count, they, and the count of images."""
    if numbers.size < 4 or numbers[1] != _PACKED_VERSION:
        version = numbers[1] if numbers.size > 1 else "none"
        raise UnknownLayout(f"its tokens are packed by llama-server in version {version}; this kvkeep reads {_PACKED_VERSION}")
    count = int(numbers[2])
    if not 0 <= count <= numbers.size - 4:
        raise TruncatedState(f"it names {count} packed tokens, and has room for {numbers.size - 4}")
    if numbers[3 + count] != 0:
        raise UnknownLayout("it holds images or sounds, whose tokens don't say what they are")
    if numbers.size != 4 + count:
        raise TruncatedState(f"behind its {count} packed tokens there are {numbers.size - 4 - count} numbers too many")
    return numbers[3 : 3 + count]


def _state(file: BinaryIO, kind: _Kind, size: int) -> Bytes:
    data: Bytes = np.empty(len(kind.head) + size, np.uint8)
    data[: len(kind.head)] = np.frombuffer(kind.head, np.uint8)
    read_exactly(file, data[len(kind.head) :])
    return data
