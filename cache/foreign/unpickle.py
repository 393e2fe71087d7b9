"""What the instructions of a pickled `LlamaState` make: stand-ins of our own, which are looked at afterwards.

Whatever they ask for is a word from a short list. Each word has a stand-in that keeps what it was given and does nothing
with it: neither llama_cpp nor numpy sees a byte that wasn't checked.
"""

import io
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from kvkeep.cache.foreign.instructions import LATIN, MAX_INSTRUCTIONS, Source, Span, Text, asks_for, instructions
from kvkeep.cache.foreign.item import MAX_TOKENS
from kvkeep.cache.layout import Bytes
from kvkeep.store.errors import UnknownLayout

_NEWEST_PROTOCOL = 5


@dataclass(frozen=True, slots=True)
class Named:
    """Something that a pickle may ask for.

    Attributes:
        name: the one that it had first; modules have been renamed since.
    """

    name: str


_STATE = Named("LlamaState")
_NDARRAY, _DTYPE, _SCALAR = Named("ndarray"), Named("dtype"), Named("scalar")
_RECONSTRUCT, _FROMBUFFER = Named("_reconstruct"), Named("_frombuffer")
_ENCODE, _BYTES, _RECONSTRUCTOR, _OBJECT = Named("encode"), Named("bytes"), Named("_reconstructor"), Named("object")

_ALLOWED: dict[tuple[str, str], Named] = {
    ("llama_cpp.llama", "LlamaState"): _STATE,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
    ("_codecs", "encode"): _ENCODE,
    # Python 2's names are written up to protocol 2.
    **{(module, "bytes"): _BYTES for module in ("builtins", "__builtin__")},
    **{(module, "object"): _OBJECT for module in ("builtins", "__builtin__")},
    **{(module, "_reconstructor"): _RECONSTRUCTOR for module in ("copyreg", "copy_reg")},
    # numpy.core before numpy 2.
    **{(f"numpy.{core}.multiarray", "scalar"): _SCALAR for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _RECONSTRUCT for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _FROMBUFFER for core in ("core", "_core")},
}


@dataclass(frozen=True, slots=True, eq=False)
class Latin:
    """Bytes that are written as a text, one character each."""

    text: Text

    @property
    def size(self) -> int:
        """No more than these."""
        return self.text.span.size

    def load(self) -> Bytes:
        """The bytes."""
        try:
            return np.frombuffer(self.text.decode().encode(LATIN), np.uint8)
        except UnicodeEncodeError as error:
            raise UnknownLayout("what should be bytes is a text") from error


Payload = Span | Latin


@dataclass(slots=True, eq=False)
class DType:
    """A `numpy.dtype`: its code, such as i4, and the order of its bytes."""

    code: str
    order: str = "|"


@dataclass(slots=True, eq=False)
class Array:
    """A `numpy.ndarray` or one of its numbers: three values, whatever they are, that were given for it."""

    dtype: Any = None
    shape: Any = None
    payload: Any = None

    def numbers(self, what: str) -> npt.NDArray[np.integer]:
        """Whole numbers in a row.

        Args:
            what: what they are, for the message.

        Raises:
            UnknownLayout: it holds something else, or another number of bytes than its shape says.
        """
        dtype, shape, payload = self.dtype, self.shape, self.payload
        if not isinstance(dtype, DType) or (dtype.order, dtype.code) not in (("<", "i4"), ("<", "i8")):
            raise UnknownLayout(f"{what} should be whole numbers of 32 or 64 bits, little-endian")
        if not isinstance(shape, tuple) or not all(type(length) is int for length in shape) or len(shape) > 1:
            raise UnknownLayout(f"{what} should be in one row")
        count = shape[0] if shape else 1
        if not 0 <= count <= MAX_TOKENS:
            raise UnknownLayout(f"there can't be {count} of {what}")
        if not isinstance(payload, Payload):
            raise UnknownLayout(f"{what} are objects and no numbers")
        # A text has up to six characters for a byte.
        if payload.size > 6 * count * int(dtype.code[1:]):
            raise UnknownLayout(f"{what} have more bytes than their shape says")
        data = payload.load()
        if data.size != count * int(dtype.code[1:]):
            raise UnknownLayout(f"{what} have {data.size} bytes; their shape says {count * int(dtype.code[1:])}")
        return data.view(f"<{dtype.code}")


@dataclass(slots=True, eq=False)
class LlamaState:
    """A `llama_cpp.llama.LlamaState`: its attributes, whatever they are."""

    fields: dict[str, Any] = field(default_factory=dict)


def unpickled(file: BinaryIO, size: int) -> Any:
    """What a pickle holds, as the classes of this module, numbers, `Span`, `Text`, tuples and dicts.

    Args:
        file: the pickle. Spans and texts are good as long as it is open.
        size: bytes that it has.

    Raises:
        TruncatedState: it ends too early.
        UnknownLayout: it is no pickle, or asks for something that no saved state consists of.
    """
    return _Machine(Source(file, size)).run()


def unpickled_numbers(data: bytes) -> npt.NDArray[np.int64]:
    """A pickled tuple of whole numbers, such as a key.

    Raises:
        TruncatedState, UnknownLayout: it is something else.
    """
    found = unpickled(io.BytesIO(data), len(data))
    if not isinstance(found, tuple) or not all(type(number) is int and -(1 << 63) <= number < 1 << 63 for number in found):
        raise UnknownLayout("its key is no row of tokens")
    return np.asarray(found, np.int64)


