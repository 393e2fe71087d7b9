"""One open repository per root and process."""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from entries import block, store

from kvkeep.store.errors import NotARoot, StoreClosed, StoreLocked, TooNew, UsageError
from kvkeep.store.locks import exclusive
from kvkeep.store.opening import ROOT_LOCK
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository


def is_open(repository: Repository) -> bool:
    try:
        with repository.rows():
            return True
    except StoreClosed:
        return False


def test_the_same_root_is_the_same_object(root: Path) -> None:
    first, second = open_root(root), open_root(root)
    assert first is second
    close_root(first)
    close_root(second)


@pytest.mark.parametrize("spelling", ["link", "link/../link", "./root/.", "root/../root"])
def test_another_spelling_is_the_same_root(tmp_path: Path, spelling: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "root", target_is_directory=True)
    first = open_root(tmp_path / "root")
    second = open_root(tmp_path / spelling)
    assert first is second
    close_root(first)
    close_root(second)
    assert not is_open(first)


def test_relative_path_is_the_same_root_after_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = open_root(Path("root"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert open_root(tmp_path / "root") is first
    close_root(first)
    close_root(first)


def test_only_the_last_user_closes_it(root: Path) -> None:
    repository = open_root(root)
    open_root(root)
    open_root(root)
    close_root(repository)
    close_root(repository)
    assert is_open(repository)
    close_root(repository)
    assert not is_open(repository)


def test_closing_once_too_often_closes_nobody_elses(root: Path) -> None:
    first = open_root(root)
    close_root(first)
    second = open_root(root)
    assert second is not first
    close_root(first)
    assert is_open(second)
    close_root(second)


def test_a_root_can_be_opened_again(root: Path) -> None:
    repository = open_root(root)
    store(repository, [block([1])])
    close_root(repository)
    repository = open_root(root)
    assert len(repository.blobs) == 1
    close_root(repository)


def test_different_roots_are_different_stores(tmp_path: Path) -> None:
    first, second = open_root(tmp_path / "a"), open_root(tmp_path / "b")
    store(first, [block([1])])
    assert len(second.blobs) == 0
    close_root(first)
    close_root(second)


def test_failed_open_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    with pytest.raises(NotARoot):
        open_root(tmp_path / "root")
    (tmp_path / "root").unlink()
    close_root(open_root(tmp_path / "root"))


def test_refused_open_leaves_no_file_open(root: Path) -> None:
    repository = open_root(root)
    with repository.index.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '99.0.0'")
        connection.exec_driver_sql("PRAGMA user_version=99000000")
    close_root(repository)
    with pytest.raises(TooNew):
        open_root(root)
    held = [file.path for file in psutil.Process().open_files()]
    assert [path for path in held if path.startswith(str(root))] == []
    shutil.rmtree(root)


def test_bad_capacity_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        open_root(tmp_path / "root", 5)
    assert not (tmp_path / "root").exists()


def test_an_open_root_holds_its_lock_and_a_closed_one_lets_it_go(root: Path) -> None:
    repository = open_root(root)
    with pytest.raises(StoreLocked), exclusive(root / ROOT_LOCK, 0):
        pass
    close_root(repository)
    with exclusive(root / ROOT_LOCK, 0):
        pass


def test_a_dead_process_leaves_nothing_locked(root: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from kvkeep.store.registry import open_root\n"
        "repository = open_root(Path(sys.argv[1]))\n"
        "with repository.writing():\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(root)], check=False).returncode == -9
    repository = open_root(root)
    with repository.writing(timeout=0):
        pass
    close_root(repository)


def test_another_budget_holds_from_the_next_open_on(tmp_path: Path) -> None:
    first = open_root(tmp_path / "root", 32 << 20)
    second = open_root(tmp_path / "root", 64 << 20)
    assert second is first
    assert first.capacity_bytes == 32 << 20
    close_root(second)
    close_root(first)
    third = open_root(tmp_path / "root")
    assert third.capacity_bytes == 64 << 20
    close_root(third)
