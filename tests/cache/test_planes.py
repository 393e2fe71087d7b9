"""Byte planes: the sections of some tokens in one payload, and back, whole or in part."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import filled, layouts
from synthetic import dense_layout, random_tokens, state_of

from kvkeep.cache import planes
from kvkeep.cache.layout import Bytes, Cells, Layout
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.cache.state import Form, blank, parse
from kvkeep.store import codec
from kvkeep.store.errors import BadFrame


def split(layout: Layout, arrays: tuple[Bytes, ...]) -> Bytes:
    n_tokens = arrays[0].shape[1]
    payload = np.full(planes.payload_bytes(layout, n_tokens), 0xEE, np.uint8)
    planes.Planes(Cells(layout, np.arange(n_tokens, dtype=np.int32), arrays)).split(0, n_tokens, payload)
    return payload


@given(data=st.data(), layout=layouts(), n_tokens=st.integers(1, 9), first=st.integers(0, 4))
@settings(deadline=None, max_examples=120)
def test_what_is_split_is_joined_whole_or_in_part(data: st.DataObject, layout: Layout, n_tokens: int, first: int) -> None:
    skip = data.draw(st.integers(0, n_tokens))
    take = data.draw(st.integers(0, n_tokens - skip))
    after = data.draw(st.integers(0, 3))
    source = filled(layout, n_tokens)[1].arrays
    _, target = filled(layout, first + take + after + 1, seed=1)
    before = [array.copy() for array in target.arrays]
    planes.Planes(target).join(split(layout, source), n_tokens, take, first, skip=skip)
    for array, original, old in zip(target.arrays, source, before, strict=True):
        assert np.array_equal(array[:, first : first + take], original[:, skip : skip + take])
        # Nobody else's cells are touched: other threads are writing them.
        assert np.array_equal(array[:, :first], old[:, :first])
        assert np.array_equal(array[:, first + take :], old[:, first + take :])


@given(layout=layouts(), n_tokens=st.integers(2, 9), data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_run_in_the_middle_is_split_as_if_it_stood_alone(layout: Layout, n_tokens: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n_tokens - 1))
    stop = data.draw(st.integers(start + 1, n_tokens))
    arrays = filled(layout, n_tokens)[1].arrays
    cut = tuple(array[:, start:stop, :] for array in arrays)
    assert np.array_equal(split(layout, cut), split(layout, tuple(array.copy() for array in cut)))


@given(layout=layouts(), n_tokens=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_a_payload_is_a_permutation_of_its_sections(layout: Layout, n_tokens: int) -> None:
    arrays = filled(layout, n_tokens)[1].arrays
    payload = split(layout, arrays)
    plain = np.concatenate([array.reshape(-1) for array in arrays])
    assert np.array_equal(np.sort(payload), np.sort(plain))


def test_only_what_lies_in_one_buffer_is_worked_at_as_one() -> None:
    """Sections that were put in order have memory of their own. It may stand at equal distances by accident, and numpy's own
    copies lie between.
    """
    pool = bytearray(4 * 100)
    own = [np.frombuffer(memoryview(pool)[at : at + 40], np.uint8).reshape(1, 4, 10) for at in range(0, 400, 100)]
    assert len(list(planes._stacked(own))) == 4
    whole = np.frombuffer(pool, np.uint8)
    views = [whole[at : at + 40].reshape(1, 4, 10) for at in range(0, 400, 100)]
    (stack,) = planes._stacked(views)
    assert stack.shape == (4, 1, 4, 10)
    assert [stack[i].base is not None and np.shares_memory(stack[i], views[i]) for i in range(4)] == [True] * 4


def test_planes_lie_as_the_format_says() -> None:
    layout = dense_layout(1, 2)
    buffer, state = blank([layout], 1)
    state.caches[0].arrays[0][0, 0] = [0x11, 0xAA, 0x22, 0xBB]
    state.caches[0].arrays[1][0, 0] = [0x33, 0xCC, 0x44, 0xDD]
    # All low bytes of keys and values, then all high bytes.
    assert split(layout, state.caches[0].arrays).tolist() == [0x11, 0x22, 0x33, 0x44, 0xAA, 0xBB, 0xCC, 0xDD]
    assert buffer.size


def test_widths_follow_each_other_upwards() -> None:
    layout = dense_layout(1, 1, k_type=0, ext=True)
    _, state = blank([layout], 1)
    state.caches[0].arrays[0][...] = 9
    state.caches[0].arrays[1][0, 0] = [1, 2, 3, 4]
    state.caches[0].arrays[2][0, 0] = [5, 6]
    assert split(layout, state.caches[0].arrays).tolist() == [9] * 12 + [5, 6] + [1, 2, 3, 4]


@pytest.mark.parametrize("size", [-1, 1, 256])
def test_payload_of_another_length_is_refused(size: int) -> None:
    layout = dense_layout()
    _, state = blank([layout], 4)
    payload = np.zeros(planes.payload_bytes(layout, 4) + size, np.uint8)
    with pytest.raises(BadFrame, match="4 tokens have 1024 bytes"):
        planes.Planes(state.caches[0]).join(payload, 4, 4, 0)


@pytest.mark.parametrize("v_trans", [False, True])
def test_splitting_is_worth_it(v_trans: bool) -> None:
    # Larger than one block of zstd, which has one entropy table for both planes.
    layout = dense_layout(16, 128, v_trans=v_trans)
    data = state_of(layout, random_tokens(64))
    payload = split(layout, parse(data, Form.SEQUENCE, Memory(MemoryKind.ATTENTION, None, v_trans, False)).caches[0].arrays)
    assert len(codec.encode(payload)) < 0.95 * len(codec.encode(data))
