"""`LlamaDiskCache`: which model asks, what is kept by hand, and when it lets go."""

import copy
import gc
import json
import logging
import pickle  # noqa: TID251 - to be pickled is what is tested
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import Llama, LlamaState
from llamas import first_logits, load, n_decoded, random_tokens

from kvkeep.cache import LlamaDiskCache, LlamaRAMCache, PersistentLlamaCache, attach
from kvkeep.store.errors import UsageError
from kvkeep.store.opening import migrate_root
from kvkeep.store.registry import close_root, open_root

PROMPT = random_tokens(200)
OTHER = random_tokens(180, seed=9)


def complete(llm: Any, prompt: list[int]) -> tuple[str, int]:
    """Text of a greedy completion of four tokens, and the prompt tokens that it decoded."""
    before = n_decoded(llm)
    text: str = llm.create_completion(prompt, max_tokens=4, temperature=0.0)["choices"][0]["text"]
    return text, n_decoded(llm) - before - 3


@pytest.fixture
def cache(root: Path) -> Iterator[LlamaDiskCache]:
    opened = LlamaDiskCache(root)
    yield opened
    opened.close()


def state_of(model: str, tokens: list[int], **options: Any) -> LlamaState:
    llm = load(model, **options)
    llm.eval(tokens)
    state = llm.save_state()
    llm.close()
    return state


def restored_logits(llm: Any, state: LlamaState) -> Any:
    """Logits of a token behind a state that was loaded."""
    llm.load_state(state)
    llm.eval([77])
    return first_logits_now(llm)


def first_logits_now(llm: Any) -> Any:
    return np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).copy()


def cold_logits(model: str, tokens: list[int], **options: Any) -> Any:
    llm = load(model, **options)
    llm.eval([*tokens, 77])
    found = first_logits_now(llm)
    llm.close()
    return found


# -- models that ask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "recurrent", "opaque"])
def test_every_kind_of_memory_is_warm_after_a_restart(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    cold = complete(load(model), PROMPT)
    for reused in (0, len(PROMPT) - 1):
        llm, cache = load(model), LlamaDiskCache(root)
        llm.set_cache(cache)
        assert complete(llm, PROMPT) == (cold[0], cold[1] - reused)
        cache.close()
        llm.close()


def test_models_of_one_shape_never_get_each_others_states(dense: str, other_dense: str, cache: LlamaDiskCache) -> None:
    answers = {}
    for model in (dense, other_dense):
        llm = load(model)
        llm.set_cache(cache)
        text, decoded = complete(llm, PROMPT)
        assert decoded == len(PROMPT), "the first of its model"
        answers[model] = text
        llm.close()
    assert answers[dense] != answers[other_dense]
    for model, text in answers.items():
        llm = load(model)
        llm.set_cache(cache)
        assert complete(llm, PROMPT) == (text, 1)
        llm.close()


def test_two_models_that_are_open_share_it(dense: str, other_dense: str, cache: LlamaDiskCache) -> None:
    first, second = load(dense), load(other_dense)
    for llm in (first, second):
        llm.set_cache(cache)
    for _ in range(2):
        for llm in (first, second):
            for prompt in (PROMPT, OTHER):
                complete(llm, prompt)
    assert [complete(llm, prompt)[1] for llm in (first, second) for prompt in (PROMPT, OTHER)] == [1, 1, 1, 1]


def test_a_cache_that_is_taken_away_does_nothing_any_more(dense: str, cache: LlamaDiskCache) -> None:
    llm = load(dense)
    llm.set_cache(cache)
    complete(llm, PROMPT)
    llm.set_cache(None)
    complete(llm, OTHER)
    assert complete(llm, PROMPT)[1] == len(PROMPT), "the context has the other prompt, and there is no cache"
    assert "generate" not in llm.__dict__
    llm.set_cache(cache)
    complete(llm, OTHER)
    assert complete(llm, PROMPT)[1] == 1


def test_one_cache_takes_the_place_of_another(dense: str, tmp_path: Path) -> None:
    llm = load(dense)
    for name in ("one", "two", "one"):
        llm.set_cache(LlamaDiskCache(tmp_path / name))
        gc.collect()
        complete(llm, OTHER)
        complete(llm, PROMPT)
    llm.set_cache(PersistentLlamaCache.for_model(load(dense), tmp_path / "three"))
    llm.set_cache(None)
    llm.close()


def test_a_model_that_has_a_cache_already_keeps_that(
    dense: str, cache: LlamaDiskCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = load(dense)
    llm.set_cache(cache)
    with attach(llm, tmp_path / "attached", break_even=False) as keep:
        complete(llm, PROMPT)
        keep.flush()
        complete(llm, OTHER)
        assert complete(llm, PROMPT)[1] == 1
    assert [record.getMessage()[:12] for record in caplog.records if "already has" in record.getMessage()] == ["this Llama a"]


def test_subclasses_are_asked_as_well(dense: str, root: Path) -> None:
    class Counting(LlamaDiskCache):
        reads = 0

        def __getitem__(self, key: Any) -> LlamaState:
            self.reads += 1
            return super().__getitem__(key)

    for decoded in (len(PROMPT), 1):
        llm, cache = load(dense), Counting(root)
        llm.set_cache(cache)
        assert complete(llm, PROMPT)[1] == decoded
        assert cache.reads == 1
        cache.close()


def test_a_models_own_methods_do_it_by_hand(dense: str, root: Path) -> None:
    class Mine(Llama):
        def remember(self) -> None:
            self.cache[self.input_ids[: self.n_tokens].tolist()] = self.save_state()

    llm = Mine(dense, n_ctx=512, n_threads=1, verbose=False)
    cache = LlamaDiskCache(root)
    llm.set_cache(cache)
    llm.eval(PROMPT)
    llm.remember()
    assert cache[PROMPT].n_tokens == len(PROMPT)
    cache.close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])  # noqa: S301
