"""`verbose=True` is what people get by default, and it makes `Llama` do more: all of it must still be warm."""

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llamas import first_logits, load, n_decoded, random_tokens

from kvkeep.cache import PersistentLlamaCache, attach

PROMPT = random_tokens(150)


def chat_turns(llm: Any) -> list[int]:
    """Tokens decoded by each of three turns of one chat."""
    messages: list[Any] = [{"role": "user", "content": "tell me about lighthouses " * 10}]
    decoded = []
    for _ in range(3):
        before = n_decoded(llm)
        answer = llm.create_chat_completion(messages=messages, max_tokens=4, temperature=0.0)
        decoded.append(n_decoded(llm) - before)
        messages += [dict(answer["choices"][0]["message"]), {"role": "user", "content": "and then"}]
    return decoded


@pytest.mark.parametrize("way", ["attach", "set_cache"])
def test_the_live_context_is_used_as_without_verbose(dense: str, tmp_path: Path, way: str) -> None:
    decoded = []
    for verbose in (False, True):
        llm = load(dense, verbose=verbose)
        if way == "attach":
            keep: Any = attach(llm, tmp_path / str(verbose), break_even=False)
        else:
            keep = PersistentLlamaCache.for_model(llm, tmp_path / str(verbose), break_even=False)
            llm.set_cache(keep)
        decoded.append(chat_turns(llm))
        assert keep.stats().errors == {}
        keep.close()
    assert decoded[0] == decoded[1]
    assert decoded[1][1] < decoded[1][0] / 4


def test_a_reset_of_the_counters_hides_no_foreign_decode(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
        keep.flush()
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm.ctx), 0, len(PROMPT) - 1, -1)
        llm._batch.set_batch(batch=[77], n_past=len(PROMPT) - 1, logits_all=False)
        assert llama_cpp.llama_decode(llm.ctx, llm._batch.batch) == 0
        llm._ctx.reset_timings()
        np.testing.assert_allclose(first_logits(llm, [*PROMPT, 5]), first_logits(load(dense), [*PROMPT, 5]), atol=2e-3)


def test_the_first_foreign_decode_of_a_single_token_is_noticed(dense: str, root: Path) -> None:
    """llama.cpp shows 1 where a count is still 0, so the count alone doesn't change."""
    llm = load(dense)
    with attach(llm, root, break_even=False):
        llm.eval(PROMPT)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm.ctx), 0, len(PROMPT) - 1, -1)
        llm._batch.set_batch(batch=[77], n_past=len(PROMPT) - 1, logits_all=False)
        assert llama_cpp.llama_decode(llm.ctx, llm._batch.batch) == 0
        np.testing.assert_allclose(first_logits(llm, [*PROMPT, 5]), first_logits(load(dense), [*PROMPT, 5]), atol=2e-3)
