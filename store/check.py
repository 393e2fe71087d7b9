"""Walk rows to blobs and blobs to rows, and say everything that doesn't fit."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kvkeep.store import checkpoints, namespaces, nodes, rows, windows
from kvkeep.store.blobs import BlobReader
from kvkeep.store.entry import Entry
from kvkeep.store.errors import IntegrityError, MissingBlob
from kvkeep.store.hashing import BlobId
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
        roots = namespaces.ids(snapshot.connection)
        all_nodes = sorted(nodes.every(snapshot.connection), key=lambda node: node.start)
        points = list(checkpoints.every(snapshot.connection))
        findings = list(_structure(all_nodes, roots))
        entries: list[Entry] = [*all_nodes, *windows.every(snapshot.connection), *points]
        findings += _blobs(entries, snapshot.blobs, data)
        named = {entry.blob for entry in entries}
        findings += [_garbage(name) for name in snapshot.blobs.ids() if name not in named]
    with repository.rows() as connection:
        # Rows are read a moment before the blobs: what was removed in between isn't missing.
        return [found for found in findings if found.entry is None or rows.is_there(connection, found.entry)]


def _structure(all_nodes: list[Node], roots: dict[bytes, int]) -> Iterator[Finding]:
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
