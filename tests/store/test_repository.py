"""The ordering rules: blob before row, row away before blob, readers row first; and who may write."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from entries import OTHER_FINGERPRINT, ROOT, add_namespace, block, chain_of, key_of, noise, opaque, store

from kvkeep.store import checkpoints, nodes, rows, settings
from kvkeep.store import repository as repository_module
from kvkeep.store.blobs import BlobStore
from kvkeep.store.check import Trouble, check
from kvkeep.store.entry import Entry
from kvkeep.store.errors import MapFull, StoreClosed, StoreLocked, UsageError
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.locks import exclusive
from kvkeep.store.opening import WRITER_LOCK
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.space import DEFAULT_CAPACITY, MIN_CAPACITY, valid_capacity
from kvkeep.store.verify import verified
from kvkeep.store.writing import NewEntry


class Killed(BaseException):
    """Stands for the end of the process: nobody catches it."""


def everything(repository: Repository) -> list[Entry]:
    with repository.rows() as connection:
        return [*nodes.every(connection), *checkpoints.every(connection)]


def trouble(path: Path) -> list[Trouble]:
    """What a fresh open finds, before and after which nothing is repaired."""
    repository = open_root(path)
    found = [finding.trouble for finding in check(repository)]
    close_root(repository)
    return found


def sweep(path: Path) -> int:
    repository = open_root(path)
    with repository.writing() as writing:
        swept = writing.sweep()
    close_root(repository)
    return swept


BLOCKS = chain_of([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dying(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Repository, pytest.MonkeyPatch]]:
    """A store of three blocks whose process is about to die."""
    opened = open_root(root, 64 << 20)
    store(opened, BLOCKS)
    with monkeypatch.context() as patch:
        yield opened, patch


def die(*_: Any, **__: Any) -> None:
    raise Killed


Dying = tuple[Repository, pytest.MonkeyPatch]


def test_death_between_blob_and_row_leaves_only_garbage(dying: Dying, root: Path) -> None:
    repository, patch = dying
    patch.setattr(rows, "add", die)
    with pytest.raises(Killed):
        store(repository, [block([50, 51, 52, 53]), opaque([1, 2])])
    close_root(repository)
    patch.undo()
    assert trouble(root) == [Trouble.GARBAGE] * 2
    assert sweep(root) == 2


def test_death_in_the_blob_commit_leaves_nothing(dying: Dying, root: Path) -> None:
    repository, patch = dying

    def put(self: BlobStore, blobs: Any) -> None:
        with self._env.begin(write=True) as txn:
            for name, value in blobs:
                txn.put(name, value)
            raise Killed

    patch.setattr(BlobStore, "put", put)
    with pytest.raises(Killed):
        store(repository, [block([50, 51, 52, 53])])
    close_root(repository)
    assert trouble(root) == []


def test_death_in_the_row_commit_leaves_only_garbage(dying: Dying, root: Path) -> None:
    repository, patch = dying
    original = rows.add

    def add(*args: Any) -> None:
        original(*args)
        raise Killed

    patch.setattr(rows, "add", add)
    with pytest.raises(Killed):
        store(repository, [block([50, 51, 52, 53])])
    close_root(repository)
    assert trouble(root) == [Trouble.GARBAGE]
    assert sweep(root) == 1


def test_death_between_row_and_blob_of_a_removal_leaves_only_garbage(dying: Dying, root: Path) -> None:
    repository, patch = dying
    patch.setattr(BlobStore, "delete", die)
    with repository.writing() as writing, pytest.raises(Killed):
        writing.remove(everything(repository)[1:])
    close_root(repository)
    patch.undo()
    assert trouble(root) == [Trouble.GARBAGE] * 2
    assert sweep(root) == 2


def test_death_in_the_row_commit_of_a_removal_leaves_everything(dying: Dying, root: Path) -> None:
    repository, patch = dying
    patch.setattr(rows, "named", die)
    with repository.writing() as writing, pytest.raises(Killed):
        writing.remove(everything(repository)[1:])
    close_root(repository)
    patch.undo()
    assert trouble(root) == []
    repository = open_root(root)
    assert len(everything(repository)) == 3
    close_root(repository)


def test_death_while_replacing_leaves_the_new_and_only_garbage_of_the_old(dying: Dying, root: Path) -> None:
    repository, patch = dying
    old = everything(repository)[2:]
    new = block([60, 61, 62, 63])
    patch.setattr(BlobStore, "delete", die)
    space = add_namespace(repository)
    with repository.writing() as writing, pytest.raises(Killed):
        writing.add(space.id, [new], old)
    close_root(repository)
    patch.undo()
    assert trouble(root) == [Trouble.GARBAGE]
    repository = open_root(root)
    assert key_of(new) in {node.key for node in everything(repository) if isinstance(node, nodes.Node)}
    close_root(repository)
    assert sweep(root) == 1


def test_failed_rows_let_the_lock_go(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rows, "add", die)
        with pytest.raises(Killed):
            store(repository, BLOCKS)
    store(repository, BLOCKS)
    assert len(everything(repository)) == 3


def test_full_map_stores_no_row(root: Path) -> None:
    repository = open_root(root, MIN_CAPACITY)
    big = [block([seed], payload=noise(4 << 20, seed), parent=ROOT) for seed in range(4)]
    with pytest.raises(MapFull):
        store(repository, big)
    assert everything(repository) == []
    close_root(repository)
    assert trouble(root) == []


# -- reading beside writing ---------------------------------------------------------------------------------------------


def test_a_snapshot_reads_on_while_its_entries_are_removed(repository: Repository) -> None:
    store(repository, BLOCKS)
    with repository.snapshot() as snapshot:
        with repository.writing() as writing:
            writing.remove(everything(repository))
        assert everything(repository) == []
        store(repository, [block([seed], payload=noise(30_000, seed)) for seed in range(20)])
        held = list(nodes.every(snapshot.connection))
        assert len(held) == 3
        for node in held:
            verified(snapshot.blobs.get(node.blob), node)
    with repository.snapshot() as snapshot:
        assert snapshot.blobs.get(held[0].blob) is None


def test_a_snapshot_sees_no_row_whose_blob_it_doesnt_see(repository: Repository) -> None:
    with repository.snapshot() as snapshot:
        store(repository, BLOCKS)
        assert list(nodes.every(snapshot.connection)) == []


def test_checking_while_another_writes_finds_nothing(repository: Repository) -> None:
    stop = threading.Event()

    def write() -> None:
        for seed in range(40):
            store(repository, [block([seed], payload=noise(2_000, seed))])
        stop.set()

    thread = threading.Thread(target=write)
    thread.start()
    rounds = 0
    while not stop.is_set() or rounds == 0:
        # A blob whose row comes a moment later looks like garbage; a row without its blob must never be seen.
        assert {finding.trouble for finding in check(repository)} <= {Trouble.GARBAGE}
        rounds += 1
    thread.join()
    assert check(repository) == []


# -- several processes --------------------------------------------------------------------------------------------------

WRITE_MANY = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from entries import block, noise, store
from kvkeep.store.registry import close_root, open_root
repository = open_root(Path(sys.argv[1]), 64 << 20)
first = int(sys.argv[3])
for seed in range(first, first + 15):
    store(repository, [block([seed], payload=noise(5_000, seed))])
close_root(repository)
"""
SUPPORT = str(Path(__file__).parents[1] / "support")


