import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from entries import noise, opaque
from entries import store as store_entries
from synthetic import ATTENTION, RECURRENT

from kvkeep.cache.bundle import Bundle
from kvkeep.cache.bundle import writing as bundle_writing
from kvkeep.cache.prefix_cache import PrefixCache, token_bytes
from kvkeep.store.errors import DiskFull, IntegrityError

from .conftest import CHATS, SYSTEM, Kvkeep, held_by, id_of, keep, listed, opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompt.kvkeep"


def prefixes_of(file: Path) -> list[bytes]:
    with Bundle.open(file) as bundle:
        bundle.verify()
        return list(bundle.prefixes)


def test_a_prefix_is_written(kvkeep: Kvkeep, chats: Path, file: Path) -> None:
    name = id_of(kvkeep, chats, 2)
    before = held_by(chats)
    result = kvkeep("export", name, "--to", file, "--path", chats)
    assert result.exit_code == 0
    assert f"Exported 1 prefix to {file}: 6 entries, " in result.output
    assert f"  {name}  #{SYSTEM[0]} " in result.output
    assert "94 tokens\n" in result.output
    assert "   kvkeep import prompt.kvkeep\n" in result.output
    assert prefixes_of(file) == [token_bytes(CHATS[0])]
    assert held_by(chats) == before


def test_several_ids_share_what_they_share(kvkeep: Kvkeep, chats: Path, file: Path) -> None:
    names = [id_of(kvkeep, chats, number) for number in range(3)]
    found = json.loads(kvkeep("export", *names, "--to", file, "--path", chats, "--json").stdout)
    assert list(found) == ["path", "file", "label", "fingerprint", "prefixes", "entries", "bytes"]
    assert (found["entries"], found["bytes"]) == (4 + 3 * 2, file.stat().st_size)
    assert [(one["id"][:8], one["tokens"], one["exported_tokens"]) for one in found["prefixes"]] == [
        (name, 94, 94) for name in names
    ]
    assert len(prefixes_of(file)) == 3


def test_a_file_that_is_there(kvkeep: Kvkeep, chats: Path, file: Path) -> None:
    file.write_text("precious")
    result = kvkeep("export", id_of(kvkeep, chats), "--to", file, "--path", chats)
    assert (result.exit_code, result.output) == (2, f"kvkeep: {file} exists; --force replaces it\n")
    assert file.read_text() == "precious"
    assert kvkeep("export", id_of(kvkeep, chats), "--to", file, "--path", chats, "--force").exit_code == 0
    assert len(prefixes_of(file)) == 1


def test_a_place_where_nothing_can_be(kvkeep: Kvkeep, chats: Path, tmp_path: Path) -> None:
    name = id_of(kvkeep, chats)
    missing = tmp_path / "missing" / "file"
    result = kvkeep("export", name, "--to", missing, "--path", chats)
    assert result.exit_code == 2
    assert result.output == f"kvkeep: {missing} can't be written: {missing.parent} is no folder\n"
    for place in (tmp_path, "/dev/null"):
        result = kvkeep("export", name, "--to", place, "--path", chats, "--force")
        assert (result.exit_code, result.output) == (2, f"kvkeep: {place} can't be written: it is no ordinary file\n")


class Full(io.FileIO):
    """A file on a disk that has no room."""

    def write(self, _data: object) -> int:
        raise OSError(28, os.strerror(28))


