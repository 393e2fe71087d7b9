"""What the folder grows by, and what is written to the disk for it. Counts bytes and tokens, so it is the same every time."""

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import children
import llama_cpp
import llamas
import real
import texts
from figures import AtMost, Figure, Run, disk_bytes

from kvkeep.cache.adapters.attach import attach
from kvkeep.store import namespaces
from kvkeep.store.registry import close_root, open_root

_SYSTEM_TOKENS = 1500
_ANSWER_TOKENS = 24


def measure(run: Run) -> list[Figure]:
    return _questions(run, 5 if run.quick else 30) + _chat(run, 6 if run.quick else 50)


def _questions(run: Run, count: int) -> list[Figure]:
    """Different questions under one system prompt, each asked in a new process."""
    root = run.folder / "questions"
    asked: list[dict[str, Any]] = []
    disk, surplus = [0], []
    for number in range(count):
        run.say(f"question {number + 1} of {count}, in a new process")
        answer = children.run(__file__, "ask", root=str(root), number=number)
        known = max((_common(answer["tokens"], other["tokens"]) for other in asked), default=0)
        # At least one token must always be decoded.
        own = answer["prompt_tokens"] - min(known, answer["prompt_tokens"] - 1)
        surplus.append(answer["decoded"] - own)
        asked.append(answer)
        disk.append(disk_bytes(root))
    stored = [0, *(answer["stored_bytes"] for answer in asked)]
    first = f"the first: {asked[0]['decoded']} tokens decoded, {stored[1] / 1e6:.1f} MB stored"
    own_tokens = [answer["decoded"] for answer in asked[1:]]
    return [
        Figure(
            "tokens decoded beyond the question's own, most",
            max(surplus[1:], key=abs),
            "tokens",
            AtMost(0),
            f"{first}; the others: {min(own_tokens)} to {max(own_tokens)} tokens, {min(surplus)} to {max(surplus)} surplus",
        ),
        _growth("stored bytes of another question / of the first, most", stored),
        _growth("disk blocks of another question / of the first, most", disk),
    ]


def _growth(name: str, totals: list[int]) -> Figure:
    """How much each question but the first added, relative to the first."""
    first = totals[1] - totals[0]
    added = [(after - before) / first for before, after in pairwise(totals[1:])]
    detail = f"median {statistics.median(added):.3f}, {min(added):.3f} to {max(added):.3f}; in all {totals[-1] / 1e6:.1f} MB"
    return Figure(name, max(added), "x", AtMost(0.1), f"{detail}, the first {first / 1e6:.1f} MB")


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _chat(run: Run, turns: int) -> list[Figure]:
    """One chat, stored after every turn."""
    run.say(f"a chat of {turns} turns")
    root = run.folder / "chat"
    chat = children.run(__file__, "chat", root=str(root), turns=turns)
    raw = chat["raw_bytes"]
    # A file system in memory writes nothing to a disk: there the bytes given to write calls have to do.
    written, how = (chat["write_bytes"], "write_bytes") if chat["write_bytes"] else (chat["wchar"], "wchar")
    size = f"{chat['tokens']} tokens, {raw / 1e6:.1f} MB raw"
    return [
        Figure(
            f"stored bytes of a chat of {turns} turns / raw keys and values",
            chat["stored_bytes"] / raw,
            "x",
            AtMost(0.90),
            f"{size}, {chat['stored_bytes'] / 1e6:.1f} MB in {chat['blobs']} blobs; disk {disk_bytes(root) / raw:.2f} x",
        ),
        Figure(
            f"bytes written to disk for a chat of {turns} turns / stored",
            written / chat["stored_bytes"],
            "x",
            AtMost(2.0),
            f"{size}; {how} {written / 1e6:.1f} MB, wchar {chat['wchar'] / 1e6:.1f} MB, of values "
            f"{chat['value_bytes'] / 1e6:.1f} MB; {chat['saves']} saves",
        ),
    ]


# -- in the children ----------------------------------------------------------------------------------------------


def _ask(root: str, number: int) -> dict[str, Any]:
    llm: Any = real.load()
    messages = [
        {"role": "system", "content": texts.system_prompt(llm, _SYSTEM_TOKENS)},
        {"role": "user", "content": texts.question(number)},
    ]
    with attach(llm, root):
        reply = llm.create_chat_completion(messages=messages, max_tokens=8, temperature=0.0)
    return {
        "prompt_tokens": reply["usage"]["prompt_tokens"],
        "tokens": llm.input_ids[: llm.n_tokens].tolist(),
        # Of prompts only: llama.cpp counts single tokens apart.
        "decoded": llama_cpp.llama_perf_context(llm.ctx).n_p_eval,
        "stored_bytes": _usage(root)["stored_bytes"],
    }


def _usage(root: str) -> dict[str, int]:
    repository = open_root(Path(root))
    with repository.rows() as connection:
        (space,) = namespaces.usage(connection)
    blobs = len(repository.blobs)
    close_root(repository)
    return {"stored_bytes": space.stored_bytes, "blobs": blobs}


def _chat_in_one_process(root: str, turns: int) -> dict[str, Any]:
    llm = real.load()
    tokens: list[int] = llm.tokenize(b"<|im_start|>system\nYou answer briefly.<|im_end|>\n", special=True)
    before = _written()
    with attach(llm, root, break_even=False) as keep:
        for number in range(turns):
            said = f"<|im_start|>user\n{texts.question(number)}<|im_end|>\n<|im_start|>assistant\n"
            tokens += llm.tokenize(said.encode(), add_bos=False, special=True)
            tokens += llamas.generate(llm, tokens, _ANSWER_TOKENS)
            tokens += llm.tokenize(b"<|im_end|>\n", add_bos=False, special=True)
            # Nothing may be left out because the next turn comes first: a person takes longer than the writer.
            assert keep.flush()
        stats = keep.stats()
    after = _written()
    assert (stats.errors.total(), stats.dropped) == (0, 0)
    return {
        "tokens": llm.n_tokens,
        "raw_bytes": llama_cpp.llama_state_seq_get_size(llm.ctx, 0),
        "value_bytes": stats.written_bytes,
        "saves": stats.saves,
        **{name: after[name] - before[name] for name in before},
        **_usage(root),
    }


def _written() -> dict[str, int]:
    """Bytes that this process gave to write calls, and bytes of them that were bound for a disk."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(fields[name]) for name in ("wchar", "write_bytes")}


if __name__ == "__main__":
    children.serve({"ask": _ask, "chat": _chat_in_one_process})
