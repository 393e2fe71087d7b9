"""Remembered digests of model files: valid for exactly the file that was hashed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep.store import digests
from kvkeep.store.digests import FileStamp
from kvkeep.store.repository import Repository

DIGEST = b"d" * 32


def known(repository: Repository, stamp: FileStamp) -> bytes | None:
    with repository.rows() as connection:
        return digests.get(connection, stamp)


def remember(repository: Repository, stamp: FileStamp, digest: bytes = DIGEST) -> None:
    with repository.index.write() as connection:
        digests.put(connection, stamp, digest)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def test_remembered_digest_is_found_under_any_spelling(repository: Repository, model: Path) -> None:
    remember(repository, FileStamp.of(model))
    (model.parent / "link").symlink_to(model)
    assert known(repository, FileStamp.of(model)) == DIGEST
    assert known(repository, FileStamp.of(model.parent / "link")) == DIGEST


@pytest.mark.parametrize("field", ["path", "size", "mtime_ns", "ctime_ns", "inode"])
def test_any_other_stamp_is_another_file(repository: Repository, model: Path, field: str) -> None:
    stamp = FileStamp.of(model)
    remember(repository, stamp)
    value = getattr(stamp, field)
    assert known(repository, replace(stamp, **{field: value + "x" if field == "path" else value + 1})) is None


def test_rewrite_of_the_same_size_with_its_old_mtime_is_noticed(repository: Repository, model: Path) -> None:
    stamp = FileStamp.of(model)
    remember(repository, stamp)
    model.write_bytes(b"WEIGHTS")
    os.utime(model, ns=(stamp.mtime_ns, stamp.mtime_ns))
    changed = FileStamp.of(model)
    assert (changed.size, changed.mtime_ns, changed.inode) == (stamp.size, stamp.mtime_ns, stamp.inode)
    assert changed.ctime_ns != stamp.ctime_ns
    assert known(repository, changed) is None


def test_a_path_has_one_digest(repository: Repository, model: Path) -> None:
    old = FileStamp.of(model)
    remember(repository, old)
    new = replace(old, mtime_ns=old.mtime_ns + 1)
    remember(repository, new, b"e" * 32)
    assert known(repository, old) is None
    assert known(repository, new) == b"e" * 32


def test_missing_file_has_no_stamp(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileStamp.of(tmp_path / "nowhere")
