"""llama.cpp's state bytes: what is where, strictly. Parsing and its inverse, for plain attention.

Field by field from `llama_kv_cache::state_write` and `llama_context::state_write_data` of the llama.cpp bundled with
llama-cpp-python 0.3.36 (LLAMA_SESSION_VERSION 10, LLAMA_STATE_SEQ_VERSION 3); docs/FORMAT.md has the byte table. All
numbers are little-endian.

K rows and both orders of V are one shape, `(outer, cells, inner)` bytes: outer = 1 and inner = the row of one cell, or,
for V transposed (flash attention off), outer = the embedding's size and inner = one element. So cutting a run of
tokens is `array[:, i:j, :]` everywhere.
"""

import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.store.errors import TruncatedState, UnknownLayout

Bytes = npt.NDArray[np.uint8]

SEQUENCE_MAGIC = 0xAF143CD8
SEQ_ID = 0
EXT_BYTES = 12
# Far above any real model; keep a hostile count from being allocated or looped over.
MAX_LAYERS = 4096
MAX_ARCH_BYTES = 256

_U32 = struct.Struct("<I")
_CELL_HEAD = struct.Struct("<iI")
_DATA_HEAD = struct.Struct("<II")
_ROWS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")


class MemoryKind(Enum):
    """What kind of memory a model has. The model says so; bytes alone can't tell every kind apart."""

    ATTENTION = "attention"
    """Plain attention in every layer: can be cut at any position."""
    WINDOW = "sliding window"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"
    UNKNOWN = "unknown"