def test_a_copy_is_another_cache_on_the_same_folder(copied: Any, dense: str, root: Path) -> None:
    cache = LlamaDiskCache(root, 64 << 20)
    other = copied(cache)
    cache[PROMPT] = state_of(dense, PROMPT)
    cache.close()
    assert other.capacity_bytes == 64 << 20
    assert other[PROMPT].n_tokens == len(PROMPT)
    other.close()


def test_a_model_that_goes_leaves_what_it_had(dense: str, root: Path) -> None:
    llm, cache = load(dense), LlamaDiskCache(root)
    llm.set_cache(cache)
    complete(llm, PROMPT)
    del llm, cache
    gc.collect()
    llm = load(dense)
    llm.set_cache(LlamaDiskCache(root))
    assert complete(llm, PROMPT)[1] == 1


def test_for_model_is_the_full_way(dense: str, root: Path) -> None:
    llm = load(dense)
    with LlamaDiskCache.for_model(llm, root) as cache:
        assert isinstance(cache, PersistentLlamaCache)
        assert cache.path == root


TRAPS = ["taken away", "another cache", "another cache in a stream", "closed", "attach, closed", "attach, closed in a stream"]


@pytest.mark.parametrize("how", TRAPS)
def test_a_window_that_was_restored_is_no_trap_for_stock_code(how: str, window: str, root: Path) -> None:
    """A restored window has only what is attended to; where llama.cpp keeps all of it, `Llama` cuts into it without a look."""
    first = load(window)
    with attach(first, root, break_even=False) as keep:
        keep.warm(PROMPT)
    llm = load(window)
    if how.startswith("attach"):
        keep = attach(llm, root, break_even=False)
        stream = llm.generate(PROMPT, temp=0.0)
        next(stream)
        if how == "attach, closed":
            stream.close()
        keep.close()
        assert keep.last is not None
        assert keep.last.length == len(PROMPT) - 1
    else:
        cache = LlamaDiskCache(root)
        llm.set_cache(cache)
        if how == "another cache in a stream":
            stream = llm.create_completion(PROMPT, max_tokens=4, temperature=0.0, stream=True)
            next(stream)
            # Llama puts its state at the stream's end into whatever cache it has by then.
            llm.set_cache(LlamaRAMCache())
            assert len(list(stream)) > 0
        else:
            assert complete(llm, PROMPT)[1] == 1
        if how == "closed":
            cache.close()
        elif "stream" not in how:
            llm.set_cache(None if how == "taken away" else LlamaRAMCache())
    prompt = [*PROMPT[:100], *OTHER[:20]]
    llm.create_completion(prompt, max_tokens=1, temperature=0.0)
    cold = load(window)
    cold.create_completion(prompt, max_tokens=1, temperature=0.0)
    expected = first_logits_now(cold)
    assert np.allclose(first_logits_now(llm), expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("stored", ["all", "only the end"])
def test_a_state_that_leaves_the_house_is_whole(stored: str, window: str, root: Path) -> None:
    first = load(window)
    with attach(first, root, break_even=False) as keep:
        keep.warm(PROMPT)
    if stored == "only the end":
        with closing(sqlite3.connect(root / "index.sqlite3")) as connection, connection:
            connection.execute("DELETE FROM window WHERE start = 0")
    llm = load(window)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, [*PROMPT, 9])
        assert keep.last is not None
        assert keep.last.length == len(PROMPT)
        state = llm.save_state()
    other = load(window)
    other.load_state(state)
    assert other.n_tokens == (len(PROMPT) + 1 if stored == "all" else 0)
    prompt = [*PROMPT[:100], *OTHER[:20]]
    assert np.allclose(first_logits(other, prompt), first_logits(load(window), prompt), atol=1e-2)


