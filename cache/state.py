"""llama.cpp's state bytes: what is where, strictly. Parsing and its inverse, for every kind of memory that can be cut.

Field by field from `llama_context::state_write_data`, `llama_kv_cache::state_write` and
`llama_memory_recurrent::state_write` of the llama.cpp bundled with llama-cpp-python 0.3.36 (LLAMA_SESSION_VERSION 10,
LLAMA_STATE_SEQ_VERSION 3); docs/FORMAT.md has the byte tables. All numbers are little-endian.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvkeep.cache.buffers import U32, BufferReader, BufferWriter
from kvkeep.cache.layout import CELL_BYTES, COLUMNS, EXT_BYTES, ROWS, Bytes, Cells, Layout, Role, Section, section
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.store.errors import LayoutError, TruncatedState, UnknownLayout

SEQUENCE_MAGIC = 0xAF143CD8
SEQ_ID = 0
# Far above any real model; keep a hostile count from being allocated or looped over.
MAX_LAYERS = 4096
MAX_ARCH_BYTES = 256
MAX_STREAMS = 256

_PAIR = struct.Struct("<II")
_CELL_HEAD = struct.Struct("<iI")
_U64 = struct.Struct("<Q")
# ggml types of recurrent tensors that llama.cpp knows: f32, f16, bf16.
_RECURRENT_TYPES = (0, 1, 30)


class Form(Enum):
    """Which of llama.cpp's two forms a state has."""

    WHOLE = "whole"
    """`llama_state_get_data`: u32 length and name of the architecture, then the memory of all sequences."""
    SEQUENCE = "sequence"
    """`llama_state_seq_get_data`: u32 magic, i32 seq_id, then the memory of one sequence."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The recurrent tensors of one sequence.

    Attributes:
        pos: position of the last token that went in; the tensors hold behind it and nowhere else.
        data: uint8, from s_trans on to the state's end.
    """

    pos: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class State:
    """A parsed or assembled state: views into one buffer.

    Attributes:
        caches: attention caches that keep every position, in llama.cpp's order.
        window: the cache that needs only the last positions, if there is one.
        recurrent: the recurrent tensors, if there are any.
    """

    caches: tuple[Cells, ...]
    window: Cells | None = None
    recurrent: Recurrent | None = None


class _Shape(NamedTuple):
    """Which parts a state has, in llama.cpp's order."""

    caches: int
    window: bool
    recurrent: bool


def _shapes(memory: Memory, partial: bool) -> tuple[_Shape, ...]:
    window = memory.window is not None
    shapes = {
        # Two: dsa and msa keep an indexer beside the keys.
        MemoryKind.ATTENTION: (_Shape(1, False, False), _Shape(2, False, False)),
        MemoryKind.WINDOW: (_Shape(1, True, False), _Shape(2, True, False)),
        MemoryKind.RECURRENT: (_Shape(0, False, True),),
        MemoryKind.HYBRID: (_Shape(1, window, True),),
        MemoryKind.UNKNOWN: (),
    }[memory.kind]
    if not partial:
        return shapes
    # Memories without a part for one position only ignore the flag, and are written in full.
    return tuple({shape if memory.kind is MemoryKind.ATTENTION else shape._replace(caches=0) for shape in shapes})


def parse(data: Any, form: Form, memory: Memory, *, partial: bool = False, any_streams: bool = False) -> State:
    """Read a state that holds one sequence. No copy is made.

    Whether a cache has values at all (MLA keeps them inside the keys), and now and then whether its cells have
    extensions, only the bytes can tell: each way is tried, and only one that ends on the very last byte counts.

    Args:
        data: the state's bytes, anything with the buffer protocol.
        form: whole context, or one sequence.
        memory: the parts that it must have.
        partial: it was written with `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`, which leaves out what can be cut.
        any_streams: take one of a context with several sequences, too, of which only one has cells.

    Raises:
        TruncatedState: it ends too early or too late.
        UnknownLayout: a field has a value that this memory can't have.
    """
    buffer: Bytes = np.frombuffer(data, np.uint8)
    furthest, why = -1, LayoutError("")
    for shape in _shapes(memory, partial):
        exts = (False, True) if memory.ext is None else (memory.ext,)
        for ext, *values in product(exts, *[(True, False)] * (shape.caches + shape.window)):
            cursor = BufferReader(buffer, MAX_STREAMS if any_streams else 1)
            try:
                return _read(cursor, form, shape, memory.v_trans, ext, values)
            except LayoutError as error:
                # The way that went furthest says best what is wrong.
                if cursor.at > furthest:
                    furthest, why = cursor.at, error
    raise why if furthest >= 0 else UnknownLayout(f"states of an {memory.kind.value} memory are known to nobody but llama.cpp")


