"""llama.cpp's bytes: parsed strictly, written back exactly, refused rather than guessed."""

import struct
from dataclasses import replace

import llamas
import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import filled, layouts
from llamas import DENSE_SETTINGS, Setting
from synthetic import ARCH, dense_layout, random_tokens, state_of

from kvkeep.cache.layout import Bytes, Cells, Layout, Role, Section, unpack_all
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.cache.state import SEQUENCE_MAGIC, Form, blank, parse
from kvkeep.store.errors import LayoutError, UnknownLayout


def attention(data: object, form: Form, *, v_trans: bool | None, ext: bool) -> Cells:
    """The one cache of a plain-attention state."""
    (cells,) = parse(data, form, Memory(MemoryKind.ATTENTION, None, v_trans, ext)).caches
    return cells


def read(data: Bytes, form: Form, layout: Layout) -> Cells:
    return attention(data, form, v_trans=layout.v_trans, ext=layout.ext)


@given(layout=layouts(), n_cells=st.integers(1, 9), form=st.sampled_from(Form), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_what_is_written_is_read(layout: Layout, n_cells: int, form: Form, seed: int) -> None:
    buffer, state = filled(layout, n_cells, form, seed)
    found = read(buffer, form, layout)
    assert found.layout == layout
    assert found.positions.tolist() == list(range(n_cells))
    for mine, theirs in zip(state.arrays, found.arrays, strict=True):
        assert mine.shape == theirs.shape
        assert np.array_equal(mine, theirs)


@given(layout=layouts())
@settings(deadline=None, max_examples=100)
def test_layout_survives_packing(layout: Layout) -> None:
    assert unpack_all(layout.pack()) == layout


@given(layout=layouts(), cut=st.integers(1, 400))
@settings(deadline=None, max_examples=50)
def test_truncated_layout_is_refused(layout: Layout, cut: int) -> None:
    packed = layout.pack()
    with pytest.raises(UnknownLayout):
        unpack_all(packed[: max(0, len(packed) - cut)])
    with pytest.raises(UnknownLayout):
        unpack_all(packed + b"\0")


def test_released_layout_bytes_stay_readable() -> None:
    key = b"\1\0\0\0" + struct.pack("<iII", 1, 1, 64)
    value = b"\3\0\0\0" + struct.pack("<iII", 1, 32, 2)
    packed = b"\1\1\0\0" + struct.pack("<HH", 1, 2) + key + value
    layout = Layout(True, 1, False, (Section(Role.KEY, 1, 1, 64), Section(Role.VALUE_COLUMNS, 1, 32, 2)))
    assert unpack_all(packed) == layout
    assert layout.pack() == packed


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param((0, 2), id="version"),
        pytest.param((8, 9), id="role"),
        pytest.param((12, 99), id="type"),
        pytest.param((16, 2), id="outer of a row"),
        pytest.param((20, 63), id="inner that no type has"),
        pytest.param((20, 0), id="no inner"),
    ],
)
def test_layout_that_cant_be_is_refused(damage: tuple[int, int]) -> None:
    packed = bytearray(dense_layout(1).pack())
    at, value = damage
    packed[at] = value
    with pytest.raises(UnknownLayout):
        unpack_all(bytes(packed))


SMALL = [
    pytest.param(layout, form, id=f"{name} {form.value}")
    for form in Form
    for name, layout in {
        "plain": dense_layout(1, 4),
        "transposed": dense_layout(1, 4, v_trans=True),
        "extended": dense_layout(1, 4, ext=True),
        "mla": dense_layout(1, 4, mla=True),
    }.items()
]


@pytest.mark.parametrize(("layout", "form"), SMALL)
def test_every_truncation_is_refused(layout: Layout, form: Form) -> None:
    buffer, _ = filled(layout, 3, form)
    # MLA's bytes are those of a model with values up to there: nothing tells the two apart but the model.
    keys = replace(layout, sections=tuple(s for s in layout.sections if s.role in (Role.EXT, Role.KEY)))
    keys_only = blank([keys], 3, form, ARCH)
    for length in range(buffer.size):
        if length == keys_only[0].size:
            continue
        with pytest.raises(LayoutError):
            read(buffer[:length], form, layout)


@pytest.mark.parametrize(("layout", "form"), SMALL)
@pytest.mark.parametrize("more", [1, 4, 12, 1000])
def test_appended_bytes_are_refused(layout: Layout, form: Form, more: int) -> None:
    buffer, _ = filled(layout, 3, form)
    for tail in (np.zeros(more, np.uint8), np.full(more, 255, np.uint8)):
        with pytest.raises(LayoutError):
            read(np.concatenate([buffer, tail]), form, layout)


