"""Content-addressed blobs in LMDB. The one home of the lmdb package.

Knows names and values only: what a value means and who still needs it is decided above.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lmdb

from kvkeep.store.errors import DamagedFile, DiskFull, MapFull, StoreClosed, StoreError
from kvkeep.store.gate import Gate
from kvkeep.store.hashing import BlobId
from kvkeep.store.patience import Patience
from kvkeep.store.private import disk_errors, make_private_folder, occupied_bytes

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
# An LMDB page. Values of kilobytes and more take whole pages of their own.
PAGE_BYTES = 4096
# How often, and how long each time, to wait for a moment in which the map's size can be taken over.
_RESIZES = 3
_RESIZE_SECONDS = 10.0
# How long a writer waits for those who read what it wants to write over.
ROOM_SECONDS = 2.0
# Each open snapshot takes one; a busy machine has a few dozen. A slot of a dead process is given back by `reader_check`.
MAX_READERS = 254


# No name of a blob: those have 32 bytes.
_PROBE = b"\0settle"


class BlobReader:
    """Blobs as they were when the snapshot was taken. Views are valid only until it ends."""

    def __init__(self, txn: lmdb.Transaction) -> None:
        self._txn = txn

    def get(self, blob: BlobId) -> memoryview | None:
        """The stored value, a view straight into the map, or None."""
        value = self._txn.get(blob)
        return None if value is None else memoryview(value)

    def __contains__(self, blob: BlobId) -> bool:
        return self._txn.get(blob) is not None

    def __len__(self) -> int:
        return int(self._txn.stat()["entries"])

    def ids(self) -> Iterator[BlobId]:
        """Every name, in byte order."""
        for key in self._txn.cursor().iternext(keys=True, values=False):
            yield BlobId(bytes(key))


class BlobStore:
    """One LMDB environment. Open it once per process: LMDB forbids a second open of the same folder.

    Args:
        folder: created if missing.
        map_bytes: the largest size that the data file may reach.
        durable: commits wait for the disk. Without it nothing counts before `sync`.
        extend: see `extend`; only for who has the writer's lock, or the root alone.
    """

    def __init__(self, folder: Path, map_bytes: int, *, durable: bool = True, extend: bool = True) -> None:
        self.folder = folder
        self.map_bytes = _whole_pages(map_bytes)
        self._limit = self.map_bytes
        self._active = 0
        self._ended = Gate()
        self._retired = False
        self._is_shut = False
        self._patience = Patience(ROOM_SECONDS)
        with disk_errors(f"preparing {folder}"):
            make_private_folder(folder)
        if extend:
            self.extend()
        self._durable = durable
        self._env = self._opened()
        with disk_errors(f"making {folder} private"):
            for file in (folder / DATA_FILE, folder / LOCK_FILE):
                file.chmod(0o600)

    def _opened(self) -> lmdb.Environment:
        with _translated():
            env = lmdb.open(
                str(self.folder),
                map_size=self._limit,
                max_readers=MAX_READERS,
                mode=0o600,
                # Read-ahead is off in LMDB's advice for data larger than memory; a restore reads whole values in a
                # row, and a cold page cache is the case that people wait for, so it stays on.
                readahead=True,
                # Pages come from the heap as it is otherwise, with what the program had there before: somebody's chat.
                meminit=True,
                sync=self._durable,
            )
            env.reader_check()
        return env

    @staticmethod
    def is_too_short(folder: Path, map_bytes: int) -> bool:
        """Whether there is a data file that a map of this size would reach beyond."""
        data = folder / DATA_FILE
        return data.exists() and 0 < data.stat().st_size < _whole_pages(map_bytes)

    def extend(self) -> None:
        """Make the file as long as the map, sparsely.

        Touching a mapped page beyond the end of the file kills the process with SIGBUS. Sparse bytes cost no disk, and
        what was cut off reads as zeros, which no hash accepts. An empty file is left as it is: its maker died before
        the first page, and LMDB takes it as new, but zeros as somebody else's.

        The caller holds the writer's lock: a file that somebody else makes longer at the same moment would be cut.
        """
        data = self.folder / DATA_FILE
        with disk_errors(f"extending {self.folder}"):
            if data.exists() and 0 < data.stat().st_size < self.map_bytes:
                os.truncate(data, self.map_bytes)

    @contextmanager
    def _begin(self, *, write: bool = False) -> Iterator[lmdb.Transaction]:
        """A transaction, also after another process with a larger budget has grown the map."""
        with _translated():
            for _ in range(_RESIZES):
                if self._is_shut:
                    self._open_again()
                with self._counted():
                    try:
                        txn = self._env.begin(write=True) if write else self._env.begin(buffers=True)
                    except lmdb.MapResizedError:
                        change = self._adopt_size
                    except lmdb.PanicError:
                        change = self._open_again
                    else:
                        with txn:
                            yield txn
                        return
                change()
        raise StoreError(f"{self.folder} can't be read: its map is grown, or fails, faster than this process can follow")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        counted = False
        try:
            with self._ended:
                if self._retired:
                    raise StoreClosed(f"{self.folder} is closed")
                self._active += 1
                counted = True
            yield
        finally:
            # Ctrl-C may come anywhere, and one who is counted for good would be waited for for ever.
            if counted:
                with self._ended:
                    self._active -= 1
                    self._ended.notify_all()
                    self._close_if_left()

    def _adopt_size(self) -> None:
        """Take over the map's present size, which LMDB allows only while this process has no transaction."""
        with self._ended:
            if self._ended.wait_for(lambda: self._active == 0, _RESIZE_SECONDS):
                self._env.set_mapsize(0)
                # Until somebody asks for a limit again.
                self._limit = int(self._env.info()["map_size"])

    def _open_again(self) -> None:
        """After a write of LMDB's own has failed, as on a full disk: it refuses everything from then on.

        Nothing is damaged: what was committed before is whole.
        """
        with self._ended:
            if self._ended.wait_for(lambda: self._active == 0, _RESIZE_SECONDS) and not self._retired:
                self._env.close()
                # If that fails, as where there are too many open files, the next one who wants it tries again.
                self._is_shut = True
                self._env = self._opened()
                self._is_shut = False

    def limit(self, n_bytes: int) -> None:
        """Let the file grow to this size and no further.

        For a disk that gets full: LMDB itself then says `MapFull` before the file takes what is to be left to others.

        Raises:
            StoreError: readers in this process didn't end in time.
        """
        self._set_size(_whole_pages(n_bytes))

    def resize(self, map_bytes: int) -> None:
        """Take another size for the map; what is in the file stays, also where it is longer than that.

        Raises:
            StoreError: readers in this process didn't end in time.
        """
        self._set_size(_whole_pages(map_bytes))
        self.map_bytes = _whole_pages(map_bytes)

    def _set_size(self, wanted: int) -> None:
        with self._ended:
            if wanted == self._limit:
                return
            if not self._ended.wait_for(lambda: self._active == 0, _RESIZE_SECONDS):
                raise StoreError(f"the map of {self.folder} can't be resized while it is read from")
            with _translated():
                self._env.set_mapsize(wanted)
            self._limit = wanted

    @contextmanager
    def read(self) -> Iterator[BlobReader]:
        """A snapshot. Keep it short: as long as it lives, no deleted page can be used again."""
        with self._begin() as txn:
            yield BlobReader(txn)

    def put(self, blobs: Iterable[tuple[BlobId, bytes | memoryview]]) -> None:
        """Write blobs in one transaction, durable on return.

        A name that is there already is written again: callers ask the index first, so this is rare, and it heals a
        leftover whose bytes have rotted.

        Raises:
            MapFull, DiskFull: nothing of this call was written.
        """
        with self._begin(write=True) as txn:
            for name, value in blobs:
                txn.put(name, value)

    def delete(self, names: Iterable[BlobId]) -> None:
        """Delete blobs in one transaction. Names that aren't there are passed over."""
        with self._begin(write=True) as txn:
            for name in names:
                txn.delete(name)

    def has_room(self, *sizes: int) -> bool:
        """Whether values of so many bytes each could be written now. None is: the attempt is given up.

        Pages that somebody still reads can't be used again. Readers end soon, or hang: then it is waited for them once.
        """
        if self._could_put(sizes):
            return True
        # Asked again also where nobody reads any more: the last one may have ended just now.
        return self._patience.until(lambda: self._could_put(sizes)) if self._is_read() else self._could_put(sizes)

    def _could_put(self, sizes: Sequence[int]) -> bool:
        try:
            with self._begin(write=True) as txn:
                for number, size in enumerate(sizes):
                    txn.put(_PROBE + number.to_bytes(4, "big"), bytes(size))
                txn.abort()
        except MapFull:
            return False
        return True

    def _is_read(self) -> bool:
        """Whether anybody, of any process, has a snapshot."""
        # One line a slot of the table, after a head: process, thread, and the snapshot, or "-" if it has none.
        return any(line.split()[-1].isdigit() for line in self._env.readers().splitlines()[1:])

    def settle(self) -> None:
        """Commit nothing much, so that pages freed by the last deletion can be used by the next write.

        LMDB reuses a freed page only two transactions later; without this, delete and then put is MapFull again.
        """
        with self._begin(write=True) as txn:
            txn.put(_PROBE, b"")
            txn.delete(_PROBE)
            self._env.reader_check()

    @property
    def used_bytes(self) -> int:
        """Bytes of pages that hold live data, B-tree included: how full the map is."""
        with _translated(), self._counted():
            stat = self._env.stat()
        return int(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        """How far the file has ever been filled. It doesn't shrink; freed pages in it are used again."""
        with _translated(), self._counted():
            return (int(self._env.info()["last_pgno"]) + 1) * PAGE_BYTES

    def __len__(self) -> int:
        with self.read() as reader:
            return len(reader)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the folder really occupies; a sparse file is longer than that."""
        return occupied_bytes(self.folder / DATA_FILE, self.folder / LOCK_FILE)

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        with _translated(), self._counted():
            self._env.sync(True)

    def forget_locks(self) -> None:
        """In a forked child: threads that aren't here may have held it, or read."""
        self._ended = Gate()
        self._active = 0

    def close(self) -> None:
        """Close it as soon as no transaction of this process runs any more. Nobody can begin one from now on."""
        with self._ended:
            self._retired = True
            self._close_if_left()

    def _close_if_left(self) -> None:
        if self._retired and self._active == 0:
            # Closing twice does nothing.
            self._env.close()


# LMDB met pages that can't be; each is raised instead of an assertion that would have ended the process.
_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
    lmdb.IncompatibleError,
    lmdb.ProblemError,
)
# What LMDB says when the disk is full. EIO too: it calls a write that fits only in part an I/O error, and that is how a
# disk usually gets full.
_NO_ROOM = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))


def footprint(stored_bytes: int) -> int:
    """Bytes that a value takes in the map: whole pages, the first with a header of 16 bytes."""
    return _whole_pages(stored_bytes + 16)


def _whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


@contextmanager
def _translated() -> Iterator[None]:
    """LMDB's errors as ours. What is no capacity error stays recognisable by its text."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise MapFull(f"the blobs' share of the byte budget is full: {error}") from error
    except _DAMAGED as error:
        raise DamagedFile(f"the blob store's file is damaged: {error}") from error
    except lmdb.Error as error:
        if any(sign in str(error) for sign in _NO_ROOM):
            raise DiskFull(f"no room on the disk for the blobs: {error}") from error
        raise StoreError(f"the blob store failed: {error}") from error
