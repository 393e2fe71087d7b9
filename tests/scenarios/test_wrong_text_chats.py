"""A new chat shows nothing of the one before, whatever the cache did in between."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamas import first_logits, load, load_with_usual_threads, random_tokens

from kvkeep.cache import LlamaDiskCache, PersistentLlamaCache, attach

SYSTEM = random_tokens(100)
SECRET = random_tokens(120, seed=1)
QUESTION = random_tokens(15, seed=2)
NEW_CHAT = SYSTEM + QUESTION
MASKED = {"swa_full": False, "n_ubatch": 32}
CASES = [("dense", {}), ("window", {}), ("window", MASKED), ("hybrid", {}), ("hybrid_window", MASKED), ("recurrent", {})]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}{'-masked' if case[1] else ''}")
def kind(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    name, options = request.param
    return request.getfixturevalue(name), options


def assert_new(llm: Any, kind: tuple[str, dict[str, Any]], prompt: Sequence[int] = NEW_CHAT) -> None:
    """The logits behind the new chat's question are those of a fresh context, and not those behind the secret."""
    model, options = kind
    cold = first_logits(load(model, **options), list(prompt))
    leaked = first_logits(load(model, **options), [*SYSTEM, *SECRET, *prompt[len(SYSTEM) :]])
    scale = np.abs(cold).max()
    assert np.abs(cold - leaked).max() > 0.05 * scale, "with the secret it would answer alike"
    assert np.abs(first_logits(llm, list(prompt)) - cold).max() <= 2e-3 * scale


def answer(llm: Any, prompt: Sequence[int], count: int) -> None:
    """So many times the letter A: tiny models may say only the first bytes of letters, and `Llama` waits for the rest."""
    llm.create_completion(list(prompt), max_tokens=count, logit_bias={3 + ord("A"): 1000.0})


@pytest.mark.parametrize("way", ["attach", "PersistentLlamaCache", "LlamaDiskCache"])
def test_a16_a_new_chat_under_the_same_system_prompt(kind: tuple[str, dict[str, Any]], way: str, root: Path) -> None:
    """After "New chat" the old one's context was still there on LFM2, and a new session on Gemma 4 was corrupt until the system
    prompt changed by a space (llama.rn #259, pocketpal #464, koboldcpp #2158 and #2151)."""
    model, options = kind
    for _ in range(2):
        llm = load(model, **options)
        cache: Any
        if way == "attach":
            cache = attach(llm, root, break_even=False)
        else:
            cache = (
                LlamaDiskCache(root) if way == "LlamaDiskCache" else PersistentLlamaCache.for_model(llm, root, break_even=False)
            )
            llm.set_cache(cache)
        answer(llm, SYSTEM + SECRET, 3)
        # At once, from the live context; then from the disk; then with the old chat in between.
        assert_new(llm, kind)
        cache.flush()
        answer(llm, [9, 8, 7], 1)
        assert_new(llm, kind)
        answer(llm, SYSTEM + SECRET + QUESTION, 3)
        answer(llm, NEW_CHAT, 1)
        assert_new(llm, kind, [*NEW_CHAT, 5])
        cache.close()
        llm.close()


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a16_a_new_chat_after_a_restore_that_failed(
    kind: tuple[str, dict[str, Any]], share: float, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where the old chat was about to be restored, and llama.cpp took only a part of it (llama.rn #258, llama.cpp
    #27068)."""
    from kvkeep.cache.adapters.context import Context

    model, options = kind
    put = Context.put
    llm = load(model, **options)
    with attach(llm, root, break_even=False):
        first_logits(llm, SYSTEM + SECRET)
    llm = load(model, **options)
    with attach(llm, root, break_even=False) as keep:
        with monkeypatch.context() as patch:
            patch.setattr(Context, "put", lambda self, state, *more: put(self, state[: int(state.size * share)], *more))
            first_logits(llm, [*SYSTEM, *SECRET, 7])
        assert keep.stats().reasons["refused"] == 1
        assert_new(llm, kind)


def test_a16_two_chats_in_two_models_at_once(kind: tuple[str, dict[str, Any]], root: Path) -> None:
    """System prompts of chats that were loaded side by side got mixed up (llama.rn #258)."""
    model, options = kind
    one, two = load(model, **options), load(model, **options)
    with attach(one, root, break_even=False), attach(two, root, break_even=False):
        streams = [one.generate(SYSTEM + SECRET, temp=0.0), two.generate(NEW_CHAT, temp=0.0)]
        for _ in range(3):
            for stream in streams:
                next(stream)
        for stream in streams:
            stream.close()
        assert_new(one, kind)
        assert_new(two, kind, [*NEW_CHAT, 5])


def test_a16_in_words(smollm2: str, root: Path) -> None:
    """The first chat plants a code, the second one asks for it, before and after a restart (llama.rn #259, pocketpal #464)."""
    system = {"role": "system", "content": "You answer in one short sentence."}
    told = [system, {"role": "user", "content": "Remember: the code is PURPLE-42. Say the code."}]
    asked = [system, {"role": "user", "content": "What is the code?"}]
    answers = []
    for _ in range(2):
        llm = load_with_usual_threads(smollm2)
        with attach(llm, root, break_even=False):
            for messages in (told, asked):
                choice = llm.create_chat_completion(messages=messages, max_tokens=10, temperature=0.0)["choices"][0]
                answers.append(choice["message"]["content"])
        llm.close()
    assert not any("PURPLE" in answer or "42" in answer for answer in answers[1::2])
    assert answers[:2] == answers[2:]
