"""The walk down the radix index: which stored runs of tokens cover the beginning of a prompt.

Hashes find candidates, tokens decide: every step compares the tokens themselves, so a collision, or a row whose
tokens were flipped on disk, ends the walk instead of being served.
"""

from collections.abc import Sequence

import numpy as np

from kvkeep.cache.match import Step
from kvkeep.store import nodes
from kvkeep.store.engine import Connection
from kvkeep.store.frame import TOKEN_BYTES
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.nodes import Node


def walk(connection: Connection, borders: Sequence[PrefixHash], tokens: bytes, block_tokens: int) -> list[Step]:
    """Stored nodes that cover the longest possible beginning of `tokens`, in order.

    Args:
        connection: a read transaction.
        borders: prefix hashes at 0, B, 2B, ... of these tokens; the first one is the fingerprint.
        tokens: little-endian int32.
        block_tokens: B.
    """
    blocks = full_blocks(connection, borders, tokens, block_tokens)
    steps: list[Step] = [(node, node.n_tokens) for node in blocks]
    start = len(blocks) * block_tokens * TOKEN_BYTES
    rest = tokens[start : start + block_tokens * TOKEN_BYTES]
    return steps + slot_steps(connection, borders[len(blocks)], rest, len(blocks) * block_tokens)


def full_blocks(connection: Connection, borders: Sequence[PrefixHash], tokens: bytes, block_tokens: int) -> list[Node]:
    """The unbroken run of full blocks from the first token on."""
    found = nodes.by_keys(connection, borders[1:])
    size = block_tokens * TOKEN_BYTES
    run: list[Node] = []
    for i, key in enumerate(borders[1:]):
        node = found.get(key)
        if node is None or not is_block(node, borders[i], tokens[i * size : (i + 1) * size], i * block_tokens):
            break
        run.append(node)
    return run


def is_block(node: Node, parent: PrefixHash, tokens: bytes, start: int) -> bool:
    """Whether a row is the block that follows `parent` with these tokens, and no colliding or damaged one."""
    wanted = (parent, parent, tokens, start, len(tokens))
    return (node.parent, node.anchor, node.path, node.start, node.n_tokens * TOKEN_BYTES) == wanted


def slot_steps(connection: Connection, anchor: PrefixHash, rest: bytes, start: int) -> list[Step]:
    """Nodes behind a block border that cover most of `rest`, the tokens that follow there.

    They may be the pieces of a tail, or a block of which only the first tokens are the same.

    Args:
        connection: a read transaction.
        anchor: prefix hash at the border.
        rest: the tokens behind it, little-endian int32, no more than a block's.
        start: position of the border.
    """
    lines = [lineage(connection, node) for node in nodes.neighbours(connection, anchor, rest)]
    if not all(lines):
        # What stands on a removed piece hides its neighbours until that is saved again: look at everything, for once.
        lines = [lineage(connection, node) for node in nodes.slot(connection, anchor)]
    return max((cut_to(line, rest, start) for line in lines), key=covered, default=[])


def lineage(connection: Connection, node: Node) -> list[Node]:
    """The nodes from the block border to `node`, or nothing if one between them is gone."""
    line = [node]
    while line[-1].parent != node.anchor:
        above = nodes.by_keys(connection, [line[-1].parent]).get(line[-1].parent)
        if above is None or above.anchor != node.anchor or len(above.path) >= len(line[-1].path):
            return []
        line.append(above)
    return line[::-1]


def cut_to(line: Sequence[Node], rest: bytes, start: int) -> list[Step]:
    """As much of a lineage as has the same tokens as `rest`."""
    steps: list[Step] = []
    at = 0
    for node in line:
        expected = (start + at // TOKEN_BYTES, at + node.n_tokens * TOKEN_BYTES, rest[:at])
        if (node.start, len(node.path), node.path[:at]) != expected:
            break
        take = common_tokens(node.tokens, rest[at:])
        if take:
            steps.append((node, take))
        if take < node.n_tokens:
            break
        at = len(node.path)
    return steps


def covered(steps: Sequence[Step]) -> int:
    """Tokens that steps cover."""
    return sum(take for _, take in steps)


def cut(steps: Sequence[Step], length: int) -> list[Step]:
    """The steps that cover the first `length` tokens."""
    kept: list[Step] = []
    for node, take in steps:
        if length <= 0:
            break
        kept.append((node, min(take, length)))
        length -= take
    return kept


def whole(steps: Sequence[Step]) -> list[Node]:
    """The nodes that are wanted in full."""
    return [node for node, take in steps if take == node.n_tokens]


def common_tokens(a: bytes, b: bytes) -> int:
    """How many tokens two runs have in common from their beginning."""
    length = min(len(a), len(b)) // TOKEN_BYTES
    if a[: length * TOKEN_BYTES] == b[: length * TOKEN_BYTES]:
        return length
    differs = np.frombuffer(a, "<i4", length) != np.frombuffer(b, "<i4", length)
    return int(differs.argmax())
