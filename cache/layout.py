"""How the keys and values of one attention cache are laid out: sections, their sizes, and their packed description.

K rows and both orders of V are one shape, `(outer, cells, inner)` bytes: outer = 1 and inner = the row of one cell, or,
for V transposed (flash attention off), outer = the embedding's size and inner = one element. So cutting a run of
tokens is `array[:, i:j, :]` everywhere.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvkeep.store.errors import UnknownLayout

Bytes = npt.NDArray[np.uint8]

EXT_BYTES = 12
# Bytes of a cell's record without extensions: i32 pos, u32 n_seq_id, i32 seq_id.
CELL_BYTES = 12

ROWS = struct.Struct("<iQ")
COLUMNS = struct.Struct("<iII")
_LAYOUT = struct.Struct("<BBBxHH")
_SECTION = struct.Struct("<BxxxiII")


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
            return COLUMNS.pack(self.type, self.inner, self.outer)
        return ROWS.pack(self.type, self.inner)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one attention cache is laid out, independent of how many cells it has.

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
        return CELL_BYTES + (EXT_BYTES if self.ext else 0)

    def pack(self) -> bytes:
        """Canonical bytes, stored in every frame; equal layouts give equal bytes."""
        head = _LAYOUT.pack(1, self.v_trans, self.ext, self.n_layer, len(self.sections))
        return head + b"".join(_SECTION.pack(s.role, s.type, s.outer, s.inner) for s in self.sections)


def pack_all(layouts: Sequence[Layout]) -> bytes:
    """The description of the caches that a payload holds one behind the other."""
    return b"".join(layout.pack() for layout in layouts)


@lru_cache(maxsize=64)
def unpack_all(data: bytes) -> tuple[Layout, ...]:
    """The inverse of `pack_all`. Remembered, because every block of a restore carries the same description.

    Raises:
        UnknownLayout: it isn't one, or of a version that this kvkeep doesn't read.
    """
    layouts: list[Layout] = []
    at = 0
    while at < len(data) or not layouts:
        layout, at = _unpack(data, at)
        layouts.append(layout)
    return tuple(layouts)


def _unpack(data: bytes, at: int) -> tuple[Layout, int]:
    try:
        version, v_trans, ext, n_layer, n_sections = _LAYOUT.unpack_from(data, at)
        end = at + _LAYOUT.size + _SECTION.size * n_sections
        if version != 1 or end > len(data):
            raise UnknownLayout(f"layout version {version} with {len(data) - at} bytes is unknown to this version of kvkeep")
        fields = (_SECTION.unpack_from(data, at + _LAYOUT.size + _SECTION.size * i) for i in range(n_sections))
        sections = tuple(section(Role(role), *rest) for role, *rest in fields)
    except (struct.error, ValueError) as error:
        raise UnknownLayout(f"{len(data)} bytes are no layout: {error}") from error
    return Layout(bool(v_trans), n_layer, bool(ext), sections), end


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of one attention cache: views into a state's buffer.

    Attributes:
        layout: what the sections are.
        positions: int32, shape (cells,): the position of each cell, in the buffer's order.
        arrays: uint8, one a section, shape (outer, cells, inner): views into the buffer.
    """

    layout: Layout
    positions: npt.NDArray[np.int32]
    arrays: tuple[Bytes, ...]


def section(role: Role, type_: int, outer: int, inner: int) -> Section:
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
