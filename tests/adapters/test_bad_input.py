"""Damaged data, refused states, unusable folders, full disks: the cold answer, one warning, and a clean context."""

import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from llamas import first_logits, generate, load, random_tokens
from restart import SUPPORT, run_child

from kvkeep.cache import Reason, attach
from kvkeep.store.check import check
from kvkeep.store.errors import UsageError
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.schema import REVISION

PROMPT = random_tokens(200)
OTHER = random_tokens(120, seed=7)


@pytest.fixture
def filled(dense: str, tmp_path: Path) -> Path:
    """A store that holds PROMPT; no other process or handle has it open."""
    path = tmp_path / "damaged"
    llm = load(dense)
    with attach(llm, path, break_even=False):
        first_logits(llm, PROMPT)
    return path


def change_blobs(path: Path, change: Callable[[bytes], bytes | None]) -> None:
    """Rewrite every stored value, or delete it where `change` says None."""
    with lmdb.open(str(path / "blobs-1"), map_size=1 << 30) as env, env.begin(write=True) as txn:
        for key, value in list(txn.cursor()):
            changed = change(value)
            if changed is None:
                txn.delete(key)
            else:
                txn.put(key, changed)


def change_rows(path: Path, sql: str) -> None:
    with sqlite3.connect(path / "index.sqlite3") as connection:
        assert connection.execute(sql).rowcount > 0
    connection.close()


def flip(value: bytes, at: float) -> bytes:
    position = int(len(value) * at)
    return value[:position] + bytes([value[position] ^ 0x10]) + value[position + 1 :]


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated to a tenth": lambda path: change_blobs(path, lambda value: value[: len(value) // 10]),
    "truncated by a byte": lambda path: change_blobs(path, lambda value: value[:-1]),
    "empty": lambda path: change_blobs(path, lambda value: b""),
    "flipped in the header": lambda path: change_blobs(path, lambda value: flip(value, 0.0)),
    "flipped in the middle": lambda path: change_blobs(path, lambda value: flip(value, 0.5)),
    "flipped at the end": lambda path: change_blobs(path, lambda value: flip(value, 0.999)),
    "foreign": lambda path: change_blobs(path, lambda value: b"somebody else's bytes" * 50),
    "swapped": lambda path: swap(path),
    "gone": lambda path: change_blobs(path, lambda value: None),
    "row tokens": lambda path: change_rows(path, "UPDATE node SET path = zeroblob(length(path)) WHERE start = 0"),
    "row parent": lambda path: change_rows(path, "UPDATE node SET parent = zeroblob(32) WHERE start = 64"),
    "row blob": lambda path: change_rows(path, "UPDATE node SET blob = zeroblob(32)"),
    "row start": lambda path: change_rows(path, "UPDATE node SET start = start + 1"),
    "row length": lambda path: change_rows(path, "UPDATE node SET n_tokens = n_tokens - 1"),
}


def swap(path: Path) -> None:
    """Every row names the blob of another one: each byte verifies, and belongs to other tokens."""
    with sqlite3.connect(path / "index.sqlite3") as connection:
        rows = connection.execute("SELECT id, blob FROM node ORDER BY id").fetchall()
        for (row, _), (_, blob) in zip(rows, rows[1:] + rows[:1], strict=True):
            connection.execute("UPDATE node SET blob = ? WHERE id = ?", (blob, row))
    connection.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_gives_the_cold_answer_and_is_met_only_once(
    filled: Path, dense: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](filled)
    llm = load(dense)
    control = load(dense)
    with caplog.at_level(logging.WARNING, "kvkeep"), attach(llm, filled, break_even=False) as keep:
        for prompt in (PROMPT, OTHER):
            np.testing.assert_allclose(first_logits(llm, prompt), first_logits(control, prompt), atol=2e-3)
            keep.flush()
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1
        assert keep.stats().errors == {}
    repository = open_root(filled)
    found = [finding for finding in check(repository) if finding.trouble.value == "damage"]
    close_root(repository)
    assert found == []

    again = load(dense)
    with attach(again, filled, break_even=False) as keep:
        first_logits(again, PROMPT)
        assert keep.last is not None
        assert keep.last.decoded == 1, f"saved anew, and warm again: {keep.last}"


