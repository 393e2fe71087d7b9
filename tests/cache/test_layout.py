"""The description of a layout, as every frame carries it: packed exactly, refused rather than guessed."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts
from synthetic import NO_LAYERS, dense_layout

from kvkeep.cache.layout import Layout, Role, Section, pack_all, unpack_all
from kvkeep.store.errors import UnknownLayout


@given(layout=layouts())
@settings(deadline=None, max_examples=100)
def test_layout_survives_packing(layout: Layout) -> None:
    assert unpack_all(layout.pack()) == (layout,)


@given(given_layouts=st.lists(layouts(), min_size=1, max_size=3))
@settings(deadline=None, max_examples=50)
def test_layouts_of_several_caches_survive_packing(given_layouts: list[Layout]) -> None:
    assert unpack_all(pack_all(given_layouts)) == tuple(given_layouts)


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
    assert unpack_all(packed) == (layout,)
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


def test_a_cache_without_layers_has_a_layout_too() -> None:
    assert unpack_all(NO_LAYERS.pack()) == (NO_LAYERS,)
    assert NO_LAYERS.token_bytes == 0


def test_no_layout_at_all_is_refused() -> None:
    with pytest.raises(UnknownLayout):
        unpack_all(b"")