def shapes(layout: Layout) -> list[tuple[Role, int, int]]:
    return [(section.role, section.outer, section.inner) for section in layout.sections]


@pytest.mark.parametrize(("layout", "form"), SMALL)
def test_a_flip_is_refused_or_leaves_everything_in_its_place(layout: Layout, form: Form) -> None:
    buffer, state = filled(layout, 3, form)
    refused = 0
    for at in range(buffer.size):
        for flip in (0x01, 0x02, 0x10, 0x80, 0xFF):
            damaged = buffer.copy()
            damaged[at] ^= flip
            try:
                found = read(damaged, form, layout)
            except LayoutError:
                refused += 1
                continue
            # A flip may sit in the data, in a position, or turn one type into another of the same size: nothing moves.
            assert shapes(found.layout) == shapes(layout)
            assert sum(int((a != b).sum()) for a, b in zip(found.arrays, state.arrays, strict=True)) <= 1
    assert refused > 100


HEAD = struct.pack("<Ii", SEQUENCE_MAGIC, 0)
CELL = struct.pack("<iIi", 0, 1, 0)


@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda n: HEAD + struct.pack("<I", n), id="streams"),
        pytest.param(lambda n: HEAD + struct.pack("<II", 1, n), id="cells"),
        pytest.param(lambda n: HEAD + struct.pack("<II", 1, 1) + CELL + struct.pack("<II", 0, n), id="layers"),
        pytest.param(lambda n: HEAD + struct.pack("<II", 1, 1) + CELL + struct.pack("<II", n, 1), id="v_trans"),
    ],
)
def test_hostile_count_is_refused_without_allocating(count: int, make: object) -> None:
    data = make(count) + bytes(64)  # type: ignore[operator]
    with pytest.raises(LayoutError):
        attention(data, Form.SEQUENCE, v_trans=None, ext=False)


@pytest.mark.parametrize("size", [2**31, 2**32, 2**62, 2**63, 2**64 - 2])
def test_hostile_row_is_refused_without_allocating(size: int) -> None:
    data = HEAD + struct.pack("<II", 1, 1) + CELL + struct.pack("<II", 0, 1) + struct.pack("<iQ", 1, size) + bytes(64)
    with pytest.raises(LayoutError):
        attention(data, Form.SEQUENCE, v_trans=False, ext=False)


@pytest.mark.parametrize(("size", "outer"), [(2, 2**31), (2, 2**32 - 1), (2**32 - 2, 1), (2, 0)])
def test_hostile_columns_are_refused_without_allocating(size: int, outer: int) -> None:
    key = struct.pack("<iQ", 1, 2) + bytes(2)
    data = (
        HEAD
        + struct.pack("<II", 1, 1)
        + CELL
        + struct.pack("<II", 1, 1)
        + key
        + struct.pack("<iII", 1, size, outer)
        + bytes(64)
    )
    with pytest.raises(LayoutError):
        attention(data, Form.SEQUENCE, v_trans=True, ext=False)


@pytest.mark.parametrize("length", [0, 257, 2**31, 2**32 - 1])
def test_hostile_name_of_an_architecture_is_refused(length: int) -> None:
    with pytest.raises(LayoutError):
        attention(struct.pack("<I", length) + bytes(600), Form.WHOLE, v_trans=False, ext=False)


def damaged_cell(pos: int = 0, n_seq_id: int = 1, seq_id: int = 0) -> Bytes:
    """A state of two cells whose second one is as given."""
    buffer, _ = filled(dense_layout(1, 4), 2, Form.SEQUENCE)
    at = len(HEAD) + 8 + len(CELL)
    buffer[at : at + len(CELL)] = np.frombuffer(struct.pack("<iIi", pos, n_seq_id, seq_id), np.uint8)
    return buffer


@pytest.mark.parametrize("cell", [{"pos": -1}, {"n_seq_id": 0}, {"n_seq_id": 2}, {"seq_id": 1}], ids=str)
def test_cells_of_other_sequences_are_refused(cell: dict[str, int]) -> None:
    with pytest.raises(UnknownLayout):
        attention(damaged_cell(**cell), Form.SEQUENCE, v_trans=False, ext=False)


def test_empty_memory_is_refused() -> None:
    with pytest.raises(UnknownLayout, match="no cells"):
        attention(HEAD + struct.pack("<II", 1, 0), Form.SEQUENCE, v_trans=False, ext=False)


@pytest.mark.parametrize("form", Form)
def test_the_other_form_is_refused(form: Form) -> None:
    layout = dense_layout()
    other = Form.WHOLE if form is Form.SEQUENCE else Form.SEQUENCE
    with pytest.raises(LayoutError):
        read(filled(layout, 3, form)[0], other, layout)


