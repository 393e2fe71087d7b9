"""In a process: the store by itself, without a model. How fast states go in and out, and how long a look-up takes."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvkeep.cache.layout import Bytes
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.errors import KvkeepError
from kvkeep.store.registry import close_root, open_root
from kvkeep.tools.bench import synthetic
from kvkeep.tools.bench.clocks import disk_bytes
from kvkeep.tools.bench.synthetic import Shape

Result = TypeVar("Result")

_MODEL = "made-up"
# Beyond the states themselves, for the index and its log.
_SLACK_BYTES = 256 << 20


class WrongResult(KvkeepError):
    """What came out of the store isn't what went in."""


def throughput(folder: str, shape: list[int], tokens: int, seed: int) -> dict[str, Any]:
    """Save one state and restore it, in a new store and in a plain file.

    Args:
        folder: an empty one.
        shape: layers, heads, numbers of a head.
        tokens: of the state.
        seed: of its tokens and numbers.

    Returns:
        Bytes of the state and on the disk, and the seconds of each step. Everything is in the page cache when it is read.
    """
    made = synthetic.state(Shape(*shape), tokens, seed)
    prompt = synthetic.tokens(tokens, seed)
    plain, store = Path(folder) / "plain.bin", Path(folder) / "store"
    steps: dict[str, float] = {}
    with _opened(store, 2 * made.nbytes + _SLACK_BYTES) as cache:
        steps["save"], _ = _timed(lambda: cache.save(prompt, made))
        steps["plain_write"], _ = _timed(lambda: _write(plain, made))
        steps["look_up"], match = _timed(lambda: cache.match(prompt))
        _at_hand(made.nbytes)
        steps["restore"], restored = _timed(lambda: cache.restore(match, prompt))
        _check(restored.state, made)
        # Not beside it in memory.
        del restored
        _at_hand(made.nbytes)
        steps["plain_read"], _ = _timed(lambda: _read(plain))
        stored = disk_bytes(store)
    return {"tokens": tokens, "state_bytes": made.nbytes, "disk_bytes": stored, "steps_seconds": steps}


def lookups(folder: str, few: int, many: int, chat_tokens: int, rounds: int) -> dict[str, Any]:
    """Time `PrefixCache.match` in a store of a few chats and in one of many, in turn.

    Args:
        folder: an empty one.
        few: chats in the first store.
        many: chats in the second one.
        chat_tokens: tokens of each chat, whole blocks.
        rounds: look-ups in each store.

    Returns:
        For each store its blocks and the seconds of all look-ups.
    """
    with _opened(Path(folder) / "few") as small, _opened(Path(folder) / "many") as large:
        stores = {few: small, many: large}
        state = synthetic.empty_state(chat_tokens)
        for count, cache in stores.items():
            for number in range(count):
                cache.save(synthetic.tokens(chat_tokens, number), state)
        times: dict[int, list[float]] = {count: [] for count in stores}
        # The first round pays for statements that are compiled at their first use.
        for i in range(rounds + 1):
            for count, cache in stores.items():
                times[count].append(_look_up(cache, i, i * 7919 % count, chat_tokens))
        blocks = chat_tokens // small.block_tokens
    return {"stores": [{"chats": count, "blocks": count * blocks, "seconds": times[count][1:]} for count in stores]}


def _look_up(cache: PrefixCache, turn: int, number: int, chat_tokens: int) -> float:
    """A chat that goes on, or, every other time, one that parts in the middle."""
    prompt = synthetic.tokens(chat_tokens, number)
    expected = chat_tokens
    if turn % 2:
        expected = chat_tokens // 2
        prompt[expected:] = 32_001
    asked = np.append(prompt, np.full(16, 32_001, np.int32))
    began = time.perf_counter()
    match = cache.match(asked)
    seconds = time.perf_counter() - began
    if match.length != expected:
        raise WrongResult(f"a look-up found {match.length} tokens; {expected} are stored")
    return seconds


def _check(found: Bytes, made: Bytes) -> None:
    if not np.array_equal(found, made):
        raise WrongResult("a restored state isn't the one that was saved")


def _at_hand(n_bytes: int) -> None:
    """Touch and free as much memory as is wanted next.

    A virtual machine may have given it back to its host, and whoever comes first waits for it: 260 ms for 256 MiB, which
    would be called the restore's.
    """
    np.ones(n_bytes, np.uint8)


@contextmanager
def _opened(path: Path, capacity: int | None = None) -> Iterator[PrefixCache]:
    repository = open_root(path, capacity)
    try:
        yield PrefixCache(repository, synthetic.identity(_MODEL))
    finally:
        close_root(repository)


def _timed(do: Callable[[], Result]) -> tuple[float, Result]:
    began = time.perf_counter()
    result = do()
    return time.perf_counter() - began, result


def _write(path: Path, data: Bytes) -> None:
    """As durable as a save is."""
    with path.open("wb", buffering=0) as file:
        view = memoryview(data.data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def _read(path: Path) -> Bytes:
    """Into memory of its own, as a restore does."""
    data = np.empty(path.stat().st_size, np.uint8)
    view = memoryview(data.data)
    with path.open("rb", buffering=0) as file:
        while view:
            count = file.readinto(view)
            view = view[count:]
    return data
