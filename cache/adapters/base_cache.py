"""What the caches that stand in for llama-cpp-python's have in common."""

import logging
from collections.abc import Sequence

import numpy as np
from llama_cpp import llama_cache

from kvkeep.cache.prefix_cache import token_bytes
from kvkeep.cache.token_tree import Tokens

_LOG = logging.getLogger("kvkeep")

STOCK_CAPACITY = 2 << 30
"""Bytes: the default of all of llama-cpp-python's caches."""


class BaseLlamaCache(llama_cache.BaseLlamaCache):
    """Base of caches for a `Llama`: `cache_size`, `cache[tokens]`, `tokens in cache` and `cache[tokens] = state`.

    `Llama` never uses a cache that is falsy, so there must be no `__len__`.

    Args:
        capacity_bytes: what everything together may take.
    """

    verbose = False
    """Log at the level INFO what is found."""

    def __init__(self, capacity_bytes: int = STOCK_CAPACITY) -> None:
        super().__init__(capacity_bytes)

    def _say(self, text: str, *args: object) -> None:
        if self.verbose:
            _LOG.info(text, *args)


def key_tokens(key: Sequence[int]) -> Tokens:
    """A key as int32, shape (n,), that nobody else can change.

    Raises:
        UsageError: it has something else than tokens.
    """
    return np.frombuffer(token_bytes(key), "<i4")
