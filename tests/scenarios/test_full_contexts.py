"""Contexts that are full, shifted by hand, or used for something else between two chats."""

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from hits import ask, attached
from llamas import first_logits, generate, load, random_tokens
from seen import assert_cold, last_position

from kvkeep.cache import Source

SMALL = {"n_ctx": 256, "n_batch": 32}
PROMPT = random_tokens(150)
CHAT: list[Any] = [{"role": "system", "content": "be kind " * 8}, {"role": "user", "content": "hello there"}]


def letters(_: Any, scores: Any) -> Any:
    """Only letters, of which there is no end and no half of one."""
    scores[:259] = -np.inf
    return scores


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "recurrent", "opaque"])
def test_g6_generated_to_the_end_of_the_context(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """After a full context even a new chat failed, or all of the old one was decoded again (llama.cpp #16983, LM Studio
    #1534).
    """
    model = request.getfixturevalue(kind)
    prompt = random_tokens(100)
    with attached(model, root, **SMALL) as (llm, keep):
        llm.create_completion(prompt, max_tokens=None, temperature=0.0, logits_processor=[letters])
        full = llm.input_ids[: llm.n_tokens].tolist()
        assert 240 <= len(full) <= 256
        # A new chat, and the old one again.
        assert_cold(ask(llm, keep, random_tokens(60, seed=4)).logits, model, random_tokens(60, seed=4), **SMALL)
        assert keep.stats().errors == {}
    with attached(model, root, **SMALL) as (llm, keep):
        asked = ask(llm, keep, full)
        assert asked.report.match.source is Source.DISK
        assert asked.decoded <= len(full) - len(prompt) + 1
        assert_cold(asked.logits, model, full, **SMALL)


def test_g6_a_recurrent_model_goes_on_beyond_its_context(recurrent: str, root: Path) -> None:
    """Its memory has no end, `input_ids` has one: what is kept must not be a state of 299 tokens under 256."""
    prompt = random_tokens(100)
    with attached(recurrent, root, **SMALL) as (llm, keep):
        answer = generate(llm, prompt, 200)
        assert last_position(llm) == 298
        keep.flush()
        assert (keep.stats().errors, keep.stats().saves) == ({}, 1)
        assert_cold(ask(llm, keep, prompt).logits, recurrent, prompt, **SMALL)
    with attached(recurrent, root, **SMALL) as (llm, keep):
        for length in (101, 200, 255):
            asked = ask(llm, keep, [*prompt, *answer][:length])
            assert asked.report.match.length >= 99
            assert_cold(asked.logits, recurrent, asked.prompt, **SMALL)
    # With room for it, all of it is found.
    with attached(recurrent, root, n_ctx=512) as (llm, keep):
        asked = ask(llm, keep, [*prompt, *answer, 7])
    assert asked.decoded == 2
    assert_cold(asked.logits, recurrent, asked.prompt, n_ctx=512)


def shift(llm: Any, *, through: str, told: bool) -> list[int]:
    """Drop positions 10 to 59 and move the rest down, as programs do it whose context is full. Returns what it holds then."""
    if through == "Llama":
        llm._ctx.kv_cache_seq_rm(0, 10, 60)
        llm._ctx.kv_cache_seq_shift(0, 60, -1, -50)
    else:
        memory = llama_cpp.llama_get_memory(llm.ctx)
        llama_cpp.llama_memory_seq_rm(memory, 0, 10, 60)
        llama_cpp.llama_memory_seq_add(memory, 0, 60, -1, -50)
    left = [*PROMPT[:10], *PROMPT[60:]]
    if told:
        llm.input_ids[: len(left)] = left
    llm.n_tokens = len(left)
    return left


@pytest.mark.parametrize("told", [True, False], ids=["input_ids told", "not told"])
@pytest.mark.parametrize("through", ["Llama", "the C API"])
@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on", "new prompt"])
def test_g6_a_shifted_context_is_neither_kept_nor_trusted(
    dense: str, root: Path, through: str, told: bool, goes_on: bool
) -> None:
    """Keys that were moved are those of other tokens at other places: kept under either text they are wrong
    (ik_llama.cpp PR #2459 looped after 476 shifts).
    """
    with attached(dense, root) as (llm, keep):
        first_logits(llm, PROMPT)
        keep.flush()
        keep.clear()
        left = shift(llm, through=through, told=told)
        if goes_on:
            llm.eval([5, 6, 7])
        keep.flush()
        for prompt in ([*PROMPT[:100], 5, 6, 7, 8], [*left, 5, 6, 7, 8], PROMPT):
            assert_cold(ask(llm, keep, prompt).logits, dense, prompt)
    with attached(dense, root) as (llm, keep):
        for prompt in ([*left, 5, 6, 7, 9], [*PROMPT[:100], 5, 6, 7, 9]):
            assert_cold(ask(llm, keep, prompt).logits, dense, prompt)


def test_g6_a_hole_is_not_gone_on_from(dense: str, root: Path) -> None:
    """Positions taken out of the middle, and nothing moved into their place."""
    with attached(dense, root) as (llm, keep):
        first_logits(llm, PROMPT)
        keep.flush()
        keep.clear()
        llm._ctx.kv_cache_seq_rm(0, 10, 60)
        prompt = [*PROMPT[:140], 5, 6]
        assert_cold(ask(llm, keep, prompt).logits, dense, prompt)


@pytest.mark.parametrize("failing", [False, True], ids=["", "failing"])
def test_embeddings_between_two_chats(each_kind: str, root: Path, failing: bool) -> None:
    """They clear the context and decode texts of their own, of which nothing is kept; the chat's tokens come back from disk."""
    options = {"embedding": True, "n_batch": 256}

    def answer(llm: Any) -> Any:
        return llm.create_chat_completion(CHAT, max_tokens=6, temperature=0.0)["choices"]

    cold = load(each_kind, **options)
    wanted, vector = answer(cold), cold.embed("something else")
    with attached(each_kind, root, **options) as (llm, keep):
        assert answer(llm) == wanted
        keep.flush()
        for _ in range(2):
            if failing:
                with pytest.raises(ValueError, match="exceed batch size"):
                    llm.embed(["ab " * 60, "cd " * 60, "and long " * 90], truncate=False)
            else:
                assert np.allclose(llm.embed("something else"), vector, atol=1e-3)
                assert len(llm.create_embedding(["one", "two"])["data"]) == 2
            assert answer(llm) == wanted
            assert keep.last is not None
            assert (keep.last.source, keep.last.decoded) == (Source.DISK, 1)
        assert keep.stats().errors == {}


def test_embeddings_beside_a_suspended_stream_lose_nothing(dense: str, root: Path) -> None:
    """What a stream has decoded that nobody has ended yet is kept before the context is cleared."""
    with attached(dense, root, embedding=True, n_batch=256) as (llm, keep):
        stream = llm.generate(PROMPT, temp=0.0)
        next(stream)
        llm.embed("something else")
        stream.close()
        keep.flush()
        answer = generate(llm, PROMPT, 8)
        assert keep.last is not None
        assert (keep.last.source, keep.last.decoded) == (Source.DISK, 1)
    assert answer == generate(load(dense, embedding=True, n_batch=256), PROMPT, 8)
