"""Beginnings that were left out: the newest few of each model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from kvkeep.store import left_out
from kvkeep.store.left_out import MAX_REMEMBERED, Beginning
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.schema import setting


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    opened = open_root(tmp_path / "root")
    yield opened
    close_root(opened)


def beginning(number: int) -> Beginning:
    return Beginning(number + 1, number.to_bytes(8, "big"))


def test_the_newest_of_each_model_are_remembered(repository: Repository) -> None:
    with repository.index.write() as connection:
        for number in range(MAX_REMEMBERED + 5):
            left_out.add(connection, 1, beginning(number))
        left_out.add(connection, 11, beginning(0))
        # Met again, it is the newest.
        left_out.add(connection, 1, beginning(5))
        left_out.add(connection, 1, beginning(1000))
        found = left_out.of(connection, 1)
    assert found[:2] == [beginning(1000), beginning(5)]
    assert len(found) == MAX_REMEMBERED
    assert beginning(6) not in found
    with repository.rows() as connection:
        assert left_out.of(connection, 11) == [beginning(0)]


def test_those_of_one_model_are_forgotten(repository: Repository) -> None:
    with repository.index.write() as connection:
        left_out.add(connection, 1, beginning(3))
        left_out.add(connection, 2, beginning(3))
        left_out.clear(connection, 1)
        assert left_out.of(connection, 1) == []
        assert left_out.of(connection, 2) == [beginning(3)]


@pytest.mark.parametrize("name", ["left_out.1.", "left_out.1.x.00", "left_out.1.5.zz", "left_out.1.-5.00", "left_out.1.5.00.7"])
def test_a_damaged_one_is_none(repository: Repository, name: str) -> None:
    with repository.index.write() as connection:
        left_out.add(connection, 1, beginning(3))
        connection.execute(update(setting).where(setting.c.name.startswith("left_out.1.")).values(name=name))
        assert left_out.of(connection, 1) == []
