"""In a process: some turns of the scripted chat, in one of the ways, with clock and counts."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.cache.adapters.loading import llama_library, load_llama, usable_context
from kvkeep.tools.bench.clocks import Decodes, disk_bytes, written_bytes
from kvkeep.tools.bench.script import CHATS, Script, long_tokens, new_tokens, turn_tokens
from kvkeep.tools.bench.ways import WAYS, Way

Row = dict[str, Any]

_SEED = 1
_SINGLE_TOKENS = 8


def load(model: str, settings: dict[str, Any]) -> Any:
    """The model, quiet, and alike in each process."""
    return load_llama(model, **{"seed": _SEED, **settings})


def probe(model: str, settings: dict[str, Any], tokens: int) -> Row:
    """What the plan must know of a model: its context, its speed, the size of its states.

    Args:
        model: a GGUF file.
        settings: for `Llama`.
        tokens: how many to decode for that, at most.
    """
    began = time.perf_counter()
    llm = load(model, settings)
    load_seconds = time.perf_counter() - began
    prompt = long_tokens(llm, min(tokens, usable_context(llm) - _SINGLE_TOKENS))
    prefill = _decode_seconds(llm, prompt)
    # Room is left for them: a turn wants more.
    single = sum(_decode_seconds(llm, prompt[:1]) for _ in range(_SINGLE_TOKENS))
    return {
        "name": llm.metadata.get("general.name", "") or Path(model).name,
        "architecture": llm.metadata.get("general.architecture", ""),
        "load_seconds": load_seconds,
        "n_ctx": llm.n_ctx(),
        "usable_context": usable_context(llm),
        "turn_tokens": turn_tokens(llm),
        "answer_tokens": len(Script(llm, [], CHATS[0]).answer(0)),
        "tokens_per_second": len(prompt) / prefill,
        "generated_per_second": _SINGLE_TOKENS / single,
        "state_bytes_per_token": llama_library().llama_state_seq_get_size(llm.ctx, 0) / llm.n_tokens,
        "score_bytes": int(llm.scores.nbytes),
        "threads": llm.n_threads,
        "threads_batch": llm.n_threads_batch,
    }


def _decode_seconds(llm: Any, tokens: list[int]) -> float:
    began = time.perf_counter()
    llm.eval(tokens)
    llama_library().llama_synchronize(llm.ctx)
    return time.perf_counter() - began


def talk(model: str, settings: dict[str, Any], way: str, folder: str, system: int, turns: int, restarted: bool) -> Row:
    """A program's life: a chat, another chat and back again; or, restarted, the next turn of the first chat.

    Args:
        model: a GGUF file.
        settings: for `Llama`.
        way: one of `WAYS`.
        folder: where its states are kept.
        system: tokens of the system prompt.
        turns: of the chat, before the other one.
        restarted: all that happened before, in another process.

    Returns:
        `opening_seconds`, and rows: `turns`, `other` and `back`, or `restart`.
    """
    llm = load(model, settings)
    decodes = Decodes(llm)
    prompt = long_tokens(llm, system)
    began = time.perf_counter()
    kept = WAYS[way](llm, Path(folder))
    opening = time.perf_counter() - began
    chat, other = (Script(llm, prompt, name) for name in CHATS)
    session = _Session(llm, kept, decodes, Path(folder))
    if restarted:
        session.seen = [chat.left_behind(turns), other.left_behind(0)]
        rows: Row = {"restart": session.turn(CHATS[0], chat, turns + 1)}
    else:
        rows = {
            "turns": [session.turn(CHATS[0], chat, number) for number in range(turns)],
            "other": session.turn(CHATS[1], other, 0),
            "back": session.turn(CHATS[0], chat, turns),
        }
    kept.close()
    return rows | {"opening_seconds": opening}


class _Session:
    """One process, and what it has seen."""

    def __init__(self, llm: Any, way: Way, decodes: Decodes, folder: Path) -> None:
        self._llm = llm
        self._way = way
        self._decodes = decodes
        self._folder = folder
        self._written = written_bytes()
        self.seen: list[list[int]] = []

    def turn(self, name: str, script: Script, number: int) -> Row:
        prompt = script.prompt(number)
        taken = take(self._llm, self._way, self._decodes, name, prompt, script.answer(number))
        self._way.settle()
        written = written_bytes()
        row = {
            "prompt_tokens": len(prompt),
            "new_tokens": new_tokens(prompt, self.seen),
            "decoded_tokens": taken.decoded,
            "first_token_seconds": taken.first_seconds,
            "seconds": taken.seconds,
            "disk_bytes": disk_bytes(self._folder),
            "written_bytes": None if written is None or self._written is None else written - self._written,
            "said": self._way.said,
        }
        self.seen.append(script.left_behind(number))
        return row


@dataclass(slots=True)
class Taken:
    """One request.

    Attributes:
        decoded: tokens handed to llama.cpp up to the first token of the answer.
        first_seconds: until then.
        seconds: until the program could take the next request.
    """

    decoded: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0


def take(llm: Any, way: Way, decodes: Decodes, chat: str, prompt: list[int], answer: Sequence[int]) -> Taken:
    """Have a prompt answered, with an answer that is given."""
    taken = Taken()
    script: Iterator[int] = iter(answer)
    before = decodes.count
    began = time.perf_counter()

    def say(_ids: Any, scores: Any) -> Any:
        # Called first when the prompt is decoded and nothing else.
        if not taken.decoded:
            taken.first_seconds = time.perf_counter() - began
            taken.decoded = decodes.count - before
        token = next(script, llm.token_eos())
        scores[:] = float("-inf")
        scores[token] = 0.0
        return scores

    way.before(chat)
    processors = llama_library().LogitsProcessorList([say])
    llm.create_completion(prompt, max_tokens=len(answer), temperature=0.0, logits_processor=processors)
    way.after(chat)
    taken.seconds = time.perf_counter() - began
    return taken
