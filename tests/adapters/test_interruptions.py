"""Whatever breaks off a generation: right logits afterwards, nothing wrong ever saved, and what was decoded is kept."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp._internals import LlamaBatch
from llamas import first_logits, forget, generate, load, logits, n_decoded, random_tokens
from restart import in_new_process, run_child

from kvkeep.cache import Attached, Source, attach

PROMPT = random_tokens(150)
OTHER = random_tokens(120, seed=7)


@pytest.fixture
def llm(dense: str) -> Any:
    return load(dense, n_batch=32)


@pytest.fixture
def keep(llm: Any, root: Path) -> Iterator[Attached]:
    with attach(llm, root, break_even=False) as handle:
        yield handle


def cold_logits(model: str, prompt: list[int], **options: Any) -> Any:
    return first_logits(load(model, n_batch=32, **options), prompt)


def assert_right(llm: Any, model: str, *prompts: list[int]) -> None:
    """Each prompt, one after the other, gives its cold logits."""
    for prompt in prompts:
        np.testing.assert_allclose(first_logits(llm, prompt), cold_logits(model, prompt), atol=2e-3)


def stored_length(keep: Attached, tokens: list[int]) -> int:
    keep.flush()
    cache = keep._session.cache
    assert cache is not None
    return cache.match(tokens).length


class Stop(Exception):
    """What a test throws in."""


def stop_in_decode(llm: Any, monkeypatch: pytest.MonkeyPatch, after: int, error: type[BaseException], *, late: bool) -> None:
    """Let `after` batches through; then raise before the decode, or after it: memory is then ahead of n_tokens."""
    context = llm._ctx
    decode = context.decode
    calls = [0]

    def interrupted(batch: Any) -> None:
        calls[0] += 1
        if calls[0] <= after:
            decode(batch)
            return
        monkeypatch.undo()
        if late:
            decode(batch)
        raise error

    monkeypatch.setattr(context, "decode", interrupted)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("late", [False, True])
def test_a_stop_in_the_middle_of_eval(
    llm: Any, keep: Attached, dense: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], late: bool
) -> None:
    stop_in_decode(llm, monkeypatch, 2, error, late=late)
    with pytest.raises(error):
        generate(llm, PROMPT, 1)
    assert llm.n_tokens == 64
    assert stored_length(keep, PROMPT) == 64
    assert_right(llm, dense, PROMPT, OTHER)
    forget(llm)
    assert_right(llm, dense, PROMPT)


def test_a_closed_stream_keeps_what_was_decoded(llm: Any, keep: Attached) -> None:
    stream = llm.generate(PROMPT, temp=0.0)
    tokens = [next(stream) for _ in range(3)]
    stream.close()
    assert stored_length(keep, PROMPT + tokens) == len(PROMPT) + 2


def test_a_consumer_that_raises_keeps_what_was_decoded(llm: Any, keep: Attached) -> None:
    tokens: list[int] = []

    def consume() -> None:
        for token in llm.generate(PROMPT, temp=0.0):
            tokens.append(token)
            if len(tokens) == 4:
                raise Stop

    with pytest.raises(Stop):
        consume()
    gc.collect()
    assert stored_length(keep, PROMPT + tokens) == len(PROMPT) + 3


def test_a_chat_stream_that_is_closed_early_is_warm_again(dense: str, root: Path) -> None:
    messages = [{"role": "user", "content": "please tell me a long story"}]
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        stream = llm.create_chat_completion(messages=messages, stream=True, max_tokens=20, temperature=0.0)
        for _ in range(4):
            next(stream)
        stream.close()
        assert keep.stats().errors == {}
    again = load(dense)
    with attach(again, root, break_even=False) as keep:
        again.create_chat_completion(messages=messages, max_tokens=2, temperature=0.0)
        assert keep.last is not None
        assert keep.last.decoded == 1


def test_a_stream_that_is_never_closed_is_saved_by_the_next_prompt(llm: Any, keep: Attached, dense: str) -> None:
    held = llm.generate(PROMPT, temp=0.0)
    tokens = [next(held), next(held)]
    assert_right(llm, dense, OTHER)
    assert stored_length(keep, PROMPT + tokens) == len(PROMPT) + 1
    held.close()
    assert_right(llm, dense, OTHER, PROMPT)


def test_a_stream_that_is_closed_late_saves_nothing_of_another(llm: Any, keep: Attached, dense: str) -> None:
    held = llm.generate(PROMPT, temp=0.0)
    next(held)
    second = llm.generate(OTHER, temp=0.0)
    next(second)
    held.close()
    next(second)
    second.close()
    assert stored_length(keep, PROMPT) == len(PROMPT)
    assert_right(llm, dense, PROMPT, OTHER)


def test_logits_all_restores_nothing_and_scores_every_token(dense: str, root: Path) -> None:
    text = "abcdefgh " * 8
    filler = load(dense)
    with attach(filler, root, break_even=False):
        generate(filler, filler.tokenize(text.encode()), 1)
    llm = load(dense, logits_all=True)
    control = load(dense, logits_all=True)
    with attach(llm, root, break_even=False) as keep:
        options = {"max_tokens": 2, "temperature": 0.0, "logprobs": 2, "echo": True}
        found = llm.create_completion(text, **options)["choices"][0]
        assert keep.last is not None
        assert (keep.last.length, keep.last.reason.value) == (0, "logits of all tokens wanted")
    cold = control.create_completion(text, **options)["choices"][0]
    assert found["text"] == cold["text"]
    assert found["logprobs"]["token_logprobs"][1:] == pytest.approx(cold["logprobs"]["token_logprobs"][1:], abs=1e-3)


def test_a_handler_that_resets_and_calls_eval_itself(llm: Any, keep: Attached, dense: str) -> None:
    """As the multimodal chat handlers do with text: reset, clear, eval, then a completion of what was decoded."""

    def handler() -> Any:
        llm.reset()
        llm._ctx.kv_cache_clear()
        llm.eval(PROMPT)
        return first_logits(llm, llm.input_ids[: llm.n_tokens].tolist())

    np.testing.assert_allclose(handler(), cold_logits(dense, PROMPT), atol=2e-3)
    keep.flush()
    before = n_decoded(llm)
    np.testing.assert_allclose(handler(), cold_logits(dense, PROMPT), atol=2e-3)
    assert n_decoded(llm) - before == 1
    assert keep.last is not None
    assert (keep.last.source, keep.last.decoded) == (Source.DISK, 1)


def decode_behind_the_back(llm: Any, tokens: list[int], at: int) -> None:
    """What an image does: positions filled through the C API, `n_tokens` moved on, `input_ids` left stale."""
    batch = LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1, verbose=False)
    batch.set_batch(batch=tokens, n_past=at, logits_all=False)
    assert llama_cpp.llama_decode(llm.ctx, batch.batch) == 0
    batch.close()
    llm.n_tokens = at + len(tokens)


def image_chat(llm: Any, image: list[int]) -> Any:
    """Text, image, text, completion: logits behind it."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    llm.eval(PROMPT[:20])
    decode_behind_the_back(llm, image, 20)
    llm.eval(PROMPT[50:80])
    return first_logits(llm, llm.input_ids[: llm.n_tokens].tolist())


