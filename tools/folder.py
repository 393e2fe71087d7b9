"""Opening a store for a command. Looking never creates one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.store.errors import NotARoot

if TYPE_CHECKING:
    from kvkeep.store.repository import Repository


@contextmanager
def opened(path: Path, *, create: bool = False) -> "Iterator[Repository | None]":
    """The store at `path`, or None if that folder doesn't exist or holds none.

    Args:
        path: the folder.
        create: make a store there instead, because something is to be written into it.

    Raises:
        NotARoot: the path is a file, or can't be read.
    """
    from kvkeep.store.registry import close_root, open_root  # sqlalchemy takes 0.15 s to import

    if not holds_a_store(path) and not create:
        yield None
        return
    repository = open_root(path)
    try:
        yield repository
    finally:
        close_root(repository)


def nothing_there(path: Path) -> str:
    """The sentence about a path at which `opened` found no store."""
    return f"{path} {'holds no kvkeep store yet' if path.exists() else 'does not exist yet'}: nothing is kept there."


def holds_a_store(path: Path) -> bool:
    """Whether there is a store at `path`.

    Raises:
        NotARoot: the path is a file, or can't be read.
    """
    from kvkeep.store.opening import INDEX_FILE

    try:
        if path.exists() and not path.is_dir():
            raise NotARoot(f"{path} is a file; a folder is needed")
        return (path / INDEX_FILE).exists()
    except PermissionError as error:
        raise NotARoot(f"{path} can't be read by this user") from error
