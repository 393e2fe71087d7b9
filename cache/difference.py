"""Where a prompt parts from everything that is known, and whether what follows is known all the same.

A time in the first line makes every prompt new, though nearly all of its text is old: nothing behind it can be reused,
now or ever. That has to be told, and such states aren't worth their disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkeep.cache import radix
from kvkeep.cache.match import Source
from kvkeep.cache.prefix_cache import token_bytes
from kvkeep.cache.restore_point import Prompt
from kvkeep.store import nodes
from kvkeep.store.engine import Connection
from kvkeep.store.errors import DamagedFile
from kvkeep.store.frame import TOKEN_BYTES
from kvkeep.store.hashing import Fingerprint
from kvkeep.store.nodes import Node

Tokens = npt.NDArray[np.int32]

# How many tokens behind the difference are looked at.
_SAMPLE = 512
# Of what parts at the same place, the newest few say enough.
_MOST_LOOKED_AT = 24
# Fewer than these say nothing.
_MIN_SAMPLE = 64
# So many tokens in a row are no accident, and fit between the figures of a list that changes here and there.
_RUN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token of a prompt that nothing known shares.

    Attributes:
        index: its position.
        source: what shares the `index` tokens before it: the context as it was (LIVE), or the store (DISK).
        tokens: the prompt from there on, at most 512 tokens, int32.
        known: what stands there instead, likewise.
        repeated: how many of `tokens` stand in `known` all the same, in runs of at least 8.
    """

    index: int
    source: Source
    tokens: Tokens
    known: Tokens
    repeated: int

    @property
    def is_inserted(self) -> bool:
        """Whether most of what follows is known: something in front of it has changed."""
        return len(self.tokens) >= _MIN_SAMPLE and 2 * self.repeated >= len(self.tokens)

    @classmethod
    def between(cls, prompt: Tokens, known: Tokens, index: int, source: Source) -> "Difference":
        """That of two runs of tokens which share the first `index`; `known` begins there."""
        tokens, known = prompt[index : index + _SAMPLE].copy(), known[:_SAMPLE].copy()
        return cls(index=index, source=source, tokens=tokens, known=known, repeated=_repeated(tokens, known))


def _repeated(tokens: Tokens, known: Tokens) -> int:
    runs = {known[at : at + _RUN].tobytes() for at in range(len(known) - _RUN + 1)}
    count = at = 0
    while at <= len(tokens) - _RUN:
        if tokens[at : at + _RUN].tobytes() in runs:
            count, at = count + _RUN, at + _RUN
        else:
            at += 1
    return count


def _is_beginning(one: bytes, other: bytes) -> bool:
    """Whether one of two goes on as the other, as far as they go."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def common(a: Tokens, b: Tokens) -> int:
    """How many tokens two runs share from their beginning."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


class Stored:
    """What the store knows of a prompt's beginning, whether or not it could be restored.

    Args:
        connection: a read transaction.
        fingerprint: of the namespace.
        block_tokens: its tokens a block.
        prompt: the tokens, int32.
    """

    def __init__(self, connection: Connection, fingerprint: Fingerprint, block_tokens: int, prompt: Tokens) -> None:
        self._connection = connection
        self._block_tokens = block_tokens
        known = Prompt.of(fingerprint, token_bytes(prompt), block_tokens)
        self.in_common = radix.covered(radix.walk(connection, known.borders, known.tokens, block_tokens))
        slot = min(self.in_common // block_tokens, len(known.borders) - 1)
        self._anchor = known.borders[slot]
        self._rest = known.rest(slot)
        self._from_border = prompt[slot * block_tokens :][:_SAMPLE]

    def following(self) -> Tokens:
        """What is stored behind the tokens in common; none where what is stored ends there."""
        inside = self.in_common % self._block_tokens * TOKEN_BYTES
        near = [row for row in nodes.neighbours(self._connection, self._anchor, self._rest) if len(row.path) > inside]
        near = [row for row in near if row.path[:inside] == self._rest[:inside]]
        if not near:
            return np.empty(0, np.int32)
        return self._run_of(max(near, key=lambda one: len(one.path)), inside)

    def alternatives(self, at_most: int) -> int:
        """How many others are stored that part from this prompt in the same block, and are alike in the rest.

        Args:
            at_most: no more are counted.
        """
        rows = sorted(nodes.slot(self._connection, self._anchor), key=lambda row: row.path)
        # The pieces of a tail are parts of each other.
        ends = [row for i, row in enumerate(rows) if i + 1 == len(rows) or not rows[i + 1].path.startswith(row.path)]
        others = sorted((row for row in ends if not _is_beginning(row.path, self._rest)), key=lambda row: -row.id)
        count = 0
        for row in others[:_MOST_LOOKED_AT]:
            known = self._run_of(row, 0)[:_SAMPLE]
            count += 2 * _repeated(self._from_border, known) >= len(self._from_border)
            if count == at_most:
                break
        return count

    def _run_of(self, row: Node, skip: int) -> Tokens:
        """What is stored from a node's border on, without its first `skip` bytes, as far as a sample of it."""
        pieces = [row.path[skip:]]
        while sum(map(len, pieces)) < _SAMPLE * TOKEN_BYTES and len(row.path) == self._block_tokens * TOKEN_BYTES:
            behind = nodes.neighbours(self._connection, row.key, b"")
            if not behind:
                break
            row = behind[-1]
            pieces.append(row.path)
        if any(len(piece) % TOKEN_BYTES for piece in pieces):
            raise DamagedFile(f"a node behind position {row.start} has a path that is no tokens")
        return np.frombuffer(b"".join(pieces), "<i4").astype(np.int32)


def first(prompt: Tokens, live: Tokens, stored: Stored | None) -> Difference | None:
    """Where a prompt parts from the context and the store, whichever shares more of it.

    Args:
        prompt: its tokens.
        live: what the context held when it came.
        stored: what the store knows of it, if it was asked.

    Returns:
        None if the prompt goes on where that ends, or is no longer than it, or nothing at all is known.
    """
    in_live = common(prompt, live)
    known: Sequence[tuple[int, Source, Tokens]] = [(in_live, Source.LIVE, live[in_live:])]
    if stored is not None:
        known = [*known, (stored.in_common, Source.DISK, stored.following())]
    index, source, behind = max(known, key=lambda one: (one[0], len(one[2]) > 0))
    if index >= len(prompt) or not len(behind):
        return None
    return Difference.between(prompt, behind, index, source)
