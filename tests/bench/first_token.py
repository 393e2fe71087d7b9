"""Time to the first token: after a restart, against the same turn in a live context; and what a miss costs."""

import statistics
import time
from pathlib import Path
from typing import Any

import children
import llamas
import real
import texts
from figures import AtMost, Figure, Run
from llama_cpp import Llama

from kvkeep.cache.adapters.attach import attach

_CHAT, _NEW = 2000, 40


def measure(run: Run) -> list[Figure]:
    root = str(run.folder / "root")
    run.say(f"a chat of {_CHAT} tokens")
    children.run(__file__, "store", root=root)
    rounds = 4 if run.quick else 12
    live, restarted = [], []
    for number in range(rounds):
        run.say(f"round {number + 1} of {rounds}: live, then after a restart")
        live.append(children.run(__file__, "live", number=number)["seconds"])
        restarted.append(children.run(__file__, "restart", root=root, number=number))
    run.say("prompts of which nothing is stored")
    missed = children.run(__file__, "miss", root=root, rounds=3 if run.quick else 8)
    # The first of each warms the page cache.
    base = statistics.median(live[1:])
    restore = statistics.median(one["restore"] for one in restarted[1:])
    total = statistics.median(one["seconds"] for one in restarted[1:])
    return [
        Figure(
            "first token after a restart, beyond the live turn / the restore",
            (total - base) / restore,
            "x",
            AtMost(1.3),
            f"{_CHAT} tokens and {_NEW} new ones: {total * 1e3:.0f} ms, live {base * 1e3:.0f} ms, the restore alone "
            f"{restore * 1e3:.0f} ms",
        ),
        Figure(
            f"a miss on {_CHAT} tokens / their prefill",
            missed["settle"] / missed["prefill"],
            "x",
            AtMost(0.01),
            f"{missed['settle'] * 1e3:.1f} ms of {missed['prefill'] * 1e3:.0f} ms",
        ),
    ]


# -- in the children ----------------------------------------------------------------------------------------------


def _prompts(llm: Llama, number: int) -> tuple[list[int], list[int]]:
    chat = texts.long_tokens(llm, _CHAT)
    return chat, [*chat, *llamas.random_tokens(_NEW, seed=number)]


def _store(root: str) -> dict[str, Any]:
    llm = real.load()
    with attach(llm, Path(root)):
        llamas.first_token_seconds(llm, _prompts(llm, 0)[0])
    return {}


def _live(number: int) -> dict[str, Any]:
    llm = real.load()
    chat, turn = _prompts(llm, number)
    llamas.first_token_seconds(llm, chat)
    return {"seconds": llamas.first_token_seconds(llm, turn)}


def _restart(root: str, number: int) -> dict[str, Any]:
    llm = real.load()
    _, turn = _prompts(llm, number)
    with attach(llm, Path(root), break_even=False) as keep:
        seconds = llamas.first_token_seconds(llm, turn)
        assert keep.last is not None
        assert keep.last.length == _CHAT
        return {"seconds": seconds, "restore": keep.last.seconds}


def _miss(root: str, rounds: int) -> dict[str, Any]:
    llm = real.load()
    settle, prefill = [], []
    with attach(llm, Path(root)) as keep:
        for number in range(rounds + 1):
            prompt = llamas.random_tokens(_CHAT, seed=1000 + number)
            began = time.perf_counter()
            keep._session.settle(llm, prompt)
            settle.append(time.perf_counter() - began)
            began = time.perf_counter()
            llm.eval(prompt)
            prefill.append(time.perf_counter() - began)
            llm.reset()  # type: ignore[no-untyped-call]
    return {"settle": statistics.median(settle[1:]), "prefill": statistics.median(prefill[1:])}


if __name__ == "__main__":
    children.serve({"store": _store, "live": _live, "restart": _restart, "miss": _miss})
