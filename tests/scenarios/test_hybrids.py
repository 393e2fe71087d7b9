"""Memories that hold for one position only: found again after a restart, at every turn, and never by half."""

from pathlib import Path
from typing import Any

import pytest
from hits import ask, attached, chat, in_common
from llamas import first_logits, forget, generate, load, random_tokens
from restart import in_new_process
from seen import assert_cold, assert_same

from kvkeep.cache import Source, attach

MASKED = {"swa_full": False, "n_ubatch": 32}
STEP = 256 + 64


@pytest.fixture(params=["hybrid", "falcon_h1", "recurrent", "opaque", "masked window", "masked hybrid_window"])
def model(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A model whose context can't be cut just anywhere, and the options for it."""
    name = request.param.removeprefix("masked ")
    return request.getfixturevalue(name), MASKED if name != request.param else {}


@pytest.mark.parametrize("kind", ["hybrid", "falcon_h1", "hybrid_window"])
def test_a9_both_halves_of_a_hybrid_come_back(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """Of a hybrid only the attention layers were restored, and the tokens were skipped all the same: 40 % of the answers were
    garbled (LMCache PR #2863).
    """
    path = request.getfixturevalue(kind)
    prompts = [random_tokens(20 + number, seed=number) for number in range(50)]
    in_new_process(path, root, prompts)
    cold = load(path)
    with attached(path, root) as (llm, keep):
        for prompt in prompts:
            asked = ask(llm, keep, [*prompt, 7, 8])
            assert (asked.report.match.length, asked.report.match.source) == (len(prompt), Source.DISK)
            assert asked.decoded == 2
            forget(cold)
            assert_same(asked.logits, first_logits(cold, asked.prompt))


@pytest.mark.parametrize("restart", [False, True], ids=["live", "restart"])
def test_a14_the_same_prompt_or_a_shorter_one(model: tuple[str, dict[str, Any]], root: Path, restart: bool) -> None:
    """The same prompt again ended a server, because a recurrent model can't go back by one token (llama-cpp-turboquant PR
    #175); one that was shorter by one met a checkpoint at its very end, and nothing was left to decode
    (JamePeng/llama-cpp-python #178).
    """
    path, options = model
    prompt = random_tokens(600)
    with attached(path, root, **options) as (llm, keep):
        ask(llm, keep, prompt)
        taken = keep._session._live.points.positions
        assert taken
        if restart:
            keep.close()
            llm = load(path, **options)
            keep = attach(llm, root, break_even=False)
        shorter = [prompt[:length] for length in (599, 598, *taken, *(at + 1 for at in taken[:-1]))]
        for again in (prompt, *shorter, [*prompt, 7], prompt):
            asked = ask(llm, keep, again)
            assert asked.report.match.length < len(again) or not asked.decoded
            assert_cold(asked.logits, path, asked.prompt, **options)
            if again in shorter:
                assert asked.decoded <= STEP
        assert keep.stats().errors == {}
        keep.close()


def system(n_words: int) -> dict[str, str]:
    return {"role": "system", "content": "be kind and brief " * n_words}


@pytest.mark.parametrize("kind", ["hybrid", "masked window", "masked hybrid_window"])
def test_b1_warm_after_a_restart(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """A state was restored in 0.12 s instead of 76, and then all of its 14,914 tokens were decoded anyway, because what a
    hybrid or a window needs to go on was in memory only (llama.cpp #25913, #28194, PR #20819).
    """
    path = request.getfixturevalue(kind.removeprefix("masked "))
    options = {"n_ctx": 4096} | (MASKED if "masked" in kind else {})
    first = [system(120), {"role": "user", "content": "what is a lighthouse"}]
    second = [*first, {"role": "assistant", "content": "a tower"}, {"role": "user", "content": "and a buoy"}]
    edited = [*second[:-1], {"role": "user", "content": "no, a harbour"}]
    turns = []
    for messages in (first, second, edited, edited):
        with attached(path, root, **options) as (llm, keep):
            turns.append(chat(llm, keep, messages))
        assert_cold(turns[-1].logits, path, turns[-1].prompt, **options)
    one, two, three, four = turns
    assert len(one.prompt) > 1500
    # All but what is new; an edited message goes back to where that begins.
    assert two.decoded <= len(two.prompt) - in_common(one.prompt, two.prompt) + 1
    assert three.decoded <= len(three.prompt) - in_common(two.prompt, three.prompt) + len("<user>") + 2
    assert four.decoded == 1
    assert {turn.report.match.source for turn in (two, three, four)} == {Source.DISK}


@pytest.mark.parametrize("length", [20, 1500])
def test_b2_every_turn_goes_on_from_the_one_before(model: tuple[str, dict[str, Any]], root: Path, length: int) -> None:
    """Prompts below 64 tokens never got a checkpoint, and long ones lost all of theirs: each turn was decoded from its first
    token (llama.cpp #22384, #24055, PR #21099).
    """
    path, options = model
    options = {"n_ctx": 2048, **options}
    prompt = random_tokens(length)
    for turn in range(5):
        with attached(path, root, **options) as (llm, keep):
            asked = ask(llm, keep, prompt)
            assert asked.decoded == (20 if turn else length)
            prompt = [*prompt, *generate(llm, prompt, 6)[:-1], *random_tokens(20, seed=turn)]
    assert_cold(asked.logits, path, asked.prompt, **options)


@pytest.mark.parametrize("restart", [False, True], ids=["live", "restart"])
def test_b2_going_back_takes_no_later_checkpoint_away(model: tuple[str, dict[str, Any]], root: Path, restart: bool) -> None:
    """Whoever went back to an older checkpoint lost the later ones, though they were still good (llama.cpp PR #24035)."""
    path, options = model
    options = {"n_ctx": 2048, **options}
    tokens = random_tokens(1300)
    with attached(path, root, **options) as (llm, keep):
        for length in (400, 800, 1200):
            ask(llm, keep, tokens[:length])
        keep.flush()
        ask(llm, keep, [*tokens[:400], 9, 8, 7])
        if restart:
            keep.close()
            llm = load(path, **options)
            keep = attach(llm, root, break_even=False)
        asked = ask(llm, keep, tokens)
        keep.close()
    assert asked.report.match.length == 1200
    assert_cold(asked.logits, path, asked.prompt, **options)


def test_b3_an_edit_anywhere_costs_a_part(model: tuple[str, dict[str, Any]], root: Path) -> None:
    """Programs that change a word just before the end, or the end of the system prompt, made every checkpoint useless, where
    only the newest ones were kept (llama.cpp PR #22929, #25913; koboldcpp #2034).
    """
    path, options = model
    options = {"n_ctx": 2048, **options}
    tokens = random_tokens(1500)
    with attached(path, root, **options) as (llm, keep):
        # A chat of many turns, which takes more checkpoints than are kept.
        for length in range(200, len(tokens) + 1, 50):
            ask(llm, keep, tokens[:length])
    for share in (0.9, 0.5, 0.1):
        at = int(len(tokens) * share)
        edited = [*tokens[:at], (tokens[at] + 1) % 500 + 4, *tokens[at + 1 :]]
        with attached(path, root, **options) as (llm, keep), keep.no_store():
            asked = ask(llm, keep, edited)
        assert asked.decoded <= len(edited) - at + STEP
        assert_cold(asked.logits, path, asked.prompt, **options)


@pytest.mark.parametrize("kind", ["hybrid", "falcon_h1", "recurrent", "masked window"])
def test_b20_the_second_call_from_python(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """The second call of a chat failed or printed rubbish with hybrids, because positions were counted on from a state that was
    somewhere else (llama-cpp-python #2140, PR #2108; JamePeng/llama-cpp-python #59).
    """
    path = request.getfixturevalue(kind.removeprefix("masked "))
    options = MASKED if "masked" in kind else {}
    same = [system(5), {"role": "user", "content": "what is a lighthouse"}]
    other = [system(5), {"role": "user", "content": "and a buoy"}]
    llm, cold = load(path, **options), load(path, **options)
    for seed, messages in enumerate([same, same, other, same, other]):
        asked: dict[str, Any] = {"messages": messages, "max_tokens": 8, "temperature": 1.0, "seed": seed}
        cold.reset()
        wanted = cold.create_chat_completion(**asked)["choices"]
        with attach(llm, root, break_even=False) as keep:
            assert llm.create_chat_completion(**asked)["choices"] == wanted
            assert llm.create_chat_completion(**asked)["choices"] == wanted
            assert keep.stats().errors == {}
        assert llm.create_chat_completion(**asked)["choices"] == wanted
