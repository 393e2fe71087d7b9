"""Random layouts of attention caches, for property tests."""

import numpy as np
from hypothesis import strategies as st
from synthetic import ARCH

from kvkeep.cache.layout import ELEMENT_TYPES, EXT_BYTES, Bytes, Cells, Layout, Role, Section
from kvkeep.cache.state import Form, blank

PLAIN_TYPES = [number for number, element in ELEMENT_TYPES.items() if element.block == 1]


@st.composite
def layouts(draw: st.DrawFn, *, ext: bool | None = None, v_trans: bool | None = None) -> Layout:
    """Anything that one attention cache can have; with extensions and transposed values or without, if that is given."""
    n_layer = draw(st.integers(1, 3))
    ext = draw(st.booleans()) if ext is None else ext
    mla = draw(st.booleans())
    v_trans = draw(st.booleans()) if v_trans is None else v_trans

    def rows(role: Role) -> Section:
        type_ = draw(st.sampled_from(list(ELEMENT_TYPES)))
        return Section(role, type_, 1, ELEMENT_TYPES[type_].size * draw(st.integers(1, 3)))

    def columns() -> Section:
        type_ = draw(st.sampled_from(PLAIN_TYPES))
        return Section(Role.VALUE_COLUMNS, type_, draw(st.integers(1, 5)), ELEMENT_TYPES[type_].size)

    keys = [rows(Role.KEY) for _ in range(n_layer)]
    values = [] if mla else [columns() if v_trans else rows(Role.VALUE_ROWS) for _ in range(n_layer)]
    cells = [Section(Role.EXT, 0, 1, EXT_BYTES)] if ext else []
    return Layout(v_trans, n_layer, ext, (*cells, *keys, *values))


def filled(layout: Layout, n_cells: int, form: Form = Form.SEQUENCE, seed: int = 0) -> tuple[Bytes, Cells]:
    """A state of random bytes."""
    buffer, state = blank([layout], n_cells, form, ARCH)
    (cells,) = state.caches
    rng = np.random.default_rng(seed)
    for array in cells.arrays:
        array[...] = rng.integers(0, 256, array.shape, np.uint8)
    return buffer, cells
