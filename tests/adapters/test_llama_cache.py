"""`PersistentLlamaCache`: a real `BaseLlamaCache`, through `set_cache` and by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import LlamaState
from llama_cpp.llama_cache import BaseLlamaCache
from llamas import first_logits, load, n_decoded, random_tokens

from kvkeep.cache import PersistentLlamaCache, Reason, Source, attach

PROMPT = random_tokens(200)


def complete(llm: Any, prompt: list[int], count: int = 4) -> tuple[str, int]:
    """Text of a greedy completion, and the tokens that it decoded."""
    before = n_decoded(llm)
    text: str = llm.create_completion(prompt, max_tokens=count, temperature=0.0)["choices"][0]["text"]
    return text, n_decoded(llm) - before


def with_cache(model: str, root: Path) -> tuple[Any, PersistentLlamaCache]:
    llm = load(model)
    cache = PersistentLlamaCache.for_model(llm, root, break_even=False)
    llm.set_cache(cache)
    return llm, cache


def test_it_is_a_base_llama_cache_and_never_falsy(dense: str, root: Path) -> None:
    _llm, cache = with_cache(dense, root)
    assert isinstance(cache, BaseLlamaCache)
    assert cache, "Llama never uses a cache that is falsy while it is empty"
    assert cache.capacity_bytes == 4 << 30
    assert cache.cache_size == 0
    cache.close()


def test_set_cache_is_warm_after_a_restart(dense: str, root: Path) -> None:
    cold = complete(load(dense), PROMPT)
    llm, cache = with_cache(dense, root)
    assert complete(llm, PROMPT) == cold
    cache.close()
    assert cold[1] == len(PROMPT) + 3

    llm, cache = with_cache(dense, root)
    assert complete(llm, PROMPT) == (cold[0], 1 + 3)
    assert cache.last is not None
    assert (cache.last.source, cache.last.decoded) == (Source.DISK, 1)
    assert cache.stats().requests == 1
    cache.close()


def test_it_shares_the_store_with_attach(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False):
        first_logits(llm, PROMPT)
    llm, cache = with_cache(dense, root)
    assert complete(llm, PROMPT)[1] == 1 + 3
    cache.close()


def test_llama_never_calls_load_state(dense: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would copy the state three times, and a score matrix."""
    llm, cache = with_cache(dense, root)
    complete(llm, PROMPT)
    cache.close()
    llm, cache = with_cache(dense, root)
    monkeypatch.setattr(llm, "load_state", None)
    complete(llm, PROMPT)
    complete(llm, [*PROMPT[:100], 3, 4, 5])
    complete(llm, [5, 4, 3])
    assert cache.stats().errors == {}
    cache.close()


def test_a_stream_that_is_closed_early_is_saved(dense: str, root: Path) -> None:
    """`Llama` itself would save only after the last token."""
    llm, cache = with_cache(dense, root)
    stream = llm.create_completion(PROMPT, max_tokens=10, temperature=0.0, stream=True)
    next(stream)
    stream.close()
    cache.close()
    llm, cache = with_cache(dense, root)
    assert complete(llm, PROMPT)[1] == 1 + 3
    cache.close()


