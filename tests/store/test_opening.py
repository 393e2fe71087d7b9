"""Who opens a root alone brings it in order: leftovers, half-done work, damage; and who comes beside others just opens."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from entries import chain_of, noise, store

from kvkeep.store import generations, nodes, settings
from kvkeep.store.blobs import PAGE_BYTES
from kvkeep.store.check import check
from kvkeep.store.errors import DamagedFile, StoreClosed
from kvkeep.store.marker import Ending, Marker
from kvkeep.store.opening import INDEX_FILE
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.space import DEFAULT_CAPACITY, MIN_CAPACITY

BLOCKS = chain_of(*([i] * 4 for i in range(8)), payload=noise(20_000))


@contextmanager
def opened(path: Path, capacity_bytes: int | None = None) -> Iterator[Repository]:
    repository = open_root(path, capacity_bytes)
    try:
        yield repository
    finally:
        close_root(repository)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A root with eight blocks, closed properly."""
    path = tmp_path / "filled"
    with opened(path, MIN_CAPACITY) as repository:
        store(repository, BLOCKS)
    return path


def killed(path: Path) -> None:
    """As if the last user had been killed."""
    Marker(path).set()


def n_nodes(repository: Repository) -> int:
    with repository.rows() as connection:
        return len(list(nodes.every(connection)))


def data_file(path: Path, generation: int = 1) -> Path:
    return generations.folder(path, generation) / "data.mdb"


# -- the marker ---------------------------------------------------------------------------------------------------------


def test_a_proper_close_leaves_no_marker(filled: Path) -> None:
    assert Marker(filled).read() is Ending.CLEAN
    with opened(filled):
        assert Marker(filled).read() is Ending.KILLED
    assert Marker(filled).read() is Ending.CLEAN


