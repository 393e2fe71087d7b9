"""How long it takes to find what a prompt can reuse, among the blocks of few chats and of a thousand.

States without a model, of few bytes a token: a look-up reads rows, never states.
"""

import random
import statistics
import time
from pathlib import Path

from figures import AtMost, Figure, Run
from synthetic import SMALL, identity, random_tokens, state_of

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.registry import close_root, open_root

_BLOCKS = 100
_SYSTEM = 20
_FEW, _MANY = 10, 1000
_PARTS = 5


def measure(run: Run) -> list[Figure]:
    many = _MANY // 10 if run.quick else _MANY
    rounds = 200 if run.quick else 2000
    times: dict[int, list[float]] = {}
    caches = {}
    for count in (_FEW, many):
        run.say(f"storing {count} chats of {_BLOCKS} blocks")
        caches[count] = _filled(run.folder / str(count), count)
        times[count] = []
    run.say("looking up")
    draw = random.Random(1)
    for _ in range(rounds):
        for count, cache in caches.items():
            chat = _chat(draw.randrange(count))
            # As its next turn asks for it, or as one that parts from it in the middle.
            prompt = [*chat[: draw.choice((len(chat), len(chat) // 2 + 7))], *random_tokens(40, seed=draw.randrange(10**6))]
            began = time.perf_counter()
            found = cache.match(prompt)
            times[count].append(time.perf_counter() - began)
            assert found.length >= len(chat) // 2
    for cache in caches.values():
        close_root(cache.repository)
    few, most = (_p99(times[count]) for count in (_FEW, many))
    medians = ", ".join(f"{statistics.median(times[count]) * 1e3:.2f} ms among {count * _BLOCKS:,} blocks" for count in times)
    names = f"{many * _BLOCKS:,} blocks of {many:,} chats"
    return [
        Figure(f"look-up of a prompt among {names}, p99", most * 1e3, "ms", AtMost(2.0), f"medians: {medians}"),
        Figure(f"the same / among {_FEW * _BLOCKS:,} blocks, p99", most / few, "x", AtMost(2.0), f"{few * 1e3:.2f} ms there"),
    ]


def _p99(times: list[float]) -> float:
    """The median of five parts' 99th percentiles: a busy second of the machine is in one of them."""
    length = len(times) // _PARTS
    parts = (times[i * length : (i + 1) * length] for i in range(_PARTS))
    return statistics.median(statistics.quantiles(part, n=100)[98] for part in parts)


def _chat(number: int) -> list[int]:
    """All begin as the others do."""
    own = _BLOCKS - (_SYSTEM if number else 0)
    return [*(random_tokens(_SYSTEM * 64, seed=10**6) if number else []), *random_tokens(own * 64, seed=number)]


def _filled(root: Path, count: int) -> PrefixCache:
    cache = PrefixCache(open_root(root), identity("bench"))
    for number in range(count):
        chat = _chat(number)
        cache.save(chat, state_of(SMALL, chat))
    return cache
