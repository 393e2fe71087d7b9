"""Walk rows to blobs and blobs to rows, and say everything that doesn't fit."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kvkeep.store import checkpoints, nodes
from kvkeep.store.blobs import BlobReader
from kvkeep.store.entry import Entry
from kvkeep.store.errors import IntegrityError, MissingBlob
from kvkeep.store.hashing import BlobId, Fingerprint
from kvkeep.store.namespaces import usage
from kvkeep.store.nodes import Node
from kvkeep.store.repository import Repository
from kvkeep.store.verify import verified


class Trouble(Enum):
    """What kind of thing was found."""

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


def check(repository: Repository, *, data: bool = True) -> list[Finding]:
    """Everything that doesn't fit; an empty list is a sound store.

    Args:
        repository: an open one. Others may use it meanwhile.
        data: read and hash every blob. Without it only names and rows are compared.
    """
    with repository.snapshot() as snapshot:
        roots = [entry.fingerprint for entry in usage(snapshot.connection)]
        all_nodes = list(nodes.every(snapshot.connection))
        points = list(checkpoints.every(snapshot.connection))
        findings = list(_structure(all_nodes, roots))
        entries: list[Entry] = [*all_nodes, *points]
        findings += _blobs(entries, snapshot.blobs, data)
        named = {entry.blob for entry in entries}
        findings += [_garbage(name) for name in snapshot.blobs.ids() if name not in named]
    return findings


def _structure(all_nodes: list[Node], roots: list[Fingerprint]) -> Iterator[Finding]:
    ends: dict[bytes, int] = dict.fromkeys(roots, 0)
    for node in all_nodes:
        if node.parent not in ends:
            yield Finding(Trouble.UNREACHABLE, f"the node at position {node.start} has no parent", node)
        elif ends[node.parent] != node.start:
            message = f"the node at position {node.start} follows a parent that ends at {ends[node.parent]}"
            yield Finding(Trouble.DAMAGE, message, node)
        ends[node.key] = node.start + node.n_tokens


def _blobs(entries: list[Entry], blobs: BlobReader, data: bool) -> Iterator[Finding]:
    for entry in entries:
        try:
            if data:
                verified(blobs.get(entry.blob), entry)
            elif entry.blob not in blobs:
                raise MissingBlob(f"blob {entry.blob.hex()[:16]} is missing")
        except IntegrityError as error:
            yield Finding(Trouble.DAMAGE, str(error), entry)


def _garbage(name: BlobId) -> Finding:
    return Finding(Trouble.GARBAGE, f"no row names blob {name.hex()[:16]}")
