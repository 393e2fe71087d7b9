"""What saving costs the thread that answers the person: everything between its last token and the end of `generate`.

The floor is one `llama_state_seq_get_data` into memory allocated in the same way, at the same moment: right behind a
token, when other threads still want the processor. Each repetition ends the same 2,048 tokens differently, as the next
turn of a chat would, so that there is always something new to save.
"""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import llama_cpp
import llamas
import numpy as np
import real
import texts
from figures import AtMost, Figure, Run, median_ratio, ms
from llama_cpp import Llama

from kvkeep.cache.adapters.attach import attach

N_TOKENS = 2048
# As many as a short turn adds.
_NEW_TOKENS = 64


def measure(run: Run) -> list[Figure]:
    rounds = 5 if run.quick else 24
    run.say(f"saving {N_TOKENS} tokens {rounds} times")
    found = children.run(__file__, "save", folder=str(run.folder), rounds=rounds)
    ours, copy = found["ours"], found["copy"]
    detail = (
        f"end of generate {ms(ours['wall'])}; copy alone {ms(copy['wall'])}; processor time of the thread "
        f"{median_ratio(ours['cpu'], copy['cpu']):.2f} x; state {found['state_bytes'] / 1e6:.1f} MB; "
        f"{found['saves']} saves for {rounds} repetitions"
    )
    ratio = median_ratio(ours["wall"], copy["wall"])
    return [Figure("saving, on the caller / one state copy", ratio, "x", AtMost(2.0), detail)]


# -- in the child -------------------------------------------------------------------------------------------------


def _save(folder: str, rounds: int) -> dict[str, Any]:
    llm = real.load()
    base = texts.long_tokens(llm, N_TOKENS - _NEW_TOKENS)
    times: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in ("ours", "copy")}
    with attach(llm, Path(folder) / "root") as keep:
        saves = 0
        for i in range(2 * (rounds + 1)):
            stream = llm.generate([*base, *llamas.random_tokens(_NEW_TOKENS, seed=i)], temp=0.0)
            next(stream)
            size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
            name, work = (("ours", stream.close), ("copy", lambda size=size: _copy(llm, size)))[i % 2]
            before = keep.stats().saves
            children.pages_at_hand(2 * size)
            _clock(work, times[name])
            stream.close()
            # What the writer does behind is the business of background.py.
            assert keep.flush()
            saves += keep.stats().saves - before if name == "ours" else 0
        stats = keep.stats()
    assert (stats.errors.total(), stats.dropped) == (0, 0)
    assert saves == rounds + 1
    # The first of each pays for imports and first touches.
    kept = {name: {clock: seconds[1:] for clock, seconds in found.items()} for name, found in times.items()}
    return kept | {"saves": saves - 1, "state_bytes": size}


def _clock(work: Callable[[], None], times: dict[str, list[float]]) -> None:
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    times["cpu"].append(time.thread_time() - cpu)
    times["wall"].append(time.perf_counter() - wall)


def _copy(llm: Llama, size: int) -> None:
    state = np.empty(size, np.uint8)
    pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    assert llama_cpp.llama_state_seq_get_data(llm.ctx, pointer, size, 0) == size


if __name__ == "__main__":
    children.serve({"save": _save})