def test_processes_that_write_at_once_lose_nothing(root: Path) -> None:
    # The folder doesn't exist yet: they also create it at once.
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITE_MANY, str(root), SUPPORT, str(first)], stderr=subprocess.PIPE, text=True)
        for first in (0, 100, 200)
    ]
    assert [writer.communicate(timeout=60)[1] for writer in writers] == ["", "", ""]
    repository = open_root(root)
    assert sorted(node.path[0] for node in everything(repository) if isinstance(node, nodes.Node)) == [
        *range(15),
        *range(100, 115),
        *range(200, 215),
    ]
    close_root(repository)


def test_what_one_process_stores_the_other_one_sees(repository: Repository, root: Path) -> None:
    store(repository, BLOCKS)
    subprocess.run([sys.executable, "-c", WRITE_MANY, str(root), SUPPORT, "100"], check=True)
    assert len(everything(repository)) == 18
    assert check(repository) == []


def test_a_writer_gives_up_on_a_lock_that_stays_taken(repository: Repository) -> None:
    with exclusive(repository.path / WRITER_LOCK, 0), pytest.raises(StoreLocked, match="stayed locked"):  # noqa: SIM117
        with repository.writing(timeout=0):
            pass
    with repository.writing(timeout=0):
        pass


def test_threads_exclude_each_other_as_processes_do(repository: Repository) -> None:
    with repository.writing(), pytest.raises(StoreLocked), repository.writing(timeout=0):
        pass