def test_a_kill_leaves_the_marker_and_the_next_use_clears_it(filled: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from kvkeep.store.registry import open_root\n"
        "open_root(Path(sys.argv[1])); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(filled)], check=False).returncode == 9
    assert Marker(filled).read() is Ending.KILLED
    with opened(filled) as repository:
        assert n_nodes(repository) == 8
    assert Marker(filled).read() is Ending.CLEAN


def test_reported_damage_outlives_a_proper_close_until_somebody_has_looked(filled: Path) -> None:
    with opened(filled) as repository:
        repository.report_damage("something is odd")
    assert Marker(filled).read() is Ending.DAMAGED
    with opened(filled) as repository:
        assert repository.recovered == []
    assert Marker(filled).read() is Ending.CLEAN


# -- what killed processes leave ----------------------------------------------------------------------------------------


def test_rows_without_blobs_and_blobs_without_rows_are_gone_after_a_kill(filled: Path) -> None:
    with opened(filled) as repository:
        with repository.rows() as connection:
            victims = list(nodes.every(connection))
        repository.blobs.delete([victims[7].blob])
        repository.blobs.put([(BLOCKS[0].row.blob[::-1], b"garbage")])  # type: ignore[list-item]
    killed(filled)
    with opened(filled) as repository:
        assert (n_nodes(repository), len(repository.blobs)) == (7, 7)
        assert check(repository) == []


def test_other_generations_are_leftovers_and_foreign_files_are_left_alone(filled: Path) -> None:
    shutil.copytree(generations.folder(filled, 1), generations.folder(filled, 7))
    (filled / "blobs-2").mkdir()
    (filled / "blobs-2" / "a letter.txt").write_text("dear")
    (filled / "blobs-3").write_text("a file")
    (filled / "notes.txt").write_text("mine")
    (filled / "blobs-x").mkdir()
    with opened(filled) as repository:
        assert n_nodes(repository) == 8
        assert check(repository) == []
    assert not generations.folder(filled, 7).exists()
    assert (filled / "blobs-2" / "a letter.txt").read_text() == "dear"
    assert (filled / "blobs-3").read_text() == "a file"
    assert (filled / "notes.txt").read_text() == "mine"
    assert (filled / "blobs-x").is_dir()


def test_whoever_comes_beside_others_changes_nothing(filled: Path) -> None:
    with opened(filled):
        shutil.copytree(generations.folder(filled, 1), generations.folder(filled, 7))
        script = (
            "import sys; from pathlib import Path; from kvkeep.store.registry import close_root, open_root\n"
            "close_root(open_root(Path(sys.argv[1])))"
        )
        subprocess.run([sys.executable, "-c", script, str(filled)], check=True)
        assert generations.folder(filled, 7).exists()


# -- damage of LMDB's file ----------------------------------------------------------------------------------------------


def tree_pages(path: Path) -> list[int]:
    """Pages of LMDB's trees, by their flags: branch 1, leaf 2."""
    content = path.read_bytes()
    found = []
    for number in range(2, len(content) // PAGE_BYTES):
        head = content[number * PAGE_BYTES : number * PAGE_BYTES + 16]
        if int.from_bytes(head[:8], "little") == number and int.from_bytes(head[10:12], "little") in (1, 2):
            found.append(number)
    return found


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def wreck_trees(path: Path) -> None:
    data = data_file(path)
    for number in tree_pages(data):
        overwrite(data, number * PAGE_BYTES + 12, b"\xff" * 64)


LMDB_DAMAGE: dict[str, Callable[[Path], None]] = {
    "tree pages": wreck_trees,
    "both meta pages": lambda path: overwrite(data_file(path), 0, b"\0" * 2 * PAGE_BYTES),
    "garbage": lambda path: data_file(path).write_bytes(noise(100_000)),
    "cut behind the meta pages": lambda path: os.truncate(data_file(path), 2 * PAGE_BYTES),
    "cut in a page": lambda path: os.truncate(data_file(path), 5 * PAGE_BYTES + 77),
    "a few bytes": lambda path: os.truncate(data_file(path), 10),
}


@pytest.mark.parametrize("damage", LMDB_DAMAGE)
def test_damaged_blobs_are_given_up_and_the_store_works_again(filled: Path, damage: str) -> None:
    LMDB_DAMAGE[damage](filled)
    killed(filled)
    with opened(filled) as repository:
        assert len(repository.recovered) == 1
        assert "given up" in repository.recovered[0]
        assert n_nodes(repository) == 0
        store(repository, BLOCKS)
        assert check(repository) == []
    assert [path.name for path in filled.glob("blobs-*")] == ["blobs-2"]
    with opened(filled) as repository:
        assert (repository.recovered, n_nodes(repository)) == ([], 8)


def test_an_emptied_file_is_a_new_one(filled: Path) -> None:
    os.truncate(data_file(filled), 0)
    killed(filled)
    with opened(filled) as repository:
        assert n_nodes(repository) == 0
        store(repository, BLOCKS)
        assert check(repository) == []


def test_a_missing_generation_is_an_empty_one(filled: Path) -> None:
    shutil.rmtree(generations.folder(filled, 1))
    killed(filled)
    with opened(filled) as repository:
        assert n_nodes(repository) == 0
        store(repository, BLOCKS)


# -- damage of SQLite's file --------------------------------------------------------------------------------------------


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path / INDEX_FILE)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def wreck_header(path: Path) -> None:
    overwrite(path / INDEX_FILE, 3, b"X")


def wreck_index_pages(path: Path) -> None:
    """Every page behind the schema's loses its type."""
    file = path / INDEX_FILE
    for number in range(1, file.stat().st_size // PAGE_BYTES):
        overwrite(file, number * PAGE_BYTES, b"\x77")


def wreck_schema_text(path: Path) -> None:
    """Names in the schema that aren't UTF-8 any more."""
    file = path / INDEX_FILE
    file.write_bytes(file.read_bytes().replace(b"ix_node_used", b"ix_nod\xd5_used").replace(b"n_tokens", b"n_tok\xffns"))


@pytest.mark.parametrize(
    "damage", [wreck_header, wreck_index_pages, wreck_schema_text, lambda path: os.truncate(path / INDEX_FILE, 5000)]
)
def test_an_index_that_cant_be_read_is_rebuilt(filled: Path, damage: Callable[[Path], None]) -> None:
    damage(filled)
    Marker(filled).report("it was met")
    with opened(filled) as repository:
        assert any("rebuilt" in sentence for sentence in repository.recovered)
        assert check(repository) == []
        store(repository, BLOCKS)
        assert n_nodes(repository) == 8
    assert sorted(path.name for path in filled.glob("index*")) == [INDEX_FILE]


def test_rows_are_saved_from_a_damaged_index(filled: Path) -> None:
    """One of its B-trees is gone; the table itself can be read."""
    with closing(sqlite3.connect(filled / INDEX_FILE)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'ix_node_used'").fetchone()
    overwrite(filled / INDEX_FILE, (page - 1) * PAGE_BYTES, b"\x77" * 100)
    Marker(filled).report("it was met")
    with opened(filled) as repository:
        assert len(repository.recovered) == 1
        assert n_nodes(repository) == 8
        assert repository.capacity_bytes == MIN_CAPACITY
        assert check(repository) == []


def test_damage_that_nobody_met_is_met_when_it_is_migrated_or_opened(filled: Path) -> None:
    wreck_header(filled)
    with opened(filled) as repository:
        assert repository.recovered
        store(repository, BLOCKS)


@pytest.mark.parametrize(
    ("statement", "left"),
    [
        ("UPDATE node SET key = CAST(key AS TEXT) || 'x' WHERE id = 3", 7),
        ("UPDATE node SET path = 7 WHERE id = 3", 7),
        ("UPDATE node SET blob = zeroblob(31) WHERE id = 3", 7),
        ("UPDATE node SET start = 'far' WHERE id = 3", 7),
        ("UPDATE node SET namespace_id = 99 WHERE id = 3", 7),
        ("UPDATE namespace SET block_tokens = 0", 0),
        ("UPDATE namespace SET fingerprint = 'text'", 0),
        ("UPDATE namespace SET ingredients = 'no JSON'", 8),
        ("INSERT INTO setting VALUES ('odd', 'text')", 8),
    ],
)
def test_rows_with_values_that_cant_be_are_removed(filled: Path, statement: str, left: int) -> None:
    change(filled, statement)
    Marker(filled).report("it was met")
    with opened(filled) as repository:
        assert n_nodes(repository) == left
        assert check(repository) == [] or left == 7, "what stood on it is unreachable, nothing worse"
        store(repository, BLOCKS) if left == 0 else None


def test_meeting_a_value_that_cant_be_is_remembered_for_the_next_open(filled: Path) -> None:
    change(filled, "UPDATE node SET path = 7 WHERE id = 3")
    with opened(filled) as repository, pytest.raises(DamagedFile, match="int where bytes belong"):
        n_nodes(repository)
    assert Marker(filled).read() is Ending.DAMAGED
    with opened(filled) as repository:
        assert n_nodes(repository) == 7


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE alembic_version SET version_num = '0.7.0'",
        "UPDATE alembic_version SET version_num = 'x.y'",
        "UPDATE alembic_version SET version_num = x'ff'",
        "DELETE FROM alembic_version",
        "ALTER TABLE alembic_version RENAME TO alembic_wersion",
    ],
)
def test_a_schema_that_cant_be_is_damage_and_no_newer_one(filled: Path, statement: str) -> None:
    change(filled, statement)
    with opened(filled) as repository:
        assert repository.recovered
        assert n_nodes(repository) == 8
        assert check(repository) == []


@pytest.mark.parametrize("generation", [0, -5, 1 << 62])
def test_a_generation_that_cant_be_is_damage(filled: Path, generation: int) -> None:
    change(filled, f"INSERT INTO setting VALUES ('{settings.GENERATION}', {generation})")
    with opened(filled) as repository:
        assert repository.recovered
        assert n_nodes(repository) == 8
        assert check(repository) == []


@pytest.mark.parametrize("capacity", [-1, 0, 5, 1 << 62])
def test_a_budget_that_cant_be_is_none(filled: Path, capacity: int) -> None:
    change(filled, f"UPDATE setting SET value = {capacity} WHERE name = '{settings.CAPACITY_BYTES}'")
    with opened(filled) as repository:
        assert repository.capacity_bytes == DEFAULT_CAPACITY


def test_a_foreign_database_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir()
    (path / INDEX_FILE).write_bytes(b"somebody else's file" * 100)
    with pytest.raises(DamagedFile, match="no index of kvkeep"):
        open_root(path)
    assert (path / INDEX_FILE).read_bytes() == b"somebody else's file" * 100


# -- mending in use -----------------------------------------------------------------------------------------------------


def test_damage_that_is_met_in_use_is_mended_in_place(filled: Path) -> None:
    change(filled, "UPDATE node SET path = 7 WHERE id = 3")
    with opened(filled) as repository:
        with pytest.raises(DamagedFile):
            n_nodes(repository)
        assert repository.recover() == [f"1 rows of {filled / INDEX_FILE} were damaged and are removed"]
        assert n_nodes(repository) == 7
        store(repository, BLOCKS[2:3])
        assert n_nodes(repository) == 8


def test_mending_waits_for_those_who_read_and_keeps_new_ones_out(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.store.repository.CLOSE_SECONDS", 0.05)
    with opened(filled) as repository:
        with repository.snapshot():
            assert repository.recover() == []
        assert n_nodes(repository) == 8


def test_a_closed_repository_isnt_mended(filled: Path) -> None:
    with opened(filled) as repository:
        pass
    with pytest.raises(StoreClosed):
        repository.recover()
