import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import op

from kvkeep.migrations.upgrade import revisions
from kvkeep.store import opening, space
from kvkeep.store.errors import DiskFull, MigrationFailed, StoreError, StoreLocked, TooNew
from kvkeep.store.locks import SharedLock
from kvkeep.store.opening import INDEX_FILE, ROOT_LOCK
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.schema import REVISION
from kvkeep.tools import migrate as module

from .conftest import CHATS, Kvkeep, held_by, id_of, keep, listed, person_who_says

OLD = "0.1.0"


@pytest.fixture
def old(kvkeep: Kvkeep, chats: Path) -> Path:
    """A store that holds `CHATS`, with the schema of an earlier release. tests/golden has real ones."""
    assert kvkeep("migrate", "--to", OLD, "--yes", "--no-backup", "--path", chats).exit_code == 0
    return chats


def asked(path: Path, question: str) -> list[tuple[Any, ...]]:
    """What SQLite answers about the index there, or a backup."""
    index = path / INDEX_FILE if path.is_dir() else path
    with closing(sqlite3.connect(index)) as connection:
        return connection.execute(question).fetchall()


def schema_of(path: Path) -> str:
    [(found,)] = asked(path, "SELECT version_num FROM alembic_version")
    return str(found)


def content_of(path: Path) -> list[tuple[Any, ...]]:
    return [asked(path, f"SELECT * FROM {table}") for table in ("sqlite_master", "node", "setting", "namespace")]  # type: ignore[misc]


