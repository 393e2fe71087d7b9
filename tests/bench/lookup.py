"""What a look-up in the caches in memory costs, with few and with many entries of 4,000 tokens.

The keys are chats under one system prompt; some are asked for as they are, some go on, some part in the middle. Both caches are
asked the same, alternated, so that the ratio says what more entries cost.
"""

import statistics
import time
from typing import Any

import numpy as np
from figures import AtMost, Figure, Run, median_ratio
from llama_cpp import LlamaState

from kvkeep.cache import LlamaRAMCache, LlamaTrieCache

N_TOKENS = 4000
_SYSTEM = 1000
_FEW, _MANY = 100, 10_000
_NO_SCORES = np.zeros((1, 8), np.single)


def measure(run: Run) -> list[Figure]:
    rounds = 50 if run.quick else 400
    many = _MANY // 10 if run.quick else _MANY
    found = []
    for name, make in (("RAM", LlamaRAMCache), ("trie", LlamaTrieCache)):
        run.say(f"looking up among {_FEW} and {many} entries: {name}")
        caches = {count: _filled(make(64 << 30), count) for count in (_FEW, many)}
        times = _times(caches, rounds)
        few, most = (statistics.median(times[count]) for count in (_FEW, many))
        detail = f"{few * 1e6:.0f} us among {_FEW}, {most * 1e6:.0f} us among {many:,}"
        found.append(
            Figure(
                f"look-up in the {name} cache, {many:,} entries / {_FEW}",
                median_ratio(times[many], times[_FEW]),
                "x",
                AtMost(2.0),
                detail,
            )
        )
    return found


def _chat(number: int) -> list[int]:
    rest = np.random.default_rng(number).integers(0, 50_000, N_TOKENS - _SYSTEM)
    return [*range(_SYSTEM), *rest.tolist()]


def _filled(cache: Any, count: int) -> Any:
    for number in range(count):
        chat = _chat(number)
        cache[chat] = LlamaState(np.asarray(chat, np.intc), _NO_SCORES, len(chat), b"state", 5, 0)
    return cache


def _times(caches: dict[int, Any], rounds: int) -> dict[int, list[float]]:
    times: dict[int, list[float]] = {count: [] for count in caches}
    for i in range(rounds):
        for count, cache in caches.items():
            chat = _chat(i * 7919 % count)
            # As it is, and as the next turn asks for it.
            key = chat if i % 2 else [*chat, 1, 2, 3]
            began = time.perf_counter()
            cache[key]
            times[count].append(time.perf_counter() - began)
    return times
