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
from kvkeep.tools.verify import _MEANINGS

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
    result = kvkeep("verify", "--path", filled)
    assert result.exit_code == 0
    assert "Sound" in result.output
    assert "every byte is what its name says" in result.output


def test_a_sound_store_in_json(kvkeep: Kvkeep, filled: Path) -> None:
    result = kvkeep("verify", "--path", filled, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "path": str(filled),
        "exists": True,
        "fraction_read": 1.0,
        "sound": True,
        "recovered": [],
        "repaired": None,
        "counts": {"structure": 0, "damage": 0, "unreachable": 0, "garbage": 0},
        "findings": [],
    }


def test_rotten_bytes_exit_with_30(kvkeep: Kvkeep, breakable: Path) -> None:
    rot(breakable)
    result = kvkeep("verify", "--path", breakable)
    assert result.exit_code == 30
    assert "Damaged" in result.output
    assert "1 finding of this kind" in result.output
    assert "Sound" not in result.output


def test_rotten_bytes_in_json(kvkeep: Kvkeep, breakable: Path) -> None:
    rot(breakable)
    result = kvkeep("verify", "--path", breakable, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 30
    assert found["sound"] is False
    assert found["counts"] == {"structure": 0, "damage": 1, "unreachable": 0, "garbage": 0}
    assert [finding["trouble"] for finding in found["findings"]] == ["damage"]


def test_the_index_alone_does_not_show_rotten_bytes(kvkeep: Kvkeep, breakable: Path) -> None:
    rot(breakable)
    result = kvkeep("verify", "--path", breakable, "--index-only")
    assert result.exit_code == 0
    assert "no stored bytes were read" in result.output


def test_the_index_alone_shows_a_missing_blob(kvkeep: Kvkeep, breakable: Path) -> None:
    change(breakable, "UPDATE node SET blob = randomblob(32) WHERE start = 64")
    result = kvkeep("verify", "--path", breakable, "--index-only")
    assert result.exit_code == 30
    assert "Damaged" in result.output
    assert "Garbage" in result.output


def test_garbage_is_no_damage(kvkeep: Kvkeep, breakable: Path) -> None:
    change(breakable, "DELETE FROM node WHERE start = 192")
    result = kvkeep("verify", "--path", breakable)
    assert result.exit_code == 0
    assert "Garbage" in result.output
    assert "Damaged" not in result.output


def test_only_the_first_sentences_of_many_are_shown(kvkeep: Kvkeep, breakable: Path) -> None:
    repository = open_root(breakable)
    repository.blobs.put((BlobId(bytes([i] * 32)), b"nobody's") for i in range(1, 13))
    close_root(repository)
    output = kvkeep("verify", "--path", breakable).output
    assert output.count("no row names blob") == 5
    assert "and 7 more" in output
    assert "12 findings of this kind" in output


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_folder_that_does_not_exist_is_not_created(kvkeep: Kvkeep, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    path = tmp_path / "nowhere"
    result = kvkeep("verify", "--path", path, *arguments)
    assert result.exit_code == 0
    assert ("does not exist yet" in result.output) or json.loads(result.stdout)["exists"] is False
    assert not path.exists()


def test_a_file_in_place_of_the_index_exits_with_34(kvkeep: Kvkeep, tmp_path: Path) -> None:
    path = tmp_path / "root"
    path.mkdir()
    (path / "index.sqlite3").write_bytes(b"certainly no database at all" * 100)
    result = kvkeep("verify", "--path", path)
    assert result.exit_code == DamagedFile.exit_code == 34
    assert result.output.startswith("kvkeep: ")


def test_every_kind_of_trouble_has_a_meaning() -> None:
    assert [trouble.value for trouble in Trouble] == list(_MEANINGS)


# -- how much is read --------------------------------------------------------------------------------------------------


def test_a_fraction_is_read(kvkeep: Kvkeep, filled: Path) -> None:
    result = kvkeep("verify", "--path", filled, "--fraction", "0.5")
    assert result.exit_code == 0
    assert "50.0% that were read" in result.output
    assert json.loads(kvkeep("verify", "--path", filled, "--fraction", "0.5", "--json").stdout)["fraction_read"] == 0.5


@pytest.mark.parametrize("arguments", [("--fraction", "0"), ("--fraction", "1.5"), ("--fraction", "1", "--index-only")])
def test_a_share_that_makes_no_sense_exits_with_2(kvkeep: Kvkeep, filled: Path, arguments: tuple[str, ...]) -> None:
    result = kvkeep("verify", "--path", filled, *arguments)
    assert result.exit_code == 2
    assert result.output.startswith("kvkeep: --")


# -- repair ------------------------------------------------------------------------------------------------------------


def test_repair_removes_what_is_damaged_and_then_all_is_sound(kvkeep: Kvkeep, breakable: Path) -> None:
    rot(breakable)
    result = kvkeep("verify", "--path", breakable, "--repair")
    assert result.exit_code == 0
    assert "removed 1 damaged entry" in result.output
    after = json.loads(kvkeep("verify", "--path", breakable, "--json").stdout)
    assert after["sound"] is True
    assert after["counts"]["damage"] == 0


def test_repair_in_json(kvkeep: Kvkeep, breakable: Path) -> None:
    rot(breakable)
    found = json.loads(kvkeep("verify", "--path", breakable, "--repair", "--json").stdout)
    assert found["repaired"] == {"removed": 1, "swept": 0}
    assert found["sound"] is True


def test_repair_sweeps_what_nothing_names(kvkeep: Kvkeep, breakable: Path) -> None:
    change(breakable, "DELETE FROM node WHERE start = 192")
    found = json.loads(kvkeep("verify", "--path", breakable, "--repair", "--json").stdout)
    assert found["repaired"] == {"removed": 0, "swept": 1}
    assert found["findings"] == []


def test_repair_of_a_sound_store_changes_nothing(kvkeep: Kvkeep, filled: Path) -> None:
    before = kvkeep("ls", "--path", filled, "--json").stdout
    result = kvkeep("verify", "--path", filled, "--repair")
    assert result.exit_code == 0
    assert "Sound" in result.output
    assert kvkeep("ls", "--path", filled, "--json").stdout == before


def spoil_blobs(root: Path) -> None:
    """Damage LMDB's own pages."""
    [data] = root.glob("blobs*/data.mdb")
    with data.open("r+b") as file:
        for page in range(2, 6):
            file.seek(page * 4096 + 10)
            file.write(b"\xff" * 100)


def test_a_damaged_file_is_mended_and_said(kvkeep: Kvkeep, breakable: Path) -> None:
    spoil_blobs(breakable)
    first = kvkeep("verify", "--path", breakable, "--repair", "--json")
    found = json.loads(first.stdout)
    assert first.exit_code == 0
    assert found["sound"] is True
    assert found["recovered"]
    assert kvkeep("verify", "--path", breakable).exit_code == 0


def test_a_damaged_file_without_repair_exits_with_30_or_says_what_was_mended(kvkeep: Kvkeep, breakable: Path) -> None:
    spoil_blobs(breakable)
    result = kvkeep("verify", "--path", breakable)
    assert (result.exit_code == 30 and "A file itself is damaged" in result.output) or "Mended: " in result.output
    # It was found, so whoever comes next alone mends it.
    again = kvkeep("verify", "--path", breakable)
    assert again.exit_code == 0


def test_several_damaged_at_once(kvkeep: Kvkeep, breakable: Path) -> None:
    change(breakable, "UPDATE node SET blob = randomblob(32) WHERE start = 64")
    change(breakable, "UPDATE node SET n_tokens = 5 WHERE start = 192")
    result = kvkeep("verify", "--path", breakable, "--repair")
    assert result.exit_code == 0
    assert kvkeep("verify", "--path", breakable).exit_code == 0
