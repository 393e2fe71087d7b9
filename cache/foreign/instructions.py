"""A pickle as what it is: a list of instructions for a small machine. Read one by one, without running any of them.

The library's own reader isn't used. It makes room for lengths that are merely announced, fills a table up to any number
that an instruction names, and imports what it is told to. Here only those instructions are known that a saved
`LlamaState` and its key consist of; any other one is named and refused. Texts and bytes stay in the file until somebody
wants them, so scores of 100 MB cost nothing.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np

from kvkeep.cache.foreign.item import read_exactly
from kvkeep.cache.layout import Bytes
from kvkeep.store.errors import TruncatedState, UnknownLayout

# One instruction for each token of a key and some hundred for a state. Each may make an object of some tens of bytes.
MAX_INSTRUCTIONS = 1 << 21
# Names and texts that are looked at; a line that holds a number.
MAX_TEXT = 256
# Bytes that are looked through at once for the end of a line.
_PIECE = 1 << 20
# Before protocol 3 there were no bytes: they are texts, which `_codecs.encode` turns into bytes again.
LATIN = "latin-1"


class Source:
    """A file that a pickle is read from, front to back, and whose parts can be had later.

    Args:
        file: the pickle, from its beginning on; only good as long as it is open.
        size: bytes that it has.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self.at = 0
        file.seek(0)

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self.skip(count)
        found = self._file.read(count)
        if len(found) != count:
            raise TruncatedState(f"the pickle ends at byte {self.size}, {count} more were announced at {self.at - count}")
        return found

    def skip(self, count: int) -> int:
        """Reckon with the next bytes as read. Returns where they are."""
        if count > self.size - self.at:
            raise TruncatedState(f"the pickle ends at byte {self.size}, {count} more were announced at {self.at}")
        at, self.at = self.at, self.at + count
        return at

    def span(self, count: int) -> "Span":
        """The next bytes, left where they are."""
        found = Span(self, self.skip(count), count)
        self._file.seek(self.at)
        return found

    def line(self) -> "Span":
        """The next bytes up to an end of line, which isn't among them."""
        start = self.at
        while piece := self._file.read(min(_PIECE, self.size - self.at)):
            end = piece.find(b"\n")
            self.at += len(piece) if end < 0 else end + 1
            if end >= 0:
                self._file.seek(self.at)
                return Span(self, start, self.at - 1 - start)
        raise TruncatedState(f"the pickle ends at byte {self.size}, in the middle of a line")

    def load(self, at: int, buffer: Bytes) -> None:
        """Bytes from anywhere."""
        self._file.seek(at)
        read_exactly(self._file, buffer)
        self._file.seek(self.at)


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Bytes in the file.

    Attributes:
        source: the file.
        at: where they are.
        size: how many.
    """

    source: Source
    at: int
    size: int

    def load(self) -> Bytes:
        """All of them. The caller has looked at `size`."""
        buffer: Bytes = np.empty(self.size, np.uint8)
        self.source.load(self.at, buffer)
        return buffer


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A text in the file.

    Attributes:
        span: its bytes.
        encoding: how they are to be read.
    """

    span: Span
    encoding: str

    def word(self) -> str:
        """The text, if it is as short as a name.

        Raises:
            UnknownLayout: it is longer, or no text.
        """
        if self.span.size > MAX_TEXT:
            raise UnknownLayout(f"a name can't have {self.span.size} bytes")
        return self.decode()

    def decode(self) -> str:
        """The text, however long."""
        try:
            return str(self.span.load().data, self.encoding)
        except UnicodeDecodeError as error:
            raise UnknownLayout("what should be a text is none") from error


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        name: as the standard library calls it.
        argument: what stands behind it: an int, a float, a bool, a `Span`, a `Text`, two `Text`, or None.
    """

    name: str
    argument: Any


def instructions(source: Source) -> Iterator[Instruction]:
    """All instructions, the last of which is STOP.

    Raises:
        TruncatedState: the pickle ends before.
        UnknownLayout: an instruction is unknown, or there are too many.
    """
    for _ in range(MAX_INSTRUCTIONS):
        code = source.take(1)
        if code not in _KNOWN:
            _refuse(code, source)
        name, argument = _KNOWN[code]
        yield Instruction(name, argument(source))
        if name == "STOP":
            return
    raise UnknownLayout(f"the pickle has more than {MAX_INSTRUCTIONS} instructions")


def _refuse(code: bytes, source: Source) -> NoReturn:
    if code == b"i":
        raise UnknownLayout(asks_for(*_two_lines(source)))
    name = _REFUSED.get(code, f"{code[0]:#04x}")
    raise UnknownLayout(f"the pickle has an instruction {name} at byte {source.at - 1}; no saved state needs it")


def asks_for(module: Text, name: Text) -> str:
    """The sentence about something that is named and can't be part of a state."""
    return f"the pickle asks for {module.word()}.{name.word()}, which no saved state consists of; nothing of it was run"