def _read(cursor: BufferReader, form: Form, shape: _Shape, v_trans: bool | None, ext: bool, values: Sequence[bool]) -> State:
    _skip_head(cursor, form)
    caches = [_attention(cursor, v_trans, ext, has_values) for has_values in values]
    window = caches.pop() if shape.window else None
    recurrent = _recurrent(cursor, form) if shape.recurrent else None
    if cursor.left:
        raise TruncatedState(f"the state has {cursor.data.size} bytes, its parts end at {cursor.at}")
    if recurrent is None and not any(cells.layout.n_layer for cells in (*caches, window) if cells is not None):
        raise UnknownLayout("a model can't have 0 attention layers and nothing else")
    return State(tuple(caches), window, recurrent)


def architecture(data: Any) -> str:
    """The architecture that a state in the whole form names.

    Raises:
        LayoutError: it names none.
    """
    name = _architecture(BufferReader(np.frombuffer(data, np.uint8)))
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise UnknownLayout(f"the name of the architecture is no text: {name[:32]!r}") from error


def _architecture(cursor: BufferReader) -> bytes:
    length = cursor.u32()
    if not 0 < length <= MAX_ARCH_BYTES:
        raise UnknownLayout(f"the name of an architecture can't have {length} bytes")
    return cursor.take(length).tobytes()


def _skip_head(cursor: BufferReader, form: Form) -> None:
    if form is Form.WHOLE:
        _architecture(cursor)
        return
    magic = cursor.u32()
    if magic != SEQUENCE_MAGIC:
        raise UnknownLayout(f"a sequence starts with {SEQUENCE_MAGIC:#x}, this with {magic:#x}")
    cursor.u32()


def _attention(cursor: BufferReader, v_trans: bool | None, ext: bool, has_values: bool) -> Cells:
    n_stream = cursor.u32()
    if not 1 <= n_stream <= cursor.max_streams:
        raise UnknownLayout(f"the state has {n_stream} streams; one is expected")
    behind = n_stream - 1
    while (n_cells := cursor.u32()) == 0:
        if behind == 0:
            raise UnknownLayout("the state holds no cells")
        behind -= 1
    positions, extensions = _cells(cursor, n_cells, ext)
    found_trans, sections, arrays = _tensors(cursor, n_cells, v_trans, has_values)
    for _ in range(behind):
        if cursor.u32() != 0:
            raise UnknownLayout("the state holds more than one sequence")
    n_layer = sum(found.role is Role.KEY for found in sections)
    if ext:
        sections, arrays = [Section(Role.EXT, 0, 1, EXT_BYTES), *sections], [extensions, *arrays]
    return Cells(Layout(found_trans, n_layer, ext, tuple(sections)), positions, tuple(arrays))


def _cells(cursor: BufferReader, n_cells: int, ext: bool) -> tuple[npt.NDArray[np.int32], Bytes]:
    size = CELL_BYTES + (EXT_BYTES if ext else 0)
    at = cursor.at
    records = cursor.take(n_cells * size).reshape(n_cells, size)
    behind, cursor.at = cursor.at, at  # only cells that make sense are a way that went far
    fields = np.ascontiguousarray(records[:, :8]).view("<i4")
    sequences = np.ascontiguousarray(records[:, -4:]).view("<i4")
    if (fields[:, 1] != 1).any() or (sequences != sequences[0]).any():
        raise UnknownLayout("cells belong to other sequences than one")
    if (fields[:, 0] < 0).any():
        raise UnknownLayout("a cell has a negative position")
    cursor.at = behind
    return fields[:, 0], records[:, 8:-4].reshape(1, n_cells, size - CELL_BYTES)


