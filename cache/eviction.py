"""In which order entries go: leaves first, least recently used first; what stands on a leaf goes with it."""

import heapq
import math
from collections.abc import Collection, Iterator
from itertools import count

from kvkeep.store import checkpoints, nodes, windows
from kvkeep.store.checkpoints import Checkpoint, NewCheckpoint
from kvkeep.store.engine import Connection
from kvkeep.store.entry import Entry
from kvkeep.store.frame import Kind
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.nodes import Node
from kvkeep.store.rows import NewRow

# Rows that are looked at together, besides the protected ones among them.
_AT_ONCE = 128


def in_order(connection: Connection, protect: Collection[PrefixHash]) -> Iterator[list[Entry]]:
    """Entries that may go, the next one first, each behind what must go together with it.

    Where a leaf goes, what it stood on is the next leaf, and as old as it is: a chat that nobody has used for long goes
    as a whole before anything of a newer one. Ends where more would have to be read first; ask again then.

    Args:
        connection: a transaction; what was given must be removed before it is asked anew.
        protect: keys of what must stay.
    """
    limit = _AT_ONCE + len(protect)
    numbers = count()
    # A row that was cut off by the limit is older than whatever is younger than the youngest row of its kind.
    horizon = math.inf
    heap: list[tuple[float, int, int, Entry]] = []
    found: tuple[list[Node], list[Checkpoint], list[windows.Window]] = (
        nodes.oldest_leaves(connection, limit),
        checkpoints.oldest(connection, limit),
        windows.oldest(connection, limit),
    )
    for rows in found:
        if len(rows) == limit:
            horizon = min(horizon, rows[-1].used)
        for row in rows:
            heapq.heappush(heap, (row.used, -_position(row), next(numbers), row))
    gone: dict[tuple[type, int], Entry] = {}
    while heap and heap[0][0] <= horizon:
        *_, entry = heapq.heappop(heap)
        together = [other for other in (*_standing_on(connection, entry), entry) if (type(other), other.id) not in gone]
        if entry not in together or any(key_of(other) in protect for other in together):
            continue
        gone |= {(type(other), other.id): other for other in together}
        if isinstance(entry, Node) and (above := _bared(connection, entry, gone)) is not None:
            heapq.heappush(heap, (above.used, -above.start, next(numbers), above))
        yield together


def _bared(connection: Connection, leaf: Node, gone: Collection[tuple[type, int]]) -> Node | None:
    """The node on which a leaf stood, if nothing else stands on it."""
    above = nodes.by_keys(connection, [leaf.parent]).get(leaf.parent)
    if above is None:
        return None
    besides = [row for kind, row in gone if kind is Node]
    return None if nodes.has_children(connection, above.key, besides) else above


def _standing_on(connection: Connection, entry: Entry) -> list[Entry]:
    """Checkpoints and windows that are of no use without a leaf: they never outlive it. Whole states stand on nothing."""
    if not isinstance(entry, Node):
        return []
    beside: list[Entry] = [*checkpoints.at(connection, entry.anchor), *windows.slots(connection, [entry.anchor])]
    above: list[Entry] = [*checkpoints.at(connection, entry.key), *windows.slots(connection, [entry.key])]
    if beside:
        before = len(entry.path) - len(entry.tokens)
        others = [node.path for node in nodes.slot(connection, entry.anchor) if node.id != entry.id]
        for other in beside:
            in_it = len(other.path) > before and entry.path.startswith(other.path)
            if in_it and not any(path.startswith(other.path) for path in others):
                above.append(other)
    return [other for other in above if not (isinstance(other, Checkpoint) and other.kind == Kind.OPAQUE)]


def key_of(row: Entry | NewRow) -> PrefixHash:
    """The prefix hash by which an entry is found."""
    return row.prefix if isinstance(row, NewCheckpoint) else row.key


def _position(entry: Entry) -> int:
    return entry.pos if isinstance(entry, Checkpoint) else entry.start


def branch(entries: Collection[Entry], anchor: PrefixHash, path: bytes) -> list[Entry]:
    """What holds the last token of a path, and everything that stands on that; what stands on others comes first.

    Args:
        entries: all of a namespace.
        anchor: prefix hash at the block border at or below that token.
        path: the tokens from the anchor through that token.
    """
    gone: set[PrefixHash] = set()
    found: list[Entry] = []
    for node in sorted((entry for entry in entries if isinstance(entry, Node)), key=lambda node: node.start):
        if node.parent in gone or _is_on(node, anchor, path):
            gone.add(node.key)
            found.append(node)
    # A block's key is the anchor of what follows it.
    parts = [entry for entry in entries if not isinstance(entry, Node)]
    return [*(part for part in parts if part.anchor in gone or _is_on(part, anchor, path)), *reversed(found)]


def _is_on(entry: Entry, anchor: PrefixHash, path: bytes) -> bool:
    return entry.anchor == anchor and entry.path.startswith(path)
