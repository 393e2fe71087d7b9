"""The folder of a `LlamaDiskCache`, as that class itself writes it and as somebody else has changed it."""

import json
import os
import pickle  # noqa: TID251 - written here, never read
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from foreign import add_row, change_row, put_in_stock_folder, small_state, stock_folder, stock_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llamas import load, whole_state
from restart import run_child

from kvkeep.cache.foreign import stock_folder as reader
from kvkeep.cache.foreign.item import Item
from kvkeep.cache.state import Form
from kvkeep.store.errors import KvkeepError, StoreError, TooLarge, TruncatedState, UnknownLayout, UsageError

ENOUGH = 1 << 30


def read(folder: Path) -> list[Item | KvkeepError]:
    """Every item or its error."""
    found: list[Item | KvkeepError] = []
    for one in reader.found_in(folder):
        try:
            found.append(one.read(ENOUGH))
        except KvkeepError as error:
            found.append(error)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three small states in rows, and one in a file."""
    path = tmp_path / "stock"
    for count in (3, 4, 5):
        put_in_stock_folder(path, tuple(range(3, 3 + count)), small_state(count))
    put_in_stock_folder(path, (3, 4, 5, 6, 7, 8), small_state(6, state=bytes(40_000)))
    return path


@pytest.mark.parametrize("keeping", [False, True])
def test_what_the_stock_cache_has_written(dense: str, tmp_path: Path, keeping: bool) -> None:
    chats = [["hello", "and then"], ["something else"]]
    path = stock_folder(tmp_path / "a folder, 100% ?#&", dense, chats, keeping=keeping)
    items = read(path)
    assert len(items) == len(stock_rows(path)) == (3 if keeping else 1)
    for item in items:
        assert isinstance(item, Item), item
        llm = load(dense)
        llm.eval(item.tokens.tolist())
        assert (item.form, item.data.size) == (Form.WHOLE, whole_state(llm).size)
        llm.close()


def test_items_are_what_was_put_in(folder: Path) -> None:
    items = read(folder)
    assert [item.tokens.tolist() for item in items if isinstance(item, Item)] == [list(range(3, n)) for n in (6, 7, 8, 9)]
    assert [item.data.tobytes() for item in items if isinstance(item, Item)] == [b"state"] * 3 + [bytes(40_000)]


def test_reading_leaves_nothing_behind(folder: Path) -> None:
    before = sorted(folder.rglob("*")), (folder / "cache.db").read_bytes()
    read(folder)
    assert (sorted(folder.rglob("*")), (folder / "cache.db").read_bytes()) == before


def test_beside_a_program_that_uses_it(folder: Path) -> None:
    import diskcache

    with diskcache.Cache(str(folder)) as cache:
        cache[(3, 4)] = small_state(2)
        assert (folder / "cache.db-wal").stat().st_size > 0
        with cache.transact():
            cache[(3,)] = small_state(1)
            items = read(folder)
        # What isn't committed isn't there.
        assert len(items) == 5
        assert all(isinstance(item, Item) for item in items)
        found = reader.found_in(folder)
        del cache[(3, 4)]
        with pytest.raises(StoreError, match="gone"):
            found[-2].read(ENOUGH)


CHILD = """
import json, os, sys
from pathlib import Path
from kvkeep.cache.foreign import stock_folder
os.setgid(65534); os.setuid(65534)
answer = []
try:
    for one in stock_folder.found_in(Path(sys.argv[1])):
        try:
            answer.append(len(one.read(1 << 30).tokens))
        except Exception as error:
            answer.append(f"{type(error).__name__}: {error}")
except Exception as error:
    answer = f"{type(error).__name__}: {error}"
