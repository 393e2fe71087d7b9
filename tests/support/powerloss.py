"""What a folder may look like after a power cut, from a copy of it and a journal of what was done since.

The rules are those on which a program may count on Linux's usual file systems, and no more:

    file data    A write or a change of size is pending until a sync of that file has returned, through whatever descriptor.
                 Pending ones are lost or kept in any combination, each sector of 512 bytes of a write by itself.
                 A write with O_DSYNC is durable by itself when it returns; what was pending before stays so.
    names        Creations, removals and renames reach the disk in their order, so some first part of them is there. A sync
                 of a folder makes everything durable up to the last change in it; a sync of a file, its creation and
                 everything before that. A rename isn't made durable by a sync of the file.

So a file may be there without its data, and a new name with old content behind it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from random import Random
from typing import TypeAlias

from faults import Kind, Operation
from sparse import ranges

SECTOR = 512
_CHUNK = 1 << 20

VARIANTS = ("none", "all", "prefix", "suffix", "names", "data")
"""Kept of what is pending: nothing; everything; the first half of data and of names; the second half of the data with all
names; all names without data; all data without names."""


@dataclass(eq=False, slots=True)
class Change:
    """A write, or with no data a change of size: to `offset`, or with `at_least` to no less than that."""

    number: int
    offset: int
    data: bytes | None = None
    durable: bool = False
    at_least: bool = False


@dataclass(eq=False, slots=True)
class File:
    """A file by whatever name.

    Attributes:
        base: where its content was when the journal began, None for one that was created since.
        mode: its permissions.
        created: how many changes of names there were with its creation.
        changes: what was done to its content.
    """

    base: Path | None
    mode: int
    created: int = 0
    changes: list[Change] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Folder:
    """A folder by whatever name."""

    mode: int


Names: TypeAlias = dict[str, File | Folder]
Kept: TypeAlias = Callable[[Change], bool]


@dataclass(frozen=True, slots=True)
class _Naming:
    """A change of names: one appears (`there`), or goes away, or moves to `target`."""

    path: str
    target: str = ""
    there: File | Folder | None = None

    def apply(self, names: Names) -> None:
        if self.there is not None:
            names[self.path] = self.there
        elif not self.target:
            names.pop(self.path, None)
        else:
            moved = {path: names.pop(path) for path in list(names) if path == self.path or path.startswith(f"{self.path}/")}
            names.update({self.target + path.removeprefix(self.path): found for path, found in moved.items()})

    def is_in(self, folder: str) -> bool:
        return any(path and str(PurePosixPath(path).parent) == folder for path in (self.path, self.target))


@dataclass(slots=True)
class _History:
    """What was done before an operation.

    Attributes:
        first: names at the beginning.
        namings: changes of names since.
        floor: how many of those are durable.
        files: all files that ever were, in the order of their appearance.
    """

    first: Names
    namings: list[_Naming] = field(default_factory=list)
    floor: int = 0
    files: list[File] = field(default_factory=list)


def image(before: Path, operations: Sequence[Operation], n: int, variant: str | int, target: Path) -> None:
    """Build the folder as it may be after a power cut right before operation `n`.

    A random one may also have parts of operation `n`, if that is a write with O_DSYNC: once it has returned, all of it is
    there. The parts of any other are among the images of `n + 1`.

    SQLite's shared memory and LMDB's lock file are left out: nobody holds a lock after a reboot, and both are made anew.

    Args:
        before: a copy of the folder when the journal began, all of it durable.
        operations: the journal.
        n: one more than the last operation that was carried out.
        variant: one of VARIANTS, or the seed of a random choice.
        target: where to build it. Nothing may be there yet.
    """
    done = [operation for operation in operations if operation.number < n]
    if isinstance(variant, int):
        done += [replace(operation, durable=False) for operation in operations if operation.number == n and operation.durable]
    history = _replay(before, done)
    rng = Random(f"{variant} {n}")
    n_kept, kept = _random_choice(history, rng) if isinstance(variant, int) else _choice(history, variant)
    # Decided for all files in one order, so that a seed means the same whatever names are there in the end.
    parts = {file: list(_parts(file, kept, rng if isinstance(variant, int) else None)) for file in history.files}
    names = dict(history.first)
    for naming in history.namings[:n_kept]:
        naming.apply(names)
    _build(names, parts, target)


def _choice(history: _History, variant: str) -> tuple[int, Kept]:
    """How many changes of names are there, and which pending changes of content."""
    pending = sorted(change.number for file in history.files for change in file.changes if not change.durable)
    middle = pending[len(pending) // 2] if pending else 0
    floor, everything = history.floor, len(history.namings)
    choices: dict[str, tuple[int, Kept]] = {
        "none": (floor, lambda _: False),
        "all": (everything, lambda _: True),
        "prefix": (floor + (everything - floor) // 2, lambda change: change.number < middle),
        "suffix": (everything, lambda change: change.number >= middle),
        "names": (everything, lambda _: False),
        "data": (floor, lambda _: True),
    }
    return choices[variant]


def _random_choice(history: _History, rng: Random) -> tuple[int, Kept]:
    n_kept, share = rng.randint(history.floor, len(history.namings)), rng.choice((0.1, 0.5, 0.9))
    return n_kept, lambda _: rng.random() < share


def _replay(before: Path, operations: Sequence[Operation]) -> _History:
    names = _names_in(before)
    history = _History(dict(names), files=[found for found in names.values() if isinstance(found, File)])
    by_inode: dict[int, File] = {}
    for operation in operations:
        if operation.result >= 0:
            _replay_one(operation, names, by_inode, history)
    return history


def _replay_one(operation: Operation, names: Names, by_inode: dict[int, File], history: _History) -> None:
    kind, path = operation.kind, operation.path
    naming: _Naming | None = None
    if kind is Kind.CREATE:
        if path in names:
            return  # another thread was faster
        file = File(None, operation.mode, len(history.namings) + 1)
        history.files.append(file)
        by_inode[operation.inode] = file
        naming = _Naming(path, there=file)
    elif kind is Kind.MKDIR:
        naming = _Naming(path, there=Folder(operation.mode))
    elif kind in (Kind.UNLINK, Kind.RMDIR):
        # Who has it open may go on writing, by a name that is another file's by then.
        if isinstance(removed := names.get(path), File):
            by_inode[operation.inode] = removed
        naming = _Naming(path)
    elif kind is Kind.RENAME:
        naming = _Naming(path, target=operation.target)
    elif kind is Kind.MSYNC:
        raise ValueError(f"{path} is written through a map, and what was written isn't in the journal")
    elif operation.folder:
        last = max((i for i, naming in enumerate(history.namings, 1) if naming.is_in(path)), default=0)
        history.floor = max(history.floor, last)
    else:
        file = by_inode.get(operation.inode) or _file_at(path, names)
        by_inode[operation.inode] = file
        _change(operation, file, history)
    if naming is not None:
        naming.apply(names)
        history.namings.append(naming)


def _file_at(path: str, names: Names) -> File:
    found = names.get(path)
    # One that had been removed when the journal began has no name, and never gets one.
    return found if isinstance(found, File) else File(None, 0o600)


def _change(operation: Operation, file: File, history: _History) -> None:
    if operation.kind is Kind.WRITE:
        file.changes.append(Change(operation.number, operation.offset, operation.data, operation.durable))
    elif operation.kind in (Kind.TRUNCATE, Kind.ALLOCATE):
        file.changes.append(Change(operation.number, operation.offset, at_least=operation.kind is Kind.ALLOCATE))
    else:
        for change in file.changes:
            change.durable = True
    if operation.durable or operation.kind in (Kind.FSYNC, Kind.FDATASYNC):
        history.floor = max(history.floor, file.created)


def _names_in(folder: Path) -> Names:
    names: Names = {}
    for found in sorted(folder.rglob("*")):
        mode = found.stat().st_mode & 0o7777
        path = str(found.relative_to(folder))
        if found.is_dir():
            names[path] = Folder(mode)
        elif found.name != "lock.mdb" and not found.name.endswith("-shm"):
            names[path] = File(found, mode)
    return names


def _parts(file: File, kept: Kept, torn: Random | None) -> Iterator[Change]:
    """What of a file's changes has reached the disk; with a random choice, some writes only in part."""
    for change in file.changes:
        if change.durable or kept(change):
            if torn is None or change.durable or change.data is None or torn.random() < 0.5:
                yield change
            else:
                yield from _sectors(change.number, change.offset, change.data, torn)


