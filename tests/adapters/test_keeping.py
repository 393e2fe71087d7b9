"""What people can ask of a cache by hand: keep this, forget that, store nothing, take no more than so much."""

import logging
import os
import stat
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamas import first_logits, generate, load, random_tokens
from restart import run_child

from kvkeep.cache import HybridCheckpointCache, Source, attach
from kvkeep.cache.adapters.attach import Attached
from kvkeep.store import nodes, pins, rows, settings
from kvkeep.store.errors import UsageError
from kvkeep.store.registry import close_root, open_root

PROMPT = random_tokens(200)
SECRET = random_tokens(150, seed=5)
OTHER = random_tokens(120, seed=7)


def stored_tokens(path: Path) -> list[bytes]:
    """Tokens of everything that is stored, and pinned."""
    repository = open_root(path)
    with repository.rows() as connection:
        found = [entry.path for entry in rows.every(connection)] + [pin.tokens for pin in pins.every(connection)]
    close_root(repository)
    return found


def holds(path: Path, tokens: list[int]) -> bool:
    """Whether any run of these tokens is stored. Eight in a row are no accident."""
    data = b"".join(stored_tokens(path))
    return any(np.asarray(tokens[i : i + 8], "<i4").tobytes() in data for i in range(len(tokens) - 7))


