"""One request as a person makes it, and what it cost: for tests of what is reused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llamas
import numpy as np
import numpy.typing as npt

from kvkeep.cache import Attached, Report, attach

# A prompt that is decoded in other batches rounds differently.
TOLERANCE = 2e-3


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        prompt: its tokens.
        decoded: tokens that llama.cpp decoded up to the first token of the answer.
        logits: from which that one was sampled.
        report: what the cache says of it.
    """

    prompt: list[int]
    decoded: int
    logits: npt.NDArray[np.float32]
    report: Report


@contextmanager
def attached(model: str, root: Path, **options: Any) -> Iterator[tuple[Any, Attached]]:
    """A new `Llama` with a cache, as after a restart, and closed as at a program's end."""
    llm = llamas.load(model, **options)
    with attach(llm, root, break_even=False) as keep:
        yield llm, keep
    llm.close()


def ask(llm: Any, keep: Attached, prompt: list[int]) -> Asked:
    """Ask for one token behind a prompt of tokens."""
    before = llamas.n_decoded(llm)
    logits = llamas.first_logits(llm, prompt)
    report = keep.report()
    assert report is not None
    return Asked(prompt, llamas.n_decoded(llm) - before, logits, report)


def chat(llm: Any, keep: Attached, messages: list[dict[str, str]]) -> Asked:
    """Ask for one token of an answer in a chat."""
    return _asked(llm, keep, lambda **options: llm.create_chat_completion(messages, **options))


def complete(llm: Any, keep: Attached, text: str) -> Asked:
    """Ask for one token behind a text."""
    return _asked(llm, keep, lambda **options: llm.create_completion(text, **options))


def _asked(llm: Any, keep: Attached, answer: Callable[..., Any]) -> Asked:
    # Looked at when the first token is about to be sampled: if that is a part of a letter, Llama goes on to the next.
    seen: list[tuple[int, npt.NDArray[np.float32]]] = []

    def look(tokens: Any, scores: Any) -> Any:
        seen.append((llamas.n_decoded(llm), llamas.logits(llm)))
        return scores

    before = llamas.n_decoded(llm)
    answer(max_tokens=1, temperature=0.0, logits_processor=[look])
    report = keep.report()
    assert report is not None
    decoded, logits = seen[0]
    return Asked(llm.input_ids[: report.prompt_tokens].tolist(), decoded - before, logits, report)


def assert_as_cold(asked: Asked, model: str, **options: Any) -> None:
    """The logits are those of a model without any cache."""
    llm = llamas.load(model, **options)
    np.testing.assert_allclose(asked.logits, llamas.first_logits(llm, asked.prompt), atol=TOLERANCE)
    llm.close()


def in_common(one: list[int], other: list[int]) -> int:
    """How many tokens two prompts share from their beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