@pytest.mark.parametrize("v_trans", [True, False])
def test_settings_and_bytes_must_agree(v_trans: bool) -> None:
    layout = dense_layout(v_trans=v_trans)
    data = filled(layout, 3, Form.SEQUENCE)[0]
    with pytest.raises(UnknownLayout, match="v_trans"):
        attention(data, Form.SEQUENCE, v_trans=not v_trans, ext=False)
    assert attention(data, Form.SEQUENCE, v_trans=None, ext=False).layout == layout
    with pytest.raises(LayoutError):
        attention(data, Form.SEQUENCE, v_trans=v_trans, ext=True)


def test_parsing_copies_nothing() -> None:
    layout = dense_layout(v_trans=True)
    data = state_of(layout, random_tokens(5))
    assert all(np.shares_memory(array, data) for array in read(data, Form.SEQUENCE, layout).arrays)


def test_cutting_tokens_is_slicing_in_every_layout() -> None:
    tokens = random_tokens(9)
    for layout in (dense_layout(), dense_layout(v_trans=True), dense_layout(ext=True)):
        whole = read(state_of(layout, tokens), Form.SEQUENCE, layout)
        part = read(state_of(layout, tokens[:6]), Form.SEQUENCE, layout)
        for a, b in zip(whole.arrays, part.arrays, strict=True):
            assert np.array_equal(a[:, :6, :], b)


# -- states that llama.cpp wrote ----------------------------------------------------------------------------------------


def rewritten(data: Bytes, form: Form, arch: str, v_trans: bool, ext: bool) -> Bytes:
    """The state parsed, and written anew from its sections."""
    state = attention(data, form, v_trans=v_trans, ext=ext)
    buffer, copy = blank([state.layout], state.positions.size, form, arch)
    for mine, theirs in zip(copy.caches[0].arrays, state.arrays, strict=True):
        mine[...] = theirs
    return buffer


_states: dict[tuple[str, str], dict[Form, Bytes]] = {}


def real_states(path: str, setting: Setting) -> dict[Form, Bytes]:
    """Both forms of a context that has decoded 150 tokens. Remembered."""
    if (path, setting.name) not in _states:
        llm = llamas.load(path, **setting.options)
        llm.eval(llamas.random_tokens(150))
        _states[path, setting.name] = {Form.SEQUENCE: llamas.sequence_state(llm), Form.WHOLE: llamas.whole_state(llm)}
        llm.close()
    return _states[path, setting.name]


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("setting", DENSE_SETTINGS, ids=str)
def test_real_dense_state_is_written_back_byte_for_byte(dense: str, setting: Setting, form: Form) -> None:
    v_trans = not setting.options.get("flash_attn", False)
    data = real_states(dense, setting)[form]
    assert np.array_equal(rewritten(data, form, models.DENSE.arch, v_trans, ext=False), data)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("setting", DENSE_SETTINGS, ids=str)
def test_real_state_of_the_other_value_order_is_refused(dense: str, setting: Setting, form: Form) -> None:
    v_trans = not setting.options.get("flash_attn", False)
    with pytest.raises(UnknownLayout, match="v_trans"):
        attention(real_states(dense, setting)[form], form, v_trans=not v_trans, ext=False)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("flash_attn", [False, True])
def test_real_state_with_extensions_is_written_back_byte_for_byte(mrope: str, flash_attn: bool, form: Form) -> None:
    data = real_states(mrope, MROPE_SETTINGS[flash_attn])[form]
    assert np.array_equal(rewritten(data, form, models.MROPE.arch, not flash_attn, ext=True), data)
    with pytest.raises(LayoutError):
        attention(data, form, v_trans=not flash_attn, ext=False)


MROPE_SETTINGS = {False: DENSE_SETTINGS[0], True: DENSE_SETTINGS[4]}


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("ext", [False, True])
@pytest.mark.parametrize("name", ["window", "hybrid"])
def test_real_state_of_another_memory_is_refused(request: pytest.FixtureRequest, name: str, ext: bool, form: Form) -> None:
    data = real_states(request.getfixturevalue(name), DENSE_SETTINGS[0])[form]
    with pytest.raises(LayoutError):
        attention(data, form, v_trans=None, ext=ext)


def test_real_cells_after_a_cut_back_are_taken_by_their_position(dense: str) -> None:
    setting = DENSE_SETTINGS[4]
    tokens = llamas.random_tokens(100)
    llm = llamas.load(dense, **setting.options)
    llm.eval(tokens)
    llm.n_tokens = 40
    llm._ctx.kv_cache_seq_rm(0, 40, -1)
    llm.eval(tokens[40:80])
    state = attention(llamas.sequence_state(llm), Form.SEQUENCE, v_trans=False, ext=False)
    llm.close()
    assert sorted(state.positions.tolist()) == list(range(80))
