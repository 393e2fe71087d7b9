"""How much slower the model gets while the writer works behind it, with all cores given to the model.

The writer is kept busy for the whole of every measured span: each finished save submits the next one, of tokens that
were never stored. For comparison the same saves run in a thread of ordinary priority, which is what the idle priority
was chosen over. On a busy machine an idle thread that holds the interpreter's lock can be off the processor for long,
and the model's thread waits for it: the longest wait for a token shows that.
"""

import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import children
import llamas
import models
import numpy as np
import texts
from figures import AtLeast, Figure, Run
from llama_cpp import Llama

from kvkeep.cache.adapters.backing import Wishes
from kvkeep.cache.adapters.session import Session
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.cache.writer import Job, Writer

# Small, because on a busy machine an idle writer takes long to end the save that it is in.
_SAVED_TOKENS = 512
# Beside an ordinary thread a token may take a second.
_MOST_SECONDS = 8.0
# Full after a while, so that evictions are part of what the writer does.
_CAPACITY = 1 << 30
N_ANSWER = 64


@dataclass(frozen=True)
class _Setting:
    """A machine to work on.

    Attributes:
        name: what people read.
        threads: that the model gets.
        others: programs that want a whole core each.
        prompt: tokens to prefill; the busy machine is slow, and only its generation is looked at.
    """

    name: str
    threads: int
    others: int
    prompt: int


_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
_CORES = os.cpu_count() or 1
_SETTINGS = {
    "quiet": _Setting("all cores to the model", _CORES, 0, 512),
    # One thread, because ggml's barriers hide everything else once its threads don't run at the same time.
    "busy": _Setting("other programs on all cores, model on one thread", 1, _CORES, 64),
}


def measure(run: Run) -> list[Figure]:
    run.say("the writer resting, working idly, working at ordinary priority")
    quiet = children.run(__file__, "behind", folder=str(run.folder / "quiet"), setting="quiet", rounds=2 if run.quick else 9)
    run.say("the same on a busy machine")
    busy = children.run(__file__, "behind", folder=str(run.folder / "busy"), setting="busy", rounds=2 if run.quick else 9)
    return [
        _figure(quiet, "idle", "prefill", AtLeast(0.9)),
        _figure(quiet, "idle", "generation", AtLeast(0.9)),
        _figure(quiet, "ordinary", "prefill"),
        _figure(quiet, "ordinary", "generation"),
        _figure(busy, "idle", "generation"),
    ]


def _figure(found: dict[str, Any], how: str, what: str, target: AtLeast | None = None) -> Figure:
    # Round by round, because the machine's speed drifts more between rounds than within one.
    pairs = [(row[how], row["none"]) for row in found["rounds"] if how in row]
    ratios = [beside[what] / alone[what] for beside, alone in pairs]
    total = {key: sum(beside[key] for beside, _ in pairs) for key in ("saves", "writer_seconds", "seconds")}
    detail = (
        f"{statistics.median(beside[what] for beside, _ in pairs):.1f} against "
        f"{statistics.median(alone[what] for _, alone in pairs):.1f} tokens/s; ratios {min(ratios):.2f} to {max(ratios):.2f}; "
        f"longest wait for a token {_longest(pairs, 0):.0f} against {_longest(pairs, 1):.0f} ms; in {total['seconds']:.0f} s "
        f"{total['saves']:.0f} saves ended, writer {total['writer_seconds']:.1f} s on the processor"
    )
    name = f"{what}, writer at {how} priority / not working; {_SETTINGS[found['setting']].name}"
    return Figure(name, statistics.median(ratios), "x", target, detail)


def _longest(pairs: list[tuple[dict[str, float], dict[str, float]]], index: int) -> float:
    return 1e3 * max(pair[index]["longest"] for pair in pairs)


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

    @property
    def going_on(self) -> bool:
        """Whether a save has begun, and more are wanted."""
        return self.clock is not None and self.wanted.is_set()

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


def _behind(folder: str, setting: str, rounds: int) -> dict[str, Any]:
    machine = _SETTINGS[setting]
    llm = llamas.load(models.smollm2(), n_ctx=2048, n_batch=512, n_threads=machine.threads, n_threads_batch=machine.threads)
    session = Session(llm, Path(folder), Wishes(_CAPACITY), break_even=False, extra="")
    assert session.cache is not None
    saves = _Saves(session.cache, llm)
    prompt = texts.long_tokens(llm, machine.prompt)
    _span(llm, prompt)
    ways = {"none": saves.by_nobody, "idle": saves.by_writer, "ordinary": saves.by_ordinary_thread}
    rows = []
    for i in range(rounds):
        # The ordinary thread takes ten times as long, and its effect can be seen in a few rounds.
        wanted = [name for name in ways if name != "ordinary" or (setting == "quiet" and i % 4 == 0)]
        wanted = wanted[::-1] if i % 2 else wanted
        rows.append({name: _beside(saves, ways[name], machine, llm, prompt) for name in wanted})
    session.close()
    return {"setting": setting, "rounds": rows}


@contextmanager
def _others(count: int) -> Iterator[None]:
    """Programs that keep a core busy each, and end with us even if we are killed."""
    started = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for program in started:
            program.kill()
            program.wait()


def _beside(saves: _Saves, way: Callable[[], Any], machine: _Setting, llm: Llama, prompt: list[int]) -> dict[str, float]:
    saves.clock = None
    # The other programs end first: an idle writer may take a minute beside them to end its last save.
    with way(), _others(machine.others):
        time.sleep(0.2)  # the writer is in the middle of something when the span begins
        finished, cpu, began = saves.finished, saves.cpu_seconds(), time.perf_counter()
        rates = _span(llm, prompt)
        seconds = time.perf_counter() - began
        done = {"saves": saves.finished - finished, "writer_seconds": saves.cpu_seconds() - cpu, "seconds": seconds}
        # Whoever saves has begun, and hasn't been told to stop.
        assert saves.going_on or way == saves.by_nobody
    return rates | done


def _span(llm: Llama, prompt: list[int]) -> dict[str, float]:
    """Tokens a second of a prefill and of the generation behind it, and the longest wait for a token."""
    llamas.forget(llm)
    began = time.perf_counter()
    stream = llm.generate(prompt, temp=0.0)
    next(stream)
    at = [time.perf_counter()]
    prefill = len(prompt) / (at[0] - began)
    while len(at) <= N_ANSWER and at[-1] - at[0] < _MOST_SECONDS:
        next(stream)
        at.append(time.perf_counter())
    stream.close()
    longest = max(after - before for before, after in pairwise(at))
    return {"prefill": prefill, "generation": (len(at) - 1) / (at[-1] - at[0]), "longest": longest}


if __name__ == "__main__":
    children.serve({"behind": _behind})
