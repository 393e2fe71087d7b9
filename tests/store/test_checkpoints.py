"""Checkpoints: found by position and prefix, never for another sequence."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from entries import ROOT, opaque, recurrent, store, token_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvkeep.store import checkpoints
from kvkeep.store.check import check
from kvkeep.store.checkpoints import Checkpoint, NewCheckpoint
from kvkeep.store.errors import DamagedFile
from kvkeep.store.frame import Kind
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.repository import Repository
from kvkeep.store.writing import NewEntry


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


def test_the_highest_position_comes_first(repository: Repository) -> None:
    store(repository, [opaque([1]), opaque([1, 2, 3]), opaque([1, 2])])
    with repository.rows() as connection:
        found = list(checkpoints.along(connection, ROOT, token_bytes([1, 2, 3, 4]), 0))
    assert [point.pos for point in found] == [3, 2, 1]


def test_borders_behind_which_there_is_something(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.store.schema.MANY", 1)  # more borders than one statement takes
    store(repository, [opaque([1]), opaque([1, 2, 3])])
    nowhere = PrefixHash(b"?" * 32)
    with repository.rows() as connection:
        assert checkpoints.anchors(connection, [nowhere, ROOT], 0) == {ROOT}
        assert checkpoints.anchors(connection, [nowhere], 0) == checkpoints.anchors(connection, [], 0) == set()


def test_another_sequence_finds_nothing(repository: Repository) -> None:
    entry = opaque([1, 2])
    store(repository, [entry])
    row = at(entry)
    with repository.rows() as connection:
        assert checkpoints.anchors(connection, [ROOT], 1) == set()
        assert list(checkpoints.along(connection, ROOT, row.path, 1)) == []
        assert len(list(checkpoints.along(connection, ROOT, row.path, 0))) == 1
        assert checkpoints.find(connection, row.kind, 1, row.pos, row.prefix) is None
        assert checkpoints.find(connection, row.kind, 0, row.pos, row.prefix) is not None
        assert checkpoints.find(connection, row.kind, 0, row.pos + 1, row.prefix) is None
        assert checkpoints.find(connection, Kind.BLOCK, 0, row.pos, row.prefix) is None


def test_the_same_checkpoint_twice_is_refused_and_nothing_is_lost(repository: Repository) -> None:
    entry = opaque([1, 2])
    store(repository, [entry])
    with pytest.raises(DamagedFile, match="UNIQUE"):
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


# -- along a path ------------------------------------------------------------------------------------------------------

# Bytes whose order isn't that of the numbers, and tokens that share some bytes and not others.
TOKENS = [0, 1, 256, 257, 65536, -1, 2**31 - 1]
paths = st.lists(st.sampled_from(TOKENS), max_size=5).map(tuple)


@given(present=st.sets(paths, max_size=14), rest=st.lists(st.sampled_from(TOKENS), max_size=7))
@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_along_gives_every_beginning_of_a_path_the_deepest_first(
    repository: Repository, present: set[tuple[int, ...]], rest: Sequence[int]
) -> None:
    store(repository, [recurrent(path) for path in sorted(present)])
    with repository.rows() as connection:
        found = [tuple(memoryview(point.path).cast("i")) for point in checkpoints.along(connection, ROOT, token_bytes(rest), 0)]
        assert list(checkpoints.along(connection, PrefixHash(b"?" * 32), token_bytes(rest), 0)) == []
    with repository.writing() as writing:
        writing.remove(stored(repository))
    assert found == sorted((path for path in present if path == tuple(rest[: len(path)])), key=len, reverse=True)


def test_along_is_quick_where_many_chats_part(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    store(repository, [recurrent([5, 5, i]) for i in range(300)] + [recurrent([5, 5])])
    with repository.rows() as connection:
        asked = 0
        real = type(connection).execute

        def counted(*args: object) -> object:
            nonlocal asked
            asked += 1
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(type(connection), "execute", counted)
        found = list(checkpoints.along(connection, ROOT, token_bytes([5, 5, 1000, 7]), 0))
        monkeypatch.undo()
    assert [point.path for point in found] == [token_bytes([5, 5])]
    assert asked < 10


def test_along_gives_every_kind_at_a_position_and_no_other_sequences(repository: Repository) -> None:
    store(repository, [recurrent([1, 2]), opaque([1, 2]), recurrent([1, 2], seq_id=3, payload=b"of another"), recurrent([])])
    with repository.rows() as connection:
        mine = list(checkpoints.along(connection, ROOT, token_bytes([1, 2, 3]), 0))
        theirs = list(checkpoints.along(connection, ROOT, token_bytes([1, 2, 3]), 3))
    assert [point.kind for point in mine] == [Kind.RECURRENT, Kind.OPAQUE, Kind.RECURRENT]
    assert [(point.seq_id, point.pos) for point in theirs] == [(3, 2)]


def test_at_a_border_stand_those_of_every_sequence(repository: Repository) -> None:
    store(repository, [recurrent([1]), recurrent([1, 2], seq_id=3), recurrent([9], anchor=PrefixHash(b"?" * 32))])
    with repository.rows() as connection:
        assert [(point.seq_id, point.pos) for point in checkpoints.at(connection, ROOT)] == [(0, 1), (3, 2)]
    assert check(repository) == []
