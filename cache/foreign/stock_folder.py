"""The folder of llama-cpp-python's own `LlamaDiskCache`: a diskcache with pickled `LlamaState`s.

Read without the library that wrote it, which would also write: `cache.db` is SQLite, its table `Cache` has a row for each
state, and the pickles are in rows or, from 32 KiB on, in files beside it. The folder may be in use, or write-protected.
"""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from kvkeep.cache.foreign.instructions import Span
from kvkeep.cache.foreign.item import Found, Item, as_tokens, check_size, opened, reading
from kvkeep.cache.foreign.unpickle import Array, LlamaState, Payload, unpickled, unpickled_numbers
from kvkeep.cache.layout import Bytes
from kvkeep.cache.state import Form
from kvkeep.store.errors import StoreError, TruncatedState, UnknownLayout

DATABASE = "cache.db"
_COLUMNS = {"key", "raw", "mode", "filename", "value"}
# diskcache.core.MODE_PICKLE
_PICKLE = 4
# Bytes of a key or a value in a row; the larger ones are in files. A key has two to three bytes a token.
_MAX_CELL = 256 << 20
# How long a program that writes at this moment is waited for, in seconds.
_PATIENCE = 20.0
# The driver can't even say what is wrong where the message quotes a name of the schema that is no UTF-8.
_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)


def is_stock_folder(folder: Path) -> bool:
    """Whether a folder looks like one."""
    return (folder / DATABASE).is_file()


def found_in(folder: Path) -> list[Found]:
    """The states of a folder.

    Raises:
        UnknownLayout: it isn't the folder of a `LlamaDiskCache`.
        UsageError, StoreError: it can't be read.
    """
    with reading(folder), _database(folder) as database:
        rows = _rows(database, "SELECT rowid, filename, length(value) FROM Cache ORDER BY rowid")
    return [_found(folder, *row) for row in rows]


def _found(folder: Path, row: int, filename: Any, n_inline: int | None) -> Found:
    size = n_inline or 0
    if isinstance(filename, str):
        # One that can't be looked at is an error when its time comes.
        try:
            size = (folder / filename).lstat().st_size
        except (OSError, ValueError):
            size = 0
    return Found(f"{folder}, state {row}", size, lambda at_most: _read(folder, row, at_most))


def _read(folder: Path, row: int, at_most: int) -> Item:
    question = "SELECT key, raw, mode, filename, value FROM Cache WHERE rowid = ?"
    with reading(folder), _database(folder) as database:
        rows = _rows(database, question, row)
    if not rows:
        raise StoreError("it's gone: a program that uses the folder has taken it")
    key, raw, mode, filename, value = rows[0]
    if raw or mode != _PICKLE or not isinstance(key, bytes):
        raise UnknownLayout("it is no saved state: a LlamaDiskCache pickles both key and value")
    with _pickle(folder, filename, value) as (file, size):
        found = unpickled(file, size)
        if not isinstance(found, LlamaState):
            raise UnknownLayout("what is pickled is no LlamaState")
        tokens = _tokens(found)
        _compare(unpickled_numbers(key), tokens)
        return Item(as_tokens(tokens), _state(found, at_most), Form.WHOLE)


def _tokens(found: LlamaState) -> npt.NDArray[np.integer]:
    """What was decoded; the key may have one token more, the last one that was sampled."""
    ids, count = found.fields.get("input_ids"), _number(found, "n_tokens")
    if not isinstance(ids, Array):
        raise UnknownLayout("the LlamaState has no input_ids, as those of very old versions")
    numbers = ids.numbers("input_ids")
    if not 0 <= count <= numbers.size:
        raise UnknownLayout(f"the LlamaState says {count} tokens and has {numbers.size}")
    return numbers[:count]


def _compare(key: npt.NDArray[np.int64], tokens: npt.NDArray[np.integer]) -> None:
    both = min(key.size, tokens.size)
    differ = np.flatnonzero(key[:both] != tokens[:both])
    if differ.size:
        raise UnknownLayout(f"its key and its input_ids say different tokens at position {differ[0]}: one of them is wrong")


