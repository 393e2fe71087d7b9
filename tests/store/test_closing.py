"""Interrupts and long readers while a repository is closed or mended: it is never lost for good."""

import threading
from pathlib import Path

import lmdb
import pytest
from entries import block, store

from kvkeep.store import repository as module
from kvkeep.store.blobs import DATA_FILE
from kvkeep.store.errors import DiskFull, StoreClosed, StoreError
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository

BLOCK = block([1, 2, 3, 4])


def full(*_: object) -> object:
    """What a full disk does."""
    raise DiskFull("no room")


def test_the_last_reader_closes_what_nobody_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.01)
    repository = open_root(root, 32 << 20)
    store(repository, [BLOCK])
    with repository.snapshot() as snapshot:
        close_root(repository)
        assert snapshot.blobs.get(BLOCK.row.blob) is not None
        with pytest.raises(StoreClosed):
            repository.refresh()
    again = open_root(root)
    assert len(again.blobs) == 1
    close_root(again)


def test_an_interrupted_close_is_a_close_all_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = open_root(root, 32 << 20)

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(repository._left, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            close_root(repository)
    close_root(open_root(root))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_mending_is_done_by_the_next_one(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    store(repository, [BLOCK])

    def interrupted(*_: object) -> object:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "open_parts", interrupted)
        with pytest.raises(error):
            repository.recover()
    repository.refresh()
    assert len(repository.blobs) == 1


def test_a_disk_that_is_full_while_it_is_mended_is_tried_again(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "open_parts", full)
        with pytest.raises(DiskFull):
            repository.recover()
        with pytest.raises(DiskFull, match="no room"):
            repository.refresh()
    with pytest.raises(DiskFull, match="no room"):
        repository.refresh()
    monkeypatch.setattr(module.time, "monotonic", lambda: 1e12)
    store(repository, [BLOCK])


def test_what_is_lost_can_be_closed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = open_root(root, 32 << 20)

    with monkeypatch.context() as patch:
        patch.setattr(module, "open_parts", full)
        with pytest.raises(DiskFull):
            repository.recover()
    close_root(repository)
    close_root(open_root(root))


def test_a_budget_that_cant_be_remembered_leaves_nothing_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Repository, "agree_on_capacity", full)
        with pytest.raises(DiskFull):
            open_root(root, 32 << 20)
    close_root(open_root(root, 32 << 20))


def test_lmdb_goes_on_after_a_write_of_its_own_has_failed(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: from then on it refuses everything, although nothing is damaged."""
    store(repository, [BLOCK])
    failed: list[str] = []
    environment = repository.blobs._env

    class Failing:
        def begin(self, **_: object) -> object:
            failed.append("begin")
            raise lmdb.PanicError("had fatal error")

        close = environment.close

    monkeypatch.setattr(repository.blobs, "_env", Failing())
    store(repository, [block([5, 6, 7, 8])])
    assert len(repository.blobs) == 2
    assert failed == ["begin"]


def test_nobody_cuts_a_file_that_another_process_has_made_longer(repository: Repository) -> None:
    """Only who has the writer's lock makes it longer, and a larger budget is taken over there alone."""
    data = repository.blobs.folder / DATA_FILE
    repository.agree_on_capacity(128 << 20)
    before = data.stat().st_size
    repository.refresh()
    assert data.stat().st_size == before
    with repository.writing():
        assert data.stat().st_size > before
    assert repository.capacity_bytes == 128 << 20


def test_sizes_can_be_asked_for_while_another_thread_changes_them(repository: Repository) -> None:
    store(repository, [BLOCK])
    stop = threading.Event()
    errors: list[Exception] = []

    def ask() -> None:
        while not stop.wait(0.001):
            try:
                assert repository.blobs.used_bytes <= repository.blobs.file_bytes
            except StoreError as error:
                errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for step in range(200):
        repository.blobs.limit((8 << 20) + (step % 2 << 20))
    stop.set()
    asking.join(60)
    assert errors == []