def _tensors(
    cursor: BufferReader, n_cells: int, v_trans: bool | None, has_values: bool
) -> tuple[bool, list[Section], list[Bytes]]:
    found_trans, n_layer = cursor.read(_PAIR)
    if found_trans not in (0, 1) or v_trans not in (None, bool(found_trans)):
        raise UnknownLayout(f"the state says v_trans {found_trans}, the context's settings say {v_trans}")
    if n_layer > MAX_LAYERS:
        raise UnknownLayout(f"a model can't have {n_layer} attention layers")
    sections: list[Section] = []
    arrays: list[Bytes] = []

    def tensor(found: Section) -> None:
        sections.append(found)
        data = cursor.take(found.token_bytes * n_cells)
        arrays.append(data.reshape(found.outer, n_cells, found.inner))

    for _ in range(n_layer):
        type_, inner = cursor.read(ROWS)
        tensor(section(Role.KEY, type_, 1, inner))
    for _ in range(n_layer if has_values else 0):
        if found_trans:
            type_, inner, outer = cursor.read(COLUMNS)
            tensor(section(Role.VALUE_COLUMNS, type_, outer, inner))
        else:
            type_, inner = cursor.read(ROWS)
            tensor(section(Role.VALUE_ROWS, type_, 1, inner))
    return bool(found_trans), sections, arrays


def _recurrent(cursor: BufferReader, form: Form) -> Recurrent:
    """The last part of a state. Its tensors are kept as one run: nothing in it is ever cut."""
    n_cells = cursor.u32()
    if n_cells != 1:
        raise UnknownLayout(f"the recurrent part has {n_cells} cells; one is expected")
    pos, n_sequences = cursor.read(_CELL_HEAD)
    if pos < 0 or n_sequences != (form is Form.WHOLE):
        raise UnknownLayout(f"the recurrent cell is at position {pos} and in {n_sequences} sequences")
    cursor.take(4 * n_sequences)
    data = cursor.data[cursor.at :]
    s_trans, n_layer = cursor.read(_PAIR)
    if s_trans != 0 or not 0 < n_layer <= MAX_LAYERS:
        raise UnknownLayout(f"the recurrent part says s_trans {s_trans} and {n_layer} layers")
    n_tensors = 0
    while cursor.left:
        at = cursor.at
        type_, size = cursor.read(ROWS)
        if type_ not in _RECURRENT_TYPES or size > cursor.left:
            # Some models have a second row behind the first, with a size but no type.
            cursor.at = at
            (size,) = cursor.read(_U64)
        else:
            n_tensors += 1
        cursor.take(size)
    # Two for each recurrent layer; the second one may be empty (short convolutions have no state of that kind).
    if n_tensors % 2 or not 0 < n_tensors <= 2 * n_layer:
        raise UnknownLayout(f"the recurrent part has {n_tensors} tensors in {n_layer} layers")
    return Recurrent(pos, data)


def partial_of(state: Bytes, memory: Memory) -> Bytes:
    """What of a one-sequence state llama.cpp would have written with `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`.

    Raises:
        LayoutError: it isn't such a state.
    """
    parsed = parse(state, Form.SEQUENCE, memory)
    kept = sum(_attention_bytes(cells) for cells in parsed.caches)
    head = struct.calcsize("<Ii")
    return np.concatenate([state[:head], state[head + kept :]])


def _attention_bytes(cells: Cells) -> int:
    layout, n_cells = cells.layout, len(cells.positions)
    heads = sum(len(found.head()) for found in layout.sections if found.role is not Role.EXT)
    tensors = sum(found.token_bytes for found in layout.sections if found.role is not Role.EXT)
    return 2 * _PAIR.size + n_cells * (layout.cell_bytes + tensors) + heads


