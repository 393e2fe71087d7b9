"""The payload of a block: the sections of some tokens, their numbers split into byte planes.

All first bytes of all numbers, then all second bytes, and so on. The high bytes of f16 keys and values look alike and
the low ones are noise: zstd level 1 brings f16 KV to 0.80 to 0.84 of its size when split, to 0.91 when not. Sections
of one width share their planes, so that one entropy table serves a whole plane; widths follow each other upwards.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvkeep.cache.layout import Bytes, Cells, Layout
from kvkeep.store.errors import BadFrame

Numbers = npt.NDArray[np.unsignedinteger[Any]]

_NUMBER: dict[int, np.dtype[np.unsignedinteger[Any]]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_BYTE_VALUES = 256


def payload_bytes(layout: Layout, n_tokens: int) -> int:
    """Bytes of the payload of `n_tokens` tokens: exactly those of the sections, only in another order."""
    return layout.token_bytes * n_tokens


class _Group(NamedTuple):
    """The sections of one width.

    Attributes:
        width: bytes of a number.
        token_bytes: bytes of one token in all of them.
        stacks: the sections in their order, neighbours of one shape together: shape (sections, outer, cells, numbers).
    """

    width: int
    token_bytes: int
    stacks: tuple[Numbers, ...]

    def pieces(self, payload: Bytes, n_tokens: int) -> Iterator[tuple[Bytes, Numbers]]:
        """For each stack its part of the planes, shape (width, sections, outer, n_tokens, numbers), and itself."""
        planes = payload.reshape(self.width, -1)
        at = 0
        for stack in self.stacks:
            sections, outer, _, inner = stack.shape
            count = sections * outer * n_tokens * inner
            yield planes[:, at : at + count].reshape(self.width, sections, outer, n_tokens, inner), stack
            at += count


class Planes:
    """The cells of one attention cache, ready to be split into payloads, or to be filled from them by several threads.

    The tensors of all layers have the same shape in most models, and stand at equal distances in a state: they are worked
    at as one array. One by one they were 60 small copies a block for a model of 30 layers, and numpy lets go of the
    interpreter's lock for each, so that threads that fill one state waited for each other more than they worked.
    """

    def __init__(self, cells: Cells) -> None:
        layout = cells.layout
        self.token_bytes = layout.token_bytes
        self._groups: list[_Group] = []
        for width in sorted({section.width for section in layout.sections}):
            members = [i for i, section in enumerate(layout.sections) if section.width == width]
            stacks = _stacked([cells.arrays[i].view(_NUMBER[width]) for i in members])
            self._groups.append(_Group(width, sum(layout.sections[i].token_bytes for i in members), tuple(stacks)))

    def split(self, first: int, end: int, payload: Bytes) -> None:
        """Write the cells `first` to `end - 1` into `payload`, uint8, as many bytes as they have."""
        n_tokens = end - first
        for group, own in self._parts(payload, n_tokens):
            for planes, stack in group.pieces(own, n_tokens):
                _separate(stack[:, :, first:end], planes)

    def join(self, payload: Bytes, n_tokens: int, take: int, first: int, *, skip: int = 0) -> None:
        """The inverse: put `take` of a payload's tokens into the cells `[first, first + take)`.

        Args:
            payload: uint8, of `n_tokens` tokens.
            n_tokens: tokens that the payload holds.
            take: how many of them to use.
            first: the cell that the first of them goes to.
            skip: how many of the payload's tokens come before them.

        Raises:
            BadFrame: the payload's length isn't that of `n_tokens` tokens.
        """
        if payload.size != self.token_bytes * n_tokens:
            raise BadFrame(f"{n_tokens} tokens have {self.token_bytes * n_tokens} bytes here, the payload has {payload.size}")
        for group, own in self._parts(payload, n_tokens):
            for planes, stack in group.pieces(own, n_tokens):
                _interleave(planes[:, :, :, skip : skip + take], stack[:, :, first : first + take])

    def _parts(self, payload: Bytes, n_tokens: int) -> Iterator[tuple[_Group, Bytes]]:
        at = 0
        for group in self._groups:
            size = group.token_bytes * n_tokens
            yield group, payload[at : at + size]
            at += size


def _stacked(arrays: Sequence[Numbers]) -> Iterator[Numbers]:
    """The same arrays, as few as possible: those of one shape that stand at equal distances in one buffer become one."""
    at = 0
    while at < len(arrays):
        first = arrays[at]
        count, distance = 1, 0
        while at + count < len(arrays) and _are_alike(first, arrays[at + count]):
            step = _address(arrays[at + count]) - _address(arrays[at + count - 1])
            if count > 1 and step != distance:
                break
            count, distance = count + 1, step
        yield as_strided(first, (count, *first.shape), (distance, *first.strides))
        at += count


def _are_alike(one: Numbers, other: Numbers) -> bool:
    """Whether two arrays have one shape, and lie in one buffer.

    Arrays with memory of their own may stand at equal distances by accident, and then anything lies between them. numpy
    takes an array that lies between for a part of the stack, and copies; where the copy comes to lie between as well, it
    copies without end, until the stack overflows (numpy 2.4, `PyArray_AssignArray`).
    """
    return (one.shape, one.strides) == (other.shape, other.strides) and _buffer(one) is _buffer(other)


def _buffer(array: Numbers) -> Numbers:
    """The array that an array is a view into."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _address(array: Numbers) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# Recurrent tensors are f32 in every model that llama.cpp knows.
RUN_WIDTH = 4


def run_width(n_bytes: int) -> int:
    """The width by which a run of recurrent tensors is split: 1, which is not at all, if its length isn't that of numbers."""
    return RUN_WIDTH if n_bytes % RUN_WIDTH == 0 else 1


def split_run(run: Bytes, payload: Bytes) -> None:
    """Write a run of numbers that is never cut into `payload`, which is as long."""
    width = run_width(run.size)
    _separate(run.view(_NUMBER[width]), payload.reshape(width, -1))


def join_run(payload: Bytes, run: Bytes) -> None:
    """The inverse.

    Raises:
        BadFrame: the payload isn't as long as the run.
    """
    if payload.size != run.size:
        raise BadFrame(f"the recurrent tensors have {run.size} bytes here, the payload has {payload.size}")
    width = run_width(run.size)
    _interleave(payload.reshape(width, -1), run.view(_NUMBER[width]))


def _separate(numbers: Numbers, planes: Bytes) -> None:
    """Write the first, second, ... bytes of some numbers into the first, second, ... of `planes`.

    Arithmetic on whole numbers instead of strided byte copies, here and below: two to three times as fast for f16.
    """
    last = len(planes) - 1
    for plane in planes[:last]:
        np.copyto(plane, numbers, casting="unsafe")  # the lowest byte
        numbers = np.right_shift(numbers, 8)
    np.copyto(planes[last], numbers, casting="unsafe")


def _interleave(planes: Bytes, numbers: Numbers) -> None:
    """The inverse. Each number is written once, where it belongs."""
    if len(planes) == 1:
        numbers[...] = planes[0]
        return
    rest = planes[-1].astype(numbers.dtype)
    for plane in planes[-2:0:-1]:
        rest *= _BYTE_VALUES  # a shift by 8 takes twice as long: numpy has no vector code for it
        rest |= plane
    rest *= _BYTE_VALUES
    np.bitwise_or(rest, planes[0], out=numbers)
