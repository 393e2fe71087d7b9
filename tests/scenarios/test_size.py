"""What a cache folder takes, what is written for it, and what goes when it is full."""

import sqlite3
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import crowd
import entries
import llama_cpp
import models
import numpy as np
import pytest
from commands import kvkeep, kvkeep_json
from llamas import F32, first_logits, generate, load, random_tokens
from restart import in_new_process
from sqlalchemy import event

from kvkeep.cache import LlamaDiskCache, Reason, attach
from kvkeep.cache.adapters.attach import Attached
from kvkeep.cache.adapters.context import LiveContext
from kvkeep.cache.writer import Writer
from kvkeep.store.errors import DailyLimit, DiskFull, UsageError
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.locks import exclusive
from kvkeep.store.opening import WRITER_LOCK
from kvkeep.store.space import DEFAULT_CAPACITY, MIN_CAPACITY, Disk
from kvkeep.store.writing import Writing

MiB = 1 << 20
WIDE = {"type_k": F32, "type_v": F32, "n_ctx": 4096}


@pytest.fixture(scope="module")
def wide(model_folder: Path) -> str:
    """A tiny model with 24 layers: 12 KiB of keys and values a token in f32."""
    return models.build(model_folder / "wide.gguf", replace(models.DENSE, n_layer=24))


@pytest.fixture(scope="module")
def other_wide(model_folder: Path) -> str:
    """The same with other weights."""
    return models.build(model_folder / "other-wide.gguf", replace(models.DENSE, n_layer=24, seed=1, name="other"))


def ask(llm: Any, keep: Attached, prompt: Sequence[int]) -> Any:
    """The logits behind a prompt, once it is stored."""
    found = first_logits(llm, prompt)
    keep.flush()
    return found


def stored_length(keep: Attached, prompt: Sequence[int]) -> int:
    return keep._session.usable_cache().match(prompt).length


def plain_bytes(path: Path) -> int:
    """Bytes of everything that is stored, before compression."""
    return int(kvkeep_json("stats", "--path", path)["totals"]["plain_bytes"])


# -- C1: only the state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [100, 1000, 4000])
def test_c1_a_file_holds_the_state_and_no_logits(dense: str, root: Path, n_tokens: int) -> None:
    """Saved states of a few hundred tokens took gigabytes, because rows of logits were saved along (llama-cpp-python #1303,
    #1542, PR #1296).
    """
    llm = load(dense, n_ctx=4096)
    with attach(llm, root, break_even=False) as keep:
        ask(llm, keep, random_tokens(n_tokens))
        state = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    assert 0.99 < plain_bytes(root) / state < 1.02


def test_c1_not_even_where_every_row_of_logits_is_real(dense: str, root: Path) -> None:
    """With `logits_all` all rows are filled, which is where they were saved first (llama-cpp-python #1303)."""
    llm = load(dense, logits_all=True)
    with attach(llm, root, break_even=False) as keep:
        ask(llm, keep, random_tokens(300))
        state = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    assert plain_bytes(root) / state < 1.02
    assert state < llm.scores[:300].nbytes


def test_c1_nor_where_a_state_with_logits_is_handed_over(dense: str, root: Path) -> None:
    """Code that calls `cache[tokens] = llm.save_state()` hands over the rows of logits (llama-cpp-python #1303)."""
    llm = load(dense)
    tokens = random_tokens(300)
    llm.eval(tokens)
    state = llm.save_state()
    assert state.scores.nbytes > state.llama_state_size
    cache = LlamaDiskCache(str(root))
    cache[tokens] = state
    cache.close()
    assert 0.99 < plain_bytes(root) / state.llama_state_size < 1.02


# -- C3: the limit -----------------------------------------------------------------------------------------------------