def test_positions_of_an_image_are_neither_stored_nor_wiped(llm: Any, keep: Attached, dense: str) -> None:
    first_logits(llm, PROMPT)  # leaves its tokens in input_ids, where the image's positions will be
    image = random_tokens(30, seed=5)
    control = load(dense, n_batch=32)
    first_logits(control, PROMPT)
    np.testing.assert_allclose(image_chat(llm, image), image_chat(control, image), atol=2e-3)
    # Stale numbers at the image's positions read like this, and must not be found.
    looks_like = PROMPT[:50] + PROMPT[50:80]
    keep.flush()
    assert keep.stats().errors == {}
    assert stored_length(keep, looks_like) == 80, "only the text chat before the image may be stored"
    assert_right(llm, dense, looks_like, PROMPT)


def test_text_behind_an_image_does_not_go_on_from_it(llm: Any, keep: Attached, dense: str) -> None:
    first_logits(llm, PROMPT)
    image_chat(llm, random_tokens(30, seed=5))
    assert_right(llm, dense, PROMPT[:100])


def test_a_state_loaded_by_hand_is_gone_on_from_and_not_saved(llm: Any, keep: Attached, dense: str) -> None:
    other = load(dense, n_batch=32)
    other.eval(OTHER)
    llm.load_state(other.save_state())
    before = n_decoded(llm)
    found = first_logits(llm, OTHER + PROMPT[:5])
    assert n_decoded(llm) - before == 5
    np.testing.assert_allclose(found, cold_logits(dense, OTHER + PROMPT[:5]), atol=2e-3)
    assert stored_length(keep, OTHER) == 0