@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_a_live_context_that_cannot_be_cut_never_goes_on_from_a_hole(
    kind: str, root: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    llm = load(model, swa_full=False)
    cache = PersistentLlamaCache.for_model(llm, root, break_even=False)
    llm.set_cache(cache)
    for prompt in (PROMPT + PROMPT, PROMPT[:140], [*PROMPT[:190], 3, 4], PROMPT + PROMPT):
        assert complete(llm, prompt)[0] == complete(load(model, swa_full=False), prompt)[0]
    cache.close()


def test_by_hand_a_miss_is_a_key_error_that_says_why(dense: str, root: Path) -> None:
    llm, cache = with_cache(dense, root)
    assert PROMPT not in cache
    with pytest.raises(KeyError, match="empty"):
        cache[PROMPT]
    with pytest.raises(KeyError, match="empty key"):
        cache[[]]
    complete(llm, PROMPT)
    cache.flush()
    assert PROMPT in cache
    assert PROMPT[:5] in cache
    assert [9, 8, 7] not in cache
    with pytest.raises(KeyError, match="no common prefix"):
        cache[[9, 8, 7]]
    assert cache.cache_size > 0
    cache.close()


def test_by_hand_an_item_is_a_state_that_any_llama_can_load(dense: str, root: Path) -> None:
    llm, cache = with_cache(dense, root)
    complete(llm, PROMPT)
    cache.flush()
    item = cache[PROMPT]
    assert isinstance(item, LlamaState)
    assert item.n_tokens == len(PROMPT) - 1
    assert item.input_ids.shape == (llm.n_ctx(),)
    assert item.input_ids[: item.n_tokens].tolist() == PROMPT[:-1]
    assert (item.input_ids[item.n_tokens :] == -1).all()
    assert item.scores.shape == (1, llm.n_vocab())
    assert item.seed == llm._seed
    assert len(item.llama_state) == item.llama_state_size

    other = load(dense)
    other.load_state(item)
    before = n_decoded(other)
    np.testing.assert_allclose(first_logits(other, PROMPT), first_logits(load(dense), PROMPT), atol=2e-3)
    assert n_decoded(other) - before == 1
    cache.close()


def test_by_hand_ten_reads_leave_the_entry_there(dense: str, root: Path) -> None:
    llm, cache = with_cache(dense, root)
    complete(llm, PROMPT)
    cache.flush()
    for _ in range(10):
        assert cache[PROMPT].n_tokens == len(PROMPT) - 1
    cache.close()


def test_by_hand_a_state_is_kept_if_it_is_the_present_one(dense: str, root: Path) -> None:
    llm, cache = with_cache(dense, root)
    llm.eval(PROMPT[:100])
    cache[[*PROMPT[:100], 77]] = llm.save_state()  # a key that is one token longer, as Llama makes them
    old = llm.save_state()
    llm.eval(PROMPT[100:])
    cache[PROMPT[:100]] = old
    cache.flush()
    inner = cache._session.cache
    assert inner is not None
    assert inner.match(PROMPT).length == len(PROMPT), "flush saved what the context holds"
    assert inner.match([*PROMPT[:100], 77]).length == 100, "the token that was never decoded isn't stored"
    cache.close()


def test_by_hand_a_damaged_state_is_a_key_error_and_changes_nothing(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvkeep.cache.prefix_cache import PrefixCache
    from kvkeep.store.errors import MissingBlob

    llm, cache = with_cache(dense, root)
    complete(llm, PROMPT)
    cache.flush()
    item = cache[PROMPT]
    before = (llm.n_tokens, llm.input_ids.copy())

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise MissingBlob("gone")

    monkeypatch.setattr(PrefixCache, "restore", broken)
    target = load(dense)
    target.eval([5, 6, 7])
    with pytest.raises(KeyError, match="gone"):
        target.load_state(item)
    assert target.n_tokens == 3
    assert (llm.n_tokens, llm.input_ids.tolist()) == (before[0], before[1].tolist())
    monkeypatch.undo()
    cache.close()


def test_by_hand_below_the_break_even_is_a_miss(dense: str, root: Path) -> None:
    llm = load(dense)
    with PersistentLlamaCache.for_model(llm, root) as cache:
        llm.eval(PROMPT)
        cache.flush()
        llm.reset()
        rates = cache._session.rates
        rates.prefill_rate, rates.restore_rate = 1e9, 1e6
        with pytest.raises(KeyError, match="break-even"):
            cache[PROMPT]
        assert cache.last is not None
        assert cache.last.reason is Reason.BELOW_BREAK_EVEN


def test_a_cache_without_its_model_says_so(dense: str, root: Path) -> None:
    llm = load(dense)
    cache = PersistentLlamaCache.for_model(llm, root)
    del llm
    import gc

    gc.collect()
    with pytest.raises(ValueError, match="gone"):
        cache[PROMPT]


def test_a_state_of_another_model_is_never_kept(dense: str, other_dense: str, root: Path) -> None:
    """Same shapes, other weights: llama.cpp takes it, and nobody may save it under this model's name."""
    first, cache = with_cache(dense, root)
    complete(first, PROMPT)
    cache.flush()
    item = cache[PROMPT]
    second, other_cache = with_cache(other_dense, root)
    second.load_state(item)
    complete(second, [*PROMPT, 5])
    other_cache.close()
    cache.close()
    again = load(other_dense)
    with attach(again, root, break_even=False):
        np.testing.assert_allclose(first_logits(again, PROMPT), first_logits(load(other_dense), PROMPT), atol=2e-3)


@pytest.mark.parametrize("end", ["close", "detach"])
def test_a_closed_cache_does_nothing_any_more(dense: str, root: Path, end: str) -> None:
    llm, cache = with_cache(dense, root)
    complete(llm, PROMPT)
    cache.flush()
    getattr(cache, end)()
    assert llm.cache is None
    llm.set_cache(cache)
    assert PROMPT not in cache
    with pytest.raises(KeyError, match="closed"):
        cache[PROMPT]
    control = load(dense)
    complete(control, PROMPT)
    assert complete(llm, [*PROMPT, 5, 6]) == complete(control, [*PROMPT, 5, 6]), "the live context is left alone"
    cache.close()


def with_a_stored_prompt(path: str, root: Path) -> tuple[Any, PersistentLlamaCache]:
    llm, cache = with_cache(path, root)
    first_logits(llm, PROMPT)
    cache.flush()
    llm.reset()
    return llm, cache


@pytest.mark.parametrize("kind", ["window", "recurrent", "hybrid", "hybrid_window"])
def test_by_hand_an_item_of_any_memory_is_a_state_that_any_llama_can_load(
    kind: str, root: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    _llm, cache = with_a_stored_prompt(model, root)
    target = load(model)
    target.load_state(cache[[*PROMPT, 5]])
    assert target.n_tokens == len(PROMPT)
    before = n_decoded(target)
    np.testing.assert_allclose(first_logits(target, [*PROMPT, 5]), first_logits(load(model), [*PROMPT, 5]), atol=2e-3)
    assert n_decoded(target) - before == 1
    cache.close()


def test_by_hand_an_item_of_a_masked_window_has_no_more_cells_than_its_ring(window: str, root: Path) -> None:
    """Of a long chat all of the windowed cache is stored, state by state; no context has that many cells for it."""
    options = {"swa_full": False, "n_ubatch": 32}
    llm = load(window, **options)
    cache = PersistentLlamaCache.for_model(llm, root, break_even=False)
    chat = random_tokens(600)
    for length in range(40, 601, 40):
        first_logits(llm, chat[:length])
        cache.flush()
    llm.reset()
    target = load(window, **options)
    target.load_state(cache[[*chat, 5]])
    assert target.n_tokens == 600
    cold = load(window, **options)
    np.testing.assert_allclose(first_logits(target, [*chat, 5]), first_logits(cold, [*chat, 5]), atol=2e-3)
    cache.close()


def test_by_hand_a_memory_that_cannot_be_cut_is_a_key_error(opaque: str, root: Path) -> None:
    """Its state is kept in the sequence form, which load_state would take for a whole one."""
    _llm, cache = with_a_stored_prompt(opaque, root)
    item = cache[[*PROMPT, 5]]
    target = load(opaque)
    with pytest.raises(KeyError, match="sequence form"):
        target.load_state(item)
    assert target.n_tokens == 0
    cache.close()


@pytest.mark.parametrize("between", ["warm", "eval", "reset"])
def test_what_was_decoded_since_it_was_asked_is_looked_at(between: str, window: str, root: Path) -> None:
    """`Llama` asks and generates at once; somebody else may do something else in between."""
    llm = load(window, swa_full=False, n_ubatch=32)
    cold = first_logits(llm, PROMPT)
    llm.close()
    llm = load(window, swa_full=False, n_ubatch=32)
    cache = PersistentLlamaCache.for_model(llm, root, break_even=False)
    other = [*PROMPT[:60], *random_tokens(540, seed=5)]
    with pytest.raises(KeyError):
        cache[PROMPT]
    if between == "warm":
        cache.warm(other)
    else:
        llm.eval(other)
        if between == "reset":
            llm.reset()
    found = first_logits(llm, PROMPT)
    assert np.allclose(found, cold, atol=1e-3 * np.abs(cold).max())
    cache.close()
