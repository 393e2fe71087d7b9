import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvkeep.store.check import Trouble
from kvkeep.store.errors import DamagedFile
from kvkeep.store.hashing import BlobId
from kvkeep.store.registry import close_root, open_root
from kvkeep.tools.check import _MEANINGS

Kvkeep = Callable[..., Any]


def change(root: Path, statement: str, *values: object) -> None:
    """Change a row behind kvkeep's back."""
    with closing(sqlite3.connect(root / "index.sqlite3")) as connection, connection:
        connection.execute(statement, values)


def rot(root: Path) -> None:
    """Bytes of a blob that aren't what its name says."""
    repository = open_root(root)
    with repository.blobs.read() as reader:
        name = BlobId(next(iter(reader.ids())))
    repository.blobs.put([(name, b"rotten" * 100)])
    close_root(repository)


def test_a_sound_store(kvkeep: Kvkeep, filled: Path) -> None:
    result = kvkeep("check", "--path", filled)
    assert result.exit_code == 0
    assert "Sound" in result.output
    assert "every byte is what its name says" in result.output


def test_a_sound_store_in_json(kvkeep: Kvkeep, filled: Path) -> None:
    result = kvkeep("check", "--path", filled, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "path": str(filled),
        "exists": True,
        "data_checked": True,
        "sound": True,
        "counts": {"damage": 0, "unreachable": 0, "garbage": 0},
        "findings": [],
    }


def test_rotten_bytes_exit_with_30(kvkeep: Kvkeep, breakable: Path) -> None:
    rot(breakable)
    result = kvkeep("check", "--path", breakable)
    assert result.exit_code == 30
    assert "Damaged" in result.output
    assert "1 finding of this kind" in result.output
    assert "Sound" not in result.output


def test_rotten_bytes_in_json(kvkeep: Kvkeep, breakable: Path) -> None:
    rot(breakable)
    result = kvkeep("check", "--path", breakable, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 30
    assert found["sound"] is False
    assert found["counts"] == {"damage": 1, "unreachable": 0, "garbage": 0}
    assert [finding["trouble"] for finding in found["findings"]] == ["damage"]


def test_the_index_alone_does_not_show_rotten_bytes(kvkeep: Kvkeep, breakable: Path) -> None:
    rot(breakable)
    result = kvkeep("check", "--path", breakable, "--index-only")
    assert result.exit_code == 0
    assert "no stored bytes were read" in result.output


def test_the_index_alone_shows_a_missing_blob(kvkeep: Kvkeep, breakable: Path) -> None:
    change(breakable, "UPDATE node SET blob = randomblob(32) WHERE start = 64")
    result = kvkeep("check", "--path", breakable, "--index-only")
    assert result.exit_code == 30
    assert "Damaged" in result.output
    assert "Garbage" in result.output


def test_garbage_is_no_damage(kvkeep: Kvkeep, breakable: Path) -> None:
    change(breakable, "DELETE FROM node WHERE start = 192")
    result = kvkeep("check", "--path", breakable)
    assert result.exit_code == 0
    assert "Garbage" in result.output
    assert "Damaged" not in result.output


def test_only_the_first_sentences_of_many_are_shown(kvkeep: Kvkeep, breakable: Path) -> None:
    repository = open_root(breakable)
    repository.blobs.put((BlobId(bytes([i] * 32)), b"nobody's") for i in range(1, 13))
    close_root(repository)
    output = kvkeep("check", "--path", breakable).output
    assert output.count("no row names blob") == 5
    assert "and 7 more" in output
    assert "12 findings of this kind" in output


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_folder_that_does_not_exist_is_not_created(kvkeep: Kvkeep, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    path = tmp_path / "nowhere"
    result = kvkeep("check", "--path", path, *arguments)
    assert result.exit_code == 0
    assert ("does not exist yet" in result.output) or json.loads(result.stdout)["exists"] is False
    assert not path.exists()


def test_a_file_in_place_of_the_index_exits_with_34(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "root"
    path.mkdir()
    (path / "index.sqlite3").write_bytes(b"certainly no database at all" * 100)
    result = kvkeep("check", "--path", path)
    assert result.exit_code == DamagedFile.exit_code == 34
    assert result.output.startswith("kvkeep: ")


def test_every_kind_of_trouble_has_a_meaning() -> None:
    assert [trouble.value for trouble in Trouble] == list(_MEANINGS)
