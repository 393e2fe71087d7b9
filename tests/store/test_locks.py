"""Locks between processes, which exclude threads of one process all the same."""

from pathlib import Path

import pytest

from kvkeep.store.errors import StoreLocked
from kvkeep.store.locks import SharedLock, exclusive


def test_sharers_dont_exclude_each_other(tmp_path: Path) -> None:
    first, second = SharedLock(tmp_path / "lock"), SharedLock(tmp_path / "lock")
    first.share(0)
    second.share(0)
    with pytest.raises(StoreLocked):
        SharedLock(tmp_path / "lock").exclude(0)
    first.release()
    with pytest.raises(StoreLocked), exclusive(tmp_path / "lock", 0):
        pass
    second.release()
    with exclusive(tmp_path / "lock", 0):
        pass


def test_one_that_excludes_lets_nobody_in(tmp_path: Path) -> None:
    lock = SharedLock(tmp_path / "lock")
    lock.exclude(0)
    with pytest.raises(StoreLocked, match="lock stayed locked by another process for 0 seconds"):
        SharedLock(tmp_path / "lock").share(0)
    lock.share(0)
    other = SharedLock(tmp_path / "lock")
    other.share(0)
    other.release()
    lock.release()


def test_failed_upgrade_holds_nothing(tmp_path: Path) -> None:
    first, second = SharedLock(tmp_path / "lock"), SharedLock(tmp_path / "lock")
    first.share(0)
    second.share(0)
    with pytest.raises(StoreLocked):
        first.exclude(0)
    # What it shared before is given up too: two that want to upgrade must not wait for each other.
    second.exclude(0)
    second.release()


def test_releasing_twice_is_no_error(tmp_path: Path) -> None:
    lock = SharedLock(tmp_path / "lock")
    lock.share(0)
    lock.release()
    lock.release()


def test_an_exception_lets_go(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), exclusive(tmp_path / "lock", 0):
        raise RuntimeError
    with exclusive(tmp_path / "lock", 0):
        pass