def test_a_refused_load_state_leaves_a_clean_context(llm: Any, keep: Attached, dense: str) -> None:
    other = load(dense, n_batch=32, type_k=8)
    other.eval(OTHER)
    with pytest.raises(RuntimeError):
        llm.load_state(other.save_state())
    assert llm.n_tokens == 0
    assert_right(llm, dense, OTHER, PROMPT)


def test_a_shifted_context_is_not_saved(llm: Any, keep: Attached, dense: str) -> None:
    """Context shift by hand: the tokens' keys are those of other positions now."""
    llm.eval(PROMPT)
    keep.flush()
    llm._ctx.kv_cache_seq_rm(-1, 10, 60)
    llm._ctx.kv_cache_seq_shift(0, 60, -1, -50)
    llm.input_ids[10:100] = PROMPT[60:150]
    llm.n_tokens = 100
    llm.eval([5, 6, 7])
    shifted = PROMPT[:10] + PROMPT[60:150] + [5, 6, 7]
    assert stored_length(keep, shifted) == 10


def test_a_shift_of_which_input_ids_know_nothing_is_not_saved(llm: Any, keep: Attached, dense: str) -> None:
    llm.eval(PROMPT)
    llm._ctx.kv_cache_seq_rm(-1, 16, 66)
    llm._ctx.kv_cache_seq_shift(0, 66, -1, -50)
    llm.n_tokens = 100
    llm.eval([5, 6, 7])
    assert stored_length(keep, [*PROMPT[:100], 5, 6, 7]) == 0
    assert_right(llm, dense, OTHER, [*PROMPT[:100], 5, 6, 7])


def test_a_hole_at_the_beginning_is_not_gone_on_from(llm: Any, keep: Attached, dense: str) -> None:
    llm.eval(PROMPT)
    llm._ctx.kv_cache_clear()
    stream = llm.generate([5, 6, 7], temp=0.0, reset=False)
    next(stream)
    stream.close()
    assert_right(llm, dense, [*PROMPT, 5, 6, 7, 8])


def test_an_emptied_memory_is_noticed(llm: Any, keep: Attached, dense: str) -> None:
    first_logits(llm, PROMPT)
    llm._ctx.kv_cache_clear()
    assert_right(llm, dense, PROMPT, OTHER)


def test_reset_false_continues_as_it_is(llm: Any, keep: Attached) -> None:
    control = load(llm.model_path, n_batch=32)
    for one in (llm, control):
        one.eval(PROMPT)
        stream = one.generate(OTHER, temp=0.0, reset=False)
        next(stream)
        stream.close()
    assert np.array_equal(logits(llm), logits(control))
    assert stored_length(keep, PROMPT + OTHER) == len(PROMPT) + len(OTHER)


def test_embeddings_between_two_chats(dense: str, root: Path) -> None:
    llm = load(dense, embedding=True, n_batch=256)
    with attach(llm, root, break_even=False) as keep:
        chat = [{"role": "user", "content": "hello there"}]
        first = llm.create_chat_completion(messages=chat, max_tokens=6, temperature=0.0)
        llm.embed("something else")
        second = llm.create_chat_completion(messages=chat, max_tokens=6, temperature=0.0)
        assert first["choices"] == second["choices"]
        assert keep.stats().errors == {}


