"""From stored blobs to a state that llama.cpp takes: verify, decode, assemble.

Blocks give the attention caches, rows of the window the windowed one, a checkpoint the recurrent tensors; or a whole
state gives everything.
"""

import _thread
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import numpy as np

from kvkeep.cache import planes
from kvkeep.cache.layout import Bytes, unpack_all
from kvkeep.cache.match import Match
from kvkeep.cache.planes import Planes
from kvkeep.cache.state import Form, Windowed, blank
from kvkeep.store.blobs import BlobReader
from kvkeep.store.checkpoints import Checkpoint
from kvkeep.store.codec import Scratch
from kvkeep.store.entry import Entry
from kvkeep.store.errors import HashMismatch, IntegrityError, LayoutError
from kvkeep.store.gate import Gate
from kvkeep.store.nodes import Node
from kvkeep.store.verify import verified
from kvkeep.store.windows import Window

# zstd and BLAKE3 leave the interpreter lock; more threads than this gain nothing on a laptop's memory bandwidth.
MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class Restored:
    """An assembled state.

    Attributes:
        state: llama.cpp's bytes, sequence form unless asked otherwise.
        length: tokens that it holds, at positions 0 to length - 1.
        damaged: entries that didn't verify, because of which it is nothing, or shorter than was planned.
        detail: what was wrong with them.
        used: entries that it was assembled from.
    """

    state: Bytes
    length: int
    damaged: tuple[Entry, ...] = ()
    detail: str = ""
    used: tuple[Entry, ...] = ()


T = TypeVar("T")

_NOTHING: Bytes = np.empty(0, np.uint8)


class _Workers:
    """Threads that wait for work, as long as the process lives.

    Not a `ThreadPoolExecutor`: an interrupt while that starts a thread or takes a job can leave a worker that nobody wakes
    any more, and the interpreter's end waits for it for ever. Nobody waits for these, and the queue is interrupted by nothing.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._count = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Have a job done; it must not raise."""
        while self._count < min(MAX_THREADS, os.cpu_count() or 1):
            # Not `Thread.start`: that waits for the thread, and an interrupt meanwhile can leave the thread waiting for ever.
            try:
                _thread.start_new_thread(self._loop, ())
            except RuntimeError:
                # There can be no more threads. Those that there are suffice, and so does this one.
                if self._count == 0:
                    job()
                    return
                break
            self._count += 1
        self._jobs.put(job)

    def _loop(self) -> None:
        while True:
            self._jobs.get()()


@cache
def _workers() -> _Workers:
    return _Workers()


if hasattr(os, "register_at_fork"):
    # The threads don't live in a forked child, and it would wait for them forever.
    os.register_at_fork(after_in_child=_workers.cache_clear)


def assemble(blobs: BlobReader, match: Match, tokens: bytes, form: Form = Form.SEQUENCE, arch: str = "") -> Restored:
    """The state of the first `match.length` tokens, or nothing of it if anything that it needs is damaged.

    Args:
        blobs: as they are after the match, so some may have gone meanwhile.
        match: from `PrefixCache.match`.
        tokens: the prompt, little-endian int32.
        form: whole context or one sequence.
        arch: the architecture's name, for the whole form.
    """
    if match.length == 0:
        return Restored(_NOTHING, 0)
    try:
        if match.checkpoint is not None and match.is_opaque:
            return _whole(blobs, match.checkpoint, tokens)
        return Restored(_Assembly(blobs, match).fill(form, arch), match.length)
    except _Damaged as error:
        # All of them are reported, also those behind the first: each would be met again otherwise.
        return Restored(_NOTHING, 0, tuple(error.causes), str(next(iter(error.causes.values()))))


class _Damaged(Exception):
    """Entries that didn't verify, with the reasons."""

    def __init__(self, causes: dict[Entry, Exception]) -> None:
        super().__init__(causes)
        self.causes = causes


def _whole(blobs: BlobReader, point: Checkpoint, tokens: bytes) -> Restored:
    try:
        header, payload = verified(blobs.get(point.blob), point)
        if header.tokens != tokens[: len(header.tokens)]:
            raise HashMismatch(f"the checkpoint at position {point.pos} was taken after other tokens")
    except IntegrityError as error:
        raise _Damaged({point: error}) from error
    # A raw payload is a view into the map, and the map is only ours until the snapshot ends.
    return Restored(payload.copy(), point.pos)


class _Piece(NamedTuple):
    """A part of a blob that goes into the state.

    Attributes:
        entry: whose blob it is.
        skip, take: which of its tokens.
        cell: where in the caches the first of them goes.
        in_window: they belong into the windowed cache.
    """

    entry: Node | Window
    skip: int
    take: int
    cell: int
    in_window: bool