def test_a_stream_that_is_left_without_its_context_ends(window: str, root: Path) -> None:
    first = load(window)
    with attach(first, root, break_even=False) as keep:
        keep.warm(PROMPT)
    llm = load(window)
    keep = attach(llm, root, break_even=False)
    stream = llm.generate(PROMPT, temp=0.0)
    next(stream)
    keep.close()
    assert list(stream) == []
    assert llm.n_tokens == 0


def test_a_state_is_copied_for_nobody(dense: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Llama` hands its state to the cache behind each answer, which has its own copy by then."""
    copies = []
    original = Llama.save_state
    monkeypatch.setattr(Llama, "save_state", lambda llm: copies.append(1) or original(llm))
    seen = []

    class Looking(LlamaDiskCache):
        def __setitem__(self, key: Any, value: LlamaState) -> None:
            if len(key) > len(PROMPT) + 10:
                seen.append((value.n_tokens, value.llama_state_size, len(value.llama_state), value.scores.shape[1]))
            super().__setitem__(key, value)

    llm, cache = load(dense), Looking(root)
    llm.set_cache(cache)
    complete(llm, PROMPT)
    assert copies == []
    complete(llm, [*PROMPT, *OTHER[:20]])
    assert copies == [1], "somebody has looked"
    assert seen[0][1] == seen[0][2] > 0
    llm.save_state()
    assert copies == [1, 1], "by hand it is what it was"
    cache.close()


def test_a_closed_cache_does_not_open_its_folder_again(dense: str, root: Path) -> None:
    llm, cache = load(dense), LlamaDiskCache(root)
    llm.set_cache(cache)
    complete(llm, PROMPT)
    cache.close()
    complete(llm, OTHER)
    assert complete(llm, PROMPT)[1] == len(PROMPT)
    # Nobody has it open: who comes alone gets its lock.
    assert migrate_root(root) == []


def test_models_may_come_while_another_thread_flushes(dense: str, root: Path) -> None:
    cache = LlamaDiskCache(root)
    models = [load(dense, n_ctx=256) for _ in range(12)]
    done = threading.Event()
    errors: list[BaseException] = []

    def flushing() -> None:
        try:
            while not done.is_set():
                cache.flush()
        except RuntimeError as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=flushing)
    thread.start()
    try:
        for llm in models:
            llm.set_cache(cache)
            complete(llm, PROMPT[:20])
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
        cache.close()
    assert errors == []


# -- by hand -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "mla", "mrope", "two_caches", "window", "hybrid", "falcon_h1", "recurrent"])
def test_a_state_put_in_by_hand_comes_out_after_a_restart(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    cache = LlamaDiskCache(root)
    cache[PROMPT] = state_of(model, PROMPT)
    cache.close()
    cache = LlamaDiskCache(root)
    key = [*PROMPT, 5, 6]
    assert key in cache
    assert cache._find_longest_prefix_key(tuple(key)) == tuple(PROMPT)
    llm = load(model)
    found = restored_logits(llm, cache[key])
    assert np.allclose(found, cold_logits(model, PROMPT), atol=1e-3 * np.abs(found).max())
    assert llm.input_ids.size == llm.n_ctx()
    cache.close()


@pytest.mark.parametrize("kind", ["dense", "window", "two_caches"])
def test_by_hand_a_memory_that_can_be_cut_gives_any_beginning(
    kind: str, cache: LlamaDiskCache, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    cache[PROMPT] = state_of(model, PROMPT)
    for length in (1, 63, 64, 65, 130, 199):
        item = cache[[*PROMPT[:length], 3, 3, 3] if PROMPT[length] != 3 else PROMPT[:length]]
        assert item.n_tokens == length
        found = restored_logits(load(model), item)
        assert np.allclose(found, cold_logits(model, PROMPT[:length]), atol=1e-3 * np.abs(found).max())


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_by_hand_the_others_give_what_was_stored(kind: str, cache: LlamaDiskCache, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    cache[PROMPT[:100]] = state_of(model, PROMPT[:100])
    cache[PROMPT] = state_of(model, PROMPT)
    assert cache[PROMPT[:150]].n_tokens == 100
    assert PROMPT[:99] not in cache


def test_by_hand_a_masked_window_is_not_kept_and_that_is_said(
    window: str, cache: LlamaDiskCache, caplog: pytest.LogCaptureFixture
) -> None:
    # More than its ring of cells holds.
    long = random_tokens(500)
    cache[long] = state_of(window, long, swa_full=False, n_ubatch=32)
    assert long not in cache
    assert "a state is not kept" in caplog.text


def test_by_hand_an_unknown_memory_is_not_kept_and_that_is_said(
    opaque: str, cache: LlamaDiskCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache[PROMPT] = state_of(opaque, PROMPT)
    cache[OTHER] = state_of(opaque, OTHER)
    assert PROMPT not in cache
    assert [record.getMessage()[:22] for record in caplog.records] == ["a state is not kept: a"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("mla", {}), ("dense", {"flash_attn": True}), ("dense", {"type_k": 8}), ("dense", {"n_ctx": 512})],
)
def test_by_hand_what_a_state_shows_keeps_it_apart(
    kind: str, options: dict[str, Any], dense: str, root: Path, request: pytest.FixtureRequest
) -> None:
    cache = LlamaDiskCache(root)
    cache[PROMPT] = state_of(dense, PROMPT)
    other = request.getfixturevalue(kind)
    longer = [*PROMPT, *OTHER]
    cache[longer] = state_of(other, longer, **options)
    assert cache[longer].n_tokens == len(longer)
    cache[PROMPT] = state_of(dense, PROMPT)
    assert cache[longer].n_tokens == len(PROMPT), "of the model that it was last used for"
    cache.close()
    cache = LlamaDiskCache(root)
    assert longer not in cache, "after a restart nobody knows which of the two is meant"
    with pytest.raises(KeyError):
        cache[longer]
    cache.close()


@pytest.mark.parametrize("kinds", [("dense", "other_dense"), ("hybrid", "hybrid")])
def test_by_hand_what_was_put_in_last_comes_out_whole(
    kinds: tuple[str, str], cache: LlamaDiskCache, request: pytest.FixtureRequest
) -> None:
    """A model and one that looks alike: whose blocks are stored can't be told, but they never mix."""
    first, second = (request.getfixturevalue(kind) for kind in kinds)
    options = {} if first != second else {"rope_freq_base": 5000.0}
    longer = [*PROMPT, *OTHER]
    for model, tokens, more in ((first, PROMPT, {}), (second, PROMPT, options), (first, PROMPT, {}), (second, longer, options)):
        cache[tokens] = state_of(model, tokens, **more)
        found = restored_logits(load(model, **more), cache[tokens])
        assert np.allclose(found, cold_logits(model, tokens, **more), atol=1e-3 * np.abs(found).max())
    branch = [*PROMPT[:100], *OTHER]
    cache[branch] = state_of(second, branch, **options)
    assert cache[longer].n_tokens == len(longer), "the same model's, up to where they part"
    cache[branch] = state_of(first, branch)
    assert longer not in cache or cache[longer].n_tokens < len(longer)


def test_by_hand_a_growing_chat_writes_what_is_new(dense: str, cache: LlamaDiskCache) -> None:
    llm = load(dense)
    written = []
    for length in (100, 150, 200):
        llm.eval(PROMPT[llm.n_tokens : length])
        before = cache.cache_size
        cache[PROMPT[:length]] = llm.save_state()
        written.append(cache.cache_size - before)
    assert max(written[1:]) < written[0]
    assert cache[PROMPT].n_tokens == 200


def test_by_hand_fields_of_others_are_not_believed(dense: str, root: Path) -> None:
    """A bundle brings any words that it likes."""
    cache = LlamaDiskCache(root)
    cache[PROMPT] = state_of(dense, PROMPT)
    with closing(sqlite3.connect(root / "index.sqlite3")) as connection, connection:
        (fields,) = connection.execute("SELECT ingredients FROM namespace").fetchone()
        forged = json.dumps(json.loads(fields) | {"kind": "nonsense", "n_vocab": "x", "input_ids": ""})
        connection.execute(
            "INSERT INTO namespace (fingerprint, label, ingredients, block_tokens, created, used) "
            "VALUES (zeroblob(32), 'x', ?, 64, 0, 0)",
            (forged,),
        )
    assert cache[PROMPT].n_tokens == len(PROMPT)
    cache.close()


def test_by_hand_and_in_completions_do_not_mix(dense: str, other_dense: str, cache: LlamaDiskCache) -> None:
    """A fine-tune looks the same as its model, so what was put in by hand is never given to a model that asks by itself."""
    cache[PROMPT] = state_of(other_dense, PROMPT)
    llm = load(dense)
    llm.set_cache(cache)
    assert complete(llm, PROMPT)[1] == len(PROMPT)


def test_by_hand_damage_is_a_miss_and_goes(dense: str, root: Path) -> None:
    cache = LlamaDiskCache(root)
    cache[PROMPT] = state_of(dense, PROMPT)
    assert PROMPT in cache
    with closing(sqlite3.connect(root / "index.sqlite3")) as connection, connection:
        connection.execute("UPDATE node SET blob = randomblob(32) WHERE start = 0")
    with pytest.raises(KeyError):
        cache[PROMPT]
    assert PROMPT not in cache
    cache[PROMPT] = state_of(dense, PROMPT)
    assert cache[PROMPT].n_tokens == len(PROMPT)
    cache.close()


def test_restored_chats_do_not_all_sample_alike(dense: str, cache: LlamaDiskCache) -> None:
    cache[PROMPT] = state_of(dense, PROMPT)
    assert len({cache[PROMPT].seed for _ in range(4)}) > 1


# -- the folder ----------------------------------------------------------------------------------------------------------


def test_the_default_budget_is_the_stock_one_unless_the_folder_has_its_own(root: Path) -> None:
    cache = LlamaDiskCache(root)
    cache.close()
    assert budget_of(root) == cache.capacity_bytes == 2 << 30
    LlamaDiskCache(root, 64 << 20).close()
    assert budget_of(root) == 64 << 20
    LlamaDiskCache(root).close()
    assert budget_of(root) == 64 << 20, "nobody has asked for another one"


def budget_of(path: Path) -> int | None:
    repository = open_root(path)
    try:
        return repository.capacity_bytes
    finally:
        close_root(repository)


@pytest.mark.parametrize("capacity", [1000, -1, 1.5, "2 GiB"])
def test_a_budget_that_is_none(capacity: Any, root: Path) -> None:
    with pytest.raises(UsageError, match="capacity_bytes is"):
        LlamaDiskCache(root, capacity)


def test_a_folder_that_cannot_be_used_is_an_empty_cache(dense: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("somebody's")
    with caplog.at_level(logging.WARNING, "kvkeep"):
        cache = LlamaDiskCache(file)
        assert cache.cache_size == 0
        assert PROMPT not in cache
        cache[PROMPT] = state_of(dense, PROMPT)
        with pytest.raises(KeyError, match="Cache is empty"):
            cache[PROMPT]
        llm = load(dense)
        llm.set_cache(cache)
        assert complete(llm, PROMPT)[1] == len(PROMPT)
        cache.close()
    assert "opening the cache folder failed" in caplog.text
    assert file.read_text() == "somebody's"


def test_closed_it_finds_nothing_and_stores_nothing(dense: str, root: Path) -> None:
    cache = LlamaDiskCache(root)
    cache[PROMPT] = state = state_of(dense, PROMPT)
    llm = load(dense)
    llm.set_cache(cache)
    complete(llm, PROMPT)
    assert cache.flush()
    cache.close()
    cache.close()
    assert PROMPT not in cache
    cache[OTHER] = state
    assert cache.cache_size == 0
    with pytest.raises(KeyError):
        cache[PROMPT]
