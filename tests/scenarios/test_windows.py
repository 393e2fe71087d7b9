"""Sliding windows: llama.cpp cuts them anywhere, says that it worked, and goes on from a hole."""

import random
from pathlib import Path
from typing import Any

import models
import pytest
from hits import ask, attached
from llamas import first_logits, forget, generate, load, logits, random_tokens
from restart import in_new_process
from seen import assert_cold, assert_no_hole, assert_same

MASKED = {"swa_full": False, "n_ubatch": 32}
LONG = {"n_ctx": 2048, **MASKED}
# What an edit may cost beyond itself: regular checkpoints stand 256 tokens apart, and not right beside others.
STEP = 256 + 64


@pytest.mark.parametrize("restart", [False, True], ids=["live", "restart"])
@pytest.mark.parametrize("shared", [400, 1000, 1450])
def test_a10_swa_cut_back_past_the_window(window: str, root: Path, shared: int, restart: bool) -> None:
    """People went back in a long chat, the cut reported success though the window below it was gone, and the model went on from
    the hole (llama.cpp #29045).
    """
    tokens = random_tokens(1500)
    edited = [*tokens[:shared], (tokens[shared] + 1) % 500 + 4, *random_tokens(30, seed=shared)]
    with attached(window, root, **LONG) as (llm, keep):
        ask(llm, keep, tokens)
        if not restart:
            asked = ask(llm, keep, edited)
            assert_no_hole(llm, window=True)
    if restart:
        with attached(window, root, **LONG) as (llm, keep):
            asked = ask(llm, keep, edited)
            assert_no_hole(llm, window=True)
    reused = asked.report.match.length
    assert shared - STEP <= reused <= shared
    assert asked.decoded == len(edited) - reused
    assert_cold(asked.logits, window, asked.prompt, **LONG)


def test_a10_a_chat_of_thirty_turns_keeps_its_window(window: str, root: Path) -> None:
    """After some 27 turns the replies of a phone assistant became empty (llama.rn #396), and in Python the second call of a
    chat with such a model failed (llama-cpp-python PR #2180).
    """
    prompt: list[int] = random_tokens(60)
    with attached(window, root, **LONG) as (llm, keep):
        for turn in range(30):
            asked = ask(llm, keep, prompt)
            assert_no_hole(llm, window=True)
            if turn:
                assert asked.decoded <= 31
            prompt = [*prompt, *generate(llm, prompt, 10), *random_tokens(30, seed=turn)]
    assert_cold(asked.logits, window, asked.prompt, **LONG)


@pytest.mark.parametrize(
    "options",
    [
        {"swa_full": False, "n_batch": 128, "n_ubatch": 128},
        {"swa_full": False, "n_batch": 96, "n_ubatch": 16},
        {"swa_full": True, "n_batch": 64, "n_ubatch": 32},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a11_states_at_the_edge_of_the_window(window: str, root: Path, options: dict[str, Any]) -> None:
    """A state of a window model that was saved and loaded a little beyond its window didn't give the same answer any more
    (llama.cpp PR #25297).
    """
    n_swa = models.N_WINDOW
    prompts = [random_tokens(length, seed=length) for length in (n_swa - 1, n_swa, n_swa + 1, 2 * n_swa + 7)]
    in_new_process(window, root, prompts, options=options)
    longer = [[*prompt, 7, 8, 9] for prompt in prompts]
    answers = in_new_process(window, root, [*longer, *prompts], options=options, count=16)
    cold = load(window, **options)
    for prompt, answer in zip([*longer, *prompts], answers, strict=True):
        assert (answer["source"], answer["decoded"]) == ("disk", 3 if prompt in longer else 1)
        forget(cold)
        assert_same(answer["logits"], first_logits(cold, prompt))
        assert answer["tokens"] == generate(cold, prompt, 16)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "window", "masked window", "hybrid", "hybrid_window", "recurrent"])
def test_a23_no_cut_is_taken_on_trust(kind: str, root: Path, seed: int, request: pytest.FixtureRequest) -> None:
    """A cache said of itself that it could be trimmed, didn't do it, and the next request inherited another's end
    (Rapid-MLX PR #1469).
    """
    model = request.getfixturevalue(kind.removeprefix("masked "))
    options = MASKED if "masked" in kind else {}
    chance = random.Random(seed)
    texts = [random_tokens(300, seed=number) for number in range(2)]
    cold = load(model, **options)
    for _ in range(3):
        with attached(model, root, **options) as (llm, keep):
            for _ in range(4):
                prompt = chance.choice(texts)[: chance.randrange(1, 300)] + random_tokens(chance.randrange(40), seed=7)
                asked = ask(llm, keep, prompt)
                assert_no_hole(llm, window="window" in kind and "hybrid" not in kind)
                assert asked.decoded == len(prompt) - asked.report.match.length
                forget(cold)
                cold.eval(prompt)
                assert_same(asked.logits, logits(cold))
                texts[chance.randrange(2)] = prompt + generate(llm, prompt, 5) + random_tokens(300, seed=8)
            assert keep.stats().errors == {}
