"""Blobs in LMDB: atomic writes, snapshots, a full map, a full disk, a cut-off file, private modes."""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from entries import noise

from kvkeep.store.blobs import DATA_FILE, PAGE_BYTES, BlobStore, _translated
from kvkeep.store.errors import DiskFull, MapFull, StoreError
from kvkeep.store.hashing import BlobId, blob_id

MAP = 4 << 20


def named(count: int, size: int = 20_000) -> dict[BlobId, bytes]:
    """Different values under the names that they hash to."""
    values = [noise(size, seed) for seed in range(count)]
    return {blob_id(value): value for value in values}


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[BlobStore]:
    store = BlobStore(tmp_path / "blobs", MAP)
    yield store
    store.close()


def contents(store: BlobStore) -> dict[BlobId, bytes]:
    with store.read() as reader:
        return {name: bytes(reader.get(name) or b"") for name in reader.ids()}


def test_what_was_put_is_there_after_reopening(tmp_path: Path) -> None:
    values = named(5)
    store = BlobStore(tmp_path / "blobs", MAP)
    store.put(values.items())
    store.close()
    store = BlobStore(tmp_path / "blobs", MAP)
    assert contents(store) == values
    assert len(store) == 5
    store.close()


def test_missing_blob_is_none_and_no_error(blobs: BlobStore) -> None:
    with blobs.read() as reader:
        assert reader.get(BlobId(b"x" * 32)) is None
        assert BlobId(b"x" * 32) not in reader


def test_deleting_what_isnt_there_deletes_the_rest(blobs: BlobStore) -> None:
    values = named(3)
    blobs.put(values.items())
    first, second, _ = values
    blobs.delete([BlobId(b"x" * 32), first, second, first])
    assert list(contents(blobs)) == [name for name in sorted(values) if name not in (first, second)]


def test_a_rotten_leftover_is_overwritten(blobs: BlobStore) -> None:
    name = BlobId(b"n" * 32)
    blobs.put([(name, b"rotten")])
    blobs.put([(name, b"sound")])
    assert contents(blobs) == {name: b"sound"}


def test_a_snapshot_keeps_what_is_deleted_meanwhile(blobs: BlobStore) -> None:
    values = named(3)
    blobs.put(values.items())
    with blobs.read() as reader:
        blobs.delete(values)
        # Written over and over: nothing of the snapshot may be used again.
        for seed in range(20):
            blobs.put([(BlobId(b"z" * 32), noise(20_000, 100 + seed))])
        assert {name: bytes(reader.get(name) or b"") for name in reader.ids()} == values
    assert set(contents(blobs)) == {b"z" * 32}


def test_full_map_leaves_nothing_written(blobs: BlobStore) -> None:
    before = named(3)
    blobs.put(before.items())
    many = {BlobId(bytes([7, seed]) + bytes(30)): noise(100_000, seed) for seed in range(60)}
    with pytest.raises(MapFull, match="share of the byte budget"):
        blobs.put(many.items())
    assert contents(blobs) == before


def test_full_map_can_be_used_again_after_deleting(blobs: BlobStore) -> None:
    stored: list[BlobId] = []

    def fill() -> None:
        for seed in range(100):
            name = BlobId(bytes([seed]) * 32)
            blobs.put([(name, noise(100_000, seed))])
            stored.append(name)

    with pytest.raises(MapFull):
        fill()
    assert len(stored) > 10
    blobs.delete(stored[:10])
    blobs.settle()
    blobs.put([(BlobId(b"new" + bytes(29)), noise(100_000))])
    assert len(blobs) == len(stored) - 9


def test_room_in_many_places_is_room_for_many_values(blobs: BlobStore) -> None:
    values = list(named(100, size=30_000).items())
    blobs.put(values)
    blobs.delete([name for name, _ in values[::2]])
    blobs.settle()
    with blobs.read() as reader:
        left = {name: bytes(reader.get(name) or b"") for name in reader.ids()}
    # Half of the map is free, nowhere much of it in one piece.
    assert blobs.has_room(*[30_000] * 40)
    assert not blobs.has_room(40 * 30_000 * 2)
    assert contents(blobs) == left


