"""What the layer's own tests run under it: `python scripts.py NAME ROOT`."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread

import faults
import lmdb

ROWS = 8
_VALUE = 3000
_MAP_BYTES = 1 << 20


def value_of(number: int) -> bytes:
    """Long enough that some rows fill more than a page."""
    return number.to_bytes(2, "big") * (_VALUE // 2)


def _announce(number: int) -> None:
    """Say that a transaction is committed, and after which operation."""
    print(number, faults.count(), flush=True)


def files(root: Path) -> None:
    """Every call that the layer knows, as Python reaches it: relative names, copies of descriptors, removed files."""
    os.chdir(root)
    os.mkdir("folder")
    descriptor = os.open("folder/../folder/file", os.O_CREAT | os.O_RDWR, 0o640)
    os.write(descriptor, b"one " * 300)
    copy = os.dup(descriptor)
    os.close(descriptor)
    os.pwrite(copy, b"TWO", 700)
    os.writev(copy, [b"three ", b"four"])
    os.pwritev(copy, [b"five ", b"six"], 100)
    os.fsync(copy)
    folder = os.open("folder", os.O_RDONLY)
    log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_DSYNC, 0o600, dir_fd=folder)
    os.write(log, b"seven\n")
    os.write(log, b"eight\n")
    os.fsync(folder)
    os.rename("log", "log.1", src_dir_fd=folder, dst_dir_fd=folder)
    os.write(log, b"nine\n")
    os.ftruncate(copy, 600)
    os.posix_fallocate(copy, 0, 2000)
    os.truncate("folder/file", 1500)
    os.fdatasync(copy)
    shutil.copyfile("folder/file", "copied")
    os.replace("copied", "folder/log.1")
    Path("more/and more").mkdir(parents=True)
    Path("more/and more/text").write_text("ten")
    Path("more/and more/text").write_text("10")
    os.rename("more", "less")
    os.unlink("folder/file")
    os.write(copy, b"by nobody's name")
    shutil.rmtree("less/and more")
    Path("empty").touch()


def threads(root: Path) -> None:
    """Several write at a time."""

    def write(name: str) -> None:
        with (root / name).open("wb", buffering=0) as file:
            for number in range(100):
                file.write(b"%d\n" % number)

    many = [Thread(target=write, args=(f"{number}",)) for number in range(8)]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()


def others(root: Path) -> None:
    """Processes that aren't this one: a program, and a fork."""
    subprocess.run([sys.executable, "-c", f"open({str(root / 'program')!r}, 'w').write('x')"], check=True)
    if (child := os.fork()) == 0:
        (root / "fork").write_text("x")
        os._exit(0)
    os.waitpid(child, 0)


def synced(root: Path) -> None:
    """Files that are durable, of which a copy is made beside the root, and then much that isn't."""
    (root / "folder").mkdir()
    for name in ("one", "folder/two"):
        with (root / name).open("wb") as file:
            file.write(os.urandom(5000))
            file.flush()
            os.fsync(file.fileno())
    for folder in (root / "folder", root):
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.copytree(root, root.with_name("synced"))
    with (root / "one").open("r+b") as file:
        file.write(b"pending " * 1000)
        file.truncate(100)
    (root / "folder" / "two").unlink()
    (root / "three").write_bytes(b"pending")
    (root / "three").rename(root / "four")