class _Machine:
    """The stack that instructions work on."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._stack: list[Any] = []
        # What was below each mark. Whatever lies above the last one is in `_stack`.
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for name, argument in instructions(self._source):
            if name == "STOP":
                break
            getattr(self, f"_do_{name.lower()}")(argument)
        result = self._pop()
        if self._stack or self._below:
            raise UnknownLayout("the pickle ends with something unfinished")
        return result

    def _pop(self) -> Any:
        if not self._stack:
            raise UnknownLayout("an instruction of the pickle lacks what it works on")
        return self._stack.pop()

    def _pop_mark(self) -> list[Any]:
        if not self._below:
            raise UnknownLayout("an instruction of the pickle lacks its mark")
        above, self._stack = self._stack, self._below.pop()
        return above

    def _top(self) -> Any:
        if not self._stack:
            raise UnknownLayout("an instruction of the pickle lacks what it works on")
        return self._stack[-1]

    # -- values and collections -----------------------------------------------------------------------------------

    def _do_proto(self, version: int) -> None:
        if version > _NEWEST_PROTOCOL:
            raise UnknownLayout(f"the pickle has protocol {version}; up to {_NEWEST_PROTOCOL} are known")

    def _do_frame(self, size: int) -> None:
        """Says only how much may be read at once."""

    def _do_mark(self, _: None) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _do_value(self, value: Any) -> None:
        self._stack.append(value)

    def _do_tuple_of(self, count: int) -> None:
        self._stack.append(tuple(reversed([self._pop() for _ in range(count)])))

    def _do_tuple(self, _: None) -> None:
        above = self._pop_mark()
        self._stack.append(tuple(above))

    def _do_empty_dict(self, _: None) -> None:
        self._stack.append({})

    def _do_dict(self, _: None) -> None:
        above = self._pop_mark()
        self._stack.append({})
        self._put_all(above)

    def _do_setitems(self, _: None) -> None:
        self._put_all(self._pop_mark())

    def _do_setitem(self, _: None) -> None:
        value, key = self._pop(), self._pop()
        self._put_all([key, value])

    def _put_all(self, keys_and_values: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(keys_and_values) % 2:
            raise UnknownLayout("the pickle puts something into what is no dictionary")
        for key, value in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
            if not isinstance(key, Text):
                raise UnknownLayout("the attributes of a saved state have names")
            target[key.word()] = value

    def _do_put(self, number: int) -> None:
        # A pickler counts from 0 on. Others could be chosen to collide in a dictionary, which would take hours.
        if not 0 <= number < MAX_INSTRUCTIONS:
            raise UnknownLayout(f"the pickle remembers something under the number {number}; no pickler does")
        self._memo[int(number)] = self._top()

    def _do_memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self._top()

    def _do_get(self, number: int) -> None:
        if number not in self._memo:
            raise UnknownLayout("the pickle uses something again that it hasn't made")
        self._stack.append(self._memo[number])

    # -- objects --------------------------------------------------------------------------------------------------

    def _do_global(self, names: tuple[Text, Text]) -> None:
        self._stack.append(_allowed(*names))

    def _do_stack_global(self, _: None) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, Text) or not isinstance(module, Text):
            raise UnknownLayout("the pickle asks for something without a name")
        self._stack.append(_allowed(module, name))

    def _do_newobj(self, _: None) -> None:
        arguments, what = self._pop(), self._pop()
        if not isinstance(what, Named) or what != _STATE or arguments != ():
            _strange(what)
        self._stack.append(LlamaState())

    def _do_reduce(self, _: None) -> None:
        arguments, what = self._pop(), self._pop()
        if not isinstance(what, Named) or not isinstance(arguments, tuple):
            _strange(what)
        empty = what == _BYTES and not arguments
        self._stack.append(Span(self._source, 0, 0) if empty else _made(what, arguments))

    def _do_build(self, _: None) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, LlamaState) and isinstance(state, dict):
            target.fields.update(state)
        elif isinstance(target, DType) and isinstance(state, tuple) and len(state) >= 5 and isinstance(state[1], Text):
            # Parts of a structure come behind the order; no number has any.
            if any(part is not None for part in state[2:5]):
                _strange(_DTYPE)
            target.order = state[1].word()
        elif isinstance(target, Array) and isinstance(state, tuple) and len(state) == 5:
            _, target.shape, target.dtype, _, target.payload = state
        else:
            _strange(target)


def _allowed(module: Text, name: Text) -> Named:
    found = _ALLOWED.get((module.word(), name.word()))
    if found is None:
        raise UnknownLayout(asks_for(module, name))
    return found


def _made(what: Named, arguments: tuple[Any, ...]) -> Any:
    match what, arguments:
        case Named("encode"), (Text() as text, Text()) if arguments[1].word().replace("latin1", LATIN) == LATIN:
            return Latin(text)
        case Named("dtype"), (Text() as code, *_):
            return DType(code.word())
        case Named("scalar"), (dtype, payload):
            return Array(dtype, (), payload)
        case Named("_frombuffer"), (payload, dtype, shape, _):
            return Array(dtype, shape, payload)
        case Named("_reconstruct"), (Named("ndarray"), *_):
            return Array()
        case Named("_reconstructor"), (Named("LlamaState"), Named("object"), None):
            return LlamaState()
    _strange(what)


def _strange(what: Any) -> NoReturn:
    name = what.name if isinstance(what, Named) else type(what).__name__
    raise UnknownLayout(f"the pickle does something with {name} that no saved state needs")
