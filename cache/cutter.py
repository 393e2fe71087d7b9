"""Cutting the cells of a state into the plain frames of blocks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvkeep.cache.layout import Bytes, Cells, pack_all
from kvkeep.cache.planes import Planes
from kvkeep.store import frame
from kvkeep.store.errors import UnknownLayout
from kvkeep.store.frame import FrameHeader


class Cutter:
    """Attention caches with the same cells, of which runs become frames.

    Attributes:
        layout: their packed description, as every frame carries it.
    """

    def __init__(self, caches: Sequence[Cells]) -> None:
        self.layout = pack_all([cells.layout for cells in caches])
        self._planes = [Planes(cells) for cells in caches]

    def frame(self, header: FrameHeader, first: int) -> Bytes:
        """A plain frame with as many cells of each cache as the header has tokens, from the cell `first` on."""
        sizes = [planes.token_bytes * header.n_tokens for planes in self._planes]
        plain, payload = frame.allocate(header, sum(sizes))
        at = 0
        for planes, size in zip(self._planes, sizes, strict=True):
            planes.split(first, first + header.n_tokens, payload[at : at + size])
            at += size
        return plain


def in_order(cells: Cells, n_tokens: int) -> Cells:
    """The cells in the order of their positions.

    Cells are taken by their position, never by their place: after a cut-back or a shift llama.cpp fills holes.

    Raises:
        UnknownLayout: the cells aren't exactly the positions 0 to n_tokens - 1.
    """
    order = np.argsort(cells.positions, kind="stable")
    if not np.array_equal(cells.positions[order], np.arange(n_tokens)):
        found = f"{cells.positions.size} cells from {cells.positions.min()} to {cells.positions.max()}"
        raise UnknownLayout(f"the state should hold the positions 0 to {n_tokens - 1}, it holds {found}")
    return _taken(cells, order)


def last_run(cells: Cells, end: int) -> Cells:
    """The unbroken run of positions that ends before `end`, in order.

    A ring of cells keeps some that the window has left, with gaps where others were written over.

    Raises:
        UnknownLayout: there are positions behind, or twice, or the last one is missing.
    """
    order = np.argsort(cells.positions, kind="stable")
    positions = cells.positions[order]
    if positions[-1] != end - 1 or (np.diff(positions) == 0).any():
        raise UnknownLayout(f"the window should end at position {end - 1}, it ends at {positions[-1]}")
    breaks = np.flatnonzero(np.diff(positions) != 1)
    return _taken(cells, order[breaks[-1] + 1 :] if breaks.size else order)


def _taken(cells: Cells, order: npt.NDArray[np.intp]) -> Cells:
    if np.array_equal(order, np.arange(len(cells.positions))):
        return cells
    return Cells(cells.layout, cells.positions[order], tuple(array[:, order, :] for array in cells.arrays))
