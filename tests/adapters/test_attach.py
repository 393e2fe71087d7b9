"""The handle of `attach`, and what a model looks like with one attached."""

import gc
import json
import logging
import os
import sqlite3
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from llamas import first_logits, generate, load, n_decoded, random_tokens
from restart import run_child

from kvkeep.cache import Match, PersistentLlamaCache, Reason, Source, attach
from kvkeep.store.errors import StoreClosed, UsageError

PROMPT = random_tokens(200)


def test_the_answer_is_the_same_with_and_without(dense: str, root: Path) -> None:
    control = load(dense)
    llm = load(dense)
    messages = [{"role": "system", "content": "be brief " * 20}, {"role": "user", "content": "what is a lighthouse"}]
    with attach(llm, root, break_even=False):
        for _ in range(3):
            found = llm.create_chat_completion(messages=messages, max_tokens=10, temperature=0.0)
            cold = control.create_chat_completion(messages=messages, max_tokens=10, temperature=0.0)
            assert found["choices"] == cold["choices"]
            assert found["usage"] == cold["usage"]
            messages += [dict(found["choices"][0]["message"]), {"role": "user", "content": "and then"}]


def test_a_seed_samples_the_same_with_and_without(dense: str, root: Path) -> None:
    """Seeds are neither saved nor restored: every restored chat would sample alike."""
    options = {"max_tokens": 12, "temperature": 1.0}
    texts = []
    for seed in (1, 2, 1):
        control = load(dense).create_completion("hello there", seed=seed, **options)
        llm = load(dense)
        with attach(llm, root, break_even=False):
            found = llm.create_completion("hello there", seed=seed, **options)
        assert found["choices"] == control["choices"]
        texts.append(found["choices"][0]["text"])
    assert texts[0] == texts[2] != texts[1]


def test_repeat_penalty_counts_the_restored_tokens(dense: str, root: Path) -> None:
    text = "abcabcabc " * 20
    options = {"max_tokens": 8, "temperature": 0.0, "repeat_penalty": 1.5}
    cold = load(dense).create_completion(text, **options)
    for _ in range(2):
        llm = load(dense)
        with attach(llm, root, break_even=False):
            assert llm.create_completion(text, **options)["choices"] == cold["choices"]


