"""A state that another program has saved: named, with its size, and read when its time comes."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from kvkeep.cache.layout import Bytes
from kvkeep.cache.state import Form
from kvkeep.store.errors import StoreError, TooLarge, TruncatedState, UnknownLayout, UsageError

Tokens = npt.NDArray[np.int32]

# Sixteen times the longest context of today. Keeps a hostile count from being allocated.
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A state as it was saved.

    Attributes:
        tokens: what it was decoded from, as its writer says. Without a spare last one, see `loose`.
        data: llama.cpp's bytes.
        form: which form they have.
        loose: its writer may name one token more than were decoded.
    """

    tokens: Tokens
    data: Bytes
    form: Form
    loose: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """Something that holds one state, not read yet.

    Attributes:
        name: for people.
        n_bytes: what there is to be read; how long the state is can't be known from it.
        read: reads the state, given the most bytes that it may have. Raises UnknownLayout and TruncatedState for what is
            no state, TooLarge for one that is larger, UsageError and StoreError for what can't be read.
    """

    name: str
    n_bytes: int
    read: Callable[[int], Item]


def check_size(n_bytes: int, at_most: int) -> None:
    """Refuse a state before room is made for it in memory.

    Raises:
        TooLarge: it has more bytes than it may have.
    """
    if n_bytes > at_most:
        raise TooLarge(f"its state has {n_bytes} bytes; the budget leaves {at_most} for all that is kept")


def as_tokens(numbers: npt.NDArray[np.integer]) -> Tokens:
    """Token ids as they are kept.

    Raises:
        UnknownLayout: there are none, or some can't be token ids.
    """
    if numbers.size == 0:
        raise UnknownLayout("it names no tokens, so nobody knows what it is the state of")
    if numbers.min() < 0 or numbers.max() > np.iinfo(np.int32).max:
        raise UnknownLayout("it names tokens that are no token ids, such as images have")
    return numbers.astype(np.int32)


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Errors of the system as ours.

    Raises:
        UsageError: it isn't there, or this user may not read it.
        StoreError: it can't be read.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist") from error
    except PermissionError as error:
        raise UsageError(f"{path} can't be read by this user") from error
    except OSError as error:
        raise StoreError(f"reading {path} failed: {error.strerror or error}") from error


@contextmanager
def opened(path: str | Path, *, follow: bool = True) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size. Nothing waits for a pipe, and no device is read.

    Read with `read` and not mapped: a file that shrinks while it is mapped kills the process with SIGBUS.

    Args:
        path: the file.
        follow: it may be a symbolic link.

    Raises:
        UnknownLayout: it is something else than a file.
        UsageError, StoreError: as in `reading`.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    flags |= 0 if follow else getattr(os, "O_NOFOLLOW", 0)
    with reading(path), open(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UnknownLayout(f"{path} is no file")
        yield file, found.st_size


def read_exactly(file: BinaryIO, buffer: Bytes) -> None:
    """Fill a buffer.

    Raises:
        TruncatedState: the file ends before.
    """
    view, done = buffer.data, 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise TruncatedState(f"it ends {len(view) - done} bytes too early")
        done += count
