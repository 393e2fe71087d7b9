"""The index's database: transactions, what its errors become, and which schemas are taken."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import exc, text

from kvkeep.store import engine
from kvkeep.store.engine import Index
from kvkeep.store.errors import (
    DamagedFile,
    DiskFull,
    KvkeepError,
    MigrationFailed,
    NotARoot,
    StoreError,
    StoreLocked,
    TooNew,
)
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.schema import REVISION
from kvkeep.store.sqlite_errors import translated


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = Index(tmp_path / "index.sqlite3")
    opened.upgrade()
    yield opened
    opened.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy database is given up at once."""
    pragmas = [pragma for pragma in engine._PRAGMAS if "busy_timeout" not in pragma]
    monkeypatch.setattr(engine, "_PRAGMAS", (*pragmas, "PRAGMA busy_timeout=0"))


def put(index: Index, name: str, value: int = 1) -> None:
    with index.write() as connection:
        connection.execute(text("INSERT INTO setting VALUES (:name, :value)"), {"name": name, "value": value})


def names(index: Index) -> list[str]:
    with index.read() as connection:
        return [name for (name,) in connection.execute(text("SELECT name FROM setting ORDER BY name"))]


def test_committed_rows_are_there_after_reopening(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite3")
    index.upgrade()
    put(index, "a")
    index.close()
    index = Index(tmp_path / "index.sqlite3")
    assert index.is_current()
    assert names(index) == ["a"]
    index.close()


def test_an_exception_rolls_everything_back(index: Index) -> None:
    def fail() -> None:
        with index.write() as connection:
            connection.execute(text("INSERT INTO setting VALUES ('a', 1)"))
            connection.execute(text("INSERT INTO setting VALUES ('b', 1)"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert names(index) == []


def test_a_failed_statement_rolls_everything_back(index: Index) -> None:
    put(index, "a")

    def fail() -> None:
        with index.write() as connection:
            connection.execute(text("INSERT INTO setting VALUES ('b', 1)"))
            connection.execute(text("INSERT INTO setting VALUES ('a', 1)"))

    with pytest.raises(DamagedFile, match="UNIQUE"):
        fail()
    assert names(index) == ["a"]


def test_a_reader_sees_one_moment_and_keeps_no_writer_waiting(index: Index) -> None:
    put(index, "a")
    with index.read() as connection:
        count = text("SELECT count(*) FROM setting")
        assert connection.execute(count).scalar() == 1
        put(index, "b")
        assert connection.execute(count).scalar() == 1
    assert names(index) == ["a", "b"]


def test_a_reader_sees_the_moment_at_which_it_began(index: Index) -> None:
    # SQLite's own BEGIN takes no snapshot before the first SELECT.
    with index.read() as connection:
        put(index, "later")
        assert connection.execute(text("SELECT count(*) FROM setting")).scalar() == 0


def test_a_new_reader_keeps_nobody_waiting_and_waits_for_nobody(index: Index, tmp_path: Path) -> None:
    put(index, "a")
    with index.write() as connection:
        connection.execute(text("INSERT INTO setting VALUES ('b', 1)"))
        other = Index(tmp_path / "index.sqlite3")
        assert names(other) == ["a"]
    assert names(other) == ["a", "b"]
    other.close()


@pytest.mark.usefixtures("impatient")
def test_second_writer_is_told_that_it_is_locked(index: Index, tmp_path: Path) -> None:
    other = Index(tmp_path / "index.sqlite3")
    with index.write(), pytest.raises(StoreLocked, match="database is locked"), other.write():
        pass
    put(other, "a")
    assert names(index) == ["a"]
    other.close()


def test_waiting_writer_gets_its_turn(index: Index, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from sqlalchemy import text; from kvkeep.store.engine import Index\n"
        "index = Index(Path(sys.argv[1])); print('ready', flush=True)\n"
        "with index.write() as connection: connection.execute(text(\"INSERT INTO setting VALUES ('other', 1)\"))\n"
    )
    with index.write() as connection:
        connection.execute(text("INSERT INTO setting VALUES ('mine', 1)"))
        other = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "index.sqlite3")], stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
    assert other.wait(30) == 0
    other.stdout.close()
    assert names(index) == ["mine", "other"]


def test_garbage_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite3").write_bytes(b"no database at all, but long enough to look like one" * 100)
    index = Index(tmp_path / "index.sqlite3")
    with pytest.raises(DamagedFile, match="not a database"):
        index.revision()
    index.close()


def test_root_with_a_garbage_index_is_refused_and_can_be_opened_once_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    garbage = tmp_path / "root" / "index.sqlite3"
    garbage.write_bytes(b"no database at all, but long enough to look like one" * 100)
    with pytest.raises(DamagedFile):
        open_root(tmp_path / "root")
    garbage.unlink()
    close_root(open_root(tmp_path / "root"))


def test_truncated_database_is_an_integrity_error(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite3")
    index.upgrade()
    for i in range(500):
        put(index, f"name {i} " + "x" * 200)
    index.close()
    with open(tmp_path / "index.sqlite3", "r+b") as file:
        file.truncate(8192)
    index = Index(tmp_path / "index.sqlite3")
    with pytest.raises(DamagedFile):
        names(index)
    index.close()


def test_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotARoot, match="is a file"):
        open_root(tmp_path / "file")


def test_root_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotARoot):
        open_root(tmp_path / "file" / "root")


