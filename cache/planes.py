"""The payload of a block: the sections of some tokens, their numbers split into byte planes.

All first bytes of all numbers, then all second bytes, and so on. The high bytes of f16 keys and values look alike and
the low ones are noise: zstd level 1 brings f16 KV to 0.80 to 0.84 of its size when split, to 0.91 when not. Sections
of one width share their planes, so that one entropy table serves a whole plane; widths follow each other upwards.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kvkeep.cache.layout import Bytes, Layout
from kvkeep.store.errors import BadFrame

_NUMBER = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


class _Group(NamedTuple):
    """The sections of one width: their indices, and bytes of one token in all of them."""

    width: int
    sections: tuple[int, ...]
    token_bytes: int


@lru_cache(maxsize=64)
def _groups(layout: Layout) -> tuple[_Group, ...]:
    groups = []
    for width in sorted({section.width for section in layout.sections}):
        members = tuple(i for i, section in enumerate(layout.sections) if section.width == width)
        groups.append(_Group(width, members, sum(layout.sections[i].token_bytes for i in members)))
    return tuple(groups)


def payload_bytes(layout: Layout, n_tokens: int) -> int:
    """Bytes of the payload of `n_tokens` tokens: exactly those of the sections, only in another order."""
    return layout.token_bytes * n_tokens


def split(layout: Layout, arrays: tuple[Bytes, ...], payload: Bytes) -> None:
    """Write the sections of some tokens into `payload`.

    Args:
        layout: what the sections are.
        arrays: one a section, uint8 of shape (outer, n, inner).
        payload: uint8, `payload_bytes(layout, n)` long.
    """
    n_tokens = arrays[0].shape[1] if arrays else 0
    at = 0
    for group in _groups(layout):
        size = group.token_bytes * n_tokens
        flat = np.concatenate([arrays[i].reshape(-1) for i in group.sections])
        payload[at : at + size].reshape(group.width, -1)[...] = flat.reshape(-1, group.width).T
        at += size


def join(
    layout: Layout, payload: Bytes, n_tokens: int, take: int, arrays: tuple[Bytes, ...], first: int, *, skip: int = 0
) -> None:
    """The inverse: put `take` of a payload's tokens into cells `[first, first + take)` of `arrays`.

    Args:
        layout: what the sections are.
        payload: uint8, of `n_tokens` tokens.
        n_tokens: tokens that the payload holds.
        take: how many of them to use.
        arrays: one a section, uint8 of shape (outer, cells, inner); written in place.
        first: the cell that the first of them goes to.
        skip: how many of the payload's tokens come before them.

    Raises:
        BadFrame: the payload's length isn't that of `n_tokens` tokens.
    """
    if payload.size != payload_bytes(layout, n_tokens):
        raise BadFrame(f"{n_tokens} tokens have {payload_bytes(layout, n_tokens)} bytes here, the payload has {payload.size}")
    at = 0
    for group in _groups(layout):
        size = group.token_bytes * n_tokens
        planes = payload[at : at + size].reshape(group.width, -1)
        at += size
        numbers = _interleave(planes)
        offset = 0
        for i in group.sections:
            section = layout.sections[i]
            count = section.token_bytes * n_tokens
            piece = numbers[offset : offset + count].reshape(section.outer, n_tokens, section.inner)
            arrays[i][:, first : first + take, :] = piece[:, skip : skip + take, :]
            offset += count


# Recurrent tensors are f32 in every model that llama.cpp knows.
RUN_WIDTH = 4


def run_width(n_bytes: int) -> int:
    """The width by which a run of recurrent tensors is split: 1, which is not at all, if its length isn't that of numbers."""
    return RUN_WIDTH if n_bytes % RUN_WIDTH == 0 else 1


def split_run(run: Bytes, payload: Bytes) -> None:
    """Write a run of numbers that is never cut into `payload`, which is as long."""
    width = run_width(run.size)
    payload.reshape(width, -1)[...] = run.reshape(-1, width).T


def join_run(payload: Bytes, run: Bytes) -> None:
    """The inverse.

    Raises:
        BadFrame: the payload isn't as long as the run.
    """
    if payload.size != run.size:
        raise BadFrame(f"the recurrent tensors have {run.size} bytes here, the payload has {payload.size}")
    run[...] = _interleave(payload.reshape(run_width(run.size), -1))


def _interleave(planes: Bytes) -> Bytes:
    """Bytes of the numbers whose first, second, ... bytes are the rows of `planes`.

    Arithmetic on whole numbers instead of strided byte copies: three times as fast for f16.
    """
    width = planes.shape[0]
    if width == 1:
        plane: Bytes = planes[0]
        return plane
    numbers = planes[-1].astype(_NUMBER[width])
    for plane in planes[-2::-1]:
        numbers <<= 8
        numbers |= plane
    interleaved: Bytes = numbers.view(np.uint8)
    return interleaved
