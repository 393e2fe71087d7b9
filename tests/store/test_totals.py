"""Totals of a root: sums that every process adds to."""

import time
from pathlib import Path

from kvkeep.store import settings, totals
from kvkeep.store.registry import close_root, open_root


def test_totals_add_up_and_leave_settings_alone(root: Path) -> None:
    repository = open_root(root, 1 << 26)
    try:
        with repository.index.write() as connection:
            totals.add(connection, {"requests": 2, "hits": 0, "saved_ms": -5})
        with repository.index.write() as connection:
            totals.add(connection, {"requests": 3, "saved_ms": 7, "written_bytes": 1 << 40})
        with repository.rows() as connection:
            found = totals.every(connection)
            assert settings.capacity(connection) == 1 << 26
        assert abs(found.pop("since") - time.time()) < 600
        assert found == {"requests": 5, "saved_ms": 2, "written_bytes": 1 << 40}
    finally:
        close_root(repository)


def test_nothing_new_writes_nothing(root: Path) -> None:
    repository = open_root(root)
    try:
        with repository.index.write() as connection:
            totals.add(connection, {"requests": 0})
            assert totals.every(connection) == {}
    finally:
        close_root(repository)