def make_newer(path: Path) -> None:
    asked(path, "PRAGMA user_version=99001002")
    with closing(sqlite3.connect(path / INDEX_FILE)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '99.1.2'")


def answer(kvkeep: Kvkeep, path: Path, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    result = kvkeep("migrate", "--path", path, "--json", *arguments)
    assert result.exit_code == exit_code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_check_says_what_there_is_to_do_and_does_nothing(kvkeep: Kvkeep, old: Path) -> None:
    before, files = content_of(old), sorted(os.listdir(old))
    result = kvkeep("migrate", "--check", "--path", old)
    assert result.exit_code == MigrationFailed.exit_code == 21
    assert f"Schema: {OLD}; this kvkeep's is {REVISION}." in result.output
    assert "  0.3.0  Pins: beginnings of prompts that are never evicted.\n" in result.output
    assert f"\n   kvkeep migrate --path {old}\n" in result.output
    assert (content_of(old), sorted(os.listdir(old))) == (before, files)
    found = answer(kvkeep, old, "--check", exit_code=21)
    assert [change["revision"] for change in found.pop("changes")] == revisions()[1:]
    assert found == {
        "path": str(old),
        "exists": True,
        "schema": OLD,
        "wanted": REVISION,
        "ours": REVISION,
        "state": "needed",
        "lost": {},
        "migrated": False,
        "backup": None,
        "recovered": [],
    }


def test_check_of_a_current_folder_and_of_a_newer_one(kvkeep: Kvkeep, tmp_path: Path) -> None:
    keep(tmp_path / "one", CHATS[0])
    result = kvkeep("migrate", "--check", "--path", tmp_path / "one")
    assert result.exit_code == 0
    assert "There is nothing to do." in result.output
    assert answer(kvkeep, tmp_path / "one", "--check")["state"] == "current"
    make_newer(tmp_path / "one")
    result = kvkeep("migrate", "--check", "--path", tmp_path / "one")
    assert result.exit_code == TooNew.exit_code == 22
    assert "99.1.2" in result.output
    assert answer(kvkeep, tmp_path / "one", "--check", exit_code=22)["state"] == "newer"


def test_a_newer_folder_is_refused_and_the_sentence_names_the_command(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "newer"
    keep(path, CHATS[0])
    make_newer(path)
    for arguments in (("migrate",), ("migrate", "--to", OLD, "--yes"), ("stats",)):
        result = kvkeep(*arguments, "--path", path)
        assert result.exit_code == TooNew.exit_code
        assert f"has schema 99.1.2, which is newer than schema {REVISION} of this kvkeep: update kvkeep" in result.output
        assert f"with the newer kvkeep: kvkeep migrate --to {REVISION} --path {path}\n" in result.output
    assert schema_of(path) == "99.1.2"
    assert not list(path.glob("*backup*"))


def test_a_folder_that_does_not_exist(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    for arguments in ((), ("--check",), ("--to", OLD)):
        result = kvkeep("migrate", "--path", path, *arguments)
        assert (result.exit_code, result.output) == (0, f"{path} does not exist yet: nothing is kept there.\n")
    assert answer(kvkeep, path)["exists"] is False
    assert not path.exists()


def test_it_is_migrated_and_the_backup_is_the_index_as_it_was(kvkeep: Kvkeep, old: Path) -> None:
    before = content_of(old)
    result = kvkeep("migrate", "--path", old)
    assert result.exit_code == 0
    backup = old / f"index-{OLD}.backup.sqlite3"
    assert f"\n   {backup}\n" in result.output
    assert f"\n   kvkeep migrate --to {OLD} --path {old}\n" in result.output
    assert schema_of(old) == REVISION
    assert (schema_of(backup), content_of(backup)) == (OLD, before)
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    again = kvkeep("migrate", "--path", old)
    assert again.exit_code == 0
    assert "There is nothing to do." in again.output
    assert [name.name for name in old.glob("*backup*")] == [backup.name]
    assert len(listed(kvkeep, old)) == len(CHATS)


def test_a_backup_in_the_place_of_the_index_is_the_store_as_it_was(kvkeep: Kvkeep, old: Path) -> None:
    backup = Path(answer(kvkeep, old)["backup"])
    keep(old, [*CHATS[0], 1, 2, 3])
    backup.replace(old / INDEX_FILE)
    assert schema_of(old) == OLD
    assert [prefix["tokens"] for prefix in listed(kvkeep, old)] == [len(chat) for chat in CHATS]
    kvkeep("verify", "--repair", "--path", old)


def test_an_earlier_backup_stays(kvkeep: Kvkeep, old: Path) -> None:
    first = Path(answer(kvkeep, old)["backup"])
    content = first.read_bytes()
    kvkeep("migrate", "--to", OLD, "--yes", "--no-backup", "--path", old)
    second = Path(answer(kvkeep, old)["backup"])
    assert second.name == f"index-{OLD}.backup-2.sqlite3"
    assert first.read_bytes() == content


def test_a_backup_goes_where_it_is_asked_for(kvkeep: Kvkeep, old: Path, tmp_path: Path) -> None:
    place = tmp_path / "kept.sqlite3"
    assert answer(kvkeep, old, "--backup", place)["backup"] == str(place)
    assert schema_of(place) == OLD
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [place.name]
    assert not list(old.glob("*backup*"))


@pytest.mark.parametrize("name", ["index.sqlite3-journal", "blobs-2", "index.sqlite3.new", "mine.sqlite3"])
def test_a_backup_takes_no_name_of_the_cache(kvkeep: Kvkeep, old: Path, name: str) -> None:
    result = kvkeep("migrate", "--backup", old / name, "--path", old)
    assert result.exit_code == 2
    assert "is in the cache folder" in result.output
    assert schema_of(old) == OLD


def test_without_a_backup(kvkeep: Kvkeep, old: Path) -> None:
    found = answer(kvkeep, old, "--no-backup")
    assert (found["migrated"], found["backup"], schema_of(old)) == (True, None, REVISION)
    assert not list(old.glob("*backup*"))


def test_nothing_is_written_over_a_file_that_exists(kvkeep: Kvkeep, old: Path, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.write_text("mine")
    result = kvkeep("migrate", "--backup", place, "--path", old)
    assert result.exit_code == 2
    assert f"{place} exists" in result.output
    assert (place.read_text(), schema_of(old)) == ("mine", OLD)


def test_nor_over_one_that_is_made_meanwhile(
    kvkeep: Kvkeep, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "mine"
    report(monkeypatch, lambda done, total: place.write_text("mine"))
    assert kvkeep("migrate", "--backup", place, "--path", old).exit_code == 2
    assert (place.read_text(), schema_of(old)) == ("mine", OLD)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [place.name]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--check", "--no-backup"),
        ("--check", "--backup", "x"),
        ("--no-backup", "--backup", "x"),
        ("--backup", "/nowhere/at/all"),
    ],
)
def test_what_is_unclear_exits_with_2(kvkeep: Kvkeep, old: Path, arguments: tuple[str, ...]) -> None:
    assert kvkeep("migrate", "--path", old, *arguments).exit_code == 2
    assert schema_of(old) == OLD


# -- what goes wrong -----------------------------------------------------------------------------------------------------


def report(monkeypatch: pytest.MonkeyPatch, do: Callable[[int, int], object]) -> None:
    """Do something when the copy has got on."""

    @contextmanager
    def progress(_what: str) -> Iterator[Callable[[int, int], object]]:
        yield do

    monkeypatch.setattr(module, "bytes_progress", progress)


def test_progress_ends_with_all_of_it(kvkeep: Kvkeep, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    report(monkeypatch, lambda done, total: seen.append((done, total)))
    backup = Path(answer(kvkeep, old)["backup"])
    assert seen[-1] == (backup.stat().st_size, backup.stat().st_size)


def test_an_interrupted_copy_leaves_nothing_and_changes_nothing(
    kvkeep: Kvkeep, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    before, files = content_of(old), sorted(set(os.listdir(old)) - {"in-use"})
    report(monkeypatch, interrupt)
    assert kvkeep("migrate", "--path", old).exit_code == 130
    assert (content_of(old), sorted(set(os.listdir(old)) - {"in-use"})) == (before, files)


def test_a_disk_that_cannot_hold_the_copy_is_a_sentence(kvkeep: Kvkeep, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space.Disk, "room", lambda _disk, _reserve: 4095)
    result = kvkeep("migrate", "--path", old)
    assert result.exit_code == DiskFull.exit_code == 52
    assert "bytes doesn't fit: the disk of " in result.output
    assert "--no-backup writes none\n" in result.output
    assert schema_of(old) == OLD
    assert not list(old.glob("*backup*"))
    assert kvkeep("migrate", "--no-backup", "--path", old).exit_code == 0


def test_what_a_killed_copy_has_left_goes(kvkeep: Kvkeep, old: Path) -> None:
    (old / f"index-{OLD}.backup.sqlite3.abcdefgh.copying").write_text("half")
    (old / f"index-{OLD}.backup.sqlite3.gz").write_text("somebody's")
    assert kvkeep("migrate", "--path", old).exit_code == 0
    names = sorted(path.name for path in old.glob("*backup*"))
    assert names == [f"index-{OLD}.backup.sqlite3", f"index-{OLD}.backup.sqlite3.gz"]


def test_a_failing_migration_says_so_and_keeps_the_backup(kvkeep: Kvkeep, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("the power went")

    before = content_of(old)
    with monkeypatch.context() as patch:
        patch.setattr(op, "create_table", fail)
        result = kvkeep("migrate", "--path", old)
    assert result.exit_code == MigrationFailed.exit_code
    assert "is unchanged: the power went" in result.output
    assert content_of(old) == before
    assert content_of(old / f"index-{OLD}.backup.sqlite3") == before
    assert kvkeep("migrate", "--path", old).exit_code == 0


def test_while_others_have_it_open_the_sentence_says_what_to_do(
    kvkeep: Kvkeep, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "OPEN_SECONDS", 0.01)
    other = SharedLock(old / ROOT_LOCK)
    other.share(0)
    try:
        for command in ("migrate", "stats"):
            result = kvkeep(command, "--path", old)
            assert result.exit_code == StoreLocked.exit_code == 12
            assert f"{old} must be migrated to schema {REVISION}, and other programs keep it open" in result.output
            assert f"kvkeep migrate --path {old}\n" in result.output
        with pytest.raises(StoreLocked, match="must be migrated"):
            open_root(old)
        assert kvkeep("migrate", "--check", "--path", old).exit_code == 21
    finally:
        other.release()
    assert schema_of(old) == OLD
    assert kvkeep("migrate", "--path", old).exit_code == 0


def test_a_current_folder_in_use_needs_nothing(kvkeep: Kvkeep, chats: Path) -> None:
    repository = open_root(chats)
    try:
        assert kvkeep("migrate", "--path", chats).exit_code == 0
        assert kvkeep("migrate", "--check", "--path", chats).exit_code == 0
    finally:
        close_root(repository)


def test_a_damaged_index_is_mended_first(kvkeep: Kvkeep, old: Path) -> None:
    [(page,)] = asked(old, "SELECT rootpage FROM sqlite_master WHERE name = 'ix_node_used'")
    with (old / INDEX_FILE).open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\x77" * 100)
    result = kvkeep("migrate", "--path", old)
    assert result.exit_code == 0
    assert "Mended: " in result.output
    assert schema_of(old) == REVISION
    assert len(listed(kvkeep, old)) == len(CHATS)


def test_an_index_that_is_none_says_how_to_mend_it(kvkeep: Kvkeep, old: Path) -> None:
    (old / INDEX_FILE).write_bytes(b"not a database at all" * 500)
    result = kvkeep("migrate", "--path", old)
    assert result.exit_code == 34
    assert f"kvkeep verify --repair --path {old}" in result.output
    assert kvkeep("verify", "--repair", "--path", old).exit_code == 0


# -- back ----------------------------------------------------------------------------------------------------------------


def test_a_way_back_says_what_is_lost_and_needs_a_yes(kvkeep: Kvkeep, chats: Path) -> None:
    kvkeep("pin", id_of(kvkeep, chats), "--path", chats)
    before = held_by(chats)
    result = kvkeep("migrate", "--to", "0.2.0", "--path", chats)
    assert result.exit_code == 2
    assert "Will be lost: pins (1)." in result.output
    assert "--yes is needed" in result.output
    assert held_by(chats) == before
    assert answer(kvkeep, chats, "--to", "0.2.0", "--check", exit_code=21)["lost"] == {"pins": 1}
    result = kvkeep("migrate", "--to", "0.2.0", "--yes", "--path", chats)
    assert result.exit_code == 0
    assert f"Opening it with this kvkeep migrates it to {REVISION} again." in result.output
    assert schema_of(chats / f"index-{REVISION}.backup.sqlite3") == REVISION
    assert schema_of(chats) == "0.2.0"
    assert held_by(chats) == before
    assert json.loads(kvkeep("pin", "--list", "--json", "--path", chats).stdout)["pins"] == []


@pytest.mark.parametrize("agrees", [True, False])
def test_a_person_is_asked(kvkeep: Kvkeep, chats: Path, monkeypatch: pytest.MonkeyPatch, agrees: bool) -> None:
    questions = person_who_says(monkeypatch, agrees)
    result = kvkeep("migrate", "--to", OLD, "--path", chats)
    assert result.exit_code == (0 if agrees else 1)
    assert questions == [f"Go back from schema {REVISION} to {OLD}?"]
    assert schema_of(chats) == (OLD if agrees else REVISION)


def test_the_way_up_to_an_older_schema_asks_nobody(kvkeep: Kvkeep, old: Path) -> None:
    assert answer(kvkeep, old, "--to", "0.2.0")["migrated"] is True
    assert schema_of(old) == "0.2.0"
    assert answer(kvkeep, old, "--to", "0.2.0")["state"] == "current"


def test_a_way_that_has_become_another_one_meanwhile_is_not_gone(
    kvkeep: Kvkeep, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was asked about a way back."""
    looked = module._look

    def look(path: Path, wanted: str) -> module.Way:
        way = looked(path, wanted)
        close_root(open_root(path))
        return way

    monkeypatch.setattr(module, "_look", look)
    result = kvkeep("migrate", "--to", "0.2.0", "--path", old)
    assert result.exit_code == StoreError.exit_code
    assert f"was brought to schema {REVISION} meanwhile" in result.output
    assert schema_of(old) == REVISION
    assert not list(old.glob("*backup*"))


@pytest.mark.parametrize("revision", ["0.0.1", "head", "-1", "base", ""])
def test_an_unknown_schema_is_refused_with_the_known_ones(kvkeep: Kvkeep, chats: Path, revision: str) -> None:
    result = kvkeep("migrate", "--to", revision, "--yes", "--path", chats)
    assert result.exit_code == 2
    assert f"knows: {', '.join(revisions())}; not {revision!r}" in result.output
    assert schema_of(chats) == REVISION
