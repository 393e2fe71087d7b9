"""The bytes of a bundle: a head, one record an entry, and a hash over everything. The byte tables are in docs/FORMAT.md.

Only what a reader can't compute is in it: keys, anchors and paths follow from the prefixes' tokens, so there is nothing
about them that could be wrong. Every length is compared with the size of the file before anything is read or allocated.
"""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvkeep.store.errors import BadBundle, StoreError, TooNew, UsageError
from kvkeep.store.frame import MAX_FRAME_BYTES, TOKEN_BYTES
from kvkeep.store.hashing import DIGEST_BYTES, BlobId, Buffer, Fingerprint, PrefixHash, digests_at

# As PNG's: a byte that no text has, and both kinds of line ends, so that a transfer as text is noticed at once. Magic and
# version stay where they are in every version to come.
MAGIC = b"\x89KVB\r\n\x1a\n"
VERSION = 1
_START = struct.Struct("<8sI")
_HEAD = struct.Struct("<8sII32sQQQQQ")
_LENGTH = struct.Struct("<Q")
_RECORD = struct.Struct("<B3xiIII32s32sQQ")
RECORD_BYTES = _RECORD.size
# A head holds tokens and two short texts: sixteen million tokens have room in this.
MAX_HEAD_BYTES = 64 << 20
MAX_PREFIXES = 4096


