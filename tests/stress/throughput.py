"""Does saving get slower with age? Twenty times the budget is saved and evicted, in one run."""

import statistics
import time
from random import Random

import crowd
from crowd import Crowd
from figures import AtLeast, Figure, Run

from kvkeep.store.registry import close_root, open_root

CAPACITY = 64 << 20


def measure(run: Run) -> list[Figure]:
    times = 5 if run.quick else 20
    repository = open_root(run.folder / "root", CAPACITY)
    together = Crowd.on(repository)
    random = Random(3)
    rates: list[float] = []
    stored = 0
    written_before = crowd.written_bytes()
    while stored < times * CAPACITY:
        tokens = crowd.chat(random, 400)
        state = crowd.MODELS["dense"].state(tokens)
        began = time.perf_counter()
        written = together.caches["dense"].save(tokens, state).written_bytes
        rates.append(written / (time.perf_counter() - began))
        stored += written
    close_root(repository)
    all_written = crowd.written_bytes() - written_before
    tenth = len(rates) // 10
    first, last = statistics.median(rates[:tenth]), statistics.median(rates[-tenth:])
    # In the quick version a tenth is a handful of saves, and says little.
    target = AtLeast(0.35 if run.quick else 0.7)
    detail = f"{len(rates)} saves of {stored / len(rates) / 1e6:.1f} MB, the last ones at {last / 1e6:.0f} MB/s"
    return [
        Figure("rate of the last tenth / of the first", last / first, "x", target, detail),
        Figure(
            "bytes written to the disk / bytes stored", all_written / stored, "x", None, "blocks of 0.1 MB, all evicted in turn"
        ),
    ]
