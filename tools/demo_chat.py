"""One process of the demo: loads the model, answers one question, and ends. Run by `kvkeep demo`, twice in a row.

Reads one `Job` as JSON from stdin, and writes events to stdout, one JSON object a line:

    loaded   the model is there:  label, load_seconds, attach_seconds, system_tokens, shrunk, n_context
    text     a piece of the answer:  text
    done     the fields of `Result`
    failed   instead of the rest:  message, exit_code
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvkeep.store.errors import KvkeepError
from kvkeep.tools.children import Events
from kvkeep.tools.demo_prompt import QUESTIONS, fitting_prompt
from kvkeep.tools.words import duration, plural, size

if TYPE_CHECKING:
    from kvkeep.cache import Attached, Match

MAX_TOKENS = 40
_SEED = 1
# For what a chat template puts around five messages.
_TEMPLATE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Job:
    """What one process is to do.

    Attributes:
        model: path of a GGUF file.
        n_ctx: tokens of context.
        path: the cache folder, or None for no cache at all.
        answers: what the assistant has answered so far; the next of `QUESTIONS` is asked.
    """

    model: str
    n_ctx: int
    path: str | None
    answers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """How it went.

    Attributes:
        prompt_tokens: tokens of the whole prompt, chat template included.
        decoded: of these, tokens that llama.cpp says it has decoded.
        first_text_seconds: from the call to the first piece of text.
        answer: the whole answer.
        cache: what the cache did, in a sentence; empty without one.
        restored: tokens that came from disk.
        state_bytes: bytes handed to llama.cpp for them.
        restore_seconds: what that took.
        stored_bytes: bytes written behind the answer.
    """

    prompt_tokens: int
    decoded: int
    first_text_seconds: float
    answer: str
    cache: str = ""
    restored: int = 0
    state_bytes: int = 0
    restore_seconds: float = 0.0
    stored_bytes: int = 0


class _Chat:
    """One request to a model, with clock and counts."""

    def __init__(self, llm: Any, messages: list[dict[str, str]]) -> None:
        self._llm = llm
        self._messages = messages
        self.prompt_tokens = 0
        self.decoded = 0
        self.first_text_seconds = 0.0

    def answer(self) -> Iterator[str]:
        """The answer, piece by piece."""
        began = time.perf_counter()
        stream = self._llm.create_chat_completion(
            self._messages,
            stream=True,
            temperature=0.0,
            seed=_SEED,
            max_tokens=MAX_TOKENS,
            logits_processor=[self._before_sampling],
        )
        for chunk in stream:
            text = chunk["choices"][0]["delta"].get("content")
            if text:
                self.first_text_seconds = self.first_text_seconds or time.perf_counter() - began
                yield text
        self.first_text_seconds = self.first_text_seconds or time.perf_counter() - began

    def _before_sampling(self, input_ids: Any, scores: Any) -> Any:
        """Changes nothing. Called first when the prompt is decoded and nothing else: the moment to count."""
        if not self.prompt_tokens:
            from kvkeep.cache.adapters.loading import decoded_tokens

            self.prompt_tokens, self.decoded = len(input_ids), decoded_tokens(self._llm)
        return scores


def main() -> int:
    """Do the job on stdin. Returns the exit code."""
    emit = Events()
    try:
        _run(Job(**json.load(sys.stdin)), emit)
    except KvkeepError as error:
        emit("failed", message=str(error), exit_code=error.exit_code)
        return error.exit_code
    return 0


def _run(job: Job, emit: Events) -> None:
    from kvkeep.cache.adapters.loading import load_llama, usable_context

    began = time.perf_counter()
    llm = load_llama(job.model, n_ctx=job.n_ctx, seed=_SEED)
    loaded = time.perf_counter()
    with ExitStack() as stack:
        keep = _attached(stack, llm, job)
        attached = time.perf_counter()
        system = fitting_prompt(lambda text: _count(llm, text), usable_context(llm) - _reserve(llm))
        emit(
            "loaded",
            label=llm.metadata.get("general.name", ""),
            load_seconds=loaded - began,
            attach_seconds=attached - loaded if keep else 0.0,
            system_tokens=system.tokens,
            shrunk=system.shrunk,
            n_context=usable_context(llm),
        )
        chat = _Chat(llm, _messages(system.text, job.answers))
        pieces = []
        for text in chat.answer():
            pieces.append(text)
            emit("text", text=text)
    # Closing the handle has stored everything.
    emit("done", **asdict(_result(chat, "".join(pieces), keep)))


def _attached(stack: ExitStack, llm: Any, job: Job) -> "Attached | None":
    if job.path is None:
        return None
    from kvkeep.cache import attach

    return stack.enter_context(attach(llm, job.path))


def _count(llm: Any, text: str) -> int:
    return len(llm.tokenize(text.encode(), add_bos=False, special=False))


def _reserve(llm: Any) -> int:
    """Tokens that both turns need besides the system prompt. Read again, an answer may have more tokens than it had."""
    return sum(_count(llm, question) for question in QUESTIONS) + 4 * MAX_TOKENS + _TEMPLATE_TOKENS


def _messages(system: str, answers: list[str]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}]
    for question, answer in zip(QUESTIONS, answers, strict=False):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": QUESTIONS[len(answers)]}]


def _result(chat: _Chat, answer: str, keep: "Attached | None") -> Result:
    plain = Result(chat.prompt_tokens, chat.decoded, chat.first_text_seconds, answer)
    if keep is None or keep.last is None:
        return plain
    last = keep.last
    return Result(
        *(plain.prompt_tokens, plain.decoded, plain.first_text_seconds, answer),
        cache=described(last),
        restored=last.length if last.source.value == "disk" else 0,
        state_bytes=last.state_bytes,
        restore_seconds=last.seconds,
        stored_bytes=keep.stats().written_bytes,
    )


# By `Reason.value`: why nothing was restored, for people.
_WHY_NOT = {
    "empty": "the folder is empty",
    "other namespace": "the folder holds states, but none of this model with these settings",
    "no common prefix": "nothing that is kept begins as this prompt does",
    "below the break-even": "decoding is quicker than restoring here",
    "damaged": "what was kept didn't verify, and is removed",
    "identifying": "the model file is still being hashed, which happens once",
    "unavailable": "the cache folder can't be used",
}


def described(match: "Match") -> str:
    """What the cache did for one prompt, in a sentence without its full stop."""
    if match.length:
        source = {"disk": "from disk", "live": "from the live context"}[match.source.value]
        head = f"restored {match.length:,} of {plural(match.prompt_tokens, 'token')} {source}"
        return head + (f" in {duration(match.seconds)} ({size(match.state_bytes)})" if match.state_bytes else "")
    reason = _WHY_NOT.get(match.reason.value, match.reason.value)
    return f"nothing restored: {reason}" + (f" ({match.detail})" if match.detail else "")


if __name__ == "__main__":
    sys.exit(main())