print(json.dumps(answer))
"""


@pytest.fixture
def open_to_others(folder: Path) -> Path:
    """A folder that another user may look into and not write."""
    for path in [*folder.rglob("*"), *list(folder.parents)[: len(folder.parents) - 2]]:
        path.chmod(path.stat().st_mode | 0o055 if path.is_dir() else 0o444)
    folder.chmod(0o555)
    return folder


def as_somebody_else(folder: Path) -> object:
    child = run_child(["-c", CHILD, str(folder)])
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_that_can_not_be_written(open_to_others: Path) -> None:
    assert as_somebody_else(open_to_others) == [3, 4, 5, 6]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("without", ["", "-shm"])
def test_one_that_a_program_has_left_in_use(open_to_others: Path, without: str, tmp_path: Path) -> None:
    """With a log that the database file doesn't have yet."""
    import diskcache

    copy = tmp_path / "copy"
    with diskcache.Cache(str(open_to_others)) as cache:
        cache[(3, 4)] = small_state(2)
        shutil.copytree(open_to_others, copy)
    if without:
        (copy / f"cache.db{without}").unlink()
    for file in copy.glob("cache.db*"):
        file.chmod(0o444)
    copy.chmod(0o555)
    assert as_somebody_else(copy) == [3, 4, 5, 6, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_what_this_user_may_not_read_is_a_sentence(open_to_others: Path) -> None:
    (value,) = open_to_others.rglob("*.val")
    value.chmod(0o000)
    answer = as_somebody_else(open_to_others)
    assert isinstance(answer, list)
    assert answer[:3] == [3, 4, 5]
    assert "can't be read by this user" in answer[3]
    (open_to_others / "cache.db").chmod(0o000)
    assert str(as_somebody_else(open_to_others)).startswith("UsageError: ")


# -- items that are wrong ----------------------------------------------------------------------------------------------


def only_wrong(folder: Path, number: int) -> str:
    """The error of one item, after a look at the others."""
    items = read(folder)
    assert [i for i, item in enumerate(items) if isinstance(item, KvkeepError)] == [number]
    return str(items[number])


def test_a_key_that_says_other_tokens(folder: Path) -> None:
    put_in_stock_folder(folder, (3, 4, 99, 6), small_state(4))
    assert "different tokens at position 2" in only_wrong(folder, 4)


def test_a_key_may_have_a_token_more_or_less(folder: Path) -> None:
    put_in_stock_folder(folder, (3, 4, 5, 6, 7, 99), small_state(5))
    put_in_stock_folder(folder, (3, 4), small_state(5))
    assert [len(item.tokens) for item in read(folder) if isinstance(item, Item)][4:] == [5, 5]


@pytest.mark.parametrize("count", [-1, 9, 1 << 62, None, "3", 3.0, True, [3]])
def test_numbers_of_tokens_that_can_not_be(folder: Path, count: object) -> None:
    state = small_state()
    state.n_tokens = count
    put_in_stock_folder(folder, (1, 2), state)
    only_wrong(folder, 4)


def test_no_tokens_are_of_no_use(folder: Path) -> None:
    put_in_stock_folder(folder, (), small_state(0))
    assert "names no tokens" in only_wrong(folder, 4)


def test_tokens_that_are_none(folder: Path) -> None:
    state = small_state()
    state.input_ids[1] = -1
    put_in_stock_folder(folder, (3, -1, 5), state)
    assert "no token ids" in only_wrong(folder, 4)


@pytest.mark.parametrize(("size", "kept"), [(3, b"sta"), (0, b"")])
def test_a_state_may_have_more_bytes_than_it_says(folder: Path, size: int, kept: bytes) -> None:
    """As `load_state` does it, the first ones count."""
    state = small_state()
    state.llama_state_size = size
    put_in_stock_folder(folder, (3, 4, 5, 9), state)
    item = read(folder)[4]
    assert isinstance(item, Item)
    assert item.data.tobytes() == kept


@pytest.mark.parametrize("size", [6, 1 << 20, "5", None])
def test_but_not_fewer(folder: Path, size: object) -> None:
    state = small_state()
    state.llama_state_size = size
    put_in_stock_folder(folder, (3, 4, 5, 9), state)
    only_wrong(folder, 4)


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_of_diskcache(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "old"
    put_in_stock_folder(path, (3, 4, 5, 6), small_state(state=bytes(range(256))), disk_pickle_protocol=protocol)
    (item,) = read(path)
    assert isinstance(item, Item), item
    assert item.tokens.tolist() == [3, 4, 5]
    assert item.data.tobytes() == bytes(range(256))


def test_a_state_beyond_the_budget_is_not_read(folder: Path) -> None:
    found = reader.found_in(folder)
    assert len(found[3].read(40_000).data) == 40_000
    with pytest.raises(TooLarge, match="40000 bytes"):
        found[3].read(39_999)


def test_scores_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeep.cache.foreign.instructions import Span

    state = small_state()
    state.scores = np.zeros((1000, 1000), np.single)
    put_in_stock_folder(tmp_path / "stock", (3, 4, 5), state)
    loaded = []
    load_span = Span.load
    monkeypatch.setattr(Span, "load", lambda self: (loaded.append(self.size), load_span(self))[1])
    (item,) = read(tmp_path / "stock")
    assert isinstance(item, Item)
    assert max(loaded) < 1000


@pytest.mark.parametrize("value", ["a text", 17, b"raw bytes", 1.5, None, {"a": 1}, [small_state()], (1, 2), {1: 2}])
def test_values_that_are_no_state(folder: Path, value: object) -> None:
    put_in_stock_folder(folder, (1, 2), value)
    only_wrong(folder, 4)


@pytest.mark.parametrize("key", ["a text", 17, b"raw bytes", 1.5, None, ("a",), (1, (2,)), (1 << 70,)])
def test_keys_that_are_none(folder: Path, key: object) -> None:
    put_in_stock_folder(folder, key, small_state())
    only_wrong(folder, 4)


def test_hostile_pickles_beside_good_ones(folder: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"

    class Hostile:
        def __reduce__(self) -> object:
            return os.system, (f"touch {proof}",)

    put_in_stock_folder(folder, (1, 2), Hostile())
    add_row(folder, (1, 2, 3), b"cos\nsystem\n(S'touch " + bytes(proof) + b"'\ntR.")
    put_in_stock_folder(folder, Hostile(), small_state())
    items = read(folder)
    assert [type(item) for item in items] == [Item] * 4 + [UnknownLayout] * 3
    # The module under which this system knows it.
    assert all("asks for " in str(item) and ".system," in str(item) for item in items[4:])
    assert not proof.exists()


# -- files and databases that are wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where", ["../outside.val", "{absolute}", "sub/../../outside.val", "./inside.val", "link.val", "links/a.val"]
)
def test_files_outside_are_not_read(folder: Path, where: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside.val"
    outside.write_bytes(pickle.dumps(small_state(6)))
    shutil.copy(outside, folder / "inside.val")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(outside, tmp_path / "elsewhere" / "a.val")
    (folder / "link.val").symlink_to(outside)
    (folder / "links").symlink_to(tmp_path / "elsewhere")
    change_row(folder, 4, filename=where.format(absolute=outside))
    assert "leads out of it or is a link" in only_wrong(folder, 3)


@pytest.mark.parametrize("filename", ["missing.val", "cache.db", "", ".", "a\0b", b"bytes", 17, "x" * 5000])
def test_files_that_are_none(folder: Path, filename: object) -> None:
    change_row(folder, 4, filename=filename)
    only_wrong(folder, 3)


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe.val")
    change_row(folder, 4, filename="pipe.val")
    assert "is no file" in only_wrong(folder, 3)


def test_a_folder_may_be_named_by_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert all(isinstance(item, Item) for item in read(tmp_path / "link"))


def test_a_truncated_file(folder: Path) -> None:
    (path,) = folder.rglob("*.val")
    data = path.read_bytes()
    for length in [*range(0, 300), *range(300, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:length])
        assert isinstance(read(folder)[3], TruncatedState | UnknownLayout)
    os.truncate(path, 1 << 40)
    path.write_bytes(data[:100])
    os.truncate(path, 1 << 40)
    assert isinstance(read(folder)[3], TooLarge | TruncatedState | UnknownLayout)


def test_what_is_no_database(tmp_path: Path) -> None:
    assert not reader.is_stock_folder(tmp_path)
    for data in (b"", b"no database at all", b"SQLite format 3\0", b"SQLite format 3\0" + bytes(5000)):
        (tmp_path / "cache.db").write_bytes(data)
        with pytest.raises(UnknownLayout, match="LlamaDiskCache"):
            reader.found_in(tmp_path)


@pytest.mark.parametrize(
    "schema",
    [
        "CREATE TABLE Other (key, raw, mode, filename, value)",
        "CREATE TABLE Cache (key, raw, mode, filename)",
        "CREATE VIEW Cache AS WITH RECURSIVE n(key) AS (SELECT 1 UNION ALL SELECT key + 1 FROM n) "
        "SELECT key AS rowid, key, 0 AS raw, 4 AS mode, NULL AS filename, NULL AS value FROM n",
        "CREATE TABLE Cache (key, raw, mode, filename, value AS (zeroblob(1000000000)))",
    ],
)
def test_databases_of_another_kind(schema: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "cache.db")) as database:
        database.execute(schema)
    with pytest.raises(UnknownLayout, match="no table Cache as diskcache makes it"):
        reader.found_in(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        reader.found_in(tmp_path / "missing")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=20))
def test_a_changed_database_is_read_or_refused(folder: Path, changes: list[tuple[float, int]]) -> None:
    path = folder / "cache.db"
    original = path.read_bytes()
    data = bytearray(original)
    for where, value in changes:
        data[int(where * len(data))] = value
    try:
        path.write_bytes(data)
        with suppress(KvkeepError):
            for item in read(folder):
                assert isinstance(item, Item | KvkeepError)
    finally:
        path.write_bytes(original)


def test_a_schema_that_is_no_text_is_refused(folder: Path) -> None:
    """SQLite quotes names of the schema in its messages, and Python's driver fails at one that is no UTF-8."""
    path = folder / "cache.db"
    original = path.read_bytes()
    seen = set()
    for at in range(100, 4096, 3):
        if original[at]:
            path.write_bytes(original[:at] + b"\x80" + original[at + 1 :])
            try:
                list(read(folder))
            except KvkeepError as error:
                seen.add("decode" in str(error))
    assert seen == {True, False}
