"""kvkeep beside what llama-cpp-python brings along: one chat, then a restart.

Every way runs in processes and a folder of its own, several times in turn; times are compared within one round.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import children
import llama_cpp
import llamas
import models
import texts
from figures import Figure, Run, disk_bytes
from llama_cpp import Llama
from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from kvkeep.cache import PersistentLlamaCache, attach

_SYSTEM_TOKENS = 1000
_TURNS = 5
_ANSWER_TOKENS = 24
_BASE = "no cache"
# Columns of the Markdown table, in this order: times as multiples of those without a cache, then plain numbers.
_TIMES = {"turns 2 to 5, first token": "first", "turns 2 to 5, in all": "total"}
_RESTART_TIMES = {"after a restart, first token": "first", "after a restart, in all": "total"}


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
    """The chat, then in a new process one turn more."""
    folder = run.folder / f"{number}-{way.replace(' ', '-')}"
    run.say(f"round {number + 1}: {way}")
    chat = children.run(__file__, "talk", way=way, folder=str(folder), messages=[], first=0, turns=_TURNS)
    n_bytes = disk_bytes(folder) if folder.is_dir() else 0
    restart = children.run(__file__, "talk", way=way, folder=str(folder), messages=chat["messages"], first=_TURNS, turns=1)
    return {
        "messages": restart["messages"],
        "turns": chat["turns"][1:],
        "restart": restart["turns"],
        "opening": restart["opening"],
        "reused": restart["reused"],
        "bytes": n_bytes,
    }


def _figures(rounds: list[dict[str, Any]], way: str) -> list[Figure]:
    figures = [_time(rounds, way, "turns", column, key) for column, key in _TIMES.items()]
    figures += [_time(rounds, way, "restart", column, key) for column, key in _RESTART_TIMES.items()]
    last = rounds[-1][way]
    figures.append(Figure(f"{way}: tokens decoded, turns 2 to 5", sum(t["decoded"] for t in last["turns"]), "tokens"))
    opening = statistics.median(r[way]["opening"] for r in rounds)
    figures.append(
        Figure(
            f"{way}: tokens decoded, after a restart",
            last["restart"][0]["decoded"],
            "tokens",
            detail=f"{last['reused']}; making the cache took {1e3 * opening:.0f} ms" if last["reused"] else "",
        )
    )
    figures.append(Figure(f"{way}: folder", last["bytes"] / 1e6, "MB"))
    return figures


def _time(rounds: list[dict[str, Any]], way: str, part: str, column: str, key: str) -> Figure:
    def median(row: dict[str, Any]) -> float:
        return statistics.median(turn[key] for turn in row[part])

    ratios = [median(row[way]) / median(row[_BASE]) for row in rounds]
    seconds = statistics.median(median(row[way]) for row in rounds)
    detail = f"{1e3 * seconds:.0f} ms; ratios of {len(ratios)} rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    return Figure(f"{way}: {column}", statistics.median(ratios), "x", detail=detail)


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


def _talk(way: str, folder: str, messages: list[texts.Message], first: int, turns: int) -> dict[str, Any]:
    llm = llamas.load(models.smollm2(), n_ctx=4096, n_batch=512)
    if not messages:
        messages = [{"role": "system", "content": texts.system_prompt(llm, _SYSTEM_TOKENS)}]
    began = time.perf_counter()
    handle = _WAYS[way](llm, folder)
    opening = time.perf_counter() - began
    rows, before = [], 0
    for number in range(first, first + turns):
        messages.append({"role": "user", "content": texts.question(number)})
        row, answer = _turn(llm, messages)
        messages.append({"role": "assistant", "content": answer})
        decoded = _decoded(llm)
        rows.append(row | {"decoded": decoded - before})
        before = decoded
    ours = hasattr(handle, "close")
    reused = str(handle.last) if ours else ""
    if ours:
        handle.close()
    return {"turns": rows, "messages": messages, "opening": opening, "reused": reused}


def _turn(llm: Llama, messages: list[texts.Message]) -> tuple[dict[str, float], str]:
    """One answer, streamed as a desktop assistant does."""
    seconds, answer = 0.0, ""
    began = time.perf_counter()
    for chunk in llm.create_chat_completion(messages=messages, max_tokens=_ANSWER_TOKENS, temperature=0.0, stream=True):
        piece = chunk["choices"][0]["delta"].get("content", "")
        if piece and not answer:
            seconds = time.perf_counter() - began
        answer += piece
    return {"first": seconds, "total": time.perf_counter() - began}, answer


def _decoded(llm: Llama) -> int:
    """Tokens that llama.cpp itself says it has decoded."""
    perf = llama_cpp.llama_perf_context(llm.ctx)
    return int(perf.n_p_eval + perf.n_eval)


if __name__ == "__main__":
    children.serve({"talk": _talk})