@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_a_secret_of_one_chat_never_shows_in_the_next(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    llm = load(model, n_batch=32, swa_full=False)
    with attach(llm, root, break_even=False):
        first_logits(llm, PROMPT + OTHER + PROMPT)
        for prompt in (PROMPT[:100], OTHER, PROMPT + OTHER[:50]):
            found = first_logits(llm, prompt)
            np.testing.assert_allclose(found, cold_logits(model, prompt, swa_full=False), atol=2e-2)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("batches", [4, 5])
def test_the_same_prompt_again_after_a_stop(
    llm: Any, keep: Attached, dense: str, monkeypatch: pytest.MonkeyPatch, batches: int, late: bool
) -> None:
    """Stopped in the last batch of the prompt, or in the decode of the first answer token: its logits are those of no token.

    "Regenerate" then finds a context that looks complete.
    """
    stop_in_decode(llm, monkeypatch, batches, KeyboardInterrupt, late=late)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, PROMPT, 3)
    assert_right(llm, dense, PROMPT)
    keep.flush()
    forget(llm)
    assert_right(llm, dense, PROMPT, OTHER)


def test_an_image_chat_beside_a_suspended_stream(llm: Any, keep: Attached, dense: str) -> None:
    """The person pressed stop, and the application still holds the stream."""
    held = llm.generate(PROMPT, temp=0.0)
    next(held)
    image = random_tokens(30, seed=5)
    control = load(dense, n_batch=32)
    first_logits(control, PROMPT)
    np.testing.assert_allclose(image_chat(llm, image), image_chat(control, image), atol=2e-3)
    held.close()
    assert_right(llm, dense, PROMPT)


def test_what_a_suspended_stream_has_decoded_outlives_a_reset(llm: Any, keep: Attached) -> None:
    held = llm.generate(PROMPT, temp=0.0)
    tokens = [next(held), next(held)]
    llm.reset()
    assert stored_length(keep, PROMPT + tokens) == len(PROMPT) + 1
    held.close()


def test_a_context_that_held_an_image_before_attaching(dense: str, root: Path) -> None:
    llm = load(dense, n_batch=32)
    first_logits(llm, PROMPT)
    image_chat(llm, random_tokens(30, seed=5))
    with attach(llm, root, break_even=False):
        assert_right(llm, dense, PROMPT[:100], PROMPT)


def test_an_interrupt_of_a_restore_waits_for_its_threads(dense: str, root: Path) -> None:
    """Threads that still read from the map when it is unmapped would end the process."""
    child = run_child(["-c", INTERRUPTED_RESTORE, dense, str(root)])
    assert (child.returncode, child.stdout.strip()) == (0, "interrupted, 0 tokens live"), child.stderr[-2000:]


INTERRUPTED_RESTORE = """
import signal, sys, threading, llamas
from kvkeep.cache import attach, restore
model, root = sys.argv[1:]
prompt = llamas.random_tokens(600)
llm = llamas.load(model)
with attach(llm, root, break_even=False):
    llamas.first_logits(llm, prompt)
llm = llamas.load(model)
blob, begun, go_on = restore._Assembly._blob, threading.Event(), threading.Event()
def slow(*args):
    begun.set()
    assert go_on.wait(60)
    return blob(*args)
def interrupt():
    begun.wait(60)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    threading.Timer(1.0, go_on.set).start()
restore._Assembly._blob = lambda self, entry, *more: (blob if entry.start == 0 else slow)(self, entry, *more)
threading.Thread(target=interrupt).start()
try:
    with attach(llm, root, break_even=False):
        llamas.first_logits(llm, prompt)
except KeyboardInterrupt:
    print("interrupted,", llm.n_tokens, "tokens live")
"""


RESTORES = """
import random, signal, sys
from llamas import forget, load, random_tokens
from kvkeep.cache import attach

armed, chance = False, random.Random(int(sys.argv[3]))

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
llm = load(sys.argv[1])
keep = attach(llm, sys.argv[2], break_even=False)
prompt = random_tokens(300)
hits = 0
# The first restore of a process starts its threads: that is where an interrupt must not leave one that nobody wakes.
for _ in range(60):
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 5e-3))
    try:
        armed = True
        keep._session.settle(llm, [*prompt, 7])
    except KeyboardInterrupt:
        armed = False
        hits += 1
    armed = False
    forget(llm)
assert keep._session.settle(llm, [*prompt, 7]).length == 300
keep.close()
print(hits)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_process_whose_restores_were_interrupted_ends(dense: str, root: Path, seed: int) -> None:
    in_new_process(dense, root, [random_tokens(300)])
    child = run_child(["-c", RESTORES, dense, str(root), str(seed)])
    assert child.returncode == 0, child.stderr[-2000:]
    assert int(child.stdout.split()[-1]) > 0
