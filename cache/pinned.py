"""Pins: beginnings of prompts that people want to keep. What is stored of them is never evicted."""

from collections.abc import Iterator

from kvkeep.cache import radix
from kvkeep.cache.eviction import key_of
from kvkeep.cache.restore_point import Prompt
from kvkeep.store import checkpoints, namespaces, pins, windows
from kvkeep.store.engine import Connection
from kvkeep.store.entry import Entry
from kvkeep.store.frame import TOKEN_BYTES
from kvkeep.store.hashing import PrefixHash, chain
from kvkeep.store.namespaces import Namespace


def pinned_keys(connection: Connection) -> set[PrefixHash]:
    """Keys of everything that is stored of pinned prefixes."""
    spaces = {space.id: space for space in namespaces.every(connection)}
    return {
        key_of(entry)
        for pin in pins.every(connection)
        if pin.namespace_id in spaces
        for entry in stored_of(connection, spaces[pin.namespace_id], pin.tokens)
    }


def stored_of(connection: Connection, space: Namespace, tokens: bytes) -> Iterator[Entry]:
    """Everything that is stored of a prefix: blocks, rows of the window, checkpoints.

    Args:
        connection: a read transaction.
        space: whose tokens they are.
        tokens: the prefix, little-endian int32.
    """
    root = PrefixHash(space.fingerprint)
    size = space.block_tokens * TOKEN_BYTES
    prompt = Prompt(tokens, [root, *chain(space.fingerprint, tokens, size)], space.block_tokens)
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
