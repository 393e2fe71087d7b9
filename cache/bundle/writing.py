"""From a store into a bundle: everything that is stored of some prefixes, cut to their tokens, every value verified."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvkeep.cache.bundle.format import RECORD_BYTES, Head, Seal
from kvkeep.cache.bundle.rows import as_row, cut, cut_key, reached, record_of, taken, unique
from kvkeep.cache.eviction import key_of
from kvkeep.cache.pinned import stored_of
from kvkeep.cache.restore_point import Prompt
from kvkeep.store import namespaces, rows
from kvkeep.store.blobs import BlobReader
from kvkeep.store.checkpoints import Checkpoint
from kvkeep.store.engine import Connection
from kvkeep.store.entry import Entry
from kvkeep.store.errors import IntegrityError, LayoutError, StoreError, UsageError
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.namespaces import Namespace
from kvkeep.store.private import disk_errors, sync_folder
from kvkeep.store.repository import Repository
from kvkeep.store.rows import NewRow
from kvkeep.store.verify import verified
from kvkeep.store.windows import Window

Progress = Callable[[int], None]
"""Called with the bytes of each entry as it is done; may raise to stop."""

Prefixes = Sequence[tuple[Namespace, bytes]]
"""Prefixes, each with the namespace whose tokens they are, little-endian int32."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported.

    Attributes:
        file: the bundle.
        reached: for each of the prefixes, how many of its first tokens are in it.
        entries: how many entries it has.
        n_bytes: the size of the file.
    """

    file: Path
    reached: tuple[int, ...]
    entries: int
    n_bytes: int


class _Wanted(NamedTuple):
    """An entry that goes into a bundle.

    Attributes:
        entry: as the index holds it.
        prefix: the number of a prefix to which it belongs.
        take: how many of its tokens that prefix has; None for one that holds for one position.
    """

    entry: Entry
    prefix: int
    take: int | None

    @property
    def name(self) -> tuple[object, ...]:
        """What no two entries of a bundle may have in common."""
        if isinstance(self.entry, Checkpoint) or self.take is None:
            return unique(as_row(self.entry))
        return (type(self.entry), cut_key(self.entry, self.take))


def export(repository: Repository, prefixes: Prefixes, file: Path, progress: Progress = lambda n_bytes: None) -> Exported:
    """Write everything that is stored of some prefixes of one model into a file. No token behind them is in it.

    Args:
        repository: where they are stored.
        prefixes: which ones.
        file: written beside its place and put there at the end, with mode 0600; replaces one that is there.
        progress: see `Progress`; all bytes together are `stored_bytes`.

    Raises:
        UsageError: prefixes of several models, one without tokens or of which nothing is stored, or a file that can't be.
        IntegrityError, LayoutError: something that is stored of them is damaged.
        DiskFull, StoreError: the file can't be written. Nothing is left of it.
    """
    space, prompts = _one_model(prefixes)
    _check_target(file)
    with repository.rows() as connection:
        wanted = _wanted(connection, space, prompts)
        ingredients = namespaces.ingredients(connection).get(space.fingerprint, {})
        tables = rows.tables_in_use(connection, space.id)
    keys = [key_of(one.entry) for one in wanted]
    written: list[NewRow] = []
    with repository.holding(keys), _beside(file) as out:
        tokens = tuple(prompt.tokens for prompt in prompts)
        head = Head(space.fingerprint, space.label, ingredients, space.block_tokens, tokens, len(wanted), 0)
        # Sizes of what is cut are known only at the end, and a head doesn't grow by a number.
        out.write(head.pack())
        seal = Seal(space.fingerprint)
        for one in wanted:
            written.append(_write(repository, one, prompts[0].borders[0], out, seal))
            progress(one.entry.stored_bytes)
        n_bytes = sum(row.stored_bytes + RECORD_BYTES for row in written)
        reach = dict(zip(tokens, reached(prompts, written, tables), strict=True))
        finished = replace(head, entries_bytes=n_bytes).pack()
        out.write(seal.close(finished))
        out.seek(0)
        out.write(finished)
        out.seek(0, os.SEEK_END)
        size = out.tell()
    return Exported(file, tuple(reach[own] for _, own in prefixes), len(written), size)


def stored_bytes(repository: Repository, prefixes: Prefixes) -> int:
    """What `export` reads for these prefixes: all that its progress adds up to."""
    space, prompts = _one_model(prefixes)
    with repository.rows() as connection:
        return sum(one.entry.stored_bytes for one in _wanted(connection, space, prompts))


def _one_model(prefixes: Prefixes) -> tuple[Namespace, list[Prompt]]:
    spaces = {space.fingerprint: space for space, _ in prefixes}
    if len(spaces) != 1:
        names = ", ".join(sorted(f"{space.label} ({space.fingerprint.hex()[:8]})" for space in spaces.values())) or "none"
        raise UsageError(f"a bundle holds prefixes of exactly one model; these are of: {names}")
    [space] = spaces.values()
    if not all(tokens for _, tokens in prefixes):
        raise UsageError("an empty prefix can't be exported; it has at least one token")
    return space, [Prompt.of(space.fingerprint, tokens, space.block_tokens) for tokens in dict.fromkeys(t for _, t in prefixes)]


def _wanted(connection: Connection, space: Namespace, prompts: Sequence[Prompt]) -> list[_Wanted]:
    """Everything that is stored of prefixes, parents before children, each only once."""
    found: dict[tuple[object, ...], _Wanted] = {}
    for number, prompt in enumerate(prompts):
        own = list(_of_prefix(connection, space, number, prompt))
        if not own:
            raise UsageError(f"nothing is stored of a prefix of {prompt.n_tokens} tokens; decode it once before it is exported")
        for one in own:
            known = found.setdefault(one.name, one)
            # Two rows of a window may be the same when they are cut: the one that begins lower has more of it.
            if isinstance(one.entry, Window) and isinstance(known.entry, Window) and one.entry.start < known.entry.start:
                found[one.name] = one
    return list(found.values())


def _of_prefix(connection: Connection, space: Namespace, number: int, prompt: Prompt) -> Iterator[_Wanted]:
    for entry in stored_of(connection, space, prompt.tokens):
        if isinstance(entry, Checkpoint):
            yield _Wanted(entry, number, None)
        elif (take := taken(entry, prompt)) > 0:
            yield _Wanted(entry, number, take)


def _write(repository: Repository, one: _Wanted, root: PrefixHash, out: BinaryIO, seal: Seal) -> NewRow:
    """Write an entry's record and value. A snapshot for each: a slow disk must keep nobody's pages."""
    with repository.values() as blobs:
        try:
            row, value = _read(blobs, one)
        except (IntegrityError, LayoutError) as error:
            with repository.rows() as connection:
                if not rows.is_there(connection, one.entry):
                    raise StoreError("what is stored of a prefix has changed while it was exported; export it again") from error
            raise
        record = record_of(row, one.prefix, root)
        out.write(record.pack())
        out.write(value)
        seal.add(record, value)
    return row


def _read(blobs: BlobReader, one: _Wanted) -> tuple[NewRow, bytes | memoryview]:
    entry, value = one.entry, blobs.get(one.entry.blob)
    if not isinstance(entry, Checkpoint) and one.take is not None and one.take < entry.n_tokens:
        shorter = cut(value, entry, one.take)
        return shorter.row, shorter.value
    verified(value, entry)
    assert value is not None
    return as_row(entry), value


def _check_target(file: Path) -> None:
    if not file.parent.is_dir():
        raise UsageError(f"{file} can't be written: {file.parent} is no folder")
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} can't be written: it is no ordinary file")


@contextmanager
def _beside(file: Path) -> Iterator[BinaryIO]:
    """A file that takes its place when the block has run, and is gone if it didn't."""
    temporary: Path | None = None
    try:
        with disk_errors(f"writing {file}"):
            # Only its owner can read it, whatever the umask.
            descriptor, name = tempfile.mkstemp(prefix=".kvkeep-export-", dir=file.parent)
            temporary = Path(name)
            with os.fdopen(descriptor, "wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(file)
            temporary = None
            sync_folder(file.parent)
    finally:
        if temporary is not None:
            with suppress(FileNotFoundError):
                temporary.unlink()
