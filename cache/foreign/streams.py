"""A sequence of a context with several, as llama-server's slots are, in the bytes of a context that has just one.

Such a context keeps the cells of each sequence apart, and says so in the state: a context with another number of sequences
refuses it. The cells are the same.
"""

import numpy as np

from kvkeep.cache.foreign.item import Item
from kvkeep.cache.layout import Bytes, Cells
from kvkeep.cache.memory import Memory
from kvkeep.cache.state import Form, State, Windowed, blank, parse
from kvkeep.store.errors import UnknownLayout


def as_only_sequence(item: Item, memory: Memory) -> Bytes:
    """The state of a saved sequence, written anew as that of sequence 0 in a context without any other.

    Raises:
        LayoutError: it isn't such a state, or the places of its cells can't be taken by others.
    """
    state = parse(item.data, Form.SEQUENCE, memory, any_streams=True)
    length = len(item.tokens)
    window = None if state.window is None else Windowed(state.window.layout, _first(state.window, length))
    recurrent_bytes = None if state.recurrent is None else state.recurrent.data.size
    data, empty = blank([cells.layout for cells in state.caches], length, window=window, recurrent_bytes=recurrent_bytes)
    for source, target in zip(_all(state), _all(empty), strict=True):
        _fill(source, target)
    if state.recurrent is not None and empty.recurrent is not None:
        if state.recurrent.pos != empty.recurrent.pos:
            raise UnknownLayout(f"it names {length} tokens and holds a state of {state.recurrent.pos + 1}")
        empty.recurrent.data[:] = state.recurrent.data
    return data


def _first(cells: Cells, length: int) -> int:
    first = int(cells.positions.min())
    if first >= length:
        raise UnknownLayout(f"it names {length} tokens, and its window begins at position {first}")
    return first


def _all(state: State) -> list[Cells]:
    return [cells for cells in (*state.caches, state.window) if cells is not None]


def _fill(source: Cells, target: Cells) -> None:
    order = np.argsort(source.positions, kind="stable")
    if not np.array_equal(source.positions[order], target.positions):
        raise UnknownLayout(f"it should hold the positions {target.positions[0]} to {target.positions[-1]}, each once")
    for old, new in zip(source.arrays, target.arrays, strict=True):
        new[...] = old[:, order, :]