def _number(form: str) -> Callable[[Source], Any]:
    packed = struct.Struct(form)
    return lambda source: packed.unpack(source.take(packed.size))[0]


_U8, _U32, _U64 = _number("<B"), _number("<I"), _number("<Q")


def _nothing(source: Source) -> None:
    return None


def _always(value: Any) -> Callable[[Source], Any]:
    return lambda source: value


def _bytes(length: Callable[[Source], int]) -> Callable[[Source], Span]:
    return lambda source: source.span(length(source))


def _text(length: Callable[[Source], int]) -> Callable[[Source], Text]:
    # The library writes lone surrogates, too; nothing here has any.
    return lambda source: Text(source.span(length(source)), "utf-8")


def _two_lines(source: Source) -> tuple[Text, Text]:
    return Text(source.line(), "utf-8"), Text(source.line(), "utf-8")


def _decimal(source: Source) -> int | bool:
    """A number in a line of its own; protocol 0 writes truth values as 00 and 01."""
    digits = Text(source.line(), "ascii").word()
    if digits in ("00", "01"):
        return digits == "01"
    try:
        return int(digits.removesuffix("L"))
    except ValueError as error:
        raise UnknownLayout("a number in the pickle is none") from error


def _float(source: Source) -> float:
    try:
        return float(Text(source.line(), "ascii").word())
    except ValueError as error:
        raise UnknownLayout("a number in the pickle is none") from error


def _long(source: Source) -> int:
    return int.from_bytes(source.take(_U8(source)), "little", signed=True)


_KNOWN: dict[bytes, tuple[str, Callable[[Source], Any]]] = {
    b"\x80": ("PROTO", _U8),
    b"\x95": ("FRAME", _U64),
    b".": ("STOP", _nothing),
    b"(": ("MARK", _nothing),
    # values
    b"N": ("VALUE", _nothing),
    b"\x88": ("VALUE", _always(True)),
    b"\x89": ("VALUE", _always(False)),
    b"I": ("VALUE", _decimal),
    b"L": ("VALUE", _decimal),
    b"J": ("VALUE", _number("<i")),
    b"K": ("VALUE", _U8),
    b"M": ("VALUE", _number("<H")),
    b"\x8a": ("VALUE", _long),
    b"F": ("VALUE", _float),
    b"G": ("VALUE", _number(">d")),
    b"V": ("VALUE", lambda source: Text(source.line(), "raw-unicode-escape")),
    b"X": ("VALUE", _text(_U32)),
    b"\x8c": ("VALUE", _text(_U8)),
    b"\x8d": ("VALUE", _text(_U64)),
    b"B": ("VALUE", _bytes(_U32)),
    b"C": ("VALUE", _bytes(_U8)),
    b"\x8e": ("VALUE", _bytes(_U64)),
    b"\x96": ("VALUE", _bytes(_U64)),
    # collections
    b")": ("TUPLE_OF", _always(0)),
    b"\x85": ("TUPLE_OF", _always(1)),
    b"\x86": ("TUPLE_OF", _always(2)),
    b"\x87": ("TUPLE_OF", _always(3)),
    b"t": ("TUPLE", _nothing),
    b"}": ("EMPTY_DICT", _nothing),
    b"d": ("DICT", _nothing),
    b"s": ("SETITEM", _nothing),
    b"u": ("SETITEMS", _nothing),
    # objects
    b"c": ("GLOBAL", _two_lines),
    b"\x93": ("STACK_GLOBAL", _nothing),
    b"R": ("REDUCE", _nothing),
    b"\x81": ("NEWOBJ", _nothing),
    b"b": ("BUILD", _nothing),
    # what is used twice
    b"p": ("PUT", _decimal),
    b"q": ("PUT", _U8),
    b"r": ("PUT", _U32),
    b"\x94": ("MEMOIZE", _nothing),
    b"g": ("GET", _decimal),
    b"h": ("GET", _U8),
    b"j": ("GET", _U32),
}

# Names for the sentence; there is no need for them to be complete.
_REFUSED = {
    b"o": "OBJ",
    b"\x92": "NEWOBJ_EX",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
    b"P": "PERSID",
    b"Q": "BINPERSID",
    b"\x97": "NEXT_BUFFER",
    b"\x98": "READONLY_BUFFER",
    b"S": "STRING",
    b"T": "BINSTRING",
    b"U": "SHORT_BINSTRING",
    b"\x8b": "LONG4",
    b"0": "POP",
    b"1": "POP_MARK",
    b"2": "DUP",
    b"]": "EMPTY_LIST",
    b"l": "LIST",
    b"a": "APPEND",
    b"e": "APPENDS",
    b"\x8f": "EMPTY_SET",
    b"\x90": "ADDITEMS",
    b"\x91": "FROZENSET",
}
