"""Walk rows to blobs and blobs to rows, and say everything that doesn't fit."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kvkeep.store import namespaces, rows
from kvkeep.store.blobs import DATA_FILE
from kvkeep.store.entry import Entry
from kvkeep.store.errors import IntegrityError, MissingBlob, UsageError
from kvkeep.store.hashing import BlobId
from kvkeep.store.nodes import Node
from kvkeep.store.pages import examine
from kvkeep.store.repository import Repository
from kvkeep.store.schema import in_pieces
from kvkeep.store.verify import verified

# Blobs that are read in one snapshot: a long one keeps every page that is freed meanwhile from being used again.
_AT_ONCE = 64


class Trouble(Enum):
    """What kind of thing was found."""

    STRUCTURE = "structure"
    """LMDB's or SQLite's own pages are damaged. The next open that is alone mends it, and may have to give up entries."""
    DAMAGE = "damage"
    """A row and its blob don't agree, or the blob's bytes aren't what its name says. Never served, to be removed."""
    UNREACHABLE = "unreachable"
    """A sound node whose parent is gone. Served again as soon as the parent is saved again; evicted otherwise."""
    GARBAGE = "garbage"
    """A blob that no row names, left behind by a writer that died. Harmless; the next sweep takes it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that doesn't fit, in a sentence for people."""

    trouble: Trouble
    message: str
    entry: Entry | None = None
    blob: BlobId | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is looked at.

    Attributes:
        data: the share of the stored bytes that is read and hashed, 0.0 to 1.0; which ones is drawn by lot.
        structure: read LMDB's and SQLite's own pages too. Nobody can write meanwhile.
    """

    data: float = 1.0
    structure: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.data <= 1.0:
            raise UsageError(f"the share of the data to be read is between 0 and 1, not {self.data}")


EVERYTHING = Extent()
ROWS_ONLY = Extent(data=0.0)


def check(
    repository: Repository, extent: Extent = EVERYTHING, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Finding]:
    """Everything that doesn't fit; an empty list is a sound store.

    Args:
        repository: an open one. Others may use it meanwhile.
        extent: how much is looked at. Names and rows are always compared.
        progress: called with the bytes that were read, and those that will be; may raise to stop.
    """
    findings = [Finding(Trouble.STRUCTURE, complaint) for complaint in _structure(repository)] if extent.structure else []
    if findings:
        # What rows say can't be relied on, and LMDB may end the process on a damaged page.
        return findings
    with repository.snapshot() as snapshot:
        roots = namespaces.ids(snapshot.connection)
        entries = list(rows.every(snapshot.connection))
        present = set(snapshot.blobs.ids())
    all_nodes = sorted((entry for entry in entries if isinstance(entry, Node)), key=lambda node: node.start)
    findings += _filing(all_nodes, roots)
    findings += _missing(entries, present)
    findings += _damaged(repository, _drawn([entry for entry in entries if entry.blob in present], extent.data), progress)
    named = {entry.blob for entry in entries}
    findings += [_garbage(name) for name in present - named]
    return list(_still_so(repository, findings))


def _structure(repository: Repository) -> Iterator[str]:
    """What is wrong with the files themselves."""
    # Alone, because pages that are written while they are read make no sense.
    with repository.writing() as writing:
        found = (writing.index.complaint(), examine(writing.blobs.folder / DATA_FILE))
    for complaint in found:
        if complaint is not None:
            repository.report_damage(complaint)
            yield complaint


def _drawn(entries: Sequence[Entry], share: float) -> Sequence[Entry]:
    """A share of the entries, drawn by lot; in the order of their blobs, as they lie on the disk."""
    count = round(len(entries) * share)
    drawn = entries if count == len(entries) else random.sample(entries, count)
    return sorted(drawn, key=lambda entry: entry.blob)


def _damaged(repository: Repository, entries: Sequence[Entry], progress: Callable[[int, int], None]) -> Iterator[Finding]:
    done, total = 0, sum(entry.stored_bytes for entry in entries)
    for piece in in_pieces(entries, _AT_ONCE):
        with repository.snapshot() as snapshot:
            for entry in piece:
                try:
                    verified(snapshot.blobs.get(entry.blob), entry)
                except IntegrityError as error:
                    yield Finding(Trouble.DAMAGE, str(error), entry)
        done += sum(entry.stored_bytes for entry in piece)
        progress(done, total)


def _missing(entries: Sequence[Entry], present: set[BlobId]) -> Iterator[Finding]:
    for entry in entries:
        if entry.blob not in present:
            yield Finding(Trouble.DAMAGE, str(MissingBlob(f"blob {entry.blob.hex()[:16]} is missing")), entry)


def _still_so(repository: Repository, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Without what others have removed, or given a row, meanwhile."""
    with repository.rows() as connection:
        named = rows.all_named(connection)
        for found in findings:
            if found.trouble is Trouble.GARBAGE:
                if found.blob not in named:
                    yield found
            elif found.entry is None or rows.is_there(connection, found.entry):
                yield found


def _filing(all_nodes: list[Node], roots: dict[bytes, int]) -> Iterator[Finding]:
    known: dict[bytes, Node] = {}
    for node in all_nodes:
        above = known.get(node.parent)
        known[node.key] = node
        if above is None and node.parent not in roots:
            yield Finding(Trouble.UNREACHABLE, f"the node at position {node.start} has no parent", node)
            continue
        end, namespace_id = (0, roots[node.parent]) if above is None else (_end(above), above.namespace_id)
        if end != node.start:
            message = f"the node at position {node.start} follows a parent that ends at {end}"
            yield Finding(Trouble.DAMAGE, message, node)
        elif namespace_id != node.namespace_id:
            yield Finding(Trouble.DAMAGE, f"the node at position {node.start} is in another namespace than its parent", node)
        elif not _is_filed(node, above):
            yield Finding(Trouble.DAMAGE, f"the node at position {node.start} is filed where nobody looks for it", node)


def _end(node: Node) -> int:
    return node.start + node.n_tokens


def _is_filed(node: Node, above: Node | None) -> bool:
    """Whether anchor and path are those under which a walk looks for it."""
    if node.path == node.tokens:
        return node.anchor == node.parent
    return above is not None and (node.anchor, node.path) == (above.anchor, above.path + node.tokens)


def _garbage(name: BlobId) -> Finding:
    return Finding(Trouble.GARBAGE, f"no row names blob {name.hex()[:16]}", blob=name)


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair did.

    Attributes:
        removed: damaged entries that were removed.
        swept: blobs without a row that were deleted.
        recovered: what was mended in the files themselves, in sentences for people.
    """

    removed: int
    swept: int
    recovered: tuple[str, ...]


def repair(repository: Repository, findings: Sequence[Finding]) -> Repaired:
    """Remove what a check has found damaged. Nothing is adopted: what isn't proven goes.

    Args:
        repository: the one that was checked.
        findings: what the check has found.
    """
    recovered = repository.recover() if any(found.trouble is Trouble.STRUCTURE for found in findings) else []
    damaged = [found.entry for found in findings if found.trouble is Trouble.DAMAGE and found.entry is not None]
    with repository.writing() as writing:
        with writing.index.read() as connection:
            # Others may have removed them meanwhile, and written them anew.
            damaged = [entry for entry in damaged if rows.is_there(connection, entry)]
        writing.remove(damaged)
        return Repaired(len(damaged), writing.sweep(), tuple(recovered))
