"""From stored blobs to a state that llama.cpp takes: verify, decode, assemble."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, TypeVar

import numpy as np

from kvkeep.cache import planes
from kvkeep.cache.layout import Bytes, Form, Layout, blank
from kvkeep.cache.match import Match, Step
from kvkeep.cache.radix import covered
from kvkeep.store.entry import Entry
from kvkeep.store.errors import HashMismatch, IntegrityError, LayoutError
from kvkeep.store.nodes import Node
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


T = TypeVar("T")

_NOTHING: Bytes = np.empty(0, np.uint8)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="kvkeep-restore")


if hasattr(os, "register_at_fork"):
    # The pool's threads don't live in a forked child, and it would wait for them forever.
    os.register_at_fork(after_in_child=_pool.cache_clear)


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
        except _Damaged as error:
            # All of them are reported, also those behind the first: each would be met again otherwise.
            damaged += [plan[index][0] for index in error.causes]
            first = min(error.causes)
            detail = detail or str(error.causes[first])
            plan = plan[:first]
    return Restored(_NOTHING, 0, tuple(damaged), detail)


class _Damaged(Exception):
    """Some steps of a plan didn't verify: their indices and the reasons."""

    def __init__(self, causes: dict[int, Exception]) -> None:
        super().__init__(causes)
        self.causes = causes


def _fill(snapshot: Snapshot, plan: Sequence[Step], form: Form, arch: str) -> Bytes:
    """One buffer, filled by all threads straight out of the map.

    Raises:
        _Damaged: not every step verified.
    """
    starts = [0]
    for _, take in plan:
        starts.append(starts[-1] + take)
    values = [snapshot.blobs.get(node.blob) for node, _ in plan]
    # The first block says how the state is laid out; the others must agree.
    first = _attempt(lambda: _block(values[0], plan[0][0], None))
    if isinstance(first, Exception):
        others = _all(len(plan) - 1, lambda i: _block(values[i + 1], plan[i + 1][0], None))
        raise _Damaged({0: first} | {i + 1: error for i, error in others.items()})
    layout = Layout.unpack(first.layout)
    buffer, state = blank(layout, starts[-1], form, arch)

    def scatter(index: int) -> None:
        node, take = plan[index]
        block = first if index == 0 else _block(values[index], node, first.layout)
        planes.join(layout, block.payload, node.n_tokens, take, state.arrays, starts[index])

    if damaged := _all(len(plan), scatter):
        raise _Damaged(damaged)
    return buffer


def _attempt(work: Callable[[], T]) -> T | Exception:
    """What `work` returns, or why the data can't be trusted."""
    try:
        return work()
    except (IntegrityError, LayoutError) as error:
        return error


def _all(count: int, work: Callable[[int], object]) -> dict[int, Exception]:
    """`work(0)` to `work(count - 1)` in several threads; the indices of damaged data, with the reasons.

    Whatever happens, none of them runs any more at the end: the map is only ours until the snapshot ends, and a thread
    that reads from a map that is gone ends the process.
    """
    crew = _Crew()
    results: dict[int, object] = {}

    def one(index: int) -> None:
        with crew.member() as wanted:
            if wanted:
                results[index] = _attempt(partial(work, index))

    try:
        for outcome in [_pool().submit(one, index) for index in range(count)]:
            outcome.result()
    finally:
        crew.dismiss()
    return {index: result for index, result in sorted(results.items()) if isinstance(result, Exception)}


class _Crew:
    """Counts who is at work. Not the futures: an interrupt in the middle of `submit` would lose one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._at_work = 0
        self._dismissed = False

    @contextmanager
    def member(self) -> Iterator[bool]:
        """Around each piece of work; False if it isn't wanted any more."""
        with self._changed:
            self._at_work += 1
            wanted = not self._dismissed
        try:
            yield wanted
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def dismiss(self) -> None:
        """Let nobody begin any more, and wait for those who are at work, however often Ctrl-C is pressed."""
        interrupt: BaseException | None = None
        self._dismissed = True
        while True:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._at_work == 0)
                break
            except BaseException as error:  # noqa: BLE001 - raised again below
                interrupt = error
        if interrupt is not None:
            raise interrupt


class _Block(NamedTuple):
    layout: bytes
    payload: Bytes


def _block(value: memoryview | None, node: Node, layout: bytes | None) -> _Block:
    """The verified block of a node.

    Raises:
        IntegrityError, LayoutError: it doesn't verify, or has another layout than `layout`.
    """
    header, payload = verified(value, node)
    if layout is None:
        Layout.unpack(header.layout)
    elif header.layout != layout:
        raise HashMismatch(f"the node at position {node.start} has another layout than those before it")
    return _Block(header.layout, payload)
