"""Chats of several made-up models in one root: what stress tests save, and how they know what must come back."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from synthetic import ATTENTION, HYBRID, Made, dense_layout, random_tokens, window_model

from kvkeep.cache.layout import Bytes
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.repository import Repository

# 8 KiB a token.
LARGE = Made(ATTENTION.memory, (dense_layout(4, 512),))
MODELS: dict[str, Made] = {"dense": LARGE, "hybrid": HYBRID, "window": window_model(24)}
BLOCK_TOKENS = 16


@dataclass
class Crowd:
    """Caches of all models on one root.

    Attributes:
        repository: the root.
        caches: by the model's name.
    """

    repository: Repository
    caches: dict[str, PrefixCache]

    @classmethod
    def on(cls, repository: Repository) -> "Crowd":
        caches = {
            name: PrefixCache(repository, made.identity(name), block_tokens=BLOCK_TOKENS) for name, made in MODELS.items()
        }
        return cls(repository, caches)

    def save(self, name: str, tokens: list[int]) -> int:
        """Save a chat with two checkpoints on the way. Returns the bytes of the values that were written."""
        made = MODELS[name]
        points = [made.point(tokens[:pos]) for pos in (len(tokens) // 3, len(tokens) // 2)] if made.memory.is_recurrent else []
        return self.caches[name].save(tokens, made.state(tokens), points=points).written_bytes

    def restored(self, name: str, tokens: list[int]) -> int:
        """How many tokens come back.

        Raises:
            AssertionError: what came back isn't the state of these tokens.
        """
        cache = self.caches[name]
        found = cache.restore(cache.match(tokens), tokens)
        if found.damaged:
            cache.quarantine(found.damaged)
        assert is_right(MODELS[name], found.state, tokens[: found.length]), f"a wrong state of {found.length} tokens of {name}"
        return found.length


def is_right(made: Made, state: Bytes, tokens: list[int]) -> bool:
    """Whether it is the state of these tokens. Of a window it may have more than it needs, as much as was stored."""
    if not tokens:
        return state.size == 0
    window, length = made.memory.window, len(tokens)
    firsts = [0] if window is None else range(window.first_written(length), window.first_needed(length) + 1)
    return any(np.array_equal(state, made.state(tokens, first=first)) for first in firsts)


def chat(random: Random, length: int) -> list[int]:
    """A chat under one of a few system prompts."""
    system = random_tokens(48, seed=random.randrange(4))
    return system + random_tokens(max(1, length - 48), seed=random.getrandbits(32))


def occupied(root: Path) -> int:
    """Bytes that `du` counts for a root: everything that is in it, folders too."""
    found = [root, *root.rglob("*")]
    total = 0
    for path in found:
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def written_bytes() -> int:
    """Bytes that this process has caused to be written to a disk."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])
