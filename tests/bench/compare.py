"""kvkeep beside what llama-cpp-python brings along: one chat, a restart, another chat, and the first one again.

Every way runs in processes and a folder of its own, several times in turn; times are compared within one round.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import children
import llama_cpp
import real
import texts
from figures import Figure, Run, disk_bytes
from llama_cpp import Llama
from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from kvkeep.cache import PersistentLlamaCache, attach

_ANSWER_TOKENS = 24
_BASE = "no cache"
# What people do, and which of its times are shown. The first turn is cold for everybody.
_PARTS = {
    "chat": ("turns after the first", ("first token", "in all")),
    "restart": ("next turn after a restart", ("first token", "in all")),
    "back": ("next turn after another chat", ("first token",)),
}


def measure(run: Run) -> list[Figure]:
    rounds: list[dict[str, Any]] = []
    for number in range(1 if run.quick else 3):
        ways = list(_WAYS) if number % 2 == 0 else list(_WAYS)[::-1]
        rounds.append({way: _one(run, number, way) for way in ways})
    if any(row[way]["messages"] != rounds[0][_BASE]["messages"] for row in rounds for way in _WAYS):
        # Rounding differs between a restored and a newly decoded prompt, so this can happen.
        run.say("not every way gave the same answers: look at the token counts before the times")
    return [figure for way in _WAYS for figure in _figures(rounds, way)]


def _one(run: Run, number: int, way: str) -> dict[str, Any]:
    """A chat; in a new process one turn more; in a third one another chat; in a fourth the first chat again."""
    folder = run.folder / f"{number}-{way.replace(' ', '-')}"
    system, turns = (200, 2) if run.quick else (1000, 5)

    def talk(messages: list[texts.Message], first: int, turns: int) -> dict[str, Any]:
        given: dict[str, Any] = {"way": way, "folder": str(folder), "system": system, "messages": messages}
        return children.run(__file__, "talk", **given, first=first, turns=turns)

    run.say(f"round {number + 1}: {way}")
    chat = talk([], 0, turns)
    restart = talk(chat["messages"], turns, 1)
    talk([], turns + 1, 1)
    back = talk(restart["messages"], turns + 2, 1)
    return {
        "chat": chat["turns"][1:],
        "restart": restart["turns"],
        "back": back["turns"],
        "messages": back["messages"],
        "opening": restart["opening"],
        "bytes": disk_bytes(folder) if folder.is_dir() else 0,
    }


def _figures(rounds: list[dict[str, Any]], way: str) -> list[Figure]:
    figures = [_time(rounds, way, part, what) for part, (_, times) in _PARTS.items() for what in times]
    last = rounds[-1][way]
    opening = f"making the cache took {1e3 * statistics.median(row[way]['opening'] for row in rounds):.0f} ms"
    for part, (label, _) in _PARTS.items():
        decoded = sum(turn["decoded"] for turn in last[part])
        reused = last[part][-1]["reused"]
        figures.append(
            Figure(f"{way}: tokens decoded, {label}", decoded, "tokens", detail=f"{reused}; {opening}" if reused else "")
        )
    return [*figures, Figure(f"{way}: folder", last["bytes"] / 1e6, "MB")]


def _time(rounds: list[dict[str, Any]], way: str, part: str, what: str) -> Figure:
    def median(row: dict[str, Any]) -> float:
        return float(statistics.median(turn[what] for turn in row[part]))

    ratios = [median(row[way]) / median(row[_BASE]) for row in rounds]
    seconds = statistics.median(median(row[way]) for row in rounds)
    detail = f"{1e3 * seconds:.0f} ms; in each round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    return Figure(f"{way}: {_PARTS[part][0]}, {what}", statistics.median(ratios), "x", detail=detail)


def markdown(figures: list[Figure]) -> str:
    """One row a way, one column a number."""
    table: dict[str, dict[str, str]] = {}
    for figure in figures:
        way, column = figure.name.split(": ", 1)
        text = {"x": f"{figure.value:.2f} x", "tokens": f"{figure.value:.0f}"}.get(
            figure.unit, f"{figure.value:.0f} {figure.unit}"
        )
        table.setdefault(way, {})[column] = text
    columns = list(next(iter(table.values())))
    lines = [["", *columns], ["---", *("---:" for _ in columns)]]
    lines += [[way, *(cells[column] for column in columns)] for way, cells in table.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- in the children ----------------------------------------------------------------------------------------------


def _set(cache: Callable[[Llama, str], Any]) -> Callable[[Llama, str], Any]:
    def make(llm: Llama, folder: str) -> Any:
        made = cache(llm, folder)
        llm.set_cache(made)
        return made

    return make


# What each way does with a model, and the handle that it leaves.
_WAYS: dict[str, Callable[[Llama, str], Any]] = {
    _BASE: lambda llm, folder: None,
    "LlamaRAMCache": _set(lambda llm, folder: LlamaRAMCache()),
    "LlamaDiskCache": _set(lambda llm, folder: LlamaDiskCache(folder)),
    "kvkeep attach": attach,
    "kvkeep PersistentLlamaCache": _set(PersistentLlamaCache.for_model),
}


def _talk(way: str, folder: str, system: int, messages: list[texts.Message], first: int, turns: int) -> dict[str, Any]:
    llm = real.load()
    if not messages:
        messages = [{"role": "system", "content": texts.system_prompt(llm, system)}]
    began = time.perf_counter()
    handle = _WAYS[way](llm, folder)
    opening = time.perf_counter() - began
    ours = way.startswith("kvkeep")
    rows, before = [], 0
    for number in range(first, first + turns):
        messages.append({"role": "user", "content": texts.question(number)})
        times, answer = _turn(llm, messages)
        messages.append({"role": "assistant", "content": answer})
        decoded = _decoded(llm)
        rows.append(times | {"decoded": decoded - before, "reused": str(handle.last) if ours else ""})
        before = decoded
    if ours:
        handle.close()
    return {"turns": rows, "messages": messages, "opening": opening}


def _turn(llm: Any, messages: list[texts.Message]) -> tuple[dict[str, Any], str]:
    """One answer, streamed as a desktop assistant does."""
    first, answer = 0.0, ""
    began = time.perf_counter()
    for chunk in llm.create_chat_completion(messages=messages, max_tokens=_ANSWER_TOKENS, temperature=0.0, stream=True):
        piece = chunk["choices"][0]["delta"].get("content", "")
        if piece and not answer:
            first = time.perf_counter() - began
        answer += piece
    assert first, "the model said nothing"
    return {"first token": first, "in all": time.perf_counter() - began}, answer


def _decoded(llm: Llama) -> int:
    """Tokens that llama.cpp itself says it has decoded."""
    perf = llama_cpp.llama_perf_context(llm.ctx)
    return int(perf.n_p_eval + perf.n_eval)


if __name__ == "__main__":
    children.serve({"talk": _talk})
