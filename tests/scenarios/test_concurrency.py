"""Several threads, several processes, and a writer that works behind the one who asks."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
from commands import kvkeep
from llamas import first_logits, generate, load, random_tokens
from restart import in_new_process

from kvkeep.cache import PersistentLlamaCache, attach
from kvkeep.cache.adapters.context import LiveContext
from kvkeep.store import steps
from kvkeep.store.steps import Step

PROMPT = random_tokens(200)
OTHER = random_tokens(150, seed=1)


@pytest.fixture
def on_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Step], None]], None]:
    """Have something called at every named step of the store, in the thread that does it."""
    return lambda called: monkeypatch.setattr(steps, "on_step", called)


def stored_whole(keep: Any, *prompts: Sequence[int]) -> bool:
    cache = keep._session.usable_cache()
    return all(cache.match(prompt).length == len(prompt) for prompt in prompts)


# -- C8: behind the caller ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "opaque"])
def test_c8_the_caller_makes_one_copy_and_everything_else_is_done_behind(
    kind: str, root: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, on_step: Any
) -> None:
    """Saving took minutes in which nothing else could be done (text-generation-webui #4175, #5480), and made short chats three
    times slower (llama-cpp-python #1293).
    """
    done: list[tuple[Step, int]] = []
    is_stored = threading.Event()

    def reached(step: Step) -> None:
        done.append((step, threading.get_ident()))
        if step is Step.SAVE_DONE:
            is_stored.set()

    on_step(reached)
    copies: list[int] = []
    real = LiveContext.copy_state
    monkeypatch.setattr(LiveContext, "copy_state", lambda self: copies.append(threading.get_ident()) or real(self))
    llm = load(request.getfixturevalue(kind))
    with attach(llm, root, break_even=False) as keep:
        keep.flush()
        done.clear()
        is_stored.clear()
        stream = llm.generate(PROMPT, temp=0.0)
        tokens = [next(stream) for _ in range(4)]
        assert copies == []
        stream.close()
        mine = threading.get_ident()
        assert copies == [mine]
        assert is_stored.wait(60)
        assert {Step.SAVE_LOCKED, Step.SAVE_BLOBS, Step.SAVE_ROWS} <= {step for step, _ in done}
        assert mine not in {thread for _, thread in done}
        # The same again has nothing to save, and copies nothing.
        keep.flush()
        copies.clear()
        assert generate(llm, PROMPT, 4) == tokens
        if kind == "dense":
            assert copies == []


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid"])
def test_c8_a_request_in_the_middle_of_a_save_is_answered_and_mixes_nothing(
    kind: str, root: Path, request: pytest.FixtureRequest, on_step: Any
) -> None:
    """People send the next message while the last one is being saved (text-generation-webui #4175, #5480)."""
    model = request.getfixturevalue(kind)
    cold = {name: first_logits(load(model), prompt) for name, prompt in (("a", PROMPT), ("b", OTHER))}
    reached, go_on = threading.Event(), threading.Event()

    def held(step: Step) -> None:
        if step is Step.SAVE_BLOBS and not reached.is_set():
            reached.set()
            assert go_on.wait(60)

    llm = load(model)
    with attach(llm, root, break_even=False) as keep:
        keep.flush()
        on_step(held)
        first_logits(llm, PROMPT)
        assert reached.wait(60), "the save never began"
        # Half of it is on the disk. Another chat, the same one again, and the other way round.
        np.testing.assert_allclose(first_logits(llm, OTHER), cold["b"], atol=2e-3)
        assert keep.last is not None
        np.testing.assert_allclose(first_logits(llm, PROMPT), cold["a"], atol=2e-3)
        np.testing.assert_allclose(first_logits(llm, [*OTHER]), cold["b"], atol=2e-3)
        go_on.set()
        keep.flush()
        assert stored_whole(keep, PROMPT, OTHER)
        assert (keep.stats().errors, keep.stats().dropped) == ({}, 0)
    answers = in_new_process(model, root, [PROMPT, OTHER])
    for answer, expected in zip(answers, cold.values(), strict=True):
        assert answer["decoded"] == 1
        np.testing.assert_allclose(answer["logits"], expected, atol=2e-3)


def test_c8_a_request_may_ask_to_be_left_out(dense: str, root: Path) -> None:
    """Some requests aren't worth a save, or must not be saved (llama-cpp-python PR #594)."""
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        with keep.no_store():
            llm.create_completion(PROMPT, max_tokens=4, temperature=0.0)
        llm.create_completion(OTHER, max_tokens=4, temperature=0.0)
        keep.flush()
        assert keep.stats().saves == 1
        assert keep._session.usable_cache().match(PROMPT).length == 0


# -- E1: processes -----------------------------------------------------------------------------------------------------

WORKER = """
import json, sys
import llamas
from kvkeep.cache import PersistentLlamaCache, attach
model, root, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
found = []
for round in range(2):
    llm = llamas.load(model)
    keep = attach(llm, root, break_even=False)
    for seed in range(4):
        # Everybody asks the same in another order, and something of their own.
        prompt = llamas.random_tokens(150, seed=(seed + number) % 4) + [3 + number]
        found.append([(seed + number) % 4, llamas.first_logits(llm, prompt)[:64].tolist()])
        keep.flush()
    stats = keep.stats()
    keep.close()
    assert not stats.errors or set(stats.errors) == {"StoreLocked"}, stats
    assert keep.last.reason.value != "unavailable", keep.last
    llm.close()
print(json.dumps([found, stats.hits, stats.dropped]))
"""


def started(arguments: list[str]) -> "subprocess.Popen[str]":
    """A Python process that runs beside this one, and finds the modules that tests share."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=children.environment(children.__file__), **pipes)


def test_e1_processes_that_open_save_and_read_one_folder_answer_as_cold(dense: str, root: Path) -> None:
    """Caches that are shared between processes fail to open, or give each other's halves (diskcache #85, #266; gt4py PR #1745).
    More of them for longer: `make stress`.
    """
    workers = [started(["-c", WORKER, dense, str(root), str(number)]) for number in range(3)]
    control = load(dense)
    expected = {}
    hits = 0
    for number, worker in enumerate(workers):
        out, err = worker.communicate(timeout=300)
        assert worker.returncode == 0, err[-4000:]
        assert err.count("WARNING") == 0
        found, own_hits, _ = json.loads(out.splitlines()[-1])
        hits += own_hits
        for seed, logits in found:
            if (seed, number) not in expected:
                expected[seed, number] = first_logits(control, [*random_tokens(150, seed=seed), 3 + number])[:64]
            # Blocks of several processes mix, which are decoded in other batches; another prompt's differ by tens.
            np.testing.assert_allclose(logits, expected[seed, number], atol=5e-2)
    assert hits > 0
    assert np.abs(expected[0, 0] - expected[1, 0]).max() > 5


# -- E2: threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid"])
def test_e2_streams_of_two_threads_on_one_model_store_nothing_wrong(
    kind: str, root: Path, request: pytest.FixtureRequest
) -> None:
    """Two clients of one server: what is restored for the one comes into the middle of the other's answer (llama-cpp-python
    #1367, #471, #1995). Here they take turns from token to token, which llama-cpp-python alone doesn't survive with a hybrid:
    whose context another one has taken ends, and nobody sees, or stores, what isn't his.
    """
    model = request.getfixturevalue(kind)
    llm = load(model)
    turn = threading.Lock()
    failed: list[BaseException] = []

    def client(number: int) -> None:
        try:
            for i in range(4):
                with turn:
                    stream = llm.generate(random_tokens(120, seed=(number + i) % 3), temp=0.0)
                for _ in range(4):
                    with turn:
                        next(stream, None)
                with turn:
                    stream.close()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    with attach(llm, root, break_even=False) as keep:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert keep.stats().errors == {}
    # Whatever was kept of this is right.
    cold = [first_logits(load(model), random_tokens(120, seed=seed)) for seed in range(3)]
    answers = in_new_process(model, root, [random_tokens(120, seed=seed) for seed in range(3)])
    for answer, expected in zip(answers, cold, strict=True):
        np.testing.assert_allclose(answer["logits"], expected, atol=2e-3)
    assert all(answer["length"] > 0 for answer in answers)


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "recurrent"])
def test_e2_a_stream_whose_context_another_prompt_has_taken_ends(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """Without a cache it goes on with the other one's tokens, or the process ends (llama-cpp-python #1367, #1995)."""
    model = request.getfixturevalue(kind)
    cold, answer = first_logits(load(model), OTHER), generate(load(model), OTHER, 6)
    llm = load(model)
    with attach(llm, root, break_even=False) as keep:
        first = llm.generate(PROMPT, temp=0.0)
        next(first)
        second = llm.generate(OTHER, temp=0.0)
        assert next(second) == answer[0]
        assert list(first) == []
        # The second one hasn't noticed.
        assert [next(second) for _ in range(5)] == answer[1:]
        second.close()
        np.testing.assert_allclose(first_logits(llm, OTHER), cold, atol=5e-3)
        keep.flush()
        assert stored_whole(keep, PROMPT, OTHER)


@pytest.mark.parametrize("way", ["warm", "cache[...]"])
def test_e2_so_does_one_whose_context_was_taken_by_hand(way: str, dense: str, root: Path) -> None:
    """Not only another stream takes a context."""
    llm = load(dense)
    cache = PersistentLlamaCache.for_model(llm, root, break_even=False)
    cache.warm(OTHER)
    first = llm.generate(PROMPT, temp=0.0)
    next(first)
    if way == "warm":
        cache.warm(OTHER)
    else:
        cache[OTHER]
    assert list(first) == []
    cache.close()


def test_e2_an_old_stream_that_is_dropped_late_leaves_the_next_cache_s_context_alone(window: str, root: Path) -> None:
    """A closed cache's stream emptied the context of a window model in the middle of another cache's answer."""
    options = {"swa_full": True, "n_ctx": 2048, "n_ubatch": 32}
    prompts = [random_tokens(600), random_tokens(700, seed=9)]
    filling = load(window, **options)
    with attach(filling, root, break_even=False):
        for prompt in prompts:
            first_logits(filling, prompt)
    answer = generate(load(window, **options), [*prompts[1], 5, 6], 12)
    llm = load(window, **options)
    with attach(llm, root, break_even=False):
        old = llm.generate(random_tokens(50, seed=77), temp=0.0)
        next(old)
    with attach(llm, root, break_even=False) as keep:
        stream = llm.generate([*prompts[1], 5, 6], temp=0.0)
        told = [next(stream) for _ in range(4)]
        assert keep._session.lacks_positions(llm)
        old.close()
        assert told + [next(stream) for _ in range(8)] == answer


def test_e2_a_stream_of_a_closed_cache_ends_when_another_cache_s_prompt_takes_the_context(dense: str, root: Path) -> None:
    """Whoever watches the context by then."""
    llm, answer = load(dense), generate(load(dense), OTHER, 4)
    with attach(llm, root, break_even=False):
        old = llm.generate(PROMPT, temp=0.0)
        next(old)
    with attach(llm, root, break_even=False):
        stream = llm.generate(OTHER, temp=0.0)
        assert next(stream) == answer[0]
        assert list(old) == []
        assert [next(stream) for _ in range(3)] == answer[1:]


def test_e2_two_streams_of_the_same_prompt_take_turns_until_one_has_moved_on(dense: str, root: Path) -> None:
    """Both may be at the same token; the one that comes second then finds itself overtaken (llama-cpp-python #1367)."""
    answer = generate(load(dense), PROMPT, 8)
    llm = load(dense)
    with attach(llm, root, break_even=False):
        first, second = llm.generate(PROMPT, temp=0.0), llm.generate(PROMPT, temp=0.0)
        assert (next(first), next(second)) == (answer[0], answer[0])
        # The context stands where the first one has left it.
        assert [next(first) for _ in range(3)] == answer[1:4]
        assert list(second) == []
        assert [next(first) for _ in range(4)] == answer[4:]


def test_e2_a_stream_goes_on_where_the_program_has_put_its_state_back(dense: str, root: Path) -> None:
    """Who puts the context back as it was may go on (llama-cpp-python #1995): here, and without a cache."""
    answer = generate(load(dense), PROMPT, 8)
    llm = load(dense)
    with attach(llm, root, break_even=False):
        stream = llm.generate(PROMPT, temp=0.0)
        tokens = [next(stream) for _ in range(3)]
        state = llm.save_state()
        generate(llm, OTHER, 3)
        llm.load_state(state)
        assert tokens + [next(stream) for _ in range(5)] == answer
        stream.close()


def test_e2_other_threads_may_look_flush_pin_and_clear_at_any_moment(dense: str, root: Path) -> None:
    """What isn't the model's own work needs no lock of the application's (llama-cpp-python #1861, dspy #9640)."""
    llm = load(dense)
    expected = {seed: first_logits(load(dense), random_tokens(150, seed=seed)) for seed in range(3)}
    failed: list[BaseException] = []
    is_over = threading.Event()

    def others() -> None:
        try:
            while not is_over.is_set():
                keep.stats()
                str(keep.last)
                keep.flush(timeout=5)
                keep.pin(random_tokens(150, seed=1)[:64])
                keep.unpin(random_tokens(150, seed=1)[:64])
                keep.clear()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    with attach(llm, root, break_even=False) as keep:
        keep.flush()
        threads = [threading.Thread(target=others) for _ in range(2)]
        for thread in threads:
            thread.start()
        for i in range(12):
            np.testing.assert_allclose(first_logits(llm, random_tokens(150, seed=i % 3)), expected[i % 3], atol=2e-3)
        is_over.set()
        for thread in threads:
            thread.join()
        assert failed == []
        assert keep.stats().errors == {}


# -- E4: files that others have open -----------------------------------------------------------------------------------


def in_use_by_another(path: str | os.PathLike[str], *_: object, **__: object) -> None:
    if not Path(path).exists():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    raise PermissionError(13, "The process cannot access the file because it is being used by another process")


def test_e4_files_that_can_not_be_deleted_or_replaced_now_are_left_for_later(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows a file that somebody has open can be neither deleted nor replaced (cachelib #85, flask-caching #238, mypy
    #3215, pip-audit PR #178). Nothing raises, nothing is lost, and the next one who comes alone removes it.
    """
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)

    with monkeypatch.context() as windows:
        for name in ("unlink", "remove", "rename", "replace", "rmdir"):
            windows.setattr(os, name, in_use_by_another)
        # Deletes a generation of blobs; deletes the marker; saves and restores.
        kvkeep("compact", "--path", root)
        llm = load(dense)
        with attach(llm, root, break_even=False) as keep:
            first_logits(llm, PROMPT)
            assert keep.last is not None
            assert keep.last.decoded == 1
            first_logits(llm, OTHER)
            keep.flush()
            assert stored_whole(keep, PROMPT, OTHER)
            assert keep.stats().errors == {}
    left = sorted(path.name for path in root.glob("blobs-*"))
    assert len(left) == 2
    answers = in_new_process(dense, root, [PROMPT, OTHER])
    assert [answer["decoded"] for answer in answers] == [1, 1]
    assert sorted(path.name for path in root.glob("blobs-*")) == left[1:]


def test_e4_a_damaged_index_that_can_not_be_replaced_costs_the_cache_and_not_the_answer(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one file that is ever put in another's place, while somebody has that open (cachelib #85, cupy PR #9483)."""
    in_new_process(dense, root, [PROMPT])
    index = root / "index.sqlite3"
    index.write_bytes(b"\xff" * index.stat().st_size)
    cold = first_logits(load(dense), PROMPT)
    with monkeypatch.context() as windows:
        windows.setattr(os, "replace", in_use_by_another)
        llm = load(dense)
        with attach(llm, root, break_even=False) as keep:
            np.testing.assert_allclose(first_logits(llm, PROMPT), cold, atol=2e-3)
            assert keep.stats().errors.total() == 1
    # As soon as it can be, it is.
    in_new_process(dense, root, [PROMPT])
    (again,) = in_new_process(dense, root, [PROMPT])
    assert again["decoded"] == 1
