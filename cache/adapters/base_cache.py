"""What the caches that stand in for llama-cpp-python's have in common."""

import logging
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cache

from kvkeep.cache.adapters.identity import sees
from kvkeep.cache.prefix_cache import token_bytes
from kvkeep.cache.token_tree import Tokens

_LOG = logging.getLogger("kvkeep")

STOCK_CAPACITY = 2 << 30
"""Bytes: the default of all of llama-cpp-python's caches."""


# The method in which `Llama` asks, and frames between it and this module: ours, and those of somebody's subclass.
_COMPLETION = "_create_completion"
_FRAMES = 6


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


def asking_llama(cache: BaseLlamaCache | None) -> Any | None:
    """The `Llama` that asks, if it is one, in a completion.

    `Llama` doesn't say who it is: it calls `cache[tokens]`, and nothing else. Without knowing, a state of another model could
    only be told by its shape, and one of a fine-tune not at all. So the callers are looked at, a few frames up.
    """
    asking = _asking(cache, sys._getframe(1))
    return None if asking is None else asking[0]


def may_hold_images(cache: BaseLlamaCache) -> bool:
    """Whether what is handed over now was decoded by a chat handler for images.

    Such a handler asks for a completion of the numbers that `Llama.input_ids` shows. Where an image is, these are left over
    from whatever text was there before.
    """
    asking = _asking(cache, sys._getframe(1))
    return asking is not None and sees(asking[0]) and isinstance(asking[1], list)


def _asking(cache: BaseLlamaCache | None, frame: FrameType) -> tuple[Any, Any] | None:
    """The `Llama` in whose completion a frame is, and what that was given as its prompt."""
    for _ in range(_FRAMES):
        # Any other method is somebody's own, who does it by hand.
        caller = frame.f_locals.get("self") if frame.f_code.co_name == _COMPLETION else None
        if isinstance(caller, llama_cpp.Llama) and caller.cache is cache:
            return caller, frame.f_locals.get("prompt")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
