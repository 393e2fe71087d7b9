"""From stored blobs to a state that llama.cpp takes: verify, decode, assemble."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from kvkeep.cache import planes
from kvkeep.cache.layout import Bytes, Form, Layout, blank
from kvkeep.cache.match import Match, Step
from kvkeep.cache.radix import covered
from kvkeep.store.entry import Entry
from kvkeep.store.errors import HashMismatch, IntegrityError, LayoutError
from kvkeep.store.repository import Snapshot
from kvkeep.store.verify import verified

# zstd and BLAKE3 leave the interpreter lock; more threads than this gain nothing on a laptop's memory bandwidth.
MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class Restored:
    """An assembled state.

    Attributes:
        state: llama.cpp's bytes, sequence form unless asked otherwise.
        length: tokens that it holds, at positions 0 to length - 1.
        damaged: entries that didn't verify, because of which it is shorter than was planned.
        detail: what was wrong with them.
    """

    state: Bytes
    length: int
    damaged: tuple[Entry, ...] = ()
    detail: str = ""


_NOTHING: Bytes = np.empty(0, np.uint8)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="kvkeep-restore")


def assemble(snapshot: Snapshot, match: Match, tokens: bytes, form: Form = Form.SEQUENCE, arch: str = "") -> Restored:
    """The state of the first `match.length` tokens.

    A damaged node ends the state before it: what stands above it is still good.

    Args:
        snapshot: rows and blobs; taken after the match, so blobs may have gone meanwhile.
        match: from `PrefixCache.match`.
        tokens: the prompt, little-endian int32.
        form: whole context or one sequence.
        arch: the architecture's name, for the whole form.
    """
    if match.checkpoint is not None:
        return _whole(snapshot, match, tokens)
    return _from_blocks(snapshot, list(match.plan), form, arch)


def _whole(snapshot: Snapshot, match: Match, tokens: bytes) -> Restored:
    point = match.checkpoint
    assert point is not None
    try:
        header, payload = verified(snapshot.blobs.get(point.blob), point)
        if header.tokens != tokens[: len(header.tokens)]:
            raise HashMismatch(f"the checkpoint at position {point.pos} was taken after other tokens")
    except IntegrityError as error:
        return Restored(_NOTHING, 0, (point,), str(error))
    # A raw payload is a view into the map, and the map is only ours until the snapshot ends.
    return Restored(payload.copy(), point.pos)


def _from_blocks(snapshot: Snapshot, plan: list[Step], form: Form, arch: str) -> Restored:
    damaged: list[Entry] = []
    detail = ""
    while plan:
        try:
            state = _fill(snapshot, plan, form, arch)
            return Restored(state, covered(plan), tuple(damaged), detail)
        except _DamagedStep as error:
            damaged.append(plan[error.index][0])
            detail = detail or str(error.cause)
            plan = plan[: error.index]
    return Restored(_NOTHING, 0, tuple(damaged), detail)


class _DamagedStep(Exception):
    """Step `index` of a plan didn't verify."""

    def __init__(self, index: int, cause: Exception) -> None:
        super().__init__(index, cause)
        self.index = index
        self.cause = cause


def _fill(snapshot: Snapshot, plan: Sequence[Step], form: Form, arch: str) -> Bytes:
    """One buffer, filled by all threads straight out of the map.

    Raises:
        _DamagedStep: the first step that didn't verify.
    """
    starts = [0]
    for _, take in plan:
        starts.append(starts[-1] + take)
    values = [snapshot.blobs.get(node.blob) for node, _ in plan]

    # The first block says how the state is laid out; the others must agree.
    first = _guarded(0, values[0], plan[0], None)
    layout = Layout.unpack(first.layout)
    buffer, state = blank(layout, starts[-1], form, arch)

    def scatter(index: int, block: "_Block") -> None:
        node, take = plan[index]
        planes.join(layout, block.payload, node.n_tokens, take, state.arrays, starts[index])

    def one(index: int) -> None:
        scatter(index, _guarded(index, values[index], plan[index], first.layout))

    outcomes = [_pool().submit(one, index) for index in range(1, len(plan))]
    try:
        scatter(0, first)
    finally:
        # All are waited for: the map is only ours until the snapshot ends. In order: the first damage counts.
        errors = [outcome.exception() for outcome in outcomes]
    for error in errors:
        if error is not None:
            raise error
    return buffer


class _Block(NamedTuple):
    layout: bytes
    payload: Bytes


def _guarded(index: int, value: memoryview | None, step: Step, layout: bytes | None) -> _Block:
    """The verified block of step `index`.

    Raises:
        _DamagedStep: it doesn't verify, or has another layout than `layout`.
    """
    node, _ = step
    try:
        header, payload = verified(value, node)
        if layout is None:
            Layout.unpack(header.layout)
        elif header.layout != layout:
            raise HashMismatch(f"the node at position {node.start} has another layout than those before it")
        n_bytes = planes.payload_bytes(Layout.unpack(header.layout), node.n_tokens)
        if payload.size != n_bytes:
            raise HashMismatch(f"the node at position {node.start} has {payload.size} bytes instead of {n_bytes}")
    except (IntegrityError, LayoutError) as error:
        raise _DamagedStep(index, error) from error
    return _Block(header.layout, payload)
