"""Pins: beginnings of prompts that people want to keep. What is stored of them is never evicted."""

from collections.abc import Iterator

from kvkeep.cache import radix
from kvkeep.cache.eviction import key_of
from kvkeep.cache.restore_point import Prompt
from kvkeep.store import checkpoints, namespaces, pins, windows
from kvkeep.store.engine import Connection
from kvkeep.store.entry import Entry
from kvkeep.store.errors import TooLarge, UsageError
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.namespaces import Namespace
from kvkeep.store.pins import Pin
from kvkeep.store.writing import Writing

# Of the blobs' share of the budget, what may be pinned: the rest must still be worth having.
MAX_SHARE = 1 / 2


def pinned_keys(connection: Connection, most_bytes: int | None = None) -> set[PrefixHash]:
    """Keys of everything that is stored of pinned prefixes.

    Args:
        connection: a read transaction.
        most_bytes: the oldest pins only, as far as they have no more than this together. What is pinned before it is stored
            costs nothing then, and would leave no room for anything else later.
    """
    keys: set[PrefixHash] = set()
    for space, found in _with_spaces(connection):
        own = {key_of(entry): entry.stored_bytes for entry in stored_of(connection, space, found.tokens)}
        if most_bytes is not None:
            most_bytes -= sum(size for key, size in own.items() if key not in keys)
            if most_bytes < 0:
                break
        keys.update(own)
    return keys


def pinned_bytes(connection: Connection) -> int:
    """Stored bytes of everything that is stored of pinned prefixes."""
    entries = (entry for space, found in _with_spaces(connection) for entry in stored_of(connection, space, found.tokens))
    return sum({entry.blob: entry.stored_bytes for entry in entries}.values())


def stored_of(connection: Connection, space: Namespace, tokens: bytes) -> Iterator[Entry]:
    """Everything that is stored of a prefix: blocks, rows of the window, checkpoints.

    Args:
        connection: a read transaction.
        space: whose tokens they are.
        tokens: the prefix, little-endian int32.
    """
    prompt = Prompt.of(space.fingerprint, tokens, space.block_tokens)
    yield from (node for node, _ in radix.walk(connection, prompt.borders, tokens, space.block_tokens))
    for slot, anchor in enumerate(prompt.borders):
        rest = prompt.rest(slot)
        for row in windows.slots(connection, [anchor]):
            # All of it, or as much as the prefix has.
            if rest and (rest.startswith(row.path) or row.path.startswith(rest)):
                yield row
        for point in checkpoints.at(connection, anchor):
            if rest.startswith(point.path):
                yield point


def pin(writing: Writing, space: Namespace, tokens: bytes) -> bool:
    """Keep what is stored of a prefix, now and later, whatever the budget says. False if it is pinned already.

    Args:
        writing: the right to write.
        space: whose tokens they are.
        tokens: the prefix, little-endian int32.

    Raises:
        UsageError: there are no tokens.
        TooLarge: all pins together would leave too little for everything else.
    """
    if not tokens:
        raise UsageError("nothing is pinned by an empty prefix; name at least one token")
    with writing.index.read() as connection:
        known = [(spaces.fingerprint, found.tokens) for spaces, found in _with_spaces(connection)]
        kept = {entry.blob: entry.stored_bytes for entry in stored_of(connection, space, tokens)}
        for spaces, found in _with_spaces(connection):
            kept |= {entry.blob: entry.stored_bytes for entry in stored_of(connection, spaces, found.tokens)}
    if (space.fingerprint, tokens) in known:
        return False
    limit = int(writing.blobs.map_bytes * MAX_SHARE)
    if sum(kept.values()) > limit:
        raise TooLarge(f"with it {sum(kept.values())} bytes would be pinned; at most {limit} may be, half of the budget")
    with writing.index.write() as connection:
        return pins.add(connection, space.id, tokens)


def unpin(writing: Writing, space: Namespace, tokens: bytes) -> bool:
    """End a pin. What it kept goes when its time comes. False if this prefix isn't pinned."""
    with writing.index.write() as connection:
        found = [pin for pin in pins.of(connection, space.id) if pin.tokens == tokens]
        pins.remove(connection, found)
    return bool(found)


def _with_spaces(connection: Connection) -> list[tuple[Namespace, Pin]]:
    spaces = {space.id: space for space in namespaces.every(connection)}
    return [(spaces[found.namespace_id], found) for found in pins.every(connection) if found.namespace_id in spaces]