def _state(found: LlamaState, at_most: int) -> Bytes:
    payload, size = found.fields.get("llama_state"), _number(found, "llama_state_size")
    if not isinstance(payload, Payload):
        raise UnknownLayout("the llama_state of the LlamaState are no bytes")
    # Whoever loads it hands over so many bytes, however many there are.
    check_size(size, at_most)
    if size > payload.size:
        raise TruncatedState(f"the LlamaState says {size} bytes of state and has {payload.size}")
    if isinstance(payload, Span):
        return Span(payload.source, payload.at, size).load()
    # A byte is one or two characters in a text.
    check_size(payload.size // 6, at_most)
    data = payload.load()
    if size > data.size:
        raise TruncatedState(f"the LlamaState says {size} bytes of state and has {data.size}")
    return data[:size]


def _number(found: LlamaState, name: str) -> int:
    value = found.fields.get(name)
    if isinstance(value, Array) and value.shape == ():
        value = int(value.numbers(name)[0])
    if type(value) is not int or value < 0:
        raise UnknownLayout(f"the {name} of the LlamaState is no number")
    return value


@contextmanager
def _pickle(folder: Path, filename: Any, value: Any) -> Iterator[tuple[BinaryIO, int]]:
    """The pickle of a row, which is in it or in a file."""
    if filename is None:
        if not isinstance(value, bytes):
            raise UnknownLayout("its row names no file and has no value")
        yield BytesIO(value), len(value)
        return
    with opened(_inside(folder, filename), follow=False) as found:
        yield found


def _inside(folder: Path, filename: Any) -> Path:
    """The file that a row names. It is really in the folder: no link, no `..` and no path of its own leads elsewhere."""
    if not isinstance(filename, str) or "\0" in filename:
        raise UnknownLayout("its row names no file")
    real = os.path.realpath(folder)
    path = os.path.join(real, filename)
    if os.path.isabs(filename) or os.path.normpath(path) != path or os.path.realpath(path) != path:
        raise UnknownLayout(f"its file {filename!r} isn't a file of this folder, but leads out of it or is a link")
    return Path(path)


# -- the database ------------------------------------------------------------------------------------------------------


@contextmanager
def _database(folder: Path) -> Iterator[sqlite3.Connection]:
    """The database for reading, with a look at whether it is one.

    Where nobody uses it, it has no files beside it, and is opened as one that nobody changes: otherwise SQLite makes such
    files, leaves them there, and can't read a folder in which it may not. Where there are some and they can't be used, it
    is read from a copy.
    """
    with ExitStack() as stack:
        path = folder / DATABASE
        with opened(path) as (file, _):
            if file.read(16) != b"SQLite format 3\0":
                raise UnknownLayout(f"{path} is no SQLite database, so this isn't the folder of a LlamaDiskCache")
        beside = [name for ending in ("-wal", "-journal") if (name := folder / f"{DATABASE}{ending}").exists()]
        try:
            connection = _read_only(stack, path, beside)
        except _UNREADABLE as error:
            raise _not_one(path, error) from error
        yield connection


def _read_only(stack: ExitStack, path: Path, beside: list[Path]) -> sqlite3.Connection:
    if not beside:
        return _connected(stack, path, "mode=ro&immutable=1")
    try:
        return _connected(stack, path, "mode=ro")
    except sqlite3.OperationalError:
        return _connected(stack, _copied(stack, path, *beside), "mode=rw")


def _connected(stack: ExitStack, path: Path, how: str) -> sqlite3.Connection:
    url = f"file:{quote(os.fsencode(path.absolute()))}?{how}"
    connection = stack.enter_context(closing(sqlite3.connect(url, uri=True, timeout=_PATIENCE, isolation_level=None)))
    # A name that is no UTF-8 should cost its own row, not all of them.
    connection.text_factory = lambda text: text.decode(errors="surrogateescape")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_CELL)
    connection.execute("PRAGMA trusted_schema = OFF")
    # A view, a virtual table or a computed column of this name could be any amount of work.
    kind = connection.execute("SELECT type, sql FROM sqlite_schema WHERE name = 'Cache'").fetchone()
    columns = {name: hidden for _, name, *_, hidden in connection.execute("PRAGMA table_xinfo(Cache)")}
    is_table = kind is not None and kind[0] == "table" and str(kind[1]).upper().startswith("CREATE TABLE")
    if not is_table or not columns.keys() >= _COLUMNS or any(columns.values()):
        raise UnknownLayout(f"{path} has no table Cache as diskcache makes it, so this isn't the folder of a LlamaDiskCache")
    return connection


def _copied(stack: ExitStack, *files: Path) -> Path:
    """The database and what stands beside it, in a folder of ours."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvkeep-")))
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return folder / files[0].name


def _rows(database: sqlite3.Connection, question: str, *values: Any) -> list[Any]:
    try:
        return database.execute(question, values).fetchall()
    except _UNREADABLE as error:
        raise _not_one(Path(DATABASE), error) from error


def _not_one(path: Path, error: Exception) -> UnknownLayout:
    return UnknownLayout(f"{path} can't be read as the database of a LlamaDiskCache: {error}")
