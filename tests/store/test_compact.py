"""Writing live blobs anew: what it brings, what it needs, what others see meanwhile."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from entries import block, chain_of, noise, store

from kvkeep.store import compact as module
from kvkeep.store import generations, nodes, settings
from kvkeep.store.check import check
from kvkeep.store.compact import Plan, compact, plan
from kvkeep.store.errors import DiskFull, StoreLocked
from kvkeep.store.hashing import BlobId
from kvkeep.store.locks import exclusive
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.verify import verified

MB = 1 << 20
COUNT = 40


def lonely(number: int) -> list[int]:
    return [number] * 4


BLOCKS = [block(lonely(i), payload=noise(MB // 2, i)) for i in range(COUNT)]


def entries(repository: Repository) -> list[nodes.Node]:
    with repository.rows() as connection:
        return list(nodes.every(connection))


def remove_most(repository: Repository) -> None:
    """Four of five."""
    with repository.writing() as writing:
        writing.remove([entry for i, entry in enumerate(entries(repository)) if i % 5])


def live_bytes(repository: Repository) -> int:
    return sum(entry.stored_bytes for entry in entries(repository))


def values(repository: Repository) -> dict[BlobId, bytes]:
    with repository.snapshot() as snapshot:
        return {entry.blob: bytes(snapshot.blobs.get(entry.blob) or b"") for entry in nodes.every(snapshot.connection)}


def test_the_disk_gets_back_what_was_deleted(repository: Repository) -> None:
    store(repository, BLOCKS)
    remove_most(repository)
    before = values(repository)
    planned = plan(repository)
    assert (planned.blobs, planned.garbage_blobs, planned.fits) == (COUNT // 5, 0, True)
    assert planned.gained_bytes > 0.7 * repository.blobs.disk_bytes
    seen: list[int] = []
    done = compact(repository, seen.append)
    assert sum(seen) == live_bytes(repository)
    assert repository.blobs.disk_bytes <= 1.1 * live_bytes(repository)
    assert repository.blobs.disk_bytes <= planned.needed_bytes
    assert done.after_bytes == repository.disk_bytes < done.before_bytes / 3
    assert values(repository) == before
    assert generations.present(repository.path) == [2]


def test_twice_is_as_good_as_once_and_reopening_finds_it(root: Path) -> None:
    repository = open_root(root, 64 * MB)
    store(repository, BLOCKS[:10])
    before = values(repository)
    compact(repository)
    compact(repository)
    close_root(repository)
    repository = open_root(root)
    assert values(repository) == before
    assert repository.blobs.folder.name == "blobs-3"
    store(repository, BLOCKS[10:12])
    assert check(repository) == []
    close_root(repository)


def test_an_empty_store_can_be_compacted(repository: Repository) -> None:
    assert compact(repository).live_bytes == 0
    store(repository, BLOCKS[:1])


def test_garbage_isnt_copied(repository: Repository) -> None:
    store(repository, BLOCKS[:3])
    repository.blobs.put([(BLOCKS[9].row.blob, BLOCKS[9].value)])
    assert plan(repository).garbage_blobs == 1
    compact(repository)
    assert len(repository.blobs) == 3


def test_the_index_gives_its_free_pages_back(repository: Repository) -> None:
    store(repository, [block([i, i, i, i], payload=b"tiny") for i in range(1500)])
    with repository.writing() as writing:
        writing.remove(entries(repository)[1:])
    before = repository.index.disk_bytes
    assert plan(repository).index_free_bytes > 500_000
    compact(repository)
    assert repository.index.free_bytes == 0
    assert repository.index.disk_bytes < before / 3


def test_a_disk_that_cant_hold_the_copy_is_a_sentence_and_changes_nothing(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(repository, BLOCKS[:4])
    repository.agree_on(settings.RESERVE_BYTES, 1 << 62)
    with pytest.raises(DiskFull, match="doesn't fit: the disk has 0 bytes free"):
        compact(repository)
    assert generations.present(repository.path) == [1]
    assert len(values(repository)) == 4


def test_an_interrupt_leaves_everything_as_it_was(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", MB)
    store(repository, BLOCKS[:10])
    before = values(repository)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compact(repository, stop)
    assert generations.present(repository.path) == [1]
    assert values(repository) == before
    compact(repository)
    assert values(repository) == before


def test_what_changes_meanwhile_is_in_the_copy(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", MB)
    store(repository, BLOCKS[:10])
    changed = threading.Event()

    def change(_: int) -> None:
        if not changed.is_set():
            changed.set()
            with repository.writing() as writing:
                writing.remove(entries(repository)[:3])
            store(repository, BLOCKS[20:25])

    compact(repository, change)
    assert {entry.blob for entry in entries(repository)} == {new.row.blob for new in [*BLOCKS[3:10], *BLOCKS[20:25]]}
    assert check(repository) == []
    assert len(repository.blobs) == 12


def test_two_at_once_is_one_too_many(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    with exclusive(repository.path / module.COMPACT_LOCK, 0), pytest.raises(StoreLocked, match="compacted by another"):
        compact(repository)


OTHER = """
import sys
from pathlib import Path
from kvkeep.store import nodes
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.verify import verified

repository = open_root(Path(sys.argv[1]))
for line in sys.stdin:
    with repository.snapshot() as snapshot:
        entries = list(nodes.every(snapshot.connection))
        for entry in entries:
            verified(snapshot.blobs.get(entry.blob), entry)
    print(len(entries), repository.blobs.folder.name, flush=True)
close_root(repository)
"""


def test_another_process_reads_before_during_and_after(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", MB)
    store(repository, BLOCKS[:12])
    command = [sys.executable, "-c", OTHER, str(repository.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None

        def ask() -> list[str]:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write("\n")
            other.stdin.flush()
            return other.stdout.readline().split()

        assert ask() == ["12", "blobs-1"]
        during: list[list[str]] = []
        compact(repository, lambda _: during.append(ask()))
        assert during
        assert all(found == ["12", "blobs-1"] for found in during)
        assert ask() == ["12", "blobs-2"]
        compact(repository)
        compact(repository)
        assert ask() == ["12", "blobs-4"]
        other.stdin.close()
        assert other.wait(60) == 0


def test_a_snapshot_that_began_before_reads_on(repository: Repository) -> None:
    store(repository, BLOCKS[:5])
    with repository.snapshot() as snapshot:
        found = list(nodes.every(snapshot.connection))
        compacting = threading.Thread(target=compact, args=(repository,))
        compacting.start()
        compacting.join(60)
        for entry in found:
            verified(snapshot.blobs.get(entry.blob), entry)
    assert repository.blobs.folder.name == "blobs-2"


@pytest.mark.parametrize(("live", "free", "fits"), [(MB, 2 * MB, True), (MB, MB, False), (0, 64 << 10, True), (0, 0, False)])
def test_a_plan_says_if_it_fits(live: int, free: int, fits: bool) -> None:
    assert Plan(1, live, 0, 10 * MB, 0, free).fits is fits


def test_chains_survive(repository: Repository) -> None:
    store(repository, chain_of(*([i] * 4 for i in range(6))))
    compact(repository)
    assert check(repository) == []