def test_damage_in_the_middle_leaves_what_stands_before_it(filled: Path, dense: str) -> None:
    change_rows(filled, "UPDATE node SET blob = zeroblob(32) WHERE start = 128")
    llm = load(dense)
    with attach(llm, filled, break_even=False) as keep:
        found = first_logits(llm, PROMPT)
        assert keep.last is not None
        assert (keep.last.length, keep.last.reason) == (128, Reason.DAMAGED)
    np.testing.assert_allclose(found, first_logits(load(dense), PROMPT), atol=2e-3)


def test_a_state_that_llama_cpp_refuses(filled: Path, dense: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified bytes that llama.cpp doesn't take: nothing half loaded stays, and they aren't tried again."""
    from kvkeep.cache import prefix_cache
    from kvkeep.cache.restore import Restored, assemble

    def with_a_wrong_row_size(*args: Any) -> Restored:
        restored = assemble(*args)
        monkeypatch.setattr(prefix_cache, "assemble", assemble)
        restored.state[8 + 8 + 12 * restored.length + 8 + 4] ^= 1
        return restored

    monkeypatch.setattr(prefix_cache, "assemble", with_a_wrong_row_size)
    llm = load(dense)
    control = load(dense)
    with attach(llm, filled, break_even=False) as keep:
        for prompt in (PROMPT, OTHER, PROMPT):
            np.testing.assert_allclose(first_logits(llm, prompt), first_logits(control, prompt), atol=2e-3)
            keep.flush()
        stats = keep.stats()
        assert stats.reasons["refused"] == 1
        assert stats.errors == {"StateRefused": 1}
    with_damage = open_root(filled)
    assert check(with_damage) == []
    close_root(with_damage)


@pytest.mark.parametrize("fails", ["match", "restore", "save"])
def test_an_unforeseen_error_inside_never_reaches_the_caller(
    root: Path, dense: str, monkeypatch: pytest.MonkeyPatch, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    from kvkeep.cache.prefix_cache import PrefixCache

    filler = load(dense)
    with attach(filler, root, break_even=False):
        first_logits(filler, PROMPT)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(PrefixCache, fails, broken)
    llm = load(dense)
    control = load(dense)
    with attach(llm, root, break_even=False) as keep:
        for prompt in (PROMPT, OTHER, PROMPT[:150] + OTHER):
            np.testing.assert_allclose(first_logits(llm, prompt), first_logits(control, prompt), atol=2e-3)
            keep.flush()
        assert keep.stats().errors["ZeroDivisionError"] > 0
    warnings = [record for record in caplog.records if record.name == "kvkeep" and record.levelno == logging.WARNING]
    assert len({record.getMessage() for record in warnings}) == len(warnings), "each kind is logged once"


def file_in_place(path: Path) -> None:
    path.write_text("a file")


def garbage_index(path: Path) -> None:
    path.mkdir()
    (path / "index.sqlite3").write_bytes(b"not a database at all" * 500)


def newer_schema(path: Path) -> None:
    close_root(open_root(path))
    with sqlite3.connect(path / "index.sqlite3") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '97.1.0'")
        connection.execute("PRAGMA user_version=97001000")
    connection.close()


UNUSABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file": (file_in_place, "is a file"),
    "garbage": (garbage_index, "not a database"),
    "newer": (newer_schema, f"schema 97.1.0, which is newer than schema {REVISION}"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_an_unusable_folder_means_no_cache_and_one_warning(
    tmp_path: Path, dense: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, said = UNUSABLE[what]
    path = tmp_path / "unusable"
    make(path)
    before = sorted(path.iterdir()) if path.is_dir() else path.read_bytes()
    llm = load(dense)
    control = load(dense)
    with attach(llm, path, break_even=False) as keep:
        for prompt in (PROMPT, OTHER):
            np.testing.assert_allclose(first_logits(llm, prompt), first_logits(control, prompt), atol=2e-3)
        assert keep.last is not None
        assert keep.last.reason is Reason.UNAVAILABLE
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert said in warnings[0]
    if path.is_file():
        assert path.read_bytes() == before


def child_answers(task: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Run `limited.py` with a task; its answer and its log."""
    child = run_child([str(SUPPORT / "limited.py"), json.dumps(task)])
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1]), child.stderr