def test_c3_the_limit_holds_over_all_models_and_what_was_there_before(wide: str, other_wide: str, root: Path) -> None:
    """Folders grew far beyond their limit: what was there at the start, or belonged to other models, wasn't counted, and a
    smaller limit changed nothing (omlx #2064, #1915, #2115; LMCache #4725).
    """
    root.mkdir()
    foreign = {root / "notes.txt": b"mine", root / "blobs-x" / "data.mdb": b"not a database", root / "blobs-1.old": b"a copy"}
    for path, content in foreign.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content * 100)

    def taken() -> int:
        return crowd.occupied(root) - sum(path.stat().st_blocks * 512 for path in foreign) - 8192

    limit = 24 * MiB
    for model in (wide, other_wide):
        llm = load(model, **WIDE)
        with attach(llm, root, capacity_bytes=limit, break_even=False) as keep:
            for seed in range(6):
                ask(llm, keep, random_tokens(200, seed=seed))
                assert taken() <= limit
            assert keep.stats().evicted > 0 or model == wide
            assert stored_length(keep, random_tokens(200, seed=5)) == 200
    full = taken()
    assert full > MIN_CAPACITY, "not full: the test tests nothing"
    # A smaller limit between two runs; nothing is saved before it holds.
    llm = load(wide, **WIDE)
    with attach(llm, root, capacity_bytes=MIN_CAPACITY, break_even=False) as keep:
        keep.flush()
        assert taken() <= MIN_CAPACITY
        ask(llm, keep, random_tokens(50, seed=9))
        assert taken() <= MIN_CAPACITY
        assert keep.stats().errors == {}
    assert {path: path.read_bytes() for path in foreign} == {path: content * 100 for path, content in foreign.items()}


def test_c3_a_limit_that_is_lowered_beside_a_running_assistant_holds_from_its_next_save_on(wide: str, root: Path) -> None:
    """The command lowers the limit while somebody chats (omlx #2064)."""
    llm = load(wide, **WIDE)
    with attach(llm, root, capacity_bytes=32 * MiB, break_even=False) as keep:
        for seed in range(5):
            ask(llm, keep, random_tokens(400, seed=seed))
        assert crowd.occupied(root) > MIN_CAPACITY
        kvkeep("budget", "--path", root, "--capacity", "16MiB")
        ask(llm, keep, random_tokens(50, seed=9))
        assert crowd.occupied(root) <= MIN_CAPACITY


# -- C4: larger than everything ----------------------------------------------------------------------------------------


def test_c4_what_is_twice_as_large_as_the_limit_never_takes_more_than_it(wide: str, root: Path) -> None:
    """A limit that is looked at after the allocation is none (llama.cpp #22629, PR #23561; ik_llama.cpp #2320). Of a chat that
    can't fit a beginning is kept; it is good, and it is found.
    """
    prompt = random_tokens(1620)
    llm = load(wide, **WIDE)
    with attach(llm, root, capacity_bytes=MIN_CAPACITY, break_even=False) as keep:
        found = ask(llm, keep, prompt)
        size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
        assert size > max(MIN_CAPACITY, 2 * keep._session.usable_cache().largest_bytes)
        assert crowd.occupied(root) <= MIN_CAPACITY
        stats = keep.stats()
        assert stats.errors["TooLarge"] == 1
    llm = load(wide, **WIDE)
    with attach(llm, root, break_even=False) as keep:
        again = first_logits(llm, prompt)
        assert keep.last is not None
        assert 0 < keep.last.length < len(prompt)
    np.testing.assert_allclose(again, found, atol=5e-3)


