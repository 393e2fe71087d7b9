"""One open repository per root and process.

LMDB forbids a second environment on the same folder, and closing any descriptor of an open SQLite file drops the
POSIX locks of all of them; so whoever wants a root in this process gets the same one.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvkeep.store.repository import Repository
from kvkeep.store.space import valid_capacity

_open: dict[Path, tuple[Repository, int]] = {}
# Kept, because forgetting one would close its lock's file.
_of_parents: list[Repository] = []
_lock = threading.Lock()


def _forked() -> None:
    """In a forked child: another thread of the parent may have been opening or closing a root at that moment."""
    global _lock
    _lock = threading.Lock()
    for repository, _ in _open.values():
        repository.forget_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@contextmanager
def _forked_registry_is_empty() -> Iterator[None]:
    with _lock:
        for path, (repository, _) in list(_open.items()):
            if repository._pid != os.getpid():
                repository.abandon()
                _of_parents.append(repository)
                del _open[path]
        yield


def open_root(path: Path, capacity_bytes: int | None = None) -> Repository:
    """The repository at `path`, shared by everyone in this process. Give it back with `close_root`.

    Args:
        path: the root folder, created if missing.
        capacity_bytes: the byte budget; None keeps the one that the root remembers, or 4 GiB. Another budget than that
            of those who have it open holds from the next open on.
    """
    if capacity_bytes is not None:
        valid_capacity(capacity_bytes)
    real = Path(os.path.realpath(path))
    with _forked_registry_is_empty():
        repository, users = _open.get(real, (None, 0))
        if repository is None:
            repository = Repository(real, capacity_bytes)
        else:
            # The map of an open environment can't change its size under those who use it.
            repository.agree_on_capacity(capacity_bytes)
        _open[real] = (repository, users + 1)
        return repository


def close_root(repository: Repository) -> None:
    """Give a repository back; the last one to do so closes it."""
    with _forked_registry_is_empty():
        found, users = _open.get(repository.path, (None, 0))
        if found is not repository:
            return
        if users > 1:
            _open[repository.path] = (repository, users - 1)
            return
        del _open[repository.path]
        repository.close()
