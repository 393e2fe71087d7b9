"""How much slower the model gets while the writer works behind it, with all cores given to the model.

The writer is kept busy for the whole of every measured span: each finished save submits the next one, of tokens that
were never stored. For comparison the same saves run in a thread of ordinary priority, which is what the idle priority
was chosen over.
"""

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import children
import llamas
import models
import numpy as np
import texts
from figures import AtLeast, Figure, Run
from llama_cpp import Llama

from kvkeep.cache.adapters.session import Session
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.cache.writer import Job, Writer

N_PROMPT = 512
N_ANSWER = 64
_SAVED_TOKENS = 1024
# Beside an ordinary thread a token may take a second.
_MOST_SECONDS = 8.0
# Full after a while, so that evictions are part of what the writer does.
_CAPACITY = 1 << 30
_WHAT = ("prefill", "generation")


def measure(run: Run) -> list[Figure]:
    run.say("prefill and generation with the writer resting, working idly, working at ordinary priority")
    found = children.run(__file__, "behind", folder=str(run.folder), rounds=2 if run.quick else 10)
    return [_figure(found, how, what) for how in ("idle", "ordinary") for what in _WHAT]


def _figure(found: dict[str, Any], how: str, what: str) -> Figure:
    # Round by round, because the machine's speed drifts more between rounds than within one.
    pairs = [(row[how][what], row["none"][what]) for row in found["rounds"] if how in row]
    ratios = [with_writer / without for with_writer, without in pairs]
    spans = [row[how] for row in found["rounds"] if how in row]
    total = {key: sum(span[key] for span in spans) for key in ("saves", "writer_seconds", "seconds")}
    detail = (
        f"{statistics.median(a for a, _ in pairs):.1f} against {statistics.median(b for _, b in pairs):.1f} tokens/s; "
        f"ratios {min(ratios):.2f} to {max(ratios):.2f}; in {total['seconds']:.0f} s of prefill and generation "
        f"{total['saves']} saves, {total['writer_seconds']:.1f} s on the processor"
    )
    name = f"{what}, writer at {how} priority / not working"
    return Figure(name, statistics.median(ratios), "x", AtLeast(0.9) if how == "idle" else None, detail)


# -- in the child -------------------------------------------------------------------------------------------------


class _Saves:
    """Saves without end: one state under ever new tokens, so that nothing of it is stored already."""

    def __init__(self, cache: PrefixCache, llm: Llama) -> None:
        self._cache = cache
        llm.eval(texts.long_tokens(llm, _SAVED_TOKENS))
        self._state = llamas.sequence_state(llm)
        self._seeds = itertools.count()
        self.wanted = threading.Event()
        self.finished = 0
        self.clock: int | None = None

    def one(self) -> None:
        """In whichever thread does the saving."""
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        self._cache.save(llamas.random_tokens(_SAVED_TOKENS, next(self._seeds)), self._state)
        self.finished += 1

    def cpu_seconds(self) -> float:
        """Processor time of the thread that saves."""
        return 0.0 if self.clock is None else time.clock_gettime(self.clock)

    @contextmanager
    def by_writer(self) -> Iterator[None]:
        """kvkeep's own writer, at its idle priority, never without a job."""
        failures: list[BaseException] = []
        writer = Writer(failures.append, lambda: None)

        def run() -> None:
            self.one()
            if self.wanted.is_set():
                writer.submit(Job(run, np.empty(0, np.int32), self._state.nbytes))

        self.wanted.set()
        writer.submit(Job(run, np.empty(0, np.int32), self._state.nbytes))
        yield
        self.wanted.clear()
        writer.close()
        assert not failures, failures

    @contextmanager
    def by_ordinary_thread(self) -> Iterator[None]:
        def loop() -> None:
            while self.wanted.is_set():
                self.one()

        self.wanted.set()
        thread = threading.Thread(target=loop)
        thread.start()
        yield
        self.wanted.clear()
        thread.join()

    @contextmanager
    def by_nobody(self) -> Iterator[None]:
        yield


def _behind(folder: str, rounds: int) -> dict[str, Any]:
    cores = os.cpu_count() or 1
    llm = llamas.load(models.smollm2(), n_ctx=2048, n_batch=512, n_threads=cores, n_threads_batch=cores)
    session = Session(llm, Path(folder) / "root", _CAPACITY, False, "")
    assert session.cache is not None
    saves = _Saves(session.cache, llm)
    prompt = texts.long_tokens(llm, N_PROMPT)
    _span(llm, prompt)
    ways = {"none": saves.by_nobody, "idle": saves.by_writer, "ordinary": saves.by_ordinary_thread}
    rows = []
    for i in range(rounds):
        # The ordinary thread takes ten times as long, and its effect can be seen in a few rounds.
        names = [name for name in ways if name != "ordinary" or i % 3 == 0]
        names = names[::-1] if i % 2 else names
        rows.append({name: _beside(saves, ways[name], llm, prompt) for name in names})
    session.close()
    return {"rounds": rows}


def _beside(saves: _Saves, way: Callable[[], Any], llm: Llama, prompt: list[int]) -> dict[str, float]:
    saves.clock = None
    with way():
        time.sleep(0.2)  # the writer is in the middle of something when the span begins
        finished, cpu, began = saves.finished, saves.cpu_seconds(), time.perf_counter()
        rates = _span(llm, prompt)
        seconds = time.perf_counter() - began
        done = {"saves": saves.finished - finished, "writer_seconds": saves.cpu_seconds() - cpu, "seconds": seconds}
        assert saves.clock is None or saves.wanted.is_set()
    return rates | done


def _span(llm: Llama, prompt: list[int]) -> dict[str, float]:
    """Tokens a second of a prefill and of the generation behind it."""
    llamas.forget(llm)
    began = time.perf_counter()
    stream = llm.generate(prompt, temp=0.0)
    next(stream)
    prefill = len(prompt) / (time.perf_counter() - began)
    count, began = 0, time.perf_counter()
    while count < N_ANSWER and time.perf_counter() - began < _MOST_SECONDS:
        next(stream)
        count += 1
    generation = count / (time.perf_counter() - began)
    stream.close()
    return {"prefill": prefill, "generation": generation}


if __name__ == "__main__":
    children.serve({"behind": _behind})