def test_a_full_disk(kvkeep: Kvkeep, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stick").mkdir()
    name = id_of(kvkeep, chats)

    monkeypatch.setattr(bundle_writing.os, "fdopen", lambda descriptor, mode: io.BufferedWriter(Full(descriptor, mode)))
    result = kvkeep("export", name, "--to", tmp_path / "stick" / "file", "--path", chats)
    assert result.exit_code == DiskFull.exit_code
    assert result.output == f"kvkeep: writing {tmp_path}/stick/file failed: No space left on device\n"
    assert list((tmp_path / "stick").iterdir()) == []


def test_damage_is_said_and_not_exported(kvkeep: Kvkeep, breakable: Path, file: Path) -> None:
    name = id_of(kvkeep, breakable)
    with opened(breakable) as repository, repository.writing() as writing:
        with writing.blobs.read() as blobs:
            broken = {blob: bytes(blobs.get(blob) or b"")[:-1] + b"\0" for blob in list(blobs.ids())}
        writing.blobs.put(broken.items())
    result = kvkeep("export", name, "--to", file, "--path", breakable)
    assert result.exit_code // 10 == IntegrityError.exit_code // 10
    assert result.output.startswith("kvkeep: ")
    assert not file.exists()


def test_pinned_ones(kvkeep: Kvkeep, chats: Path, file: Path) -> None:
    arguments = ("export", "--pinned", "--to", file, "--path", chats)
    result = kvkeep(*arguments)
    assert (result.exit_code, result.output) == (2, "kvkeep: nothing is pinned; kvkeep pin pins prefixes\n")
    kvkeep("pin", id_of(kvkeep, chats), "--path", chats)
    assert kvkeep(*arguments).exit_code == 0
    assert len(prefixes_of(file)) == 1


def test_a_pinned_system_prompt_takes_nothing_of_a_chat_along(kvkeep: Kvkeep, chats: Path, file: Path) -> None:
    keep(chats, SYSTEM, CHATS[0])
    with opened(chats) as repository:
        PrefixCache(repository, ATTENTION.identity(), block_tokens=16).pin(CHATS[0][:70])
    found = json.loads(kvkeep("export", "--pinned", "--to", file, "--path", chats, "--json").stdout)
    assert [one["exported_tokens"] for one in found["prefixes"]] == [70]
    assert token_bytes(CHATS[0][70:73]) not in file.read_bytes()


def test_pinned_ones_of_two_models(kvkeep: Kvkeep, root: Path, file: Path) -> None:
    keep(root, CHATS[0], name="first")
    keep(root, CHATS[1], name="second")
    kvkeep("pin", id_of(kvkeep, root, 0), id_of(kvkeep, root, 1), "--path", root)
    both = kvkeep("export", "--pinned", "--to", file, "--path", root)
    assert both.exit_code == 2
    assert "--model chooses one" in both.output
    assert not file.exists()
    assert kvkeep("export", "--pinned", "--model", "second", "--to", file, "--path", root).exit_code == 0
    assert prefixes_of(file) == [token_bytes(CHATS[1])]
    assert kvkeep("export", "--pinned", "--model", "third", "--to", file, "--path", root, "--force").exit_code == 2


def test_ids_of_two_models(kvkeep: Kvkeep, root: Path, file: Path) -> None:
    keep(root, CHATS[0], name="first")
    keep(root, CHATS[1], name="second")
    result = kvkeep("export", id_of(kvkeep, root, 0), id_of(kvkeep, root, 1), "--to", file, "--path", root)
    assert result.exit_code == 2
    assert "a bundle holds prefixes of exactly one model" in result.output
    assert not file.exists()


def test_more_tokens_are_pinned_than_stored(kvkeep: Kvkeep, chats: Path, file: Path) -> None:
    kvkeep("pin", id_of(kvkeep, chats), "--path", chats)
    kvkeep("rm", id_of(kvkeep, chats), "--force", "--path", chats)
    result = kvkeep("export", "--pinned", "--to", file, "--path", chats)
    assert result.exit_code == 0
    assert "94 tokens, of which only the first 64 can be restored from it" in result.output


def test_tokens_that_nobody_knows(kvkeep: Kvkeep, root: Path, file: Path) -> None:
    keep(root, CHATS[0], made=RECURRENT)
    [whole] = [prefix["id"] for prefix in listed(kvkeep, root) if prefix["tokens"] == len(CHATS[0])]
    result = kvkeep("export", whole, "--to", file, "--path", root)
    assert result.exit_code == 2
    assert "of its 94 tokens only the last 14 are stored" in result.output
    assert "and name it by --pinned" in result.output
    with opened(root) as repository:
        PrefixCache(repository, RECURRENT.identity(), block_tokens=16).pin(CHATS[0])
    assert kvkeep("export", "--pinned", "--to", file, "--path", root).exit_code == 0


def test_a_whole_state_knows_its_tokens(kvkeep: Kvkeep, root: Path, file: Path) -> None:
    with opened(root) as repository:
        store_entries(repository, [opaque([1, 2, 3], noise(100))])
    assert kvkeep("export", id_of(kvkeep, root), "--to", file, "--path", root).exit_code == 0
    assert prefixes_of(file) == [token_bytes([1, 2, 3])]


def test_what_is_unclear_exits_with_2(kvkeep: Kvkeep, chats: Path, file: Path) -> None:
    name = id_of(kvkeep, chats)
    for arguments in (
        ("--to", file),
        (name, "--pinned", "--to", file),
        (name, "--model", "model", "--to", file),
        (name,),
        (name, "00000000", "--to", file),
    ):
        assert kvkeep("export", *arguments, "--path", chats).exit_code == 2
    assert not file.exists()


def test_nothing_there(kvkeep: Kvkeep, tmp_path: Path, file: Path) -> None:
    result = kvkeep("export", "12345678", "--to", file, "--path", tmp_path / "nothing")
    assert result.exit_code == 2
    assert "does not exist yet" in result.output
    assert not (tmp_path / "nothing").exists()


def test_in_a_process_of_its_own(kvkeep: Kvkeep, process: Callable[..., Any], filled: Path, file: Path) -> None:
    name = id_of(kvkeep, filled)
    done = process("export", name, "--to", file.name, "--path", filled, cwd=file.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(prefixes_of(file)) == 1


@pytest.mark.parametrize("name", ["index.sqlite3", "blobs-1/data.mdb", "lock", "new.kvkeep"])
def test_nothing_is_written_over_the_cache_itself(kvkeep: Kvkeep, chats: Path, name: str) -> None:
    result = kvkeep("export", id_of(kvkeep, chats), "--to", chats / name, "--force", "--path", chats)
    assert result.exit_code == 2
    assert "is in the cache folder" in result.output


def test_a_link_that_leads_nowhere_is_there_all_the_same(kvkeep: Kvkeep, chats: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    result = kvkeep("export", id_of(kvkeep, chats), "--to", link, "--path", chats)
    assert (result.exit_code, "--force replaces it" in result.output) == (2, True)
    assert link.is_symlink()


def test_a_name_moves_no_cursor_and_can_be_pasted(kvkeep: Kvkeep, chats: Path, tmp_path: Path) -> None:
    result = kvkeep("export", id_of(kvkeep, chats), "--to", tmp_path / "a\x1b[31m b", "--path", chats)
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "kvkeep import 'a" in result.output


def test_no_name(kvkeep: Kvkeep, chats: Path) -> None:
    assert kvkeep("export", id_of(kvkeep, chats), "--to", "", "--path", chats).exit_code == 2


def test_a_system_prompt_that_chats_share(kvkeep: Kvkeep, chats: Path, file: Path, tmp_path: Path) -> None:
    """Named by its pin, or by how many tokens it has."""
    arguments = ("--tokens", len(SYSTEM), "--path", chats)
    pinned = json.loads(kvkeep("pin", id_of(kvkeep, chats), *arguments, "--json").stdout)["pins"][0]["id"]
    assert kvkeep("export", pinned, "--to", file, "--path", chats).exit_code == 0
    other = tmp_path / "other"
    assert kvkeep("export", id_of(kvkeep, chats), "--to", other, *arguments).exit_code == 0
    assert prefixes_of(file) == prefixes_of(other) == [token_bytes(SYSTEM)]
    assert file.read_bytes() == other.read_bytes()
    assert kvkeep("export", "--pinned", "--to", file, "--force", *arguments).exit_code == 2
