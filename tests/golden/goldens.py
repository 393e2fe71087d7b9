"""The golden stores, one of each revision: taken out of their archives, looked at, and used."""

import json
import sqlite3
import tarfile
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from synthetic import ATTENTION, HYBRID, RECURRENT, random_tokens, window_model

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store import pins
from kvkeep.store.check import check
from kvkeep.store.frame import TOKEN_BYTES
from kvkeep.store.opening import INDEX_FILE
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.schema import REVISION, setting

HERE = Path(__file__).parent
# Models of make.py, as the code of today makes their states.
MADE = {"dense": ATTENTION, "hybrid": HYBRID, "window": window_model(20), "recurrent": RECURRENT}
MODELS = {name: made.identity(name) for name, made in MADE.items()}


class Golden:
    """A golden store in a folder of its own.

    Args:
        revision: of its schema.
        folder: an empty one.
    """

    def __init__(self, revision: str, folder: Path) -> None:
        with tarfile.open(HERE / f"{revision}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        self.root = folder / "root"
        self.index = self.root / INDEX_FILE
        self.expected: dict[str, Any] = json.loads((folder / "expected.json").read_text("utf-8"))


def names() -> set[str]:
    """Revisions that have a golden store."""
    return {path.name.removesuffix(".tar.xz") for path in HERE.glob("*.tar.xz")}


def schema(index: Path) -> set[str]:
    """What a database consists of, as SQL."""
    with closing(sqlite3.connect(index)) as connection:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
        return {" ".join(sql.split()) for (sql,) in found}


def revision_of(index: Path) -> str:
    with closing(sqlite3.connect(index)) as connection:
        [(found,)] = connection.execute("SELECT version_num FROM alembic_version")
    return str(found)


@contextmanager
def opened(root: Path) -> Iterator[Repository]:
    """An open sound store with the schema of today."""
    repository = open_root(root)
    try:
        assert repository.index.revision() == REVISION
        assert repository.recovered == []
        assert [found.message for found in check(repository)] == []
        yield repository
        assert [found.message for found in check(repository)] == []
    finally:
        close_root(repository)


def use(golden: Golden, *, without: Collection[str] = (), pinned: bool = True) -> None:
    """Open it, find everything in it, save something new, and find all of that in the next life.

    Args:
        golden: a store of any known revision.
        without: models of which nothing is there any more.
        pinned: its pins are still there.
    """
    with opened(golden.root) as repository:
        _find_everything(repository, golden.expected, without, pinned)
        _save_more(repository)
    with opened(golden.root) as repository:
        _find_everything(repository, golden.expected, without, pinned)
        _find_more(repository)


def _find_everything(repository: Repository, expected: dict[str, Any], without: Collection[str], pinned: bool) -> None:
    with repository.rows() as connection:
        known = {row.name: row.value for row in connection.execute(setting.select())}
        found_pins = [np.frombuffer(pin.tokens, f"<i{TOKEN_BYTES}").tolist() for pin in pins.every(connection)]
    assert known.items() >= expected["settings"].items()
    assert repository.capacity_bytes == expected["settings"]["capacity_bytes"]
    assert found_pins == (expected["pinned"] if pinned else [])
    for chat in expected["chats"]:
        cache, tokens = PrefixCache(repository, MODELS[chat["model"]]), chat["tokens"]
        found = cache.match(tokens)
        assert found.length == (0 if chat["model"] in without else len(tokens)), chat["model"]
        if found.length:
            state = cache.restore(found, tokens).state
            assert blake2b(state.tobytes(), digest_size=16).hexdigest() == chat["digest"], chat["model"]
    space = PrefixCache(repository, MODELS["dense"]).namespace
    assert space is not None
    assert [space.prefill_rate, space.restore_rate] == expected["rates"]


_MORE = random_tokens(45, seed=77)


def _save_more(repository: Repository) -> None:
    for name, made in MADE.items():
        points = [made.point(_MORE[:40])] if made.tensor_bytes else []
        PrefixCache(repository, MODELS[name], block_tokens=16).save(_MORE, made.state(_MORE), points=points)


def _find_more(repository: Repository) -> None:
    for name, made in MADE.items():
        cache = PrefixCache(repository, MODELS[name])
        found = cache.match(_MORE)
        assert found.length == len(_MORE), name
        assert np.array_equal(cache.restore(found, _MORE).state, made.state(_MORE)), name