def _sectors(number: int, offset: int, data: bytes, rng: Random) -> Iterator[Change]:
    """Some of the sectors of a write. The others read as before, or as zeros behind the old end."""
    end = offset + len(data)
    if rng.random() < 0.5:
        # The new size may be there before the data.
        yield Change(number, end, at_least=True)
    for start in range(offset - offset % SECTOR, end, SECTOR):
        if rng.random() < 0.5:
            first = max(start, offset)
            yield Change(number, first, data[first - offset : start + SECTOR - offset])


def _build(names: Names, parts: dict[File, list[Change]], target: Path) -> None:
    target.mkdir()
    # A folder's name sorts before those of what is in it.
    for path, found in sorted(names.items()):
        place = target / path
        if isinstance(found, Folder):
            place.mkdir(mode=found.mode)
            continue
        descriptor = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, found.mode)
        try:
            if found.base is not None:
                _copy(found.base, descriptor)
            for change in parts[found]:
                if change.data is not None:
                    os.pwrite(descriptor, change.data, change.offset)
                elif not change.at_least or os.fstat(descriptor).st_size < change.offset:
                    os.ftruncate(descriptor, change.offset)
        finally:
            os.close(descriptor)


def _copy(source: Path, descriptor: int) -> None:
    """The content of a file, with its holes."""
    with source.open("rb", buffering=0) as file:
        os.ftruncate(descriptor, os.fstat(file.fileno()).st_size)
        for at, end in ranges(file.fileno()):
            while at < end:
                at += os.pwrite(descriptor, os.pread(file.fileno(), min(_CHUNK, end - at), at), at)


def copy(folder: Path, target: Path) -> None:
    """A copy for `before`, with the holes of its files."""
    image(folder, [], 1, "all", target)
