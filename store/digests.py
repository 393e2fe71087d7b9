"""Rows of `file_digest`: hashes of model files, valid as long as the file's stat says that it is the same file."""

import os
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, select
from sqlalchemy.dialects.sqlite import insert

from kvkeep.store.schema import file_digest

_INT64 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one file from another without reading it. A rewrite changes ctime even where mtime is put back."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "FileStamp":
        """The stamp of a file as it is now.

        Raises:
            OSError: there is no such file.
        """
        real = os.path.realpath(path)
        found = os.stat(real)
        # Columns hold text that is UTF-8, and signed 64 bits: some file systems have names and inodes beyond.
        name = os.fsencode(real).decode(errors="backslashreplace")
        return cls(name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino & _INT64)


def get(connection: Connection, stamp: FileStamp) -> bytes | None:
    """The digest of the file with exactly this stamp, if it is remembered."""
    wanted = [file_digest.c[name] == value for name, value in asdict(stamp).items()]
    found: bytes | None = connection.execute(select(file_digest.c.digest).where(*wanted)).scalar()
    return found


def paths(connection: Connection) -> list[str]:
    """Every file whose digest is remembered, whether or not it is still the same."""
    return list(connection.execute(select(file_digest.c.path)).scalars())


def put(connection: Connection, stamp: FileStamp, digest: bytes) -> None:
    values = asdict(stamp) | {"digest": digest}
    connection.execute(insert(file_digest).values(values).on_conflict_do_update(index_elements=["path"], set_=values))