class Form(Enum):
    """Which of llama.cpp's two forms a state has."""

    WHOLE = "whole"
    """`llama_state_get_data`: u32 length and name of the architecture, then the memory of all sequences."""
    SEQUENCE = "sequence"
    """`llama_state_seq_get_data`: u32 magic, i32 seq_id, then the memory of one sequence."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """A ggml type that keys and values may have.

    Attributes:
        block: values in one quantisation block.
        size: bytes of one block.
        width: bytes of one number, the width by which bytes are split into planes; 1 where a block is a mixture.
    """

    block: int
    size: int
    width: int


# ggml.h, enum ggml_type, and ggml's type traits. Only what llama.cpp accepts as type_k and type_v.
ELEMENT_TYPES: dict[int, ElementType] = {
    0: ElementType(1, 4, 4),  # f32
    1: ElementType(1, 2, 2),  # f16
    2: ElementType(32, 18, 1),  # q4_0
    3: ElementType(32, 20, 1),  # q4_1
    6: ElementType(32, 22, 1),  # q5_0
    7: ElementType(32, 24, 1),  # q5_1
    8: ElementType(32, 34, 1),  # q8_0
    20: ElementType(32, 18, 1),  # iq4_nl
    30: ElementType(1, 2, 2),  # bf16
}


class Role(IntEnum):
    """What a section holds. Numbers are written to disk."""

    EXT = 0
    """12 bytes a cell (x, y, token) of M-RoPE and n-gram models."""
    KEY = 1
    VALUE_ROWS = 2
    VALUE_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor of the state: `outer * cells * inner` bytes.

    Attributes:
        role: keys of a layer, values of a layer, or cell extensions.
        type: ggml type; 0 for cell extensions.
        outer: 1, or the embedding's size for transposed values.
        inner: bytes of one cell in one of `outer` runs.
    """

    role: Role
    type: int
    outer: int
    inner: int

    @property
    def width(self) -> int:
        """Bytes of one number in it."""
        return 1 if self.role is Role.EXT else ELEMENT_TYPES[self.type].width

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in it."""
        return self.outer * self.inner

    def head(self) -> bytes:
        """llama.cpp's 12 bytes before the tensor's data."""
        if self.role is Role.VALUE_COLUMNS:
            return _COLUMNS.pack(self.type, self.inner, self.outer)
        return _ROWS.pack(self.type, self.inner)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the memory of one sequence is laid out, independent of how many cells it has.

    Attributes:
        v_trans: values are stored transposed (flash attention off).
        n_layer: layers with keys.
        ext: cells carry 12 more bytes.
        sections: cell extensions if any, keys of all layers, values of all layers (or none: MLA).
    """

    v_trans: bool
    n_layer: int
    ext: bool
    sections: tuple[Section, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all sections."""
        return sum(section.token_bytes for section in self.sections)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell's record (pos, n_seq_id, ext, seq_id)."""
        return _CELL_HEAD.size + (EXT_BYTES if self.ext else 0) + 4

    def pack(self) -> bytes:
        """Canonical bytes, stored in every frame; equal layouts give equal bytes."""
        head = struct.pack("<BBBxHH", 1, self.v_trans, self.ext, self.n_layer, len(self.sections))
        return head + b"".join(struct.pack("<BxxxiII", s.role, s.type, s.outer, s.inner) for s in self.sections)

    @staticmethod
    @lru_cache(maxsize=64)
    def unpack(data: bytes) -> "Layout":
        """The inverse of `pack`. Remembered, because every block of a restore carries the same layout.

        Raises:
            UnknownLayout: not a layout, or of a version that this kvkeep doesn't read.
        """
        try:
            version, v_trans, ext, n_layer, n_sections = struct.unpack_from("<BBBxHH", data)
            if version != 1 or len(data) != 8 + 16 * n_sections:
                raise UnknownLayout(f"layout version {version} with {len(data)} bytes is unknown to this version of kvkeep")
            fields = (struct.unpack_from("<BxxxiII", data, 8 + 16 * i) for i in range(n_sections))
            sections = tuple(_section(Role(role), *rest) for role, *rest in fields)
        except (struct.error, ValueError) as error:
            raise UnknownLayout(f"{len(data)} bytes are no layout: {error}") from error
        return Layout(bool(v_trans), n_layer, bool(ext), sections)


@dataclass(frozen=True, slots=True)
class State:
    """A parsed or assembled state: views into one buffer.

    Attributes:
        layout: what the sections are.
        positions: int32, shape (cells,): the position of each cell, in the buffer's order.
        arrays: uint8, one a section, shape (outer, cells, inner): views into the buffer.
    """

    layout: Layout
    positions: npt.NDArray[np.int32]
    arrays: tuple[Bytes, ...]


def _section(role: Role, type_: int, outer: int, inner: int) -> Section:
    """A section whose sizes fit its type.

    Raises:
        UnknownLayout: they don't.
    """
    if role is Role.EXT:
        if (type_, outer, inner) != (0, 1, EXT_BYTES):
            raise UnknownLayout(f"cell extensions have {EXT_BYTES} bytes, not {outer} x {inner}")
        return Section(role, type_, outer, inner)
    element = ELEMENT_TYPES.get(type_)
    if element is None:
        raise UnknownLayout(f"ggml type {type_} isn't known as a type of keys or values")
    if role is Role.VALUE_COLUMNS:
        if element.block != 1 or inner != element.size:
            raise UnknownLayout(f"transposed values of type {type_} can't have elements of {inner} bytes")
    elif outer != 1 or inner == 0 or inner % element.size:
        raise UnknownLayout(f"a row of type {type_} can't have {inner} bytes")
    if outer == 0:
        raise UnknownLayout("transposed values have no columns")
    return Section(role, type_, outer, inner)


class _Cursor:
    """Reads a buffer from front to back and never beyond its end."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> Bytes:
        if count > self.data.size - self.at:
            raise TruncatedState(f"the state ends at byte {self.data.size}, {count} more were announced at {self.at}")
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def read(self, what: struct.Struct) -> tuple[Any, ...]:
        return what.unpack(self.take(what.size).data)

    def u32(self) -> int:
        value: int = self.read(_U32)[0]
        return value


def parse(data: Any, form: Form, *, v_trans: bool | None, ext: bool) -> State:
    """Read the state of a plain-attention memory that holds one sequence. No copy is made.

    Args:
        data: the state's bytes, anything with the buffer protocol.
        form: whole context, or one sequence.
        v_trans: whether the context stores values transposed (flash attention off); None if only the bytes can tell.
        ext: whether its cells carry extensions (M-RoPE).

    Raises:
        TruncatedState: it ends too early or too late.
        UnknownLayout: a field has a value that plain attention with these settings can't have.
    """
    cursor = _Cursor(np.frombuffer(data, np.uint8))
    _skip_head(cursor, form)
    n_stream = cursor.u32()
    if n_stream != 1:
        raise UnknownLayout(f"the state has {n_stream} streams; one is expected")
    n_cells = cursor.u32()
    if n_cells == 0:
        raise UnknownLayout("the state holds no cells")
    positions, extensions = _cells(cursor, n_cells, ext)
    found_trans, sections, arrays = _tensors(cursor, n_cells, v_trans)
    if cursor.at != cursor.data.size:
        raise TruncatedState(f"the state has {cursor.data.size} bytes, plain attention ends at {cursor.at}")
    if ext:
        sections, arrays = [Section(Role.EXT, 0, 1, EXT_BYTES), *sections], [extensions, *arrays]
    n_layer = sum(section.role is Role.KEY for section in sections)
    return State(Layout(found_trans, n_layer, ext, tuple(sections)), positions, tuple(arrays))


def _skip_head(cursor: _Cursor, form: Form) -> None:
    if form is Form.WHOLE:
        length = cursor.u32()
        if not 0 < length <= MAX_ARCH_BYTES:
            raise UnknownLayout(f"the name of an architecture can't have {length} bytes")
        cursor.take(length)
        return
    magic = cursor.u32()
    if magic != SEQUENCE_MAGIC:
        raise UnknownLayout(f"a sequence starts with {SEQUENCE_MAGIC:#x}, this with {magic:#x}")
    cursor.u32()


def _cells(cursor: _Cursor, n_cells: int, ext: bool) -> tuple[npt.NDArray[np.int32], Bytes]:
    size = _CELL_HEAD.size + (EXT_BYTES if ext else 0) + 4
    records = cursor.take(n_cells * size).reshape(n_cells, size)
    fields = np.ascontiguousarray(records[:, :8]).view("<i4")
    sequences = np.ascontiguousarray(records[:, -4:]).view("<i4")
    if (fields[:, 1] != 1).any() or (sequences != sequences[0]).any():
        raise UnknownLayout("cells belong to other sequences than one")
    if (fields[:, 0] < 0).any():
        raise UnknownLayout("a cell has a negative position")
    return fields[:, 0], records[:, 8 : 8 + (size - 12)].reshape(1, n_cells, size - 12)


def _tensors(cursor: _Cursor, n_cells: int, v_trans: bool | None) -> tuple[bool, list[Section], list[Bytes]]:
    found_trans, n_layer = cursor.read(_DATA_HEAD)
    if found_trans not in (0, 1) or v_trans not in (None, bool(found_trans)):
        raise UnknownLayout(f"the state says v_trans {found_trans}, the context's settings say {v_trans}")
    if not 0 < n_layer <= MAX_LAYERS:
        raise UnknownLayout(f"a model can't have {n_layer} attention layers")
    sections: list[Section] = []
    arrays: list[Bytes] = []

    def tensor(section: Section) -> None:
        sections.append(section)
        data = cursor.take(section.token_bytes * n_cells)
        arrays.append(data.reshape(section.outer, n_cells, section.inner))

    for _ in range(n_layer):
        type_, inner = cursor.read(_ROWS)
        tensor(_section(Role.KEY, type_, 1, inner))
    # Values exist in all layers or in none (MLA keeps them inside the keys).
    for _ in range(n_layer if cursor.at < cursor.data.size else 0):
        if found_trans:
            type_, inner, outer = cursor.read(_COLUMNS)
            tensor(_section(Role.VALUE_COLUMNS, type_, outer, inner))
        else:
            type_, inner = cursor.read(_ROWS)
            tensor(_section(Role.VALUE_ROWS, type_, 1, inner))
    return bool(found_trans), sections, arrays


def blank(layout: Layout, n_cells: int, form: Form, arch: str = "") -> tuple[Bytes, State]:
    """A state of `n_cells` cells at positions 0, 1, ... with every field written and every section left to fill.

    Args:
        layout: what the sections are.
        n_cells: number of cells.
        form: which head to write. The sequence form loads faster: the whole form makes llama.cpp clear all of n_ctx
            first (143 ms at 65,536, against 1.1).
        arch: name of the architecture, for the whole form.

    Returns:
        The buffer, and the views through which it is filled.
    """
    if form is Form.WHOLE:
        head = _U32.pack(len(arch)) + arch.encode()
    else:
        head = struct.pack("<Ii", SEQUENCE_MAGIC, SEQ_ID)
    head += struct.pack("<II", 1, n_cells)
    tensors = [section for section in layout.sections if section.role is not Role.EXT]
    cells_end = len(head) + n_cells * layout.cell_bytes
    size = cells_end + _DATA_HEAD.size + sum(len(s.head()) + s.token_bytes * n_cells for s in tensors)
    buffer: Bytes = np.empty(size, np.uint8)
    buffer[: len(head)] = np.frombuffer(head, np.uint8)

    records = buffer[len(head) : cells_end].reshape(n_cells, layout.cell_bytes)
    positions = np.arange(n_cells, dtype="<i4")
    records[:, :4] = positions[:, None].view(np.uint8)
    records[:, 4:8] = np.frombuffer(_U32.pack(1), np.uint8)
    records[:, -4:] = np.frombuffer(_U32.pack(SEQ_ID), np.uint8)
    arrays: list[Bytes] = [records[None, :, 8 : 8 + EXT_BYTES]] if layout.ext else []

    at = cells_end
    buffer[at : at + _DATA_HEAD.size] = np.frombuffer(_DATA_HEAD.pack(layout.v_trans, layout.n_layer), np.uint8)
    at += _DATA_HEAD.size
    for section in tensors:
        tensor_head = section.head()
        buffer[at : at + len(tensor_head)] = np.frombuffer(tensor_head, np.uint8)
        at += len(tensor_head)
        count = section.token_bytes * n_cells
        arrays.append(buffer[at : at + count].reshape(section.outer, n_cells, section.inner))
        at += count
    return buffer, State(layout, positions.astype(np.int32), tuple(arrays))