FORK = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from entries import block, store
from kvkeep.store import nodes
from kvkeep.store.errors import StoreClosed
from kvkeep.store.registry import close_root, open_root
repository = open_root(Path(sys.argv[1]), 64 << 20)
store(repository, [block([1])])
child = os.fork()
if child == 0:
    try:
        for use in (repository.rows, repository.snapshot, repository.writing):
            try:
                with use():
                    os._exit(1)
            except StoreClosed:
                pass
        mine = open_root(Path(sys.argv[1]))
        assert mine is not repository
        store(mine, [block([2])])
        close_root(mine)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
store(repository, [block([3])])
with repository.rows() as connection:
    print(sorted(node.path[0] for node in nodes.every(connection)))
close_root(repository)
"""


def test_a_forked_child_must_open_its_own(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, str(root), SUPPORT], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[1, 2, 3]", done.stderr


# -- removing -----------------------------------------------------------------------------------------------------------


def test_removing_an_entry_takes_its_blob_along(repository: Repository) -> None:
    store(repository, [*BLOCKS, opaque([1, 2])])
    with repository.writing() as writing:
        writing.remove(everything(repository))
    assert everything(repository) == []
    assert len(repository.blobs) == 0


def test_removing_twice_is_no_error(repository: Repository) -> None:
    store(repository, BLOCKS)
    entries = everything(repository)
    with repository.writing() as writing:
        writing.remove(entries[2:])
        writing.remove(entries[2:])
    assert everything(repository) == entries[:2]


def test_removing_what_is_gone_spares_the_row_that_has_its_number_now(repository: Repository) -> None:
    store(repository, [*BLOCKS, opaque([1, 2])])
    stale = everything(repository)
    with repository.writing() as writing:
        writing.remove(stale)
    # SQLite gives the numbers of deleted rows to new ones.
    store(repository, [block([20, 21, 22, 23]), opaque([9])])
    fresh = everything(repository)
    assert {entry.id for entry in fresh} & {entry.id for entry in stale}
    with repository.writing() as writing:
        writing.remove(stale)
    assert everything(repository) == fresh
    assert check(repository) == []


def test_replacing_what_is_gone_spares_the_row_that_takes_its_number(repository: Repository) -> None:
    space = store(repository, BLOCKS)
    piece = everything(repository)[-1]
    with repository.writing() as writing:
        # An eviction came in between, and the new row gets the number of the old one.
        writing.remove([piece])
        writing.add(space.id, [block([30, 31, 32, 33])], [piece])
    assert [node.start for node in everything(repository) if isinstance(node, nodes.Node)] == [0, 0, 4]
    assert check(repository) == []


def test_a_blob_that_another_row_names_stays(repository: Repository) -> None:
    # The same frame named by two rows: only possible through a repaired index, but removal must not trust that.
    entry = opaque([1, 2])
    store(repository, [entry])
    with repository.index.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO checkpoint SELECT 99, namespace_id, kind, 5, pos, prefix, anchor, path, blob, stored_bytes,"
            " plain_bytes, created, used, hits FROM checkpoint"
        )
    first, second = everything(repository)
    with repository.writing() as writing:
        writing.remove([first])
        assert len(repository.blobs) == 1
        writing.remove([second])
    assert len(repository.blobs) == 0


def test_quarantine_spares_what_is_sound(repository: Repository) -> None:
    store(repository, BLOCKS)
    entries = everything(repository)
    with repository.writing() as writing:
        assert writing.remove_damaged(entries) == 0
    assert everything(repository) == entries


def test_quarantine_removes_what_is_damaged_and_its_blob(repository: Repository) -> None:
    store(repository, BLOCKS)
    entries = everything(repository)
    repository.blobs.put([(entries[2].blob, b"rotten")])
    with repository.writing() as writing:
        assert writing.remove_damaged(entries) == 1
        assert writing.remove_damaged(entries) == 0
    assert everything(repository) == entries[:2]
    assert len(repository.blobs) == 2


def test_quarantine_spares_what_was_written_anew_meanwhile(repository: Repository) -> None:
    store(repository, BLOCKS)
    damaged = everything(repository)[2:]
    with repository.writing() as writing:
        writing.remove(damaged)
    store(repository, BLOCKS[2:])
    with repository.writing() as writing:
        assert writing.remove_damaged(damaged) == 0
    assert len(everything(repository)) == 3


def test_sweep_takes_what_no_row_names_and_nothing_else(repository: Repository) -> None:
    store(repository, [*BLOCKS, opaque([1, 2])])
    left: NewEntry = block([90, 91, 92, 93])
    repository.blobs.put([(left.row.blob, left.value)])
    with repository.writing() as writing:
        assert writing.sweep() == 1
        assert writing.sweep() == 0
    assert len(everything(repository)) == len(repository.blobs) == 4


def test_full_map_at_deletion_is_tried_again(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    store(repository, BLOCKS)
    original = BlobStore.delete
    script = iter("E")

    def delete(self: BlobStore, names: Any) -> None:
        if next(script, "") == "E":
            raise MapFull("full")
        original(self, names)

    monkeypatch.setattr(BlobStore, "delete", delete)
    with repository.writing() as writing:
        writing.remove(everything(repository)[2:])
    assert len(repository.blobs) == 2


# -- recency ------------------------------------------------------------------------------------------------------------


def used(repository: Repository) -> list[float]:
    return [entry.used for entry in everything(repository)]


def test_touched_entries_are_the_most_recent_and_counted(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    store(repository, [*BLOCKS, opaque([1, 2])])
    before = everything(repository)
    monkeypatch.setattr(repository_module.time, "time", lambda: before[0].used + 100)
    repository.touch([before[0], before[3]])
    assert used(repository) == [entry.used for entry in before]  # readers never write
    repository.flush_touched()
    now = before[0].used + 100
    assert used(repository) == [now, before[1].used, before[2].used, now]
    with repository.rows() as connection:
        hits = [connection.exec_driver_sql(f"SELECT hits FROM {t} ORDER BY id").scalars().all() for t in ("node", "checkpoint")]
    assert hits == [[1, 0, 0], [1]]


def test_touching_what_is_gone_is_no_error(repository: Repository) -> None:
    store(repository, BLOCKS)
    entries = everything(repository)
    repository.touch(entries)
    with repository.writing() as writing:
        writing.remove(entries)
    repository.flush_touched()
    repository.flush_touched()
    assert everything(repository) == []


# -- opening and closing ------------------------------------------------------------------------------------------------


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        repository = open_root(tmp_path / "made" / "root", 64 << 20)
        store(repository, BLOCKS)
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in repository.path.rglob("*")}
        close_root(repository)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "made" / "root").stat().st_mode) == 0o700
    assert {path.name for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == set()
    assert len(modes) >= 8


@pytest.mark.parametrize("use", ["rows", "snapshot", "writing", "flush_touched"])
def test_used_after_close_says_so(root: Path, use: str) -> None:
    repository = open_root(root, 64 << 20)
    store(repository, BLOCKS)
    repository.touch(everything(repository))
    close_root(repository)
    with pytest.raises(StoreClosed, match="closed"):  # noqa: PT012 - one of them isn't a context manager
        if use == "flush_touched":
            repository.flush_touched()
        else:
            with getattr(repository, use)():
                pass


def test_capacity_is_remembered_and_the_last_explicit_one_wins(root: Path) -> None:
    def reopened(capacity: int | None) -> int:
        repository = open_root(root, capacity)
        found = repository.capacity_bytes
        close_root(repository)
        return found

    assert reopened(None) == DEFAULT_CAPACITY
    assert reopened(32 << 20) == 32 << 20
    assert reopened(None) == 32 << 20
    assert reopened(48 << 20) == 48 << 20
    assert reopened(None) == 48 << 20


@pytest.mark.parametrize("capacity", [0, -1, MIN_CAPACITY - 1, True, 1e9, "1 GB", None])
def test_capacity_that_makes_no_sense_is_refused_by_name(capacity: Any) -> None:
    with pytest.raises(UsageError, match="capacity_bytes"):
        valid_capacity(capacity)


def test_smallest_capacity_is_taken() -> None:
    assert valid_capacity(MIN_CAPACITY) == MIN_CAPACITY


def test_generation_names_the_folder_of_the_blobs(root: Path) -> None:
    repository = open_root(root, 64 << 20)
    with repository.index.write() as connection:
        settings.put(connection, settings.GENERATION, 7)
    close_root(repository)
    repository = open_root(root)
    store(repository, BLOCKS)
    assert (root / "blobs-7" / "data.mdb").exists()
    close_root(repository)


def test_disk_bytes_count_blobs_and_index(repository: Repository) -> None:
    store(repository, [block([1], payload=noise(1 << 20))])
    assert repository.disk_bytes >= (1 << 20) + repository.index.disk_bytes
    assert repository.disk_bytes == repository.blobs.disk_bytes + repository.index.disk_bytes


def test_entries_of_two_namespaces_dont_mix(repository: Repository) -> None:
    other = PrefixHash(OTHER_FINGERPRINT)
    first = store(repository, BLOCKS)
    second = store(repository, [block([1, 2, 3, 4], parent=other)], OTHER_FINGERPRINT)
    assert first.id != second.id
    assert [entry.namespace_id for entry in everything(repository)] == [first.id] * 3 + [second.id]
