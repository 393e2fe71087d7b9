"""What a new process finds of what an older one has left: killed, swapped, reconfigured, or without half of its files."""

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import llamas
import numpy as np
import pytest
from hits import TOLERANCE, ask, assert_as_cold, attached
from llamas import generate, load, random_tokens
from restart import SUPPORT, in_new_process

from kvkeep.cache import LlamaDiskCache, LlamaRAMCache, LlamaTrieCache, PersistentLlamaCache, Reason, Source

PROMPT = random_tokens(300)


def fill(model: str, root: Path, **options: Any) -> None:
    with attached(model, root, **options) as (llm, keep):
        ask(llm, keep, PROMPT)


# Keeps a prompt, and is killed: right behind the save, or between a restore and the end of the answer.
KILLED = """
import json, os, signal, sys
import llamas
from kvkeep.cache import attach
model, root, prompt, reads = json.loads(sys.argv[1])
llm = llamas.load(model)
keep = attach(llm, root, break_even=False)
stream = llm.generate(prompt, temp=0.0)
next(stream)
if reads:
    assert keep.last.source.value == "disk", keep.last
    assert keep.last.length == len(prompt) - 1
else:
    keep.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(model: str, root: Path, *, reads: bool) -> None:
    task = json.dumps([model, str(root), PROMPT, reads])
    child = subprocess.run(
        [sys.executable, "-c", KILLED, task], env={"PYTHONPATH": str(SUPPORT)}, capture_output=True, text=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr


# -- B8: the index and the blobs ----------------------------------------------------------------------------------------


def test_b8_a_kill_right_behind_a_save_costs_nothing(dense: str, root: Path) -> None:
    """After a restart of the server the files were there, and nobody knew them any more (LMCache #562, #1788)."""
    killed(dense, root, reads=False)
    [answer] = in_new_process(dense, root, [PROMPT])
    assert (answer["decoded"], answer["source"], answer["length"]) == (1, "disk", 299)


def without_index(root: Path) -> None:
    for file in root.glob("index.sqlite3*"):
        file.unlink()


def without_blobs(root: Path) -> None:
    [folder] = root.glob("blobs-*")
    shutil.rmtree(folder)


def with_empty_index(root: Path) -> None:
    (root / "index.sqlite3").write_bytes(b"")


def with_empty_blobs(root: Path) -> None:
    [file] = root.glob("blobs-*/data.mdb")
    file.write_bytes(b"")


def with_older_index(root: Path) -> None:
    """As a backup of one file brings it back: it knows nothing of what came later."""
    (root / "index.sqlite3").write_bytes((root.parent / "older.sqlite3").read_bytes())


@pytest.mark.parametrize("lose", [without_index, without_blobs, with_empty_index, with_empty_blobs, with_older_index])
def test_b8_half_of_the_files_gone_is_a_miss_that_mends_itself(dense: str, root: Path, lose: Callable[[Path], None]) -> None:
    """Old blobs became dead weight for ever once their index was lost (LMCache #2273). Here they are cleaned up, the answer is
    the cold one, and what comes next is kept."""
    with attached(dense, root):
        pass
    with closing(sqlite3.connect(root / "index.sqlite3")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(root / "index.sqlite3", root.parent / "older.sqlite3")
    fill(dense, root)
    lose(root)
    with attached(dense, root) as (llm, keep):
        now = ask(llm, keep, PROMPT)
        assert (now.decoded, now.report.source) == (300, Source.NONE)
        assert now.report.reason is not Reason.UNAVAILABLE
        assert_as_cold(now, dense)
    [answer] = in_new_process(dense, root, [PROMPT])
    assert answer["decoded"] == 1
    # That no blob is without its row is looked at when the test has ended, as behind every test.


# -- B9: what doesn't change a state ------------------------------------------------------------------------------------


def moved(model: str, tmp_path: Path) -> str:
    (tmp_path / "elsewhere").mkdir()
    return str(shutil.copy(model, tmp_path / "elsewhere" / "renamed.gguf"))


def test_b9_settings_that_change_no_state_keep_it(dense: str, root: Path, tmp_path: Path) -> None:
    """The size of the context follows the free memory, and was part of the identity: after each restart nothing was found, with
    all bytes intact (mesh-llm #1226; home-ops PR #9674 the same with the number of slots)."""
    fill(dense, root)
    for options in (
        {"n_ctx": 512},
        {"n_ctx": 4096},
        {"n_batch": 32},
        {"n_ubatch": 16},
        {"n_threads": 2},
        {"n_threads_batch": 2},
        {"n_gpu_layers": 99},
        {"offload_kqv": False},
        {"op_offload": False},
        {"seed": 4711},
        {"verbose": True},
        {"chat_format": "chatml"},
        {"use_mmap": False},
        {"use_mlock": True},
        {"last_n_tokens_size": 8},
        {"no_perf": True},
    ):
        with attached(dense, root, **options) as (llm, keep):
            now = ask(llm, keep, PROMPT)
            assert (now.decoded, now.report.source) == (1, Source.DISK), (options, str(now.report))
    with attached(moved(dense, tmp_path), root) as (llm, keep):
        assert ask(llm, keep, PROMPT).decoded == 1
    assert_as_cold(now, dense)


def with_sequences(monkeypatch: pytest.MonkeyPatch, *, unified: bool) -> None:
    """`Llama` has no argument for the number of sequences; programs that need some set it behind its back."""
    from llama_cpp import llama_cpp

    plain = llama_cpp.llama_context_default_params

    def four() -> Any:
        params = plain()
        params.n_seq_max, params.kv_unified = 4, unified
        return params

    monkeypatch.setattr(llama_cpp, "llama_context_default_params", four)


def test_b9_more_sequences_keep_it(dense: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for more chats in the same context changes no state of one."""
    fill(dense, root)
    with monkeypatch.context() as patched:
        with_sequences(patched, unified=True)
        with attached(dense, root) as (llm, keep):
            now = ask(llm, keep, PROMPT)
            assert (now.decoded, now.report.source) == (1, Source.DISK), str(now.report)
    assert_as_cold(now, dense)


@pytest.mark.parametrize("memory", ["dense", "window", "hybrid"])
def test_b9_sequences_with_cells_of_their_own_take_nothing_from_the_others(
    request: pytest.FixtureRequest, root: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a state has a part for each sequence, which llama.cpp refuses elsewhere: nothing is shared, and nothing that was
    stored is taken for damaged because of it."""
    model = request.getfixturevalue(memory)
    fill(model, root)
    for _ in range(2):
        with monkeypatch.context() as patched:
            with_sequences(patched, unified=False)
            with attached(model, root, n_ctx=4096) as (llm, keep):
                now = ask(llm, keep, PROMPT)
                assert now.decoded == now.report.decoded_tokens
        assert_as_cold(now, model)
    with attached(model, root) as (llm, keep):
        assert ask(llm, keep, PROMPT).decoded == 1
        assert keep.stats().quarantined == 0


@pytest.mark.parametrize("memory", ["dense", "hybrid", "window"])
def test_b9_a_context_with_less_room_takes_what_fits(request: pytest.FixtureRequest, root: Path, memory: str) -> None:
    """A state longer than the new context is used as far as it goes."""
    model = request.getfixturevalue(memory)
    prompt = random_tokens(900)
    with attached(model, root) as (llm, keep):
        ask(llm, keep, prompt)
    with attached(model, root, n_ctx=512) as (llm, keep):
        now = ask(llm, keep, prompt[:500])
        assert now.report.source is Source.DISK, str(now.report)
        # The nearest checkpoint of a hybrid, which has one every 256 tokens.
        assert now.report.reused_tokens >= (256 if memory == "hybrid" else 499)
        assert_as_cold(now, model)


# -- B13: reading takes nothing away ------------------------------------------------------------------------------------


def test_b13_ten_reads_leave_an_entry_where_it_is(dense: str, root: Path) -> None:
    """The stock cache pops what it reads: hit, miss, hit, miss (llama-cpp-python PR #2025)."""
    fill(dense, root)
    for _ in range(10):
        with attached(dense, root) as (llm, keep):
            assert ask(llm, keep, PROMPT).decoded == 1
            assert ask(llm, keep, [9, 8, 7]).report.reason in (Reason.NO_COMMON_PREFIX, Reason.FOUND)
            assert ask(llm, keep, PROMPT).decoded == 1


def test_b13_a_kill_between_the_read_and_the_answers_end_leaves_it_too(dense: str, root: Path) -> None:
    killed(dense, root, reads=False)
    for _ in range(2):
        killed(dense, root, reads=True)
    [answer] = in_new_process(dense, root, [PROMPT])
    assert answer["decoded"] == 1


@pytest.mark.parametrize("kind", [LlamaDiskCache, LlamaRAMCache, LlamaTrieCache])
def test_b13_the_stock_names_keep_what_is_read_by_hand(dense: str, root: Path, kind: type[Any]) -> None:
    cache = LlamaDiskCache(str(root)) if kind is LlamaDiskCache else kind()
    llm = load(dense)
    generate(llm, PROMPT, 1)
    cache[PROMPT] = llm.save_state()
    for _ in range(10):
        assert cache[PROMPT].n_tokens == 300
        assert PROMPT in cache
    other = load(dense)
    other.load_state(cache[PROMPT])
    other.eval([5])
    llm.eval([5])
    np.testing.assert_allclose(llamas.logits(other), llamas.logits(llm), atol=TOLERANCE)
    if kind is LlamaDiskCache:
        cache.close()


# -- B18: a state outlives what made it ---------------------------------------------------------------------------------

# A program that never says a word about its cache: loads, attaches, asks, swaps models, and ends.
SWAPPED = """
import gc, json, sys
import llamas
from kvkeep.cache import attach
answers = []
llm = None
for model, prompt in json.loads(sys.argv[1]):
    # As programs swap models: the new one takes the name.
    llm = keep = None
    gc.collect()
    llm = llamas.load(model)
    keep = attach(llm, sys.argv[2], break_even=False)
    stream = llm.generate(prompt, temp=0.0)
    next(stream)
    answers.append([llamas.n_decoded(llm), keep.last.source.value])
    stream.close()
print(json.dumps(answers))
"""


def swapped(root: Path, *tasks: tuple[str, list[int]]) -> list[list[Any]]:
    command = [sys.executable, "-c", SWAPPED, json.dumps(tasks), str(root)]
    child = subprocess.run(command, env={"PYTHONPATH": str(SUPPORT)}, capture_output=True, text=True, timeout=100)
    assert child.returncode == 0, child.stderr
    answers: list[list[Any]] = json.loads(child.stdout.splitlines()[-1])
    return answers


def test_b18_a_swap_of_models_a_restart_and_a_long_pause_keep_the_chat(
    dense: str, other_dense: str, hybrid: str, root: Path
) -> None:
    """What people ask for most: swapping models, restarting or leaving for an hour costs the whole prompt again (ollama #17247,
    text-generation-webui #7072, llama-swap #1064, mlx-lm PR #1405). No call to the cache is needed for it."""
    first = swapped(root, (dense, PROMPT), (other_dense, PROMPT), (hybrid, PROMPT), (dense, PROMPT), (hybrid, PROMPT))
    assert first == [[300, "none"], [300, "none"], [300, "none"], [1, "disk"], [1, "disk"]]
    # Two months later.
    with closing(sqlite3.connect(root / "index.sqlite3")) as connection, connection:
        for table in ("node", "checkpoint", "window", "namespace"):
            connection.execute(f"UPDATE {table} SET used = used - 5184000, created = created - 5184000")
    more = [*PROMPT, *random_tokens(20, seed=5)]
    again = swapped(root, (other_dense, PROMPT), (dense, more), (hybrid, more))
    assert again[:2] == [[1, "disk"], [20, "disk"]]
    assert again[2][0] <= 22
    assert again[2][1] == "disk"


def test_b18_a_context_that_is_emptied_between_two_chats_is_warm_again(dense: str, root: Path) -> None:
    """Servers that unload on a timeout, or reset, without telling anybody."""
    llm = load(dense)
    llm.set_cache(PersistentLlamaCache.for_model(llm, root, break_even=False))
    text = "a story of lighthouses and ships " * 8
    llm.create_completion(text, max_tokens=2, temperature=0.0)
    llm.cache.flush()
    llm.reset()
    before = llamas.n_decoded(llm)
    llm.create_completion(text, max_tokens=1, temperature=0.0)
    assert llm.cache.last.source in (Source.DISK, Source.LIVE)
    assert llamas.n_decoded(llm) - before <= 3
    llm.cache.close()
    with attached(dense, root) as (other, keep):
        other.create_completion(text, max_tokens=1, temperature=0.0)
        assert keep.last is not None
        assert keep.last.source is Source.DISK
        assert keep.last.decoded == 1