class _Assembly:
    """One buffer, filled by all threads straight out of the map."""

    def __init__(self, blobs: BlobReader, match: Match) -> None:
        self._length = match.length
        self._pieces = [*_in_caches(match), *_in_window(match)]
        self._point = match.checkpoint
        # Read here: a transaction of LMDB belongs to the thread that began it.
        self._scratches: list[Scratch] = []
        self._values = {entry: blobs.get(entry.blob) for entry in match.entries}

    def fill(self, form: Form, arch: str) -> Bytes:
        """The state.

        Raises:
            _Damaged: not every blob verified, or they don't go together.
        """
        # The first blob of each kind says how that part is laid out; the others must agree.
        firsts = self._first_blobs()
        layouts = firsts.get(False, _Blob(b"", _NOTHING))
        windowed = firsts.get(True)
        tensors = self._tensors()
        buffer, state = blank(
            unpack_all(layouts.layout) if layouts.layout else (),
            self._length,
            form,
            arch,
            window=None if windowed is None else Windowed(unpack_all(windowed.layout)[0], self._first_in_window()),
            recurrent_bytes=None if tensors is None else tensors.size,
        )
        if tensors is not None and state.recurrent is not None:
            planes.join_run(tensors, state.recurrent.data)

        targets = {False: [Planes(cells) for cells in state.caches], True: [Planes(state.window)] if state.window else []}

        def scatter(index: int) -> None:
            piece = self._pieces[index]
            first, caches = firsts[piece.in_window], targets[piece.in_window]
            if index == self._firsts[piece.in_window]:
                _scatter(piece, first.payload, caches)
            else:
                with self._scratch() as scratch:
                    _scatter(piece, self._blob(piece.entry, first.layout, scratch).payload, caches)

        self._check(_all(len(self._pieces), scatter))
        return buffer

    def _first_blobs(self) -> dict[bool, "_Blob"]:
        """The blob of the first node, and that of the first row of the window, under `in_window`."""
        self._firsts = {piece.in_window: i for i, piece in reversed(list(enumerate(self._pieces)))}
        found = {kind: _attempt(partial(self._blob, self._pieces[i].entry, None)) for kind, i in self._firsts.items()}
        if any(isinstance(blob, Exception) for blob in found.values()):
            self._check(_all(len(self._pieces), lambda i: self._blob(self._pieces[i].entry, None)))
        return {kind: blob for kind, blob in found.items() if not isinstance(blob, Exception)}

    def _tensors(self) -> Bytes | None:
        point = self._point
        if point is None:
            return None
        outcome = _attempt(lambda: verified(self._values[point], point))
        if isinstance(outcome, Exception):
            raise _Damaged({point: outcome})
        header, payload = outcome
        if header.layout != bytes([planes.run_width(payload.size)]):
            raise _Damaged({point: HashMismatch(f"the tensors at position {point.pos} are split in a way nobody knows")})
        return payload

    def _first_in_window(self) -> int:
        """The lowest position of the windowed cache."""
        return self._length - sum(piece.take for piece in self._pieces if piece.in_window)

    @contextmanager
    def _scratch(self) -> Iterator[Scratch]:
        """One for each piece that is worked at; as many as there are threads, and gone with this object."""
        try:
            scratch = self._scratches.pop()
        except IndexError:
            scratch = Scratch()
        yield scratch
        self._scratches.append(scratch)

    def _blob(self, entry: Node | Window, layout: bytes | None, scratch: Scratch | None = None) -> "_Blob":
        """The verified blob of an entry, good until the next use of `scratch`.

        Raises:
            IntegrityError, LayoutError: it doesn't verify, or has another layout than `layout`.
        """
        header, payload = verified(self._values[entry], entry, scratch)
        if layout is None:
            layouts = unpack_all(header.layout)
            if isinstance(entry, Window) and len(layouts) != 1:
                raise HashMismatch(f"the window at position {entry.start} has {len(layouts)} caches")
        elif header.layout != layout:
            raise HashMismatch(f"the entry at position {entry.start} has another layout than those before it")
        return _Blob(header.layout, payload)

    def _check(self, damaged: dict[int, Exception]) -> None:
        if damaged:
            raise _Damaged({self._pieces[i].entry: error for i, error in damaged.items()})


class _Blob(NamedTuple):
    layout: bytes
    payload: Bytes


def _in_caches(match: Match) -> Iterator[_Piece]:
    cell = 0
    for node, take in match.plan:
        yield _Piece(node, 0, take, cell, in_window=False)
        cell += take


def _in_window(match: Match) -> Iterator[_Piece]:
    cell = 0
    for row, skip, take in match.windows:
        yield _Piece(row, skip, take, cell, in_window=True)
        cell += take


def _scatter(piece: _Piece, payload: Bytes, caches: Sequence[Planes]) -> None:
    """Put a blob's tokens into their cells; its caches stand one behind the other."""
    n_tokens = piece.entry.n_tokens
    sizes = [cells.token_bytes * n_tokens for cells in caches]
    if sum(sizes) != payload.size:
        raise HashMismatch(f"{n_tokens} tokens have {sum(sizes)} bytes here, the payload has {payload.size}")
    at = 0
    for cells, size in zip(caches, sizes, strict=True):
        cells.join(payload[at : at + size], n_tokens, piece.take, piece.cell, skip=piece.skip)
        at += size


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
    done: SimpleQueue[BaseException | None] = SimpleQueue()

    def one(index: int) -> None:
        failure: BaseException | None = None
        try:
            with crew.member() as wanted:
                if wanted:
                    results[index] = _attempt(partial(work, index))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            failure = error
        done.put(failure)

    try:
        for index in range(count):
            _workers().submit(partial(one, index))
        for _ in range(count):
            if (failure := done.get()) is not None:
                raise failure
    finally:
        crew.dismiss()
    return {index: result for index, result in sorted(results.items()) if isinstance(result, Exception)}


class _Crew:
    """Counts who is at work. Not the futures: an interrupt in the middle of `submit` would lose one."""

    def __init__(self) -> None:
        self._changed = Gate()
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
