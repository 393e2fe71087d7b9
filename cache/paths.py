"""Where the cache folder is. The one home of the platformdirs package."""

import os
from pathlib import Path

import platformdirs

from kvkeep.store.errors import UsageError

VARIABLE = "KVKEEP_PATH"


def default_root() -> Path:
    """`KVKEEP_PATH`, or `kvkeep` in the user's cache folder.

    Raises:
        UsageError: the variable begins with a `~` of a user that doesn't exist.
    """
    named = os.environ.get(VARIABLE, "").strip()
    return _expanded(named) if named else platformdirs.user_cache_path("kvkeep", appauthor=False)


def resolve_root(path: str | os.PathLike[str] | None) -> Path:
    """The folder that an argument names, or the default one.

    Raises:
        UsageError: it names nothing.
    """
    if path is None:
        return default_root()
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(f"path names a folder, {path!r} doesn't")
    return _expanded(path)


def _expanded(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"path names a folder, {os.fspath(path)!r} doesn't: {error}") from error
