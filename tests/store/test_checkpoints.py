"""Checkpoints: found by position and prefix, never for another sequence."""

from dataclasses import replace

import pytest
from entries import ROOT, opaque, store

from kvkeep.store import checkpoints
from kvkeep.store.checkpoints import Checkpoint, NewCheckpoint
from kvkeep.store.errors import StoreError
from kvkeep.store.frame import Kind
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.repository import NewEntry, Repository


def stored(repository: Repository) -> list[Checkpoint]:
    with repository.rows() as connection:
        return list(checkpoints.every(connection))


def at(entry: NewEntry) -> NewCheckpoint:
    assert isinstance(entry.row, NewCheckpoint)
    return entry.row


def test_a_checkpoint_comes_back_as_it_was_added(repository: Repository) -> None:
    entry = opaque([1, 2, 3])
    store(repository, [entry])
    (found,) = stored(repository)
    for field in ("kind", "seq_id", "pos", "prefix", "anchor", "path", "blob", "stored_bytes", "plain_bytes"):
        assert getattr(found, field) == getattr(entry.row, field)


def test_the_highest_position_comes_first(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MANY", 1)  # more anchors than one statement takes
    store(repository, [opaque([1]), opaque([1, 2, 3]), opaque([1, 2])])
    with repository.rows() as connection:
        found = checkpoints.by_anchors(connection, [PrefixHash(b"?" * 32), ROOT], 0)
        assert checkpoints.by_anchors(connection, [], 0) == []
    assert [point.pos for point in found] == [3, 2, 1]


def test_another_sequence_finds_nothing(repository: Repository) -> None:
    entry = opaque([1, 2])
    store(repository, [entry])
    row = at(entry)
    with repository.rows() as connection:
        assert checkpoints.by_anchors(connection, [ROOT], 1) == []
        assert checkpoints.find(connection, row.kind, 1, row.pos, row.prefix) is None
        assert checkpoints.find(connection, row.kind, 0, row.pos, row.prefix) is not None
        assert checkpoints.find(connection, row.kind, 0, row.pos + 1, row.prefix) is None
        assert checkpoints.find(connection, Kind.BLOCK, 0, row.pos, row.prefix) is None


def test_the_same_checkpoint_twice_is_refused_and_nothing_is_lost(repository: Repository) -> None:
    entry = opaque([1, 2])
    store(repository, [entry])
    with pytest.raises(StoreError, match="UNIQUE"):
        store(repository, [entry])
    assert len(stored(repository)) == 1


def test_the_oldest_comes_first(repository: Repository) -> None:
    store(repository, [opaque([1]), opaque([2]), opaque([3])])
    first, second, third = stored(repository)
    with repository.index.write() as connection:
        for point, used in ((first, 2.0), (second, 3.0), (third, 1.0)):
            connection.exec_driver_sql("UPDATE checkpoint SET used = ? WHERE id = ?", (used, point.id))
    with repository.rows() as connection:
        assert [point.id for point in checkpoints.oldest(connection, 2)] == [third.id, first.id]


def test_unknown_kind_in_a_row_is_read_and_left_to_verification(repository: Repository) -> None:
    store(repository, [opaque([1])])
    with repository.index.write() as connection:
        connection.exec_driver_sql("UPDATE checkpoint SET kind = 99")
    (found,) = stored(repository)
    assert found.kind == 99  # type: ignore[comparison-overlap]
    with repository.writing() as writing:
        assert writing.remove_damaged([found, replace(found, id=77)]) == 1