def sqlite(root: Path, mode: str) -> None:
    """Rows, one a transaction, with some checkpoints on the way."""
    connection = sqlite3.connect(root / "rows.sqlite3", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={mode}")
    connection.execute("PRAGMA wal_autocheckpoint=8")
    connection.execute("CREATE TABLE entry (number INTEGER PRIMARY KEY, value BLOB)")
    for number in range(ROWS):
        connection.execute("INSERT INTO entry VALUES (?, ?)", (number, value_of(number)))
        _announce(number)
    connection.close()


def blobs(root: Path, *, sync: bool) -> None:
    """The same in LMDB."""
    with lmdb.open(str(root / "blobs"), map_size=_MAP_BYTES, sync=sync) as environment:
        for number in range(ROWS):
            with environment.begin(write=True) as txn:
                txn.put(b"%d" % number, value_of(number))
            _announce(number)


def everything(root: Path) -> None:
    """All of it, after some that isn't counted."""
    (root / "before").write_text("not counted")
    descriptor = os.open(root / "early", os.O_CREAT | os.O_WRONLY | os.O_DSYNC)
    faults.arm()
    os.write(descriptor, b"counted")
    files(root)
    sqlite(root, "FULL")
    blobs(root, sync=True)
    assert faults.count() > 60


def full(root: Path) -> None:
    """Write with everything that writes, after it was opened; say what failed and how."""
    file = os.open(root / "file", os.O_CREAT | os.O_WRONLY)
    connection = sqlite3.connect(root / "rows.sqlite3", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE entry (number INTEGER PRIMARY KEY)")
    environment = lmdb.open(str(root / "blobs"), map_size=_MAP_BYTES)

    def put() -> None:
        with environment.begin(write=True) as txn:
            txn.put(b"key", b"value")

    attempts: dict[str, Callable[[], object]] = {
        "write": lambda: print("wrote", os.write(file, b"12345678")),
        "grow": lambda: os.truncate(root / "file", 1 << 16),
        "shrink": lambda: os.truncate(root / "file", 0),
        "create": lambda: (root / "new").touch(),
        "mkdir": lambda: (root / "folder").mkdir(),
        "fsync": lambda: os.fsync(file),
        "sqlite": lambda: connection.execute("INSERT INTO entry VALUES (1)"),
        "lmdb": put,
    }
    faults.arm()
    for name, attempt in attempts.items():
        try:
            attempt()
        except (OSError, sqlite3.Error, lmdb.Error) as error:
            said = error.errno if isinstance(error, OSError) else error
            print(f"{name}: {type(error).__module__}.{type(error).__name__}: {said}")


def rows_in(root: Path) -> None:
    """Which rows are there: a line for each folder in `root`. Damage is said; it may also end the process."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for folder in sorted(root.iterdir()):
        print(folder.name, "began")
        try:
            found = [number for number, value in sorted(_read(folder).items()) if value == value_of(number)]
        except (sqlite3.Error, lmdb.Error) as error:
            print(folder.name, f"damaged: {error}")
        else:
            print(folder.name, *found)


def _read(folder: Path) -> dict[int, bytes]:
    if (folder / "blobs").is_dir():
        with lmdb.open(str(folder / "blobs"), map_size=_MAP_BYTES) as environment, environment.begin() as txn:
            return {int(key): value for key, value in txn.cursor()}
    if not (folder / "rows.sqlite3").exists():
        return {}
    connection = sqlite3.connect(folder / "rows.sqlite3")
    connection.execute("PRAGMA synchronous=OFF")
    try:
        (said,) = connection.execute("PRAGMA integrity_check").fetchone()
        if said != "ok":
            raise sqlite3.DatabaseError(said)
        if connection.execute("SELECT * FROM sqlite_master").fetchone() is None:
            return {}
        return dict(connection.execute("SELECT number, value FROM entry"))
    finally:
        connection.close()


SCRIPTS: dict[str, Callable[[Path], None]] = {
    "files": files,
    "threads": threads,
    "others": others,
    "synced": synced,
    "everything": everything,
    "full": full,
    "rows": rows_in,
    "sqlite full": partial(sqlite, mode="FULL"),
    "sqlite off": partial(sqlite, mode="OFF"),
    "lmdb": partial(blobs, sync=True),
    "lmdb unsynced": partial(blobs, sync=False),
}


if __name__ == "__main__":
    SCRIPTS[sys.argv[1]](Path(sys.argv[2]))