def test_index_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root" / "index.sqlite3").mkdir(parents=True)
    with pytest.raises(NotARoot):
        open_root(tmp_path / "root")


def test_newer_schema_is_refused_with_both_versions(tmp_path: Path) -> None:
    close_root(open_root(tmp_path / "root"))
    index = Index(tmp_path / "root" / "index.sqlite3")
    with index.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '99.0.0'"))
        connection.exec_driver_sql("PRAGMA user_version=99000000")
    index.close()
    with pytest.raises(TooNew) as caught:
        open_root(tmp_path / "root")
    assert "schema 99.0.0" in str(caught.value)
    assert f"schema {REVISION}" in str(caught.value)
    # Refused means untouched.
    index = Index(tmp_path / "root" / "index.sqlite3")
    assert index.revision() == "99.0.0"
    index.close()


def test_empty_database_has_no_revision(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite3")
    assert index.revision() is None
    assert not index.is_current()
    index.close()


def test_failed_migration_says_so_and_keeps_what_was_there(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeep.migrations import upgrade

    def fail(connection: object) -> None:
        raise RuntimeError("no such column")

    monkeypatch.setattr(upgrade, "upgrade", fail)
    put(index, "a")
    with pytest.raises(MigrationFailed, match="no such column"):
        index.upgrade()
    assert names(index) == ["a"]


@pytest.mark.parametrize(
    ("pragma", "value"),
    [
        ("auto_vacuum", 2),
        ("journal_mode", "wal"),
        ("foreign_keys", 1),
        ("synchronous", 2),
        ("busy_timeout", 5000),
    ],
)
def test_every_connection_is_set_up(index: Index, pragma: str, value: object) -> None:
    with index.read(), index.read() as second:
        assert second.exec_driver_sql(f"PRAGMA {pragma}").scalar() == value


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        index = Index(tmp_path / "index.sqlite3")
        index.upgrade()
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.glob("index*")}
        index.close()
    finally:
        os.umask(mask)
    assert modes == dict.fromkeys(["index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm"], 0o600)


def test_disk_bytes_count_the_write_ahead_log(index: Index, tmp_path: Path) -> None:
    for i in range(50):
        put(index, f"{i}" + "x" * 500)
    files = list(tmp_path.glob("index.sqlite3*"))
    assert len(files) == 3
    assert index.disk_bytes == sum(file.stat().st_blocks * 512 for file in files)


def test_path_with_odd_characters_is_only_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "100% mine? #1 & ünï"
    folder.mkdir()
    index = Index(folder / "index.sqlite3")
    index.upgrade()
    put(index, "a")
    index.close()
    assert (folder / "index.sqlite3").stat().st_size > 0


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("database is locked", StoreLocked),
        ("database or disk is full", DiskFull),
        ("disk I/O error", DiskFull),
        ("file is not a database", DamagedFile),
        ("database disk image is malformed", DamagedFile),
        ("attempt to write a readonly database", NotARoot),
        ("unable to open database file", StoreError),
        ("something that nobody has heard of", StoreError),
    ],
)
def test_what_sqlite_says_becomes_an_error_of_ours(said: str, kind: type[KvkeepError]) -> None:
    with pytest.raises(KvkeepError, match=said) as caught, translated():
        raise exc.OperationalError("SELECT 1", {}, RuntimeError(said))
    assert type(caught.value) is kind
