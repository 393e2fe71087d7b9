"""Short prompts, exact prompts, and prompts of every length: nothing is lost to rounding, and nothing is done in vain."""

from pathlib import Path
from typing import Any

import llamas
import pytest
from hits import ask, assert_as_cold, attached
from llamas import load, n_decoded, random_tokens

from kvkeep.cache import LlamaDiskCache, LlamaRAMCache, PersistentLlamaCache, Reason, Source, attach

# -- B11: the very same prompt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 8, 40])
def test_b11_the_same_short_prompt_costs_no_more_than_without_a_cache(each_kind: str, root: Path, length: int) -> None:
    """An exact prompt was never a hit, and the cache made short prompts three times slower (llama-cpp-python #1293): here it is
    decoded as without a cache, and stored once."""
    prompt = random_tokens(length)
    stock, llm = load(each_kind), load(each_kind)
    # The default: restoring must pay.
    with attach(llm, root) as keep:
        for time in range(5):
            before, before_stock = n_decoded(llm), n_decoded(stock)
            llamas.first_logits(llm, prompt)
            llamas.first_logits(stock, prompt)
            assert n_decoded(llm) - before <= n_decoded(stock) - before_stock
            keep.flush()
            if time == 0:
                written = keep.stats().written_bytes
        stats = keep.stats()
        assert (stats.saves, stats.written_bytes) == (1, written)
        # The context stands at the prompt's end, with its logits: nothing at all is decoded again.
        assert stats.decoded_tokens == n_decoded(llm) == length


@pytest.mark.parametrize("kind", ["disk", "ram", "persistent"])
def test_b11_an_exact_prompt_is_a_hit_by_every_way_in(dense: str, root: Path, kind: str) -> None:
    """The same prompt, another one, and the same again: from the second time on one token is decoded.

    (Not so with `LlamaTrieCache`, stock and here: it finds keys that the prompt begins with, and those hold the answer too.)
    """
    makers: dict[str, Any] = {
        "disk": lambda llm: LlamaDiskCache(str(root)),
        "ram": lambda llm: LlamaRAMCache(),
        "persistent": lambda llm: PersistentLlamaCache.for_model(llm, root, break_even=False),
    }
    llm = load(dense)
    llm.set_cache(makers[kind](llm))
    text, other = "what is a lighthouse " * 6, "and now a ship"
    plain = load(dense).create_completion(text, max_tokens=3, temperature=0.0)["choices"]
    for time in range(5):
        before = n_decoded(llm)
        answer = llm.create_completion(text, max_tokens=3, temperature=0.0)
        assert answer["choices"] == plain
        if time:
            assert n_decoded(llm) - before <= 4
        if kind == "persistent":
            # Stored behind the caller's back, which may take a moment.
            llm.cache.flush()
        llm.create_completion(other, max_tokens=1, temperature=0.0)
    if kind in ("disk", "persistent"):
        llm.cache.close()


# -- B15: every length --------------------------------------------------------------------------------------------------


def test_b15_no_length_of_a_prompt_is_rounded_down(each_kind: str, root: Path) -> None:
    """Strides of 8,192, a floor of 2,048 tokens, a third lost to rounding (ollama #18267, slotstream #17, omlx #2876). Whatever
    its length, of the same prompt one token is decoded after a restart, and of a longer one what it has more."""
    options = {"n_ctx": 2048, "n_batch": 512}
    prompts = [random_tokens(length, seed=length) for length in range(1, 1201, 37 if "dense" in each_kind else 148)]
    with attached(each_kind, root, **options) as (llm, keep):
        for prompt in prompts:
            ask(llm, keep, prompt)
    with attached(each_kind, root, **options) as (llm, keep):
        for prompt in prompts:
            again = ask(llm, keep, prompt)
            assert again.decoded == 1, f"{len(prompt)} tokens: {again.report}"
            assert again.report.source is (Source.DISK if len(prompt) > 1 else Source.NONE)
            llm.reset()
            # One token before the prompt's end is where a recurrent state is kept.
            longer = ask(llm, keep, [*prompt, 5, 6, 7])
            assert longer.decoded <= 4, f"{len(prompt)} tokens and 3: {longer.report}"
        assert_as_cold(longer, each_kind, **options)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 127, 128, 200, 511, 899])
def test_b15_a_shared_beginning_of_any_length_is_used_to_the_token(dense: str, root: Path, cut: int) -> None:
    """Blocks have 64 tokens, and what two prompts share ends anywhere."""
    prompt = random_tokens(900)
    with attached(dense, root) as (llm, keep):
        ask(llm, keep, prompt)
    with attached(dense, root) as (llm, keep):
        now = ask(llm, keep, [*prompt[:cut], 3 + prompt[cut] % 500, 4, 5])
        assert now.report.reused_tokens == cut
        assert now.decoded == 3
        assert now.report.parting is not None
        assert now.report.parting.index == cut
        assert_as_cold(now, dense)


def test_b15_restoring_is_done_where_it_is_quicker_by_what_was_measured_here(dense: str, root: Path) -> None:
    """Restoring must never be slower than decoding: decided by speeds that were measured, and said with both figures."""
    prompt = random_tokens(200)
    with attached(dense, root) as (llm, keep):
        ask(llm, keep, prompt)
    for prefill, restore, reason in ((1e9, 1e6, Reason.BELOW_BREAK_EVEN), (1.0, 1e9, Reason.FOUND)):
        llm = load(dense)
        with attach(llm, root) as keep:
            keep._session.rates.prefill_rate, keep._session.rates.restore_rate = prefill, restore
            now = ask(llm, keep, prompt)
            assert now.report.reason is reason
            assert now.decoded == (200 if reason is Reason.BELOW_BREAK_EVEN else 1)
            assert ("decoding 199 tokens takes about" in str(now.report)) == (reason is Reason.BELOW_BREAK_EVEN)
