"""Lives of a root that a test may cut short at any operation: `python lives.py SCENARIO ROOT`.

Run under `faults.run`. A scenario opens the root, works in it, and says after each step what is surely there by then: for
each chat, how many of its first tokens come back. The same steps are done in every run, so a test that has seen a whole life
knows what the step that was cut short was about to do.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import faults
from synthetic import ATTENTION, Made, dense_layout, random_tokens

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.registry import close_root, open_root

CAPACITY = 16 << 20
BLOCK_TOKENS = 16

MADE = Made(ATTENTION.memory, (dense_layout(4, 512),))
"""8 KiB a token, so that nine short chats are more than the budget."""

_TRUNK = random_tokens(40, seed=99)
# Each third one begins as the first one does.
CHATS = [(_TRUNK if i % 3 == 0 else random_tokens(40, seed=i)) + random_tokens(120, seed=100 + i) for i in range(9)]
# Each chat is saved as often, the later ones in place of the end of the earlier: in mid-block, twice in one block.
TURNS = (70, 75, 160)


@contextmanager
def opened(root: Path) -> Iterator[PrefixCache]:
    """A cache at a root, which is closed at the end."""
    repository = open_root(root, CAPACITY)
    try:
        yield PrefixCache(repository, MADE.identity(), block_tokens=BLOCK_TOKENS)
    finally:
        close_root(repository)


def lengths(cache: PrefixCache) -> list[int]:
    """How many of each chat's first tokens are there."""
    return [cache.match(chat).length for chat in CHATS]


@dataclass(frozen=True)
class Step:
    """What a life says when a step is done.

    Attributes:
        after: number of the last operation by then, which counts for power cuts.
        there: how many of each chat's first tokens are there.
    """

    after: int
    there: list[int]


def announce(cache: PrefixCache) -> None:
    """Say what is there, after it is flushed."""
    print(json.dumps([faults.count(), lengths(cache)]), flush=True)


def announced(stdout: str) -> list[Step]:
    """What a life has said, step by step, from nothing on. A line that a kill has cut off counts as not said."""
    return [Step(0, [0] * len(CHATS)), *(Step(*json.loads(line)) for line in stdout.split("\n")[:-1])]


def save(root: Path) -> None:
    """An empty root, chats that grow, and evictions as soon as it is full."""
    with opened(root) as cache:
        for chat in CHATS:
            for length in TURNS:
                cache.save(chat[:length], MADE.state(chat[:length]))
                announce(cache)


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "save": save,
}


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