def empty(arch: str, n_caches: int) -> Bytes:
    """The whole form of a context that holds nothing.

    Args:
        arch: name of the architecture.
        n_caches: attention caches that its memory has; nothing else.
    """
    nothing = _PAIR.pack(1, 0)
    return np.frombuffer(U32.pack(len(arch)) + arch.encode() + nothing * n_caches, np.uint8)


class Windowed(NamedTuple):
    """The windowed cache of a state to be written.

    Attributes:
        layout: what its sections are.
        first: its lowest position; the others follow up to the state's last one.
    """

    layout: Layout
    first: int


def blank(
    caches: Sequence[Layout],
    n_tokens: int,
    form: Form = Form.SEQUENCE,
    arch: str = "",
    *,
    window: Windowed | None = None,
    recurrent_bytes: int | None = None,
) -> tuple[Bytes, State]:
    """A state of the positions 0 to `n_tokens - 1` with every field written and every section left to fill.

    Args:
        caches: layouts of the attention caches that keep every position.
        n_tokens: number of positions.
        form: which head to write. The sequence form loads faster: the whole form makes llama.cpp clear all of n_ctx
            first (143 ms at 65,536, against 1.1).
        arch: name of the architecture, for the whole form.
        window: the windowed cache, if the memory has one.
        recurrent_bytes: bytes of the recurrent tensors, if it has some.

    Returns:
        The buffer, and the views through which it is filled.
    """
    if form is Form.WHOLE:
        head = U32.pack(len(arch)) + arch.encode()
    else:
        head = struct.pack("<Ii", SEQUENCE_MAGIC, SEQ_ID)
    writer = BufferWriter()
    writer.put(head)
    fills: list[Callable[[], Cells]] = [_put_attention(writer, layout, 0, n_tokens) for layout in caches]
    in_window = None if window is None else _put_attention(writer, window.layout, window.first, n_tokens)
    tensors = None
    if recurrent_bytes is not None:
        # The one-sequence form leaves out the sequence that its head names.
        sequences = (SEQ_ID,) if form is Form.WHOLE else ()
        writer.put(struct.pack(f"<IiI{len(sequences)}i", 1, n_tokens - 1, len(sequences), *sequences))
        tensors = writer.room(recurrent_bytes)
    buffer = writer.finish()
    return buffer, State(
        tuple(cells() for cells in fills),
        None if in_window is None else in_window(),
        None if tensors is None else Recurrent(n_tokens - 1, tensors()),
    )


def _put_attention(writer: BufferWriter, layout: Layout, first: int, end: int) -> Callable[[], Cells]:
    """Write the cells at positions `first` to `end - 1` of one cache. Returns what gives them, once the buffer is made."""
    n_cells = end - first
    positions = np.arange(first, end, dtype="<i4")
    writer.put(_PAIR.pack(1, n_cells))
    records = np.zeros((n_cells, layout.cell_bytes), np.uint8)
    records[:, :4] = positions[:, None].view(np.uint8)
    records[:, 4:8] = np.frombuffer(U32.pack(1), np.uint8)
    records[:, -4:] = np.frombuffer(U32.pack(SEQ_ID), np.uint8)
    own_cells = writer.put(records.reshape(-1))
    writer.put(_PAIR.pack(layout.v_trans, layout.n_layer))
    tensors: list[tuple[Section, Callable[[], Bytes]]] = []
    for found in layout.sections:
        if found.role is not Role.EXT:
            writer.put(found.head())
            tensors.append((found, writer.room(found.token_bytes * n_cells)))

    def views() -> Cells:
        arrays = [data().reshape(found.outer, n_cells, found.inner) for found, data in tensors]
        if layout.ext:
            own = own_cells().reshape(1, n_cells, layout.cell_bytes)
            arrays.insert(0, own[:, :, 8 : 8 + EXT_BYTES])
        return Cells(layout, positions.astype(np.int32), tuple(arrays))

    return views
