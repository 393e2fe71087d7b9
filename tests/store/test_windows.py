"""Rows of a window: found by their keys, and by the tokens that they share with a path."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from entries import ROOT, block, key_of, store, token_bytes, windowed
from hypothesis import strategies as st

from kvkeep.store import windows
from kvkeep.store.check import Trouble, check
from kvkeep.store.engine import Connection
from kvkeep.store.errors import DamagedFile
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.repository import Repository
from kvkeep.store.windows import NewWindow, Window

NOWHERE = PrefixHash(b"?" * 32)


def stored(repository: Repository) -> list[Window]:
    with repository.rows() as connection:
        return list(windows.every(connection))


def new(*args: Sequence[int], skip: int = 0) -> NewWindow:
    row = windowed(*args, skip=skip).row
    assert isinstance(row, NewWindow)
    return row


def test_a_row_comes_back_as_it_was_added(repository: Repository) -> None:
    entry = windowed([1, 2, 3], skip=1, border=8)
    store(repository, [entry])
    (found,) = stored(repository)
    for field in ("key", "anchor", "path", "start", "n_tokens", "blob", "stored_bytes", "plain_bytes", "tokens"):
        assert getattr(found, field) == getattr(entry.row, field)
    assert (found.start, found.n_tokens, found.tokens) == (9, 2, token_bytes([2, 3]))


def test_only_stored_keys_are_found(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.store.schema.MANY", 1)  # more keys than one statement takes
    rows = [windowed([i]) for i in range(3)]
    store(repository, rows)
    keys = [new([i]).key for i in range(3)]
    with repository.rows() as connection:
        found = windows.by_keys(connection, [*keys, NOWHERE])
        assert windows.by_keys(connection, []) == {}
    assert {key: row.path for key, row in found.items()} == {key: token_bytes([i]) for i, key in enumerate(keys)}


def test_a_window_has_a_key_of_its_own_beside_the_node_of_the_same_tokens(repository: Repository) -> None:
    node, row = block([1, 2, 3, 4]), windowed([1, 2, 3, 4])
    store(repository, [node, row])
    assert stored(repository)[0].key == key_of(node)
    assert check(repository) == []


def test_a_slot_has_all_rows_behind_its_border_and_no_others(repository: Repository) -> None:
    store(repository, [windowed([1]), windowed([1, 5]), windowed([2]), windowed([1], anchor=NOWHERE, border=4)])
    with repository.rows() as connection:
        assert len(windows.slots(connection, [ROOT])) == 3
        assert [row.start for row in windows.slots(connection, [NOWHERE])] == [4]
        assert len(windows.slots(connection, [ROOT, NOWHERE, PrefixHash(b"!" * 32)])) == 4


def test_the_oldest_comes_first(repository: Repository) -> None:
    store(repository, [windowed([1]), windowed([2]), windowed([3])])
    first, second, third = stored(repository)
    with repository.index.write() as connection:
        for row, used in ((first, 2.0), (second, 3.0), (third, 1.0)):
            connection.exec_driver_sql("UPDATE window SET used = ? WHERE id = ?", (used, row.id))
    with repository.rows() as connection:
        assert [row.id for row in windows.oldest(connection, 2)] == [third.id, first.id]


def test_use_counts_and_refreshes(repository: Repository) -> None:
    store(repository, [windowed([1]), windowed([2])])
    first, second = stored(repository)
    repository.touch([second])
    repository.flush_touched()
    used = {row.id: row.used for row in stored(repository)}
    assert used[second.id] > used[first.id]


def test_the_same_row_twice_is_refused_and_nothing_is_lost(repository: Repository) -> None:
    store(repository, [windowed([1, 2])])
    with pytest.raises(DamagedFile, match="UNIQUE"):
        store(repository, [windowed([1, 2], skip=1)])
    assert len(stored(repository)) == 1
    with repository.writing() as writing:
        writing.sweep()


def test_a_removed_row_takes_its_blob_along(repository: Repository) -> None:
    store(repository, [windowed([1]), windowed([2])])
    with repository.writing() as writing:
        writing.remove(stored(repository)[:1])
    assert len(repository.blobs) == len(stored(repository)) == 1


def test_damage_in_a_window_is_found_and_removed(loose: Repository) -> None:
    store(loose, [windowed([1, 2, 3]), windowed([4])])
    victim = stored(loose)[0]
    loose.blobs.put([(victim.blob, b"rotten")])
    (finding,) = check(loose)
    assert (finding.trouble, finding.entry) == (Trouble.DAMAGE, victim)
    with loose.writing() as writing:
        assert writing.remove_damaged(stored(loose)) == 1
    assert check(loose) == []


@contextmanager
def rows_of(repository: Repository, paths: Sequence[Sequence[int]]) -> Iterator[Connection]:
    store(repository, [windowed(path) for path in paths])
    with repository.rows() as connection:
        yield connection
    with repository.writing() as writing:
        writing.remove(stored(repository))


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