@pytest.mark.parametrize("limit", [1 << 14, 1 << 17, 1 << 18])
def test_a_full_disk_costs_the_cache_and_not_the_answer(dense: str, root: Path, limit: int) -> None:
    """Files may grow to `limit` bytes and no further, at whatever point of opening or saving that happens to be."""
    prompts = [PROMPT, OTHER, random_tokens(300, seed=4)]
    answer, log = child_answers({"model": dense, "root": str(root), "prompts": prompts, "file_bytes": limit})
    control = load(dense)
    assert answer["tokens"] == [generate(control, prompt, 4) for prompt in prompts]
    assert len(answer["errors"]) >= 1, "the limit was never met: the test tests nothing"
    assert log.count("WARNING") <= len(answer["errors"])
    # With room again, the same folder works.
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, PROMPT)
        keep.flush()
        cache = keep._session.cache
        assert cache is not None
        assert cache.match(PROMPT).length == len(PROMPT)


def test_a_folder_that_cannot_be_written(dense: str, tmp_path: Path) -> None:
    """As an unprivileged user, because root may write everywhere."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    model = tmp_path / "model.gguf"
    shutil.copy(dense, model)
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    answer, log = child_answers({"model": str(model), "root": str(folder), "prompts": [PROMPT], "unprivileged": True})
    assert answer["tokens"] == [generate(load(dense), PROMPT, 4)]
    assert answer["reasons"] == {"unavailable": 1}
    assert log.count("WARNING") == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"capacity_bytes": -1}, "-1"),
        ({"capacity_bytes": 1000}, "1000"),
        ({"capacity_bytes": "4 GiB"}, "4 GiB"),
        ({"capacity_bytes": True}, "True"),
        ({"capacity_bytes": 1e9}, "1000000000.0"),
        ({"capacity_bytes": 1 << 50}, str(1 << 50)),
        ({"capacity_bytes": 1 << 64}, str(1 << 64)),
        ({"break_even": "yes"}, "yes"),
        ({"identity": 7}, "7"),
        ({"path": 7}, "7"),
        ({"path": ""}, "''"),
        ({"path": "~nobody-of-this-name/cache"}, "~nobody-of-this-name/cache"),
    ],
)
def test_a_wrong_argument_is_named(dense: str, tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    from kvkeep.cache import PersistentLlamaCache

    llm = load(dense)
    for make in (attach, PersistentLlamaCache.for_model):
        with pytest.raises(UsageError) as caught:
            make(llm, **({"path": tmp_path / "root"} | arguments))
        assert said in str(caught.value)
        assert next(iter(arguments)) in str(caught.value)
    assert not (tmp_path / "root").exists()
    attach(llm, tmp_path / "root").close()


def test_something_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"llama_cpp\.Llama, not str"):
        attach("model.gguf", tmp_path / "root")


def test_an_embedding_model_without_memory_is_left_alone(dense: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeep.cache.adapters.context import Context

    monkeypatch.setattr(Context, "memory", None)
    llm = load(dense)
    with attach(llm, root) as keep:
        assert keep.path is None
    assert not os.path.exists(root)


def test_whatever_a_file_system_does_attach_raises_nothing(
    dense: str, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvkeep.cache import fingerprint

    def broken(*args: Any) -> Any:
        raise OverflowError("Python int too large to convert to SQLite INTEGER")

    monkeypatch.setattr(fingerprint.FileStamp, "of", broken)
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        np.testing.assert_array_equal(first_logits(llm, PROMPT), first_logits(load(dense), PROMPT))
        assert keep.last is not None
        assert keep.last.reason is Reason.UNAVAILABLE
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