def test_last_says_what_was_reused_and_why_not_more(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        assert keep.last is None
        first_logits(llm, PROMPT)
        assert keep.last == Match(length=0, prompt_tokens=200, reason=Reason.EMPTY)
        first_logits(llm, [*PROMPT[:150], 5, 6])
        assert keep.last == Match(length=150, prompt_tokens=152, source=Source.LIVE)
        assert (keep.last.decoded, str(keep.last)) == (2, "150 of 152 tokens from live")
        keep.flush()
        first_logits(llm, [9, 8, 7])
        assert keep.last.reason is Reason.NO_COMMON_PREFIX
        first_logits(llm, PROMPT)
        assert (keep.last.source, keep.last.length, keep.last.reason) == (Source.DISK, 199, Reason.FOUND)
        assert keep.last.seconds > 0
        assert keep.last.state_bytes > 199 * 768


def test_the_break_even_decodes_what_is_quicker_to_decode(dense: str, root: Path) -> None:
    """Rates are set, not measured: nothing here depends on how fast this machine is."""
    llm = load(dense)
    with attach(llm, root) as keep:
        first_logits(llm, PROMPT)
        first_logits(llm, [9, 8, 7])
        keep.flush()
        rates = keep._session.rates
        rates.prefill_rate, rates.restore_rate = 1e9, 1e6
        first_logits(llm, PROMPT)
        assert keep.last is not None
        assert keep.last.reason is Reason.BELOW_BREAK_EVEN
        assert "decoding 199 tokens" in keep.last.detail
        first_logits(llm, [9, 8, 7])
        rates.prefill_rate, rates.restore_rate = 1.0, 1e9
        first_logits(llm, PROMPT)
        assert keep.last.source is Source.DISK


def test_rates_are_measured_and_survive_a_restart(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root) as keep:
        first_logits(llm, PROMPT)
        keep.flush()
        measured = keep._session.rates.prefill_rate
        assert measured is not None
    again = load(dense)
    with attach(again, root) as keep:
        assert keep._session.rates.prefill_rate == measured


def test_stats_add_up(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
        first_logits(llm, [*PROMPT[:100], 3, 4])
        first_logits(llm, [9, 8, 7])
        keep.flush()
        first_logits(llm, PROMPT)
        stats = keep.stats()
        assert (stats.requests, stats.hits, stats.prompt_tokens) == (4, 1, 200 + 102 + 3 + 200)
        assert stats.restored_tokens + stats.live_tokens + stats.decoded_tokens == stats.prompt_tokens
        assert (stats.restored_tokens, stats.live_tokens) == (199, 100)
        assert stats.decoded_tokens == n_decoded(llm)
        assert stats.saves == 3
        assert stats.written_bytes > 0
        assert (stats.dropped, stats.quarantined, dict(stats.errors)) == (0, 0, {})
        stats.requests = 99
        assert keep.stats().requests == 4


def test_restoring_counts_as_use_of_the_model(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False):
        first_logits(llm, PROMPT)
    with sqlite3.connect(root / "index.sqlite3") as connection:
        connection.execute("UPDATE namespace SET used = 1")
    connection.close()
    llm = load(dense)
    with attach(llm, root, break_even=False):
        first_logits(llm, PROMPT)
    with sqlite3.connect(root / "index.sqlite3") as connection:
        assert connection.execute("SELECT used > 1 FROM namespace").fetchall() == [(1,)]
        assert connection.execute("SELECT hits FROM node").fetchall() == [(1,)] * 4
    connection.close()


def test_an_unchanged_prompt_writes_nothing(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
        keep.flush()
        before = keep.stats().written_bytes
        for _ in range(3):
            first_logits(llm, PROMPT)
            keep.flush()
        assert (keep.stats().saves, keep.stats().written_bytes) == (1, before)


def test_detach_leaves_the_model_as_it_was(dense: str, root: Path) -> None:
    llm = load(dense)
    before = dict(vars(llm))
    keep = attach(llm, root, break_even=False)
    assert llm.generate.__name__ != type(llm).generate.__name__
    keep.detach()
    keep.detach()
    after = {name: value for name, value in vars(llm).items() if name != "_kvkeep"}
    assert after.keys() == before.keys()
    generate(llm, PROMPT, 1)
    assert keep.last is None
    keep.close()


def test_wrappers_of_others_are_called_and_left_alone(dense: str, root: Path) -> None:
    llm = load(dense)
    seen = []
    inner = llm.eval

    def theirs(tokens: list[int]) -> None:
        seen.append(len(tokens))
        inner(tokens)

    llm.eval = theirs
    keep = attach(llm, root, break_even=False)
    first_logits(llm, PROMPT)
    assert sum(seen) == len(PROMPT)
    keep.close()
    assert llm.eval is theirs


def test_a_second_attachment_is_refused_and_changes_nothing(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        for make in (attach, PersistentLlamaCache.for_model):
            with pytest.raises(UsageError, match="already has a kvkeep cache"):
                make(llm, root)
        first_logits(llm, PROMPT)
        assert keep.last is not None
    attach(llm, root).close()


def test_after_close_the_model_works_on_without(dense: str, root: Path) -> None:
    llm = load(dense)
    keep = attach(llm, root, break_even=False)
    first_logits(llm, PROMPT)
    keep.close()
    keep.close()
    assert keep.path is None
    np.testing.assert_array_equal(first_logits(llm, PROMPT), first_logits(load(dense), PROMPT))
    assert keep.flush()


def test_a_closed_model_is_flushed_without_touching_it(dense: str, root: Path) -> None:
    llm = load(dense)
    keep = attach(llm, root, break_even=False)
    first_logits(llm, PROMPT)
    llm.close()
    keep.close()
    assert keep.stats().errors == {}


def test_the_cache_does_not_keep_a_model_alive(dense: str, root: Path) -> None:
    llm = load(dense)
    del llm._ctx.decode  # the counter of the tests is a cycle of its own
    keep = attach(llm, root, break_even=False)
    generate(llm, PROMPT, 2)
    gone = weakref.ref(llm)
    gc.disable()
    try:
        del llm
        assert gone() is None, "it must go with its last reference, not when cycles are collected"
    finally:
        gc.enable()
    again = load(dense)
    first = keep
    with attach(again, root, break_even=False) as keep:
        assert first.path is None
        first_logits(again, PROMPT)
        assert keep.last is not None
        assert keep.last.decoded == 1, "what the model held was stored when it went"


def test_two_models_share_one_folder(dense: str, other_dense: str, root: Path) -> None:
    one, two = load(dense), load(other_dense)
    with attach(one, root, break_even=False) as first, attach(two, root, break_even=False) as second:
        first_logits(one, PROMPT)
        first.flush()
        np.testing.assert_array_equal(first_logits(two, PROMPT), first_logits(load(other_dense), PROMPT))
        assert second.last is not None
        assert second.last.reason is Reason.OTHER_NAMESPACE
        assert first._session.repository is second._session.repository


def test_the_default_folder_is_that_of_the_environment(dense: str) -> None:
    llm = load(dense)
    with attach(llm) as keep:
        assert keep.path == Path(os.environ["KVKEEP_PATH"]).resolve()


def test_a_budget_is_kept(dense: str, root: Path) -> None:
    """40 chats of 600 tokens have 18 MB; the blobs of a 16 MiB folder stay within their share, and the newest is there."""
    llm = load(dense)
    with attach(llm, root, break_even=False, capacity_bytes=16 << 20) as keep:
        repository = keep._session.repository
        assert repository is not None
        for seed in range(40):
            first_logits(llm, random_tokens(600, seed=seed))
            keep.flush()
            assert repository.disk_bytes <= 16 << 20
        assert keep.stats().evicted > 0
        assert keep.stats().errors == {}
        first_logits(llm, [9, 8, 7])
        first_logits(llm, random_tokens(600, seed=38))
        assert keep.last is not None
        assert keep.last.decoded == 1
        first_logits(llm, random_tokens(600, seed=0))
        assert keep.last.reason is Reason.NO_COMMON_PREFIX


def test_a_failing_store_is_logged_once_and_counted(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvkeep.store.errors import DiskFull
    from kvkeep.store.writing import Writing

    def full(*args: object, **kwargs: object) -> None:
        raise DiskFull("no room")

    monkeypatch.setattr(Writing, "add", full)
    llm = load(dense)
    with caplog.at_level(logging.WARNING, "kvkeep"), attach(llm, root, break_even=False) as keep:
        for seed in range(3):
            first_logits(llm, random_tokens(100, seed=seed))
            keep.flush()
        assert keep.stats().errors["DiskFull"] >= 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]


AT_EXIT = """
import sys, llamas
from kvkeep.cache import attach
llm = llamas.load(sys.argv[1])
keep = attach(llm, sys.argv[2], break_even=False)
stream = llm.generate(llamas.random_tokens(200), temp=0.0)
next(stream)
{end}
"""

ENDS = {
    "falls off the end": "stream.close()",
    "with an open stream": "",
    "sys.exit": "stream.close(); sys.exit(0)",
    "exception": "stream.close(); raise ValueError('the application has a bug')",
    "without the handle": "stream.close(); del keep",
    "interrupt": "stream.close(); import signal; signal.raise_signal(signal.SIGINT)",
}


@pytest.mark.parametrize("end", ENDS)
def test_what_waits_is_stored_when_the_interpreter_ends(dense: str, root: Path, end: str) -> None:
    child = run_child(["-c", AT_EXIT.format(end=ENDS[end]), dense, str(root)])
    assert "kvkeep" not in child.stderr.replace("from kvkeep", "")
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
        assert keep.last is not None
        assert keep.last.decoded == 1, child.stderr


def test_a_thread_that_saves_while_another_reads(dense: str, root: Path) -> None:
    """Two models in two threads on one folder: the answers are the cold ones."""
    expected = {seed: first_logits(load(dense), random_tokens(150, seed=seed)) for seed in range(4)}
    wrong: list[str] = []

    def work() -> None:
        llm = load(dense)
        with attach(llm, root, break_even=False) as keep:
            for seed in [0, 1, 2, 3] * 2:
                if np.abs(first_logits(llm, random_tokens(150, seed=seed)) - expected[seed]).max() > 2e-3:
                    wrong.append(f"seed {seed}: {keep.last}")
                keep.flush()
            wrong.extend(keep.stats().errors)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_importing_the_cache_is_cheap() -> None:
    code = "import json, sys, kvkeep.cache; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(run_child(["-c", code]).stdout)
    assert not {"llama_cpp", "alembic", "sqlalchemy", "rich", "click"} & set(loaded), sys.version


def test_a_default_budget_replaces_no_wish(dense: str, root: Path) -> None:
    first = load(dense)
    attach(first, root, capacity_bytes=64 << 20).close()
    attach(first, root).close()
    with attach(first, root) as keep:
        assert keep._session.repository is not None
        assert keep._session.repository.capacity_bytes == 64 << 20


def test_a_flush_with_a_timeout_does_not_wait_for_a_large_models_hash(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvkeep.cache import fingerprint

    go_on = threading.Event()
    real = fingerprint.digest_file

    def slow(path: str, **options: object) -> bytes:
        assert go_on.wait(60)
        return real(path, **options)

    monkeypatch.setattr(fingerprint, "digest_file", slow)
    monkeypatch.setattr(fingerprint, "HASH_AT_ONCE_BYTES", 0)
    monkeypatch.setattr("kvkeep.cache.adapters.backing.IDENTIFY_SECONDS", 0.0)
    llm = load(dense)
    keep = attach(llm, root, break_even=False)
    first_logits(llm, PROMPT)
    assert keep.flush(timeout=0.01) is False
    threading.Timer(0.2, go_on.set).start()
    keep.close()
    assert keep.stats().dropped == 1, "what couldn't be stored is counted"


def test_close_beside_a_restore_in_another_thread(dense: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map must not go while somebody reads from it."""
    from kvkeep.cache import restore

    llm = load(dense)
    with attach(llm, root, break_even=False):
        first_logits(llm, PROMPT)
    begun, go_on = threading.Event(), threading.Event()
    real = restore._Assembly._blob

    def slow(*args: object) -> object:
        begun.set()
        assert go_on.wait(60)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(restore._Assembly, "_blob", slow)
    keep = attach(llm, root, break_even=False)
    llm.reset()
    asking = threading.Thread(target=lambda: first_logits(llm, PROMPT))
    asking.start()
    assert begun.wait(60)
    closing = threading.Thread(target=keep.close)
    closing.start()
    go_on.set()
    asking.join()
    closing.join()
    assert keep.stats().errors == {}


def test_two_processes_with_different_budgets(dense: str, root: Path) -> None:
    """The one with the smaller budget goes on when the other has grown the map beyond its own."""
    llm = load(dense)
    with attach(llm, root, break_even=False, capacity_bytes=16 << 20) as keep:
        first_logits(llm, PROMPT)
        keep.flush()
        child = run_child(["-c", LARGER_BUDGET, dense, str(root)])
        assert child.returncode == 0, child.stderr
        first_logits(llm, [5, 6, 7])
        first_logits(llm, PROMPT)
        keep.flush()
        assert keep.last is not None
        assert keep.last.source is Source.DISK
        assert keep.stats().errors == {}


LARGER_BUDGET = """
import sys, llamas
from kvkeep.cache import attach
llm = llamas.load(sys.argv[1])
with attach(llm, sys.argv[2], break_even=False, capacity_bytes=256 << 20) as keep:
    for seed in range(30):
        llamas.first_logits(llm, llamas.random_tokens(900, seed=seed + 1))
        keep.flush()
    assert keep._session.repository.blobs.used_bytes > 16 << 20
    assert not keep.stats().errors
"""


def test_a_state_that_can_never_fit_is_not_copied_again_and_again(
    opaque: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvkeep.cache.adapters.context import LiveContext
    from kvkeep.cache.prefix_cache import PrefixCache

    copies = []
    real = LiveContext.copy_state

    def counted(self: LiveContext) -> object:
        copies.append(1)
        return real(self)

    monkeypatch.setattr(LiveContext, "copy_state", counted)
    monkeypatch.setattr(PrefixCache, "largest_bytes", 1000)
    llm = load(opaque)
    with attach(llm, root, break_even=False) as keep:
        for _ in range(3):
            first_logits(llm, PROMPT)
            keep.flush()
        assert copies == []
        assert keep.stats().dropped >= 1
        assert keep.stats().errors == {}


def test_every_position_of_a_hybrid_that_was_kept_is_stored(hybrid: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later state doesn't make an earlier one superfluous where each holds for one position only."""
    from kvkeep.cache.writer import Writer

    llm = load(hybrid)
    keep = attach(llm, root, break_even=False)
    cache = keep._session.cache
    assert cache is not None
    monkeypatch.setattr(Writer, "_is_ready", lambda self, at_end: False)  # nothing is stored yet
    first_logits(llm, PROMPT)
    first_logits(llm, [*PROMPT, 5, 6, 7])
    monkeypatch.undo()
    keep.close()
    llm = load(hybrid)
    with attach(llm, root, break_even=False) as keep:
        assert keep._session.cache is not None
        assert keep._session.cache.match([*PROMPT, 9]).length == len(PROMPT)
        assert keep._session.cache.match([*PROMPT, 5, 6, 7]).length == len(PROMPT) + 3


def test_a_forked_child_ends_without_waiting(dense: str, root: Path) -> None:
    """It has the parent's locks as they were, and none of its threads. What it holds is not stored."""
    child = run_child(["-c", FORKED, dense, str(root)])
    assert (child.returncode, child.stdout.split()) == (0, ["0"] * 8), child.stderr[-2000:]


FORKED = """
import os, sys, warnings, llamas
from kvkeep.cache import attach
warnings.simplefilter("ignore")
llm = llamas.load(sys.argv[1])
keep = attach(llm, sys.argv[2], break_even=False)
for seed in range(8):
    llamas.first_logits(llm, llamas.random_tokens(300, seed=seed))
    child = os.fork()
    if child == 0:
        sys.exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def test_a_wrong_argument_of_generate_is_an_error_of_the_call(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root), pytest.raises(TypeError, match="bogus"):
        llm.generate(PROMPT, bogus=1)


def test_a_closed_model_says_so_once(dense: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = load(dense)
    keep = attach(llm, root, break_even=False)
    first_logits(llm, PROMPT)
    llm.close()
    stream = llm.generate(PROMPT)
    with pytest.raises(StoreClosed, match="the model is closed"):
        next(stream)
    keep.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