def test_c4_a_state_that_can_not_be_cut_and_can_not_fit_is_not_even_copied(
    opaque: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak came from what was thrown away a moment later (llama.cpp #22629, #21690)."""
    copies: list[int] = []
    real = LiveContext.copy_state
    monkeypatch.setattr(LiveContext, "copy_state", lambda self: copies.append(1) or real(self))
    llm = load(opaque, n_ctx=8192, n_batch=512)
    with attach(llm, root, capacity_bytes=MIN_CAPACITY, break_even=False) as keep:
        generate(llm, random_tokens(64), 2)
        keep.flush()
        assert len(copies) == 1
        monkeypatch.setattr("kvkeep.cache.prefix_cache.PrefixCache.largest_bytes", 1 << 10)
        generate(llm, random_tokens(64, seed=1), 2)
        keep.flush()
        assert len(copies) == 1
        assert keep.stats().dropped == 1


# -- C5: defaults ------------------------------------------------------------------------------------------------------


def test_c5_the_defaults_are_bounded_and_visible_in_one_call(dense: str, root: Path) -> None:
    """Caches took gigabytes that nobody had asked for, and nothing showed it (omlx #3829, ollama #18264)."""
    llm = load(dense)
    with attach(llm, root) as keep:
        ask(llm, keep, random_tokens(200))
    found = kvkeep_json("stats", "--path", root)
    assert found["capacity_bytes"] == DEFAULT_CAPACITY == 4 << 30
    assert found["reserve_bytes"] == Disk.of(root).default_reserve <= 10 << 30
    assert 200 * 768 < found["disk_bytes"] < MiB
    assert found["free_bytes"] > 0


def test_c5_by_default_a_disk_that_is_nearly_full_is_left_to_others(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit in bytes alone fills a small disk to the last one (unsloth PR #11073)."""
    llm = load(dense)
    cold = first_logits(load(dense), random_tokens(300))
    with attach(llm, root, break_even=False) as keep:
        ask(llm, keep, random_tokens(100, seed=1))
        before = crowd.occupied(root)
        monkeypatch.setattr(Disk, "of", classmethod(lambda cls, path: cls(100 << 30, 4 << 30)))
        found = ask(llm, keep, random_tokens(300))
        assert keep.stats().errors["DiskFull"] >= 1
        assert crowd.occupied(root) <= before + MiB
    np.testing.assert_allclose(found, cold, atol=2e-3)


def test_c5_checkpoints_of_a_long_chat_are_bounded_in_number_and_bytes(hybrid: str, root: Path) -> None:
    """Checkpoints of 150 MB each were bounded by their number alone (unsloth PR #11073)."""
    prompt = random_tokens(40)
    llm = load(hybrid, n_ctx=2048)
    with attach(llm, root, capacity_bytes=MIN_CAPACITY, break_even=False) as keep:
        for turn in range(40):
            prompt = [*prompt, *generate(llm, prompt, 3), *random_tokens(12, seed=turn)]
            keep.flush()
        points = keep._session._live.points
        assert len(points) <= 32
        assert keep.stats().errors == {}
    (model,) = kvkeep_json("stats", "--path", root)["models"]
    assert 3 <= model["checkpoints"] <= 32


def handed_to_the_disk() -> int:
    """Bytes that this process gave to write calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


# -- C7: bytes written -------------------------------------------------------------------------------------------------


def test_c7_a_chat_of_fifty_turns_writes_about_twice_its_size(wide: str, root: Path) -> None:
    """Whole states written after each turn made terabytes a week of chats of some gigabytes (osaurus #2580, MTPLX #144,
    cc-local-llm #6).
    """
    llm = load(wide, **WIDE)
    prompt = random_tokens(200)
    with attach(llm, root, break_even=False) as keep:
        before = handed_to_the_disk()
        for turn in range(50):
            prompt = [*prompt, *generate(llm, prompt, 4), *random_tokens(26, seed=turn)]
            assert keep.flush()
        written = handed_to_the_disk() - before
        state = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
        stats = keep.stats()
    assert (stats.dropped, stats.errors) == (0, {})
    assert stats.written_bytes < 2 * state
    # With the index, its log and LMDB's own pages.
    assert stats.written_bytes < written < 2 * state


DAY = 20_000


@pytest.fixture
def calendar(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whose last number is today."""
    days = [DAY]
    monkeypatch.setattr("kvkeep.cache.allowance.today", lambda: days[-1])
    return days


def test_c7_no_more_than_so_much_is_stored_a_day(
    dense: str, root: Path, calendar: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """People saw 12 GB written in 90 seconds and wanted a brake (osaurus #2580, LMCache #2739). What comes beyond it is
    dropped, counted and said once; answers are the same; the next day the chat is stored as a whole.
    """
    prompts = [random_tokens(300, seed=seed) for seed in range(4)]
    cold = [first_logits(load(dense), prompt) for prompt in prompts]
    llm = load(dense)
    with attach(llm, root, daily_bytes=300 << 10, break_even=False) as keep:
        for prompt, expected in zip(prompts, cold, strict=True):
            np.testing.assert_allclose(ask(llm, keep, prompt), expected, atol=2e-3)
        stats = keep.stats()
        # Some 190 KB each: the second one reaches it.
        assert [stored_length(keep, prompt) for prompt in prompts] == [300, 300, 0, 0]
        assert (stats.saves, stats.dropped, stats.errors) == (2, 2, {})
        assert 300 << 10 <= stats.written_bytes < 600 << 10
        with pytest.raises(DailyLimit, match="of 300 tokens only 0 are stored: 307200 bytes may be stored a day"):
            keep.warm(prompts[2])
        calendar.append(DAY + 1)
        keep.warm(prompts[2])
        assert stored_length(keep, prompts[2]) == 300
    assert [record.getMessage() for record in caplog.records] == [
        "307200 bytes may be stored a day, and today they were: more is stored after midnight UTC"
    ]


def test_c7_the_day_is_counted_over_all_processes_and_models(dense: str, hybrid: str, root: Path) -> None:
    """The disk is the same for all of them (MTPLX #144). The command sets it, shows it, and ends it."""
    kvkeep("budget", "--path", root, "--daily", "150KB")
    in_new_process(dense, root, [random_tokens(300)])
    found = kvkeep_json("budget", "--path", root)
    assert found["daily_bytes"] == 150_000 < found["stored_today"]
    assert kvkeep_json("stats", "--path", root)["stored_today"] == found["stored_today"]
    assert "Daily:    146.5 KiB may be stored; today" in kvkeep("budget", "--path", root)
    llm = load(hybrid)
    with attach(llm, root, break_even=False) as keep:
        ask(llm, keep, random_tokens(100))
        assert keep.stats().dropped == 1
        kvkeep("budget", "--path", root, "--daily", "off")
        ask(llm, keep, random_tokens(100, seed=1))
        assert stored_length(keep, random_tokens(100, seed=1)) == 100
    assert kvkeep_json("budget", "--path", root)["daily_bytes"] == 0


def test_c7_by_hand_and_half_way_counts_too(
    dense: str, root: Path, calendar: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before a save stopped half way is on the disk as well (LMCache #2739)."""
    kvkeep("budget", "--path", root, "--daily", "10MiB")
    llm = load(dense)
    tokens = random_tokens(300)
    llm.eval(tokens)
    cache = LlamaDiskCache(str(root))
    cache[tokens] = llm.save_state()
    by_hand = kvkeep_json("budget", "--path", root)["stored_today"]
    assert by_hand > 100 << 10
    monkeypatch.setattr("kvkeep.cache.batches.MIN_BATCH_BYTES", 64 << 10)
    real, calls = Writing.add, []

    def second_fails(self: Writing, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise DiskFull("no room")
        real(self, *args)

    monkeypatch.setattr(Writing, "add", second_fails)
    llm.reset()
    tokens = random_tokens(300, seed=1)
    llm.eval(tokens)
    cache[tokens] = llm.save_state()
    cache.close()
    assert len(calls) == 2
    assert kvkeep_json("budget", "--path", root)["stored_today"] > by_hand + (30 << 10)


@pytest.mark.parametrize("given", [-1, 1.5, True, 1 << 63])
def test_c7_a_day_that_makes_no_sense_is_a_sentence(dense: str, root: Path, given: Any) -> None:
    """An option that is misread as another limit is worse than none (osaurus #2580)."""
    with pytest.raises(UsageError, match="daily_bytes is"):
        attach(load(dense), root, daily_bytes=given)
    assert not root.exists()


# -- C10: memory -------------------------------------------------------------------------------------------------------


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most bytes of Python and NumPy that lived at once in the block, beyond those before; exact, however fast it goes."""
    found: list[int] = []
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield found
        found.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()


def test_c10_saving_and_restoring_take_about_one_copy(wide: str, root: Path) -> None:
    """2.15 GB for a file of 105 MB, and twice 724 MB for 724 MB (text-generation-webui #3472, #2645). The whole process is
    measured by `make bench ARGS=memory`.
    """
    prompt = random_tokens(1536)
    llm = load(wide, **WIDE)
    with attach(llm, root, break_even=False) as keep:
        stream = llm.generate(prompt, temp=0.0)
        next(stream)
        state = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
        with peak() as saving:
            stream.close()
            keep.flush()
        stats = keep.stats()
        assert (stats.saves, stats.errors) == (1, {})
    llm = load(wide, **WIDE)
    with attach(llm, root, break_even=False) as keep:
        stream = llm.generate([*prompt, 5], temp=0.0)
        with peak() as restoring:
            next(stream)
        assert keep.last is not None
        assert keep.last.length == 1536
        stream.close()
    # Batches of 4 MiB at least, whatever the state's size: much of this one, little of a real one.
    batches = 2 * 4 * MiB
    assert state <= saving[0] < 1.1 * state + batches
    assert state <= restoring[0] < 1.1 * state + batches


# -- C11: looking up ---------------------------------------------------------------------------------------------------


def test_c11_a_look_up_asks_no_more_of_5000_entries_than_of_five(dense: str, root: Path) -> None:
    """The stock cache compares each prompt with every key, and unpickles each of them (llama-cpp-python #280)."""
    llm = load(dense)
    prompt = random_tokens(200)

    def statements(keep: Attached) -> list[str]:
        repository = keep._session.usable_cache().repository
        seen: list[str] = []

        def executed(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            plan = cursor.connection.cursor()
            plan.execute(f"EXPLAIN QUERY PLAN {statement}", _[0])
            seen.append(f"{statement} {[row[3] for row in plan.fetchall()]}")

        engine = repository.index._engine
        event.listen(engine, "before_cursor_execute", executed)
        try:
            assert stored_length(keep, [*prompt[:150], 3, 4, 5]) == 150
            assert stored_length(keep, random_tokens(100, seed=8)) == 0
        finally:
            event.remove(engine, "before_cursor_execute", executed)
        return seen

    with attach(llm, root, break_even=False) as keep:
        ask(llm, keep, prompt)
        few = statements(keep)
        repository = keep._session.usable_cache().repository
        space = keep._session.usable_cache().namespace
        assert space is not None
        fingerprint = PrefixHash(space.fingerprint)
        numbers = np.random.default_rng(1).integers(600, 50_000, (5000, space.block_tokens))
        with repository.writing() as writing:
            for piece in np.array_split(numbers, 5000 // writing.rows_at_once + 1):
                writing.add(space.id, [entries.block(row.tolist(), parent=fingerprint, payload=b"x" * 16) for row in piece])
        many = statements(keep)
    assert many == few
    assert few
    tables = ("node", "window", "checkpoint")
    assert not [statement for statement in many if any(f"'SCAN {table}" in statement for table in tables)]


# -- C12: what goes, and what is said of it ----------------------------------------------------------------------------


def test_c12_the_least_recently_used_chat_goes_and_the_others_stay(wide: str, root: Path) -> None:
    """Full caches were emptied as a whole, or lost what was used a moment ago (omlx #1656, #1736)."""
    chats = [random_tokens(200, seed=seed) for seed in range(6)]
    llm = load(wide, **WIDE)
    with attach(llm, root, capacity_bytes=MIN_CAPACITY, break_even=False) as keep:
        for chat in chats[:3]:
            ask(llm, keep, chat)
        assert keep.stats().evicted == 0
    (again,) = in_new_process(wide, root, [chats[0]], options=WIDE)
    assert again["decoded"] == 1
    llm = load(wide, **WIDE)
    with attach(llm, root, break_even=False) as keep:
        for chat in chats[3:]:
            ask(llm, keep, chat)
            if keep.stats().evicted:
                break
        found = [stored_length(keep, chat) for chat in chats]
        assert keep.stats().evicted > 0
    # The oldest goes by its end; who was read in between stays, though it was stored first.
    assert found[0] == 200
    assert found[1] < 200
    assert found[2] == 200


def test_c12_states_that_are_given_up_are_counted_and_said(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Queues dropped writes without a word (omlx #1070)."""
    monkeypatch.setitem(Writer.__init__.__kwdefaults__, "max_waiting_bytes", 300 << 10)
    prompts = [random_tokens(200, seed=seed) for seed in range(5)]
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        keep.flush()
        with exclusive(root / WRITER_LOCK, 5.0):
            # Another process writes: what comes meanwhile waits, as far as there is room.
            for prompt in prompts:
                first_logits(llm, prompt)
        keep.flush()
        stats = keep.stats()
        stored = sum(stored_length(keep, prompt) == 200 for prompt in prompts)
    assert stats.saves == stored
    assert 1 <= stats.dropped == len(prompts) - stored
    assert [record.getMessage() for record in caplog.records] == ["a state was given up because too much waits for the disk"]


# -- C13: housekeeping -------------------------------------------------------------------------------------------------


def test_c13_models_are_listed_with_their_sizes_and_cleared_one_by_one(dense: str, other_dense: str, root: Path) -> None:
    """500 GB of models that were long gone, and nothing to see or remove them with (omlx #380, hudsonwa #90)."""
    for model, n_tokens in ((dense, 200), (other_dense, 400)):
        in_new_process(model, root, [random_tokens(n_tokens)])
    listed = kvkeep_json("stats", "--path", root)["models"]
    assert sorted(model["tokens"] for model in listed) == [200, 400]
    small, large = sorted(listed, key=lambda model: int(model["tokens"]))
    assert 0 < small["stored_bytes"] < large["stored_bytes"]
    kvkeep("rm", "--path", root, "--model", large["fingerprint"][:12], "--yes")
    assert [model["tokens"] for model in kvkeep_json("stats", "--path", root)["models"] if model["tokens"]] == [200]
    # By the program, too, also of a model that isn't loaded.
    llm = load(other_dense)
    with attach(llm, root, break_even=False) as keep:
        assert keep.clear(model=small["fingerprint"][:12]) > 0
    assert kvkeep_json("stats", "--path", root)["totals"]["tokens"] == 0


def aged(root: Path, days: int) -> None:
    """Nobody has used anything there for so long."""
    with closing(sqlite3.connect(root / "index.sqlite3")) as connection, connection:
        for table in ("node", "window", "checkpoint"):
            connection.execute(f"UPDATE {table} SET used = ?", (time.time() - days * 86_400,))


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid"])
def test_c13_what_nobody_has_used_for_long_goes(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    """Old models and chats stayed for ever (omlx #380): by the command, or by themselves with a lifetime."""
    model = request.getfixturevalue(kind)
    for by_itself in (False, True):
        in_new_process(model, root, [random_tokens(200)])
        aged(root, 40)
        llm = load(model)
        with attach(llm, root, lifetime=timedelta(days=30) if by_itself else None, break_even=False) as keep:
            if not by_itself:
                kvkeep("rm", "--path", root, "--older-than", "50d", "--yes")
                assert stored_length(keep, random_tokens(200)) == 200
                kvkeep("rm", "--path", root, "--older-than", "30d", "--yes")
            # With a lifetime it is enough that the folder is opened.
            keep.flush()
            assert kvkeep_json("stats", "--path", root)["totals"]["tokens"] == 0
            first_logits(llm, random_tokens(200))
            assert keep.last is not None
            assert keep.last.reason in (Reason.EMPTY, Reason.NO_COMMON_PREFIX)