@dataclass(frozen=True, slots=True)
class Head:
    """What a bundle says before its entries.

    Attributes:
        fingerprint: of the model whose states these are.
        label: the model's own name, for people.
        ingredients: what went into the fingerprint, for people.
        block_tokens: tokens of a block.
        prefixes: all tokens of each prefix, little-endian int32.
        n_entries: how many records follow.
        entries_bytes: bytes of all records.
    """

    fingerprint: Fingerprint
    label: str
    ingredients: dict[str, str]
    block_tokens: int
    prefixes: tuple[bytes, ...]
    n_entries: int
    entries_bytes: int

    def pack(self) -> bytes:
        """Its bytes, with their hash at the end.

        Raises:
            UsageError: there are more prefixes, or they have more tokens, than one bundle holds.
        """
        if len(self.prefixes) > MAX_PREFIXES:
            raise UsageError(f"a bundle holds at most {MAX_PREFIXES} prefixes, not {len(self.prefixes)}")
        label, ingredients = self.label.encode(), json.dumps(self.ingredients, sort_keys=True).encode()
        sizes = (len(label), len(ingredients), len(self.prefixes), self.n_entries, self.entries_bytes)
        parts = [_HEAD.pack(MAGIC, VERSION, self.block_tokens, self.fingerprint, *sizes), label, ingredients]
        for tokens in self.prefixes:
            parts += [_LENGTH.pack(len(tokens) // TOKEN_BYTES), tokens]
        data = b"".join(parts)
        if len(data) > MAX_HEAD_BYTES:
            raise UsageError(
                f"a bundle's prefixes and texts have at most {MAX_HEAD_BYTES} bytes together, these have {len(data)}"
            )
        return data + digest(data)


class Record(NamedTuple):
    """What a bundle says about one entry, before the entry's stored value.

    Attributes:
        kind: as in the frame.
        seq_id: the sequence that a checkpoint was taken from; else 0.
        prefix: the number of a prefix to which it belongs, from 0 on.
        start: position of its frame's first token.
        n_tokens: tokens of its frame.
        parent: prefix hash before these, as in the frame.
        blob: name of its plain frame.
        stored_bytes, plain_bytes: bytes of the value, and of the plain frame.
    """

    kind: int
    seq_id: int
    prefix: int
    start: int
    n_tokens: int
    parent: PrefixHash
    blob: BlobId
    stored_bytes: int
    plain_bytes: int

    def pack(self) -> bytes:
        return _RECORD.pack(*self)

    @property
    def n_bytes(self) -> int:
        """With its value."""
        return RECORD_BYTES + self.stored_bytes


def digest(data: Buffer) -> bytes:
    """BLAKE3 of a run of bytes."""
    return digests_at(data, [memoryview(data).nbytes])[0]


class Seal:
    """The hash over everything, taken while the entries pass.

    A chain, because a value is hashed where it lies, without being put together with what comes before it.
    """

    def __init__(self, fingerprint: Fingerprint) -> None:
        self._chain: bytes = fingerprint

    def add(self, record: Record, value: Buffer) -> None:
        """The next entry."""
        self._chain = digest(self._chain + record.pack() + digest(value))

    def close(self, head: bytes) -> bytes:
        """The bundle's last bytes, given its head with the hash of that."""
        return digest(self._chain + digest(head))


class BundleFile:
    """A bundle's file, open for reading.

    Args:
        path: the file.

    Raises:
        UsageError: there is no such file.
        TooNew: a newer kvkeep wrote it.
        BadBundle: it is none, or its head is damaged, or its end is missing.
        StoreError: it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise UsageError(f"{path} {'is no file' if path.exists() else 'does not exist'}; a bundle is needed")
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise StoreError(f"{path} can't be read: {error.strerror or error}") from error
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.head, self._head_bytes = self._read_head()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closing twice does nothing."""
        self._file.close()

    # -- head ------------------------------------------------------------------------------------------------------

    def _read_head(self) -> tuple[Head, bytes]:
        self._check_start()
        fixed = self._at(0, _HEAD.size)
        _, _, block_tokens, fingerprint, n_label, n_ingredients, n_prefixes, n_entries, n_bytes = _HEAD.unpack(fixed)
        if n_entries == 0 or n_prefixes == 0 or block_tokens == 0:
            raise self.bad("it holds nothing")
        # Each prefix has at least a length and a token; each entry a record with a value.
        least = _HEAD.size + n_label + n_ingredients + n_prefixes * (_LENGTH.size + TOKEN_BYTES)
        if n_prefixes > MAX_PREFIXES or least > MAX_HEAD_BYTES or n_entries * RECORD_BYTES > n_bytes:
            raise self.bad(
                f"it announces {n_prefixes} prefixes, a head of {least} bytes, and {n_entries} entries in {n_bytes} bytes"
            )
        head_bytes = self.size - n_bytes - 2 * DIGEST_BYTES
        if not least <= head_bytes <= MAX_HEAD_BYTES:
            raise self.bad(f"it announces {least + n_bytes + 2 * DIGEST_BYTES} bytes or more, and has {self.size}")
        data = bytes(self._at(0, head_bytes + DIGEST_BYTES))
        body, own = data[:head_bytes], data[head_bytes:]
        if digest(body) != own:
            raise self.bad("its head is damaged")
        texts = _HEAD.size + n_label, _HEAD.size + n_label + n_ingredients
        label = self._text(body[_HEAD.size : texts[0]])
        ingredients = self._ingredients(body[texts[0] : texts[1]])
        prefixes = self._prefixes(body, texts[1], n_prefixes)
        return Head(Fingerprint(fingerprint), label, ingredients, block_tokens, prefixes, n_entries, n_bytes), data

    def _check_start(self) -> None:
        if self.size < _START.size:
            raise self.bad("it is too short")
        magic, version = _START.unpack(self._at(0, _START.size))
        if magic != MAGIC:
            raise BadBundle(f"{self.path} is no bundle: it starts with {magic!r}, a bundle with {MAGIC!r}")
        if version > VERSION:
            raise TooNew(f"{self.path} is a bundle of version {version}; this kvkeep reads version {VERSION}")
        if version < 1 or self.size < _HEAD.size + 2 * DIGEST_BYTES:
            raise self.bad("its head is damaged or cut off")

    def _text(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.bad(f"a text is no UTF-8: {error}") from error

    def _ingredients(self, data: bytes) -> dict[str, str]:
        try:
            found = json.loads(self._text(data))
            # Halves of surrogate pairs are no text that could ever be shown.
            json.dumps(found, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise self.bad(f"its ingredients are no JSON: {error}") from error
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise self.bad("its ingredients are no object of texts")
        return found

    def _prefixes(self, body: bytes, at: int, count: int) -> tuple[bytes, ...]:
        prefixes: list[bytes] = []
        for _ in range(count):
            (n_tokens,) = _LENGTH.unpack_from(body, at) if at + _LENGTH.size <= len(body) else (0,)
            first, at = at + _LENGTH.size, at + _LENGTH.size + n_tokens * TOKEN_BYTES
            if n_tokens == 0 or at > len(body):
                raise self.bad(f"a prefix of {n_tokens} tokens isn't in its head of {len(body)} bytes")
            prefixes.append(body[first:at])
        if at != len(body):
            raise self.bad(f"its head has {len(body) - at} bytes that belong to nothing")
        return tuple(prefixes)

    # -- entries ---------------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[tuple[Record, int, bytearray]]:
        """Every record, with the place of its value in the file, and the value.

        Raises:
            BadBundle: at the end, if the hash over everything isn't the one that the bundle ends with; or before it, if a
                length can't be.
        """
        at, end = len(self._head_bytes), self.size - DIGEST_BYTES
        seal = Seal(self.head.fingerprint)
        for number in range(self.head.n_entries):
            if at + RECORD_BYTES > end:
                raise self.bad(f"it ends before its entry {number}")
            packed = self._at(at, RECORD_BYTES)
            record = _record(packed)
            if record.pack() != packed:
                # The hash doesn't cover them otherwise.
                raise self.bad(f"its entry {number} has something where zeros belong")
            at += RECORD_BYTES
            if record.stored_bytes > end - at or record.plain_bytes > MAX_FRAME_BYTES:
                sizes = f"{record.stored_bytes} bytes that stand for {record.plain_bytes}"
                raise self.bad(f"its entry {number} announces {sizes}, and {end - at} are left")
            value = self._at(at, record.stored_bytes)
            seal.add(record, value)
            yield record, at, value
            at += record.stored_bytes
        if at != end:
            raise self.bad(f"it has {end - at} bytes that belong to no entry")
        if seal.close(self._head_bytes) != self._at(end, DIGEST_BYTES):
            raise self.bad("its bytes don't have the hash that it ends with")

    def value(self, at: int, n_bytes: int) -> bytes:
        """A value that `entries` has found there."""
        return bytes(self._at(at, n_bytes))

    def _at(self, at: int, n_bytes: int) -> bytearray:
        if at + n_bytes > self.size:
            raise self.bad("it is cut off")
        found = bytearray(n_bytes)
        view, done = memoryview(found), 0
        try:
            self._file.seek(at)
            while done < n_bytes and (count := self._file.readinto(view[done:])):  # type: ignore[attr-defined]
                done += count
        except OSError as error:
            raise StoreError(f"{self.path} can't be read: {error.strerror or error}") from error
        if done < n_bytes:
            raise self.bad("it became shorter while it was read")
        return found

    def bad(self, why: str) -> BadBundle:
        """The error that this bundle can't be used, and why."""
        return BadBundle(f"the bundle {self.path} can't be used: {why}")


def _record(data: bytearray) -> Record:
    kind, seq_id, prefix, start, n_tokens, parent, blob, stored_bytes, plain_bytes = _RECORD.unpack(data)
    return Record(kind, seq_id, prefix, start, n_tokens, PrefixHash(parent), BlobId(blob), stored_bytes, plain_bytes)