def test_nobody_waits_for_readers_that_there_are_none_of(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(blobs._patience, "until", lambda done: waited.append(done) or False)
    assert not blobs.has_room(MAP)
    assert waited == []
    with blobs.read():
        assert not blobs.has_room(MAP)
    assert len(waited) == 1


def test_settling_leaves_no_trace(blobs: BlobStore) -> None:
    blobs.put(named(2).items())
    before = contents(blobs)
    blobs.settle()
    assert contents(blobs) == before


def test_failed_iterator_writes_nothing(blobs: BlobStore) -> None:
    def failing() -> Iterator[tuple[BlobId, bytes]]:
        yield from named(2).items()
        raise RuntimeError("encoding failed")

    with pytest.raises(RuntimeError):
        blobs.put(failing())
    assert len(blobs) == 0


def test_used_bytes_count_live_pages_only(blobs: BlobStore) -> None:
    values = named(8, 40_000)
    blobs.put(values.items())
    full = blobs.used_bytes
    assert full >= 8 * 40_000
    blobs.delete(list(values)[:4])
    assert blobs.used_bytes <= full - 4 * 40_000
    assert blobs.used_bytes % PAGE_BYTES == 0


def test_disk_bytes_are_those_really_occupied(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs", MAP)
    store.put(named(2).items())
    store.close()
    # Reopened, the file is as long as the map; the disk doesn't notice.
    store = BlobStore(tmp_path / "blobs", MAP)
    assert (tmp_path / "blobs" / DATA_FILE).stat().st_size == MAP
    assert 40_000 <= store.disk_bytes < MAP // 4
    store.close()


def test_map_is_rounded_up_to_pages(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs", MAP + 1)
    assert store.map_bytes == MAP + PAGE_BYTES
    store.close()


def test_smaller_map_keeps_what_is_stored(tmp_path: Path) -> None:
    values = named(100)
    store = BlobStore(tmp_path / "blobs", MAP)
    store.put(values.items())
    store.close()
    store = BlobStore(tmp_path / "blobs", MAP // 8)
    assert contents(store) == values
    store.close()


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        store = BlobStore(tmp_path / "blobs", MAP)
        store.put(named(1).items())
        store.close()
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "blobs").stat().st_mode) == 0o700
    files = list((tmp_path / "blobs").iterdir())
    assert len(files) == 2
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


# In a process of its own: where this goes wrong, the process dies with SIGBUS.
READ_ALL = """
import sys
from pathlib import Path
from kvkeep.store.blobs import BlobStore
from kvkeep.store.hashing import blob_id
store = BlobStore(Path(sys.argv[1]), int(sys.argv[2]))
with store.read() as reader:
    names = [bytes.fromhex(name) for name in sys.argv[3:]]
    print(sum((value := reader.get(name)) is not None and blob_id(value) == name for name in names))
store.close()
"""


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
def test_cut_off_file_is_no_sigbus(kept: float, tmp_path: Path) -> None:
    values = named(60)
    store = BlobStore(tmp_path / "blobs", MAP)
    store.put(values.items())
    store.close()
    data = tmp_path / "blobs" / DATA_FILE
    os.truncate(data, int(60 * 20_000 * kept))
    names = [name.hex() for name in values]
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(tmp_path / "blobs"), str(MAP), *names], capture_output=True, text=True, check=False
    )
    # LMDB's own pages may be among what was cut off: then it says so. It never dies, and never returns other bytes.
    assert done.returncode in (0, 1), done.stderr
    if done.returncode:
        assert "StoreError" in done.stderr
    else:
        assert int(done.stdout) < 60


def test_file_that_was_created_and_not_written_is_no_dead_end(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / DATA_FILE).touch()
    store = BlobStore(tmp_path / "blobs", MAP)
    store.put(named(1).items())
    assert len(store) == 1
    store.close()


# A limit on the size of files stands for a full disk: LMDB's writes fail in the same place.
FILL_THE_DISK = """
import resource, signal, sys
from pathlib import Path
from kvkeep.store.blobs import BlobStore
from kvkeep.store.errors import DiskFull
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = BlobStore(Path(sys.argv[1]), 4 << 20)
store.put([(b"a" * 32, b"first" * 1000)])
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
try:
    store.put([(b"b" * 32, bytes(2 << 20))])
except DiskFull:
    print("full")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
with store.read() as reader:
    print(bytes(reader.get(b"a" * 32)) == b"first" * 1000, b"b" * 32 in reader)
store.put([(b"c" * 32, b"third" * 1000)])
print(len(store))
store.close()
"""


def test_full_disk_is_named_and_leaves_what_was_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, str(tmp_path / "blobs")], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["full", "True", "False", "2"], done.stderr


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_every_kind_of_full_disk_is_named(code: int) -> None:
    with pytest.raises(DiskFull), _translated():
        raise lmdb.Error(f"mdb_txn_commit: {os.strerror(code)}")


def test_other_errors_are_store_errors_and_keep_their_text() -> None:
    with pytest.raises(StoreError, match="mdb_get: something else") as caught, _translated():
        raise lmdb.Error("mdb_get: something else")
    assert not isinstance(caught.value, DiskFull)


HEAP_CHILD = """
import sys
from pathlib import Path
from kvkeep.store.blobs import BlobStore
from kvkeep.store.hashing import blob_id

store = BlobStore(Path(sys.argv[1]), 4 << 20)
chat = [bytearray(b"what somebody said. " * 256) for _ in range(2000)]
# Every other one, so that the heap keeps the rest between them, as it is in a program that has run for long.
del chat[::2]
values = [bytes([number]) * size for number, size in enumerate((100, 1500, 3000, 9000, 60000))]
store.put((blob_id(value), value) for value in values)
store.put((blob_id(value), value) for value in [b"more" * number for number in range(1, 400)])
store.delete([blob_id(value) for value in values])
store.close()
"""


def test_nothing_of_the_program_s_memory_comes_into_the_file(tmp_path: Path) -> None:
    """What is free in a page would otherwise be what the heap held there before: the person's text."""
    subprocess.run([sys.executable, "-c", HEAP_CHILD, str(tmp_path)], check=True)
    assert b"somebody said" not in (tmp_path / DATA_FILE).read_bytes()
