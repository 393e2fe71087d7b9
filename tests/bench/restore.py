"""How long a restore takes, against reading the same bytes from a plain file.

The plain file is the floor: it verifies nothing, is not compressed, and serves one prompt only. Both read a warm page
cache, both put the state into freshly allocated memory, both load it into the same kind of context.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import children
import llamas
import numpy as np
import real
import texts
from figures import AtMost, Figure, Run, median_ratio, ms
from llama_cpp import Llama

from kvkeep.cache.adapters.attach import attach
from kvkeep.cache.adapters.backing import Wishes
from kvkeep.cache.adapters.context import LiveContext
from kvkeep.cache.adapters.session import Session
from kvkeep.cache.match import Source
from kvkeep.store.space import DEFAULT_CAPACITY

N_TOKENS = 2048
_PLAIN = "state.bin"
_TARGET = AtMost(2.5)
# The state has 47 MB; threads that decompress it need some more.
_PAGES = 128 << 20
Steps = dict[str, float]


def measure(run: Run) -> list[Figure]:
    folder = str(run.folder)
    run.say(f"decoding and storing {N_TOKENS} tokens")
    stored = children.run(__file__, "store", folder=folder)
    ours: list[Steps] = []
    plain: list[Steps] = []
    for i in range(5 if run.quick else 16):
        run.say(f"new process {i + 1}, one restore of each kind")
        # The first pair only warms the page cache.
        pair = children.run(__file__, "ours", folder=folder), children.run(__file__, "plain", folder=folder)
        if i:
            ours.append(pair[0])
            plain.append(pair[1])
    run.say("both kinds alternately in one process")
    within = children.run(__file__, "within", folder=folder, rounds=5 if run.quick else 15)
    return [
        _figure("first restore of a process / plain file", ours, plain),
        _figure("repeated in one process / plain file", within["ours"], within["plain"]),
        Figure(
            "first restore of a process / decoding the tokens",
            statistics.median(_totals(ours)) / stored["decode_seconds"],
            "x",
            detail=f"decoding {N_TOKENS} tokens took {stored['decode_seconds']:.1f} s; the state has "
            f"{stored['state_bytes'] / 1e6:.1f} MB, {stored['stored_bytes'] / 1e6:.1f} MB stored",
        ),
    ]


def _figure(name: str, ours: list[Steps], plain: list[Steps]) -> Figure:
    parts = "; ".join(
        f"{what}: " + ", ".join(f"{step} {ms([row[step] for row in rows])}" for step in rows[0])
        for what, rows in (("kvkeep", ours), ("plain", plain))
    )
    return Figure(name, median_ratio(_totals(ours), _totals(plain)), "x", _TARGET, parts)


def _totals(rows: list[Steps]) -> list[float]:
    return [sum(row.values()) for row in rows]


# -- in the children ----------------------------------------------------------------------------------------------


def _store(folder: str) -> dict[str, Any]:
    """Decode once, and leave the state behind in both ways."""
    llm = real.load()
    tokens = texts.long_tokens(llm, N_TOKENS)
    with attach(llm, Path(folder) / "root") as keep:
        began = time.perf_counter()
        stream = llm.generate(tokens, temp=0.0)
        next(stream)
        seconds = time.perf_counter() - began
        stream.close()
        keep.flush()
        stored = keep.stats().written_bytes
    state = llamas.sequence_state(llm)
    state.tofile(Path(folder) / _PLAIN)
    return {"decode_seconds": seconds, "state_bytes": state.nbytes, "stored_bytes": stored}


class _Ours:
    """Match, restore and load from a kvkeep store."""

    def __init__(self, llm: Llama, folder: str) -> None:
        self._session = Session(llm, Path(folder) / "root", Wishes(DEFAULT_CAPACITY), break_even=False, extra="")
        self._context = LiveContext(llm)
        # One more than is stored: the last token of a prompt is never restored.
        self._prompt = [*texts.long_tokens(llm, N_TOKENS), 1]

    def once(self) -> Steps:
        cache = self._session.cache
        assert cache is not None
        at = [time.perf_counter()]
        match = cache.match(self._prompt, at_most=N_TOKENS)
        at.append(time.perf_counter())
        restored = cache.restore(match, self._prompt)
        at.append(time.perf_counter())
        self._context.load(restored.state, restored.length)
        at.append(time.perf_counter())
        assert (match.source, restored.length) == (Source.DISK, N_TOKENS)
        return dict(zip(("match", "read", "load"), np.diff(at).tolist(), strict=True))


class _Plain:
    """Read and load a plain file."""

    def __init__(self, llm: Llama, folder: str) -> None:
        self._context = LiveContext(llm)
        self._path = Path(folder) / _PLAIN

    def once(self) -> Steps:
        at = [time.perf_counter()]
        # Not Path.read_bytes: that gives memory that llama.cpp's binding would have to copy once more.
        state = np.empty(self._path.stat().st_size, np.uint8)
        with self._path.open("rb", buffering=0) as file:
            assert file.readinto(state.data) == state.nbytes
        at.append(time.perf_counter())
        self._context.load(state, N_TOKENS)
        at.append(time.perf_counter())
        return dict(zip(("read", "load"), np.diff(at).tolist(), strict=True))


def _first(kind: type[_Ours] | type[_Plain], folder: str) -> Steps:
    llm = real.load()
    way = kind(llm, folder)
    children.pages_at_hand(_PAGES)
    steps = way.once()
    _check(llm, folder)
    return steps


def _within(folder: str, rounds: int) -> dict[str, Any]:
    llm = real.load()
    ours, plain = _Ours(llm, folder), _Plain(llm, folder)
    rows: dict[str, list[Steps]] = {"ours": [], "plain": []}
    for _ in range(rounds + 1):
        for kind, way in (("ours", ours), ("plain", plain)):
            children.pages_at_hand(_PAGES)
            rows[kind].append(way.once())
            _check(llm, folder)
    # The first of each is what `_first` measures.
    return {kind: steps[1:] for kind, steps in rows.items()}


def _check(llm: Llama, folder: str) -> None:
    """The context really holds the state, byte for byte."""
    assert np.array_equal(llamas.sequence_state(llm), np.fromfile(Path(folder) / _PLAIN, np.uint8))


if __name__ == "__main__":
    children.serve(
        {
            "store": _store,
            "ours": lambda folder: _first(_Ours, folder),
            "plain": lambda folder: _first(_Plain, folder),
            "within": _within,
        }
    )
