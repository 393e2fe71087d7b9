"""llama.cpp's bytes: parsed strictly, written back exactly, refused rather than guessed."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import llamas
import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import filled, layouts
from llamas import DENSE_SETTINGS, Setting
from synthetic import (
    ARCH,
    HYBRID,
    NO_LAYERS,
    RECURRENT,
    TWO_CACHES,
    Made,
    dense_layout,
    hybrid_window_model,
    random_tokens,
    state_of,
    window_model,
)

from kvkeep.cache.adapters.context import PARTIAL_ONLY, LiveContext
from kvkeep.cache.layout import EXT_BYTES, Bytes, Cells, Layout, Role, Section
from kvkeep.cache.memory import Memory, MemoryKind, Window
from kvkeep.cache.state import SEQUENCE_MAGIC, Form, State, Windowed, blank, parse, partial_of
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
@pytest.mark.parametrize("name", ["hybrid", "recurrent"])
def test_real_state_of_another_memory_is_refused(request: pytest.FixtureRequest, name: str, ext: bool, form: Form) -> None:
    data = real_states(request.getfixturevalue(name), DENSE_SETTINGS[0])[form]
    with pytest.raises(LayoutError):
        attention(data, form, v_trans=None, ext=ext)


@pytest.mark.parametrize("form", Form)
def test_bytes_alone_dont_tell_a_window_from_a_second_cache(window: str, form: Form) -> None:
    data = real_states(window, DENSE_SETTINGS[0])[form]
    kinds = (Memory(MemoryKind.ATTENTION), Memory(MemoryKind.WINDOW, Window(models.N_WINDOW)))
    as_two, as_window = (parse(data, form, memory) for memory in kinds)
    assert [cells.layout for cells in as_two.caches] == [as_window.caches[0].layout, in_window(as_window).layout]
    for memory in (Memory(MemoryKind.RECURRENT), Memory(MemoryKind.HYBRID), Memory(MemoryKind.HYBRID, Window(64))):
        with pytest.raises(LayoutError):
            parse(data, form, memory)


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


# -- several parts ------------------------------------------------------------------------------------------------------


def in_window(state: State) -> Cells:
    assert state.window is not None
    return state.window


def tensors(*sizes: int, n_layer: int = 2, type_: int = 0) -> bytes:
    """A recurrent part from s_trans on, with one row a size."""
    rows = (struct.pack("<iQ", type_, size) + np.random.default_rng(size).bytes(size) for size in sizes)
    return struct.pack("<II", 0, n_layer) + b"".join(rows)


@dataclass(frozen=True)
class Parts:
    """What a random state consists of."""

    memory: Memory
    caches: tuple[Layout, ...]
    window: Windowed | None
    tensors: bytes | None
    n_tokens: int


@st.composite
def parts(draw: st.DrawFn) -> Parts:
    """Any shape that there is."""
    ext, v_trans, n_tokens = draw(st.booleans()), draw(st.booleans()), draw(st.integers(1, 9))
    cache = layouts(ext=ext, v_trans=v_trans)
    kind, n_caches, has_window, has_tensors = draw(
        st.sampled_from(
            [
                (MemoryKind.ATTENTION, 1, False, False),
                (MemoryKind.ATTENTION, 2, False, False),
                (MemoryKind.WINDOW, 1, True, False),
                (MemoryKind.WINDOW, 2, True, False),
                (MemoryKind.RECURRENT, 0, False, True),
                (MemoryKind.HYBRID, 1, False, True),
                (MemoryKind.HYBRID, 1, True, True),
            ]
        )
    )
    caches = tuple(draw(cache) for _ in range(n_caches))
    if (has_window or has_tensors) and caches and draw(st.booleans()):
        no_layers = Layout(v_trans, 0, ext, (Section(Role.EXT, 0, 1, EXT_BYTES),) if ext else ())
        caches = (no_layers, *caches[1:])
    first = draw(st.integers(0, n_tokens - 1))
    windowed = Windowed(draw(cache), first) if has_window else None
    rows = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    told = draw(st.booleans())
    memory = Memory(
        kind,
        Window(draw(st.integers(1, 9))) if has_window else None,
        v_trans if draw(st.booleans()) else None,
        ext if told else None,
    )
    return Parts(memory, caches, windowed, tensors(*rows, *rows, n_layer=4) if has_tensors else None, n_tokens)


def every_cache(state: State) -> list[Cells]:
    return [*state.caches, *([] if state.window is None else [state.window])]


def written(given: Parts, form: Form, *, partial: bool = False, seed: int = 0) -> tuple[Bytes, State]:
    """A state of random keys and values."""
    caches = () if partial and given.memory.kind is not MemoryKind.ATTENTION else given.caches
    size = None if given.tensors is None else len(given.tensors)
    buffer, state = blank(caches, given.n_tokens, form, ARCH, window=given.window, recurrent_bytes=size)
    rng = np.random.default_rng(seed)
    for cells in every_cache(state):
        for array in cells.arrays:
            array[...] = rng.integers(0, 256, array.shape, np.uint8)
    if state.recurrent is not None:
        state.recurrent.data[:] = np.frombuffer(given.tensors or b"", np.uint8)
    return buffer, state


def assert_same(found: State, expected: State) -> None:
    assert (len(found.caches), found.window is None) == (len(expected.caches), expected.window is None)
    for mine, theirs in zip(every_cache(found), every_cache(expected), strict=True):
        assert mine.layout == theirs.layout
        assert mine.positions.tolist() == theirs.positions.tolist()
        assert all(np.array_equal(a, b) for a, b in zip(mine.arrays, theirs.arrays, strict=True))
    assert (found.recurrent is None) == (expected.recurrent is None)
    if found.recurrent is not None and expected.recurrent is not None:
        assert found.recurrent.pos == expected.recurrent.pos
        assert np.array_equal(found.recurrent.data, expected.recurrent.data)


@given(given_parts=parts(), form=st.sampled_from(Form), partial=st.booleans(), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=300)
def test_every_shape_that_is_written_is_read(given_parts: Parts, form: Form, partial: bool, seed: int) -> None:
    partial = partial and form is Form.SEQUENCE
    buffer, state = written(given_parts, form, partial=partial, seed=seed)
    assert_same(parse(buffer, form, given_parts.memory, partial=partial), state)


@given(given_parts=parts(), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=100)
def test_the_partial_state_is_what_cant_be_cut_of_the_full_one(given_parts: Parts, seed: int) -> None:
    full, state = written(given_parts, Form.SEQUENCE, seed=seed)
    partial = partial_of(full, given_parts.memory)
    if given_parts.memory.kind is MemoryKind.ATTENTION:
        # Nothing is left of it but the head.
        assert partial.size == 8
        return
    assert_same(parse(partial, Form.SEQUENCE, given_parts.memory, partial=True), replace(state, caches=()))


_ROW = struct.calcsize("<iQ")

# A few tokens of each shape, and how many bytes less give a state that is complete as well: a second cache that isn't
# there, keys without values, or one recurrent row less. How many of those a model has, the bytes don't say.
SHAPES = {
    "two caches": replace(TWO_CACHES, caches=(dense_layout(1, 2, mla=True), dense_layout(1, 2, mla=True))),
    "window": replace(window_model(2), caches=(dense_layout(1, 2, mla=True),), window=dense_layout(1, 2, mla=True)),
    "recurrent": replace(RECURRENT, tensor_bytes=8),
    "hybrid": replace(HYBRID, caches=(dense_layout(1, 2),), tensor_bytes=8),
    "hybrid with a window": replace(hybrid_window_model(2), window=dense_layout(1, 2), tensor_bytes=8),
    "window only": replace(window_model(2), caches=(NO_LAYERS,), window=dense_layout(1, 2, mla=True)),
}


def shorter_states(made: Made, form: Form) -> set[int]:
    """Bytes of states that are complete, although their model has written more."""
    whole = made.state([1, 2, 3], form).size
    if made.tensor_bytes:
        return {whole - _ROW - made.tensor_bytes}
    if made.window is None:
        return {replace(made, caches=made.caches[:1]).state([1, 2, 3], form).size}
    return set()


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("name", SHAPES)
def test_every_truncation_of_every_shape_is_refused(name: str, form: Form) -> None:
    made = SHAPES[name]
    data = made.state([1, 2, 3], form)
    parse(data, form, made.memory)
    complete = shorter_states(made, form)
    taken = []
    for length in range(data.size):
        try:
            parse(data[:length], form, made.memory)
        except LayoutError:
            continue
        taken.append(length)
    assert set(taken) <= complete, "a recurrent part has one row at least"


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("more", [1, 4, 8, 12, 16, 1000])
def test_bytes_behind_any_shape_are_refused(name: str, form: Form, more: int) -> None:
    made = SHAPES[name]
    data = made.state([1, 2, 3], form)
    for tail in (np.zeros(more, np.uint8), np.full(more, 255, np.uint8)):
        with pytest.raises(LayoutError):
            parse(np.concatenate([data, tail]), form, made.memory)


@pytest.mark.parametrize("name", ["window", "recurrent", "hybrid", "hybrid with a window"])
def test_partial_and_full_states_arent_taken_for_each_other(name: str) -> None:
    made = SHAPES[name]
    full, partial = made.state([1, 2, 3]), made.point([1, 2, 3]).data
    assert np.array_equal(partial_of(full, made.memory), partial)
    parse(partial, Form.SEQUENCE, made.memory, partial=True)
    if made.caches:
        with pytest.raises(LayoutError):
            parse(full, Form.SEQUENCE, made.memory, partial=True)
        with pytest.raises(LayoutError):
            parse(partial, Form.SEQUENCE, made.memory)


def recurrent_state(
    form: Form, *, n_cells: int = 1, pos: int = 2, seq_ids: Sequence[int] | None = None, part: bytes = tensors(8, 8)
) -> bytes:
    """A state of nothing but recurrent tensors."""
    known = [0] if form is Form.WHOLE else []
    ids = known if seq_ids is None else seq_ids
    head = HEAD if form is Form.SEQUENCE else struct.pack("<I", len(ARCH)) + ARCH.encode()
    return head + struct.pack(f"<IiI{len(ids)}i", n_cells, pos, len(ids), *ids) + part


def recurrent_parsed(data: Any, form: Form) -> State:
    return parse(data, form, Memory(MemoryKind.RECURRENT))


@pytest.mark.parametrize("form", Form)
def test_recurrent_tensors_are_one_run_behind_their_position(form: Form) -> None:
    found = recurrent_parsed(recurrent_state(form, pos=41), form).recurrent
    assert found is not None
    assert (found.pos, found.data.tobytes()) == (41, tensors(8, 8))


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("n_cells", [0, 2, 3, 2**31, 2**32 - 1])
def test_another_number_of_recurrent_cells_is_refused(form: Form, n_cells: int) -> None:
    with pytest.raises(UnknownLayout, match=f"{n_cells} cells"):
        recurrent_parsed(recurrent_state(form, n_cells=n_cells), form)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("pos", [-1, -(2**31)])
def test_a_recurrent_cell_before_the_beginning_is_refused(form: Form, pos: int) -> None:
    with pytest.raises(UnknownLayout, match=f"position {pos}"):
        recurrent_parsed(recurrent_state(form, pos=pos), form)


@pytest.mark.parametrize(("form", "seq_ids"), [(Form.WHOLE, []), (Form.WHOLE, [0, 1]), (Form.SEQUENCE, [0])])
def test_a_recurrent_cell_of_other_sequences_is_refused(form: Form, seq_ids: list[int]) -> None:
    with pytest.raises(UnknownLayout, match="sequences"):
        recurrent_parsed(recurrent_state(form, seq_ids=seq_ids), form)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(struct.pack("<II", 1, 2) + tensors(8)[8:], id="s_trans"),
        pytest.param(tensors(8, n_layer=0), id="no layers"),
        pytest.param(tensors(8, n_layer=4097), id="too many layers"),
        pytest.param(tensors(), id="no rows"),
        pytest.param(tensors(8) + struct.pack("<iQ", 0, 2**63), id="huge row"),
        pytest.param(tensors(8) + struct.pack("<iQ", 99, 8) + bytes(8), id="unknown type"),
    ],
)
def test_a_recurrent_part_that_cant_be_is_refused(part: bytes) -> None:
    with pytest.raises(LayoutError):
        recurrent_parsed(recurrent_state(Form.SEQUENCE, part=part), Form.SEQUENCE)


def test_a_second_recurrent_row_without_a_type_is_read() -> None:
    part = tensors(8) + struct.pack("<Q", 24) + bytes(24) + struct.pack("<iQ", 0, 8) + bytes(8)
    found = recurrent_parsed(recurrent_state(Form.SEQUENCE, part=part), Form.SEQUENCE).recurrent
    assert found is not None
    assert found.data.tobytes() == part


def test_caches_without_any_layer_are_no_memory() -> None:
    data = blank([NO_LAYERS], 3)[0]
    with pytest.raises(UnknownLayout, match="0 attention layers"):
        parse(data, Form.SEQUENCE, Memory(MemoryKind.ATTENTION))


@pytest.mark.parametrize("form", Form)
def test_a_memory_of_its_own_kind_is_never_parsed(form: Form) -> None:
    with pytest.raises(UnknownLayout, match=r"nobody but llama\.cpp"):
        parse(state_of(dense_layout(), [1, 2], form), form, Memory(MemoryKind.UNKNOWN))


# -- the same, written by llama.cpp --------------------------------------------------------------------------------------

MEMORIES = ["hybrid", "hybrid_window", "window", "recurrent", "falcon_h1", "mla", "two_caches"]
FLASH = {False: DENSE_SETTINGS[0], True: DENSE_SETTINGS[4]}


def written_anew(data: Bytes, form: Form, arch: str, memory: Memory, n_tokens: int) -> Bytes:
    """The state parsed, and written anew from its parts."""
    state = parse(data, form, memory)
    windowed = None if state.window is None else Windowed(state.window.layout, int(state.window.positions.min()))
    size = None if state.recurrent is None else state.recurrent.data.size
    buffer, copy = blank([c.layout for c in state.caches], n_tokens, form, arch, window=windowed, recurrent_bytes=size)
    for mine, theirs in zip(every_cache(copy), every_cache(state), strict=True):
        for target, source in zip(mine.arrays, theirs.arrays, strict=True):
            target[...] = source
    if copy.recurrent is not None and state.recurrent is not None:
        assert state.recurrent.pos == n_tokens - 1
        copy.recurrent.data[:] = state.recurrent.data
    return buffer


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("name", MEMORIES)
def test_real_state_of_every_memory_is_written_back_byte_for_byte(
    request: pytest.FixtureRequest, name: str, flash_attn: bool
) -> None:
    llm = llamas.load(request.getfixturevalue(name), **FLASH[flash_attn].options)
    llm.eval(llamas.random_tokens(150))
    live = LiveContext(llm)
    memory, arch = live.memory, llm.metadata["general.architecture"]
    states = {Form.SEQUENCE: llamas.sequence_state(llm), Form.WHOLE: llamas.whole_state(llm)}
    partial = live._context.copy(0, PARTIAL_ONLY)
    llm.close()
    for form, data in states.items():
        assert np.array_equal(written_anew(data, form, arch, memory, 150), data)
    if memory.kind is not MemoryKind.ATTENTION:
        assert np.array_equal(partial_of(states[Form.SEQUENCE], memory), partial)
        parse(partial, Form.SEQUENCE, memory, partial=True)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("kind", MemoryKind)
@pytest.mark.parametrize("size", [None, 64])
def test_real_state_of_a_memory_of_its_own_is_refused(opaque: str, kind: MemoryKind, size: int | None, form: Form) -> None:
    data = real_states(opaque, DENSE_SETTINGS[0])[form]
    with pytest.raises(LayoutError):
        parse(data, form, Memory(kind, None if size is None else Window(size)))


def test_the_window_of_a_real_state_is_as_long_as_it_says(window: str) -> None:
    memory = Memory(MemoryKind.WINDOW, Window(models.N_WINDOW))
    states = real_states(window, DENSE_SETTINGS[0])
    assert memory.window is not None
    assert in_window(parse(states[Form.SEQUENCE], Form.SEQUENCE, memory)).positions.min() == memory.window.first_written(150)
    assert in_window(parse(states[Form.WHOLE], Form.WHOLE, memory)).positions.min() == 0