# -- no_store -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "recurrent"])
def test_nothing_of_a_private_prompt_is_ever_stored(kind: str, root: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    llm, control = load(model), load(model)
    with attach(llm, root, break_even=False) as keep:
        generate(llm, PROMPT, 4)
        with keep.no_store():
            private = generate(llm, PROMPT + SECRET, 4)
        keep.flush()
        # Going on with the private chat is as private.
        generate(llm, PROMPT + SECRET + private + OTHER[:20], 4)
        keep.flush()
        assert not holds(root, SECRET)
        assert holds(root, PROMPT)
        # Back to where it began: what follows is stored again.
        found = first_logits(llm, PROMPT + OTHER)
        keep.flush()
        assert holds(root, OTHER)
    np.testing.assert_allclose(found, first_logits(control, PROMPT + OTHER), atol=5e-3)
    assert not holds(root, SECRET)


def test_a_private_prompt_is_still_restored_from_what_is_stored(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
    again = load(dense)
    with attach(again, root, break_even=False) as keep, keep.no_store():
        first_logits(again, PROMPT + SECRET)
        assert keep.last is not None
        assert (keep.last.length, keep.last.source) == (200, Source.DISK)
    assert not holds(root, SECRET)


def test_a_stream_that_is_still_open_at_the_end_of_the_block_stays_private(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        with keep.no_store():
            stream = llm.generate(SECRET, temp=0.0)
            next(stream)
        for _ in range(3):
            next(stream)
        stream.close()
        keep.flush()
    assert stored_tokens(root) == []


def test_blocks_in_each_other_end_with_the_outer_one(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        with keep.no_store():
            with keep.no_store():
                generate(llm, SECRET, 2)
            generate(llm, OTHER, 2)
        keep.flush()
    assert stored_tokens(root) == []


def test_pinning_what_the_context_holds_ends_where_it_is_private(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        with keep.no_store():
            generate(llm, SECRET, 2)
        with pytest.raises(UsageError, match="empty prefix"):
            keep.pin()
        first_logits(llm, PROMPT)
        with keep.no_store():
            generate(llm, PROMPT + SECRET, 2)
        assert keep.pin() == len(PROMPT)
    assert not holds(root, SECRET)


def test_a_checkpoint_by_hand_of_a_private_context_stays_in_memory(hybrid: str, root: Path) -> None:
    llm = load(hybrid)
    by_hand = HybridCheckpointCache(llm.ctx, llm=llm, path=root)
    with attach(llm, root, break_even=False) as keep:
        with keep.no_store():
            first_logits(llm, SECRET)
            assert by_hand.save_checkpoint(llm.n_tokens, SECRET)
        assert by_hand.save_checkpoint(llm.n_tokens, SECRET)
        assert by_hand.find_best_checkpoint([*SECRET, 1]) is not None
        keep.flush()
        by_hand.close()
    assert stored_tokens(root) == []


def test_an_error_in_the_block_ends_it(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        with pytest.raises(ZeroDivisionError), keep.no_store():
            raise ZeroDivisionError
        first_logits(llm, OTHER)
        keep.flush()
        assert holds(root, OTHER)


# -- pin, clear ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(dense: str, root: Path) -> Iterator[tuple[Any, Attached]]:
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
        yield llm, keep


def test_pinning_what_the_context_holds_some_tokens_or_a_text(kept: tuple[Any, Attached], root: Path) -> None:
    llm, keep = kept
    assert keep.pin() == 200
    assert keep.pin(PROMPT[:64]) == 64
    tokens = llm.tokenize(b"A text to keep", special=True)
    assert keep.pin("A text to keep") == len(tokens)
    with keep._session.usable_cache().repository.rows() as connection:
        assert [pin.n_tokens for pin in pins.every(connection)] == [200, 64, len(tokens)]
    assert keep.unpin()
    assert keep.unpin(PROMPT[:64])
    assert keep.unpin("A text to keep")
    assert not keep.unpin(PROMPT[:63])


def test_clearing_forgets_what_is_stored_and_the_next_answer_stores_again(kept: tuple[Any, Attached], root: Path) -> None:
    llm, keep = kept
    keep.pin()
    assert keep.clear() > 0
    assert stored_tokens(root) == []
    first_logits(llm, [*PROMPT, 7])
    keep.flush()
    assert holds(root, PROMPT)
    with pytest.raises(UsageError, match="no model is called"):
        keep.clear(model="nobody")


def test_by_hand_nothing_can_be_asked_of_a_closed_cache(dense: str, root: Path) -> None:
    llm = load(dense)
    keep = attach(llm, root)
    keep.close()
    for ask in (keep.clear, keep.pin, keep.unpin):
        with pytest.raises(UsageError, match="the cache can't be used: the cache is closed"):
            ask()


# -- what a root is asked to keep to ------------------------------------------------------------------------------------


def test_wishes_are_remembered_by_the_root(dense: str, root: Path) -> None:
    llm = load(dense)
    with attach(llm, root, capacity_bytes=32 << 20, reserve_bytes=1 << 30, lifetime=timedelta(days=90)):
        pass
    with attach(load(dense), root) as keep:
        repository = keep._session.usable_cache().repository
        assert repository.capacity_bytes == 32 << 20
        with repository.rows() as connection:
            assert settings.find(connection, settings.RESERVE_BYTES) == 1 << 30
            assert settings.find(connection, settings.LIFETIME_SECONDS) == 90 * 86_400


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"reserve_bytes": -1}, "from 0 on"),
        ({"reserve_bytes": 1.5}, "a whole number of bytes"),
        ({"reserve_bytes": True}, "a whole number of bytes"),
        ({"reserve_bytes": 1 << 63}, "from 0 on"),
        ({"lifetime": 30}, "a datetime.timedelta"),
        ({"lifetime": timedelta(seconds=-1)}, "can't be negative"),
        ({"capacity_bytes": 5}, "at least"),
    ],
)
def test_wishes_that_make_no_sense_are_a_sentence(dense: str, root: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        attach(load(dense), root, **arguments)
    assert not root.exists()


# -- modes, forks, damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_only_the_owner_can_read_whatever_the_umask(dense: str, tmp_path: Path, umask: int) -> None:
    root = tmp_path / "private"
    before = os.umask(umask)
    try:
        llm = load(dense)
        with attach(llm, root, break_even=False) as keep:
            first_logits(llm, PROMPT)
            keep.flush()
            found = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    finally:
        os.umask(before)
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}
    assert {"index.sqlite3", "index.sqlite3-wal", "data.mdb", "lock.mdb", "lock", "writer.lock"} <= {
        path.name for path in found
    }


def test_a_forked_child_has_no_cache_and_says_so_and_the_parent_goes_on(dense: str, root: Path) -> None:
    llm = load(dense, n_threads=1, n_threads_batch=1)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
        keep.flush()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            llm.generate(OTHER)
            first_logits(llm, OTHER)
            os.write(writing, str(keep.last).encode())
            keep.close()
            # A new handle in the child is a new cache.
            other = load(dense, n_threads=1, n_threads_batch=1)
            with attach(other, root, break_even=False) as own:
                first_logits(other, PROMPT)
                os.write(writing, f"; {own.last}".encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        assert "fork" in said
        assert "199 of 200 tokens from disk" in said
        first_logits(llm, OTHER)
        keep.flush()
        assert holds(root, OTHER)


def test_damage_that_is_met_is_mended_while_the_assistant_runs(
    dense: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm, control = load(dense), load(dense)
    with caplog.at_level(logging.WARNING, "kvkeep"), attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
        keep.flush()
        repository = keep._session.usable_cache().repository
        with repository.index.write() as connection:
            connection.exec_driver_sql("UPDATE node SET path = 7 WHERE start = 0")
        for prompt in (OTHER, PROMPT, OTHER, PROMPT):
            np.testing.assert_allclose(first_logits(llm, prompt), first_logits(control, prompt), atol=2e-3)
            keep.flush()
        assert keep.last is not None
        assert keep.last.decoded == 1, "saved anew, and warm again"
        with repository.rows() as connection:
            assert all(isinstance(node.path, bytes) for node in nodes.every(connection))
    assert len([record for record in caplog.records if "damaged and are removed" in record.getMessage()]) == 1


def test_an_idle_assistant_lets_go_of_what_another_process_has_compacted(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvkeep.cache.writer.IDLE_SECONDS", 0.02)
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
        keep.flush()
        assert str(root / "blobs-1") in open_files()
        child = run_child(["-m", "kvkeep.tools.compact", "--path", str(root)])
        assert child.returncode == 0, child.stderr
        end = time.monotonic() + 60
        while str(root / "blobs-1") in open_files() and time.monotonic() < end:
            time.sleep(0.02)
        assert str(root / "blobs-1") not in open_files()


def open_files() -> str:
    """Every file that this process has open or mapped."""
    return Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("before", ["private", "loaded"])
def test_a_warm_prompt_is_kept_whatever_the_context_holds(before: str, dense: str, root: Path) -> None:
    """What can never be stored, below, would keep all behind it from being stored as well."""
    prompt = random_tokens(300)
    llm = load(dense)
    llm.eval(prompt[:100])
    state = llm.save_state()
    llm.reset()
    with attach(llm, root, break_even=False) as keep:
        if before == "private":
            with keep.no_store():
                llm.eval(prompt[:100])
        else:
            llm.load_state(state)
        keep.warm(prompt)
        with keep.no_store(), pytest.raises(UsageError, match="no_store"):
            keep.warm(random_tokens(50, seed=8))
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, [*prompt, 5])
        assert keep.last is not None
        assert keep.last.length == len(prompt)
